//! Drafts for the next step: what requests said goes to the n-gram drafter, and what it offers, as far as that pays, goes
//! into the reply.
//!
//! What a request brings along is taken while the device computes. Behind its answer there is work only for requests that
//! may get drafts: of the others the drafter hears with their next request.

use std::mem;
use std::ops::Range;
use std::slice;
use std::time::Duration;

use pie_ngram::{
    Config, ConfigError, Counters as DraftCounters, Drafter, Drafts, Offer, Policy, Step,
};
use rustc_hash::FxHashMap;

use crate::Limits;
use crate::history::{PagePool, PageTokens};
use crate::plan::{Planner, Request};
use crate::reply::token_count;

/// Tokens before a request's own that must be those that the drafter knows; else its context is another one.
const CHECKED: usize = 16;
/// Steps before the first report, and between two of them later on; in the meantime their number doubles.
const FIRST_REPORT: u64 = 1 << 8;
const REPORT_STEPS: u64 = 1 << 14;
/// Contexts whose drafts are awaited; when there are more, all are forgotten.
const AWAITED: usize = 1 << 16;

/// How to draft.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftOptions {
    /// The index.
    pub ngram: Config,
    /// Most drafts of a request.
    pub num_drafts: usize,
    /// Rows of the graphs that a step may run as, rising: what steps cost is learnt for each.
    pub rungs: Vec<usize>,
    /// Pages of the host's pool.
    pub host_pages: u32,
}

/// A request of the current frame that asks for drafts.
#[derive(Debug, Clone, Copy)]
struct Asking {
    request: usize,
    context: u64,
    /// Whether its answer is worth drafting behind.
    promising: bool,
}

/// What is drafted behind a request of the current frame.
#[derive(Debug, Clone, Default)]
struct Draft {
    tokens: Range<usize>,
    first_position: u32,
}

/// The drafter, and its part of the reply.
#[derive(Debug)]
pub(crate) struct Drafting {
    drafter: Drafter,
    policy: Policy,
    most: usize,
    pages: PageTokens,
    asking: Vec<Asking>,
    /// The drafter has what the requests brought along.
    prepared: bool,
    /// How long the match was that a context's drafts were offered for.
    awaited: FxHashMap<u64, usize>,
    /// What a request adds to its context.
    said: Vec<u32>,
    found: Drafts,
    tokens: Vec<u32>,
    drafts: Vec<Draft>,
    offers: Vec<Offer>,
    marks: Vec<bool>,
    lengths: Vec<usize>,
}

impl Drafting {
    pub(crate) fn new(options: &DraftOptions, limits: &Limits) -> Result<Self, ConfigError> {
        Ok(Self {
            drafter: Drafter::new(options.ngram)?,
            policy: Policy::new(options.num_drafts, &options.rungs),
            most: options.num_drafts,
            pages: PageTokens::new(limits.page_size, limits.total_pages, options.host_pages),
            asking: Vec::new(),
            prepared: false,
            awaited: FxHashMap::default(),
            said: Vec::new(),
            found: Drafts::default(),
            tokens: Vec::new(),
            drafts: Vec::new(),
            offers: Vec::new(),
            marks: Vec::new(),
            lengths: Vec::new(),
        })
    }

    /// Begins a frame.
    pub(crate) fn clear(&mut self) {
        self.asking.clear();
        self.lengths.clear();
        self.prepared = false;
    }

    /// Notes what a request stores in its pages, and whether it asks for drafts.
    pub(crate) fn add(
        &mut self,
        (request, context, asks): (usize, u64, bool),
        (pages, start): (&[u32], usize),
        tokens: &[u32],
    ) {
        self.pages.store(pages, start, tokens);
        if asks && context != 0 {
            self.asking.push(Asking {
                request,
                context,
                promising: false,
            });
        }
    }

    /// Whether the current frame's reply has drafts.
    fn any(&self) -> bool {
        self.lengths.iter().any(|&length| length > 0)
    }

