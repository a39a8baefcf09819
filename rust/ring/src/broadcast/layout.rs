//! The byte layout of a broadcast: all offsets in one place, and the header.
//!
//! ```text
//! 0        64       128                           128 + 64 * readers
//! | header | writer | reader 0 | reader 1 | …     | slot 0: words | payload | slot 1 …
//! ```

use crate::error::{BroadcastError, HeaderError};

/// Each part starts at a multiple of this.
const LINE: usize = 64;
/// First header words, the bytes `PIECAST\0`.
const MAGIC: [u32; 2] = [0x4345_4950, 0x0054_5341];
const VERSION: u32 = 1;
/// Names the file in messages.
pub(crate) const NAME: &str = "broadcast";
pub(crate) const HEADER_BYTES: usize = 24;
/// Most readers.
const MOST_READERS: usize = 64;

/// Slots, their payload and the number of readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BroadcastLayout {
    pub(crate) slots: u32,
    /// Bytes of payload that a slot takes: a multiple of 64.
    pub(crate) capacity: u32,
    pub(crate) readers: u32,
}

impl BroadcastLayout {
    /// Eight slots of 256 KiB.
    pub(crate) fn new(readers: usize) -> Result<Self, BroadcastError> {
        if !(1..=MOST_READERS).contains(&readers) {
            let limit = MOST_READERS;
            return Err(BroadcastError::Readers { readers, limit });
        }
        Ok(Self {
            slots: 8,
            capacity: 256 << 10,
            readers: readers as u32,
        })
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots as usize
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    pub(crate) fn readers(&self) -> usize {
        self.readers as usize
    }

    /// Offset of the writer's line.
    pub(crate) fn writer_offset() -> usize {
        LINE
    }

    /// Offset of a reader's line.
    pub(crate) fn reader_offset(reader: usize) -> usize {
        (2 + reader) * LINE
    }

    /// Offset of a slot's words.
    pub(crate) fn slot_offset(&self, slot: usize) -> usize {
        Self::reader_offset(self.readers()) + slot * (LINE + self.capacity())
    }

    /// Offset of a slot's payload.
    pub(crate) fn payload_offset(&self, slot: usize) -> usize {
        self.slot_offset(slot) + LINE
    }

    pub(crate) fn total_bytes(&self) -> usize {
        // Products of two u32 stay far below the 64-bit usize that lib.rs demands.
        self.slot_offset(self.slots())
    }

    pub(crate) fn encode_header(&self) -> [u8; HEADER_BYTES] {
        let words = [
            MAGIC[0],
            MAGIC[1],
            VERSION,
            self.slots,
            self.capacity,
            self.readers,
        ];
        let mut bytes = [0; HEADER_BYTES];
        for (part, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *part = word.to_le_bytes();
        }
        bytes
    }

    /// Reads the shape from the header of a file of `size` bytes.
    pub(crate) fn decode_header(
        bytes: &[u8; HEADER_BYTES],
        size: u64,
    ) -> Result<Self, HeaderError> {
        let mut words = bytes.as_chunks().0.iter().copied().map(u32::from_le_bytes);
        let mut check = |field, fits: &dyn Fn(u32) -> bool, expected: &str| {
            let found = words.next().unwrap_or(0);
            if fits(found) {
                return Ok(found);
            }
            let (name, expected) = (NAME.to_owned(), expected.to_owned());
            Err(HeaderError::Field {
                name,
                field,
                found: found.to_string(),
                expected,
            })
        };
        for word in MAGIC {
            check("magic", &|found| found == word, &word.to_string())?;
        }
        check("version", &|found| found == VERSION, &VERSION.to_string())?;
        let whole = |bytes: u32| bytes > 0 && bytes.is_multiple_of(LINE as u32);
        let known = |count: u32| (1..=MOST_READERS).contains(&(count as usize));
        let layout = Self {
            slots: check("slot count", &|found| found > 0, "at least 1")?,
            capacity: check("slot bytes", &whole, "a multiple of 64")?,
            readers: check("reader count", &known, &format!("1 to {MOST_READERS}"))?,
        };
        let needed = layout.total_bytes() as u64;
        if size < needed {
            let name = NAME.to_owned();
            return Err(HeaderError::TooShort { name, size, needed });
        }
        Ok(layout)
    }
}
