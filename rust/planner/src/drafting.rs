//! Speculative decoding by n-grams, suffixes or a draft model: the drafts that pay off go into the reply. Tokens of requests feed the
//! n-gram drafter; a draft model runs in the graph of the step.
//!
//! A step runs the draft model only if [`Drafting::runs_model`] says so before it is staged.
//!
//! While the device computes, [`Drafting::prepare`] appends the inputs of requests, and text of contexts that the drafter has not
//! seen. After sampling, only requests that may get drafts are processed; tokens of others come with their next request.

pub(crate) mod history;
pub(crate) mod inputs;
pub(crate) mod model;
pub(crate) mod verify;

use std::mem;
use std::ops::Range;
use std::time::Duration;

use pie_speculation::{
    Config, ConfigError, Counters as DraftCounters, DraftProposal, Drafter, Drafts, Policy, Step,
    StepKind,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::drafting::history::{PagePool, PageTokens};
use crate::drafting::inputs::DraftInputs;
use crate::drafting::model::{ModelDrafts, model_proposal};
use crate::drafting::verify::token_count;
use crate::frame::request::PlannedRequest;
use crate::limits::Limits;
use crate::slot::SamplingSlot;
use crate::table::BlockTable;

/// Last tokens of a context that must match the drafter's; otherwise the context id was reused.
const OVERLAP_TOKENS: usize = 16;
/// Tokens per second that can be re-read from pages, conservatively.
const REREAD_PER_SECOND: f64 = 1e6;
/// Minimum and maximum of re-read tokens per frame.
const REREAD: (usize, usize) = (256, 1 << 16);
/// Steps or verified drafts before the first report; the interval then doubles up to the maxima below.
const FIRST_REPORT: u64 = 1 << 8;
const REPORT_STEPS: u64 = 1 << 14;
const REPORT_DRAFTS: u64 = 1 << 20;
/// Maximum contexts with pending drafts; beyond it all are dropped.
const MAX_PENDING: usize = 1 << 16;

/// Options of speculative decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftOptions {
    /// The index, and suffix decoding; `None` if a draft model proposes the drafts.
    pub ngram: Option<Config>,
    /// Maximum drafts per request.
    pub num_drafts: usize,
    /// Captured batch sizes, ascending: the policy learns the step time of each.
    pub graph_sizes: Vec<usize>,
    /// Those that are captured with the draft model, too; without one this is not read.
    pub model_sizes: Vec<usize>,
    /// Pages of the host pool.
    pub host_pages: u32,
}

/// A request of the current frame that wants drafts.
#[derive(Debug, Clone, Copy)]
struct DraftRequest {
    request: usize,
    context: u64,
    /// Whether drafts are likely to pay off.
    promising: bool,
}

/// The drafts of a request.
#[derive(Debug, Clone, Default)]
struct Draft {
    tokens: Range<usize>,
    first_position: u32,
}

/// Draft requests and drafts of a frame.
#[derive(Debug, Default)]
pub(crate) struct FrameDrafts {
    requests: Vec<DraftRequest>,
    /// [`Drafting::prepare`] has run.
    prepared: bool,
    /// The frame runs as a captured graph.
    graph: bool,
    /// Whether the draft model runs in it; `None` if this was not asked.
    runs_model: Option<bool>,
    kind: StepKind,
    tokens: Vec<u32>,
    drafts: Vec<Draft>,
    offers: Vec<DraftProposal>,
    marks: Vec<bool>,
    lengths: Vec<usize>,
    /// Of a draft model.
    model: ModelDrafts,
}

