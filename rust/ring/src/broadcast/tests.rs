//! Both ends in one process.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use rustix::io::FdFlags;

use super::layout::{BroadcastLayout, HEADER_BYTES};
use super::{Broadcast, Listener};
use crate::error::{BroadcastError, HeaderError};
use crate::wait::Wait;

const BRIEFLY: Wait = Wait::SpinThenPark(Duration::from_micros(100));
const TINY: BroadcastLayout = BroadcastLayout {
    slots: 2,
    capacity: 64,
    readers: 1,
};

type Message = (u32, Vec<u8>);

fn tiny(readers: u32) -> Broadcast {
    Broadcast::with_layout(BroadcastLayout { readers, ..TINY }).unwrap()
}

fn file(broadcast: &Broadcast) -> OwnedFd {
    broadcast.fd().try_clone_to_owned().unwrap()
}

fn listen(broadcast: &Broadcast, reader: usize) -> Listener {
    Listener::open(file(broadcast), reader).unwrap()
}

fn receive(listener: &mut Listener) -> Message {
    let mut message = b"of before".to_vec();
    let kind = listener.receive(Wait::Park, &mut message).unwrap();
    (kind, message)
}

fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|index| (index.wrapping_mul(31) ^ index >> 8).wrapping_add(seed) as u8)
        .collect()
}

/// Fails instead of hanging.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        test();
        drop(done);
    });
    let result = ended.recv_timeout(Duration::from_secs(30));
    assert_ne!(result, Err(mpsc::RecvTimeoutError::Timeout), "it hangs");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// How a reader behaves.
#[derive(Clone, Copy, Debug)]
struct Habit {
    wait: Wait,
    in_place: bool,
    /// Every so many messages it rests.
    rests: Option<usize>,
}

impl Habit {
    fn read(self, listener: &mut Listener, number: usize) -> Message {
        if self.rests.is_some_and(|every| number.is_multiple_of(every)) {
            thread::sleep(Duration::from_micros(300));
        }
        if self.in_place {
            let copy = |kind, message: &super::Message<'_>| {
                // In two parts, cut anywhere.
                let mut bytes = vec![0; message.len()];
                let cut = number % (bytes.len() + 1);
                let (first, second) = bytes.split_at_mut(cut);
                message.copy(cut, second);
                message.copy(0, first);
                assert_eq!(message.to_vec(), bytes);
                (kind, bytes)
            };
            listener.receive_with(self.wait, copy).unwrap()
        } else {
            let mut message = Vec::new();
            let kind = listener.receive(self.wait, &mut message).unwrap();
            (kind, message)
        }
    }
}

/// Sends everything, in parts cut anywhere, to readers in threads, who must get all of it.
fn deliver(layout: BroadcastLayout, messages: Vec<(Message, usize)>, habits: &[Habit]) {
    let habits = habits.to_vec();
    in_time(move || {
        let mut broadcast = Broadcast::with_layout(layout).unwrap();
        thread::scope(|scope| {
            let readers = habits.iter().enumerate().map(|(reader, habit)| {
                let (mut listener, messages) = (listen(&broadcast, reader), &messages);
                scope.spawn(move || {
                    let read = |(number, (message, _)): (_, &(Message, _))| {
                        habit.read(&mut listener, number) == *message
                    };
                    // All of them, so that the writer finds its end.
                    messages.iter().enumerate().map(read).collect::<Vec<_>>()
                })
            });
            let readers: Vec<_> = readers.collect();
            for ((kind, message), cut) in &messages {
                let (first, second) = message.split_at(cut % (message.len() + 1));
                broadcast.send(*kind, &[first, &[], second]).unwrap();
            }
            for (reader, thread) in readers.into_iter().enumerate() {
                let wrong = thread.join().unwrap().iter().position(|right| !right);
                assert_eq!(wrong, None, "reader {reader}");
            }
            let sleepers = &broadcast.mapping.writer().sleepers;
            assert_eq!(sleepers.load(Ordering::Relaxed), 0);
        });
    });
}

