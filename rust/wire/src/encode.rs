//! Writing into a caller's buffer.

use std::fmt;

use rkyv::api::serialize_using;
use rkyv::rancor::{Failure, Strategy};
use rkyv::ser::allocator::{Arena, ArenaHandle, SubAllocator};
use rkyv::ser::writer::Buffer;
use rkyv::ser::{Positional, Serializer, Writer};

use crate::error::WireError;
use crate::layout::RESPONSE_ROOT_LEN;
use crate::schema::{ForwardResponse, Frame, Payload, ResponseFrame, ResponsePayload};

/// Most bytes an encoded payload can have: relative pointers are `i32`.
pub const MAX_ENCODED_LEN: usize = i32::MAX as usize;

/// Longest string of the archive format, in bytes: two bits of its length tag it.
const MAX_STRING_LEN: usize = (1 << 30) - 1;

const TOO_LARGE: WireError = WireError::TooLarge {
    limit: MAX_ENCODED_LEN,
};

/// Writes a response into the start of `buffer` and returns its length.
///
/// Nothing is allocated. The buffer needs no alignment for writing, but the
/// server reads the payload at [`RESPONSE_ALIGN`](crate::RESPONSE_ALIGN).
/// The arrays are written as given: the rules of §8.1 are not checked.
///
/// # Errors
///
/// [`WireError::BufferTooSmall`], found out before anything is written, or
/// [`WireError::TooLarge`].
pub fn encode_response(response: &ResponseFrame, buffer: &mut [u8]) -> Result<usize, WireError> {
    let needed = match &response.payload {
        ResponsePayload::Forward(forward) => response_len(forward),
        ResponsePayload::Status(_) => RESPONSE_ROOT_LEN,
    };
    if needed > MAX_ENCODED_LEN {
        return Err(TOO_LARGE);
    }
    let capacity = buffer.len();
    let Some(out) = buffer.get_mut(..needed) else {
        return Err(WireError::BufferTooSmall { needed, capacity });
    };
    let mut serializer = Serializer::new(Buffer::from(out), SubAllocator::empty(), ());
    serialize_using::<_, Failure>(response, &mut serializer)
        .map_err(|Failure| WireError::BufferTooSmall { needed, capacity })?;
    Ok(serializer.pos())
}

/// Sets `probe_response_build_us` of an encoded forward response.
///
/// The time is known only once the response is encoded. `response` is exactly
/// what [`encode_response`] wrote: the field is the last word of the root, and
/// the root comes last.
pub fn set_response_build_us(response: &mut [u8], micros: u32) {
    if let Some(word) = response.last_chunk_mut::<4>() {
        *word = micros.to_le_bytes();
    }
}

/// Exact length of a forward response's encoding, in bytes.
///
/// Saturates instead of overflowing.
pub fn response_len(response: &ForwardResponse) -> usize {
    let words = [
        response.tokens_indptr.len(),
        response.tokens.len(),
        response.dists_req_indptr.len(),
        response.dists_kv_indptr.len(),
        response.dists_ids.len(),
        response.dists_probs.len(),
        response.logits_req_indptr.len(),
        response.logits_byte_indptr.len(),
        response.logprobs_req_indptr.len(),
        response.logprobs_val_indptr.len(),
        response.logprobs_values.len(),
        response.entropies_indptr.len(),
        response.entropies.len(),
        response.spec_indptr.len(),
        response.spec_tokens.len(),
        response.spec_positions.len(),
        // The only bytes; the next array aligns itself to a word.
        response.logits_bytes.len().div_ceil(4),
    ];
    words
        .iter()
        .fold(0_usize, |sum, &len| sum.saturating_add(len))
        .saturating_mul(4)
        .saturating_add(RESPONSE_ROOT_LEN)
}

/// Writes a request into the start of `buffer` and returns its length.
///
/// This is the server's side of the conversation, so it may use the heap for
/// scratch; [`encode_request_with`] uses that again. The driver reads the
/// payload at [`REQUEST_ALIGN`](crate::REQUEST_ALIGN).
///
/// # Errors
///
/// [`WireError::BufferTooSmall`] (the buffer then holds a partial payload) or
/// [`WireError::TooLarge`].
pub fn encode_request(frame: &Frame, buffer: &mut [u8]) -> Result<usize, WireError> {
    encode_request_with(frame, buffer, &mut Scratch::default())
}

/// Memory that [`encode_request_with`] uses again.
#[derive(Default)]
pub struct Scratch(Arena);

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

/// [`encode_request`] with memory of former calls: requests no larger than
/// those allocate nothing.
///
/// # Errors
///
/// Those of [`encode_request`].
pub fn encode_request_with(
    frame: &Frame,
    buffer: &mut [u8],
    scratch: &mut Scratch,
) -> Result<usize, WireError> {
    check_strings(frame)?;
    let capacity = buffer.len();
    // Positions beyond the limit would overflow the relative pointers.
    let out = &mut buffer[..capacity.min(MAX_ENCODED_LEN)];
    match serialize_request(frame, Buffer::from(out), &mut scratch.0) {
        Ok(len) => {
            // What took several pieces takes one from now on.
            scratch.0.shrink();
            Ok(len)
        }
        Err(Failure) => Err(WireError::BufferTooSmall {
            needed: request_len(frame)?,
            capacity,
        }),
    }
}

/// Exact length of a request's encoding, in bytes.
///
/// # Errors
///
/// [`WireError::TooLarge`].
pub fn request_len(frame: &Frame) -> Result<usize, WireError> {
    check_strings(frame)?;
    serialize_request(frame, ByteCounter(0), &mut Arena::new()).map_err(|Failure| TOO_LARGE)
}

fn check_strings(frame: &Frame) -> Result<(), WireError> {
    match &frame.payload {
        Payload::Adapter(adapter) if adapter.path.len() > MAX_STRING_LEN => Err(TOO_LARGE),
        _ => Ok(()),
    }
}

fn serialize_request<W>(frame: &Frame, writer: W, arena: &mut Arena) -> Result<usize, Failure>
where
    W: Writer<Failure>,
    for<'a> Strategy<Serializer<W, ArenaHandle<'a>, ()>, Failure>: Writer<Failure>,
{
    let mut serializer = Serializer::new(writer, arena.acquire(), ());
    serialize_using::<_, Failure>(frame, &mut serializer)?;
    Ok(serializer.pos())
}

/// A writer that only counts, up to [`MAX_ENCODED_LEN`].
struct ByteCounter(usize);

impl Positional for ByteCounter {
    fn pos(&self) -> usize {
        self.0
    }
}

impl Writer<Failure> for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match self.0.checked_add(bytes.len()) {
            Some(end) if end <= MAX_ENCODED_LEN => self.0 = end,
            _ => return Err(Failure),
        }
        Ok(())
    }
}

/// The bytes of a status response (§5.9).
pub const fn status_frame(driver_id: u32, status: i32, aborted: bool) -> [u8; RESPONSE_ROOT_LEN] {
    const STATUS_TAG: u8 = 1;
    let mut frame = [0; RESPONSE_ROOT_LEN];
    let [id, status] = [driver_id.to_le_bytes(), status.to_le_bytes()];
    frame[4] = aborted as u8;
    frame[8] = STATUS_TAG;
    let mut index = 0;
    while index < 4 {
        frame[index] = id[index];
        frame[12 + index] = status[index];
        index += 1;
    }
    frame
}

/// The bytes of the canonical abort: aborted, status −1 (§5.9, §8.3).
pub const fn abort_frame(driver_id: u32) -> [u8; RESPONSE_ROOT_LEN] {
    status_frame(driver_id, -1, true)
}
