//! Drafts for the next step: what requests said goes to the n-gram drafter, and what it offers, as far as that pays, goes
//! into the reply.
//!
//! What a request brings along is taken while the device computes, and so is everything that can wait: what contexts said
//! before they asked, the shared history. Behind an answer there is work only for requests that may get drafts: of the
//! others the drafter hears with their next request.

use std::mem;
use std::ops::Range;
use std::time::Duration;

use pie_ngram::{
    Config, ConfigError, Counters as DraftCounters, Drafter, Drafts, Kind, Offer, Policy, Step,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Limits;
use crate::history::{PagePool, PageTokens};
use crate::plan::{Planner, Request};
use crate::reply::token_count;

/// Tokens before a request's own that must be those that the drafter knows; else its context is another one.
const CHECKED: usize = 16;
/// Tokens that are read again from their pages in a second, with room to spare.
const RECALLED: f64 = 1e6;
/// Of those, in one frame: at least, and at most.
const RECALL: (usize, usize) = (256, 1 << 16);
/// Steps, or drafts that were verified, before the first report, and the most of either between two later ones; in the
/// meantime their number doubles.
const FIRST_REPORT: u64 = 1 << 8;
const REPORT_STEPS: u64 = 1 << 14;
const REPORT_DRAFTS: u64 = 1 << 20;
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

const NOTHING: Offer = Offer {
    context: 0,
    match_length: 0,
    drafts: 0,
};

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
    pages: PageTokens,
    asking: Vec<Asking>,
    /// Contexts that ask, while they are looked through.
    seen: FxHashSet<u64>,
    /// The drafter has what the requests brought along.
    prepared: bool,
    /// Tokens of earlier frames that may be read again in this one.
    recall: usize,
    /// The current frame is a graph's, or some frame was.
    graph: bool,
    graphs: bool,
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
    /// Steps and drafts with which the next report is due.
    next_report: (u64, u64),
}

impl Drafting {
    pub(crate) fn new(options: &DraftOptions, limits: &Limits) -> Result<Self, ConfigError> {
        Ok(Self {
            drafter: Drafter::new(options.ngram)?,
            policy: Policy::new(options.num_drafts, &options.rungs),
            pages: PageTokens::new(limits.page_size, limits.total_pages, options.host_pages),
            asking: Vec::new(),
            seen: FxHashSet::default(),
            prepared: false,
            recall: RECALL.0,
            graph: false,
            graphs: false,
            awaited: FxHashMap::default(),
            said: Vec::new(),
            found: Drafts::default(),
            tokens: Vec::new(),
            drafts: Vec::new(),
            offers: Vec::new(),
            marks: Vec::new(),
            lengths: Vec::new(),
            next_report: (FIRST_REPORT, FIRST_REPORT),
        })
    }

    /// Begins a frame.
    pub(crate) fn clear(&mut self) {
        self.asking.clear();
        self.lengths.clear();
        self.prepared = false;
        self.graph = false;
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
        self.drafter.flush_shared();
        self.keep_last();
        // Every request is a row of the next step, whether it asks for drafts or not.
        self.offers.clear();
        self.offers.resize(planner.requests.len(), NOTHING);
        for index in 0..self.asking.len() {
            let Asking {
                request, context, ..
            } = self.asking[index];
            let asking = &planner.requests[request];
            if self.catch_up(planner, asking, context) {
                let inputs = asking.inputs();
                self.said.clear();
                self.said.extend_from_slice(&planner.token_ids[inputs]);
                self.offers[request] = self.hear(context, asking.prefix as usize, 1);
            }
        }
        self.policy.preselect(&self.offers, &mut self.marks);
        for asking in &mut self.asking {
            // One that was not heard would start anew with its token.
            let heard = self.offers[asking.request].context == asking.context;
            asking.promising = heard && self.marks[asking.request];
        }
    }

    /// Leaves out requests whose context another one behind them has, too.
    fn keep_last(&mut self) {
        self.seen.clear();
        let seen = &mut self.seen;
        self.asking.reverse();
        self.asking.retain(|asking| seen.insert(asking.context));
        self.asking.reverse();
    }

    /// Takes what is in `said` as the context's end from KV index `start` on, and drafts behind it.
    fn hear(&mut self, context: u64, start: usize, drafts: usize) -> Offer {
        let step = Step {
            context,
            position: start as u32,
            tokens: &self.said,
            drafts,
        };
        self.found.clear();
        self.drafter.append(&step, &mut self.found);
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
        self.offers.fill(NOTHING);
        for index in 0..self.asking.len() {
            self.draft(planner, self.asking[index]);
        }
        self.policy.choose(&self.offers, &mut self.lengths);
        if self.awaited.len() > AWAITED {
            self.awaited.clear();
        }
        let offered = self.offers.iter().zip(&self.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.awaited.insert(offer.context, offer.match_length);
        }
    }

