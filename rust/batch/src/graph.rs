//! Steps for captured graphs: passes of few rows, each staged like a decode of its own.
//!
//! A row stores its KV before any row attends, and sees the KV up to itself. So a row of a prompt, and a row that verifies
//! a draft, is a decode with its own KV length over its request's block-table row: one graph per number of rows serves
//! decodes, drafts and short prompts in any mix.

use crate::SlotClass;
use crate::layout::{DType, Layout};
use crate::mask::Sight;
use crate::plan::{Planner, Request};
use crate::prefix::{ROW_COST, Sequence};
use crate::slot::{INVALID_TOKEN, Slot};
use crate::stage::{Rest, StageError};

/// Changed block-table entries that a step's block carries. Those of one more context go beside it.
const STEP_UPDATES: usize = 512;

/// Temperature of a row that nobody samples.
const UNSAMPLED: f32 = -1.0;

/// What a step needs, and what a graph has room for. A graph of as many slots as rows samples each row in the slot of the
/// same number; one of fewer slots, which is for prompts, is told the row of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens.
    pub rows: usize,
    /// Sampled rows.
    pub slots: usize,
}

impl StepSize {
    /// Whether a graph of this size can run the step.
    #[must_use]
    pub const fn runs(self, step: Self) -> bool {
        step.rows <= self.rows && (self.slots == self.rows || step.slots <= self.slots)
    }
}

impl From<usize> for StepSize {
    /// As many slots as rows.
    fn from(rows: usize) -> Self {
        Self { rows, slots: rows }
    }
}

/// What a staged step wrote beside its block, and what it will answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagedStep {
    /// Words of its further block-table changes and its logit masks.
    pub mask_words: usize,
    /// The slots with results to wait for, from the first on; at least one.
    pub results: usize,
}

impl Layout {
    /// The arrays of a graph.
    ///
    /// | name | dtype | size | |
    /// |---|---|---|---|
    /// | `header` | int32 | 8 | number of the step; changed block-table entries, rows, words beside the block and entries of `prefix_order` in use; 0 |
    /// | `input_ids`, `positions` | int64 | rows | as in the staging block |
    /// | `out_cache_loc` | int64 | rows | storage slot, 0 = the padding page |
    /// | `req_pool_indices` | int64 | rows | block-table row, 0 = padding |
    /// | `seq_lens` | int64 | rows | KV that the row sees, itself included |
    /// | `temperatures` | float32 | slots | 0 = arg-max, below 0 = nobody samples |
    /// | `top_ps`, `min_ps`, `uniforms` | float32 | slots | as in the staging block |
    /// | `top_ks` | int32 | slots | as in the staging block |
    /// | `slot_masks` | int32 | two per slot | as in the staging block |
    /// | `slot_rows` | int64 | slots, or 0 if there are as many rows | row of each slot |
    /// | `prefix_lens` | int32 | rows, or 0 if the graph knows no groups | first tokens of the KV that the row shares with its group, a multiple of 128; 0 = in no group |
    /// | `prefix_places` | int32 | as many | of a row that is in a group: its entry of `prefix_order` |
    /// | `prefix_order` | int32 | as many | the rows of all groups, one group behind the other |
    /// | `prefix_starts` | int32 | as many | for each entry of `prefix_order`: the first entry of its group |
    /// | `table_updates` | int64 | two for each of 512 | as in the staging block; further ones are the first of [`StepMemory::mask_words`] |
    #[must_use]
    pub fn graph(size: impl Into<StepSize>) -> Self {
        Self::graph_of(size.into(), 0)
    }

    /// The arrays of a graph that knows [groups](Planner::find_groups), with as many slots as rows.
    #[must_use]
    pub fn grouped_graph(rows: usize) -> Self {
        Self::graph_of(rows.into(), rows)
    }

