//! Bound sequences: what they say, and that others do not notice them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pie_scheduler::{
    Config, Finish, FrameBytes, GrammarHandle, GrammarMatcher, GrammarStatus, Limits, Mask,
    NewRequest, Outputs, Scheduler, StepOutput,
};
use proptest::prelude::*;

const VOCAB: u32 = 100;
const END: u32 = 99;

/// The output must go through these sets of tokens, one after the other, and then end.
#[derive(Debug)]
struct Path {
    sets: Vec<Vec<u32>>,
    ready: AtomicBool,
    broken_at: Option<usize>,
    /// How often it is not prepared after each token.
    late: u32,
}

impl Path {
    fn new(sets: &[&[u32]]) -> Arc<Self> {
        Self::late(sets, 0)
    }

    fn late(sets: &[&[u32]], late: u32) -> Arc<Self> {
        Arc::new(Self {
            sets: sets.iter().map(|set| set.to_vec()).collect(),
            ready: AtomicBool::new(true),
            broken_at: None,
            late,
        })
    }
}

/// Where a sequence is on its path.
#[derive(Debug)]
struct Walker {
    sets: Vec<Vec<u32>>,
    broken_at: Option<usize>,
    at: usize,
    most: usize,
    asked: bool,
    late: u32,
    /// Calls until it is prepared.
    left: u32,
    /// The mask that it gave last.
    last: Option<Mask>,
}

/// So that a test keeps the path and the request has it, too.
#[derive(Debug)]
struct Shared(Arc<Path>);

/// Cannot be had now.
#[derive(Debug)]
struct Busy;

impl GrammarHandle for Busy {
    fn create_matcher(&self, _: u32, _: bool) -> GrammarStatus {
        GrammarStatus::Busy("try again later".into())
    }

    fn is_compiling(&self) -> bool {
        false
    }
}

impl GrammarHandle for Shared {
    fn create_matcher(&self, most: u32, _: bool) -> GrammarStatus {
        if !self.0.ready.load(Ordering::Relaxed) {
            return GrammarStatus::Compiling;
        }
        if self.0.sets.is_empty() {
            return GrammarStatus::Invalid("it has no path".into());
        }
        GrammarStatus::Ready(Box::new(Walker {
            sets: self.0.sets.clone(),
            broken_at: self.0.broken_at,
            at: 0,
            most: most as usize,
            asked: false,
            late: self.0.late,
            left: 0,
            last: None,
        }))
    }

    fn is_compiling(&self) -> bool {
        !self.0.ready.load(Ordering::Relaxed)
    }
}

impl GrammarMatcher for Walker {
    fn accept_token(&mut self, token: u32, most: u32) -> bool {
        assert!(self.asked, "a token that was not asked for");
        let holders = self.last.take().map(|mask| Arc::strong_count(&mask));
        assert!(holders.is_none_or(|count| count == 1), "a mask is kept");
        self.asked = false;
        self.left = self.late;
        self.most = most as usize;
        if token == END {
            assert_eq!(self.at, self.sets.len(), "an end too early");
            return true;
        }
        assert!(
            self.sets[self.at].contains(&token),
            "{token} at {}",
            self.at
        );
        self.at += 1;
        false
    }

    fn prepare_mask(&mut self, _: &mut Duration) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        assert!(!self.asked, "asked twice");
        self.asked = true;
        if self.broken_at.is_some_and(|broken| self.at >= broken) {
            return Err("it broke".into());
        }
        while self.most > 0 && self.at < self.sets.len() && self.sets[self.at].len() == 1 {
            forced.push(self.sets[self.at][0]);
            self.at += 1;
            self.most -= 1;
        }
        let mut mask = vec![0; 4];
        let end = [END];
        let set = self.sets.get(self.at).map_or(&end[..], |set| set);
        for &token in set {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        let mask = Arc::new(mask);
        self.last = Some(Arc::clone(&mask));
        Ok(Some(mask))
    }
}

/// What a row is drawn: of those that may be, by all that came before.
fn draw(tokens: &[u32], mask: Option<&[u32]>) -> u32 {
    let hash = tokens.iter().fold(7_u32, |hash, &token| {
        hash.wrapping_mul(31).wrapping_add(token)
    });
    let bit =
        |token: &u32| mask.is_none_or(|mask| mask[*token as usize / 32] >> (token % 32) & 1 == 1);
    let allowed: Vec<u32> = (0..VOCAB - u32::from(mask.is_none())).filter(bit).collect();
    allowed[hash as usize % allowed.len()]
}

