//! Order, edges and half-finished sends, driven word by word by a client that stops where it likes.

use std::sync::atomic::AtomicU32;
use std::thread;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::lease::Publish;

const HASH: [u8; 8] = *b"unittest";
const ABORT: &[u8] = b"abort reply";

fn server(slots: u32) -> Server {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("/pie_ring_unit_{}_{number}", std::process::id());
    let mut config = ServerConfig::new(name, HASH, ABORT.to_vec());
    config.layout = RegionLayout::new(slots, 128, 64).unwrap();
    Server::create(&config, &ExitGuard::inert()).unwrap()
}

/// The stores of a send, in order. A client may vanish after any of them.
const SEND: [fn(&Mapping, usize, u32); 5] = [
    |mapping, slot, id| mapping.write_request(slot, &id.to_le_bytes()),
    |mapping, slot, id| mapping.slot(slot).req_id().store(id, Ordering::Relaxed),
    |mapping, slot, _| mapping.slot(slot).req_len().store(4, Ordering::Relaxed),
    |mapping, slot, _| {
        mapping.slot(slot).req_seq().fetch_add(1, Ordering::Release);
    },
    |mapping, _, _| {
        mapping.req_wake().fetch_add(1, Ordering::Release);
        futex::wake_all(mapping.req_wake());
    },
];

fn send(server: &Server, slot: usize, id: u32) {
    for step in SEND {
        step(&server.shared.mapping, slot, id);
    }
}

fn response(server: &Server, slot: usize) -> (u64, Vec<u8>) {
    let words = server.shared.mapping.slot(slot);
    let seq = words.resp_seq().load(Ordering::Acquire);
    let len = words.resp_len().load(Ordering::Relaxed) as usize;
    (seq, server.shared.mapping.response(slot, len).to_vec())
}

#[test]
fn pending_slots_are_served_oldest_first_across_the_wrap() {
    let mut server = server(4);
    for (slot, id) in [(0, 1), (1, u32::MAX), (2, 0), (3, u32::MAX - 1)] {
        send(&server, slot, id);
    }
    let order: Vec<u32> = std::iter::from_fn(|| server.poll())
        .map(|l| l.request_id())
        .collect();
    assert_eq!(order, [u32::MAX - 1, u32::MAX, 0, 1]);
}

#[test]
fn a_request_is_delivered_once() {
    let mut server = server(2);
    send(&server, 1, 7);
    let lease = server.poll().unwrap();
    assert_eq!(
        (lease.slot(), lease.sequence(), lease.request_id()),
        (1, 1, 7)
    );
    assert_eq!(lease.request().unwrap(), 7u32.to_le_bytes());
    assert!(server.poll().is_none());
    assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
    assert!(server.poll().is_none());
    assert_eq!(response(&server, 1), (1, b"ok".to_vec()));
}

#[test]
fn a_copy_stays_when_the_client_rewrites_its_slot() {
    let mut server = server(2);
    let full: Vec<u8> = (0..128).collect();
    for (slot, length) in [(0, 0), (1, 1), (0, 12), (1, 128)] {
        send(&server, slot, 7);
        let mapping = &server.shared.mapping;
        let (request, len) = (&full[..length], length as u32);
        mapping.write_request(slot, request);
        mapping.slot(slot).req_len().store(len, Ordering::Relaxed);
        let lease = server.poll().unwrap();
        let mut words = vec![u64::MAX; 40];
        assert_eq!(lease.copy_request(&mut words).unwrap(), length);
        server.shared.mapping.write_request(slot, &[0xEE; 128]);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes[..length], *request);
        assert_eq!(words.len(), length.div_ceil(8));
    }
}

#[test]
fn other_slots_are_served_while_a_lease_is_held() {
    let mut server = server(2);
    send(&server, 0, 1);
    let forward = server.poll().unwrap();
    send(&server, 1, 2);
    let copy = server.poll().unwrap();
    assert_eq!(copy.reply(b"copied").unwrap(), Publish::Delivered);
    assert_eq!(forward.reply(b"done").unwrap(), Publish::Delivered);
    assert_eq!(response(&server, 0), (1, b"done".to_vec()));
}