    fn graph_of(StepSize { rows, slots }: StepSize, grouped: usize) -> Self {
        let told = if slots < rows { slots } else { 0 };
        Self::of(&[
            ("header", DType::I32, 8),
            ("input_ids", DType::I64, rows),
            ("positions", DType::I64, rows),
            ("out_cache_loc", DType::I64, rows),
            ("req_pool_indices", DType::I64, rows),
            ("seq_lens", DType::I64, rows),
            ("temperatures", DType::F32, slots),
            ("top_ps", DType::F32, slots),
            ("min_ps", DType::F32, slots),
            ("uniforms", DType::F32, slots),
            ("top_ks", DType::I32, slots),
            ("slot_masks", DType::I32, 2 * slots),
            ("slot_rows", DType::I64, told),
            ("prefix_lens", DType::I32, grouped),
            ("prefix_places", DType::I32, grouped),
            ("prefix_order", DType::I32, grouped),
            ("prefix_starts", DType::I32, grouped),
            ("table_updates", DType::I64, 2 * STEP_UPDATES),
        ])
    }
}

/// The arrays of [`Layout::graph`] in a block.
struct Step<'a> {
    header: &'a mut [i32],
    input_ids: &'a mut [i64],
    positions: &'a mut [i64],
    out_cache_loc: &'a mut [i64],
    req_pool_indices: &'a mut [i64],
    seq_lens: &'a mut [i64],
    temperatures: &'a mut [f32],
    top_ps: &'a mut [f32],
    min_ps: &'a mut [f32],
    uniforms: &'a mut [f32],
    top_ks: &'a mut [i32],
    slot_masks: &'a mut [i32],
    slot_rows: &'a mut [i64],
    prefix_lens: &'a mut [i32],
    prefix_places: &'a mut [i32],
    prefix_order: &'a mut [i32],
    prefix_starts: &'a mut [i32],
    table_updates: &'a mut [i64],
}

impl<'a> Step<'a> {
    fn of(layout: &Layout, block: &'a mut [u8]) -> Result<Self, StageError> {
        let mut rest = Rest::of(layout, block)?;
        // In the order of the layout.
        Ok(Self {
            header: rest.take(),
            input_ids: rest.take(),
            positions: rest.take(),
            out_cache_loc: rest.take(),
            req_pool_indices: rest.take(),
            seq_lens: rest.take(),
            temperatures: rest.take(),
            top_ps: rest.take(),
            min_ps: rest.take(),
            uniforms: rest.take(),
            top_ks: rest.take(),
            slot_masks: rest.take(),
            slot_rows: rest.take(),
            prefix_lens: rest.take(),
            prefix_places: rest.take(),
            prefix_order: rest.take(),
            prefix_starts: rest.take(),
            table_updates: rest.take(),
        })
    }

    /// Makes the rows from `first` on such that they touch the padding page alone and nobody samples them.
    fn pad(&mut self, first: usize) {
        self.input_ids[first..].fill(0);
        self.positions[first..].fill(0);
        self.out_cache_loc[first..].fill(0);
        self.req_pool_indices[first..].fill(0);
        self.seq_lens[first..].fill(1);
    }
}

/// Where a step's masks go, and its number.
#[derive(Debug)]
pub struct StepMemory<'a> {
    /// The block, laid out as [`Layout::graph`].
    pub block: &'a mut [u8],
    /// `[words]` int32: what `table_updates` has no room for, as pairs, then logit masks as in the staging block. Room for
    /// [`Limits::extra_update_words`](crate::Limits::extra_update_words), and for one mask of
    /// [`Limits::mask_words`](crate::Limits::mask_words) in each slot.
    pub mask_words: &'a mut [i32],
}

/// Writes what the block has no room for, as words; returns how many there are.
fn put_words(updates: &[i64], words: &mut [i32]) -> Result<usize, StageError> {
    let (found, needed) = (4 * words.len(), 4 * updates.len());
    let out = words.get_mut(..updates.len());
    let out = out.ok_or(StageError::BlockSize { found, needed })?;
    for (word, &value) in out.iter_mut().zip(updates) {
        // Entries and storage slots of the device's table, which is int32.
        *word = value as i32;
    }
    Ok(updates.len())
}