fn habit() -> impl Strategy<Value = Habit> {
    let wait = prop::sample::select(vec![BRIEFLY, Wait::Park]);
    let rests = prop::option::weighted(0.3, 1_usize..5);
    (wait, any::<bool>(), rests).prop_map(|(wait, in_place, rests)| Habit {
        wait,
        in_place,
        rests,
    })
}

/// A case that hangs takes its time, so few are tried to make it smaller.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        max_shrink_iters: 8,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn every_reader_gets_everything_in_order(
        (slots, lines) in (1_u32..5, 1_u32..4),
        messages in vec(((any::<u32>(), vec(any::<u8>(), 0..700)), any::<usize>()), 1..60),
        habits in vec(habit(), 1..=4),
    ) {
        let layout = BroadcastLayout { slots, capacity: 64 * lines, readers: habits.len() as u32 };
        deliver(layout, messages, &habits);
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn messages_of_megabytes_arrive(
        lens in vec(prop_oneof![0_usize..5_000_000, 260_000_usize..264_000, 0_usize..40_000], 1..12),
        cut in any::<usize>(),
        habits in vec(habit(), 1..=4),
    ) {
        let messages = lens.iter().zip(0..).map(|(&len, seed)| ((seed, bytes(len, seed)), cut)).collect();
        deliver(BroadcastLayout::new(habits.len()).unwrap(), messages, &habits);
    }
}

#[test]
fn spinning_readers_get_everything() {
    let messages = (0..200).map(|seed| ((seed, bytes(seed as usize % 200, seed)), 77));
    let habit = |in_place| Habit {
        wait: Wait::Spin,
        in_place,
        rests: None,
    };
    let habits = [habit(true), habit(false)];
    deliver(
        BroadcastLayout { readers: 2, ..TINY },
        messages.collect(),
        &habits,
    );
}

#[test]
fn a_slow_reader_gets_everything_and_holds_up_the_others() {
    let messages = (0..100).map(|seed| ((seed, bytes(300, seed)), 0)).collect();
    let fast = Habit {
        wait: Wait::Park,
        in_place: true,
        rests: None,
    };
    let slow = Habit {
        rests: Some(1),
        ..fast
    };
    deliver(
        BroadcastLayout { readers: 2, ..TINY },
        messages,
        &[fast, slow],
    );
}

#[test]
fn sizes_around_the_slot() {
    in_time(|| {
        let mut broadcast = Broadcast::create(1).unwrap();
        let mut listener = listen(&broadcast, 0);
        let slot = 256 << 10;
        for len in [0, 1, 63, 64, slot - 1, slot, slot + 1, 2 * slot, 8 * slot] {
            let message = bytes(len, 5);
            broadcast.send(9, &[&message]).unwrap();
            assert!(receive(&mut listener) == (9, message), "{len}");
        }
        broadcast.send(1, &[]).unwrap();
        assert_eq!(receive(&mut listener), (1, Vec::new()));
    });
}

#[test]
fn a_message_of_one_slot_is_read_from_it_before_it_is_given_back() {
    let mut broadcast = tiny(1);
    let mut listener = listen(&broadcast, 0);
    let taken = |broadcast: &Broadcast| broadcast.mapping.reader(0).taken.load(Ordering::Relaxed);
    for round in 0..3_u8 {
        broadcast.send(3, &[&[round; 64]]).unwrap();
        let poll_response = |_, message: &super::Message<'_>| {
            assert_eq!(message.to_vec(), [round; 64]);
            // Not a copy: it shows what the slot holds by now.
            let slot = usize::from(round % 2);
            broadcast.mapping.write(slot, 8, &[0xEE; 8]);
            let mut bytes = [0; 8];
            message.copy(8, &mut bytes);
            assert_eq!(bytes, [0xEE; 8]);
            assert_eq!(taken(&broadcast), u64::from(round));
        };
        listener.receive_with(Wait::Park, poll_response).unwrap();
        assert_eq!(taken(&broadcast), u64::from(round) + 1);
    }
}

