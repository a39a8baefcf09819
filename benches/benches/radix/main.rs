//! The prefix index.

mod peers;
mod python;

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use allocation_counter::measure;
use criterion::{Criterion, criterion_group, criterion_main};
use peers::{Index, Make, Ours, PEERS};
use pie_benches::report::{self, Summary, Unit};
use pie_benches::timing::{self, Race, Samples};
use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, RadixIndex};

/// Qwen 3's; tokens take three bytes.
const VOCABULARY: u64 = 151_936;
const CONVERSATIONS: usize = 1000;
const TURNS: usize = 8;
const SYSTEM_PROMPT: usize = 1000;
/// Tokens of a hit.
const HIT: usize = 2048;
/// Other sequences in the index that is looked up in.
const OTHERS: usize = 1000;
/// Nodes of the index that evicts, and how many leaves it has by branch.
const NODES: usize = 1_000_000;
const BRANCH: usize = 1000;
const EVICTED: usize = 1000;

/// A small generator of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(VOCABULARY) as u32).collect()
    }
}

/// A request and its answer: the tokens that are looked up, and those that are inserted then.
struct Turn {
    conversation: usize,
    prompt: usize,
    end: usize,
}

/// Conversations that begin with one system prompt and take turns.
struct Workload {
    texts: Vec<Vec<u32>>,
    turns: Vec<Turn>,
}

impl Workload {
    fn new() -> Self {
        let mut random = Random(1);
        let system = random.tokens(SYSTEM_PROMPT);
        let mut texts = vec![system; CONVERSATIONS];
        // No two continue alike, not even for a token.
        for (number, text) in texts.iter_mut().enumerate() {
            text.push(number as u32);
        }
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            for (conversation, text) in texts.iter_mut().enumerate() {
                let question = 40 + random.below(80) as usize;
                let answer = 100 + random.below(200) as usize;
                text.extend(random.tokens(question));
                let prompt = text.len();
                text.extend(random.tokens(answer));
                let end = text.len();
                turns.push(Turn {
                    conversation,
                    prompt,
                    end,
                });
            }
        }
        Self { texts, turns }
    }

    fn text(&self, turn: &Turn) -> &[u32] {
        &self.texts[turn.conversation][..turn.end]
    }

    /// Plays all turns, and compares what every lookup finds with what is there.
    fn play(&self, index: &mut dyn Index, page: usize) {
        let mut ends = vec![0; CONVERSATIONS];
        for (number, turn) in self.turns.iter().enumerate() {
            let text = self.text(turn);
            index.prepare(text);
            let there = match ends[turn.conversation] {
                0 if number == 0 => 0,
                0 => SYSTEM_PROMPT,
                end => end,
            };
            assert_eq!(index.lookup(&text[..turn.prompt]), there / page * page);
            index.insert(text);
            ends[turn.conversation] = turn.end;
        }
    }

    /// Tokens that an index of whole pages holds in the end.
    fn cached(&self, page: usize) -> usize {
        let whole = |tokens: usize| tokens / page * page;
        let own = self
            .texts
            .iter()
            .map(|text| whole(text.len()) - whole(SYSTEM_PROMPT));
        whole(SYSTEM_PROMPT) + own.sum::<usize>()
    }

    /// Turn by turn, from the start again when all are done; a value is one turn.
    fn turns<'a>(
        &'a self,
        mut index: Box<dyn Index>,
        mut restart: impl FnMut(Box<dyn Index>) -> Box<dyn Index> + 'a,
    ) -> impl FnMut(u64, &mut Samples) -> Duration + 'a {
        let mut at = 0;
        move |operations, samples| {
            let mut total = Duration::ZERO;
            for _ in 0..operations {
                if at == self.turns.len() {
                    at = 0;
                    let old = std::mem::replace(&mut index, Box::new(Nothing));
                    index = restart(old);
                }
                let turn = &self.turns[at];
                let text = self.text(turn);
                index.prepare(text);
                // A request was just read when it is looked up.
                black_box(text.iter().fold(0, |sum, token| sum ^ token));
                let start = Instant::now();
                index.lookup(&text[..turn.prompt]);
                index.insert(text);
                let elapsed = start.elapsed();
                samples.record(elapsed);
                total += elapsed;
                at += 1;
            }
            total
        }
    }
}

/// In place of an index that is being made anew.
struct Nothing;

impl Index for Nothing {
    fn lookup(&mut self, _: &[u32]) -> usize {
        0
    }

    fn insert(&mut self, _: &[u32]) {}
}

/// Lookups of one sequence among others, of which it is one, or is not.
fn lookups(criterion: &mut Criterion) {
    let mut random = Random(2);
    let others: Vec<Vec<u32>> = (0..OTHERS).map(|_| random.tokens(HIT / 4)).collect();
    let text = &random.tokens(HIT);
    for (row, hit) in [("radix/match_lock/2048", HIT), ("radix/miss", 0)] {
        if !is_wanted(row) {
            continue;
        }
        let filled = |mut index: Box<dyn Index>| {
            let stored = others.iter().chain((hit > 0).then_some(text));
            for other in stored {
                index.prepare(other);
                index.lookup(other);
                index.insert(other);
            }
            index.prepare(text);
            assert_eq!(index.lookup(text), hit);
            index.release();
            index
        };
        let mut ours = filled(Box::new(Ours::new(1)));
        let mut race = Race::new(row, Unit::Ns, move || {
            let found = ours.lookup(text);
            ours.release();
            found
        });
        for (name, make) in PEERS {
            let mut peer = lazy(make, &filled);
            race = race.peer(name, move || peer(text));
        }
        race.run(criterion);
    }
}