/// A driver that keeps the tokens of each sequence as its KV.
#[derive(Default)]
struct Driver {
    contexts: BTreeMap<u64, Vec<u32>>,
    /// Steps that are out: tokens of each row.
    out: Vec<Vec<Drawn>>,
    last: Vec<u32>,
    drawn: usize,
}

struct Drawn {
    context: u64,
    start: usize,
    tokens: Vec<u32>,
    awaits: Option<usize>,
    mask: Option<Vec<u32>>,
    draws: bool,
}

type Ended = BTreeMap<(u64, u32), (Vec<u32>, Option<(Finish, Option<String>)>)>;

struct World {
    scheduler: Scheduler<()>,
    driver: Driver,
    outputs: Outputs,
    said: Ended,
    now: u64,
    most_masks: usize,
}

/// Bytes of a mask in a frame.
const MASK: u32 = 100;

impl World {
    fn new(pages: u32) -> Self {
        Self::with_masks(pages, u32::MAX / MASK)
    }

    /// A frame has room for so many masks.
    fn with_masks(pages: u32, most: u32) -> Self {
        let limits = Limits {
            total_pages: pages,
            host_pages: 0,
            page_size: 4,
            max_forward_tokens: 64,
            max_forward_requests: 8,
            max_page_refs: 400,
            max_image_bytes: 0,
            max_model_len: 200,
            vocab_size: VOCAB,
            max_logprob_words: 1 << 16,
            frame: FrameBytes {
                max: MASK * most,
                mask: MASK,
                ..FrameBytes::UNLIMITED
            },
        };
        let config = Config {
            max_running: 8,
            ..Config::default()
        };
        Self {
            scheduler: Scheduler::new(config, limits, None).unwrap(),
            driver: Driver::default(),
            outputs: Outputs::default(),
            said: Ended::new(),
            now: 0,
            most_masks: most as usize,
        }
    }

    fn step(&mut self) -> bool {
        self.now += 100;
        let Some(step) = self.scheduler.schedule(self.now).unwrap() else {
            return false;
        };
        let rows = step.rows().map(|row| Drawn {
            context: row.context,
            start: row.start as usize,
            tokens: row.tokens.to_vec(),
            awaits: row.awaits.map(|row| row as usize),
            mask: row.mask.map(<[u32]>::to_vec),
            draws: row.sampling.is_some(),
        });
        let rows: Vec<Drawn> = rows.collect();
        for row in &rows {
            assert!(row.mask.is_none() || row.awaits.is_none() && row.draws);
        }
        let mut masks: Vec<&Vec<u32>> = rows.iter().filter_map(|row| row.mask.as_ref()).collect();
        // Rows that follow each other share one.
        masks.dedup();
        assert!(masks.len() <= self.most_masks, "{} masks", masks.len());
        self.driver.out.push(rows);
        true
    }

    fn answer(&mut self) {
        if self.driver.out.is_empty() {
            return;
        }
        self.now += 100;
        let (mut tokens, mut ends, mut last) = (Vec::new(), vec![0], Vec::new());
        for mut row in self.driver.out.remove(0) {
            if let Some(before) = row.awaits {
                row.tokens[0] = self.driver.last.get(before).copied().unwrap_or(0);
            }
            let known = self.driver.contexts.entry(row.context).or_default();
            // Shared pages are computed by others; the sequence itself says what is in them.
            known.resize(known.len().max(row.start), u32::MAX);
            known.truncate(row.start);
            known.extend(&row.tokens);
            if row.draws {
                self.driver.drawn += 1;
                last.push(draw(
                    &row.tokens[row.tokens.len() - 1..],
                    row.mask.as_deref(),
                ));
                tokens.extend(last.last());
            }
            ends.push(tokens.len() as u32);
        }
        self.driver.last = last;
        let answer = StepOutput {
            tokens: &tokens,
            token_ends: &ends,
            ..StepOutput::default()
        };
        self.scheduler.process_output(self.now, &answer).unwrap();
        self.collect();
    }

