//! Writes one pass of a plan into the staging block.

use std::ops::Range;

use bytemuck::{Pod, PodCastError};
use thiserror::Error;

use crate::layout::{Field, Layout};
use crate::mask::Sight;
use crate::plan::{Planner, Request, Segment, pass_rows};
use crate::slot::{Slot, Slots};
use crate::table::BlockTable;
use crate::{Limits, SlotClass};

/// One forward pass over the staged arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Rows.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Whether every request has exactly one row, of text, which sees all KV up to itself.
    pub decode: bool,
    /// Whether rows see what [`Planner::attention_mask`] says, and not all KV up to themselves.
    pub masked: bool,
    /// Sum of the KV lengths after the pass.
    pub seq_lens_sum: u64,
    /// Changed block-table entries.
    pub updates: usize,
    /// Sampling slots, in groups of at most [`Limits::max_slots`].
    pub slots: usize,
}

/// The block or the outputs handed in do not fit the plan: a fault of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum StageError {
    /// The staging block is too small.
    #[error("the staging block has {found} bytes, the layout needs {needed}")]
    BlockSize {
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// The staging block is misaligned.
    #[error("the staging block is not aligned to 8 bytes ({0})")]
    Alignment(PodCastError),
    /// An output array of another length than the slot group asked for.
    #[error("{array} has {found} values, the slot group asks for {expected}")]
    OutputCount {
        /// Name of the array.
        array: &'static str,
        /// Values given.
        found: usize,
        /// Values needed.
        expected: usize,
    },
}

/// Staging state: the next pass and its slots.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Per storage slot: the last pass that wrote it.
    writers: Vec<u32>,
    pass_number: u32,
    pub(crate) next_pass: usize,
    /// Slots of the current pass, ordered by class within each group.
    pub(crate) pass_slots: Vec<u32>,
    pub(crate) next_slot: usize,
    /// A group as it was before it was ordered.
    unordered: Vec<u32>,
    /// Whether the staged step's graph counts slots, and not their rows.
    pub(crate) numbered_slots: bool,
}

/// Orders a group by class; slots of one class keep their order. There are few classes, so that places are counted.
fn order_by_class(group: &mut [u32], unordered: &mut Vec<u32>, slots: &[Slot]) {
    let class = |slot: u32| slots[slot as usize].class as usize;
    let mut places = [0; SlotClass::COUNT + 1];
    for &slot in &*group {
        places[class(slot) + 1] += 1;
    }
    for class in 1..places.len() {
        places[class] += places[class - 1];
    }
    unordered.clear();
    unordered.extend_from_slice(group);
    for &slot in &*unordered {
        let place = &mut places[class(slot)];
        group[*place] = slot;
        *place += 1;
    }
}

impl Stage {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            writers: vec![0; limits.storage_slots()],
            pass_number: 0,
            next_pass: 0,
            pass_slots: Vec::new(),
            next_slot: 0,
            numbered_slots: false,
            unordered: Vec::new(),
        }
    }

    pub(crate) fn restart(&mut self) {
        self.next_pass = 0;
        self.pass_slots.clear();
        self.next_slot = 0;
    }

    /// The next slots of the current pass, at most `most`.
    pub(crate) fn next_group(&self, most: usize) -> Range<usize> {
        self.next_slot..self.pass_slots.len().min(self.next_slot + most)
    }

    /// Whether some of `passes` have not been staged.
    pub(crate) fn passes_left(&self, passes: usize) -> bool {
        self.next_pass < passes
    }

    fn number_pass(&mut self) -> u32 {
        self.pass_number = self.pass_number.wrapping_add(1);
        if self.pass_number == 0 {
            self.writers.fill(0);
            self.pass_number = 1;
        }
        self.pass_number
    }
}

/// The arrays of the caller's block, each with its whole capacity.
pub(crate) struct Arrays<'a> {
    pub(crate) slot_rows: &'a mut [i64],
    pub(crate) temperatures: &'a mut [f32],
    pub(crate) top_ps: &'a mut [f32],
    pub(crate) min_ps: &'a mut [f32],
    pub(crate) uniforms: &'a mut [f32],
    pub(crate) top_ks: &'a mut [i32],
    pub(crate) slot_masks: &'a mut [[i32; 2]],
    req_pool_indices: &'a mut [i64],
    seq_lens: &'a mut [i64],
    extend_prefix_lens: &'a mut [i32],
    extend_seq_lens: &'a mut [i32],
    extend_start_loc: &'a mut [i32],
    input_ids: &'a mut [i64],
    positions: &'a mut [i64],
    out_cache_loc: &'a mut [i64],
    table_updates: &'a mut [i64],
    pub(crate) mask_words: &'a mut [i32],
}

