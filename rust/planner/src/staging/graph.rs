//! Steps for captured CUDA graphs: small passes in which every query token is staged as a decode.
//!
//! All tokens of a step store their KV before any of them attends, and each attends to the KV up to itself. So a prompt token,
//! or a draft to verify, is a decode with its own KV length over its request's block-table row. One graph per captured batch
//! size runs decodes, draft verification and short prompts in any mix.

use pie_wire::LogprobShape;

use crate::adapter::{Adapters, NO_SLOT};
use crate::block::layout::Layout;
use crate::block::{STEP_UPDATES, StepBlock, StepLogprobs, StepSize};
use crate::frame::request::PlannedRequest;
use crate::mask::MaskMode;
use crate::plan::Plan;
use crate::sampler::SlotClass;
use crate::sampler::logits_processors::{EMPTY_RECORD, STEP_EXTRA_WORDS};
use crate::slot::SamplingSlot;
use crate::staging::error::StageError;
use crate::table::BlockTable;
use crate::table::slot_mapping::SlotMapping;

/// Maximum words of log-probabilities that a step writes.
pub const STEP_LOGPROB_WORDS: usize = 1 << 15;
/// Maximum top-k log-probabilities that a graph computes for a slot.
pub const STEP_TOP: u32 = 32;
/// Entry of a slot without log-probabilities.
const NO_LOGPROBS: StepLogprobs = [0; 6];

/// Temperature of a token that is not sampled.
const UNSAMPLED: f32 = -1.0;

/// Where a step is written.
#[derive(Debug)]
pub struct StepMemory<'a> {
    /// The block, laid out as [`Layout::graph`].
    pub block: &'a mut [u8],
    /// `[words]` int32: block-table updates beyond `table_updates`, as pairs, then logit masks as in the staging block. At least
    /// [`Limits::extra_update_words`](crate::Limits::extra_update_words), one mask of
    /// [`Limits::mask_words`](crate::Limits::mask_words) per slot, and with extended graphs
    /// [`STEP_EXTRA_WORDS`](crate::STEP_EXTRA_WORDS) for token history and biases.
    pub mask_words: &'a mut [i32],
}

/// What a step uses outside of its block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrittenStep {
    /// Words in use of [`StepMemory::mask_words`].
    pub(crate) mask_words: usize,
    /// How many of the first slots have a result; at least one.
    pub(crate) results: usize,
    /// Whether results are indexed by sampling slot, not by query token.
    pub(crate) numbered: bool,
    /// Words of log-probabilities that it writes.
    pub(crate) logprob_words: usize,
}

impl Plan {
    /// Size of the step, if a large enough captured graph can run the plan: one causal pass without images, at most `max_rows`
    /// tokens per request, outputs that are tokens, at most one for each query token. A plan that
    /// [binds adapters](Self::binds_adapters) needs a graph that [applies](crate::Planner::graphs_apply_adapters) them.
    #[must_use]
    pub fn graph_size(&self, max_rows: usize) -> Option<StepSize> {
        if self.pass_count() != 1 {
            return None;
        }
        let short = |request: &PlannedRequest| {
            request.mask_mode() == MaskMode::Causal && request.tokens().len() <= max_rows
        };
        let max_updates = STEP_UPDATES + self.limits().extra_update_words() / 2;
        let fits = self.table_updates().updates().len() <= max_updates && !self.has_images();
        let fits = fits && self.requests().iter().all(short);
        let fits = fits && !self.has_custom_processors();
        let fits = fits && self.processor_words() <= STEP_EXTRA_WORDS && self.logprobs_fit();
        let tokens = || self.active_slots().all(|slot| slot.class().is_token());
        // The rows of consecutive slots rise, except in requests with several samplers in another order.
        let one_each = || {
            self.active_slots()
                .is_sorted_by(|slot, next| slot.row() < next.row())
        };
        (fits && tokens() && one_each()).then(|| StepSize {
            rows: self.token_count(),
            slots: self.active_slots().count(),
        })
    }

    /// Words that logits processors use outside of the block.
    fn processor_words(&self) -> usize {
        let processors = self.slots().processors();
        if !self.is_extended() {
            return 0;
        }
        processors.words(self.active_slots().map(SamplingSlot::processor))
            + processors.given_words()
    }

    /// Whether a graph can compute the requested log-probabilities.
    fn logprobs_fit(&self) -> bool {
        if self.slots().logprob_bytes() == 0 {
            return true;
        }
        let shapes = || {
            self.active_slots()
                .filter_map(|slot| self.slots().shape(slot))
        };
        let words: usize = shapes().map(LogprobShape::words).sum();
        words <= STEP_LOGPROB_WORDS
            && shapes().all(|shape| shape.top <= STEP_TOP && shape.hidden == 0)
    }

