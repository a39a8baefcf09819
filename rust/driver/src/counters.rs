//! What was served so far, for logs and metrics. Counting takes no lock, no memory and some nanoseconds per batch; what is
//! rare may lock. Any thread reads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pie_planner::{Answered, Plan};
use pie_wire::CopyDirection;

use crate::histogram::{Durations, Histogram, load, raise};

/// Directions of copies, in the order of [`Counts::copied_pages`].
pub const DIRECTIONS: [CopyDirection; 4] = [
    CopyDirection::D2H,
    CopyDirection::H2D,
    CopyDirection::D2D,
    CopyDirection::H2H,
];

/// An answered batch that needed the model.
#[derive(Clone, Copy)]
pub(crate) struct Served<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) answered: Answered,
    /// By the graph path.
    pub(crate) by_graph: bool,
    /// What the host took while the device had nothing to do.
    pub(crate) host_ns: u64,
    /// From the request's arrival to its answer.
    pub(crate) step_ns: u64,
}

/// Raised by the thread that holds the planner: one at a time.
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

/// Counts while it serves.
pub(crate) struct Counters {
    steps: Steps,
    host: Durations,
    step: Durations,
    copied_pages: [AtomicU64; 4],
    copied_states: AtomicU64,
    aborted_batches: AtomicU64,
    abandoned: AtomicU64,
    refused: Mutex<BTreeMap<&'static str, u64>>,
    pages: PageSample,
}

impl Counters {
    /// For a pool of so many pages.
    pub(crate) fn new(total_pages: u32) -> Self {
        Self {
            steps: Steps::default(),
            host: Durations::new(),
            step: Durations::new(),
            copied_pages: Default::default(),
            copied_states: AtomicU64::new(0),
            aborted_batches: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            refused: Mutex::default(),
            pages: PageSample::new(total_pages),
        }
    }

    /// Counts an answered batch. The caller holds the planner.
    pub(crate) fn served(&self, batch: Served<'_>) {
        let Served { plan, answered, .. } = batch;
        let steps = &self.steps;
        let requests = plan.request_count() as u64;
        raise(
            if batch.by_graph {
                &steps.graph
            } else {
                &steps.python
            },
            1,
        );
        raise(&steps.requests, requests);
        raise(&steps.computed_tokens, plan.token_count() as u64);
        raise(&steps.prompt_tokens, plan.prompt_token_count() as u64);
        raise(&steps.generated_tokens, answered.tokens as u64);
        raise(&steps.drafts, answered.drafts as u64);
        raise(&steps.accepted_drafts, answered.accepted as u64);
        steps.last_requests.store(requests, Ordering::Relaxed);
        self.host.add(batch.host_ns);
        self.step.add(batch.step_ns);
    }

    /// Counts pages, or slots of recurrent state, that were copied.
    pub(crate) fn copied(&self, direction: CopyDirection, states: bool, count: usize) {
        let place = DIRECTIONS.iter().position(|&other| other == direction);
        let counter = match place {
            Some(place) if !states => &self.copied_pages[place],
            _ => &self.copied_states,
        };
        counter.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Counts a batch that was answered by an abort.
    pub(crate) fn aborted(&self) {
        self.aborted_batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an answer that nothing waits for any more.
    pub(crate) fn abandoned(&self) {
        self.abandoned.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of a batch, or a whole frame, that was refused.
    pub(crate) fn refused(&self, reason: &'static str) {
        *lock(&self.refused).entry(reason).or_default() += 1;
    }

    /// Looks at the pages that a frame names, if a reader waits for that.
    pub(crate) fn see_pages(&self, pages: &[u32]) {
        if self.pages.due.load(Ordering::Relaxed) {
            self.pages.take(pages);
        }
    }

    /// The counts so far. Asks for another look at the pages.
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
            copied_pages: [0, 1, 2, 3].map(|place| load(&self.copied_pages[place])),
            copied_states: load(&self.copied_states),
            aborted_batches: load(&self.aborted_batches),
            abandoned: load(&self.abandoned),
            refused: lock(&self.refused).clone(),
            host: self.host.read(),
            step: self.step.read(),
        }
    }
}

/// How many pages the requests of a batch name, a page that several share counted once. To count them takes some
/// microseconds, so it is done once for each reading.
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

/// Counts as they were when they were read. A batch that was answered meanwhile may be in some of them only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Batches that the graph path ran.
    pub graph_steps: u64,
    /// Batches that the Python path ran.
    pub python_steps: u64,
    /// Requests of both.
    pub requests: u64,
    /// Rows that the model computed, drafts included.
    pub computed_tokens: u64,
    /// Of these, input tokens of requests with more than one.
    pub prompt_tokens: u64,
    /// Tokens that were returned, accepted drafts included.
    pub generated_tokens: u64,
    /// Drafts that were verified.
    pub drafts: u64,
    /// Of these, drafts that came true.
    pub accepted_drafts: u64,
    /// Requests of the last batch.
    pub last_requests: u64,
    /// Different pages that the requests of a recent batch name.
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
    /// What the host took for each batch while the device had nothing to do: reading, planning, staging, answering.
    pub host: Histogram,
    /// From the arrival of each batch to its answer.
    pub step: Histogram,
}

impl Counts {
    /// What came after `earlier` was read; gauges are as they are now.
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
