//! Order, edges and half-finished sends, driven word by word by a client that stops where it likes.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::MemfdFlags;

use super::*;
use crate::client::{Client, ClientConfig};
use crate::error::LeaseError;
use crate::futex;
use crate::layout::RegionLayout;
use crate::lease::Publish;
use crate::shared::{Stop, Waker};

#[path = "dispatch_wake_tests.rs"]
mod wakes;

const ABORT: &[u8] = b"abort reply";

/// A server without a name.
fn server(slots: u32) -> Dispatcher {
    pair(slots, Wait::Park).0
}

/// A server without a name, and its client.
fn pair(slots: u32, wait: Wait) -> (Dispatcher, Client) {
    let layout = RegionLayout::new(slots, 128, 64).unwrap();
    let file = rustix::fs::memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, layout.total_bytes() as u64).unwrap();
    let map = || Mapping::new(file.as_fd(), layout, true).unwrap();
    let timeout = Duration::from_secs(5);
    let client = Client::new(map(), ClientConfig { wait, timeout });
    (Dispatcher::new(map(), ABORT.to_vec()), client)
}

fn stop_handle(server: &Dispatcher) -> Stop {
    Stop(Arc::clone(server.shared()))
}

/// The stores of a send, in order. A client may vanish after any of them.
const SEND: [fn(&Mapping, usize, u32); 5] = [
    |mapping, slot, id| mapping.write_request(slot, 0, &id.to_le_bytes()),
    |mapping, slot, id| mapping.slot(slot).req_id.store(id, Ordering::Relaxed),
    |mapping, slot, _| mapping.slot(slot).req_len.store(4, Ordering::Relaxed),
    |mapping, slot, _| {
        mapping.slot(slot).req_seq.fetch_add(1, Ordering::Release);
    },
    |mapping, _, _| {
        mapping.header().req_wake.fetch_add(1, Ordering::Release);
        futex::wake_all(&mapping.header().req_wake);
    },
];

fn send(server: &Dispatcher, slot: usize, id: u32) {
    for step in SEND {
        step(&server.shared.mapping, slot, id);
    }
}

fn response(server: &Dispatcher, slot: usize) -> (u64, Vec<u8>) {
    let words = server.shared.mapping.slot(slot);
    let seq = words.resp_seq.load(Ordering::Acquire);
    let len = words.resp_len.load(Ordering::Relaxed) as usize;
    let mut response = Vec::new();
    server
        .shared
        .mapping
        .copy_response(slot, len, &mut response);
    (seq, bytemuck::cast_slice(&response)[..len].to_vec())
}

fn request(lease: &Lease) -> Vec<u8> {
    lease.copy_request(&mut Vec::new()).unwrap().to_vec()
}

#[test]
fn pending_slots_are_served_oldest_first_across_the_wrap() {
    let mut server = server(4);
    for (slot, id) in [(0, 1), (1, u32::MAX), (2, 0), (3, u32::MAX - 1)] {
        send(&server, slot, id);
    }
    let order: Vec<u32> = std::iter::from_fn(|| server.poll()).map(|l| l.id).collect();
    assert_eq!(order, [u32::MAX - 1, u32::MAX, 0, 1]);
}

#[test]
fn a_client_counts_its_requests_and_notes_their_time() {
    let (mut server, client) = pair(2, Wait::Park);
    for count in 1..6 {
        let slot = (count as usize - 1) % 2;
        drop(client.acquire_slot().send(0).unwrap());
        let words = server.shared.mapping.slot(slot);
        assert_eq!(words.req_id.load(Ordering::Relaxed), count);
        assert!(words.sent_us.load(Ordering::Relaxed) > 1_700_000_000_000_000);
        let lease = server.poll().unwrap();
        assert_eq!((lease.slot(), lease.id), (slot, count));
    }
}

#[test]
fn a_request_is_delivered_once() {
    let mut server = server(2);
    send(&server, 1, 7);
    let lease = server.poll().unwrap();
    assert_eq!((lease.slot(), lease.sequence(), lease.id), (1, 1, 7));
    assert_eq!(request(&lease), 7u32.to_le_bytes());
    assert!(server.poll().is_none());
    assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
    assert!(server.poll().is_none());
    assert_eq!(response(&server, 1), (1, b"ok".to_vec()));
}

/// It comes again under its own number, and must not run twice.
#[test]
fn a_request_that_another_one_has_replaced_is_not_copied() {
    let mut server = server(1);
    send(&server, 0, 7);
    let lease = server.poll().unwrap();
    send(&server, 0, 8);
    let mut words = Vec::new();
    let copied = lease.copy_request(&mut words).unwrap_err();
    assert!(matches!(copied, LeaseError::Stale { slot: 0 }), "{copied}");
    assert_eq!(lease.reply(b"late").unwrap(), Publish::Stale);
    let next = server.poll().unwrap();
    assert_eq!(request(&next), 8u32.to_le_bytes());
}

