//! Counters for logs and metrics, read by any thread. Counting a batch takes no lock and allocates nothing; rare events may lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pie_planner::{Plan, TokenCounts};
use pie_wire::CopyDirection;

use crate::histogram::{AtomicHistogram, Histogram, increment, load};

/// Directions of copies, in the order of [`Counts::copied_pages`].
pub const DIRECTIONS: [CopyDirection; 4] = [
    CopyDirection::D2H,
    CopyDirection::H2D,
    CopyDirection::D2D,
    CopyDirection::H2H,
];

/// An answered batch that needed the model.
#[derive(Clone, Copy)]
pub(crate) struct ServedBatch<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) token_counts: TokenCounts,
    /// By the graph path.
    pub(crate) by_graph: bool,
    /// Host time while the device was idle.
    pub(crate) host_ns: u64,
    /// From the request's arrival to its answer.
    pub(crate) step_ns: u64,
}

/// Single writer: the thread that holds the planner.
#[derive(Default)]
struct Steps {
    graph: AtomicU64,
    python: AtomicU64,
    requests: AtomicU64,
    computed_tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    drafts: AtomicU64,
    accepted_drafts: AtomicU64,
    last_requests: AtomicU64,
}

/// The live counters.
pub(crate) struct Counters {
    steps: Steps,
    host: AtomicHistogram,
    step: AtomicHistogram,
    copied_pages: [AtomicU64; 4],
    copied_states: AtomicU64,
    aborted_batches: AtomicU64,
    abandoned: AtomicU64,
    refused: Mutex<BTreeMap<&'static str, u64>>,
    pages: PageSample,
}

impl Counters {
    /// Counters for a pool of `total_pages`.
    pub(crate) fn new(total_pages: u32) -> Self {
        Self {
            steps: Steps::default(),
            host: AtomicHistogram::new(),
            step: AtomicHistogram::new(),
            copied_pages: Default::default(),
            copied_states: AtomicU64::new(0),
            aborted_batches: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            refused: Mutex::default(),
            pages: PageSample::new(total_pages),
        }
    }

    /// Counts an answered batch. The caller holds the planner.
    pub(crate) fn served(&self, batch: ServedBatch<'_>) {
        let ServedBatch {
            plan, token_counts, ..
        } = batch;
        let steps = &self.steps;
        let requests = plan.request_count() as u64;
        increment(
            if batch.by_graph {
                &steps.graph
            } else {
                &steps.python
            },
            1,
        );
        increment(&steps.requests, requests);
        increment(&steps.computed_tokens, plan.token_count() as u64);
        increment(&steps.prompt_tokens, plan.prompt_token_count() as u64);
        increment(&steps.generated_tokens, token_counts.tokens as u64);
        increment(&steps.drafts, token_counts.drafts as u64);
        increment(&steps.accepted_drafts, token_counts.accepted as u64);
        steps.last_requests.store(requests, Ordering::Relaxed);
        self.host.add(batch.host_ns);
        self.step.add(batch.step_ns);
    }