impl FrameDrafts {
    /// Starts a frame.
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.lengths.clear();
        self.prepared = false;
        self.graph = false;
        self.runs_model = None;
        self.kind = StepKind::Plain;
        self.model.clear();
    }

    /// The drafts of a draft model.
    pub(crate) const fn model_mut(&mut self) -> &mut ModelDrafts {
        &mut self.model
    }

    /// Adds a request that wants drafts.
    pub(crate) fn request(&mut self, request: usize, context: u64) {
        if context != 0 {
            self.requests.push(DraftRequest {
                request,
                context,
                promising: false,
            });
        }
    }

    /// Sets the cost class of the frame.
    pub(crate) fn set_kind(&mut self, kind: StepKind) {
        self.kind = kind;
    }

    /// Whether the reply has drafts.
    pub(crate) fn any(&self) -> bool {
        self.lengths.iter().any(|&length| length > 0)
    }

    /// Tokens and first position of each request's drafts, in the frame's order; empty without drafts.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = (&[u32], u32)> {
        let drafts = if self.any() { &self.drafts[..] } else { &[] };
        let requests = drafts.iter().zip(&self.lengths);
        requests.map(|(draft, &length)| {
            let tokens = &self.tokens[draft.tokens.clone()][..length];
            (tokens, draft.first_position)
        })
    }

    /// Keeps only the last request of each context.
    fn keep_last(&mut self, seen: &mut FxHashSet<u64>) {
        seen.clear();
        self.requests.reverse();
        self.requests.retain(|request| seen.insert(request.context));
        self.requests.reverse();
    }
}

fn policy(options: &DraftOptions) -> Policy {
    let (most, sizes) = (options.num_drafts, &options.graph_sizes);
    match options.ngram {
        Some(_) => Policy::new(most, sizes),
        None => Policy::for_model(most, sizes, &options.model_sizes),
    }
}

/// The drafter, its policy and the text of pages.
#[derive(Debug)]
pub(crate) struct Drafting {
    /// `None` if a draft model proposes the drafts.
    drafter: Option<Drafter>,
    policy: Policy,
    pages: PageTokens,
    /// Scratch: contexts seen so far.
    seen: FxHashSet<u64>,
    /// Tokens that may be re-read in the next frame.
    reread: usize,
    /// Some frame ran as a graph.
    graphs: bool,
    /// Pending drafts of each context.
    pending: FxHashMap<u64, DraftProposal>,
    /// Scratch: tokens to append to a context.
    text: Vec<u32>,
    found: Drafts,
    /// Steps and drafts at which the next report is due.
    next_report: (u64, u64),
}

impl Drafting {
    pub(crate) fn new(options: &DraftOptions, limits: &Limits) -> Result<Self, ConfigError> {
        Ok(Self {
            drafter: options.ngram.map(Drafter::new).transpose()?,
            policy: policy(options),
            pages: PageTokens::new(limits.page_size, limits.total_pages, options.host_pages),
            seen: FxHashSet::default(),
            reread: REREAD.0,
            graphs: false,
            pending: FxHashMap::default(),
            text: Vec::new(),
            found: Drafts::default(),
            next_report: (FIRST_REPORT, FIRST_REPORT),
        })
    }

    /// Records the tokens that a request stores from KV index `start` on.
    pub(crate) fn store(&mut self, pages: &[u32], start: usize, tokens: &[u32]) {
        self.pages.store(pages, start, tokens);
    }

