//! A leader here, workers that inherit its broadcast, and workers that die.

use std::hash::{DefaultHasher, Hasher};
use std::os::fd::AsFd;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use pie_ring::{Broadcast, BroadcastError, Listener, Message, Wait};

use crate::common::STRATEGIES;
use crate::roles::{Process, tell};

/// Kind of the last message.
const END: u32 = u32::MAX;
/// Kind of the message that a doomed reader never gives back.
const HOLD: u32 = u32::MAX - 1;
/// Slots of a broadcast.
const SLOTS: u32 = 8;

fn open(reader: &str) -> Listener {
    let inherited = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let listener = Listener::open(inherited, reader.parse().unwrap()).unwrap();
    tell("ready");
    listener
}

/// Ends this process if it hangs: each end waits for the other without a limit.
fn watch() -> Sender<()> {
    let (alive, ended) = mpsc::channel();
    thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(30)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("a broadcast hangs");
            std::process::exit(1);
        }
    });
    alive
}

/// The role `listen`: reads up to the end and tells a checksum of everything.
pub(crate) fn listen(reader: &str, wait: Wait) {
    let (_watch, mut listener) = (watch(), open(reader));
    let (mut sum, mut message) = (Sum::default(), Vec::new());
    loop {
        // Both ways to read, by turns.
        sum.add(listener.receive(wait, &mut message).unwrap(), &message);
        let add = |kind, message: &Message<'_>| {
            sum.add(kind, &message.to_vec());
            kind
        };
        if listener.receive_with(wait, add).unwrap() == END {
            return tell(&sum.text());
        }
    }
}

/// The role `hold`: reads up to a message that it never gives back.
pub(crate) fn hold(reader: &str, wait: Wait) {
    let (_watch, mut listener) = (watch(), open(reader));
    let hold = |kind, _: &Message<'_>| {
        if kind == HOLD {
            tell("holding");
            thread::sleep(Duration::from_secs(20));
        }
    };
    while listener.receive_with(wait, hold).is_ok() {}
}

/// Of everything sent or received so far.
#[derive(Default)]
struct Sum {
    hasher: DefaultHasher,
    messages: u32,
}

impl Sum {
    fn add(&mut self, kind: u32, message: &[u8]) {
        self.hasher.write_u32(kind);
        self.hasher.write_usize(message.len());
        self.hasher.write(message);
        self.messages += 1;
    }

    fn text(&self) -> String {
        format!("{} of {:x}", self.messages, self.hasher.finish())
    }
}

/// A broadcast that sums what it sends.
struct Leader {
    broadcast: Broadcast,
    sum: Sum,
    noise: u64,
    _watch: Sender<()>,
}

impl Leader {
    fn new(readers: usize) -> Self {
        Self {
            broadcast: Broadcast::create(readers).unwrap(),
            sum: Sum::default(),
            noise: 1,
            _watch: watch(),
        }
    }

    fn start(&self, role: &str, reader: usize, wait: Wait) -> Process {
        let file = self.broadcast.fd().try_clone_to_owned().unwrap();
        let mut process = Process::inheriting(role, &reader.to_string(), wait, file);
        assert_eq!(process.told(), "ready");
        process
    }

    /// Sends less than `limit` bytes, in two parts.
    fn send(&mut self, kind: u32, limit: u64) {
        self.noise = self
            .noise
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(1);
        let (len, seed) = ((self.noise >> 33) % limit, self.noise);
        let message: Vec<u8> = (0..len)
            .map(|index| (index.wrapping_mul(seed) >> 40) as u8)
            .collect();
        let (first, second) = message.split_at(message.len() / 3);
        self.broadcast.send(kind, &[first, second]).unwrap();
        self.sum.add(kind, &message);
    }
}

#[test]
fn every_process_gets_everything() {
    let mut leader = Leader::new(3);
    let start = |(reader, wait)| leader.start("listen", reader, wait);
    let readers: Vec<_> = STRATEGIES.into_iter().enumerate().map(start).collect();
    for kind in 0..399 {
        let limit = if kind % 10 == 0 { 3_000_000 } else { 40_000 };
        leader.send(kind, limit);
    }
    leader.send(END, 1);
    for mut reader in readers {
        assert_eq!(reader.told(), leader.sum.text());
    }
}

#[test]
fn a_reader_that_dies_does_the_others_no_harm() {
    for wait in STRATEGIES {
        let mut leader = Leader::new(2);
        let mut doomed = leader.start("hold", 0, wait);
        let mut other = leader.start("listen", 1, wait);
        for kind in 0..50 {
            leader.send(kind, 600_000);
        }
        leader.send(HOLD, 40_000);
        assert_eq!(doomed.told(), "holding");
        doomed.kill();
        // As much as fits after what the dead reader holds.
        for kind in 0..SLOTS - 2 {
            leader.send(kind, 200_000);
        }
        leader.send(END, 1);
        assert_eq!(other.told(), leader.sum.text());
        let again = leader.broadcast.fd().try_clone_to_owned().unwrap();
        let again = Listener::open(again, 0).map(|_| ());
        assert!(matches!(
            again,
            Err(BroadcastError::ReaderTaken { reader: 0 })
        ));
    }
}

#[test]
fn a_reader_that_dies_asleep_does_the_others_no_harm() {
    let mut leader = Leader::new(2);
    let mut doomed = leader.start("hold", 0, Wait::Park);
    let mut other = leader.start("listen", 1, Wait::Park);
    thread::sleep(Duration::from_millis(50));
    doomed.kill();
    for kind in 0..SLOTS - 1 {
        leader.send(kind, 200_000);
    }
    leader.send(END, 1);
    assert_eq!(other.told(), leader.sum.text());
}
