//! The step under construction: what still fits, and the rows of decodes and prefill chunks that are added to it.

use crate::config::Limits;
use crate::grammar::is_shorter_as_bits;
use crate::in_flight::{InFlightStep, ScheduledRow};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::suspects::CLEARED;

/// A step under construction.
#[derive(Debug)]
pub(crate) struct StepPlan {
    pub(crate) step: InFlightStep,
    /// Rows that sample no token; they come last.
    rest: Vec<ScheduledRow>,
    /// Rows, tokens and page references that still fit.
    pub(crate) rows: u32,
    pub(crate) tokens: u32,
    pub(crate) pages: u32,
    /// Words of log-probabilities that still fit the output.
    words: u64,
    /// Drafts in the step.
    drafts: u32,
    /// Bytes of its frame besides those of rows, tokens, drafts and pages.
    extra_bytes: u64,
    /// Every step within the other limits fits the frame, so only [`extra_bytes`](Self::extra_bytes) are counted.
    frame_is_ample: bool,
    /// The last sequence with a mask of its own.
    last_masked: Option<usize>,
    /// Prefill tokens that still fit.
    pub(crate) prefill_tokens: u32,
    /// Bytes of images in the step, and those that still fit.
    image_bytes: u32,
    image_bytes_left: u32,
    /// Free pages that decodes without drafts still need.
    pub(crate) decode_pages: usize,
    /// The step has sequences of this bisection group only.
    pub(crate) group: u64,
}

/// Frame bytes of a row besides tokens, drafts and pages.
#[derive(Debug, Clone, Copy, Default)]
struct RowCost {
    bytes: u64,
    /// It lists forbidden tokens, which the encoder may turn into a mask.
    has_forbidden: bool,
    /// It has a mask that it does not share with the row before.
    has_mask: bool,
}

impl StepPlan {
    /// An empty step, in buffers of earlier ones.
    pub(crate) fn new(
        limits: &Limits,
        now: u64,
        buffers: (InFlightStep, Vec<ScheduledRow>),
    ) -> Self {
        let (InFlightStep { rows, .. }, mut rest) = buffers;
        rest.clear();
        Self {
            step: InFlightStep {
                rows,
                scheduled_at: now,
                ..InFlightStep::default()
            },
            rest,
            rows: limits.max_forward_requests,
            tokens: limits.max_forward_tokens,
            pages: limits.max_page_refs,
            words: limits.max_logprob_words.into(),
            drafts: 0,
            extra_bytes: 0,
            frame_is_ample: limits.frame_is_ample(),
            last_masked: None,
            prefill_tokens: 0,
            image_bytes: 0,
            image_bytes_left: limits.max_image_bytes,
            decode_pages: 0,
            group: CLEARED,
        }
    }

    /// The step with all its rows, and the buffer for the next plan.
    pub(crate) fn finish(mut self) -> (InFlightStep, Vec<ScheduledRow>) {
        self.step.rows.extend_from_slice(&self.rest);
        (self.step, self.rest)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.step.rows.is_empty() && self.rest.is_empty()
    }

    fn fits(&self, tokens: u32, pages: u32) -> bool {
        self.rows > 0 && tokens <= self.tokens && pages <= self.pages
    }

    /// Subtracts a row from what the step has left.
    #[inline]
    fn take(&mut self, tokens: u32, drafts: u32, pages: u32, words: u64) {
        self.rows -= 1;
        self.tokens -= tokens + drafts;
        self.pages -= pages;
        self.words -= words;
        self.drafts += drafts;
    }

    /// Subtracts the frame bytes of a row that has more than tokens, drafts and pages.
    #[inline]
    fn add_cost(&mut self, slot: usize, cost: RowCost) {
        self.extra_bytes += cost.bytes;
        if cost.has_forbidden {
            // The encoder may turn it into a mask.
            self.last_masked = None;
        } else if cost.has_mask {
            self.last_masked = Some(slot);
        }
    }

    /// Appends a row: those that sample a token lie before all others.
    #[inline]
    fn push(&mut self, row: ScheduledRow) {
        self.step.has_drafts |= row.drafts > 0 || row.samples_token && row.wants_drafts;
        if row.samples_token {
            self.step.rows.push(row);
        } else {
            self.rest.push(row);
        }
    }