    /// The sampling slots, without those of rejected requests.
    fn active_slots(&self) -> impl Iterator<Item = &SamplingSlot> {
        let requests = self.requests().iter();
        requests.flat_map(|request| self.slots().of(request.slots()))
    }
}

/// Writes the plan's only pass as step number `step` of a captured graph.
pub(crate) fn write_step(
    plan: &Plan,
    (table, slot_mapping, adapters): (&BlockTable, &mut SlotMapping, &Adapters),
    layout: &Layout,
    memory: StepMemory<'_>,
    step: u32,
) -> Result<WrittenStep, StageError> {
    let StepMemory { block, mask_words } = memory;
    let mut block = StepBlock::of(layout, block)?;
    let (rows, requests) = (plan.token_count(), plan.requests());
    let first_mask = write_changes(plan.table_updates().updates(), &mut block, mask_words)?;
    block.header.fill(0);
    block.header[..3].copy_from_slice(&[
        step.cast_signed(),
        plan.table_updates().updates().len() as i32,
        rows as i32,
    ]);
    let values = plan
        .query_tokens()
        .token_ids()
        .iter()
        .zip(plan.query_tokens().positions());
    for (row, (&token, &position)) in values.enumerate() {
        block.input_ids[row] = i64::from(token);
        block.positions[row] = i64::from(position);
    }
    let segments = plan.passes().segments();
    for segment in segments {
        let request = &requests[segment.request()];
        let kv_start = segment.kv_start(request) as i64;
        let own = segment.tokens();
        // Row 0 of the engine's table is for padding.
        block.req_pool_indices[own.clone()].fill(request.table_row().index() as i64 + 1);
        for (seen, length) in block.seq_lens[own].iter_mut().zip(kv_start + 1..) {
            *seen = length;
        }
    }
    slot_mapping.write(
        plan.limits(),
        table,
        segments,
        requests,
        block.out_cache_loc,
    );
    block.pad(rows);
    write_adapters(plan, adapters, &mut block);
    write_prefixes(plan, &mut block);
    let mut written = write_slots(plan, &mut block, mask_words, first_mask)?;
    if !block.records.is_empty() {
        write_extension(plan, &mut block, mask_words, &mut written)?;
    }
    Ok(written)
}

/// Writes token history, log-probability requests, penalties and biases after the words in use.
fn write_extension(
    plan: &Plan,
    block: &mut StepBlock<'_>,
    words: &mut [i32],
    written: &mut WrittenStep,
) -> Result<(), StageError> {
    let processors = plan.slots().processors();
    let found = 4 * words.len();
    let short = |needed: usize| StageError::BlockSize {
        found,
        needed: 4 * needed,
    };
    let first = written.mask_words;
    let history = processors.history();
    let mut used = first + 2 * history.len();
    let pairs = words.get_mut(first..used).ok_or_else(|| short(used))?;
    let values = history.as_flattened();
    for (word, &value) in pairs.iter_mut().zip(values) {
        *word = value as i32;
    }
    block.header[5..7].copy_from_slice(&[first as i32, history.len() as i32]);
    block.records.fill(EMPTY_RECORD);
    block.logprobs.fill(NO_LOGPROBS);
    used = write_logprobs(plan, block, words, (used, written))?;
    for slot in plan.active_slots() {
        let dest = (&mut *words, used);
        let put = processors.put(slot.processor(), slot.row(), dest);
        let (record, end) =
            put.ok_or_else(|| short(used + processors.words([slot.processor()].into_iter())))?;
        (block.records[slot.row()], used) = (record, end);
    }
    block.header[3] = used as i32;
    written.mask_words = used;
    Ok(())
}

/// Writes the log-probability request of each slot, and the requested token ids after the `used` words, once per request.
/// Returns the words then in use.
fn write_logprobs(
    plan: &Plan,
    block: &mut StepBlock<'_>,
    words: &mut [i32],
    (mut used, written): (usize, &mut WrittenStep),
) -> Result<usize, StageError> {
    let slots = plan.slots();
    let found = 4 * words.len();
    let (mut last, mut first_given) = (None, used);
    for slot in plan.active_slots().filter(|slot| slot.returns_logprobs()) {
        let Some(logprobs) = slots.processors().logprobs(slot.processor()) else {
            continue;
        };
        if last != Some(slot.processor()) {
            let given = &logprobs.given[..];
            (last, first_given) = (Some(slot.processor()), used);
            used += given.len();
            let needed = 4 * used;
            let out = words.get_mut(first_given..used);
            out.ok_or(StageError::BlockSize { found, needed })?
                .copy_from_slice(given);
        }
        let divisor = match slot.class() {
            SlotClass::Plain | SlotClass::Filtered if logprobs.scaled => slot.temperature(),
            _ => 1.0,
        };
        block.logprobs[slot.row()] = [
            1,
            written.logprob_words as i32,
            logprobs.shape.top as i32,
            logprobs.shape.given as i32,
            first_given as i32,
            divisor.to_bits().cast_signed(),
        ];
        written.logprob_words += logprobs.shape.words();
    }
    Ok(used)
}

