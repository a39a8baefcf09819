//! Steps for captured graphs: passes of few rows, each staged like a decode of its own.
//!
//! A row stores its KV before any row attends, and sees the KV up to itself. So a row of a prompt, and a row that verifies
//! a draft, is a decode with its own KV length over its request's block-table row. One graph per number of rows serves
//! decodes, drafts and short prompts in any mix.

use pie_wire::PlaceShape;

use crate::block::layout::Layout;
use crate::block::{STEP_UPDATES, StepBlock, StepPlace, StepSize};
use crate::frame::request::Request;
use crate::mask::Visibility;
use crate::plan::Plan;
use crate::sampler::SlotClass;
use crate::sampler::extra::{EMPTY, STEP_EXTRA_WORDS};
use crate::slot::Slot;
use crate::stages::error::StageError;
use crate::table::BlockTable;
use crate::table::storage::Storage;

/// Words of log-probabilities that a step writes at most.
pub const STEP_PLACE_WORDS: usize = 1 << 15;
/// Most probable tokens that a graph finds for a slot.
pub const STEP_TOP: u32 = 32;
/// Of a slot without one.
const NO_PLACE: StepPlace = [0; 6];

/// Temperature of a row that is not sampled.
const UNSAMPLED: f32 = -1.0;

/// Where a step is written.
#[derive(Debug)]
pub struct StepMemory<'a> {
    /// The block, laid out as [`Layout::graph`].
    pub block: &'a mut [u8],
    /// `[words]` int32: what `table_updates` has no room for, as pairs, then logit masks as in the staging block. Room for
    /// [`Limits::extra_update_words`](crate::Limits::extra_update_words), for one mask of
    /// [`Limits::mask_words`](crate::Limits::mask_words) in each slot, and with extended graphs for
    /// [`STEP_EXTRA_WORDS`](crate::STEP_EXTRA_WORDS): tokens to note and biases.
    pub mask_words: &'a mut [i32],
}

/// What a step wrote outside of its block, and what it will answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrittenStep {
    /// Words of its further block-table changes and its logit masks.
    pub(crate) mask_words: usize,
    /// The slots with results to wait for, from the first on; at least one.
    pub(crate) results: usize,
    /// Whether the graph counts slots, and not their rows.
    pub(crate) numbered: bool,
    /// Words of log-probabilities that it will write.
    pub(crate) place_words: usize,
}

impl Plan {
    /// Size of the plan if a graph with enough room can run it; `None` otherwise. That is one causal pass without adapters
    /// and images, with at most `max_rows` rows of each request. Its outputs are tokens, at most one for each row.
    #[must_use]
    pub fn graph_size(&self, max_rows: usize) -> Option<StepSize> {
        if self.pass_count() != 1 {
            return None;
        }
        let short = |request: &Request| {
            request.visibility() == Visibility::Causal && request.rows().len() <= max_rows
        };
        let unbound = |request: &Request| request.adapter().is_none();
        let max_updates = STEP_UPDATES + self.limits().extra_update_words() / 2;
        let fits = self.changes().updates().len() <= max_updates && !self.has_images();
        let fits = fits
            && self
                .requests()
                .iter()
                .all(|request| short(request) && unbound(request));
        let fits = fits && self.extra_words() <= STEP_EXTRA_WORDS && self.places_fit();
        let tokens = || self.asked_slots().all(|slot| slot.class().is_token());
        // The rows of consecutive slots rise, except in requests with several samplers in another order.
        let one_each = || {
            self.asked_slots()
                .is_sorted_by(|slot, next| slot.row() < next.row())
        };
        (fits && tokens() && one_each()).then(|| StepSize {
            rows: self.token_count(),
            slots: self.asked_slots().count(),
        })
    }

    /// Words that the extension takes outside of the block.
    fn extra_words(&self) -> usize {
        let extras = self.slots().extras();
        if !self.is_extended() {
            return 0;
        }
        extras.words(self.asked_slots().map(Slot::extra)) + extras.given_words()
    }

    /// Whether a graph can find the log-probabilities that are asked for, and has room for them.
    fn places_fit(&self) -> bool {
        if self.slots().place_bytes() == 0 {
            return true;
        }
        let shapes = || {
            self.asked_slots()
                .filter_map(|slot| self.slots().shape(slot))
        };
        let words: usize = shapes().map(PlaceShape::words).sum();
        words <= STEP_PLACE_WORDS && shapes().all(|shape| shape.top <= STEP_TOP)
    }

    /// The slots of all requests, without those of requests that were emptied.
    fn asked_slots(&self) -> impl Iterator<Item = &Slot> {
        let requests = self.requests().iter();
        requests.flat_map(|request| self.slots().of(request.slots()))
    }
}