    fn collect(&mut self) {
        self.scheduler.outputs(&mut self.outputs);
        for output in self.outputs.iter() {
            let said = self.said.entry((output.id, output.sample)).or_default();
            assert!(said.1.is_none(), "an output after the end");
            said.0.extend(output.tokens);
            let reason = output.reason.map(str::to_owned);
            said.1 = output.finish.map(|finish| (finish, reason));
        }
    }

    fn run(&mut self) {
        for _ in 0..5000 {
            let stepped = self.step();
            if !stepped && self.driver.out.is_empty() {
                break;
            }
            self.answer();
        }
        self.collect();
        self.scheduler.check_invariants().unwrap();
    }
}

fn bound(id: u64, prompt: Vec<u32>, path: &Arc<Path>, samples: u32) -> NewRequest<()> {
    let mut request = NewRequest::new(id, prompt, (), 50);
    request.grammar = Some(Arc::new(Shared(Arc::clone(path))));
    request.stop.stop_tokens = vec![END];
    request.samples = samples;
    request
}

/// What follows a prompt, by one token after the other.
fn expected(prompt: &[u32], path: Option<&Path>, most: usize) -> Vec<u32> {
    let (mut token, mut said) = (*prompt.last().unwrap(), Vec::new());
    while said.len() < most {
        let mask = path.map(|path| {
            let mut mask = vec![0_u32; 4];
            let end = [END];
            let set = path.sets.get(said.len()).map_or(&end[..], |set| set);
            for &token in set {
                mask[token as usize / 32] |= 1 << (token % 32);
            }
            mask
        });
        token = draw(&[token], mask.as_deref());
        said.push(token);
        if token == END {
            break;
        }
    }
    said
}

const SETS: [&[u32]; 9] = [
    &[5],
    &[6],
    &[1, 2, 3],
    &[9],
    &[9],
    &[9],
    &[40, 41, 98],
    &[7],
    &[8, 64],
];

proptest! {
    /// Whatever happens to the driver and the pages, each says what it says by itself.
    #[test]
    fn constrained_and_free_sequences_generate_what_they_do_alone(
        (pages, masks) in (14_u32..60, 1_u32..9),
        requests in prop::collection::vec((any::<bool>(), 1_usize..20, 1_u32..3, 0_usize..9), 1..7),
        events in prop::collection::vec(0_u8..12, 0..60),
    ) {
        let mut world = World::with_masks(pages, masks);
        let mut wanted = BTreeMap::new();
        for (id, &(binds, length, samples, from)) in (0..).zip(&requests) {
            let prompt: Vec<u32> = (0..length as u32).map(|at| (at * 7 + id as u32) % 90).collect();
            let path = Path::late(&SETS[from..], from as u32 % 4);
            let mut request = bound(id, prompt.clone(), &path, samples);
            if !binds {
                request.grammar = None;
                request.stop.max_tokens = 12;
            }
            world.scheduler.submit(request).unwrap();
            let said = expected(&prompt, binds.then_some(&*path), if binds { 50 } else { 12 });
            for sample in 0..samples {
                wanted.insert((id, sample), said.clone());
            }
        }
        let mut failures = 0;
        for event in events {
            match event {
                0 => {
                    world.scheduler.driver_lost();
                    world.driver.out.clear();
                }
                // Three in a row end a request.
                1 if !world.driver.out.is_empty() && failures < 2 => {
                    failures += 1;
                    world.scheduler.step_failed(true);
                    world.driver.out.clear();
                }
                2..=6 => {
                    world.step();
                }
                _ => world.answer(),
            }
            world.collect();
            world.scheduler.check_invariants().unwrap();
        }
        world.run();
        for (sequence, wanted) in wanted {
            let (said, end) = &world.said[&sequence];
            prop_assert_eq!(said, &wanted, "{:?}", sequence);
            let failed = matches!(end, Some((Finish::Failed, _)));
            prop_assert!(end.is_some() && !failed, "{:?}", end);
        }
        prop_assert!(world.scheduler.is_idle());
    }
}

#[test]
fn jump_forward_tokens_are_not_sampled() {
    let mut world = World::new(60);
    let path = Path::new(&SETS);
    world
        .scheduler
        .submit(bound(1, vec![1, 2], &path, 1))
        .unwrap();
    world.run();
    let (said, end) = &world.said[&(1, 0)];
    assert_eq!(said.len(), 10);
    assert_eq!(*end, Some((Finish::StopToken(END), None)));
    // Three choices and the end: one step each.
    let forced = world.scheduler.stats().forced_tokens;
    assert_eq!((forced, world.driver.drawn), (6, 4));
}

