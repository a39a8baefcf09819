//! Client and server in one process, on threads.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{
    ABORT, HASH, Name, Running, STRATEGIES, answer, create, open, request, requests_sent,
};
use pie_ring::{
    CallError, Client, ClientConfig, ExitGuard, HeaderError, Publish, RegionError, RegionLayout,
    Server, Wait,
};

const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn every_strategy_echoes() {
    for wait in STRATEGIES {
        let name = Name::new();
        let running = Running::start(create(&name).unwrap(), wait);
        let client = open(&name, wait, LIMIT);
        for len in [0, 1, 63, 64, 4095, 4096].into_iter().cycle().take(120) {
            let request: Vec<u8> = (0..len).map(|i: u32| (i * 7) as u8).collect();
            let response = client.call(&request, <[u8]>::to_vec).unwrap();
            assert_eq!(response, answer(&request), "{wait:?}, {len} bytes");
        }
        drop(running);
    }
}

#[test]
fn a_request_is_made_in_its_slot() {
    let name = Name::new();
    let running = Running::start(create(&name).unwrap(), Wait::Park);
    let client = open(&name, Wait::Park, LIMIT);
    // More rounds than slots, so that every slot has refused and served.
    for round in 0..9u8 {
        let mut request = client.acquire_slot();
        // In parts, and not in their order.
        request.write(1, &[77, round]).unwrap();
        request.write(0, &[round]).unwrap();
        let sent = request.send(3).unwrap();
        assert_eq!(sent.receive(<[u8]>::to_vec).unwrap(), [round, 77, round]);

        let mut request = client.acquire_slot();
        request.write(4095, &[1]).unwrap();
        for error in [
            request.write(4095, &[1, 2]).unwrap_err(),
            request.write(usize::MAX, &[1]).unwrap_err(),
            request.send(4097).map(drop).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(error.contains("bytes, a slot takes 4096"), "{error}");
        }
    }
    drop(running);
}

#[test]
fn the_next_request_is_made_while_one_is_on_its_way() {
    for wait in STRATEGIES {
        let name = Name::new();
        let running = Running::start(create(&name).unwrap(), wait);
        let client = open(&name, wait, LIMIT);
        let make = |round: u8| {
            let mut request = client.try_acquire_slot().unwrap();
            request.write(0, &[round, 77]).unwrap();
            request
        };
        let mut next = make(0);
        for round in 0..9 {
            let sent = next.send(2).unwrap();
            // One that is not sent frees its slot.
            drop(make(99));
            next = make(round + 1);
            assert_eq!(sent.receive(<[u8]>::to_vec).unwrap(), [77, round]);
        }
        let error = next.send(4097).err().map(|error| error.to_string());
        let expected = "the request has 4097 bytes, a slot takes 4096";
        assert!(error.unwrap().starts_with(expected));
        // The answer to one that no client waits for is dropped.
        drop(make(7).send(2).unwrap());
        assert_eq!(client.call(&[1, 2], <[u8]>::to_vec).unwrap(), [2, 1]);
        client.abort();
        assert!(matches!(make(8).send(2), Err(CallError::Aborted)));
        drop(running);
    }
}

/// A sleep ends with its limit, with the answer, which is still to be received, or with an abort. It wakes a server that sleeps.
#[test]
fn a_caller_may_sleep_before_it_waits() {
    for wait in STRATEGIES {
        let name = Name::new();
        let mut server = create(&name).unwrap();
        let client = open(&name, wait, LIMIT);
        let send = |byte: u8| {
            let mut request = client.acquire_slot();
            request.write(0, &[byte]).unwrap();
            request.send(1).unwrap()
        };
        let mut sent = send(5);
        let begin = Instant::now();
        assert!(!sent.sleep(Duration::from_millis(20)).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(20));
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(20));
                let lease = server.wait(wait).unwrap().unwrap();
                assert!(lease.reply(&[6]).is_ok());
                // One that spins wakes others when it comes back, or ends.
            });
            assert!(sent.sleep(LIMIT).unwrap(), "{wait:?}");
        });
        assert!(begin.elapsed() < LIMIT);
        assert!(sent.sleep(Duration::ZERO).unwrap());
        assert_eq!(sent.receive(<[u8]>::to_vec).unwrap(), [6]);

        let mut sent = send(7);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                client.abort();
            });
            assert!(matches!(sent.sleep(LIMIT), Err(CallError::Aborted)));
        });
    }
}

