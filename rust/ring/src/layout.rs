//! The byte layout of a region: all offsets in one place, the stride formula, the header.
//!
//! ```text
//! 0         64                                64 + stride
//! | header  | slot 0: words | request | response | slot 1 …
//! ```

use crate::error::{HeaderError, LayoutError};

/// First header word, the bytes `34 45 49 50`.
pub const MAGIC: u32 = 0x5049_4534;
/// Protocol version of the header.
pub const VERSION: u32 = 2;
/// Size of the region header.
pub const HEADER_BYTES: usize = 64;
/// Size of the words before a slot's request buffer.
pub const SLOT_HEADER_BYTES: usize = 64;

/// Everything starts on a cache line.
const ALIGN: u32 = 64;

/// Byte offsets of the header's constants; `words` has the words that change.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 4;
    pub(crate) const NUM_SLOTS: usize = 8;
    pub(crate) const STRIDE: usize = 12;
    pub(crate) const REQUEST_CAPACITY: usize = 16;
    pub(crate) const RESPONSE_CAPACITY: usize = 20;
    pub(crate) const SCHEMA_HASH: usize = 24;
}

/// Number of slots and the capacities of each. A value of this type always has a valid stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionLayout {
    slots: u32,
    request_capacity: u32,
    response_capacity: u32,
    stride: u32,
}

impl Default for RegionLayout {
    /// Four slots in at most 48 MiB, which fits the 64 MiB that a container gets by default.
    ///
    /// A request buffer has 8 MiB: the largest usual frame, a prefill of 131072 tokens with one-token
    /// pages, takes 4.7 MiB. The rest, 128 bytes short of 4 MiB, is for the response: six full
    /// logit rows of a vocabulary of 152k, or some 500,000 sampled tokens.
    fn default() -> Self {
        const REQUEST: u32 = 8 << 20;
        const RESPONSE: u32 = (4 << 20) - 128;
        Self {
            slots: 4,
            request_capacity: REQUEST,
            response_capacity: RESPONSE,
            stride: SLOT_HEADER_BYTES as u32 + REQUEST + RESPONSE,
        }
    }
}

