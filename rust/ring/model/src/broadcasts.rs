//! What is tried with a broadcast: one writer and two readers at a ring of two tiny slots.

use loom::thread;

use crate::broadcast::layout::BroadcastLayout;
use crate::broadcast::listener::{Listener, Message};
use crate::broadcast::mapping::Mapping;
use crate::broadcast::sender::Broadcast;
use crate::models::check;
use crate::sync::limit_turns;
use crate::wait::Wait;

const SHAPE: BroadcastLayout = BroadcastLayout {
    slots: 2,
    capacity: 2,
    readers: 2,
};

/// Turns of two readers that spin.
const SPIN_ITERATIONS: usize = 4;

/// Sends messages of so many bytes to two readers: both get all of them, whichever spins and whichever
/// sleeps, though the slots are used again. The first reader reads in place.
pub fn broadcast(lens: &'static [usize], waits: [Wait; 2], preemptions: usize) {
    check(preemptions, move || {
        if waits == [Wait::Spin; 2] {
            limit_turns(SPIN_ITERATIONS);
        }
        let mapping = Mapping::new(SHAPE);
        let [first, second] = [0, 1].map(|reader| Listener::new(mapping.clone(), reader).unwrap());
        let first = thread::spawn(move || read_in_place(first, lens, waits[0]));
        let second = thread::spawn(move || read_copies(second, lens, waits[1]));
        let mut broadcast = Broadcast::new(mapping);
        for (kind, message) in messages(lens) {
            let (one, two) = message.split_at(message.len() / 2);
            broadcast.send(kind, &[one, two]).unwrap();
        }
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// Each byte of all messages is another one.
fn messages(lens: &[usize]) -> impl Iterator<Item = (u32, Vec<u8>)> {
    let mut bytes = 1..;
    (1..)
        .zip(lens)
        .map(move |(kind, &len)| (kind, bytes.by_ref().take(len).collect()))
}

fn read_in_place(mut listener: Listener, lens: &[usize], wait: Wait) {
    for (kind, message) in messages(lens) {
        let read =
            |found, bytes: &Message<'_>| assert_eq!((found, bytes.to_vec()), (kind, message));
        listener.receive_with(wait, read).unwrap();
    }
}

fn read_copies(mut listener: Listener, lens: &[usize], wait: Wait) {
    let mut found = Vec::new();
    for (kind, message) in messages(lens) {
        assert_eq!(listener.receive(wait, &mut found).unwrap(), kind);
        assert_eq!(found, message);
    }
}
