//! Drafts for the next step: what requests said goes to the n-gram drafter, and what it offers, as far as that pays, goes
//! into the reply.
//!
//! What a request brings along is taken while the device computes, and so is everything that can wait: what contexts said
//! before they asked, the shared history. After an answer there is work only for requests that may get drafts: the
//! tokens of the others reach the drafter with their next request.

pub(crate) mod history;
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
use crate::drafting::verify::token_count;
use crate::frame::request::Request;
use crate::frame::rows::Rows;
use crate::limits::Limits;
use crate::slot::{Slot, Slots};
use crate::table::BlockTable;

/// Tokens before a request's own that must be those that the drafter knows; else its context is another one.
const CHECKED: usize = 16;
/// Tokens that are read again from their pages in a second, with room to spare.
const REREAD_PER_SECOND: f64 = 1e6;
/// Of those, in one frame: at least, and at most.
const REREAD: (usize, usize) = (256, 1 << 16);
/// Steps, or drafts that were verified, before the first report, and the most of either between two later ones; in the
/// meantime their number doubles.
const FIRST_REPORT: u64 = 1 << 8;
const REPORT_STEPS: u64 = 1 << 14;
const REPORT_DRAFTS: u64 = 1 << 20;
/// Contexts whose drafts are pending; when there are more, all are forgotten.
const MAX_PENDING: usize = 1 << 16;

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
struct DraftRequest {
    request: usize,
    context: u64,
    /// Whether drafts after its answer are worth their cost.
    promising: bool,
}

const NOTHING: DraftProposal = DraftProposal {
    context: 0,
    match_length: 0,
    drafts: 0,
};

/// What is drafted after a request of the current frame.
#[derive(Debug, Clone, Default)]
struct Draft {
    tokens: Range<usize>,
    first_position: u32,
}

/// What a frame's requests ask of the drafter, and what they get.
#[derive(Debug, Default)]
pub(crate) struct FrameDrafts {
    requests: Vec<DraftRequest>,
    /// The drafter has what the requests brought along.
    prepared: bool,
    /// A graph computes the frame.
    graph: bool,
    kind: StepKind,
    tokens: Vec<u32>,
    drafts: Vec<Draft>,
    offers: Vec<DraftProposal>,
    marks: Vec<bool>,
    lengths: Vec<usize>,
}

impl FrameDrafts {
    /// Begins a frame.
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.lengths.clear();
        self.prepared = false;
        self.graph = false;
        self.kind = StepKind::Plain;
    }

    /// Notes that a request asks for drafts.
    pub(crate) fn ask(&mut self, request: usize, context: u64) {
        if context != 0 {
            self.requests.push(DraftRequest {
                request,
                context,
                promising: false,
            });
        }
    }

    /// Notes of what kind the frame is.
    pub(crate) fn set_kind(&mut self, kind: StepKind) {
        self.kind = kind;
    }

    /// Whether the frame's reply has drafts.
    pub(crate) fn any(&self) -> bool {
        self.lengths.iter().any(|&length| length > 0)
    }

    /// Tokens and first position of the drafts of each request, in the frame's order; nothing when no request has some.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = (&[u32], u32)> {
        let drafts = if self.any() { &self.drafts[..] } else { &[] };
        let requests = drafts.iter().zip(&self.lengths);
        requests.map(|(draft, &length)| {
            let tokens = &self.tokens[draft.tokens.clone()][..length];
            (tokens, draft.first_position)
        })
    }

    /// Leaves out requests whose context a later one has, too.
    fn keep_last(&mut self, seen: &mut FxHashSet<u64>) {
        seen.clear();
        self.requests.reverse();
        self.requests.retain(|request| seen.insert(request.context));
        self.requests.reverse();
    }
}

/// What drafting reads of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drafted<'a> {
    pub(crate) limits: &'a Limits,
    /// Number of the frame.
    pub(crate) number: u64,
    pub(crate) requests: &'a [Request],
    pub(crate) rows: &'a Rows,
    pub(crate) slots: &'a Slots,
}