#[test]
fn a_dropped_lease_sends_the_abort_reply() {
    let mut server = server(1);
    send(&server, 0, 1);
    drop(server.poll().unwrap());
    assert_eq!(response(&server, 0), (1, ABORT.to_vec()));
}

#[test]
fn an_oversized_response_becomes_the_abort_reply() {
    let mut server = server(1);
    for seq in 1..3 {
        send(&server, 0, 1);
        let lease = server.poll().unwrap();
        let result = if seq == 1 {
            lease.commit(65)
        } else {
            lease.reply(&[0; 65])
        };
        assert!(matches!(
            result,
            Err(RingError::ResponseTooLarge {
                len: 65,
                capacity: 64
            })
        ));
        assert_eq!(response(&server, 0), (seq, ABORT.to_vec()));
    }
    send(&server, 0, 1);
    let mut lease = server.poll().unwrap();
    lease.response().fill(9);
    assert_eq!(lease.commit(64).unwrap(), Publish::Delivered);
    assert_eq!(response(&server, 0), (3, vec![9; 64]));
}

#[test]
fn an_oversized_request_can_still_be_answered() {
    let mut server = server(1);
    send(&server, 0, 1);
    server
        .shared
        .mapping
        .slot(0)
        .req_len()
        .store(129, Ordering::Relaxed);
    let mut lease = server.poll().unwrap();
    let refused = |error| {
        matches!(
            error,
            RingError::RequestLength {
                len: 129,
                capacity: 128,
                ..
            }
        )
    };
    assert!(lease.request().is_err_and(refused));
    let mut words = vec![5];
    assert!(lease.copy_request(&mut words).is_err_and(refused));
    assert_eq!(words, [5]);
    assert!(lease.buffers().is_err());
    assert_eq!(lease.reply(b"malformed").unwrap(), Publish::Delivered);
}

#[test]
fn a_stale_lease_publishes_nothing_and_the_new_request_follows_it() {
    let mut server = server(1);
    for end in 0..3 {
        let before = response(&server, 0);
        send(&server, 0, 1);
        let old = server.poll().unwrap();
        send(&server, 0, 2);
        assert!(old.is_stale());
        assert!(server.poll().is_none(), "two leases on one slot");
        match end {
            0 => assert_eq!(old.reply(b"late").unwrap(), Publish::Stale),
            1 => assert_eq!(old.commit(4).unwrap(), Publish::Stale),
            _ => drop(old),
        }
        assert_eq!(response(&server, 0), before);
        let new = server.poll().unwrap();
        assert_eq!(new.request_id(), 2);
        assert_eq!(new.reply(b"new").unwrap(), Publish::Delivered);
        assert_eq!(response(&server, 0).1, b"new");
    }
}

#[test]
fn the_end_of_a_stale_lease_wakes_a_parked_server() {
    let mut server = server(1);
    send(&server, 0, 1);
    let old = server.poll().unwrap();
    send(&server, 0, 2);
    let ender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(old);
    });
    let new = server.wait(Wait::Park).unwrap().unwrap();
    assert_eq!(new.request_id(), 2);
    ender.join().unwrap();
}

/// A client that vanishes after any store of a send leaves the other slots, the stopping and its
/// own slot usable.
#[test]
fn a_client_may_vanish_after_any_store() {
    for done in 0..=SEND.len() {
        let mut server = server(2);
        for step in &SEND[..done] {
            step(&server.shared.mapping, 0, 1);
        }
        let sent = done >= 4;
        if let Some(lease) = server.poll() {
            assert!(sent && lease.request().unwrap() == 1u32.to_le_bytes());
            assert_eq!(lease.reply(b"to nobody").unwrap(), Publish::Delivered);
        }
        for (slot, id) in [(1, 2), (0, 3)] {
            send(&server, slot, id);
            let lease = server.poll().unwrap();
            assert_eq!(
                lease.request().unwrap(),
                id.to_le_bytes(),
                "after {done} stores"
            );
            assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
            assert_eq!(response(&server, slot).1, b"ok");
        }
        assert!(server.poll().is_none());
    }
}