#[test]
fn a_copy_stays_when_the_client_rewrites_its_slot() {
    let mut server = server(2);
    let full: Vec<u8> = (0..128).collect();
    for (slot, length) in [(0, 0), (1, 1), (0, 12), (1, 128)] {
        send(&server, slot, 7);
        let mapping = &server.shared.mapping;
        let (request, len) = (&full[..length], length as u32);
        mapping.write_request(slot, 0, request);
        mapping.slot(slot).req_len.store(len, Ordering::Relaxed);
        let lease = server.poll().unwrap();
        let mut words = vec![u64::MAX; 40];
        assert_eq!(lease.copy_request(&mut words).unwrap(), request);
        server.shared.mapping.write_request(slot, 0, &[0xEE; 128]);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes[..length], *request);
        assert_eq!(words.len(), length.div_ceil(8));
    }
}

#[test]
fn a_response_stays_when_the_server_rewrites_its_slot() {
    let (mut server, client) = pair(1, Wait::Park);
    for length in [0, 1, 12, 64] {
        let answer: Vec<u8> = (0..length).collect();
        let sent = client.acquire_slot().send(0).unwrap();
        let lease = server.poll().unwrap();
        assert_eq!(lease.reply(&answer).unwrap(), Publish::Delivered);
        let read = |bytes: &[u8]| {
            server.shared.mapping.write_response(0, &[0xEE; 64]);
            bytes.to_vec()
        };
        assert_eq!(sent.receive(read).unwrap(), answer);
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
    send(&server, 0, 1);
    let result = server.poll().unwrap().reply(&[0; 65]);
    assert!(matches!(
        result,
        Err(LeaseError::ResponseTooLarge {
            len: 65,
            capacity: 64
        })
    ));
    assert_eq!(response(&server, 0), (1, ABORT.to_vec()));
    send(&server, 0, 1);
    let lease = server.poll().unwrap();
    assert_eq!(lease.reply(&[9; 64]).unwrap(), Publish::Delivered);
    assert_eq!(response(&server, 0), (2, vec![9; 64]));
}

#[test]
fn an_oversized_request_can_still_be_answered() {
    let mut server = server(1);
    send(&server, 0, 1);
    server
        .shared
        .mapping
        .slot(0)
        .req_len
        .store(129, Ordering::Relaxed);
    let lease = server.poll().unwrap();
    let refused = |error| {
        matches!(
            error,
            LeaseError::RequestLength {
                len: 129,
                capacity: 128,
                ..
            }
        )
    };
    let mut words = vec![5];
    assert!(lease.copy_request(&mut words).is_err_and(refused));
    assert_eq!(words, [5]);
    assert_eq!(lease.reply(b"malformed").unwrap(), Publish::Delivered);
}

#[test]
fn a_stale_lease_publishes_nothing_and_the_new_request_follows_it() {
    let mut server = server(1);
    for replies in [true, false] {
        let before = response(&server, 0);
        send(&server, 0, 1);
        let old = server.poll().unwrap();
        send(&server, 0, 2);
        assert!(old.is_stale());
        assert!(server.poll().is_none(), "two leases on one slot");
        if replies {
            assert_eq!(old.reply(b"late").unwrap(), Publish::Stale);
        } else {
            drop(old);
        }
        assert_eq!(response(&server, 0), before);
        let new = server.poll().unwrap();
        assert_eq!(new.id, 2);
        assert_eq!(new.reply(b"new").unwrap(), Publish::Delivered);
        assert_eq!(response(&server, 0).1, b"new");
    }
}

/// Work in parts has a thread call itself for the next one: requests come in between, and a stop before them.
#[test]
fn calls_and_requests_take_turns() {
    for wait in [Wait::Park, Wait::Spin] {
        let mut server = server(2);
        let waker = Waker(Arc::clone(server.shared()));
        let answer = |server: &mut Dispatcher| {
            let lease = server.wait(wait).unwrap().expect("a request");
            assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
        };
        let called = |server: &mut Dispatcher| {
            waker.wake();
            assert!(server.wait(wait).unwrap().is_none() && server.shared.take_wake());
        };
        for id in [1, 3, 5] {
            called(&mut server);
            send(&server, 0, id);
            send(&server, 1, id + 1);
            for _ in 0..2 {
                waker.wake();
                answer(&mut server);
                called(&mut server);
            }
        }
        send(&server, 0, 9);
        stop_handle(&server).stop();
        assert!(server.wait(wait).unwrap().is_none() && !server.shared.take_wake());
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
    assert_eq!(new.id, 2);
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
            assert!(sent && request(&lease) == 1u32.to_le_bytes());
            assert_eq!(lease.reply(b"to nobody").unwrap(), Publish::Delivered);
        }
        for (slot, id) in [(1, 2), (0, 3)] {
            send(&server, slot, id);
            let lease = server.poll().unwrap();
            assert_eq!(request(&lease), id.to_le_bytes(), "after {done} stores");
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
    let (shared, stop) = (Arc::clone(&server.shared), stop_handle(&server));
    let end = Instant::now() + Duration::from_millis(300);
    let sender = thread::spawn(move || {
        let mapping = &shared.mapping;
        let answered = |slot| mapping.slot(slot).resp_seq.load(Ordering::Acquire);
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
        assert_eq!(lease.id, START.wrapping_add(count));
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
        let stop = stop_handle(&server);
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
                let served = server.poll().map(|lease| (lease.id, lease.slot()));
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
