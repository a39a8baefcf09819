//! The extension types of `MessagePack` by which `SGLang` 0.5.23 sends arrays and tensors (`srt/utils/msgpack_utils.py`).
//!
//! Numbers follow their description, after its length in 4 bytes, big-endian. A tensor in shared memory is described alone.

use crate::sglang_zmq::msgpack::{Items, Value, read_whole};

const ARRAY: i8 = 1;
const TORCH_TENSOR: i8 = 2;
const NUMPY_ARRAY: i8 = 3;
const SHARED_MEMORY: i8 = 4;

/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// Python's `array.array`: its typecode and its numbers, little-endian. `SGLang` 0.5.17 sends a list of the two.
pub(crate) fn typed_array(value: Value<'_>) -> Option<(&[u8], &[u8])> {
    match value {
        Value::Extension(ARRAY, bytes) => match described(bytes)? {
            (Value::Text(typecode), numbers) => Some((typecode, numbers)),
            _ => None,
        },
        Value::List(mut parts) => match (parts.next(), parts.next(), parts.next()) {
            (Some(Value::Text(typecode)), Some(Value::Binary(numbers)), None) => {
                Some((typecode, numbers))
            }
            _ => None,
        },
        _ => None,
    }
}

/// The type of a tensor's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataType {
    BFloat16,
    Float16,
    Float32,
    Int32,
    Int64,
}

impl DataType {
    /// By its name in torch, or in `NumPy`'s array interface.
    fn of(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"bfloat16" => Self::BFloat16,
            b"float16" | b"<f2" => Self::Float16,
            b"float32" | b"<f4" => Self::Float32,
            b"int32" | b"<i4" => Self::Int32,
            b"int64" | b"<i8" => Self::Int64,
            _ => return None,
        })
    }

    /// Bytes of a number.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::BFloat16 | Self::Float16 => 2,
            Self::Float32 | Self::Int32 => 4,
            Self::Int64 => 8,
        }
    }
}

/// Where the numbers of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage<'a> {
    /// In the message: as many bytes as shape and type say.
    Inline(&'a [u8]),
    /// From the start of the shared memory of this name, which its receiver frees.
    SharedMemory(&'a [u8]),
}

/// A tensor, contiguous and in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor<'a> {
    pub(crate) shape: Vec<usize>,
    pub(crate) data_type: DataType,
    pub(crate) storage: Storage<'a>,
    bytes: usize,
}

impl<'a> Tensor<'a> {
    /// Of torch or `NumPy`, or in shared memory; `None` for other values and types, and where shape and bytes do not fit each other.
    pub(crate) fn of(value: Value<'a>) -> Option<Self> {
        let Value::Extension(kind, payload) = value else {
            return None;
        };
        let (shape, name, storage) = match kind {
            TORCH_TENSOR | NUMPY_ARRAY => {
                let (Value::List(mut parts), numbers) = described(payload)? else {
                    return None;
                };
                let (Value::List(shape), Value::Text(name)) = (parts.next()?, parts.next()?) else {
                    return None;
                };
                (shape, name, Storage::Inline(numbers))
            }
            SHARED_MEMORY => {
                let (Value::Text(name), Value::List(shape), Value::Text(data_type)) = (
                    entry(read_whole(payload)?, b"shm_name")?,
                    entry(entry(read_whole(payload)?, b"shape")?, b"__torch_size__")?,
                    entry(entry(read_whole(payload)?, b"dtype")?, b"__torch_dtype__")?,
                ) else {
                    return None;
                };
                (shape, data_type, Storage::SharedMemory(name))
            }
            _ => return None,
        };
        let (shape, data_type) = (dimensions(shape)?, DataType::of(name)?);
        let count = shape.iter().copied().try_fold(1, usize::checked_mul)?;
        let bytes = count.checked_mul(data_type.size())?;
        let fits = match storage {
            Storage::Inline(numbers) => numbers.len() == bytes,
            Storage::SharedMemory(_) => true,
        };
        fits.then_some(Self {
            shape,
            data_type,
            storage,
            bytes,
        })
    }

    /// Bytes of its numbers.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The integers of one in the message; `None` for others.
    pub(crate) fn integers(&self) -> Option<Integers<'a>> {
        match (self.storage, self.data_type) {
            (Storage::Inline(bytes), DataType::Int32 | DataType::Int64) => Some(Integers {
                bytes,
                size: self.data_type.size(),
            }),
            _ => None,
        }
    }
}

/// Integers of a tensor, by index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Integers<'a> {
    bytes: &'a [u8],
    size: usize,
}

