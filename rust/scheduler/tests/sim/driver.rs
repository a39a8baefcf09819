//! The simulated driver: pages of KV on two tiers, and steps that read and write them.

use std::collections::HashSet;

use pie_scheduler::{Copies, FrameBytes, Limits, PageCopy, Row};

use crate::sim::rule::Mind;

/// A row with values of its own, as a frame has it.
#[derive(Debug, Clone)]
pub struct Frame {
    pub id: u64,
    pub sample: u32,
    pub salt: u64,
    pub context: u64,
    pub tokens: Vec<u32>,
    pub awaits: Option<u32>,
    pub start: u32,
    pub pages: Vec<u32>,
    pub drafts: Vec<u32>,
    pub wants_drafts: bool,
    pub samples: bool,
    pub forbidden: Vec<u32>,
    pub prompt: u32,
    pub history: Vec<u32>,
    pub prompt_logprobs: (u32, u32),
    pub next: Option<u32>,
    /// Words of log-probabilities of a position; 0 for none.
    pub words: u32,
    /// Parameters that its sequence's first row brings.
    pub own_bytes: u32,
}

impl Frame {
    pub fn new(row: &Row<'_, u64>, salt: u64, (words, own_bytes): (u32, u32)) -> Self {
        assert!(*row.params == salt && row.sampling.is_none_or(|&given| given == salt));
        Self {
            id: row.id,
            sample: row.sample,
            salt,
            context: row.context,
            tokens: row.tokens.to_vec(),
            awaits: row.awaits,
            start: row.start,
            pages: row.pages.to_vec(),
            drafts: row.drafts.to_vec(),
            wants_drafts: row.wants_drafts,
            samples: row.sampling.is_some(),
            forbidden: row.forbidden.to_vec(),
            prompt: row.prompt,
            history: row.history.to_vec(),
            prompt_logprobs: row.prompt_logprobs,
            next: row.next,
            words,
            own_bytes,
        }
    }

    /// Bytes of its row, at least.
    fn bytes(&self, frame: &FrameBytes, brings: bool) -> usize {
        let parts = [
            (frame.row, 1),
            (frame.token, self.tokens.len()),
            (frame.draft, self.drafts.len()),
            (frame.page, self.pages.len()),
            (frame.listed, self.history.len()),
            (self.own_bytes, brings.into()),
        ];
        let listed: usize = parts.iter().map(|&(each, of)| each as usize * of).sum();
        listed + (2 * frame.listed as usize * self.forbidden.len()).min(frame.mask as usize)
    }

    /// Words of log-probabilities of its answer at most.
    fn logprob_words(&self) -> usize {
        let (from, end) = self.prompt_logprobs;
        let sampled = if self.samples {
            1 + self.drafts.len()
        } else {
            0
        };
        self.words as usize * ((end - from) as usize + sampled)
    }

    fn end(&self) -> usize {
        self.start as usize + self.tokens.len()
    }
}

/// What a row was answered.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub tokens: Vec<u32>,
    pub drafts: Vec<u32>,
    pub logprobs: Vec<u32>,
}

type Page = Vec<Option<u64>>;

#[derive(Debug)]
pub struct Driver {
    limits: Limits,
    device: Vec<Page>,
    host: Vec<Page>,
    /// What each sequence has reported of tokens that it produced: its request and number, page, and offset in the page.
    recorded: HashSet<(u64, u32, u32, usize)>,
    /// Requests whose parameters it has.
    pub registered: HashSet<u64>,
    random: fastrand::Rng,
}

impl Driver {
    pub fn new(limits: Limits, seed: u64) -> Self {
        let empty = vec![None; limits.page_size as usize];
        Self {
            limits,
            device: vec![empty.clone(); limits.total_pages as usize],
            host: vec![empty; limits.host_pages as usize],
            recorded: HashSet::new(),
            registered: HashSet::new(),
            random: fastrand::Rng::with_seed(seed),
        }
    }

    pub fn copy(&mut self, copies: &Copies) {
        for &PageCopy { from, to } in &copies.to_host {
            self.host[to as usize] = self.device[from as usize].clone();
        }
        for &PageCopy { from, to } in &copies.to_device {
            self.device[to as usize] = self.host[from as usize].clone();
        }
    }

