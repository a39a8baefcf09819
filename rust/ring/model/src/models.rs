//! What is tried. Each function checks one arrangement of at most three threads exhaustively, up to
//! a number of preemptions.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use crate::client::{Client, ClientConfig};
use crate::dispatch::Dispatcher;
use crate::error::CallError;
use crate::layout::RegionLayout;
use crate::lease::{Lease, Publish};
use crate::mapping::{Mapping, Start};
use crate::shared::{Stop, Waker};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::pass_time;
pub use crate::wait::Wait;

const ABORT: &[u8] = b"abort";

pub(crate) fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

struct Ring {
    region: Mapping,
    server: Dispatcher,
}

impl Ring {
    fn new(slots: u32) -> Self {
        Self::starting(slots, Start::default())
    }

    fn starting(slots: u32, start: Start) -> Self {
        let layout = RegionLayout::new(slots, 64, 64).unwrap();
        let region = Mapping::new(layout, start);
        let server = Dispatcher::new(region.clone(), ABORT.to_vec());
        Self { region, server }
    }

    fn client(&self, wait: Wait) -> Client {
        let timeout = Duration::from_secs(60);
        Client::new(self.region.clone(), ClientConfig { wait, timeout })
    }

    /// Puts empty requests into the slots, one after the other, without waiting for answers.
    fn sender(&self) -> impl FnMut() + Send + 'static {
        let (wait, timeout) = (Wait::Park, Duration::ZERO);
        let client = Client::new(self.region.clone(), ClientConfig { wait, timeout });
        move || {
            let result = client.call(&[], |_| ());
            assert!(matches!(result, Ok(()) | Err(CallError::TimedOut { .. })));
        }
    }

    fn stop_handle(&self) -> Stop {
        Stop(Arc::clone(self.server.shared()))
    }

    fn answered(&self, slot: usize) -> u64 {
        self.region.slot(slot).resp_seq.load(Ordering::Acquire)
    }
}

fn reply(lease: Lease) {
    let mut words = Vec::new();
    let response = lease.copy_request(&mut words).unwrap();
    assert_eq!(lease.reply(response).unwrap(), Publish::Delivered);
}

fn assert_echo(client: &Client, byte: u8) {
    let response = client.call(&[byte], <[u8]>::to_vec).unwrap();
    assert_eq!(response, [byte]);
}

/// Calls find their answers, whichever side spins or sleeps.
pub fn echo(server: Wait, client: Wait, calls: u8) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let calling = ring.client(client);
        let calling =
            thread::spawn(move || (0..calls).for_each(|byte| assert_echo(&calling, byte)));
        for _ in 0..calls {
            reply(ring.server.wait(server).unwrap().unwrap());
        }
        // A wake may be deferred.
        drop(ring.server);
        calling.join().unwrap();
    });
}

/// Sequence numbers and wake counters survive their end.
pub fn echo_across_the_wrap(wait: Wait) {
    check(2, move || {
        let (seq, wake) = (u64::MAX - 1, u32::MAX - 1);
        let mut ring = Ring::starting(1, Start { seq, wake });
        // The first number is new to the server.
        drop(ring.server.poll().unwrap());
        let client = ring.client(wait);
        let client = thread::spawn(move || (0..3).for_each(|byte| assert_echo(&client, byte)));
        for _ in 0..3 {
            reply(ring.server.wait(wait).unwrap().unwrap());
        }
        assert_eq!(ring.answered(0), 1);
        drop(ring.server);
        client.join().unwrap();
    });
}

/// A server that spins finds the time to wake a client that sleeps.
pub fn an_idle_server_makes_deferred_wakes() {
    check(3, || {
        let mut ring = Ring::new(1);
        let (client, stop) = (ring.client(Wait::Park), ring.stop_handle());
        let client = thread::spawn(move || {
            assert_echo(&client, 7);
            stop.stop();
        });
        reply(ring.server.wait(Wait::Spin).unwrap().unwrap());
        assert!(ring.server.wait(Wait::Spin).unwrap().is_none());
        client.join().unwrap();
    });
}

/// How a server ceases to spin.
#[derive(Clone, Copy, Debug)]
pub enum Ending {
    /// It is dropped.
    Drop,
    /// It is asked without waiting.
    Poll,
    /// It is stopped and never asked again.
    Stop,
    /// It sleeps.
    Park,
}

/// A client sleeps, and its answer comes from another thread while the server ceases to spin.
pub fn an_answer_meets_the_end_of_spinning(ending: Ending) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let (client, stop) = (ring.client(Wait::Park), ring.stop_handle());
        let client = thread::spawn(move || assert_echo(&client, 7));
        let lease = ring.server.wait(Wait::Spin).unwrap().unwrap();
        let answerer = thread::spawn(move || {
            reply(lease);
            client.join().unwrap();
            stop.stop();
        });
        match ending {
            Ending::Drop => drop(ring.server),
            Ending::Poll => assert!(ring.server.poll().is_none()),
            Ending::Stop => ring.stop_handle().stop(),
            Ending::Park => assert!(ring.server.wait(Wait::Park).unwrap().is_none()),
        }
        answerer.join().unwrap();
    });
}

