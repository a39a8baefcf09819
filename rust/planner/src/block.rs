//! The staging blocks: names, types and sizes of the arrays of a pass, and of a step of a captured graph.

pub(crate) mod layout;

use bytemuck::Pod;

use crate::block::layout::{Field, Layout};
use crate::limits::Limits;
use crate::sampler::logits_processors::LogitsRecord;
use crate::slot::SamplingSlot;
use crate::staging::error::StageError;

/// Log-probability request of a slot; see [`StepFieldId::Logprobs`].
pub(crate) type StepLogprobs = [i32; 6];

/// Declares a block: an id for each array, in memory order, the arrays with their capacities, their layout and views. `Id = name: [entry; size];` is an array of `size` entries, a field of the
/// sizes; `pad` is the value of unused entries.
macro_rules! block {
    (
        $(#[$block_doc:meta])*
        pub struct $Block:ident of $Sizes:ident: $feature:ident;
        $(#[$ids_doc:meta])*
        pub enum $Id:ident {
            $( $(#[$doc:meta])* $Variant:ident = $name:ident: [$entry:ty; $size:ident] $(, pad $pad:expr)?; )*
        }
    ) => {
        $(#[$ids_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum $Id {
            $( $(#[$doc])* $Variant, )*
        }

        $(#[$block_doc])*
        #[derive(Debug)]
        pub struct $Block<'a> {
            $( pub(crate) $name: &'a mut [$entry], )*
        }

        impl<'a> $Block<'a> {
            fn layout(sizes: &$Sizes) -> Layout {
                Layout::of(vec![ $( Field::of::<$entry>(stringify!($name), sizes.$size) ),* ])
            }

            /// The arrays in a block of memory.
            pub(crate) fn of(layout: &Layout, block: &'a mut [u8]) -> Result<Self, StageError> {
                let mut rest = Rest::of(layout, block)?;
                Ok(Self { $( $name: rest.take(), )* })
            }
        }

        block! { @$feature $Block of $Sizes { $( $name: $size $(, pad $pad)?; )* } }
    };
    (@narrowed $Block:ident of $Sizes:ident { $( $name:ident: $size:ident; )* }) => {
        impl $Block<'_> {
            /// The first entries of each array: one bounds check for the loops of the caller, hence inlined.
            #[inline(always)]
            fn narrowed(&mut self, sizes: &$Sizes) -> $Block<'_> {
                $Block { $( $name: &mut self.$name[..sizes.$size], )* }
            }
        }
    };
    (@padded $Block:ident of $Sizes:ident { $( $name:ident: $size:ident $(, pad $pad:expr)?; )* }) => {
        impl $Block<'_> {
            /// Fills the entries from `first` on with padding: tokens that use the padding page only and are not sampled.
            pub(crate) fn pad(&mut self, first: usize) {
                $( $( self.$name[first..].fill($pad); )? )*
            }
        }
    };
}

/// Entries of the arrays of a pass.
struct PassSizes {
    slots: usize,
    requests: usize,
    tokens: usize,
    updates: usize,
    words: usize,
}

block! {
    /// The staging block of a pass, as its arrays.
    pub struct PassBlock of PassSizes: narrowed;
    /// The arrays of the staging block, in memory order.
    pub enum FieldId {
        /// `[slots]` int64: logits row that the slot samples.
        SlotRows = slot_rows: [i64; slots];
        /// `[slots]` float32: temperature, 1 for greedy slots; 0 = all mass on the arg-max.
        Temperatures = temperatures: [f32; slots];
        /// `[slots]` float32: top-p, 1 = off; negative: `-top_p` of the full distribution, not of what top-k leaves.
        TopPs = top_ps: [f32; slots];
        /// `[slots]` float32: min-p, 0 = off.
        MinPs = min_ps: [f32; slots];
        /// `[slots]` float32: uniform random number in `[0, 1)`.
        Uniforms = uniforms: [f32; slots];
        /// `[slots]` int32: top-k, or number of ids of a distribution; the vocabulary size = off.
        TopKs = top_ks: [i32; slots];
        /// `[slots, 2]` int32: first word of the slot's logit mask and number of edges; 0 = no mask, -1 = bit mask.
        SlotMasks = slot_masks: [[i32; 2]; slots];
        /// `[requests]` int64: block-table row.
        ReqPoolIndices = req_pool_indices: [i64; requests];
        /// `[requests]` int64: KV length after the pass.
        SeqLens = seq_lens: [i64; requests];
        /// `[requests]` int32: KV length before the pass.
        ExtendPrefixLens = extend_prefix_lens: [i32; requests];
        /// `[requests]` int32: tokens of the pass.
        ExtendSeqLens = extend_seq_lens: [i32; requests];
        /// `[requests]` int32: first row of the pass.
        ExtendStartLoc = extend_start_loc: [i32; requests];
        /// `[tokens]` int64: token ids.
        InputIds = input_ids: [i64; tokens];
        /// `[tokens]` int64: absolute positions.
        Positions = positions: [i64; tokens];
        /// `[tokens]` int64: KV slots (slot mapping), 0 = padding page.
        OutCacheLoc = out_cache_loc: [i64; tokens];
        /// `[updates, 2]` int64: changed block-table entry (`row * row_pages + column`) and first KV slot of its page. Near
        /// the end, so that a copy can stop after the entries in use.
        TableUpdates = table_updates: [[i64; 2]; updates];
        /// `[words]` int32: concatenated logit masks. Edges `e0 < e1 < e2 < …` allow the tokens `e0..e1`, `e2..e3` and so
        /// on; if that is smaller, a bit mask: bit `i` of word `w` allows token `32 w + i`.
        MaskWords = mask_words: [i32; words];
    }
}

impl PassBlock<'_> {
    /// The arrays, with `count` entries in those of slots.
    pub(crate) fn slots(&mut self, count: usize) -> PassBlock<'_> {
        self.narrowed(&PassSizes {
            slots: count,
            ..self.sizes()
        })
    }

    /// The arrays, with `count` entries in those of requests.
    pub(crate) fn requests(&mut self, count: usize) -> PassBlock<'_> {
        self.narrowed(&PassSizes {
            requests: count,
            ..self.sizes()
        })
    }

    const fn sizes(&self) -> PassSizes {
        PassSizes {
            slots: self.slot_rows.len(),
            requests: self.seq_lens.len(),
            tokens: self.input_ids.len(),
            updates: self.table_updates.len(),
            words: self.mask_words.len(),
        }
    }

    /// Writes the parameters of a slot; `base` is the first query token of the pass.
    pub(crate) fn put(&mut self, entry: usize, slot: &SamplingSlot, base: usize) {
        self.slot_rows[entry] = (slot.row() - base) as i64;
        // Greedy slots and probes do not divide by the temperature.
        self.temperatures[entry] = if slot.class().is_tempered() {
            slot.temperature()
        } else {
            1.0
        };
        self.top_ps[entry] = slot.top_p();
        self.min_ps[entry] = slot.min_p();
        self.uniforms[entry] = slot.uniform();
        self.top_ks[entry] = slot.top_k() as i32;
    }
}

/// Block-table updates in a step's block; further ones go to [`StepMemory::mask_words`](crate::StepMemory::mask_words).
pub(crate) const STEP_UPDATES: usize = 512;
/// Words of a step's header.
const HEADER: usize = 8;

/// Entries of the arrays of a step.
struct StepSizes {
    header: usize,
    rows: usize,
    slots: usize,
    /// Slots with an explicit token index.
    named: usize,
    /// Tokens that may be in prefix groups.
    grouped: usize,
    /// Slots with penalties, biases or log-probabilities.
    extended: usize,
    /// Tokens that may have adapters.
    bound: usize,
    updates: usize,
}

block! {
    /// The block of a step, as its arrays.
    pub struct StepBlock of StepSizes: padded;
    /// The arrays of a step's block, in memory order.
    pub enum StepFieldId {
        /// `[8]` int32: number of the step; changed block-table entries, rows, words outside of the block and entries of
        /// `prefix_order` in use; of the words the first one of pairs of KV slot and token, and how many pairs; 0.
        Header = header: [i32; header];
        /// `[rows]` int64: token ids.
        InputIds = input_ids: [i64; rows], pad 0;
        /// `[rows]` int64: absolute positions.
        Positions = positions: [i64; rows], pad 0;
        /// `[rows]` int64: KV slots (slot mapping), 0 = padding page.
        OutCacheLoc = out_cache_loc: [i64; rows], pad 0;
        /// `[rows]` int64: block-table row, 0 = padding.
        ReqPoolIndices = req_pool_indices: [i64; rows], pad 0;
        /// `[rows]` int64: KV length that the token attends to, itself included.
        SeqLens = seq_lens: [i64; rows], pad 1;
        /// `[slots]` float32: temperature, 0 = arg-max, negative = not sampled.
        Temperatures = temperatures: [f32; slots];
        /// `[slots]` float32: as in the staging block.
        TopPs = top_ps: [f32; slots];
        /// `[slots]` float32: as in the staging block.
        MinPs = min_ps: [f32; slots];
        /// `[slots]` float32: as in the staging block.
        Uniforms = uniforms: [f32; slots];
        /// `[slots]` int32: as in the staging block.
        TopKs = top_ks: [i32; slots];
        /// `[slots, 2]` int32: as in the staging block.
        SlotMasks = slot_masks: [[i32; 2]; slots];
        /// `[slots]` int64: row of each slot; empty if there are as many slots as rows.
        SlotRows = slot_rows: [i64; named];
        /// `[rows]` int32: length of the shared prefix of the token's group, a multiple of 128; 0 = no group. Empty, as the
        /// next three, if the graph has no prefix groups.
        PrefixLens = prefix_lens: [i32; grouped];
        /// `[rows]` int32: index in `prefix_order` of a token in a group.
        PrefixIndices = prefix_indices: [i32; grouped];
        /// `[rows]` int32: the tokens of all groups, group by group.
        PrefixOrder = prefix_order: [i32; grouped];
        /// `[rows]` int32: first index of the group, for each entry of `prefix_order`.
        PrefixStarts = prefix_starts: [i32; grouped];
        /// `[slots, 8]` int32: penalties and biases of each slot, see [`RECORD_WORDS`](crate::RECORD_WORDS); biases lie outside
        /// of the block. Empty unless the graph is an extended one.
        Records = records: [LogitsRecord; extended];
        /// `[slots, 6]` int32, 0 for a slot without log-probabilities, else `[1, first word that it writes, top-k, further token
        /// ids, first word of these outside of the block, temperature to divide by (bits of float32)]`. Empty unless the graph
        /// is an extended one.
        Logprobs = logprobs: [StepLogprobs; extended];
        /// `[rows]` int32: device slot of the token's `LoRA` adapter, -1 for none. Empty unless the graph applies adapters.
        AdapterSlots = adapter_slots: [i32; bound];
        /// `[512, 2]` int64: as in the staging block; further ones are the first of
        /// [`StepMemory::mask_words`](crate::StepMemory::mask_words).
        TableUpdates = table_updates: [[i64; 2]; updates];
    }
}

/// Size of a step, or capacity of a captured graph. A graph with as many slots as tokens samples token `i` in slot `i`; one with
/// fewer slots, for prompts, reads the token index of each slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens.
    pub rows: usize,
    /// Sampled tokens.
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
    /// As many slots as tokens.
    fn from(rows: usize) -> Self {
        Self { rows, slots: rows }
    }
}