impl Drafted<'_> {
    /// The pages before a request's own tokens, as the block table's mirror has them; `None` when it has others.
    fn known_pages<'t>(&self, table: &'t BlockTable, request: &Request) -> Option<&'t [u32]> {
        let count = request.prefix().div_ceil(self.limits.page_size as usize);
        // A row that requests of one frame share has the pages of one of them, and a later frame has its own.
        let shared = self.requests.len() > self.limits.max_requests as usize;
        let others = shared || table.frame() != self.number;
        let pages = table.pages(request.place().row());
        pages.get(..count).filter(|_| !others)
    }

    /// Tokens that the reply returns.
    fn answered_tokens(&self) -> usize {
        let count = |request: &Request| {
            let slots = self.slots.of(request.slots());
            token_count(request, slots, self.rows.token_ids())
        };
        self.requests.iter().map(count).sum()
    }

    /// If the frame is a step of the model: its rows, whether some of them are drafts, and how many tokens it answers.
    fn step(&self, passes: usize) -> Option<(usize, bool, usize)> {
        let mut computed = (self.requests.iter()).filter(|request| !request.rows().is_empty());
        let step =
            passes == 1 && computed.all(|request| request.rows().len() == request.drafts() + 1);
        let drafted = || (self.requests.iter()).any(|request| request.drafts() > 0);
        step.then(|| (self.rows.len(), drafted(), self.answered_tokens()))
    }
}

/// The drafter, and what it has learnt.
#[derive(Debug)]
pub(crate) struct Drafting {
    drafter: Drafter,
    policy: Policy,
    pages: PageTokens,
    /// Contexts that ask, while they are looked through.
    seen: FxHashSet<u64>,
    /// Tokens of earlier frames that may be read again in the next one.
    reread: usize,
    /// Some frame was computed by a graph.
    graphs: bool,
    /// How long the match was that a context's drafts were offered for.
    pending: FxHashMap<u64, usize>,
    /// What a request adds to its context.
    text: Vec<u32>,
    found: Drafts,
    /// Steps and drafts with which the next report is due.
    next_report: (u64, u64),
}