/// Whether criterion's filter lets a row through: sides take seconds to fill.
fn is_wanted(row: &str) -> bool {
    let mut filters = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'));
    filters.all(|filter| row.contains(&filter))
}

/// A lookup in a peer that is filled when it is needed first.
fn lazy<'a>(
    make: Make,
    filled: &'a dyn Fn(Box<dyn Index>) -> Box<dyn Index>,
) -> impl FnMut(&[u32]) -> usize + 'a {
    let mut made = None;
    move |text| made.get_or_insert_with(|| filled(make(1))).lookup(text)
}

/// Turns of conversations: a lookup of the prompt and an insertion of prompt and answer.
fn conversations(criterion: &mut Criterion) {
    let workload = Workload::new();
    for page in [1, 16] {
        let case = python::Case::conversations(&workload, page);
        let row = format!("radix/conversations/{page}");
        if !is_wanted(&row) {
            continue;
        }
        let fresh = move |make: Make| move |_| make(page);
        let ours = workload.turns(Box::new(Ours::new(page)), move |_| {
            Box::new(Ours::new(page))
        });
        workload.play(&mut Ours::new(page), page);
        let mut race = Race::new_turns(row, Unit::Ns, ours);
        for (name, make) in PEERS {
            workload.play(&mut *make(page), page);
            race = race.peer_turns(name, workload.turns(make(page), fresh(make)));
        }
        race.peer_turns("sglang", case.side("sglang:conversations"))
            .run(criterion);
    }
}

/// Heap bytes for each token of the conversations.
fn memory(criterion: &mut Criterion) {
    let workload = Workload::new();
    for page in [1, 16] {
        let name = format!("radix/memory/{page}");
        // Criterion's filter, for a row that has nothing to time.
        let mut wanted = false;
        criterion.bench_function(&name, |bencher| {
            wanted = true;
            bencher.iter_custom(Duration::from_millis);
        });
        if !wanted {
            continue;
        }
        let bytes = |make: &dyn Fn() -> Box<dyn Index>| {
            let mut index: Option<Box<dyn Index>> = None;
            let held = measure(|| workload.play(&mut **index.insert(make()), page));
            Summary::exact(held.bytes_current as f64 / workload.cached(page) as f64)
        };
        let ours = bytes(&|| Box::new(Ours::new(page)));
        let mut row = report::Row::new(&name, Unit::Bytes, ours);
        for (name, make) in PEERS.iter().filter(|(name, _)| !name.ends_with("_hashed")) {
            row = row.peer(name, bytes(&|| make(page)));
        }
        row.write(&report::folder())
            .expect("the row's file can be written");
    }
}

/// A thousand pages evicted, least recently used first, from a million nodes of one page that were used in any order.
fn evict(criterion: &mut Criterion) {
    let made = RefCell::new(None);
    let turn = |operations, samples: &mut Samples| {
        let mut made = made.borrow_mut();
        let many = made.get_or_insert_with(Many::new);
        let mut total = Duration::ZERO;
        for _ in 0..operations {
            let start = Instant::now();
            let evicted = many.index.evict(EVICTED, &mut many.evicted);
            let elapsed = start.elapsed();
            assert_eq!(evicted, EVICTED);
            many.refill();
            samples.record(elapsed);
            total += elapsed;
        }
        total
    };
    Race::new_turns("radix/evict/1000", Unit::Us, turn).run(criterion);
}

/// An index of many nodes of one page each.
struct Many {
    index: RadixIndex,
    evicted: EvictResult,
    random: Random,
    next: u32,
}

impl Many {
    fn new() -> Self {
        let mut many = Self {
            index: RadixIndex::new(Config::default()).expect("a valid config"),
            evicted: EvictResult::default(),
            random: Random(3),
            next: 0,
        };
        let mut keys: Vec<[u32; 2]> = (0..NODES as u32)
            .map(|leaf| [leaf / BRANCH as u32, leaf])
            .collect();
        for key in &keys {
            many.insert(key);
        }
        for at in (1..keys.len()).rev() {
            keys.swap(at, many.random.below(at as u64 + 1) as usize);
        }
        let mut pages = Vec::new();
        for key in &keys {
            let found = many.index.match_prefix(Key::new(key), 0, &mut pages);
            assert_eq!(found.device_pages, 2);
        }
        many
    }

    fn insert(&mut self, key: &[u32; 2]) {
        let pages = [self.next, self.next + 1];
        self.next += 2;
        self.index
            .insert(Key::new(key), &pages, InsertParams::default())
            .expect("a page for each token");
    }

    /// As many new leaves as were evicted.
    fn refill(&mut self) {
        while self.index.len() < NODES {
            let branch = self.random.below((NODES / BRANCH) as u64) as u32;
            let leaf = NODES as u32 + self.next;
            self.insert(&[branch, leaf]);
        }
    }
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = lookups, python::lookups, conversations, memory, evict
}
criterion_main!(benches);