impl RegionLayout {
    /// A layout for a new region.
    ///
    /// # Errors
    /// [`LayoutError`] if there is no slot, if a capacity is zero, if the request capacity is
    /// not a multiple of 64 (the response buffer would be unaligned), or if the stride exceeds a u32.
    pub fn new(slots: u32, request: u32, response: u32) -> Result<Self, LayoutError> {
        let refuse = |problem| LayoutError {
            slots,
            request,
            response,
            problem,
        };
        if slots == 0 {
            return Err(refuse("at least 1 slot is needed"));
        }
        if request == 0 || response == 0 {
            return Err(refuse("both capacities must be at least 1 byte"));
        }
        if !request.is_multiple_of(ALIGN) {
            return Err(refuse("the request capacity must be a multiple of 64"));
        }
        let stride = stride(request, response)
            .ok_or_else(|| refuse("a slot must stay below 4294967296 bytes"))?;
        Ok(Self {
            slots,
            request_capacity: request,
            response_capacity: response,
            stride,
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots as usize
    }

    /// Largest request in bytes.
    pub fn request_capacity(&self) -> usize {
        self.request_capacity as usize
    }

    /// Largest response in bytes.
    pub fn response_capacity(&self) -> usize {
        self.response_capacity as usize
    }

    /// Distance between two slots in bytes: the slot's words and buffers, rounded up to 64.
    pub fn stride(&self) -> usize {
        self.stride as usize
    }

    /// Size of the whole region in bytes.
    pub fn total_bytes(&self) -> usize {
        // Both factors are below 2^32, so this fits the 64-bit usize that lib.rs demands.
        HEADER_BYTES + self.slots() * self.stride()
    }

    /// Offset of a slot in the region.
    pub(crate) fn slot_offset(&self, index: usize) -> usize {
        HEADER_BYTES + index * self.stride()
    }

    /// Offset of the response buffer in a slot.
    pub(crate) fn response_offset(&self) -> usize {
        SLOT_HEADER_BYTES + self.request_capacity()
    }

    /// The 64 header bytes of a fresh region.
    pub fn encode_header(&self, schema_hash: [u8; 8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |offset: usize, value: u32| {
            bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        };
        put(header::MAGIC, MAGIC);
        put(header::VERSION, VERSION);
        put(header::NUM_SLOTS, self.slots);
        put(header::STRIDE, self.stride);
        put(header::REQUEST_CAPACITY, self.request_capacity);
        put(header::RESPONSE_CAPACITY, self.response_capacity);
        bytes[header::SCHEMA_HASH..header::SCHEMA_HASH + 8].copy_from_slice(&schema_hash);
        bytes
    }

    /// Reads the layout from the header of the region `name`, whose file has `size` bytes.
    ///
    /// # Errors
    /// [`HeaderError::Field`] for the first field that is not acceptable, [`HeaderError::TooShort`] if
    /// the file cannot hold the slots.
    pub fn decode_header(
        bytes: &[u8; HEADER_BYTES],
        schema_hash: [u8; 8],
        name: &str,
        size: u64,
    ) -> Result<Self, HeaderError> {
        let header = Header { bytes, name };
        header.expect("magic", header::MAGIC, MAGIC, |value| {
            format!("{value:#010x}")
        })?;
        header.expect("version", header::VERSION, VERSION, |value| {
            value.to_string()
        })?;
        let hash = &bytes[header::SCHEMA_HASH..header::SCHEMA_HASH + 8];
        if hash != schema_hash {
            return Err(header.refuse("schema hash", hex(hash), hex(&schema_hash)));
        }
        let layout = header.geometry()?;
        let needed = layout.total_bytes() as u64;
        if size < needed {
            let name = header.name();
            return Err(HeaderError::TooShort { name, size, needed });
        }
        Ok(layout)
    }
}

/// A header under examination.
struct Header<'a> {
    bytes: &'a [u8; HEADER_BYTES],
    name: &'a str,
}

impl Header<'_> {
    fn word(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes.as_chunks::<4>().0[offset / 4])
    }

    fn name(&self) -> String {
        format!("region {}", self.name)
    }

    fn refuse(&self, field: &'static str, found: String, expected: String) -> HeaderError {
        HeaderError::Field {
            name: self.name(),
            field,
            found,
            expected,
        }
    }

    fn expect(
        &self,
        field: &'static str,
        offset: usize,
        expected: u32,
        show: fn(u32) -> String,
    ) -> Result<(), HeaderError> {
        let found = self.word(offset);
        if found == expected {
            return Ok(());
        }
        Err(self.refuse(field, show(found), show(expected)))
    }

    fn geometry(&self) -> Result<RegionLayout, HeaderError> {
        let slots = self.word(header::NUM_SLOTS);
        if slots == 0 {
            return Err(self.refuse("slot count", "0".into(), "at least 1".into()));
        }
        let request = self.word(header::REQUEST_CAPACITY);
        let response = self.word(header::RESPONSE_CAPACITY);
        let found = self.word(header::STRIDE);
        let Some(stride) = stride(request, response).filter(|&stride| stride == found) else {
            let expected = format!("64 + {request} + {response} rounded up to a multiple of 64");
            return Err(self.refuse("slot stride", found.to_string(), expected));
        };
        Ok(RegionLayout {
            slots,
            request_capacity: request,
            response_capacity: response,
            stride,
        })
    }
}