impl Layout {
    /// Layout of the staging block, with the arrays of [`FieldId`].
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        let (slots, requests) = (limits.max_slots as usize, limits.max_requests as usize);
        PassBlock::layout(&PassSizes {
            slots,
            requests,
            tokens: limits.chunk_tokens as usize,
            // Every entry of the table can change in one pass.
            updates: requests * limits.row_pages as usize,
            words: slots * limits.mask_words(),
        })
    }

    /// Layout of a graph's block, with the arrays of [`StepFieldId`].
    #[must_use]
    pub fn graph(size: impl Into<StepSize>) -> Self {
        Self::graph_of(size.into(), 0, 0, 0)
    }

    /// Layout of a graph with [shared-prefix groups](crate::Planner::find_prefix_groups), and as many slots as tokens.
    #[must_use]
    pub fn grouped_graph(rows: usize) -> Self {
        Self::graph_of(rows.into(), rows, 0, 0)
    }

    /// Layout of a graph with penalties, biases and log-probabilities, and as many slots as tokens.
    #[must_use]
    pub fn extended_graph(rows: usize) -> Self {
        Self::graph_of(rows.into(), 0, rows, 0)
    }

    /// Layout of a graph that applies `LoRA` adapters.
    #[must_use]
    pub fn adapter_graph(size: impl Into<StepSize>) -> Self {
        let size = size.into();
        Self::graph_of(size, 0, 0, size.rows)
    }

    /// Layout of a graph that applies `LoRA` adapters, with penalties, biases and log-probabilities, and as many slots as
    /// tokens.
    #[must_use]
    pub fn extended_adapter_graph(rows: usize) -> Self {
        Self::graph_of(rows.into(), 0, rows, rows)
    }

    fn graph_of(size: StepSize, grouped: usize, extended: usize, bound: usize) -> Self {
        let StepSize { rows, slots } = size;
        StepBlock::layout(&StepSizes {
            header: HEADER,
            rows,
            slots,
            named: if slots < rows { slots } else { 0 },
            grouped,
            extended,
            bound,
            updates: STEP_UPDATES,
        })
    }

    /// One array of the staging block.
    #[must_use]
    pub fn field(&self, id: FieldId) -> Field {
        self.fields()[id as usize]
    }
}

/// The rest of a block, from which arrays are split off in the order of the layout.
struct Rest<'a, 'l> {
    fields: std::slice::Iter<'l, Field>,
    at: usize,
    block: &'a mut [u8],
}

impl<'a, 'l> Rest<'a, 'l> {
    fn of(layout: &'l Layout, block: &'a mut [u8]) -> Result<Self, StageError> {
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

    fn take<T: Pod>(&mut self) -> &'a mut [T] {
        let Some(field) = self.fields.next() else {
            return &mut [];
        };
        let end = field.offset + field.capacity * field.dtype.size();
        let (head, tail) = std::mem::take(&mut self.block).split_at_mut(end - self.at);
        let array = &mut head[field.offset - self.at..];
        (self.block, self.at) = (tail, end);
        bytemuck::cast_slice_mut(array)
    }
}
