//! Laying out a step: decodes first, then prompts under way, then new requests.

use crate::config::Limits;
use crate::constraint::is_shorter_as_bits;
use crate::error::SchedError;
use crate::flight::{Flight, Planned};
use crate::pace::{LOOK_AGAIN, MIN_PROMPT};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::step::{Row, Step};
use crate::suspects::CLEARED;

/// Steps that may be out at once.
const OUT: usize = 2;

/// A step that is being laid out.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) flight: Flight,
    /// Rows that draw nothing; they come last.
    rest: Vec<Planned>,
    /// What still fits: rows, tokens, page references.
    pub(crate) rows: u32,
    tokens: u32,
    pages: u32,
    /// Words of log-probabilities that still fit its answer.
    words: u64,
    /// Drafts in the step.
    drafts: u32,
    /// Bytes of its frame besides those of rows, tokens, drafts and pages.
    more_bytes: u64,
    /// The frame has room for all tokens and pages that a step may have, so that only [`more_bytes`](Self::more_bytes) are counted.
    is_ample: bool,
    /// The last sequence with a mask of its own.
    masked: Option<usize>,
    /// Tokens of prompts that still fit.
    pub(crate) prompt: u32,
    /// Bytes of images in the step, and those that still fit.
    image_bytes: u32,
    image_bytes_left: u32,
    /// Pages that decodes without drafts will need.
    reserved: usize,
    /// Only sequences of this group of suspects are in it.
    pub(crate) group: u64,
}

/// What a row takes of the frame besides tokens, drafts and pages.
#[derive(Debug, Clone, Copy, Default)]
struct RowCost {
    bytes: u64,
    /// It has a list of forbidden tokens, which may go as a mask.
    forbids: bool,
    /// It has a mask that no row before has.
    masked: bool,
}

impl Plan {
    fn fits(&self, tokens: u32, pages: u32) -> bool {
        self.rows > 0 && tokens <= self.tokens && pages <= self.pages
    }

    /// Page references that still fit.
    pub(crate) fn pages_left(&self) -> u32 {
        self.pages
    }

    /// Bytes that are left of a frame.
    fn bytes_left(&self, limits: &Limits) -> u64 {
        let tokens = limits.max_forward_tokens - self.tokens - self.drafts;
        let sizes = (tokens, self.drafts, limits.max_page_refs - self.pages);
        let rows = limits.max_forward_requests - self.rows;
        let used = limits.frame.of_rows(rows, sizes) + self.more_bytes;
        u64::from(limits.frame.max).saturating_sub(used)
    }

    fn is_empty(&self) -> bool {
        self.flight.rows.is_empty() && self.rest.is_empty()
    }
}