    /// Frame bytes that still fit.
    fn bytes_left(&self, limits: &Limits) -> u64 {
        let tokens = limits.max_forward_tokens - self.tokens - self.drafts;
        let sizes = (tokens, self.drafts, limits.max_page_refs - self.pages);
        let rows = limits.max_forward_requests - self.rows;
        let used = limits.frame.of_rows(rows, sizes) + self.extra_bytes;
        u64::from(limits.frame.max).saturating_sub(used)
    }
}

impl<S> Scheduler<S> {
    pub(crate) fn schedule_decodes(&mut self, plan: &mut StepPlan) {
        let mut left_out = false;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &self.sequences[slot];
            if !sequence.decodes() || !sequence.is_due(plan.group, self.plans) {
                continue;
            }
            let needs = |drafts| sequence.pages(drafts, self.kv_cache.page_size);
            let lacks = usize::from(needs(0) > sequence.kv.pages.len());
            plan.decode_pages = plan.decode_pages.saturating_sub(lacks);
            let drafts = sequence.usable_drafts();
            let grown = needs(drafts).saturating_sub(sequence.kv.pages.len());
            let affords = drafts > 0 && self.kv_cache.available() >= plan.decode_pages + grown;
            let placed = affords && self.schedule_row(plan, slot, 1, drafts);
            let placed = placed || self.schedule_row(plan, slot, 1, 0);
            left_out |= !placed;
            if placed {
                let sequence = &self.sequences[slot];
                let load = &mut plan.step.load;
                load.decodes += 1;
                load.context += u64::from(sequence.scheduled);
                load.streams |= sequence.streams;
            }
        }
        if left_out {
            self.rotate_running();
        }
    }

    /// Moves the sequences that are not in this step to the front of the running queue.
    fn rotate_running(&mut self) {
        let (step, sequences) = (self.plans, &self.sequences);
        self.running
            .sort_by_key(|&slot| sequences[slot].last_plan == step);
    }

    pub(crate) fn schedule_prefills(&mut self, plan: &mut StepPlan) {
        let mut waits = false;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &self.sequences[slot];
            if !sequence.prefills() || !sequence.is_due(plan.group, self.plans) {
                continue;
            }
            let placed = self.schedule_chunk(plan, slot);
            waits |= !placed;
        }
        self.prefill_starved |= waits && plan.step.load.prompt_tokens == 0;
    }

    /// Schedules the next prefill chunk of a sequence, as long as budget, pages, frame and images allow.
    pub(crate) fn schedule_chunk(&mut self, plan: &mut StepPlan, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        let (start, size) = (sequence.scheduled, self.limits.page_size);
        let mut most = sequence.len();
        if let Some(logprobs) = &sequence.logprobs {
            let positions = plan.words / u64::from(logprobs.words());
            let positions = u32::try_from(positions).unwrap_or(u32::MAX);
            most = most.min(logprobs.end_of_row(start, positions));
        }
        // As if it sampled a token.
        let more = sequence.row_extras(start, sequence.len(), self.registrations);
        let fixed = self.limits.frame.of_row((0, 0, 0), more);
        let budget = (
            plan.bytes_left(&self.limits),
            fixed + self.mask_bytes(plan, slot),
        );
        let end = self.limits.frame.end_of_row(start, size, budget);
        most = most.min(end.max(start + 1));
        let wanted = most.min(start.saturating_add(plan.prefill_tokens));
        let kv = sequence.kv.pages.len();
        let missing = (wanted.div_ceil(size) as usize).saturating_sub(kv);
        self.kv_cache.evict_until_free(missing);
        let pages = (kv + self.kv_cache.available()).min(plan.pages as usize);
        let mut end = wanted.min((pages as u32).saturating_mul(size));
        if end < sequence.len() && end - end % size > start {
            end -= end % size;
        }
        let left = plan.image_bytes_left;
        let (end, bytes) = self.sequences[slot].row_end(start, end, left, plan.image_bytes);
        let tokens = end.saturating_sub(start);
        let placed = tokens > 0 && end <= most && self.schedule_row(plan, slot, tokens, 0);
        if placed {
            plan.image_bytes += bytes;
            plan.image_bytes_left = left.saturating_sub(bytes);
            // An image may exceed the budget.
            plan.prefill_tokens = plan.prefill_tokens.saturating_sub(tokens);
            plan.step.load.prompt_tokens += tokens;
        }
        placed
    }

    /// Adds a row of `tokens` input tokens and `drafts` to the step, if it fits and its pages can be allocated.
    fn schedule_row(&mut self, plan: &mut StepPlan, slot: usize, tokens: u32, drafts: u32) -> bool {
        let Some(sequence) = self.sequences.get(slot) else {
            return false;
        };
        let (start, end) = (sequence.scheduled, sequence.scheduled + tokens);
        let pages = (end + drafts).div_ceil(self.limits.page_size);
        let (words, prompt_logprobs) = sequence.logprob_words(start, end, drafts);
        let is_short = plan.frame_is_ample && plan.extra_bytes == 0;
        let cost = if is_short && sequence.is_plain(start, self.registrations) {
            None
        } else {
            let cost = self.row_cost(plan, slot, (start, end));
            let bytes = self.limits.frame.of_rows(1, (tokens, drafts, pages)) + cost.bytes;
            if bytes > plan.bytes_left(&self.limits) {
                return false;
            }
            Some(cost)
        };
        let sequence = &mut self.sequences[slot];
        if !plan.fits(tokens + drafts, pages)
            || words > plan.words
            || !self.kv_cache.allocate_to(&mut sequence.kv, pages as usize)
        {
            return false;
        }
        plan.take(tokens, drafts, pages, words);
        if let Some(cost) = cost {
            sequence.register(self.registrations);
            plan.add_cost(slot, cost);
        }
        let row = ScheduledRow {
            slot,
            order: sequence.order,
            epoch: sequence.epoch,
            start,
            end,
            drafts,
            pages,
            awaits: (sequence.pending > 0).then_some(sequence.last_row),
            samples_token: sequence.samples_token(end),
            wants_drafts: sequence.wants_drafts(end),
            prompt_logprobs,
        };
        sequence.scheduled = end;
        sequence.last_plan = self.plans;
        if row.samples_token {
            plan.step.is_constrained |= !sequence.grammar.is_none();
            sequence.expect_token(plan.step.rows.len() as u32);
        }
        plan.push(row);
        true
    }

    /// Frame bytes of a row with log-probabilities, a mask or lists.
    #[cold]
    fn row_cost(&self, plan: &StepPlan, slot: usize, (start, end): (u32, u32)) -> RowCost {
        let sequence = &self.sequences[slot];
        let more = sequence.row_extras(start, end, self.registrations);
        let mask = if sequence.samples_token(end) {
            self.mask_bytes(plan, slot)
        } else {
            0
        };
        RowCost {
            bytes: self.limits.frame.of_extras(more) + mask,
            has_forbidden: more.forbidden > 0,
            has_mask: mask > 0,
        }
    }

    /// Frame bytes of a mask: 0 where the previous row has an equal one. Masks are compared only once half of the frame is used.
    fn mask_bytes(&self, plan: &StepPlan, slot: usize) -> u64 {
        let sequence = &self.sequences[slot];
        let Some(mask) = sequence.grammar.mask() else {
            return 0;
        };
        let own = u64::from(self.limits.frame.mask);
        if plan.bytes_left(&self.limits) > u64::from(self.limits.frame.max / 2) {
            return own;
        }
        let words = self.limits.vocab_size.div_ceil(32) as usize;
        let is_shared = plan.last_masked.is_some_and(|last| {
            let last = &self.sequences[last];
            let forbids = |of: &Sequence<S>| of.forbids(of.known()) && !of.stop_tokens().is_empty();
            last.grammar.mask() == Some(mask)
                && is_shorter_as_bits(mask, words)
                && !forbids(last)
                && !forbids(sequence)
        });
        if is_shared { 0 } else { own }
    }
}

impl<S> Sequence<S> {
    /// Pages for its next token and so many drafts.
    fn pages(&self, drafts: u32, page_size: usize) -> usize {
        (self.scheduled as usize + 1 + drafts as usize).div_ceil(page_size)
    }

    /// Drafts that its next row may verify, within `max_tokens`.
    fn usable_drafts(&self) -> u32 {
        let most = self.remaining().saturating_sub(1);
        (self.drafts.len() as u32).min(most)
    }
}