impl Integers<'_> {
    pub(crate) const fn len(self) -> usize {
        self.bytes.len() / self.size
    }

    /// One of them as a number of 32 bits; `None` where there is none, or it does not fit.
    pub(crate) fn get(self, index: usize) -> Option<u32> {
        let start = index.checked_mul(self.size)?;
        let bytes = self.bytes.get(start..)?;
        let value = if self.size == 4 {
            i32::from_le_bytes(*bytes.first_chunk()?).into()
        } else {
            i64::from_le_bytes(*bytes.first_chunk()?)
        };
        u32::try_from(value).ok()
    }
}

/// Names of the shared memory in a value: one, or a list of them and others.
pub(crate) fn shared_memory_names(value: Value<'_>) -> Vec<&[u8]> {
    let name = |value| match value {
        Value::Extension(SHARED_MEMORY, payload) => {
            match entry(read_whole(payload)?, b"shm_name")? {
                Value::Text(name) => Some(name),
                _ => None,
            }
        }
        _ => None,
    };
    match value {
        Value::List(values) => values.filter_map(name).collect(),
        value => name(value).into_iter().collect(),
    }
}

/// A description, and the bytes after it.
fn described(payload: &[u8]) -> Option<(Value<'_>, &[u8])> {
    let (length, rest) = payload.split_first_chunk()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    let (description, numbers) = rest.split_at_checked(length)?;
    Some((read_whole(description)?, numbers))
}

/// The value of a key of a map.
pub(crate) fn entry<'a>(value: Value<'a>, key: &[u8]) -> Option<Value<'a>> {
    let Value::Map(entries) = value else {
        return None;
    };
    let mut found = entries
        .pairs()
        .filter(|(name, _)| *name == Value::Text(key));
    found.next().map(|(_, value)| value)
}

fn dimensions(shape: Items<'_>) -> Option<Vec<usize>> {
    if shape.count() > MAX_DIMENSIONS as u64 {
        return None;
    }
    let dimension = |value| match value {
        Value::Integer(length) => usize::try_from(length).ok(),
        _ => None,
    };
    shape.map(dimension).collect()
}

/// Little-endian float32 of numbers of a type; `None` for integers.
pub(crate) fn float32(bytes: Vec<u8>, data_type: DataType) -> Option<Box<[u8]>> {
    let widened = |widen: fn(u16) -> f32| {
        let (halves, _) = bytes.as_chunks::<2>();
        let floats = halves
            .iter()
            .flat_map(|half| widen(u16::from_le_bytes(*half)).to_le_bytes());
        floats.collect()
    };
    match data_type {
        DataType::Float32 => Some(bytes.into()),
        DataType::BFloat16 => Some(widened(|half| f32::from_bits(u32::from(half) << 16))),
        DataType::Float16 => Some(widened(half_to_float)),
        DataType::Int32 | DataType::Int64 => None,
    }
}

/// IEEE 754 binary16: a sign, 5 bits of exponent, 10 of fraction.
fn half_to_float(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff);
    let magnitude = if magnitude >= 0x7c00 {
        f32::from_bits(0x7f80_0000 | magnitude << 13)
    } else {
        // A binary16 in the place of a binary32 has an exponent that is too small by 127 - 15.
        f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)
    };
    f32::from_bits(sign | magnitude.to_bits())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn halves_become_floats() {
        for (half, float) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x8000, -0.0),
            (0x7c00, f32::INFINITY),
        ] {
            assert_eq!(half_to_float(half).to_bits(), f32::to_bits(float), "{half}");
        }
        assert!(half_to_float(0x7e00).is_nan());
    }

    fn payload(metadata: &[u8], numbers: &[u8]) -> Vec<u8> {
        let length = (metadata.len() as u32).to_be_bytes();
        [&length, metadata, numbers].concat()
    }

    #[test]
    fn a_shape_that_does_not_fit_its_bytes_is_no_tensor() {
        // [[1, 2], "int64", "cpu"]
        let metadata = b"\x93\x92\x01\x02\xa5int64\xa3cpu";
        let (good, short) = (payload(metadata, &[0; 16]), payload(metadata, &[0; 15]));
        let tensor = Tensor::of(Value::Extension(TORCH_TENSOR, &good)).unwrap();
        assert_eq!((tensor.shape, tensor.bytes), (vec![1, 2], 16));
        assert_eq!(Tensor::of(Value::Extension(TORCH_TENSOR, &short)), None);
        // A product above all memory.
        let huge = payload(
            b"\x93\x92\xce\xff\xff\xff\xff\xce\xff\xff\xff\xff\xa5int64\xa3cpu",
            &[],
        );
        assert_eq!(Tensor::of(Value::Extension(TORCH_TENSOR, &huge)), None);
    }

    proptest! {
        #[test]
        fn any_payload_is_survived(kind in 0i8..6, bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let value = Value::Extension(kind, &bytes);
            if let Some(tensor) = Tensor::of(value)
                && let Some(integers) = tensor.integers()
            {
                let _ = integers.get(integers.len());
            }
            let _ = typed_array(value);
            let _ = shared_memory_names(value);
        }
    }
}