impl Planner {
    /// Size of the current plan if a graph with enough room can run it: one causal pass without adapters and images, with at
    /// most `most` rows of each request, whose outputs are tokens, at most one for each row. `None` otherwise.
    #[must_use]
    pub fn graph_size(&self, most: usize) -> Option<StepSize> {
        let [_] = &self.passes[..] else { return None };
        let short =
            |request: &Request| request.sight == Sight::Causal && request.rows.len() <= most;
        let unbound = |request: &Request| request.adapter.is_none();
        let most = STEP_UPDATES + self.limits.extra_update_words() / 2;
        let fits = self.updates.len() <= most && !self.has_images();
        let fits = fits
            && self
                .requests
                .iter()
                .all(|request| short(request) && unbound(request));
        let tokens = || self.asked_slots().all(|slot| slot.class.is_token());
        // The rows of consecutive slots rise, but for requests with several samplers in another order.
        let one_each = || {
            self.asked_slots()
                .is_sorted_by(|slot, next| slot.row() < next.row())
        };
        (fits && tokens() && one_each()).then(|| StepSize {
            rows: self.token_ids.len(),
            slots: self.asked_slots().count(),
        })
    }

    /// Writes the plan's one pass as step number `step` for a graph that [runs](StepSize::runs) steps of
    /// [`Planner::graph_size`].
    ///
    /// # Errors
    /// [`StageError`] when the memory does not fit the layout.
    ///
    /// # Panics
    /// If [`Planner::graph_size`] is `None`, or the layout has no room for it.
    pub fn stage_graph(
        &mut self,
        layout: &Layout,
        memory: StepMemory<'_>,
        step: u32,
    ) -> Result<StagedStep, StageError> {
        self.runs_as_graph();
        let StepMemory { block, mask_words } = memory;
        let mut arrays = Step::of(layout, block)?;
        let rows = self.token_ids.len();
        let (updates, further) = self.updates.split_at(self.updates.len().min(STEP_UPDATES));
        let updates = updates.as_flattened();
        let first_mask = put_words(further.as_flattened(), mask_words)?;
        arrays.header.fill(0);
        arrays.header[..3].copy_from_slice(&[
            step.cast_signed(),
            self.updates.len() as i32,
            rows as i32,
        ]);
        arrays.table_updates[..updates.len()].copy_from_slice(updates);
        for (row, (&token, &position)) in self.token_ids.iter().zip(&self.positions).enumerate() {
            arrays.input_ids[row] = i64::from(token);
            arrays.positions[row] = i64::from(position);
        }
        for segment in &self.segments {
            let request = &self.requests[segment.request()];
            let kv_start = segment.kv_start(request) as i64;
            let own = segment.rows();
            // Row 0 of the engine's table belongs to padding.
            arrays.req_pool_indices[own.clone()].fill(i64::from(request.table_row) + 1);
            for (seen, length) in arrays.seq_lens[own].iter_mut().zip(kv_start + 1..) {
                *seen = length;
            }
        }
        self.stage.write_storage(
            &self.limits,
            &self.table,
            &self.segments,
            &self.requests,
            arrays.out_cache_loc,
        );
        arrays.pad(rows);
        self.stage_prefixes(&mut arrays);
        let staged = self.stage_row_slots(&mut arrays, mask_words, first_mask)?;
        self.stage.numbered_slots = !arrays.slot_rows.is_empty();
        self.stage.next_pass = self.passes.len();
        Ok(staged)
    }

    /// The slots of all requests, without those of requests that were emptied.
    fn asked_slots(&self) -> impl Iterator<Item = &Slot> {
        let ranges = self.requests.iter().map(|request| request.slots.range());
        ranges.flat_map(|slots| &self.slots.all[slots])
    }

