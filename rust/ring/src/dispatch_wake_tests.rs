//! Deferred wakes.

use std::sync::mpsc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::Pid;

use super::*;
use crate::client::Client;
use crate::lease::Publish;

/// A call by a thread that tells its id first.
fn told_call(client: &Client, told: &Sender<Pid>) -> bool {
    told.send(rustix::thread::gettid()).unwrap();
    let answer = client.call(b"x", <[u8]>::to_vec);
    answer.is_ok_and(|answer| answer == b"ok")
}

/// Waits until a thread of this process sleeps.
fn await_sleep(thread: Pid) {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let sleeps = |stat: String| stat.rsplit(')').next().unwrap().starts_with(" S");
    while !std::fs::read_to_string(&path).is_ok_and(sleeps) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A client sleeps in slot 0, a server that spins has answered, and the wake is deferred: now `act` must
/// lead to it.
fn with_a_deferred_wake(act: impl FnOnce(Dispatcher)) {
    let (mut server, client) = pair(2, Wait::Park);
    let shared = Arc::clone(server.shared());
    let (told, tid) = mpsc::channel();
    thread::scope(|scope| {
        let call = scope.spawn(|| told_call(&client, &told));
        let lease = server.wait(Wait::Spin).unwrap().unwrap();
        await_sleep(tid.recv().unwrap());
        assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
        assert!(shared.is_deferred(0) && !call.is_finished());
        act(server);
        assert!(!shared.is_deferred(0));
        assert!(call.join().unwrap());
    });
}

#[test]
fn a_deferred_wake_is_made() {
    let start = Instant::now();
    with_a_deferred_wake(drop);
    with_a_deferred_wake(|mut server| {
        assert!(server.poll().is_none());
        assert!(!server.shared.is_deferred(0), "woken only when dropped");
    });
    with_a_deferred_wake(|server| {
        stop_handle(&server).stop();
        assert!(!server.shared.is_deferred(0), "woken only when dropped");
    });
    for wait in [Wait::Spin, Wait::Park, Wait::SpinThenPark(Duration::MAX)] {
        with_a_deferred_wake(|mut server| {
            let stop = stop_handle(&server);
            let stopper = thread::spawn(move || {
                thread::sleep(Duration::from_millis(30));
                assert!(!stop.0.is_deferred(0), "woken only when stopped");
                stop.stop();
            });
            assert!(server.wait(wait).unwrap().is_none());
            stopper.join().unwrap();
        });
    }
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "a client timed out"
    );
}

/// As many deliveries as slots, without an idle moment.
#[test]
fn a_deferred_wake_is_made_by_a_busy_server() {
    with_a_deferred_wake(|mut server| {
        for id in 2..4 {
            assert!(server.shared.is_deferred(0));
            send(&server, 1, id);
            let lease = server.wait(Wait::Spin).unwrap().unwrap();
            assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
        }
        assert!(!server.shared.is_deferred(0), "woken only when dropped");
    });
}

#[test]
fn a_client_that_takes_the_slots_in_turn_costs_no_wake() {
    let mut server = server(3);
    for id in 0..30 {
        let slot = id as usize % 3;
        send(&server, slot, id);
        let lease = server.wait(Wait::Spin).unwrap().unwrap();
        assert!(
            !server.shared.is_deferred(slot),
            "the client has sent again"
        );
        assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
        let deferred = (0..3)
            .filter(|&slot| server.shared.is_deferred(slot))
            .count();
        assert_eq!(deferred, (id as usize + 1).min(3));
    }
}

#[test]
fn no_wake_is_deferred_by_a_server_that_does_not_spin() {
    let mut server = server(1);
    let stop = stop_handle(&server);
    for (id, wait) in (0..).zip([None, Some(Wait::Park), Some(Wait::Spin), Some(Wait::Spin)]) {
        send(&server, 0, id);
        let lease = match wait {
            None => server.poll().unwrap(),
            Some(wait) => server.wait(wait).unwrap().unwrap(),
        };
        if id == 3 {
            stop.stop();
        }
        assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
        assert_eq!(server.shared.is_deferred(0), id == 2);
    }
    // Waiting to spin after the stop changes nothing.
    send(&server, 0, 4);
    let lease = server.poll().unwrap();
    assert!(server.wait(Wait::Spin).unwrap().is_none());
    assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
    assert!(!server.shared.is_deferred(0));
}

#[test]
fn a_client_found_asleep_is_woken_at_once_the_next_time() {
    let (mut server, client) = pair(1, Wait::Park);
    let (told, tid) = mpsc::channel();
    thread::scope(|scope| {
        let call = scope.spawn(|| [(); 2].map(|()| told_call(&client, &told)));
        for round in 0..2 {
            let lease = server.wait(Wait::Spin).unwrap().unwrap();
            await_sleep(tid.recv().unwrap());
            assert_eq!(lease.reply(b"ok").unwrap(), Publish::Delivered);
            assert_eq!(server.shared.is_deferred(0), round == 0);
        }
        assert_eq!(call.join().unwrap(), [true; 2]);
    });
}
