//! What a message to all workers costs the leader.
//!
//! `idle`: three readers that only say that they have taken it, between two sends, so nothing but the
//! writer's own work is timed. `spin`: one reader on another core that reads every byte; the next
//! message waits until it has, so the writer finds its lines where the reader left them.

#[path = "ring_round_trip/cores.rs"]
mod cores;

use std::cell::{LazyCell, RefCell};
use std::hint::{black_box, spin_loop};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use criterion::Criterion;
use pie_benches::report::Unit;
use pie_benches::timing::{self, Race, Samples};
use pie_ring::{Broadcast, Listener, Message, Wait};

use crate::cores::Cores;

const SIZES: [usize; 2] = [4 << 10, 32 << 10];
/// As many as a broadcast has, at the same distance.
const SLOTS: usize = 8;
const STRIDE: usize = (256 << 10) + 64;
/// Tells the reader to end.
const END: u32 = u32::MAX;

fn main() {
    let mut criterion = timing::criterion();
    for size in SIZES {
        race(&mut criterion, "idle", size, Idle::new);
        race(&mut criterion, "spin", size, Spinning::new);
    }
    criterion.final_summary();
}

/// A broadcast whose readers have nothing left to read when the next message comes.
trait Readers {
    fn broadcast(&mut self) -> &mut Broadcast;

    /// Waits until message `number` is taken.
    fn await_readers(&mut self, number: u32);
}

fn race<R: Readers>(criterion: &mut Criterion, name: &str, size: usize, readers: fn(usize) -> R) {
    // Criterion's filter decides whether the readers are needed.
    let readers = LazyCell::new(|| RefCell::new((readers(size), 0)));
    let message = message(size);
    let send = |operations, samples: &mut Samples| {
        let (readers, number) = &mut *readers.borrow_mut();
        let one = |_| {
            *number = (*number + 1) % END;
            let start = Instant::now();
            let result = readers.broadcast().send(*number, &[&message]);
            let elapsed = start.elapsed();
            result.expect("the readers behave");
            readers.await_readers(*number);
            samples.record(elapsed);
            elapsed
        };
        (0..operations).map(one).sum::<Duration>()
    };
    let mut memory = vec![0_u8; SLOTS * STRIDE];
    let mut slot = 0;
    let copy = |operations, samples: &mut Samples| {
        let one = |_| {
            slot = (slot + 1) % SLOTS;
            let place = &mut memory[slot * STRIDE..][..size];
            let start = Instant::now();
            place.copy_from_slice(black_box(&message));
            black_box(place);
            let elapsed = start.elapsed();
            samples.record(elapsed);
            elapsed
        };
        (0..operations).map(one).sum::<Duration>()
    };
    Race::new_turns(format!("ring/broadcast/{name}/{size}"), Unit::Ns, send)
        .peer_turns("memcpy", copy)
        .run(criterion);
}

fn message(size: usize) -> Vec<u8> {
    (0..size).map(|index| (index % 251) as u8).collect()
}

fn open(broadcast: &Broadcast, reader: usize) -> Listener {
    let file = broadcast.fd().try_clone_to_owned();
    let open = |file: OwnedFd| Listener::open(file, reader).expect("a fresh reader");
    file.map(open).expect("one descriptor more")
}

/// Three readers on the writer's thread.
struct Idle {
    broadcast: Broadcast,
    listeners: [Listener; 3],
}

impl Idle {
    fn new(_: usize) -> Self {
        let broadcast = Broadcast::create(3).expect("2 MiB of memory");
        let listeners = [0, 1, 2].map(|reader| open(&broadcast, reader));
        Self {
            broadcast,
            listeners,
        }
    }
}

impl Readers for Idle {
    fn broadcast(&mut self) -> &mut Broadcast {
        &mut self.broadcast
    }

    fn await_readers(&mut self, number: u32) {
        for listener in &mut self.listeners {
            let kind = listener.receive_with(Wait::Spin, |kind, _| kind);
            assert_eq!(kind.expect("a message"), number);
        }
    }
}

/// A reader on another core.
struct Spinning {
    broadcast: Broadcast,
    /// The last message that was read.
    read: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
    cores: Cores,
}

impl Spinning {
    fn new(size: usize) -> Self {
        let broadcast = Broadcast::create(1).expect("2 MiB of memory");
        let (listener, read) = (open(&broadcast, 0), Arc::new(AtomicU32::new(0)));
        let cores = Cores::pick().expect("two cores");
        let reading = Arc::clone(&read);
        let thread = thread::spawn(move || {
            Cores::pin(cores.server).expect("one of the thread's cores");
            read_all(listener, &message(size), &reading);
        });
        Cores::pin(cores.client).expect("one of the thread's cores");
        Self {
            broadcast,
            read,
            thread: Some(thread),
            cores,
        }
    }
}

impl Readers for Spinning {
    fn broadcast(&mut self) -> &mut Broadcast {
        &mut self.broadcast
    }

    fn await_readers(&mut self, number: u32) {
        // SYNC: pairs with the release store in `read_all`.
        while self.read.load(Ordering::Acquire) != number {
            let thread = self.thread.as_ref();
            assert!(!thread.is_none_or(JoinHandle::is_finished), "no reader");
            spin_loop();
        }
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        let sent = self.broadcast.send(END, &[]);
        let ended = self.thread.take().map(JoinHandle::join);
        let unpinned = self.cores.unpin();
        assert!(thread::panicking() || (sent.is_ok() && unpinned.is_ok()));
        assert!(thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

/// Compares every message with the expected one, up to the end.
fn read_all(mut listener: Listener, expected: &[u8], read: &AtomicU32) {
    let mut found = vec![0; expected.len()];
    loop {
        let look = |kind, message: &Message<'_>| {
            if kind != END {
                message.copy(0, &mut found);
                assert!(message.len() == found.len() && found == expected);
            }
            kind
        };
        match listener.receive_with(Wait::Spin, look).expect("a message") {
            END => return,
            // SYNC: pairs with the acquire load in `await_readers`.
            kind => read.store(kind, Ordering::Release),
        }
    }
}