#[test]
fn a_request_whose_answer_nobody_wants_wakes_a_server_that_sleeps() {
    let name = Name::new();
    let (sender, served) = mpsc::channel();
    let running = Running::start_with(create(&name).unwrap(), move |server| {
        while let Some(lease) = server.wait(Wait::Park).unwrap() {
            sender.send(request(&lease).len()).unwrap();
        }
    });
    let client = open(&name, Wait::Spin, LIMIT);
    // Long enough for the server to have fallen asleep.
    thread::sleep(Duration::from_millis(50));
    drop(client.acquire_slot().send(2).unwrap());
    assert_eq!(served.recv_timeout(LIMIT), Ok(2));
    drop(running);
}

#[test]
fn no_slot_is_free_while_the_only_one_is_in_use() {
    let name = Name::new();
    let mut config = common::config(&name);
    config.layout = RegionLayout::new(1, 64, 64).unwrap();
    let server = Server::create(&config, &ExitGuard::inert()).unwrap();
    let running = Running::start(server, Wait::Park);
    let client = open(&name, Wait::Park, LIMIT);
    let sent = client.acquire_slot().send(0).unwrap();
    assert!(client.try_acquire_slot().is_none());
    sent.receive(|_| ()).unwrap();
    assert!(client.try_acquire_slot().is_some());
    drop(running);
}

#[test]
fn the_first_slot_that_becomes_free_is_taken() {
    let name = Name::new();
    let mut config = common::config(&name);
    config.layout = RegionLayout::new(2, 64, 64).unwrap();
    let server = Server::create(&config, &ExitGuard::inert()).unwrap();
    let running = Running::start(server, Wait::Park);
    let client = open(&name, Wait::Park, LIMIT);
    // Both slots are taken; whichever is given back first serves the one that waits.
    for given_back in [0, 1, 0, 1] {
        let mut held = [client.acquire_slot(), client.acquire_slot()].map(Some);
        let (tell, answered) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| tell.send(client.call(b"ab", <[u8]>::to_vec).unwrap()));
            thread::sleep(Duration::from_millis(20));
            held[given_back] = None;
            let answer = answered.recv_timeout(LIMIT);
            held = [None, None];
            assert_eq!(answer.unwrap(), b"ba");
        });
        assert!(held.iter().all(Option::is_none));
    }
    drop(running);
}

#[test]
fn no_client_gets_the_answer_to_another_clients_request() {
    let name = Name::new();
    let mut config = common::config(&name);
    config.layout = RegionLayout::new(1, 64, 64).unwrap();
    let mut server = Server::create(&config, &ExitGuard::inert()).unwrap();
    let [first, second] = [(); 2].map(|()| open(&name, Wait::Park, LIMIT));
    // Taking turns is no fault.
    for client in [&first, &second, &first] {
        let sent = client.acquire_slot().send(1).unwrap();
        let lease = server.poll().unwrap();
        assert_eq!(lease.reply(b"own").unwrap(), Publish::Delivered);
        assert_eq!(sent.receive(<[u8]>::to_vec).unwrap(), b"own");
    }
    let sent = first.acquire_slot().send(1).unwrap();
    let other = second.acquire_slot().send(2).unwrap();
    let lease = server.poll().unwrap();
    assert_eq!(lease.reply(b"to the second").unwrap(), Publish::Delivered);
    let error = sent.receive(<[u8]>::to_vec).unwrap_err();
    assert!(
        matches!(error, CallError::OtherClient { slot: 0 }),
        "{error}"
    );
    assert_eq!(other.receive(<[u8]>::to_vec).unwrap(), b"to the second");
}