#[test]
#[should_panic(expected = "2 bytes from 3 on are not in a message of 4")]
fn no_more_than_the_message_is_copied() {
    let mut broadcast = tiny(1);
    broadcast.send(3, &[b"four"]).unwrap();
    let poll_response = |_, message: &super::Message<'_>| message.copy(3, &mut [0; 2]);
    listen(&broadcast, 0)
        .receive_with(Wait::Park, poll_response)
        .unwrap();
}

#[test]
fn what_was_sent_before_a_reader_came_waits_for_it() {
    let mut broadcast = tiny(2);
    broadcast.send(1, &[b"one"]).unwrap();
    broadcast.send(2, &[b"two"]).unwrap();
    for reader in [1, 0] {
        let mut listener = listen(&broadcast, reader);
        assert_eq!(receive(&mut listener), (1, b"one".to_vec()));
        assert_eq!(receive(&mut listener), (2, b"two".to_vec()));
    }
}

#[test]
fn the_writer_waits_for_a_reader_that_is_gone_and_the_others_read_on() {
    in_time(|| {
        let mut broadcast = tiny(2);
        drop(listen(&broadcast, 0));
        let mut listener = listen(&broadcast, 1);
        let (sent, told) = mpsc::channel();
        thread::spawn(move || {
            for kind in 0.. {
                broadcast.send(kind, &[]).unwrap();
                sent.send(kind).unwrap();
            }
        });
        for kind in 0..TINY.slots {
            assert_eq!(told.recv(), Ok(kind));
            assert_eq!(receive(&mut listener), (kind, Vec::new()));
        }
        let more = told.recv_timeout(Duration::from_millis(100));
        assert_eq!(more, Err(mpsc::RecvTimeoutError::Timeout));
    });
}

#[test]
fn a_count_that_cannot_be_is_an_error() {
    for nonsense in [3, 17, u64::MAX] {
        let mut broadcast = tiny(2);
        let listener = listen(&broadcast, 1);
        broadcast.send(0, &[]).unwrap();
        broadcast.send(0, &[]).unwrap();
        let taken = |reader| &broadcast.mapping.reader(reader).taken;
        taken(0).store(2, Ordering::Relaxed);
        taken(1).store(nonsense, Ordering::Relaxed);
        match broadcast.send(0, &[]) {
            Err(BroadcastError::ReaderCount {
                reader: 1,
                taken,
                published: 2,
                slots: 2,
            }) => assert_eq!(taken, nonsense),
            result => panic!("{result:?}"),
        }
        drop(listener);
    }
}

#[test]
fn a_count_that_falls_back_behind_the_ring_is_an_error() {
    let mut broadcast = tiny(1);
    let mut listener = listen(&broadcast, 0);
    for kind in 0..3 {
        broadcast.send(kind, &[]).unwrap();
        receive(&mut listener);
    }
    broadcast
        .mapping
        .reader(0)
        .taken
        .store(0, Ordering::Relaxed);
    let result = (0..3).try_for_each(|kind| broadcast.send(kind, &[]));
    assert!(matches!(
        result,
        Err(BroadcastError::ReaderCount { taken: 0, .. })
    ));
}

#[test]
fn a_message_cut_short_ends_the_broadcast() {
    let mut broadcast = tiny(1);
    let _listener = listen(&broadcast, 0);
    broadcast.send(0, &[]).unwrap();
    let set_taken = |broadcast: &Broadcast, count| {
        let taken = &broadcast.mapping.reader(0).taken;
        taken.store(count, Ordering::Relaxed);
    };
    set_taken(&broadcast, u64::MAX);
    // One slot is known to be free, the second fragment meets the count.
    let result = broadcast.send(0, &[&[7; 65]]);
    assert!(matches!(result, Err(BroadcastError::ReaderCount { .. })));
    set_taken(&broadcast, 2);
    assert!(matches!(broadcast.send(0, &[]), Err(BroadcastError::Torn)));
}

#[test]
fn a_fragment_longer_than_its_slot_is_refused() {
    let mut broadcast = tiny(1);
    let mut listener = listen(&broadcast, 0);
    broadcast.send(0, &[b"x"]).unwrap();
    let len = &broadcast.mapping.fragment(0).len;
    len.store(65, Ordering::Relaxed);
    let result = listener.receive(Wait::Park, &mut Vec::new());
    let expected = "slot 0 announces a fragment of 65 bytes, it can hold 64";
    assert_eq!(result.unwrap_err().to_string(), expected);
}