/// Writes the block-table updates; those beyond the block go to `words`. Returns how many words these are.
fn write_changes(
    updates: &[[i64; 2]],
    block: &mut StepBlock<'_>,
    words: &mut [i32],
) -> Result<usize, StageError> {
    let (updates, further) = updates.split_at(updates.len().min(STEP_UPDATES));
    block.table_updates[..updates.len()].copy_from_slice(updates);
    let further = further.as_flattened();
    let (found, needed) = (4 * words.len(), 4 * further.len());
    let out = words.get_mut(..further.len());
    let out = out.ok_or(StageError::BlockSize { found, needed })?;
    for (word, &value) in out.iter_mut().zip(further) {
        // Entries and KV slots of the device's table, which is int32.
        *word = value as i32;
    }
    Ok(further.len())
}

/// Writes the device slot of the adapter of each row, for a graph that applies adapters.
fn write_adapters(plan: &Plan, adapters: &Adapters, block: &mut StepBlock<'_>) {
    let is_bound = !block.adapter_slots.is_empty();
    assert!(
        is_bound || !plan.binds_adapters(),
        "a graph without adapters runs none"
    );
    if !is_bound {
        return;
    }
    block.adapter_slots.fill(NO_SLOT);
    for segment in plan.passes().segments() {
        let binding = plan.requests()[segment.request()].adapter();
        let slot = adapters.device_slot(binding).unwrap_or(NO_SLOT);
        block.adapter_slots[segment.tokens()].fill(slot);
    }
}

fn write_prefixes(plan: &Plan, block: &mut StepBlock<'_>) {
    if block.prefix_lens.is_empty() {
        return;
    }
    block.prefix_lens.fill(0);
    let segments = plan.passes().segments();
    let mut used = 0;
    for (members, shared) in plan.prefixes().groups() {
        let start = used;
        for segment in members.map(|index| segments[index]) {
            for row in segment.tokens() {
                block.prefix_lens[row] = shared as i32;
                block.prefix_indices[row] = used as i32;
                block.prefix_order[used] = row as i32;
                block.prefix_starts[used] = start as i32;
                used += 1;
            }
        }
    }
    block.header[4] = used as i32;
}

fn write_slots(
    plan: &Plan,
    block: &mut StepBlock<'_>,
    mask_words: &mut [i32],
    first_mask: usize,
) -> Result<WrittenStep, StageError> {
    block.temperatures.fill(UNSAMPLED);
    block.slot_masks.fill([0; 2]);
    block.slot_rows.fill(0);
    let numbered = !block.slot_rows.is_empty();
    let (mut used, mut last) = (first_mask, None);
    let mut entry = [0; 2];
    let mut count = 0;
    let width = plan.limits().mask_words();
    for slot in plan.active_slots() {
        let at = if numbered { count } else { slot.row() };
        if let Some(row) = block.slot_rows.get_mut(at) {
            *row = slot.row() as i64;
        }
        count += 1;
        block.temperatures[at] = match slot.class() {
            SlotClass::Greedy => 0.0,
            _ => slot.temperature(),
        };
        block.top_ps[at] = slot.top_p();
        block.min_ps[at] = slot.min_p();
        block.uniforms[at] = slot.uniform();
        block.top_ks[at] = slot.top_k() as i32;
        let Some(mask) = slot.mask() else { continue };
        if last != Some(mask) {
            let (found, needed) = (4 * mask_words.len(), 4 * (used + width));
            let out = mask_words.get_mut(used..used + width);
            let out = out.ok_or(StageError::BlockSize { found, needed })?;
            let (words, edges) = plan.slots().masks().put(mask, out);
            entry = [used as i32, edges];
            (used, last) = (used + words, Some(mask));
        }
        block.slot_masks[at] = entry;
    }
    block.header[3] = used as i32;
    let results = if numbered {
        // A step that samples nothing still needs one result, which marks its end.
        count.max(1)
    } else {
        plan.token_count()
    };
    Ok(WrittenStep {
        mask_words: used,
        results,
        numbered,
        logprob_words: 0,
    })
}