    /// Takes what the requests brought along, and finds out which may get drafts.
    fn prepare(&mut self, planner: &Planner) {
        if mem::replace(&mut self.prepared, true) || self.asking.is_empty() {
            return;
        }
        self.offers.clear();
        for index in 0..self.asking.len() {
            let Asking {
                request, context, ..
            } = self.asking[index];
            let request = &planner.requests[request];
            self.said.clear();
            let start = self.catch_up(planner, request, context);
            let inputs = request.rows.start..request.rows.end - request.drafts as usize;
            self.said.extend_from_slice(&planner.token_ids[inputs]);
            let offer = self.hear(context, start, 1);
            self.offers.push(offer);
        }
        let requests = planner.requests.len();
        self.policy.listen(&self.offers, requests, &mut self.marks);
        for (asking, &promising) in self.asking.iter_mut().zip(&self.marks) {
            asking.promising = promising;
        }
    }

    /// Takes what is in `said` as the context's end from KV index `start` on, and drafts behind it.
    fn hear(&mut self, context: u64, start: usize, drafts: usize) -> Offer {
        let step = Step {
            context,
            position: start as u32,
            tokens: &self.said,
            drafts,
        };
        self.drafter.step(slice::from_ref(&step), &mut self.found);
        Offer {
            context,
            match_length: self.found.match_length(0),
            drafts: self.found.tokens(0).len(),
        }
    }

    /// Takes what the requests of a computed frame were answered, and chooses their drafts.
    fn propose(&mut self, planner: &Planner) {
        if self.asking.is_empty() {
            return;
        }
        self.prepare(planner);
        self.tokens.clear();
        self.drafts.clear();
        self.drafts.resize(planner.requests.len(), Draft::default());
        self.offers.clear();
        // Every request is a row of the next step, whether it asks for drafts or not.
        let nothing = Offer {
            context: 0,
            match_length: 0,
            drafts: 0,
        };
        self.offers.resize(planner.requests.len(), nothing);
        for index in 0..self.asking.len() {
            self.draft(planner, self.asking[index]);
        }
        self.policy.choose(&self.offers, &mut self.lengths);
        if self.awaited.len() > AWAITED {
            self.awaited.clear();
        }
        for (offer, &length) in self.offers.iter().zip(&self.lengths) {
            if length > 0 {
                self.awaited.insert(offer.context, offer.match_length);
            }
        }
    }

    fn draft(&mut self, planner: &Planner, asking: Asking) {
        let Asking {
            request: index,
            context,
            promising,
        } = asking;
        let request = &planner.requests[index];
        let drafted = request.drafts as usize;
        if !promising && drafted == 0 {
            return;
        }
        let slots = &planner.slots.all[request.slots.clone()];
        if slots.iter().any(|slot| !slot.answered) {
            return;
        }
        let count = token_count(request, slots, &planner.token_ids);
        if drafted > 0
            && let Some(match_length) = self.awaited.remove(&context)
        {
            let accepted = count.saturating_sub(1);
            self.policy
                .verified(context, match_length, drafted, accepted);
        }
        let inputs = request.rows.start..request.rows.end - drafted;
        // Without drafts, a token that does not follow the last input continues nothing.
        let follows =
            drafted > 0 || (count == 1 && slots.iter().any(|slot| slot.row + 1 == inputs.end));
        if inputs.is_empty() || !follows {
            return;
        }
        let tokens = slots.iter().filter(|slot| slot.class.is_token());
        self.said.clear();
        self.said.extend(tokens.take(count).map(|slot| slot.token));
        let limits = &planner.limits;
        let first_position = planner.positions[inputs.end - 1] + count as u32 + 1;
        let start = request.prefix as usize + inputs.len();
        let room = (limits.max_positions.saturating_sub(first_position) as usize)
            .min((limits.max_kv_len() as usize).saturating_sub(start + count));
        let most = if promising { self.most.min(room) } else { 0 };
        let offer = self.hear(context, start, most);
        // A placeholder of an image is no token.
        let found = self.found.tokens(0).iter();
        let usable = found.take_while(|&&token| token < limits.vocab_size);
        let first = self.tokens.len();
        self.tokens.extend(usable);
        self.drafts[index] = Draft {
            tokens: first..self.tokens.len(),
            first_position,
        };
        self.offers[index] = Offer {
            drafts: self.tokens.len() - first,
            ..offer
        };
    }