impl Drafting {
    pub(crate) fn new(options: &DraftOptions, limits: &Limits) -> Result<Self, ConfigError> {
        Ok(Self {
            drafter: Drafter::new(options.ngram)?,
            policy: Policy::new(options.num_drafts, &options.rungs),
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

    /// Notes what a request stores in its pages, from KV index `start` on.
    pub(crate) fn store(&mut self, pages: &[u32], start: usize, tokens: &[u32]) {
        self.pages.store(pages, start, tokens);
    }

    /// Notes that a page was copied.
    pub(crate) fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        self.pages.copy(source, target);
    }

    /// Notes that it is not known any more what a page holds.
    pub(crate) fn page_lost(&mut self, page: (PagePool, u32)) {
        self.pages.forget(page);
    }

    /// Notes that a graph computes a frame.
    pub(crate) fn runs_as_graph(&mut self, drafts: &mut FrameDrafts) {
        (drafts.graph, self.graphs) = (true, true);
    }

    /// What became of drafts so far.
    pub(crate) fn counters(&self) -> DraftCounters {
        self.policy.counters()
    }

    /// Takes what the requests brought along, and finds out which may get drafts.
    pub(crate) fn prepare(
        &mut self,
        drafts: &mut FrameDrafts,
        frame: Drafted<'_>,
        table: &BlockTable,
    ) {
        if mem::replace(&mut drafts.prepared, true) || drafts.requests.is_empty() {
            return;
        }
        self.policy.set_kind(drafts.kind);
        self.drafter.flush_shared();
        drafts.keep_last(&mut self.seen);
        // Every request is a row of the next step, whether it asks for drafts or not.
        drafts.offers.clear();
        drafts.offers.resize(frame.requests.len(), NOTHING);
        for &DraftRequest {
            request, context, ..
        } in &drafts.requests
        {
            let asked = &frame.requests[request];
            if self.catch_up(frame, table, asked, context) {
                let inputs = asked.inputs();
                self.text.clear();
                self.text.extend_from_slice(&frame.rows.token_ids()[inputs]);
                drafts.offers[request] = self.append(context, asked.prefix(), 1);
            }
        }
        self.policy.preselect(&drafts.offers, &mut drafts.marks);
        for request in &mut drafts.requests {
            // One that was not appended would start anew with its token.
            let known = drafts.offers[request.request].context == request.context;
            request.promising = known && drafts.marks[request.request];
        }
    }

    /// Takes what is in `text` as the context's end from KV index `start` on, and drafts what follows.
    fn append(&mut self, context: u64, start: usize, drafts: usize) -> DraftProposal {
        let step = Step {
            context,
            position: start as u32,
            tokens: &self.text,
            drafts,
        };
        self.found.clear();
        self.drafter.append(&step, &mut self.found);
        DraftProposal {
            context,
            match_length: self.found.match_length(0),
            drafts: self.found.tokens(0).len(),
        }
    }

    /// Takes what the requests of a computed frame were answered, and chooses their drafts.
    pub(crate) fn propose(
        &mut self,
        drafts: &mut FrameDrafts,
        frame: Drafted<'_>,
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
        drafts.offers.fill(NOTHING);
        for index in 0..drafts.requests.len() {
            self.draft(drafts, frame, drafts.requests[index]);
        }
        self.policy.choose(&drafts.offers, &mut drafts.lengths);
        if self.pending.len() > MAX_PENDING {
            self.pending.clear();
        }
        let offered = drafts.offers.iter().zip(&drafts.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.pending.insert(offer.context, offer.match_length);
        }
    }

    /// Takes the choice of drafts back.
    pub(crate) fn take_back(&mut self, drafts: &mut FrameDrafts) {
        let offered = drafts.offers.iter().zip(&drafts.lengths);
        for (offer, _) in offered.filter(|(_, length)| **length > 0) {
            self.pending.remove(&offer.context);
        }
        drafts.lengths.clear();
    }

    fn draft(&mut self, drafts: &mut FrameDrafts, frame: Drafted<'_>, asked: DraftRequest) {
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
        let count = token_count(request, slots, frame.rows.token_ids());
        // It was emptied, or has no samplers.
        if count == 0 {
            return;
        }
        if drafted > 0
            && let Some(match_length) = self.pending.remove(&context)
        {
            self.policy
                .verified(context, match_length, drafted, count - 1);
        }
        let inputs = request.inputs();
        // Without drafts, a token that does not follow the last input continues nothing.
        let tokens = slots.iter().filter(|slot| slot.class().is_token());
        let follows =
            drafted > 0 || (count == 1 && tokens.clone().all(|slot| slot.row() + 1 == inputs.end));
        if !promising || !follows {
            return;
        }
        self.text.clear();
        self.text.extend(tokens.take(count).map(Slot::token));
        let limits = frame.limits;
        let last_position = frame.rows.positions()[inputs.end - 1];
        let first_position = last_position.saturating_add(count as u32 + 1);
        let start = request.prefix() + inputs.len();
        let room = (limits.max_positions.saturating_sub(first_position) as usize)
            .min((limits.max_kv_len() as usize).saturating_sub(start + count));
        let limit = self.policy.max_drafts().min(room);
        let offer = self.append(context, start, limit);
        // A placeholder of an image is not a token.
        let found = self.found.tokens(0).iter();
        let usable = found.take_while(|&&token| token < limits.vocab_size);
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

    /// Brings the drafter up to what the context has said before this request; `false` if there is more of that than may be
    /// read in one frame, and the rest comes with the next.
    fn catch_up(
        &mut self,
        frame: Drafted<'_>,
        table: &BlockTable,
        request: &Request,
        context: u64,
    ) -> bool {
        let prefix = request.prefix();
        let Some(pages) = frame.known_pages(table, request) else {
            return true;
        };
        let known = self.drafter.length(context).min(prefix);
        self.text.clear();
        let recent = known.saturating_sub(CHECKED)..known;
        let start = self.pages.load(pages, recent, &mut self.text);
        let holds = self.drafter.holds(context, start, &self.text);
        let known = if holds && self.drafter.can_rewind(context, known) {
            known
        } else {
            // What it has in common with what was said before is found again while it is read from its pages.
            if holds {
                self.drafter.release(context);
            }
            0
        };
        let end = prefix.min(known + self.reread);
        if known < end {
            self.reread -= end - known;
            self.text.clear();
            let start = self.pages.load(pages, known..end, &mut self.text);
            self.drafter.append_known(context, start as u32, &self.text);
        }
        end == prefix
    }

    /// Learns how long the device took for a frame of so many passes, and how much time its answer came after the one
    /// before.
    pub(crate) fn took(
        &mut self,
        drafts: &FrameDrafts,
        (frame, passes): (Drafted<'_>, usize),
        time: Duration,
        cycle: Duration,
    ) {
        let reread = (time.as_secs_f64() / 2.0 * REREAD_PER_SECOND) as usize;
        self.reread = reread.clamp(REREAD.0, REREAD.1);
        let Some((rows, drafted, tokens)) = frame.step(passes) else {
            return;
        };
        // Where there are graphs, a step without one says nothing about theirs, unless none ever runs such steps.
        if drafts.kind == StepKind::Plain && drafts.graph != self.graphs {
            return;
        }
        self.policy.set_kind(drafts.kind);
        self.policy.timed(rows, drafted, time);
        // Nothing was chosen where no request asks.
        if !drafts.lengths.is_empty() {
            self.policy.answered(tokens, cycle);
        }
    }

    /// What became of drafts so far, if it is time to say so.
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