/// `align_up(64 + request + response, 64)`, if it fits.
fn stride(request: u32, response: u32) -> Option<u32> {
    (SLOT_HEADER_BYTES as u32)
        .checked_add(request)?
        .checked_add(response)?
        .checked_next_multiple_of(ALIGN)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HASH: [u8; 8] = [0x89, 0xd0, 0xc2, 0xd1, 0xb7, 0x8c, 0xbb, 0x75];

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<RegionLayout, HeaderError> {
        RegionLayout::decode_header(bytes, HASH, "/r", u64::MAX)
    }

    #[test]
    fn default_fits_48_mib_and_the_largest_prefill() {
        let layout = RegionLayout::default();
        let rebuilt = RegionLayout::new(4, layout.request_capacity, layout.response_capacity);
        assert_eq!(layout, rebuilt.unwrap());
        assert!(layout.total_bytes() <= 48 << 20);
        assert!(
            layout.total_bytes() + 4 * 64 > 48 << 20,
            "space is left unused"
        );
        assert!(layout.request_capacity() > 4_719_008);
        assert_eq!(layout.response_capacity() % 64, 0);
    }

    #[test]
    fn stride_of_the_eight_slot_geometry() {
        let layout = RegionLayout::new(8, 4 << 20, 8 << 20).unwrap();
        assert_eq!(layout.stride(), 12_582_976);
        assert_eq!(layout.total_bytes(), 100_663_872);
    }

    #[test]
    fn header_golden_bytes() {
        let layout = RegionLayout::new(8, 4 << 20, 8 << 20).unwrap();
        let mut golden = [0; HEADER_BYTES];
        golden[..32].copy_from_slice(&[
            0x34, 0x45, 0x49, 0x50, 2, 0, 0, 0, 8, 0, 0, 0, 0x40, 0, 0xc0, 0, 0, 0, 0x40, 0, 0, 0,
            0x80, 0, 0x89, 0xd0, 0xc2, 0xd1, 0xb7, 0x8c, 0xbb, 0x75,
        ]);
        assert_eq!(layout.encode_header(HASH), golden);
        assert_eq!(decode(&golden).unwrap(), layout);
    }

    #[test]
    fn bad_layouts_are_refused() {
        for (slots, request, response) in [
            (0, 64, 64),
            (1, 0, 64),
            (1, 64, 0),
            (1, 100, 64),
            (1, u32::MAX - 63, 64),
        ] {
            assert!(RegionLayout::new(slots, request, response).is_err());
        }
    }

    #[test]
    fn each_bad_header_field_is_named() {
        let good = RegionLayout::new(2, 128, 100).unwrap().encode_header(HASH);
        for (offset, field) in [
            (header::MAGIC, "magic"),
            (header::VERSION, "version"),
            (header::SCHEMA_HASH, "schema hash"),
            (header::STRIDE, "slot stride"),
            (header::REQUEST_CAPACITY + 3, "slot stride"),
        ] {
            let mut bad = good;
            bad[offset] ^= 0xff;
            let message = decode(&bad).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        let mut empty = good;
        empty[header::NUM_SLOTS] = 0;
        assert!(
            decode(&empty)
                .unwrap_err()
                .to_string()
                .contains("slot count 0")
        );
    }

    #[test]
    fn short_file_is_refused() {
        let layout = RegionLayout::new(2, 128, 100).unwrap();
        let bytes = layout.encode_header(HASH);
        let size = layout.total_bytes() as u64;
        assert!(RegionLayout::decode_header(&bytes, HASH, "/r", size).is_ok());
        let error = RegionLayout::decode_header(&bytes, HASH, "/r", size - 1).unwrap_err();
        assert!(matches!(error, HeaderError::TooShort { needed, .. } if needed == size));
    }

    proptest! {
        #[test]
        fn header_round_trip(slots in 1u32.., blocks in 1u32..1 << 20, response in 1u32..1 << 30) {
            let layout = RegionLayout::new(slots, blocks * 64, response).unwrap();
            prop_assert_eq!(decode(&layout.encode_header(HASH)).unwrap(), layout);
            prop_assert_eq!(layout.stride() % 64, 0);
            prop_assert!(layout.stride() < 64 + layout.request_capacity() + layout.response_capacity() + 64);
        }

        #[test]
        fn any_header_is_read_without_panic(bytes in prop::array::uniform32(any::<u8>()), magic: bool, size: u64) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            if magic {
                header[..8].copy_from_slice(&[0x34, 0x45, 0x49, 0x50, 2, 0, 0, 0]);
                header[24..32].copy_from_slice(&HASH);
            }
            let _ = RegionLayout::decode_header(&header, HASH, "/r", size);
        }
    }
}
