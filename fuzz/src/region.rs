//! Region headers: an accepted one describes a region that fits its file.

use pie_ring::{HEADER_BYTES, RegionLayout, SLOT_HEADER_BYTES};
use pie_wire::SCHEMA_HASH;

use crate::memory;

/// Bytes of a header, then those of the file's size.
pub(crate) fn header(data: &[u8]) {
    let mut bytes = [0; HEADER_BYTES + 8];
    let len = data.len().min(bytes.len());
    bytes[..len].copy_from_slice(&data[..len]);
    let (header, size) = bytes.split_first_chunk().expect("there are more bytes");
    let size = size.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let (layout, peak) =
        memory::peak(|| RegionLayout::decode_header(header, SCHEMA_HASH, "/r", size));
    assert!(peak <= 1 << 10, "{peak} bytes");
    match layout {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(layout) => {
            assert_eq!(layout.encode_header(SCHEMA_HASH)[..32], header[..32]);
            let short = layout.total_bytes() as u64 - 1;
            assert!(RegionLayout::decode_header(header, SCHEMA_HASH, "/r", short).is_err());
            assert!(layout.slots() > 0 && layout.total_bytes() as u64 <= size);
            let used = SLOT_HEADER_BYTES + layout.request_capacity() + layout.response_capacity();
            assert!(
                (used..used + 64).contains(&layout.stride()) && layout.stride().is_multiple_of(64)
            );
        }
    }
}