    /// Puts rows that read the same KV first into groups, where that saves reading. They are staged for graphs that know
    /// them. Returns whether they save more than so many rows cost that such a graph has and another would not.
    pub fn find_groups(&mut self, more_rows: usize) -> bool {
        let (segments, page_size) = (&self.segments, self.limits.page_size as usize);
        let sequence = |index: usize| {
            let request = &self.requests[segments[index].request()];
            Sequence {
                first_page: request.first_page,
                table_row: request.table_row as usize,
                kv_start: segments[index].kv_start(request),
                rows: segments[index].len(),
            }
        };
        let table = &mut self.table;
        let common = |[earlier, later]: [usize; 2], most| table.common(earlier, later, most);
        self.prefixes
            .find(segments.len(), page_size, sequence, common);
        self.prefixes.saved() > more_rows as i64 * ROW_COST
    }

    fn stage_prefixes(&self, arrays: &mut Step<'_>) {
        if arrays.prefix_lens.is_empty() {
            return;
        }
        arrays.prefix_lens.fill(0);
        let mut used = 0;
        for (members, shared) in self.prefixes.groups() {
            let start = used;
            for segment in members.map(|index| self.segments[index]) {
                for row in segment.rows() {
                    arrays.prefix_lens[row] = shared as i32;
                    arrays.prefix_places[row] = used as i32;
                    arrays.prefix_order[used] = row as i32;
                    arrays.prefix_starts[used] = start as i32;
                    used += 1;
                }
            }
        }
        arrays.header[4] = used as i32;
    }

    fn stage_row_slots(
        &self,
        arrays: &mut Step<'_>,
        mask_words: &mut [i32],
        first_mask: usize,
    ) -> Result<StagedStep, StageError> {
        arrays.temperatures.fill(UNSAMPLED);
        arrays.slot_masks.fill(0);
        arrays.slot_rows.fill(0);
        let numbered = !arrays.slot_rows.is_empty();
        let (mut used, mut last) = (first_mask, None);
        let mut place = [0; 2];
        let mut count = 0;
        let width = self.limits.mask_words();
        for slot in self.asked_slots() {
            let at = if numbered { count } else { slot.row() };
            if let Some(row) = arrays.slot_rows.get_mut(at) {
                *row = slot.row() as i64;
            }
            count += 1;
            arrays.temperatures[at] = match slot.class {
                SlotClass::Greedy => 0.0,
                _ => slot.temperature,
            };
            arrays.top_ps[at] = slot.top_p;
            arrays.min_ps[at] = slot.min_p;
            arrays.uniforms[at] = slot.uniform;
            arrays.top_ks[at] = slot.top_k as i32;
            let Some(mask) = slot.mask() else { continue };
            if last != Some(mask) {
                let (found, needed) = (4 * mask_words.len(), 4 * (used + width));
                let out = mask_words.get_mut(used..used + width);
                let out = out.ok_or(StageError::BlockSize { found, needed })?;
                let (words, edges) = self.slots.put_mask(mask, out);
                place = [used as i32, edges];
                (used, last) = (used + words, Some(mask));
            }
            arrays.slot_masks[2 * at..][..2].copy_from_slice(&place);
        }
        arrays.header[3] = used as i32;
        let results = if numbered {
            // Of a step that nobody samples, too, the end must be seen.
            count.max(1)
        } else {
            self.token_ids.len()
        };
        Ok(StagedStep {
            mask_words: used,
            results,
        })
    }

    /// Takes the token of each slot of the staged step; one outside the vocabulary says that the logits are no numbers.
    pub fn put_slot_tokens(&mut self, token: impl Fn(usize) -> u32) {
        let vocab_size = self.limits.vocab_size;
        let mut valid = true;
        let mut number = 0;
        for request in &self.requests {
            for slot in &mut self.slots.all[request.slots.range()] {
                let numbered = self.stage.numbered_slots;
                let token = token(if numbered { number } else { slot.row() });
                number += 1;
                slot.answered = true;
                slot.token = if token < vocab_size {
                    token
                } else {
                    INVALID_TOKEN
                };
                valid &= token < vocab_size;
            }
        }
        if !valid {
            self.empty_spoilt_requests();
        }
    }
}
