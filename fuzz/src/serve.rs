//! A hostile client against the responder, over a real region: whatever it sends and whenever it changes that, each
//! request gets one answer.
#![expect(unsafe_code, reason = "the client's side of the region is raw memory")]

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pie_driver::{Batch, DeviceTimes, Event, Job, Responder, status};
use pie_planner::{Layout, Limits, Planner};
use pie_ring::{
    ExitGuard, HEADER_BYTES, RegionLayout, SLOT_HEADER_BYTES, Server, ServerConfig, Wait,
};
use pie_wire::{CopyDirection, SCHEMA_HASH};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use crate::staged::{Blank, Staged};
use crate::wire::exact;

const REQUEST: usize = 1 << 13;
const RESPONSE: usize = 1 << 13;
const WATCHDOG: Duration = Duration::from_secs(20);
/// How both sides wait: short enough for the fuzzer, kind to a machine with few cores.
const WAIT: Wait = Wait::SpinThenPark(Duration::from_micros(50));

const LIMITS: Limits = Limits {
    page_size: 16,
    total_pages: 32,
    vocab_size: 50,
    max_positions: 120,
    row_pages: 8,
    max_requests: 4,
    chunk_tokens: 16,
    max_slots: 8,
    reply_bytes: RESPONSE as u32,
};

/// Pages of the host pool.
const HOST_PAGES: u32 = 9;

/// Offsets in the region, from the protocol's text.
mod offset {
    pub(super) const REQ_WAKE: usize = 32;
    pub(super) const REQ_SEQ: usize = 64;
    pub(super) const RESP_SEQ: usize = 72;
    pub(super) const REQ_LEN: usize = 88;
    pub(super) const RESP_LEN: usize = 92;
    pub(super) const RESP_WAKE: usize = 112;
}

/// What the client does besides sending. In an input: a byte of flags, a length, four words to write.
struct Tricks {
    /// The engine drops its jobs.
    drop_jobs: bool,
    /// What the length word says.
    length: Option<u32>,
    /// Words of the request, or after them its length, and what they become, to and fro, while it is
    /// being served.
    scribbles: Vec<(usize, u32)>,
    /// The client gives up while the engine is at work, and sends the same again.
    give_up: bool,
}

/// Bytes before the payload.
const TRICKS: usize = 1 + 4 + 4 * 6;

/// An input of [`call`].
pub(crate) fn join(flags: u8, payload: &[u8]) -> Vec<u8> {
    let rest = (1..TRICKS as u8).map(|byte| byte.wrapping_mul(flags));
    [flags]
        .into_iter()
        .chain(rest)
        .chain(payload.iter().copied())
        .collect()
}

impl Tricks {
    /// Reads the tricks that are played on a payload of `words` words.
    fn of(bytes: &[u8; TRICKS], words: usize) -> Self {
        let (&flags, rest) = bytes.split_first().expect("there are more bytes");
        let (length, scribbles) = rest.split_first_chunk().expect("there are more bytes");
        let flag = |bit: u8| flags >> bit & 1 == 1;
        let scribble = |&[a, b, word @ ..]: &[u8; 6]| {
            (
                usize::from(u16::from_le_bytes([a, b])) % words,
                u32::from_le_bytes(word),
            )
        };
        Self {
            drop_jobs: flag(0) && flag(1),
            length: (flag(2) && flag(3)).then_some(u32::from_le_bytes(*length)),
            scribbles: scribbles
                .as_chunks()
                .0
                .iter()
                .filter(|_| flag(4))
                .map(scribble)
                .collect(),
            give_up: flag(5),
        }
    }
}

/// Tricks, then a payload.
pub(crate) fn call(data: &[u8]) {
    static REGION: LazyLock<Mutex<Region>> = LazyLock::new(|| Mutex::new(Region::start()));
    let Some((tricks, payload)) = data.split_first_chunk() else {
        return;
    };
    let mut words = exact::<8>(&payload[..payload.len().min(REQUEST)]);
    let length = words.len();
    words.resize(length.next_multiple_of(4).max(4), 0);
    let words: &[u32] = bytemuck::cast_slice(&words);
    let tricks = Tricks::of(tricks, words.len() + 1);
    let length = tricks.length.unwrap_or(length as u32);
    REGION
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .call(&[words, &[length]].concat(), &tricks);
}