    /// Records a page copy.
    pub(crate) fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        self.pages.copy(source, target);
    }

    /// Marks the content of a page as unknown.
    pub(crate) fn page_invalidated(&mut self, page: (PagePool, u32)) {
        self.pages.forget(page);
    }

    /// Records that a frame runs as a graph.
    pub(crate) fn runs_as_graph(&mut self, drafts: &mut FrameDrafts) {
        (drafts.graph, self.graphs) = (true, true);
    }

    /// Draft acceptance counters.
    pub(crate) fn counters(&self) -> DraftCounters {
        self.policy.counters()
    }

    /// Whether a frame that can run as a graph with the draft model does; then its requests get drafts.
    pub(crate) fn runs_model(&mut self, drafts: &mut FrameDrafts, frame: DraftInputs<'_>) -> bool {
        if self.drafter.is_some() || drafts.requests.is_empty() {
            return false;
        }
        drafts.prepared = true;
        self.begin(drafts, frame);
        for request in &drafts.requests {
            drafts.offers[request.request] =
                model_proposal(request.context, self.policy.max_drafts());
        }
        let rows = frame.query_tokens.len();
        let runs = self
            .policy
            .runs_model(&drafts.offers, rows, frame.is_decode());
        drafts.runs_model = Some(runs);
        for request in &mut drafts.requests {
            request.promising = runs;
        }
        runs
    }

    /// Starts the proposals of a frame.
    fn begin(&mut self, drafts: &mut FrameDrafts, frame: DraftInputs<'_>) {
        self.policy.set_kind(drafts.kind);
        drafts.keep_last(&mut self.seen);
        // Every request takes part in the next step.
        drafts.offers.clear();
        drafts
            .offers
            .resize(frame.requests.len(), DraftProposal::default());
    }

    /// Appends the inputs of the requests, and preselects those that may get drafts.
    pub(crate) fn prepare(
        &mut self,
        drafts: &mut FrameDrafts,
        frame: DraftInputs<'_>,
        table: &BlockTable,
    ) {
        if mem::replace(&mut drafts.prepared, true) || drafts.requests.is_empty() {
            return;
        }
        self.begin(drafts, frame);
        let Some(drafter) = &mut self.drafter else {
            return;
        };
        drafter.flush_shared();
        for &DraftRequest {
            request, context, ..
        } in &drafts.requests
        {
            let asked = &frame.requests[request];
            if self.catch_up(frame, table, asked, context) {
                let inputs = asked.inputs();
                self.text.clear();
                self.text
                    .extend_from_slice(&frame.query_tokens.token_ids()[inputs]);
                drafts.offers[request] = self.append(context, asked.prefix(), 1);
            }
        }
        self.policy.preselect(&drafts.offers, &mut drafts.marks);
        for request in &mut drafts.requests {
            // A context that was not appended would restart with its next token.
            let known = drafts.offers[request.request].context == request.context;
            request.promising = known && drafts.marks[request.request];
        }
    }

    /// Appends `text` to the context from KV index `start` on, and drafts its continuation.
    fn append(&mut self, context: u64, start: usize, drafts: usize) -> DraftProposal {
        let step = Step {
            context,
            position: start as u32,
            tokens: &self.text,
            drafts,
        };
        self.found.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.append(&step, &mut self.found);
        }
        DraftProposal {
            context,
            match_length: self.found.match_length(0),
            drafts: self.found.tokens(0).len(),
            grades: self.found.grades(0),
        }
    }

    /// Appends the sampled tokens of a computed frame, and chooses drafts.
    pub(crate) fn propose(
        &mut self,
        drafts: &mut FrameDrafts,
        frame: DraftInputs<'_>,
        table: &BlockTable,
    ) {
        if drafts.requests.is_empty() {
            return;
        }
        self.prepare(drafts, frame, table);
        self.policy.set_kind(drafts.kind);
        drafts.tokens.clear();
        drafts.drafts.clear();
        drafts.drafts.resize(frame.requests.len(), Draft::default());
        drafts.offers.fill(DraftProposal::default());
        for index in 0..drafts.requests.len() {
            self.draft(drafts, frame, drafts.requests[index]);
        }
        if self.drafter.is_none() && drafts.runs_model.is_none() {
            return;
        }
        self.policy.choose(&drafts.offers, &mut drafts.lengths);
        if self.pending.len() > MAX_PENDING {
            self.pending.clear();
        }
        let offered = drafts.offers.iter().zip(&drafts.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.pending.insert(offer.context, *offer);
        }
    }

    /// Discards the chosen drafts.
    pub(crate) fn discard(&mut self, drafts: &mut FrameDrafts) {
        let offered = drafts.offers.iter().zip(&drafts.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.pending.remove(&offer.context);
        }
        drafts.lengths.clear();
    }

    fn draft(&mut self, drafts: &mut FrameDrafts, frame: DraftInputs<'_>, asked: DraftRequest) {
        let DraftRequest {
            request: index,
            context,
            promising,
        } = asked;
        let request = &frame.requests[index];
        let drafted = request.drafts();
        if !promising && drafted == 0 {
            return;
        }
        let slots = frame.slots.of(request.slots());
        let count = token_count(request, slots, frame.query_tokens.token_ids());
        // Rejected, or without samplers.
        if count == 0 {
            return;
        }
        if drafted > 0
            && let Some(proposal) = self.pending.remove(&context)
        {
            self.policy.verified(&proposal, drafted, count - 1);
        }
        let inputs = request.inputs();
        // Without drafts, only a token sampled after the last input continues the context.
        let tokens = slots.iter().filter(|slot| slot.class().is_token());
        let follows =
            drafted > 0 || (count == 1 && tokens.clone().all(|slot| slot.row() + 1 == inputs.end));
        if !promising || !follows {
            return;
        }
        self.text.clear();
        self.text
            .extend(tokens.take(count).map(SamplingSlot::token));
        let limits = frame.limits;
        let last_position = frame.query_tokens.positions()[inputs.end - 1];
        let first_position = last_position.saturating_add(count as u32 + 1);
        let start = request.prefix() + inputs.len();
        let remaining = (limits.max_positions.saturating_sub(first_position) as usize)
            .min((limits.max_kv_len() as usize).saturating_sub(start + count));
        let limit = self.policy.max_drafts().min(remaining);
        let (offer, found) = if self.drafter.is_some() {
            let offer = self.append(context, start, limit);
            (offer, self.found.tokens(0))
        } else {
            let found = (drafts.model).after(request.slots().range().start, slots, count - 1);
            (model_proposal(context, 0), &found[..limit.min(found.len())])
        };
        // Image placeholders are not tokens.
        let usable = (found.iter()).take_while(|&&token| token < limits.vocab_size);
        let first = drafts.tokens.len();
        drafts.tokens.extend(usable);
        drafts.drafts[index] = Draft {
            tokens: first..drafts.tokens.len(),
            first_position,
        };
        drafts.offers[index] = DraftProposal {
            drafts: drafts.tokens.len() - first,
            ..offer
        };
    }

    /// Feeds the drafter the text of the context before this request; `false` if more is left than one frame may re-read.
    fn catch_up(
        &mut self,
        frame: DraftInputs<'_>,
        table: &BlockTable,
        request: &PlannedRequest,
        context: u64,
    ) -> bool {
        let prefix = request.prefix();
        let Some(pages) = frame.known_pages(table, request) else {
            return true;
        };
        let Some(drafter) = &mut self.drafter else {
            return true;
        };
        let known = drafter.length(context).min(prefix);
        self.text.clear();
        let recent = known.saturating_sub(OVERLAP_TOKENS)..known;
        let start = self.pages.load(pages, recent, &mut self.text);
        let holds = drafter.holds(context, start, &self.text);
        let known = if holds && drafter.can_rewind(context, known) {
            known
        } else {
            // Re-read from its pages.
            if holds {
                drafter.release(context);
            }
            0
        };
        let end = prefix.min(known + self.reread);
        if known < end {
            self.reread -= end - known;
            self.text.clear();
            let start = self.pages.load(pages, known..end, &mut self.text);
            drafter.append_known(context, start as u32, &self.text);
        }
        end == prefix
    }

    /// Reports the device time of a frame, and the time since the answer before it.
    pub(crate) fn record_time(
        &mut self,
        drafts: &FrameDrafts,
        (frame, passes): (DraftInputs<'_>, usize),
        time: Duration,
        cycle: Duration,
    ) {
        let reread = (time.as_secs_f64() / 2.0 * REREAD_PER_SECOND) as usize;
        self.reread = reread.clamp(REREAD.0, REREAD.1);
        let Some(step) = frame.decode_step(passes, drafts.runs_model == Some(true)) else {
            return;
        };
        // Eager steps say nothing about graphs.
        if drafts.kind == StepKind::Plain && drafts.graph != self.graphs {
            return;
        }
        self.policy.set_kind(drafts.kind);
        if self.drafter.is_none() && drafts.kind == StepKind::Plain {
            self.policy.decoded(step, time);
        } else {
            self.policy
                .timed(step.rows, step.rows > step.requests, time);
        }
        // Without draft requests nothing was chosen.
        if !drafts.lengths.is_empty() {
            self.policy.answered(step.tokens, cycle);
        }
    }

    /// Draft acceptance counters, if a report is due.
    pub(crate) fn report(&mut self) -> Option<DraftCounters> {
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