#[test]
fn more_threads_than_slots() {
    let name = Name::new();
    let running = Running::start(create(&name).unwrap(), Wait::Park);
    let client = open(&name, Wait::Park, LIMIT);
    let answered = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..9u32 {
            let (client, answered) = (&client, &answered);
            scope.spawn(move || {
                for round in 0..200u32 {
                    let request = [thread.to_le_bytes(), round.to_le_bytes()].concat();
                    let response = client.call(&request, <[u8]>::to_vec).unwrap();
                    assert_eq!(response, answer(&request));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(answered.into_inner(), 1800);
    drop(running);
}

#[test]
fn waiting_requests_are_served_in_the_order_of_their_sending() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Park, LIMIT);
    thread::scope(|scope| {
        for turn in 0..4u8 {
            let client = &client;
            scope.spawn(move || client.call(&[turn], |_| ()).unwrap());
            let sent = u64::from(turn) + 1;
            common::eventually(LIMIT, "it is sent", || requests_sent(&name) == sent);
        }
        for turn in 0..4 {
            let lease = server.poll().unwrap();
            assert_eq!(request(&lease), [turn]);
            assert_eq!(lease.reply(&[]).unwrap(), Publish::Delivered);
        }
    });
}

#[test]
fn a_copy_is_answered_while_a_forward_runs() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Park, LIMIT);
    thread::scope(|scope| {
        let forward = scope.spawn(|| client.call(b"forward", <[u8]>::to_vec).unwrap());
        let lease = server.wait(Wait::Park).unwrap().unwrap();
        let copy = scope.spawn(|| client.call(b"copy", <[u8]>::to_vec).unwrap());
        let second = server.wait(Wait::Park).unwrap().unwrap();
        assert_eq!(second.reply(b"copied").unwrap(), Publish::Delivered);
        assert_eq!(copy.join().unwrap(), b"copied");
        let response = request(&lease);
        assert_eq!(lease.reply(&response).unwrap(), Publish::Delivered);
        assert_eq!(forward.join().unwrap(), b"forward");
    });
}

#[test]
fn a_late_answer_is_dropped_and_the_next_request_gets_its_own() {
    for wait in STRATEGIES {
        let name = Name::new();
        let mut config = common::config(&name);
        config.layout = RegionLayout::new(1, 64, 64).unwrap();
        let mut server = Server::create(&config, &ExitGuard::inert()).unwrap();
        let client = open(&name, wait, Duration::from_millis(60));
        let start = Instant::now();
        let error = client.call(b"first", |_| ()).unwrap_err();
        assert!(
            matches!(error, CallError::TimedOut { id: 1, .. }),
            "{error}"
        );
        assert!((Duration::from_millis(60)..LIMIT).contains(&start.elapsed()));
        let late = server.poll().unwrap();

        let patient = open(&name, wait, LIMIT);
        thread::scope(|scope| {
            let second = scope.spawn(|| patient.call(b"second", <[u8]>::to_vec).unwrap());
            common::eventually(LIMIT, "the slot is reused", || requests_sent(&name) == 2);
            assert_eq!(late.reply(b"late").unwrap(), Publish::Stale);
            let lease = server.wait(wait).unwrap().unwrap();
            assert_eq!(request(&lease), b"second");
            assert_eq!(lease.reply(b"own").unwrap(), Publish::Delivered);
            assert_eq!(second.join().unwrap(), b"own");
        });
    }
}

#[test]
fn an_answer_after_the_time_out_is_absorbed() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let impatient = open(&name, Wait::Park, Duration::from_millis(10));
    assert!(impatient.call(b"x", |_| ()).is_err());
    let lease = server.poll().unwrap();
    assert_eq!(lease.reply(b"to nobody").unwrap(), Publish::Delivered);
    let running = Running::start(server, Wait::Park);
    let client = open(&name, Wait::Park, LIMIT);
    for _ in 0..8 {
        assert_eq!(client.call(b"ab", <[u8]>::to_vec).unwrap(), b"ba");
    }
    drop(running);
}

#[test]
fn a_dropped_or_panicked_handler_sends_the_abort_reply() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Park, LIMIT);
    thread::scope(|scope| {
        for panics in [false, true] {
            let call = scope.spawn(|| client.call(b"x", <[u8]>::to_vec).unwrap());
            let lease = server.wait(Wait::Park).unwrap().unwrap();
            let handler = thread::spawn(move || {
                let _lease = lease;
                assert!(!panics, "the handler of this test fails on purpose");
            });
            assert_eq!(handler.join().is_err(), panics);
            assert_eq!(call.join().unwrap(), ABORT);
        }
    });
}

