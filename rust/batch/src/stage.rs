//! Writes one pass of a plan into the staging block.

use bytemuck::{Pod, PodCastError};
use thiserror::Error;

use crate::layout::{FieldId, Layout};
use crate::plan::{Planner, Request, Segment, Slot};
use crate::table::BlockTable;
use crate::{Limits, SamplerClass};

/// One forward pass over the staged arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Rows.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Whether every request has exactly one row.
    pub decode: bool,
    /// Sum of the KV lengths after the pass.
    pub seq_lens_sum: u64,
    /// Changed block-table entries.
    pub updates: usize,
    /// Sampling slots, in groups of at most [`Limits::max_slots`].
    pub slots: usize,
}

/// Slots that are sampled together: first the greedy ones, then the plain, then the filtered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotGroup {
    /// Arg-max slots.
    pub greedy: usize,
    /// Slots that sample the whole distribution.
    pub plain: usize,
    /// Slots with top-k, top-p or min-p.
    pub filtered: usize,
}

impl SlotGroup {
    /// Slots of the group.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.greedy + self.plain + self.filtered
    }

    /// Whether the group has no slot.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The block or the tokens handed in do not fit the plan: a fault of the caller.
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
    /// A different number of tokens than the slot group asked for.
    #[error("{found} tokens for a group of {expected} slots")]
    TokenCount {
        /// Tokens given.
        found: usize,
        /// Slots of the group.
        expected: usize,
    },
    /// A sampled token outside the vocabulary.
    #[error("sampled token {token} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The token.
        token: i64,
        /// Rows of the embedding table.
        vocab_size: u32,
    },
}

/// Staging state: the next pass, its slots, and what the device holds.
#[derive(Debug)]
pub(crate) struct Stage {
    table: BlockTable,
    /// Per storage slot: the last pass that wrote it.
    writers: Vec<u32>,
    pass_number: u32,
    next_pass: usize,
    /// Slots of the current pass, ordered by class within each group.
    pass_slots: Vec<usize>,
    next_slot: usize,
    group: std::ops::Range<usize>,
}

impl Stage {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            table: BlockTable::new(limits),
            writers: vec![0; limits.storage_slots()],
            pass_number: 0,
            next_pass: 0,
            pass_slots: Vec::new(),
            next_slot: 0,
            group: 0..0,
        }
    }

    pub(crate) fn restart(&mut self) {
        self.next_pass = 0;
        self.pass_slots.clear();
        self.next_slot = 0;
        self.group = 0..0;
    }

    pub(crate) fn forget_table(&mut self) {
        self.table.forget();
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

/// Typed windows into the caller's bytes.
struct Block<'a> {
    layout: &'a Layout,
    bytes: &'a mut [u8],
}

impl<'a> Block<'a> {
    fn new(layout: &'a Layout, bytes: &'a mut [u8]) -> Result<Self, StageError> {
        if bytes.len() < layout.bytes() {
            return Err(StageError::BlockSize {
                found: bytes.len(),
                needed: layout.bytes(),
            });
        }
        bytemuck::try_cast_slice::<u8, u64>(&bytes[..8]).map_err(StageError::Alignment)?;
        Ok(Self { layout, bytes })
    }

    /// The whole capacity of one array.
    fn array<T: Pod>(&mut self, id: FieldId) -> &mut [T] {
        let field = self.layout.field(id);
        debug_assert_eq!(field.dtype.size(), size_of::<T>());
        bytemuck::cast_slice_mut(
            &mut self.bytes[field.offset..][..field.capacity * field.dtype.size()],
        )
    }
}

impl Planner {
    /// Writes the next pass into `block`; `None` when all are done.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage(&mut self, block: &mut [u8]) -> Result<Option<Pass>, StageError> {
        let Some(segments) = self.passes.get(self.stage.next_pass).cloned() else {
            return Ok(None);
        };
        let mut block = Block::new(&self.layout, block)?;
        let segments = &self.segments[segments];
        let updates = stage_requests(
            &mut block,
            &self.limits,
            segments,
            &self.requests,
            &self.pages,
            &mut self.stage,
        );
        let tokens = stage_tokens(&mut block, segments, &self.token_ids, &self.positions);
        stage_storage(
            &mut block,
            &self.limits,
            segments,
            &self.requests,
            &self.pages,
            &mut self.stage,
        );
        collect_slots(
            &mut self.stage,
            &self.limits,
            segments,
            &self.requests,
            &self.slots,
        );
        self.stage.next_pass += 1;
        Ok(Some(Pass {
            tokens,
            requests: segments.len(),
            decode: segments.iter().all(|segment| segment.len == 1),
            seq_lens_sum: block.array::<i64>(FieldId::SeqLens)[..segments.len()]
                .iter()
                .sum::<i64>() as u64,
            updates,
            slots: self.stage.pass_slots.len(),
        }))
    }

    /// Writes the next group of sampling slots of the current pass into `block`; `None` when all are done.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage_slots(&mut self, block: &mut [u8]) -> Result<Option<SlotGroup>, StageError> {
        let first = self.stage.next_slot;
        let end = self
            .stage
            .pass_slots
            .len()
            .min(first + self.limits.max_slots as usize);
        if first == end {
            return Ok(None);
        }
        let mut block = Block::new(&self.layout, block)?;
        let base = self.segments[self.passes[self.stage.next_pass - 1].start].start;
        let mut group = SlotGroup::default();
        for (entry, &slot) in self.stage.pass_slots[first..end].iter().enumerate() {
            let slot = &self.slots[slot];
            match slot.sampler.class(self.limits.vocab_size) {
                SamplerClass::Greedy => group.greedy += 1,
                SamplerClass::Plain => group.plain += 1,
                SamplerClass::Filtered => group.filtered += 1,
            }
            stage_slot(&mut block, entry, slot, base);
        }
        self.stage.group = first..end;
        self.stage.next_slot = end;
        Ok(Some(group))
    }

    /// Takes the tokens sampled for the last staged group, in the group's order.
    ///
    /// # Errors
    /// [`StageError`] when their number or a value cannot be right.
    pub fn put_tokens(&mut self, tokens: &[i64]) -> Result<(), StageError> {
        let group = std::mem::take(&mut self.stage.group);
        if tokens.len() != group.len() {
            return Err(StageError::TokenCount {
                found: tokens.len(),
                expected: group.len(),
            });
        }
        for (&slot, &token) in self.stage.pass_slots[group].iter().zip(tokens) {
            let vocab_size = self.limits.vocab_size;
            self.slots[slot].token = u32::try_from(token)
                .ok()
                .filter(|&token| token < vocab_size)
                .ok_or(StageError::Token { token, vocab_size })?;
        }
        Ok(())
    }
}

