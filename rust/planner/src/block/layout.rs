//! Byte offsets of the arrays of a block.

use bytemuck::Pod;

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

/// Element of an array: a number, or a fixed number of them.
pub(crate) trait Entry: Pod {
    /// Type of the numbers.
    const DTYPE: DType;
    /// Numbers of an entry.
    const WIDTH: usize = 1;
}

impl Entry for i64 {
    const DTYPE: DType = DType::I64;
}

impl Entry for i32 {
    const DTYPE: DType = DType::I32;
}

impl Entry for f32 {
    const DTYPE: DType = DType::F32;
}

impl<T: Entry, const N: usize> Entry for [T; N]
where
    [T; N]: Pod,
{
    const DTYPE: DType = T::DTYPE;
    const WIDTH: usize = N * T::WIDTH;
}

/// One array of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Name in the engine.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Byte offset in the block, a multiple of 64.
    pub offset: usize,
    /// Capacity in elements.
    pub capacity: usize,
}

impl Field {
    /// An array of `entries` entries, without its offset.
    pub(crate) const fn of<T: Entry>(name: &'static str, entries: usize) -> Self {
        Self {
            name,
            dtype: T::DTYPE,
            offset: 0,
            capacity: T::WIDTH * entries,
        }
    }
}

const ALIGNMENT: usize = 64;

/// Offsets of every array of a block; the block needs [`Layout::bytes`] bytes, aligned to 8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    fields: Vec<Field>,
    bytes: usize,
}

impl Layout {
    /// Places the arrays one after the other.
    pub(crate) fn of(mut fields: Vec<Field>) -> Self {
        let mut bytes = 0;
        for field in &mut fields {
            field.offset = bytes;
            bytes += (field.capacity * field.dtype.size()).next_multiple_of(ALIGNMENT);
        }
        Self { fields, bytes }
    }

    /// The arrays in memory order.
    #[must_use]
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Size of the block in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}