impl<S> Scheduler<S> {
    /// The next step, or `None` when there is nothing to compute, or nothing before an answer.
    ///
    /// # Errors
    ///
    /// [`SchedError::Books`]: a bug. [`driver_lost`](Self::driver_lost) makes all books anew.
    pub fn step(&mut self, now: u64) -> Result<Option<Step<'_, S>>, SchedError> {
        self.memory.check_fault()?;
        self.expire(now);
        let open = |flight: &Flight| flight.drafting || flight.binding;
        if self.flights.len() == OUT || self.flights.back().is_some_and(open) {
            return Ok(None);
        }
        if self.is_idle() {
            self.ratio.reset();
            return Ok(None);
        }
        let mut plan = self.plan(now);
        self.lay_out(&mut plan, now);
        self.sweep();
        self.memory.check_fault()?;
        let Plan {
            mut flight, rest, ..
        } = plan;
        flight.rows.extend_from_slice(&rest);
        self.rest = rest;
        if flight.rows.is_empty() {
            self.recycle(flight);
            return Ok(None);
        }
        std::mem::swap(&mut self.copies, &mut self.memory.copies);
        self.memory.copies.clear();
        flight.load.copied_pages = self.copies.len() as u32;
        self.counts.steps += 1;
        self.counts.rows = flight.rows.len();
        self.counts.total_rows += flight.rows.len() as u64;
        self.counts.prompt_steps += u64::from(flight.load.prompt_tokens > 0);
        self.flights.push_back(flight);
        Ok(Some(Step {
            number: self.counts.steps,
            copies: &self.copies,
            scheduler: self,
        }))
    }

    /// An empty step.
    fn plan(&mut self, now: u64) -> Plan {
        self.plans += 1;
        let mut rest = std::mem::take(&mut self.rest);
        rest.clear();
        let flight = self.spare.pop().unwrap_or_default();
        Plan {
            flight: Flight {
                rows: flight.rows,
                laid_at: now,
                ..Flight::default()
            },
            rest,
            rows: self.limits.max_forward_requests,
            tokens: self.limits.max_forward_tokens,
            pages: self.limits.max_page_refs,
            words: self.limits.max_logprob_words.into(),
            drafts: 0,
            more_bytes: 0,
            is_ample: self.limits.frame_is_ample(),
            masked: None,
            prompt: 0,
            image_bytes: 0,
            image_bytes_left: self.limits.max_image_bytes,
            reserved: 0,
            group: CLEARED,
        }
    }

    fn lay_out(&mut self, plan: &mut Plan, now: u64) {
        self.memory.host_pays = self.pace.host_pays(self.memory.page_size);
        if self.constrained > 0 {
            self.follow_running();
        }
        self.make_growth_room(plan);
        self.preempt();
        let prompts_first = std::mem::take(&mut self.starved);
        let groups = self.groups();
        for &group in &*groups {
            if plan.is_empty() {
                plan.group = group;
                self.fill(plan, prompts_first, now);
            }
        }
        let nothing = plan.is_empty() && self.flights.is_empty();
        if nothing && self.follow_late() {
            self.fill_by_any(plan, &groups);
        }
        while plan.is_empty() && self.flights.is_empty() && self.running.len() > 1 {
            // The best of those that run gets the pages of the others.
            self.retract_worst();
            self.fill_by_any(plan, &groups);
        }
        if !plan.is_empty() {
            self.note_group(plan.group);
        }
    }

    /// Lays out what there is of the step's group.
    fn fill(&mut self, plan: &mut Plan, prompts_first: bool, now: u64) {
        if !prompts_first {
            self.place_decodes(plan);
        }
        self.give_prompt_budget(plan, prompts_first);
        self.place_prompts(plan);
        self.admit(plan, now);
        if prompts_first {
            self.place_decodes(plan);
        }
    }

    /// Lays out what runs of the first of these groups that can be laid out.
    fn fill_by_any(&mut self, plan: &mut Plan, groups: &[u64]) {
        for &group in groups {
            if plan.is_empty() {
                plan.group = group;
                self.place_decodes(plan);
                self.give_prompt_budget(plan, false);
                self.place_prompts(plan);
            }
        }
    }

    /// How many tokens of prompts the step may have, besides decodes that have come or will come.
    fn give_prompt_budget(&mut self, plan: &mut Plan, decodes_follow: bool) {
        let decodes = self.limits.max_forward_tokens - plan.tokens;
        if self.streaming == 0 {
            let most = self.pace.without_streams();
            let left = most.saturating_sub(decodes).max(MIN_PROMPT);
            plan.prompt = most.min(left).min(plan.tokens);
            return;
        }
        let left = self.config.chunk_tokens.saturating_sub(decodes);
        let streams = |&slot: &usize| {
            let sequence = &self.sequences[slot];
            sequence.streams && sequence.decodes()
        };
        let streams =
            plan.flight.load.streams || decodes_follow && self.running.iter().any(streams);
        let budget = if streams && !decodes_follow {
            // Of those that run the rest have parts of prompts left, or are late.
            let load = plan.flight.load;
            let beginning = self.running.len().saturating_sub(load.decodes as usize);
            self.pace
                .crowded_budget(load, beginning + self.waiting.len())
        } else {
            self.pace.budget(streams)
        };
        plan.prompt = budget.min(left.max(MIN_PROMPT)).min(plan.tokens);
    }

    /// Retracts requests until the others can decode.
    fn make_growth_room(&mut self, plan: &mut Plan) {
        let mut retracted = false;
        loop {
            let wanted = self.growth(plan.rows);
            plan.reserved = wanted;
            if self.memory.make_room(wanted) || self.running.len() <= 1 {
                break;
            }
            self.retract_worst();
            retracted = true;
        }
        if retracted {
            let produced = |slot: &usize| u64::from(self.sequences[*slot].produced());
            let most = |slot: &usize| u64::from(self.sequences[*slot].shared.max_tokens);
            let produced = self.running.iter().map(produced).sum();
            let most = self.running.iter().map(most).sum();
            self.ratio.retracted(self.running.len(), produced, most);
            self.full_until = self.plans + LOOK_AGAIN;
        } else {
            self.ratio.decay();
        }
    }

    /// Pages that the decodes of the next step lack.
    fn growth(&self, rows: u32) -> usize {
        let decodes = self.running.iter().map(|&slot| &self.sequences[slot]);
        decodes
            .filter(|sequence| sequence.decodes())
            .take(rows as usize)
            .filter(|sequence| {
                let room = sequence.held.pages.len() * self.memory.page_size;
                sequence.len() as usize > room
            })
            .count()
    }

    /// Takes the pages of the running request that loses least by it: by priority, then the one that has produced the least,
    /// then the longest prompt.
    fn retract_worst(&mut self) {
        let worst = self.running.iter().copied().max_by_key(|&slot| {
            let sequence = &self.sequences[slot];
            let produced = std::cmp::Reverse(sequence.produced());
            let prompt = sequence.shared.prompt_len;
            (sequence.shared.rank, produced, prompt, sequence.order)
        });
        if let Some(slot) = worst {
            self.retract(slot);
        }
    }

    /// Puts a running request back into the queue. What it has computed stays in the prefix index while there is room.
    pub(crate) fn retract(&mut self, slot: usize) {
        self.store(slot, true, true);
        let sequence = &mut self.sequences[slot];
        self.memory.release(&mut sequence.held);
        sequence.forget_pages();
        let order = sequence.order;
        self.running.retain(|&other| other != slot);
        let place = self
            .waiting
            .partition_point(|&other| self.sequences[other].order < order);
        self.waiting.insert(place, slot);
        self.counts.retractions += 1;
        self.full_until = 0;
    }

    fn place_decodes(&mut self, plan: &mut Plan) {
        let mut left_out = false;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &self.sequences[slot];
            if !sequence.decodes() || !sequence.is_due(plan.group, self.plans) {
                continue;
            }
            let needs = |drafts| sequence.pages(drafts, self.memory.page_size);
            let lacks = usize::from(needs(0) > sequence.held.pages.len());
            plan.reserved = plan.reserved.saturating_sub(lacks);
            let drafts = sequence.usable_drafts();
            let grown = needs(drafts).saturating_sub(sequence.held.pages.len());
            let affords = drafts > 0 && self.memory.available() >= plan.reserved + grown;
            let placed = affords && self.place(plan, slot, 1, drafts);
            let placed = placed || self.place(plan, slot, 1, 0);
            left_out |= !placed;
            if placed {
                let sequence = &self.sequences[slot];
                let load = &mut plan.flight.load;
                load.decodes += 1;
                load.context += u64::from(sequence.scheduled);
                load.streams |= sequence.streams;
            }
        }
        if left_out {
            self.take_turns();
        }
    }

    /// What was left out comes first in the next step.
    fn take_turns(&mut self) {
        let (step, sequences) = (self.plans, &self.sequences);
        self.running
            .sort_by_key(|&slot| sequences[slot].step == step);
    }

    fn place_prompts(&mut self, plan: &mut Plan) {
        let mut waits = false;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &self.sequences[slot];
            if !sequence.prefills() || !sequence.is_due(plan.group, self.plans) {
                continue;
            }
            let placed = self.place_chunk(plan, slot);
            waits |= !placed;
        }
        self.starved |= waits && plan.flight.load.prompt_tokens == 0;
    }

    /// Gives a sequence as much of the budget as it can use.
    pub(crate) fn place_chunk(&mut self, plan: &mut Plan, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        let (start, size) = (sequence.scheduled, self.limits.page_size);
        let mut most = sequence.len();
        if let Some(logprobs) = &sequence.logprobs {
            let places = plan.words / u64::from(logprobs.words());
            let places = u32::try_from(places).unwrap_or(u32::MAX);
            most = most.min(logprobs.end_of_row(start, places));
        }
        // What it has if it draws.
        let more = sequence.row_extras(start, sequence.len(), self.registrations);
        let fixed = self.limits.frame.of_row((0, 0, 0), more);
        let room = (
            plan.bytes_left(&self.limits),
            fixed + self.mask_bytes(plan, slot),
        );
        let end = self.limits.frame.end_of_row(start, size, room);
        most = most.min(end.max(start + 1));
        let wanted = most.min(start.saturating_add(plan.prompt));
        let held = sequence.held.pages.len();
        let missing = (wanted.div_ceil(size) as usize).saturating_sub(held);
        // As much of it as there is room for.
        self.memory.make_room(missing);
        let pages = (held + self.memory.available()).min(plan.pages as usize);
        let mut end = wanted.min((pages as u32).saturating_mul(size));
        if end < sequence.len() && end - end % size > start {
            end -= end % size;
        }
        let left = plan.image_bytes_left;
        let (end, bytes) = self.sequences[slot].row_end(start, end, left, plan.image_bytes);
        let tokens = end.saturating_sub(start);
        let placed = tokens > 0 && end <= most && self.place(plan, slot, tokens, 0);
        if placed {
            plan.image_bytes += bytes;
            plan.image_bytes_left = left.saturating_sub(bytes);
            // An image may have more than its share.
            plan.prompt = plan.prompt.saturating_sub(tokens);
            plan.flight.load.prompt_tokens += tokens;
        }
        placed
    }

    /// Lays out a row of so many tokens, if it fits and there are pages for it.
    fn place(&mut self, plan: &mut Plan, slot: usize, tokens: u32, drafts: u32) -> bool {
        let Some(sequence) = self.sequences.get(slot) else {
            return false;
        };
        let (start, end) = (sequence.scheduled, sequence.scheduled + tokens);
        let pages = (end + drafts).div_ceil(self.limits.page_size);
        let (words, prompt_logprobs) = sequence.logprob_words(start, end, drafts);
        let is_short = plan.is_ample && plan.more_bytes == 0;
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
            || !self.memory.extend(&mut sequence.held, pages as usize)
        {
            return false;
        }
        plan.rows -= 1;
        plan.tokens -= tokens + drafts;
        plan.pages -= pages;
        plan.words -= words;
        plan.drafts += drafts;
        if let Some(cost) = cost {
            sequence.register(self.registrations);
            plan.more_bytes += cost.bytes;
            if cost.forbids {
                // It may go as a mask, too.
                plan.masked = None;
            } else if cost.masked {
                plan.masked = Some(slot);
            }
        }
        let row = Planned {
            slot,
            order: sequence.order,
            epoch: sequence.epoch,
            start,
            end,
            drafts,
            pages,
            awaits: (sequence.pending > 0).then_some(sequence.last_row),
            draws: sequence.draws(end),
            wants_drafts: sequence.wants_drafts(end),
            prompt_logprobs,
        };
        sequence.scheduled = end;
        sequence.step = self.plans;
        plan.flight.binding |= row.draws && !sequence.constraint_state.is_free();
        plan.flight.drafting |= drafts > 0 || row.draws && row.wants_drafts;
        if row.draws {
            sequence.expect_token(plan.flight.rows.len() as u32);
            plan.flight.rows.push(row);
        } else {
            plan.rest.push(row);
        }
        true
    }

    /// What a row with log-probabilities, masks or lists takes of the frame.
    #[cold]
    fn row_cost(&self, plan: &Plan, slot: usize, (start, end): (u32, u32)) -> RowCost {
        let sequence = &self.sequences[slot];
        let more = sequence.row_extras(start, end, self.registrations);
        let mask = if sequence.draws(end) {
            self.mask_bytes(plan, slot)
        } else {
            0
        };
        RowCost {
            bytes: self.limits.frame.of_extras(more) + mask,
            forbids: more.forbidden > 0,
            masked: mask > 0,
        }
    }

    /// Bytes of a row's mask: none where it is that of the row before. While half of the frame is free, it counts without a look
    /// at that.
    fn mask_bytes(&self, plan: &Plan, slot: usize) -> u64 {
        let sequence = &self.sequences[slot];
        let Some(mask) = sequence.constraint_state.mask() else {
            return 0;
        };
        let own = u64::from(self.limits.frame.mask);
        if plan.bytes_left(&self.limits) > u64::from(self.limits.frame.max / 2) {
            return own;
        }
        let words = self.limits.vocab_size.div_ceil(32) as usize;
        let is_shared = plan.masked.is_some_and(|last| {
            let last = &self.sequences[last];
            let forbids = |of: &Sequence<S>| of.forbids(of.known()) && !of.stop_tokens().is_empty();
            last.constraint_state.mask() == Some(mask)
                && is_shorter_as_bits(mask, words)
                && !forbids(last)
                && !forbids(sequence)
        });
        if is_shared { 0 } else { own }
    }

    /// The rows of the last step.
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = Row<'_, S>> + Clone {
        let planned = self.flights.back().map_or(&[][..], |flight| &flight.rows);
        planned.iter().map(|row| self.row(row))
    }

    fn row(&self, row: &Planned) -> Row<'_, S> {
        let sequence = &self.sequences[row.slot];
        let arrival = &sequence.shared.arrival;
        Row {
            id: arrival.id,
            sample: sequence.sample,
            context: sequence.context,
            tokens: &sequence.tokens[row.start as usize..row.end as usize],
            awaits: row.awaits,
            start: row.start,
            pages: &sequence.held.pages[..row.pages as usize],
            drafts: &sequence.drafts[..row.drafts as usize],
            wants_drafts: row.draws && row.wants_drafts,
            sampling: row.draws.then_some(&arrival.sampling),
            adapter: arrival.adapter,
            asked: &arrival.sampling,
            prompt: sequence.prompt_len,
            history: sequence.skipped(row.start),
            prompt_logprobs: row.prompt_logprobs,
            next: sequence.tokens.get(row.end as usize).copied(),
            forbidden: if row.draws && sequence.forbids(row.end) {
                &arrival.ends.stop_tokens
            } else {
                &[]
            },
            mask: row
                .draws
                .then(|| sequence.constraint_state.mask())
                .flatten(),
        }
    }
}

impl<S> Sequence<S> {
    /// Pages for its next token and so many drafts.
    fn pages(&self, drafts: u32, page_size: usize) -> usize {
        (self.scheduled as usize + 1 + drafts as usize).div_ceil(page_size)
    }

    /// Drafts that its next row may verify: with one token more they are all that it may produce.
    fn usable_drafts(&self) -> u32 {
        let most = self.remaining().saturating_sub(1);
        (self.drafts.len() as u32).min(most)
    }
}