#[test]
fn reader_numbers() {
    for readers in [0, 65, usize::MAX] {
        let result = Broadcast::create(readers).map(|_| ());
        let expected =
            format!("a broadcast to {readers} readers is not possible, it may have 1 to 64");
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
    let broadcast = Broadcast::create(64).unwrap();
    let last = listen(&broadcast, 63);
    let open = |reader| Listener::open(file(&broadcast), reader).map(|_| ());
    assert!(matches!(
        open(64),
        Err(BroadcastError::Reader {
            reader: 64,
            readers: 64
        })
    ));
    assert!(matches!(
        open(63),
        Err(BroadcastError::ReaderTaken { reader: 63 })
    ));
    drop(last);
    assert!(matches!(
        open(63),
        Err(BroadcastError::ReaderTaken { reader: 63 })
    ));
    open(0).unwrap();
}

#[test]
fn a_number_is_taken_once_however_many_try() {
    let broadcast = tiny(1);
    let tries: Vec<_> = (0..8).map(|_| file(&broadcast)).collect();
    let opened = thread::scope(|scope| {
        let open = |file| scope.spawn(move || Listener::open(file, 0).is_ok());
        let tries: Vec<_> = tries.into_iter().map(open).collect();
        tries
            .into_iter()
            .map(|thread| usize::from(thread.join().unwrap()))
            .sum::<usize>()
    });
    assert_eq!(opened, 1);
}

#[test]
fn foreign_files_are_refused() {
    let header = TINY.encode_header();
    let size = TINY.total_bytes() as u64;
    assert_eq!(BroadcastLayout::decode_header(&header, size).unwrap(), TINY);
    let short = BroadcastLayout::decode_header(&header, size - 1);
    assert!(matches!(short, Err(HeaderError::TooShort { needed, .. }) if needed == size));
    for (word, value, field) in [
        (0, 1, "magic"),
        (1, 1, "magic"),
        (2, 2, "version"),
        (3, 0, "slot count"),
        (4, 0, "slot bytes"),
        (4, 65, "slot bytes"),
        (5, 0, "reader count"),
        (5, 65, "reader count"),
    ] {
        let mut header: [u8; HEADER_BYTES] = header;
        header[4 * word..4 * word + 4].copy_from_slice(&u32::to_le_bytes(value));
        let result = BroadcastLayout::decode_header(&header, u64::MAX);
        let Err(HeaderError::Field { field: found, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(found, field);
    }
    for content in [&b""[..], &header] {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(file);
        file.write_all(content).unwrap();
        let result = Listener::open(file.into(), 0).map(|_| ());
        let Err(BroadcastError::Header(HeaderError::TooShort { .. })) = result else {
            panic!("{result:?}");
        };
    }
}

#[test]
fn the_file_has_no_name_and_keeps_its_size() {
    let broadcast = Broadcast::create(3).unwrap();
    let link = format!("/proc/self/fd/{}", broadcast.fd().as_raw_fd());
    let target = std::fs::read_link(link).unwrap();
    assert!(target.to_string_lossy().contains("(deleted)"), "{target:?}");
    let file = std::fs::File::from(file(&broadcast));
    let size = file.metadata().unwrap().len();
    assert_eq!(size, 128 + 3 * 64 + 8 * (64 + (256 << 10)));
    for other in [0, size + 1] {
        assert!(file.set_len(other).is_err());
    }
}

#[test]
fn descriptors_are_close_on_exec() {
    fn is_set(fd: impl AsFd) -> bool {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        flags.contains(FdFlags::CLOEXEC)
    }
    let broadcast = tiny(1);
    assert!(is_set(broadcast.fd()));
    let inherited = rustix::io::dup(broadcast.fd()).unwrap();
    assert!(!is_set(&inherited));
    let listener = Listener::open(inherited, 0).unwrap();
    assert!(is_set(listener.mapping.file()));
}