#[test]
fn a_request_whose_grammar_compiles_is_overtaken() {
    let mut world = World::new(60);
    let path = Path::new(&SETS);
    path.ready.store(false, Ordering::Relaxed);
    world.scheduler.submit(bound(1, vec![1], &path, 1)).unwrap();
    world
        .scheduler
        .submit(NewRequest::new(2, vec![2], (), 5))
        .unwrap();
    world.run();
    assert!(world.scheduler.awaits_grammar());
    assert_eq!(world.said[&(2, 0)].0.len(), 5);
    assert!(!world.said.contains_key(&(1, 0)));
    world.scheduler.submit(bound(3, vec![1], &path, 1)).unwrap();
    assert!(world.scheduler.abort(3));
    world.run();
    assert_eq!(world.said[&(3, 0)].1, Some((Finish::Unready, None)));
    path.ready.store(true, Ordering::Relaxed);
    world.run();
    assert!(!world.scheduler.awaits_grammar());
    assert_eq!(world.said[&(1, 0)].0, expected(&[1], Some(&path), 50));
}

#[test]
fn free_sequences_do_not_wait_for_late_masks() {
    let free = |world: &mut World| {
        let request = NewRequest::new(2, vec![2], (), 12);
        world.scheduler.submit(request).unwrap();
    };
    let choices = [SETS[2]; 6];
    for (late, steps) in [(0, 0), (4, 18)] {
        let path = Path::late(&choices, late);
        let mut world = World::new(60);
        world.scheduler.submit(bound(1, vec![1], &path, 1)).unwrap();
        free(&mut world);
        // As many steps as it has tokens: none is without it.
        for _ in 0..12 {
            assert!(world.step());
            world.answer();
        }
        assert_eq!(world.said[&(2, 0)].0, expected(&[2], None, 12));
        assert!(late == 0 || world.said[&(1, 0)].1.is_none());
        // Alone it is waited for.
        world.run();
        assert_eq!(world.said[&(1, 0)].0, expected(&[1], Some(&path), 50));
        assert!(world.scheduler.stats().late_masks <= steps);
        assert_eq!(world.scheduler.stats().late_masks > 0, late > 0);
    }
}

#[test]
fn a_grammar_that_fails_ends_its_sequences_with_the_reason() {
    let mut world = World::new(60);
    let broken = Arc::new(Path {
        sets: SETS.iter().map(|set| set.to_vec()).collect(),
        ready: AtomicBool::new(true),
        broken_at: Some(3),
        late: 0,
    });
    world
        .scheduler
        .submit(bound(1, vec![1], &Path::new(&[]), 2))
        .unwrap();
    world
        .scheduler
        .submit(bound(2, vec![2], &broken, 1))
        .unwrap();
    world
        .scheduler
        .submit(NewRequest::new(3, vec![3], (), 5))
        .unwrap();
    let busy = NewRequest {
        grammar: Some(Arc::new(Busy)),
        ..NewRequest::new(4, vec![4], (), 5)
    };
    world.scheduler.submit(busy).unwrap();
    world.run();
    let later = Some((Finish::Busy, Some("try again later".to_owned())));
    assert_eq!(
        (world.said[&(4, 0)].0.len(), &world.said[&(4, 0)].1),
        (0, &later)
    );
    for sample in 0..2 {
        let (said, end) = &world.said[&(1, sample)];
        let reason = Some("it has no path".to_owned());
        assert_eq!((said.len(), end), (0, &Some((Finish::Grammar, reason))));
    }
    let (said, end) = &world.said[&(2, 0)];
    let reason = Some("it broke".to_owned());
    assert_eq!((said.len(), end), (3, &Some((Finish::Grammar, reason))));
    assert_eq!(world.said[&(3, 0)].0.len(), 5);
    assert!(world.scheduler.is_idle());
}

#[test]
fn jump_forward_stops_at_max_tokens() {
    let mut world = World::new(60);
    let path = Path::new(&[&[5], &[6], &[7], &[8]]);
    let mut request = bound(1, vec![1], &path, 1);
    request.stop.max_tokens = 3;
    world.scheduler.submit(request).unwrap();
    world.run();
    assert_eq!(
        world.said[&(1, 0)],
        (vec![5, 6, 7], Some((Finish::Length, None)))
    );
}