/// What the client tells the engine: they are one process here.
#[derive(Default)]
struct Prompts {
    drop_jobs: AtomicBool,
    /// The engine keeps its job unless a trick says otherwise.
    hold: AtomicBool,
    /// The engine has a job and keeps it.
    held: AtomicBool,
}

/// The client's mapping of a region with one slot; a thread of this process serves it.
struct Region {
    base: *mut u8,
    sent: u64,
    /// Answers that must have come.
    answers: u32,
    prompts: Arc<Prompts>,
}

// SAFETY: the mapping lives as long as the process and is reached through atomics only.
unsafe impl Send for Region {}

impl Region {
    fn start() -> Self {
        let name = format!("/pie_fuzz_{}", std::process::id());
        let mut config = ServerConfig::new(&name, SCHEMA_HASH, pie_wire::abort_frame(0).to_vec());
        config.layout =
            RegionLayout::new(1, REQUEST as u32, RESPONSE as u32).expect("a valid layout");
        let server =
            Server::create(&config, &ExitGuard::inert()).expect("there is room for a small region");
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(format!("/dev/shm{name}"));
        let (file, access) = (file.expect("it exists"), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel picks the address, so no existing mapping is replaced.
        let base = unsafe {
            rustix::mm::mmap(
                null_mut(),
                config.layout.total_bytes(),
                access,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        // Both sides have it mapped: nothing is left of a fuzzer that is killed.
        server.unlink();
        let prompts = Arc::<Prompts>::default();
        let heard = Arc::clone(&prompts);
        thread::spawn(move || serve(server, &heard));
        Self {
            base: base.expect("there is address space").cast(),
            sent: 0,
            answers: 0,
            prompts,
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4)
                && offset < HEADER_BYTES + SLOT_HEADER_BYTES + REQUEST + RESPONSE
        );
        // SAFETY: aligned and inside the mapping by the assertion; only accessed atomically.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
    }

    fn sequence(&self, offset: usize) -> &AtomicU64 {
        assert!(offset == offset::REQ_SEQ || offset == offset::RESP_SEQ);
        // SAFETY: aligned and inside the mapping by the assertion; only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// Writes the word of a request, or after the last of `count` its length.
    fn put(&self, index: usize, count: usize, word: u32) {
        let offset = if index < count {
            HEADER_BYTES + SLOT_HEADER_BYTES + 4 * index
        } else {
            offset::REQ_LEN
        };
        self.word(offset).store(word, Ordering::Relaxed);
    }

    /// Sends a request, given as its words and its length.
    fn call(&mut self, words: &[u32], tricks: &Tricks) {
        for (index, &word) in words.iter().enumerate() {
            self.put(index, words.len() - 1, word);
        }
        self.prompts
            .drop_jobs
            .store(tricks.drop_jobs, Ordering::Relaxed);
        self.prompts.held.store(false, Ordering::Relaxed);
        self.prompts.hold.store(tricks.give_up, Ordering::Relaxed);
        self.send();
        if tricks.give_up {
            self.await_while_scribbling(words, tricks, |region| {
                region.is_held() || region.is_answered()
            });
            if self.is_held() {
                self.send();
            }
            self.prompts.hold.store(false, Ordering::Release);
        }
        self.answers = self.answers.wrapping_add(1);
        self.await_while_scribbling(words, tricks, |region| {
            region.is_answered() && region.is_woken()
        });
        self.read_answer();
    }

    fn send(&mut self) {
        self.sent += 1;
        self.sequence(offset::REQ_SEQ)
            .store(self.sent, Ordering::Release);
        let wake = self.word(offset::REQ_WAKE);
        wake.fetch_add(1, Ordering::Release);
        futex::wake(wake, futex::Flags::empty(), u32::MAX >> 1).expect("the word is mapped");
    }

    fn await_while_scribbling(
        &self,
        words: &[u32],
        tricks: &Tricks,
        ready: impl Fn(&Self) -> bool,
    ) {
        let started = Instant::now();
        while !ready(self) {
            assert!(started.elapsed() < WATCHDOG, "no answer");
            for &(index, word) in &tricks.scribbles {
                self.put(index, words.len() - 1, word);
            }
            std::hint::spin_loop();
            for &(index, _) in &tricks.scribbles {
                self.put(index, words.len() - 1, words[index]);
            }
        }
    }

    fn is_held(&self) -> bool {
        self.prompts.held.load(Ordering::Acquire)
    }

    fn is_answered(&self) -> bool {
        self.sequence(offset::RESP_SEQ).load(Ordering::Acquire) == self.sent
    }

    /// Whether the last answer's wake-up has come.
    fn is_woken(&self) -> bool {
        let answers = self.word(offset::RESP_WAKE).load(Ordering::Acquire);
        assert!(
            answers <= self.answers,
            "{answers} answers for {}",
            self.answers
        );
        answers == self.answers
    }

    fn read_answer(&self) {
        let length = self.word(offset::RESP_LEN).load(Ordering::Relaxed) as usize;
        assert!(length <= RESPONSE);
        let start = HEADER_BYTES + SLOT_HEADER_BYTES + REQUEST;
        let words = (0..length.div_ceil(4))
            .map(|index| self.word(start + 4 * index).load(Ordering::Relaxed));
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).take(length).collect();
        pie_wire::decode_reply(&exact::<4>(&bytes)).expect("a valid reply");
    }
}

/// The driver: answers for ever.
fn serve(mut server: Server, prompts: &Prompts) {
    let planner = Planner::new(LIMITS, 1).with_adapters(std::num::NonZeroUsize::MIN);
    let responder = Responder::new(planner, HOST_PAGES, WAIT);
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    loop {
        match responder
            .next(&mut server)
            .expect("the kernel lets it wait")
        {
            Event::Woken => unreachable!("no thread calls"),
            Event::Stopped => return,
            Event::LogLines(_) | Event::Step(_) => {}
            Event::DeviceLost(error) => panic!("there is no graph path: {error}"),
            Event::Job(job) => {
                if prompts.hold.load(Ordering::Acquire) {
                    prompts.held.store(true, Ordering::Release);
                    while prompts.hold.load(Ordering::Acquire) {
                        thread::yield_now();
                    }
                }
                if !prompts.drop_jobs.load(Ordering::Relaxed) {
                    work(job, &mut block);
                }
            }
        }
    }
}

/// An engine that samples token 7.
fn work(job: Job, block: &mut [u64]) {
    match job {
        Job::Copy(mut copy) => {
            let (from, to) = match copy.direction() {
                CopyDirection::D2H => (LIMITS.total_pages, HOST_PAGES),
                CopyDirection::H2D => (HOST_PAGES, LIMITS.total_pages),
                CopyDirection::D2D => (LIMITS.total_pages, LIMITS.total_pages),
                CopyDirection::H2H => (HOST_PAGES, HOST_PAGES),
            };
            let mut pairs = 0;
            for (sources, targets) in copy.batches() {
                assert_eq!(sources.len(), targets.len());
                assert!(sources.iter().all(|&page| page < from));
                assert!(targets.iter().all(|&page| page < to));
                pairs += sources.len();
            }
            assert_eq!(pairs, copy.len());
            copy.commit(status::OK);
        }
        Job::Load(mut load) => {
            assert!(load.id() > 0 && !load.path().is_empty());
            load.commit(status::OK, "");
        }
        Job::Batch(mut batch) => {
            run(&mut batch, block);
            batch.commit(DeviceTimes::default());
        }
    }
}

fn run(batch: &mut Batch, block: &mut [u64]) {
    let layout = Layout::new(&LIMITS);
    while let Some(pass) = batch
        .stage(bytemuck::cast_slice_mut(block))
        .expect("the block fits")
    {
        Staged {
            limits: &LIMITS,
            layout: &layout,
            block,
        }
        .check_pass(&pass);
        while let Some(group) = batch
            .stage_slots(bytemuck::cast_slice_mut(block))
            .expect("the block fits")
        {
            Staged {
                limits: &LIMITS,
                layout: &layout,
                block,
            }
            .check_group(&pass, &group);
            let labels = batch.group_labels().len();
            let staged = Staged {
                limits: &LIMITS,
                layout: &layout,
                block,
            };
            let outputs = Blank::of(&staged, &group, labels, batch.group_logprob_positions());
            let taken = outputs.with(|outputs| batch.put_outputs(outputs));
            taken.expect("as many as asked for");
        }
    }
}