#[test]
fn a_lease_outlives_its_server() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Park, LIMIT);
    thread::scope(|scope| {
        let call = scope.spawn(|| client.call(b"x", <[u8]>::to_vec).unwrap());
        let lease = server.wait(Wait::Park).unwrap().unwrap();
        drop(server);
        assert!(!name.exists());
        assert_eq!(lease.reply(b"still here").unwrap(), Publish::Delivered);
        assert_eq!(call.join().unwrap(), b"still here");
    });
}

#[test]
fn abort_ends_running_and_later_calls() {
    for wait in STRATEGIES {
        let name = Name::new();
        let _server = create(&name).unwrap();
        let client = open(&name, wait, LIMIT);
        let start = Instant::now();
        thread::scope(|scope| {
            // One more than slots: the last one waits for a slot.
            let calls: Vec<_> = (0..5)
                .map(|_| scope.spawn(|| client.call(b"x", |_| ())))
                .collect();
            thread::sleep(Duration::from_millis(40));
            client.abort();
            for call in calls {
                assert!(matches!(call.join().unwrap(), Err(CallError::Aborted)));
            }
        });
        assert!(matches!(client.call(b"x", |_| ()), Err(CallError::Aborted)));
        assert!(start.elapsed() < LIMIT);
    }
}

#[test]
fn an_abort_reply_must_fit() {
    let mut config = common::config(&Name::new());
    config.layout = RegionLayout::new(1, 64, 64).unwrap();
    config.abort_reply = vec![0; 65];
    let result = Server::create(&config, &ExitGuard::inert());
    assert!(matches!(
        result,
        Err(RegionError::AbortReplyTooLarge {
            len: 65,
            capacity: 64
        })
    ));
}

#[test]
fn an_oversized_request_is_not_sent() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Park, LIMIT);
    let error = client.call(&[0; 4097], |_| ()).unwrap_err();
    assert!(
        matches!(
            error,
            CallError::RequestTooLarge {
                len: 4097,
                capacity: 4096
            }
        ),
        "{error}"
    );
    assert!(server.poll().is_none());
}

#[test]
fn a_response_length_beyond_the_slot_is_refused() {
    use std::os::unix::fs::FileExt;
    let name = Name::new();
    let _server = create(&name).unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(name.path())
        .unwrap();
    // A server gone mad: it has "answered" far ahead, with 4 GiB.
    file.write_all_at(&u32::MAX.to_le_bytes(), 64 + 28).unwrap();
    file.write_all_at(&9u64.to_le_bytes(), 64 + 8).unwrap();
    let error = open(&name, Wait::Park, LIMIT)
        .call(b"x", |_| ())
        .unwrap_err();
    assert!(
        matches!(error, CallError::ResponseLength { slot: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_client_refuses_what_is_not_its_region() {
    let name = Name::new();
    let open = |hash| {
        Client::open(&name, hash, ClientConfig::default())
            .map(|_| ())
            .unwrap_err()
    };
    assert!(matches!(open(HASH), RegionError::NotFound { .. }));
    std::fs::write(name.path(), [0; 63]).unwrap();
    assert!(matches!(
        open(HASH),
        RegionError::Header(HeaderError::TooShort {
            size: 63,
            needed: 64,
            ..
        })
    ));
    std::fs::write(name.path(), [0; 64]).unwrap();
    assert!(matches!(
        open(HASH),
        RegionError::Header(HeaderError::Field { field: "magic", .. })
    ));
    let _server = create(&name).unwrap();
    assert!(matches!(
        open(*b"other..."),
        RegionError::Header(HeaderError::Field {
            field: "schema hash",
            ..
        })
    ));
    let bad_name = Client::open("no slash", HASH, ClientConfig::default()).map(|_| ());
    assert!(matches!(bad_name, Err(RegionError::Name { .. })));
}