    /// Holds a step to the protocol's limits.
    pub fn check(&mut self, frames: &[Frame]) {
        let limits = self.limits;
        let size = limits.page_size as usize;
        assert!(!frames.is_empty() && frames.len() <= limits.max_forward_requests as usize);
        let tokens: usize = frames.iter().map(|f| f.tokens.len() + f.drafts.len()).sum();
        assert!(
            tokens <= limits.max_forward_tokens as usize,
            "{tokens} tokens"
        );
        let pages: usize = frames.iter().map(|f| f.pages.len()).sum();
        assert!(pages <= limits.max_page_refs as usize, "{pages} pages");
        assert!(
            frames.is_sorted_by_key(|f| !f.samples),
            "rows that sample come first"
        );
        let words: usize = frames.iter().map(Frame::logprob_words).sum();
        assert!(words <= limits.max_logprob_words as usize, "{words} words");
        let registered = &mut self.registered;
        let own = |f: &Frame| f.bytes(&limits.frame, registered.insert(f.id));
        let bytes: usize = frames.iter().map(own).sum();
        assert!(bytes <= limits.frame.max as usize, "{bytes} bytes");
        let mut contexts = HashSet::new();
        let mut written = HashSet::new();
        for frame in frames {
            assert!(!frame.tokens.is_empty());
            assert!(frame.context > 0 && contexts.insert(frame.context));
            assert!(frame.samples || frame.drafts.is_empty() && !frame.wants_drafts);
            assert!(frame.awaits.is_none() || frame.tokens.len() == 1 && frame.drafts.is_empty());
            let end = frame.end() + frame.drafts.len();
            assert!(end <= limits.max_model_len as usize);
            assert_eq!(frame.pages.len(), end.div_ceil(size));
            written.extend(&frame.pages[frame.start as usize / size..]);
        }
        let listed = frames.iter().flat_map(|f| {
            let own = f.start as usize / size;
            f.pages[..own].iter().chain(f.pages[own..].iter())
        });
        let mut counts = std::collections::HashMap::new();
        for page in listed {
            *counts.entry(page).or_insert(0) += 1;
        }
        for page in written {
            assert_eq!(counts[page], 1, "page {page} is written and listed twice");
        }
    }

    fn slot(&mut self, frame: &Frame, at: usize) -> &mut Option<u64> {
        let size = self.limits.page_size as usize;
        &mut self.device[frame.pages[at / size] as usize][at % size]
    }

    /// Every token that a sequence has produced up to a row was in one of its rows, or in the history of one.
    fn note(&mut self, frame: &Frame) {
        let size = self.limits.page_size as usize;
        let slot_of = |at: usize| (frame.id, frame.sample, frame.pages[at / size], at % size);
        let first = frame.start as usize - frame.history.len();
        assert!(frame.history.is_empty() || first == frame.prompt as usize);
        let end = frame.end() + frame.drafts.len();
        self.recorded.extend((first..end).map(slot_of));
        for at in frame.prompt as usize..frame.end() {
            assert!(
                self.recorded.contains(&slot_of(at)),
                "{at} of {frame:?} was not reported"
            );
        }
    }

    /// Computes a row.
    pub fn compute(&mut self, frame: &Frame) -> Reply {
        self.note(frame);
        let mut mind = Mind::new(frame.salt);
        for at in 0..frame.start as usize {
            let kv = *self.slot(frame, at);
            mind.recall(kv.unwrap_or_else(|| panic!("KV {at} of {frame:?} was never stored")));
        }
        let mut logprobs = Vec::new();
        let (from, end) = frame.prompt_logprobs;
        assert!(from >= end || from > frame.start && end as usize <= frame.end() + 1);
        let followers = frame.tokens[1..].iter().copied().map(Some);
        let followers = followers.chain([frame.next]);
        for ((at, &token), next) in (frame.start..).zip(&frame.tokens).zip(followers) {
            *self.slot(frame, at as usize) = Some(mind.read(token));
            if (from..end).contains(&(at + 1)) {
                logprobs.extend(mind.score(next.expect("it is known"), frame.words));
            }
        }
        if !frame.samples {
            return Reply {
                logprobs,
                ..Reply::default()
            };
        }
        let mut tokens = vec![mind.next(frame.sample, &frame.forbidden)];
        logprobs.extend(mind.score(tokens[0], frame.words));
        let mut agrees = true;
        let mut verified = mind;
        for (at, &draft) in (frame.end()..).zip(&frame.drafts) {
            // The KV of wrong drafts is stored, too.
            *self.slot(frame, at) = Some(verified.read(draft));
            agrees &= tokens.last() == Some(&draft);
            if agrees {
                mind = verified;
                let token = mind.next(frame.sample, &frame.forbidden);
                tokens.push(token);
                logprobs.extend(mind.score(token, frame.words));
            }
        }
        let drafts = if frame.wants_drafts {
            let last = tokens.last().copied();
            mind.read(last.expect("there is one"));
            self.draft(mind, frame.sample)
        } else {
            Vec::new()
        };
        Reply {
            tokens,
            drafts,
            logprobs,
        }
    }

    /// Some drafts, most of them right.
    fn draft(&mut self, mut mind: Mind, sample: u32) -> Vec<u32> {
        (0..self.random.u32(0..5))
            .map(|_| {
                let right = mind.next(sample, &[]);
                mind.read(right);
                right + u32::from(self.random.u8(0..5) == 0)
            })
            .collect()
    }
}