fn stage_requests(
    block: &mut Block<'_>,
    limits: &Limits,
    segments: &[Segment],
    requests: &[Request],
    pages: &[u32],
    stage: &mut Stage,
) -> usize {
    let mut start = 0;
    let mut updates = 0;
    for (row, segment) in segments.iter().enumerate() {
        let request = &requests[segment.request];
        let prefix = request.prefix as usize + (segment.start - request.rows.start);
        // Row 0 of the engine's table belongs to padding.
        block.array::<i64>(FieldId::ReqPoolIndices)[row] = row as i64 + 1;
        block.array::<i64>(FieldId::SeqLens)[row] = (prefix + segment.len) as i64;
        block.array::<i32>(FieldId::ExtendPrefixLens)[row] = prefix as i32;
        block.array::<i32>(FieldId::ExtendSeqLens)[row] = segment.len as i32;
        block.array::<i32>(FieldId::ExtendStartLoc)[row] = start as i32;
        start += segment.len;
        let first_entry = (row as i64 + 1) * i64::from(limits.row_pages);
        stage
            .table
            .update(row, &pages[request.pages.clone()], |column, page| {
                let update = &mut block.array::<i64>(FieldId::TableUpdates)[2 * updates..][..2];
                update.copy_from_slice(&[
                    first_entry + column as i64,
                    i64::from(limits.first_slot(page)),
                ]);
                updates += 1;
            });
    }
    updates
}

fn stage_tokens(
    block: &mut Block<'_>,
    segments: &[Segment],
    token_ids: &[u32],
    positions: &[u32],
) -> usize {
    // Segments of a pass are consecutive rows: requests without rows leave no gap.
    let rows =
        segments[0].start..segments[segments.len() - 1].start + segments[segments.len() - 1].len;
    let count = rows.len();
    for (id, source) in [
        (FieldId::InputIds, token_ids),
        (FieldId::Positions, positions),
    ] {
        for (target, &value) in block.array::<i64>(id)[..count]
            .iter_mut()
            .zip(&source[rows.clone()])
        {
            *target = i64::from(value);
        }
    }
    count
}

/// Storage slots, last row first: when two rows name one slot, the later row keeps it and the earlier one writes into
/// the padding page.
fn stage_storage(
    block: &mut Block<'_>,
    limits: &Limits,
    segments: &[Segment],
    requests: &[Request],
    pages: &[u32],
    stage: &mut Stage,
) {
    let pass = stage.number_pass();
    let base = segments[0].start;
    let out = block.array::<i64>(FieldId::OutCacheLoc);
    for segment in segments.iter().rev() {
        let request = &requests[segment.request];
        let pages = &pages[request.pages.clone()];
        let prefix = request.prefix as usize + (segment.start - request.rows.start);
        for offset in (0..segment.len).rev() {
            let index = prefix + offset;
            let page = pages[index / limits.page_size as usize];
            let slot = limits.first_slot(page) as usize + index % limits.page_size as usize;
            let taken = stage.writers[slot] == pass;
            stage.writers[slot] = pass;
            out[segment.start - base + offset] = if taken { 0 } else { slot as i64 };
        }
    }
}

fn collect_slots(
    stage: &mut Stage,
    limits: &Limits,
    segments: &[Segment],
    requests: &[Request],
    slots: &[Slot],
) {
    stage.pass_slots.clear();
    stage.next_slot = 0;
    stage.group = 0..0;
    for segment in segments {
        let rows = segment.start..segment.start + segment.len;
        let own = requests[segment.request].slots.clone();
        stage
            .pass_slots
            .extend(own.filter(|&slot| rows.contains(&slots[slot].row)));
    }
    for group in stage.pass_slots.chunks_mut(limits.max_slots as usize) {
        group.sort_unstable_by_key(|&slot| {
            (slots[slot].sampler.class(limits.vocab_size) as u8, slot)
        });
    }
}

fn stage_slot(block: &mut Block<'_>, entry: usize, slot: &Slot, base: usize) {
    let sampler = slot.sampler;
    block.array::<i64>(FieldId::SlotRows)[entry] = (slot.row - base) as i64;
    block.array::<f32>(FieldId::Temperatures)[entry] = if sampler.temperature > 0.0 {
        sampler.temperature
    } else {
        1.0
    };
    block.array::<f32>(FieldId::TopPs)[entry] = sampler.top_p;
    block.array::<f32>(FieldId::MinPs)[entry] = sampler.min_p;
    block.array::<f32>(FieldId::Uniforms)[entry] = slot.uniform;
    block.array::<i32>(FieldId::TopKs)[entry] = sampler.top_k as i32;
}