    /// Puts into `said` what the drafter lacks of the context before this request; returns its first position.
    fn catch_up(&mut self, planner: &Planner, request: &Request, context: u64) -> usize {
        let prefix = request.prefix as usize;
        let Some(pages) = planner.known_pages(request) else {
            return prefix;
        };
        let recent = prefix.saturating_sub(CHECKED)..prefix;
        let start = self.pages.load(pages, recent, &mut self.said);
        if self.drafter.holds(context, start, &self.said) {
            self.said.clear();
            return prefix;
        }
        self.said.clear();
        self.pages.load(pages, 0..prefix, &mut self.said)
    }
}

impl Planner {
    /// Drafts for requests that ask for it, from the next frame on.
    ///
    /// # Errors
    /// [`ConfigError`] for options out of range.
    pub fn draft(&mut self, options: &DraftOptions) -> Result<(), ConfigError> {
        self.drafting = Some(Box::new(Drafting::new(options, &self.limits)?));
        Ok(())
    }

    /// What became of drafts so far, as a line; `None` when the planner does not draft.
    #[must_use]
    pub fn draft_counters(&self) -> Option<DraftCounters> {
        self.drafting
            .as_ref()
            .map(|drafting| drafting.policy.counters())
    }

    /// What became of drafts so far, now and then, once a frame is answered.
    #[must_use]
    pub fn draft_report(&self) -> Option<DraftCounters> {
        let drafting = self.drafting.as_ref()?;
        let counters = drafting.policy.counters();
        let steps = counters.steps;
        let due = steps.is_multiple_of(REPORT_STEPS)
            || ((FIRST_REPORT..REPORT_STEPS).contains(&steps) && steps.is_power_of_two());
        (due && !drafting.lengths.is_empty()).then_some(counters)
    }

    /// Notes that a page was copied, from pool and page to pool and page.
    pub fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.pages.copy(source, target);
        }
    }

    /// Notes how long the device took for the current frame: what drafts cost is learnt from frames that are steps.
    pub fn step_took(&mut self, time: Duration) {
        let rows = self.token_ids.len();
        let step = self.passes.len() == 1
            && self
                .requests
                .iter()
                .all(|request| request.rows.len() == request.drafts as usize + 1);
        if let Some(drafting) = &mut self.drafting
            && step
        {
            drafting.policy.timed(rows, time);
        }
    }

    /// Does what can be done for the drafts of the current frame before its tokens are known; call it while the device
    /// computes. Whoever does not call it waits for it with the reply.
    pub fn prepare_drafts(&mut self) {
        if let Some(mut drafting) = self.drafting.take() {
            drafting.prepare(self);
            self.drafting = Some(drafting);
        }
    }

    /// Chooses the drafts that the reply to the current frame brings along.
    pub(crate) fn propose_drafts(&mut self) {
        if let Some(mut drafting) = self.drafting.take() {
            drafting.propose(self);
            self.drafting = Some(drafting);
        }
    }

    pub(crate) fn has_drafts(&self) -> bool {
        self.drafting
            .as_ref()
            .is_some_and(|drafting| drafting.any())
    }

    /// Leaves the drafts out of the reply.
    pub(crate) fn drop_drafts(&mut self) {
        if let Some(drafting) = &mut self.drafting {
            drafting.lengths.clear();
        }
    }

    /// Tokens and first position of the drafts of each request, in the frame's order; nothing when no request has some.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = (&[u32], u32)> {
        let drafting = self.drafting.as_ref().filter(|drafting| drafting.any());
        drafting.into_iter().flat_map(|drafting| {
            let requests = drafting.drafts.iter().zip(&drafting.lengths);
            requests.map(|(draft, &length)| {
                (
                    &drafting.tokens[draft.tokens.clone()][..length],
                    draft.first_position,
                )
            })
        })
    }

    /// The pages before a request's own tokens, as the block table's mirror has them; `None` when it has others.
    fn known_pages(&self, request: &Request) -> Option<&[u32]> {
        let count = (request.prefix as usize).div_ceil(self.limits.page_size as usize);
        // A row that requests of one frame share has the pages of one of them.
        let shared = self.requests.len() > self.limits.max_requests as usize;
        let pages = self.table.pages(request.table_row);
        pages.get(..count).filter(|_| !shared)
    }
}
