//! Where each array of a pass stands in the staging block.

use crate::Limits;

/// Element type of a staged array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 32-bit float.
    F32,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::I32 | Self::F32 => 4,
        }
    }

    /// The name that numpy and torch use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::F32 => "float32",
        }
    }
}

/// The arrays of the staging block, in the order in which they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum FieldId {
    /// `[slots]` int64: row of the pass whose logits the slot samples.
    SlotRows,
    /// `[slots]` float32: temperature, 1 for greedy slots; 0 for a distribution with all mass on the arg-max.
    Temperatures,
    /// `[slots]` float32: top-p mass, 1 = all.
    TopPs,
    /// `[slots]` float32: min-p share of the largest probability, 0 = all.
    MinPs,
    /// `[slots]` float32: the slot's uniform number in `[0, 1)`.
    Uniforms,
    /// `[slots]` int32: top-k count, or ids of a distribution; the vocabulary size = all.
    TopKs,
    /// `[slots, 2]` int32: first word of the slot's logit mask and how many edges it has; 0 edges = no mask, -1 = bits.
    SlotMasks,
    /// `[requests]` int64: block-table row.
    ReqPoolIndices,
    /// `[requests]` int64: KV length after the pass.
    SeqLens,
    /// `[requests]` int32: KV length before the pass.
    ExtendPrefixLens,
    /// `[requests]` int32: tokens of the pass.
    ExtendSeqLens,
    /// `[requests]` int32: first row of the pass.
    ExtendStartLoc,
    /// `[tokens]` int64: token ids.
    InputIds,
    /// `[tokens]` int64: absolute positions.
    Positions,
    /// `[tokens]` int64: storage slots, 0 = the padding page.
    OutCacheLoc,
    /// `[updates, 2]` int64: changed entry of the block table (`row * row_pages + column`) and the first storage slot of
    /// the page that it now names. Behind the pass's arrays, so that a copy can end with the entries in use.
    TableUpdates,
    /// `[words]` int32: logit masks one behind the other. Edges `e0 < e1 < e2 < …` allow the tokens `e0..e1`, `e2..e3`
    /// and so on; where bits take less room, bit `i` of word `w` allows token `32 w + i`.
    MaskWords,
}

/// One array of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Name as the engine knows it.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Byte offset in the block, a multiple of 64.
    pub offset: usize,
    /// Capacity in elements.
    pub capacity: usize,
}

const ALIGNMENT: usize = 64;

/// Offsets of every array of a block; the block needs [`Layout::bytes`] bytes, aligned to 8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    fields: Vec<Field>,
    bytes: usize,
}

impl Layout {
    /// That of the staging block, with the arrays of [`FieldId`].
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        let slots = limits.max_slots as usize;
        let requests = limits.max_requests as usize;
        let tokens = limits.chunk_tokens as usize;
        // Every entry of the table can change in one pass.
        let updates = requests * limits.row_pages as usize;
        let order = [
            ("slot_rows", DType::I64, slots),
            ("temperatures", DType::F32, slots),
            ("top_ps", DType::F32, slots),
            ("min_ps", DType::F32, slots),
            ("uniforms", DType::F32, slots),
            ("top_ks", DType::I32, slots),
            ("slot_masks", DType::I32, 2 * slots),
            ("req_pool_indices", DType::I64, requests),
            ("seq_lens", DType::I64, requests),
            ("extend_prefix_lens", DType::I32, requests),
            ("extend_seq_lens", DType::I32, requests),
            ("extend_start_loc", DType::I32, requests),
            ("input_ids", DType::I64, tokens),
            ("positions", DType::I64, tokens),
            ("out_cache_loc", DType::I64, tokens),
            ("table_updates", DType::I64, 2 * updates),
            ("mask_words", DType::I32, slots * limits.mask_words()),
        ];
        Self::of(&order)
    }

    pub(crate) fn of(arrays: &[(&'static str, DType, usize)]) -> Self {
        let mut bytes = 0;
        let fields = arrays
            .iter()
            .map(|&(name, dtype, capacity)| {
                let offset = bytes;
                bytes += (capacity * dtype.size()).next_multiple_of(ALIGNMENT);
                Field {
                    name,
                    dtype,
                    offset,
                    capacity,
                }
            })
            .collect();
        Self { fields, bytes }
    }

    /// The arrays in the order in which they lie.
    #[must_use]
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// One array.
    #[must_use]
    pub fn field(&self, id: FieldId) -> Field {
        self.fields[id as usize]
    }

    /// Size of the block in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}
