//! A driver and grammars that are lists of tokens, around a scheduler.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pie_scheduler::{
    Config, Finish, FrameBytes, GrammarHandle, GrammarMatcher, GrammarStatus, Limits, Mask,
    NewRequest, Outputs, Scheduler, StepOutput,
};

pub(crate) const VOCAB: u32 = 100;

pub(crate) const END: u32 = 99;

/// The output must go through these sets of tokens, one after the other, and then end.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) sets: Vec<Vec<u32>>,
    pub(crate) ready: AtomicBool,
    pub(crate) broken_at: Option<usize>,
    /// How often it is not prepared after each token.
    pub(crate) late: u32,
}

impl Path {
    pub(crate) fn new(sets: &[&[u32]]) -> Arc<Self> {
        Self::late(sets, 0)
    }

    pub(crate) fn late(sets: &[&[u32]], late: u32) -> Arc<Self> {
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
pub(crate) struct Walker {
    pub(crate) sets: Vec<Vec<u32>>,
    pub(crate) broken_at: Option<usize>,
    pub(crate) at: usize,
    pub(crate) most: usize,
    pub(crate) asked: bool,
    pub(crate) late: u32,
    /// Calls until it is prepared.
    pub(crate) left: u32,
    /// The mask that it gave last.
    pub(crate) last: Option<Mask>,
}

/// So that a test keeps the path and the request has it, too.
#[derive(Debug)]
pub(crate) struct Shared(pub(crate) Arc<Path>);

/// Cannot be had now.
#[derive(Debug)]
pub(crate) struct Busy;

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

/// The token that a row samples: of those that may be, by all that came before.
pub(crate) fn sample(tokens: &[u32], mask: Option<&[u32]>) -> u32 {
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
pub(crate) struct Driver {
    pub(crate) contexts: BTreeMap<u64, Vec<u32>>,
    /// Steps that are out: tokens of each row.
    pub(crate) out: Vec<Vec<SampledRow>>,
    pub(crate) last: Vec<u32>,
    pub(crate) sampled: usize,
}

pub(crate) struct SampledRow {
    pub(crate) context: u64,
    pub(crate) start: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) awaits: Option<usize>,
    pub(crate) mask: Option<Vec<u32>>,
    pub(crate) samples: bool,
}

pub(crate) type Ended = BTreeMap<(u64, u32), (Vec<u32>, Option<(Finish, Option<String>)>)>;

pub(crate) struct World {
    pub(crate) scheduler: Scheduler<()>,
    pub(crate) driver: Driver,
    pub(crate) outputs: Outputs,
    pub(crate) said: Ended,
    pub(crate) now: u64,
    pub(crate) most_masks: usize,
}

/// Bytes of a mask in a frame.
pub(crate) const MASK: u32 = 100;

impl World {
    pub(crate) fn new(pages: u32) -> Self {
        Self::with_masks(pages, u32::MAX / MASK)
    }

    /// Maximum masks of a frame.
    pub(crate) fn with_masks(pages: u32, most: u32) -> Self {
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

    pub(crate) fn step(&mut self) -> bool {
        self.now += 100;
        let Some(step) = self.scheduler.schedule(self.now).unwrap() else {
            return false;
        };
        let rows = step.rows().map(|row| SampledRow {
            context: row.context,
            start: row.start as usize,
            tokens: row.tokens.to_vec(),
            awaits: row.awaits.map(|row| row as usize),
            mask: row.mask.map(<[u32]>::to_vec),
            samples: row.sampling.is_some(),
        });
        let rows: Vec<SampledRow> = rows.collect();
        for row in &rows {
            assert!(row.mask.is_none() || row.awaits.is_none() && row.samples);
        }
        let mut masks: Vec<&Vec<u32>> = rows.iter().filter_map(|row| row.mask.as_ref()).collect();
        // Rows that follow each other share one.
        masks.dedup();
        assert!(masks.len() <= self.most_masks, "{} masks", masks.len());
        self.driver.out.push(rows);
        true
    }

    pub(crate) fn answer(&mut self) {
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
            if row.samples {
                self.driver.sampled += 1;
                last.push(sample(
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

    pub(crate) fn collect(&mut self) {
        self.scheduler.outputs(&mut self.outputs);
        for output in self.outputs.iter() {
            let said = self.said.entry((output.id, output.sample)).or_default();
            assert!(said.1.is_none(), "an output after the end");
            said.0.extend(output.tokens);
            let reason = output.reason.map(str::to_owned);
            said.1 = output.finish.map(|finish| (finish, reason));
        }
    }

    pub(crate) fn run(&mut self) {
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

pub(crate) fn bound(id: u64, prompt: Vec<u32>, path: &Arc<Path>, samples: u32) -> NewRequest<()> {
    let mut request = NewRequest::new(id, prompt, (), 50);
    request.grammar = Some(Arc::new(Shared(Arc::clone(path))));
    request.stop.stop_tokens = vec![END];
    request.samples = samples;
    request
}

/// What follows a prompt, by one token after the other.
pub(crate) fn expected(prompt: &[u32], path: Option<&Path>, most: usize) -> Vec<u32> {
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
        token = sample(&[token], mask.as_deref());
        said.push(token);
        if token == END {
            break;
        }
    }
    said
}