    /// Counts pages, or slots of recurrent state, that were copied.
    pub(crate) fn copied(&self, direction: CopyDirection, states: bool, count: usize) {
        let index = DIRECTIONS.iter().position(|&other| other == direction);
        let counter = match index {
            Some(index) if !states => &self.copied_pages[index],
            _ => &self.copied_states,
        };
        counter.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Counts a batch that was answered by an abort.
    pub(crate) fn aborted(&self) {
        self.aborted_batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a response whose client gave up.
    pub(crate) fn abandoned(&self) {
        self.abandoned.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of a batch, or a whole frame, that was refused.
    pub(crate) fn refused(&self, reason: &'static str) {
        *lock(&self.refused).entry(reason).or_default() += 1;
    }

    /// Counts the distinct pages of a frame, if a sample is due.
    pub(crate) fn sample_pages(&self, pages: &[u32]) {
        if self.pages.due.load(Ordering::Relaxed) {
            self.pages.take(pages);
        }
    }

    /// A snapshot of the counters. Requests another sample of the pages in use.
    pub(crate) fn read(&self) -> Counts {
        let steps = &self.steps;
        self.pages.due.store(true, Ordering::Relaxed);
        Counts {
            graph_steps: load(&steps.graph),
            python_steps: load(&steps.python),
            requests: load(&steps.requests),
            computed_tokens: load(&steps.computed_tokens),
            prompt_tokens: load(&steps.prompt_tokens),
            generated_tokens: load(&steps.generated_tokens),
            drafts: load(&steps.drafts),
            accepted_drafts: load(&steps.accepted_drafts),
            last_requests: load(&steps.last_requests),
            used_pages: load(&self.pages.used),
            copied_pages: [0, 1, 2, 3].map(|index| load(&self.copied_pages[index])),
            copied_states: load(&self.copied_states),
            aborted_batches: load(&self.aborted_batches),
            abandoned: load(&self.abandoned),
            refused: lock(&self.refused).clone(),
            host: self.host.read(),
            step: self.step.read(),
        }
    }
}

/// Distinct pages in use by the requests of a batch. Counting takes microseconds, so it is done once per reading.
struct PageSample {
    due: AtomicBool,
    used: AtomicU64,
    /// A bit for each page.
    seen: Mutex<Vec<u64>>,
}

impl PageSample {
    fn new(total_pages: u32) -> Self {
        Self {
            due: AtomicBool::new(true),
            used: AtomicU64::new(0),
            seen: Mutex::new(vec![0; total_pages.div_ceil(u64::BITS) as usize]),
        }
    }

    fn take(&self, pages: &[u32]) {
        let mut seen = lock(&self.seen);
        seen.fill(0);
        for &page in pages {
            // A page outside the pool is refused elsewhere.
            if let Some(word) = seen.get_mut((page / u64::BITS) as usize) {
                *word |= 1 << (page % u64::BITS);
            }
        }
        let used = seen.iter().map(|word| u64::from(word.count_ones())).sum();
        self.used.store(used, Ordering::Relaxed);
        self.due.store(false, Ordering::Relaxed);
    }
}

/// A snapshot of `Counters`; not atomic across counters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Batches that the graph path ran.
    pub graph_steps: u64,
    /// Batches that the Python path ran.
    pub python_steps: u64,
    /// Requests of both.
    pub requests: u64,
    /// Query tokens, drafts included.
    pub computed_tokens: u64,
    /// Of these, prefill tokens: inputs of requests with more than one.
    pub prompt_tokens: u64,
    /// Generated tokens, accepted drafts included.
    pub generated_tokens: u64,
    /// Verified drafts.
    pub drafts: u64,
    /// Of these, accepted drafts.
    pub accepted_drafts: u64,
    /// Requests of the last batch.
    pub last_requests: u64,
    /// Distinct pages in use by a recent batch.
    pub used_pages: u64,
    /// Pages copied, in the order of [`DIRECTIONS`].
    pub copied_pages: [u64; 4],
    /// Slots of recurrent state copied.
    pub copied_states: u64,
    /// Batches that failed and were answered by an abort.
    pub aborted_batches: u64,
    /// Answers that came after the client had given up.
    pub abandoned: u64,
    /// Requests of batches, and frames, that were refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Host time per batch while the device was idle: parsing, planning, staging, responding.
    pub host: Histogram,
    /// Latency of each batch, from arrival to response.
    pub step: Histogram,
}

impl Counts {
    /// The difference to an earlier snapshot; gauges are current.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut copied_pages = self.copied_pages;
        for (now, before) in copied_pages.iter_mut().zip(earlier.copied_pages) {
            *now = now.saturating_sub(before);
        }
        let refused = self.refused.iter().filter_map(|(&reason, &count)| {
            let fresh = count - earlier.refused.get(reason).copied().unwrap_or(0).min(count);
            (fresh > 0).then_some((reason, fresh))
        });
        let less = u64::saturating_sub;
        Self {
            graph_steps: less(self.graph_steps, earlier.graph_steps),
            python_steps: less(self.python_steps, earlier.python_steps),
            requests: less(self.requests, earlier.requests),
            computed_tokens: less(self.computed_tokens, earlier.computed_tokens),
            prompt_tokens: less(self.prompt_tokens, earlier.prompt_tokens),
            generated_tokens: less(self.generated_tokens, earlier.generated_tokens),
            drafts: less(self.drafts, earlier.drafts),
            accepted_drafts: less(self.accepted_drafts, earlier.accepted_drafts),
            last_requests: self.last_requests,
            used_pages: self.used_pages,
            copied_pages,
            copied_states: less(self.copied_states, earlier.copied_states),
            aborted_batches: less(self.aborted_batches, earlier.aborted_batches),
            abandoned: less(self.abandoned, earlier.abandoned),
            refused: refused.collect(),
            host: self.host.since(&earlier.host),
            step: self.step.since(&earlier.step),
        }
    }

    /// Batches that needed the model.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.graph_steps + self.python_steps
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