/// Writes the plan's one pass as step number `step` for a graph.
pub(crate) fn write_step(
    plan: &Plan,
    (table, storage): (&BlockTable, &mut Storage),
    layout: &Layout,
    memory: StepMemory<'_>,
    step: u32,
) -> Result<WrittenStep, StageError> {
    let StepMemory { block, mask_words } = memory;
    let mut block = StepBlock::of(layout, block)?;
    let (rows, requests) = (plan.token_count(), plan.requests());
    let first_mask = write_changes(plan.changes().updates(), &mut block, mask_words)?;
    block.header.fill(0);
    block.header[..3].copy_from_slice(&[
        step.cast_signed(),
        plan.changes().updates().len() as i32,
        rows as i32,
    ]);
    let values = plan.rows().token_ids().iter().zip(plan.rows().positions());
    for (row, (&token, &position)) in values.enumerate() {
        block.input_ids[row] = i64::from(token);
        block.positions[row] = i64::from(position);
    }
    let segments = plan.passes().segments();
    for segment in segments {
        let request = &requests[segment.request()];
        let kv_start = segment.kv_start(request) as i64;
        let own = segment.rows();
        // Row 0 of the engine's table belongs to padding.
        block.req_pool_indices[own.clone()].fill(request.place().row() as i64 + 1);
        for (seen, length) in block.seq_lens[own].iter_mut().zip(kv_start + 1..) {
            *seen = length;
        }
    }
    storage.write(
        plan.limits(),
        table,
        segments,
        requests,
        block.out_cache_loc,
    );
    block.pad(rows);
    write_prefixes(plan, &mut block);
    let mut written = write_slots(plan, &mut block, mask_words, first_mask)?;
    if !block.records.is_empty() {
        write_extension(plan, &mut block, mask_words, &mut written)?;
    }
    Ok(written)
}

/// Writes what the frame's extension asks for, after the words in use.
fn write_extension(
    plan: &Plan,
    block: &mut StepBlock<'_>,
    words: &mut [i32],
    written: &mut WrittenStep,
) -> Result<(), StageError> {
    let extras = plan.slots().extras();
    let found = 4 * words.len();
    let short = |needed: usize| StageError::BlockSize {
        found,
        needed: 4 * needed,
    };
    let first = written.mask_words;
    let history = extras.history();
    let mut used = first + 2 * history.len();
    let pairs = words.get_mut(first..used).ok_or_else(|| short(used))?;
    let values = history.as_flattened();
    for (word, &value) in pairs.iter_mut().zip(values) {
        *word = value as i32;
    }
    block.header[5..7].copy_from_slice(&[first as i32, history.len() as i32]);
    block.records.fill(EMPTY);
    block.places.fill(NO_PLACE);
    used = write_places(plan, block, words, (used, written))?;
    for slot in plan.asked_slots() {
        let place = (&mut *words, used);
        let put = extras.put(slot.extra(), slot.row(), place);
        let (record, end) =
            put.ok_or_else(|| short(used + extras.words([slot.extra()].into_iter())))?;
        (block.records[slot.row()], used) = (record, end);
    }
    block.header[3] = used as i32;
    written.mask_words = used;
    Ok(())
}

/// Writes what the slots of places want, and the tokens that are given for them after the `used` words, those of a request
/// once. Returns how many words are used then.
fn write_places(
    plan: &Plan,
    block: &mut StepBlock<'_>,
    words: &mut [i32],
    (mut used, written): (usize, &mut WrittenStep),
) -> Result<usize, StageError> {
    let slots = plan.slots();
    let found = 4 * words.len();
    let (mut last, mut first_given) = (None, used);
    for slot in plan.asked_slots().filter(|slot| slot.is_place()) {
        let Some(asked) = slots.extras().asked(slot.extra()) else {
            continue;
        };
        if last != Some(slot.extra()) {
            let given = &asked.given[..];
            (last, first_given) = (Some(slot.extra()), used);
            used += given.len();
            let needed = 4 * used;
            let out = words.get_mut(first_given..used);
            out.ok_or(StageError::BlockSize { found, needed })?
                .copy_from_slice(given);
        }
        let divisor = match slot.class() {
            SlotClass::Plain | SlotClass::Filtered if asked.scaled => slot.temperature(),
            _ => 1.0,
        };
        block.places[slot.row()] = [
            1,
            written.place_words as i32,
            asked.shape.top as i32,
            asked.shape.given as i32,
            first_given as i32,
            divisor.to_bits().cast_signed(),
        ];
        written.place_words += asked.shape.words();
    }
    Ok(used)
}

/// Writes the block-table changes, those for which the block has no room as words; returns how many words these are.
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
        // Entries and storage slots of the device's table, which is int32.
        *word = value as i32;
    }
    Ok(further.len())
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
            for row in segment.rows() {
                block.prefix_lens[row] = shared as i32;
                block.prefix_places[row] = used as i32;
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
    let mut place = [0; 2];
    let mut count = 0;
    let width = plan.limits().mask_words();
    for slot in plan.asked_slots() {
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
            place = [used as i32, edges];
            (used, last) = (used + words, Some(mask));
        }
        block.slot_masks[at] = place;
    }
    block.header[3] = used as i32;
    let results = if numbered {
        // A step without sampled rows needs a result, too, by which its end is seen.
        count.max(1)
    } else {
        plan.token_count()
    };
    Ok(WrittenStep {
        mask_words: used,
        results,
        numbered,
        place_words: 0,
    })
}