    /// Takes the choice of drafts back.
    fn take_back(&mut self) {
        let offered = self.offers.iter().zip(&self.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.awaited.remove(&offer.context);
        }
        self.lengths.clear();
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
        let slots = &planner.slots.all[request.slots.range()];
        if slots.iter().any(|slot| !slot.answered) {
            return;
        }
        let count = token_count(request, slots, &planner.token_ids);
        // It was emptied, or has no samplers.
        if count == 0 {
            return;
        }
        if drafted > 0
            && let Some(match_length) = self.awaited.remove(&context)
        {
            self.policy
                .verified(context, match_length, drafted, count - 1);
        }
        let inputs = request.inputs();
        // Without drafts, a token that does not follow the last input continues nothing.
        let tokens = slots.iter().filter(|slot| slot.class.is_token());
        let follows =
            drafted > 0 || (count == 1 && tokens.clone().all(|slot| slot.row() + 1 == inputs.end));
        if !promising || !follows {
            return;
        }
        self.said.clear();
        self.said.extend(tokens.take(count).map(|slot| slot.token));
        let limits = &planner.limits;
        let last_position = planner.positions[inputs.end - 1];
        let first_position = last_position.saturating_add(count as u32 + 1);
        let start = request.prefix as usize + inputs.len();
        let room = (limits.max_positions.saturating_sub(first_position) as usize)
            .min((limits.max_kv_len() as usize).saturating_sub(start + count));
        let most = self.policy.max_drafts().min(room);
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

    /// Brings the drafter up to what the context has said before this request; `false` if there is more of that than may be
    /// read in one frame, and the rest comes with the next.
    fn catch_up(&mut self, planner: &Planner, request: &Request, context: u64) -> bool {
        let prefix = request.prefix as usize;
        let Some(pages) = planner.known_pages(request) else {
            return true;
        };
        let known = self.drafter.length(context).min(prefix);
        self.said.clear();
        let recent = known.saturating_sub(CHECKED)..known;
        let start = self.pages.load(pages, recent, &mut self.said);
        let holds = self.drafter.holds(context, start, &self.said);
        let known = if holds && self.drafter.can_rewind(context, known) {
            known
        } else {
            // What it has in common with what was said before is found again while it is read from its pages.
            if holds {
                self.drafter.release(context);
            }
            0
        };
        let end = prefix.min(known + self.recall);
        if known < end {
            self.recall -= end - known;
            self.said.clear();
            let start = self.pages.load(pages, known..end, &mut self.said);
            self.drafter.append_known(context, start as u32, &self.said);
        }
        end == prefix
    }

    /// Learns how long the device took for a frame, and how long ago the answer before was given; if it was a step of the
    /// model, with so many rows, whether some of them were drafts, and how many tokens were answered.
    fn took(&mut self, time: Duration, cycle: Duration, step: Option<(usize, bool, usize)>) {
        let recalled = (time.as_secs_f64() / 2.0 * RECALLED) as usize;
        self.recall = recalled.clamp(RECALL.0, RECALL.1);
        // Where there are graphs, a step without one tells nothing of theirs, unless none ever runs such steps.
        if let Some((rows, drafted, tokens)) = step
            && (self.policy.kind() != Kind::Plain || self.graph == self.graphs)
        {
            self.policy.timed(rows, drafted, time);
            // Nothing was chosen where nobody asks.
            if !self.lengths.is_empty() {
                self.policy.answered(tokens, cycle);
            }
        }
    }

    /// What became of drafts so far, if it is time to say so.
    fn report(&mut self) -> Option<DraftCounters> {
        let counters = self.policy.counters();
        let (steps, drafted) = (counters.steps, counters.drafted);
        if steps < self.next_report.0 && drafted < self.next_report.1 {
            return None;
        }
        self.next_report = (
            steps + steps.clamp(FIRST_REPORT, REPORT_STEPS),
            drafted + drafted.clamp(FIRST_REPORT, REPORT_DRAFTS),
        );
        Some(counters)
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

    /// What became of drafts so far, if it is time to say so: with the first 256 drafts that were verified, or steps that
    /// asked for some, and then whenever there were twice as many of either; later with every 2^20 drafts or 2^14 steps.
    /// Call it once a frame is answered.
    pub fn draft_report(&mut self) -> Option<DraftCounters> {
        self.drafting.as_mut()?.report()
    }

    /// Notes that a page was copied, from pool and page to pool and page.
    pub fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.pages.copy(source, target);
        }
    }

    /// Notes that it is not known any more what a page holds.
    pub fn page_lost(&mut self, page: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.pages.forget(page);
        }
    }

    /// Notes how long the device took for the current frame, and how much time its answer came after the one before: what
    /// drafts cost is learnt from frames that are steps. Call it once the frame is answered.
    pub fn step_took(&mut self, time: Duration, cycle: Duration) {
        if self.drafting.is_none() {
            return;
        }
        let mut computed = (self.requests.iter()).filter(|request| !request.rows.is_empty());
        let step = self.passes.len() == 1
            && computed.all(|request| request.rows.len() == request.drafts as usize + 1);
        let drafted = (self.requests.iter()).any(|request| request.drafts > 0);
        let step = step.then(|| (self.token_ids.len(), drafted, self.answered_tokens()));
        if let Some(drafting) = &mut self.drafting {
            drafting.took(time, cycle, step);
        }
    }

    /// Tokens that the reply to the current frame returns.
    fn answered_tokens(&self) -> usize {
        let count = |request: &Request| {
            let slots = &self.slots.all[request.slots.range()];
            token_count(request, slots, &self.token_ids)
        };
        self.requests.iter().map(count).sum()
    }

    /// Tells the drafter what the current frame is, beside its rows.
    pub(crate) fn note_kind(&mut self) {
        if let Some(drafting) = &mut self.drafting {
            let bound = (self.requests.iter()).any(|request| request.adapter.is_some());
            let probed = (self.slots.all.iter()).any(|slot| !slot.class.is_token());
            drafting.policy.set_kind(match (bound, probed) {
                (true, _) => Kind::Bound,
                (false, true) => Kind::Probed,
                (false, false) => Kind::Plain,
            });
        }
    }

    /// Notes that a graph computes the current frame.
    pub(crate) fn runs_as_graph(&mut self) {
        if let Some(drafting) = &mut self.drafting {
            (drafting.graph, drafting.graphs) = (true, true);
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
            drafting.take_back();
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
        let pages = self.table.pages(request.table_row as usize);
        pages.get(..count).filter(|_| !shared)
    }
}