/// A request goes into the first slot and the next into the last while the server scans: it may have
/// passed the first slot too early, yet must not serve the second request first.
#[test]
fn no_request_overtakes_an_older_one() {
    const START: u32 = u32::MAX - 1000;
    const LAST: usize = 63;
    let mut server = server(64);
    let (shared, stop) = (Arc::clone(&server.shared), server.stop_handle());
    let end = Instant::now() + Duration::from_millis(300);
    let sender = thread::spawn(move || {
        let mapping = &shared.mapping;
        let answered = |slot| mapping.slot(slot).resp_seq().load(Ordering::Acquire);
        let mut round = 0;
        while Instant::now() < end {
            for (slot, id) in [(0, 2 * round), (LAST, 2 * round + 1)] {
                for step in &SEND[..4] {
                    step(mapping, slot, START.wrapping_add(id));
                }
            }
            round += 1;
            while [0, LAST].map(answered) != [u64::from(round); 2] {
                std::hint::spin_loop();
            }
        }
        stop.stop();
        2 * round
    });
    let mut count = 0;
    while let Some(lease) = server.wait(Wait::Spin).unwrap() {
        assert_eq!(lease.request_id(), START.wrapping_add(count));
        assert_eq!(lease.reply(&[]).unwrap(), Publish::Delivered);
        count += 1;
    }
    assert_eq!(sender.join().unwrap(), count);
}

#[test]
fn stop_ends_every_strategy() {
    for wait in [
        Wait::Spin,
        Wait::SpinThenPark(Duration::from_millis(1)),
        Wait::Park,
    ] {
        let mut server = server(1);
        let stop = server.stop_handle();
        let stopper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            stop.stop();
        });
        let start = Instant::now();
        assert!(server.wait(wait).unwrap().is_none());
        assert!(start.elapsed() < Duration::from_secs(1));
        assert!(server.wait(wait).unwrap().is_none(), "stopping is final");
        stopper.join().unwrap();
    }
}

#[test]
fn an_abort_reply_must_fit() {
    let mut config = ServerConfig::new("/pie_ring_unit_never", HASH, vec![0; 65]);
    config.layout = RegionLayout::new(1, 64, 64).unwrap();
    let result = Server::create(&config, &ExitGuard::inert());
    assert!(matches!(
        result,
        Err(RingError::AbortReplyTooLarge {
            len: 65,
            capacity: 64
        })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against a literal model: whatever is sent when, the served ids are the sorted pending ones.
    #[test]
    fn the_oldest_pending_request_is_served(
        start: u32,
        events in prop::collection::vec((0usize..6, any::<bool>()), 1..60),
    ) {
        let mut server = server(6);
        let mut pending = Vec::<(u32, usize)>::new();
        let mut id = start;
        for (slot, is_send) in events {
            if is_send && pending.iter().all(|&(_, busy)| busy != slot) {
                send(&server, slot, id);
                pending.push((id, slot));
                id = id.wrapping_add(1);
            } else {
                let expected = (!pending.is_empty()).then(|| pending.remove(0));
                let served = server.poll().map(|lease| (lease.request_id(), lease.slot()));
                prop_assert_eq!(served, expected);
            }
        }
    }

    #[test]
    fn age_is_the_shorter_way_round(id: u32, distance in 1u32..1 << 31) {
        let later = id.wrapping_add(distance);
        prop_assert!(is_older(id, later));
        prop_assert!(!is_older(later, id) && !is_older(id, id));
    }
}