impl<'a> Arrays<'a> {
    pub(crate) fn of(layout: &Layout, block: &'a mut [u8]) -> Result<Self, StageError> {
        let mut rest = Rest::of(layout, block)?;
        // In the order of the layout.
        Ok(Self {
            slot_rows: rest.take(),
            temperatures: rest.take(),
            top_ps: rest.take(),
            min_ps: rest.take(),
            uniforms: rest.take(),
            top_ks: rest.take(),
            slot_masks: bytemuck::cast_slice_mut::<i32, _>(rest.take()),
            req_pool_indices: rest.take(),
            seq_lens: rest.take(),
            extend_prefix_lens: rest.take(),
            extend_seq_lens: rest.take(),
            extend_start_loc: rest.take(),
            input_ids: rest.take(),
            positions: rest.take(),
            out_cache_loc: rest.take(),
            table_updates: rest.take(),
            mask_words: rest.take(),
        })
    }

    /// Leaves `count` entries of each array of slots, so that this is checked once.
    pub(crate) fn with_slots(self, count: usize) -> Self {
        Self {
            slot_rows: &mut self.slot_rows[..count],
            temperatures: &mut self.temperatures[..count],
            top_ps: &mut self.top_ps[..count],
            min_ps: &mut self.min_ps[..count],
            uniforms: &mut self.uniforms[..count],
            top_ks: &mut self.top_ks[..count],
            slot_masks: &mut self.slot_masks[..count],
            ..self
        }
    }

    /// The same for requests.
    fn with_requests(self, count: usize) -> Self {
        Self {
            req_pool_indices: &mut self.req_pool_indices[..count],
            seq_lens: &mut self.seq_lens[..count],
            extend_prefix_lens: &mut self.extend_prefix_lens[..count],
            extend_seq_lens: &mut self.extend_seq_lens[..count],
            extend_start_loc: &mut self.extend_start_loc[..count],
            ..self
        }
    }
}

/// The part of a block whose arrays are still to be taken, in the order of the layout.
pub(crate) struct Rest<'a, 'l> {
    fields: std::slice::Iter<'l, Field>,
    at: usize,
    block: &'a mut [u8],
}

impl<'a, 'l> Rest<'a, 'l> {
    pub(crate) fn of(layout: &'l Layout, block: &'a mut [u8]) -> Result<Self, StageError> {
        let (found, needed) = (block.len(), layout.bytes());
        if found < needed {
            return Err(StageError::BlockSize { found, needed });
        }
        bytemuck::try_cast_slice::<u8, u64>(&block[..8]).map_err(StageError::Alignment)?;
        Ok(Self {
            fields: layout.fields().iter(),
            at: 0,
            block,
        })
    }

    pub(crate) fn take<T: Pod>(&mut self) -> &'a mut [T] {
        let Some(field) = self.fields.next() else {
            return &mut [];
        };
        debug_assert_eq!(field.dtype.size(), size_of::<T>());
        let end = field.offset + field.capacity * size_of::<T>();
        let (head, tail) = std::mem::take(&mut self.block).split_at_mut(end - self.at);
        let array = &mut head[field.offset - self.at..];
        (self.block, self.at) = (tail, end);
        bytemuck::cast_slice_mut(array)
    }
}

impl Planner {
    /// Writes the next pass into `block`; `None` when all are done.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage(&mut self, block: &mut [u8]) -> Result<Option<Pass>, StageError> {
        let Some(range) = self.passes.get(self.stage.next_pass).cloned() else {
            return Ok(None);
        };
        let mut arrays = Arrays::of(&self.layout, block)?.with_requests(range.len());
        let updates = self.stage_updates(range.clone(), arrays.table_updates);
        let segments = &self.segments[range];
        stage_requests(&mut arrays, segments, &self.requests);
        let tokens = stage_tokens(&mut arrays, segments, &self.token_ids, &self.positions);
        self.stage.write_storage(
            &self.limits,
            &self.table,
            segments,
            &self.requests,
            arrays.out_cache_loc,
        );
        // Whoever was emptied has a fault.
        if self.passes.len() == 1 && self.faults.is_empty() {
            let all = 0..self.slots.all.len() as u32;
            self.stage.pass_slots.clear();
            self.stage.pass_slots.extend(all);
        } else {
            self.stage
                .collect_slots(segments, &self.requests, &self.slots);
        }
        self.stage.order_slots(&self.limits, &self.slots);
        self.slots.close_group();
        self.stage.next_pass += 1;
        let seq_lens = &arrays.seq_lens[..segments.len()];
        let masked = self.requests[segments[0].request()].sight != Sight::Causal;
        Ok(Some(Pass {
            tokens,
            requests: segments.len(),
            decode: !masked
                && segments.iter().all(|segment| segment.len() == 1)
                && !self.images.touch(&pass_rows(segments)),
            masked,
            seq_lens_sum: seq_lens.iter().sum::<i64>() as u64,
            updates,
            slots: self.stage.pass_slots.len(),
        }))
    }

    /// Writes the block-table changes of the requests that begin in these segments; returns their number.
    fn stage_updates(&mut self, segments: Range<usize>, out: &mut [i64]) -> usize {
        let segments = &self.segments[segments];
        let begins = |segment: &Segment| {
            let request = &self.requests[segment.request()];
            segment.start() == request.rows.start()
        };
        // Only the first one can be the rest of a request.
        let begun = &segments[usize::from(!begins(&segments[0]))..];
        if self.spilled.is_empty() {
            // Those of neighbours are neighbours.
            let ends = begun.first().zip(begun.last());
            let own = |segment: &Segment| self.requests[segment.request()].updates;
            let updates = ends.map_or(0..0, |(a, b)| own(a).start()..own(b).end());
            let updates = self.updates[updates].as_flattened();
            out[..updates.len()].copy_from_slice(updates);
            return updates.len() / 2;
        }
        let mut count = 0;
        for segment in begun {
            let request = &self.requests[segment.request()];
            let mut put = |update: [i64; 2]| {
                out[2 * count..][..2].copy_from_slice(&update);
                count += 1;
            };
            self.updates[request.updates.range()]
                .iter()
                .for_each(|&update| put(update));
            let row = request.table_row as usize;
            let pages = &self.spilled[request.spilled.range()];
            let matching = self.table.matching(row, pages);
            self.table.update(row, pages, matching, |column, page| {
                put(self.limits.table_update(row, column, page));
            });
        }
        count
    }
}