/// Stopping ends the waiting.
pub fn stop(wait: Wait) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let stop = ring.stop_handle();
        let stopper = thread::spawn(move || stop.stop());
        assert!(ring.server.wait(wait).unwrap().is_none());
        stopper.join().unwrap();
    });
}

/// A call ends the waiting once, with what was done before it, and requests are not lost to it.
pub fn wake(wait: Wait) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let waker = Waker(Arc::clone(ring.server.shared()));
        let done = Arc::new(AtomicBool::new(false));
        let client = ring.client(Wait::Park);
        let calling = thread::spawn({
            let done = Arc::clone(&done);
            move || {
                done.store(true, Ordering::Relaxed);
                waker.wake();
                assert_echo(&client, 7);
            }
        });
        let (mut called, mut answered) = (false, false);
        while !(called && answered) {
            if let Some(lease) = ring.server.wait(wait).unwrap() {
                assert!(!answered);
                reply(lease);
                answered = true;
            } else {
                assert!(!called && ring.server.shared().take_wake());
                assert!(done.load(Ordering::Relaxed));
                called = true;
            }
        }
        assert!(!ring.server.shared().take_wake());
        drop(ring.server);
        calling.join().unwrap();
    });
}

/// Aborting ends a call, with or without an answer.
pub fn abort(wait: Wait) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let client = Arc::new(ring.client(wait));
        let aborting = Arc::clone(&client);
        let aborter = thread::spawn(move || aborting.abort());
        match client.call(&[7], <[u8]>::to_vec) {
            Ok(response) => panic!("{response:?} without a sender"),
            Err(error) => assert!(matches!(error, CallError::Aborted), "{error}"),
        }
        aborter.join().unwrap();
        drop(ring.server.poll());
    });
}

/// A call ends by its time-out or by its answer, and the slot serves the next call. The late answer
/// is absorbed or dropped.
pub fn time_out(wait: Wait) {
    check(2, move || {
        let mut ring = Ring::new(1);
        let clock = thread::spawn(pass_time);
        let client = ring.client(wait);
        let client = thread::spawn(move || match client.call(&[7], <[u8]>::to_vec) {
            Ok(response) => assert_eq!(response, [7]),
            Err(error) => assert!(matches!(error, CallError::TimedOut { .. }), "{error}"),
        });
        reply(ring.server.wait(Wait::Park).unwrap().unwrap());
        client.join().unwrap();
        clock.join().unwrap();
    });
}

/// A client gives up and sends again while the lease of its first request ends on another thread: a
/// server that waits gets the second request, and its answer is the one that stays.
pub fn a_request_behind_a_lease(wait: Wait) {
    check(2, move || {
        let mut ring = Ring::new(1);
        let mut send = ring.sender();
        send();
        let first = ring.server.poll().unwrap();
        let client = ring.client(Wait::Park);
        let client = thread::spawn(move || {
            let response = client.call(&[], <[u8]>::to_vec).unwrap();
            assert_eq!(response, b"second");
        });
        let ender = thread::spawn(move || {
            let _ = first.reply(b"first").unwrap();
        });
        let second = ring.server.wait(wait).unwrap().unwrap();
        assert_eq!(second.sequence(), 2);
        assert_eq!(second.reply(b"second").unwrap(), Publish::Delivered);
        assert_eq!(ring.answered(0), 2);
        drop(ring.server);
        client.join().unwrap();
        ender.join().unwrap();
    });
}

/// A process ends while another thread answers: the client reads the whole reply or none.
pub fn a_refusal_meets_an_answer(wait: Wait) {
    check(3, move || {
        let mut ring = Ring::new(1);
        let client = ring.client(wait);
        let client = thread::spawn(move || {
            let response = client.call(&[7], <[u8]>::to_vec).unwrap();
            assert!(response.is_empty() || response == [7], "{response:?}");
        });
        let lease = ring.server.wait(Wait::Park).unwrap().unwrap();
        let shared = Arc::clone(ring.server.shared());
        let answerer = thread::spawn(move || reply(lease));
        shared.refuse_all();
        answerer.join().unwrap();
        client.join().unwrap();
    });
}

/// A stale lease publishes nothing.
pub fn a_stale_lease() {
    check(3, || {
        let mut ring = Ring::new(1);
        let mut send = ring.sender();
        send();
        let first = ring.server.poll().unwrap();
        let sent = Arc::new(AtomicBool::new(false));
        let tells = Arc::clone(&sent);
        let sender = thread::spawn(move || {
            send();
            tells.store(true, Ordering::Release);
        });
        let is_stale = sent.load(Ordering::Acquire);
        let published = first.reply(b"first").unwrap();
        assert!(!is_stale || published == Publish::Stale);
        sender.join().unwrap();
        let expected = u64::from(published == Publish::Delivered);
        assert_eq!(ring.answered(0), expected);
    });
}

/// Requests that one thread sends one after the other are delivered in this order.
pub fn oldest_first(slots: u32, preemptions: usize) {
    check(preemptions, move || {
        let mut ring = Ring::new(slots);
        let mut send = ring.sender();
        let sender = thread::spawn(move || (0..slots).for_each(|_| send()));
        for number in 1..=slots {
            let lease = ring.server.wait(Wait::Park).unwrap().unwrap();
            assert_eq!(lease.id, number);
            drop(lease);
        }
        sender.join().unwrap();
    });
}