fn stage_requests(arrays: &mut Arrays<'_>, segments: &[Segment], requests: &[Request]) {
    let mut start = 0;
    for (entry, segment) in segments.iter().enumerate() {
        let request = &requests[segment.request()];
        let prefix = segment.kv_start(request);
        // Row 0 of the engine's table belongs to padding.
        arrays.req_pool_indices[entry] = i64::from(request.table_row) + 1;
        arrays.seq_lens[entry] = (prefix + segment.len()) as i64;
        arrays.extend_prefix_lens[entry] = prefix as i32;
        arrays.extend_seq_lens[entry] = segment.len() as i32;
        arrays.extend_start_loc[entry] = start as i32;
        start += segment.len();
    }
}

fn stage_tokens(
    arrays: &mut Arrays<'_>,
    segments: &[Segment],
    token_ids: &[u32],
    positions: &[u32],
) -> usize {
    let rows = pass_rows(segments);
    let widen = |target: &mut [i64], source: &[u32]| {
        for (target, &value) in target.iter_mut().zip(source) {
            *target = i64::from(value);
        }
    };
    widen(arrays.input_ids, &token_ids[rows.clone()]);
    widen(arrays.positions, &positions[rows.clone()]);
    rows.len()
}

impl Stage {
    /// Storage slots, last row first: when two rows name one slot, the later row keeps it and the earlier one writes
    /// into the padding page, as dropped requests do.
    pub(crate) fn write_storage(
        &mut self,
        limits: &Limits,
        table: &BlockTable,
        segments: &[Segment],
        requests: &[Request],
        out: &mut [i64],
    ) {
        let pass = self.number_pass();
        let base = segments[0].start();
        let page_size = limits.page_size;
        for segment in segments.iter().rev() {
            let request = &requests[segment.request()];
            let pages = table.pages(request.table_row as usize);
            let prefix = segment.kv_start(request);
            let out = &mut out[segment.start() - base..][..segment.len()];
            if request.dropped {
                out.fill(0);
                continue;
            }
            for (row, out) in out.iter_mut().enumerate().rev() {
                let index = (prefix + row) as u32;
                let page = pages[(index / page_size) as usize];
                let slot = limits.first_slot(page) as usize + (index % page_size) as usize;
                let taken = self.writers[slot] == pass;
                self.writers[slot] = pass;
                *out = if taken { 0 } else { slot as i64 };
            }
        }
    }

    fn collect_slots(&mut self, segments: &[Segment], requests: &[Request], slots: &Slots) {
        self.pass_slots.clear();
        for segment in segments {
            let request = &requests[segment.request()];
            let own = request.slots.range().map(|slot| slot as u32);
            if segment.len() == request.rows.len() {
                self.pass_slots.extend(own);
                continue;
            }
            let rows = segment.rows();
            let inside = |&slot: &u32| rows.contains(&slots.all[slot as usize].row());
            self.pass_slots.extend(own.filter(inside));
        }
    }

    /// Orders each group of the pass's slots, and starts with the first.
    fn order_slots(&mut self, limits: &Limits, slots: &Slots) {
        self.next_slot = 0;
        let one_class = slots.counts.iter().filter(|&&count| count > 0).count() <= 1;
        if one_class {
            return;
        }
        for group in self.pass_slots.chunks_mut(limits.max_slots as usize) {
            order_by_class(group, &mut self.unordered, &slots.all);
        }
    }
}
