//! Payloads: whatever is accepted can be read, owned and written again.

use pie_wire::{FAST_TOKENS_MAGIC, Reply, WireError};
use rkyv::util::AlignedVec;

use crate::{memory, walk};

/// Most bytes that refusing a payload may take.
const REFUSAL: usize = 1 << 10;

/// Alignment alone makes an encoding longer than another of the same values: at most 7 bytes per array.
const PADDING: usize = 7 * 40;

/// Bytes on each side of a payload that are not its own.
const AROUND: usize = 64;

/// A heap allocation of exactly these bytes, so that a sanitizer sees every read beyond them.
pub(crate) fn exact<const ALIGN: usize>(data: &[u8]) -> AlignedVec<ALIGN> {
    let mut bytes = AlignedVec::with_capacity(data.len());
    bytes.extend_from_slice(data);
    bytes
}

/// Reads every field; `None` when the payload is refused.
fn walk(kind: &str, bytes: &[u8]) -> Option<u64> {
    let (walked, peak) = memory::peak(|| walk::payload(kind, bytes));
    for around in [0, 0xFF] {
        let sum = walk::payload(kind, &surrounded(bytes, around)[AROUND..][..bytes.len()]);
        assert_eq!(sum.ok(), walked.as_ref().ok().copied(), "other bytes count");
    }
    match walked {
        Ok(sum) => {
            assert_eq!(peak, 0, "reading allocates nothing");
            Some(sum)
        }
        Err(error) => {
            let len = bytes.len();
            assert!(peak <= REFUSAL, "{peak} bytes to refuse {len}: {error}");
            None
        }
    }
}

/// The payload in the middle of other bytes.
fn surrounded(bytes: &[u8], around: u8) -> AlignedVec<8> {
    let mut all = AlignedVec::with_capacity(bytes.len() + 2 * AROUND);
    all.resize(AROUND, around);
    all.extend_from_slice(bytes);
    all.resize(bytes.len() + 2 * AROUND, around);
    all
}

/// Owns a payload in proportion to its size: an empty mask, the worst, takes 32 bytes for 16.
fn own<T>(decode: fn(&[u8]) -> Result<T, WireError>, bytes: &[u8]) -> T {
    let (owned, peak) = memory::peak(|| decode(bytes));
    assert!(
        peak <= 2 * bytes.len(),
        "{peak} bytes to own {}",
        bytes.len()
    );
    owned.expect("a valid payload can be owned")
}

/// Bytes of a request.
pub(crate) fn request(data: &[u8]) {
    let bytes = exact::<8>(data);
    let Some(sum) = walk("request", &bytes) else {
        return assert!(pie_wire::decode_request(&bytes).is_err());
    };
    let frame = own(pie_wire::decode_request, &bytes);
    let len = pie_wire::request_len(&frame).expect("no longer than the original");
    assert!(
        len <= bytes.len() + PADDING,
        "{len} bytes for {}",
        bytes.len()
    );
    let mut again = exact::<8>(&vec![0xEE; len]);
    assert_eq!(
        pie_wire::encode_request(&frame, &mut again).expect("the length is right"),
        len
    );
    assert_eq!(
        walk("request", &again),
        Some(sum),
        "the copy has the same values"
    );
    assert!(pie_wire::encode_request(&frame, &mut again[..len - 1]).is_err());
}

/// Bytes of a response, archive or fast reply.
pub(crate) fn response(data: &[u8]) {
    let bytes = exact::<4>(data);
    let Some(sum) = walk("response", &bytes) else {
        return;
    };
    let again = match pie_wire::decode_reply(&bytes).expect("it was walked") {
        Reply::Tokens(reply) => {
            let tokens: Vec<u32> = reply.iter().collect();
            let copied = (0..reply.len()).map(|request| reply.get(request));
            assert!(
                copied.eq(tokens.iter().copied().map(Some)) && reply.get(tokens.len()).is_none()
            );
            let mut again = exact::<4>(&vec![0xEE; pie_wire::fast_tokens_len(tokens.len())]);
            let len = pie_wire::encode_fast_tokens(reply.driver_id(), &tokens, &mut again);
            assert_eq!(len.expect("the length is right"), again.len());
            assert_eq!(again[..], bytes[..]);
            again
        }
        Reply::Frame(_) => archive(&bytes),
    };
    // The first bytes are the offsets of the tokens. In a batch's answer they start with 0; in any other archive they
    // may say "fast reply".
    if matches!(pie_wire::decode_reply(&bytes), Ok(Reply::Tokens(_)))
        || !again.starts_with(&FAST_TOKENS_MAGIC)
    {
        assert_eq!(
            walk("response", &again),
            Some(sum),
            "the copy has the same values"
        );
    }
}

/// Owns an archived response and writes it again.
fn archive(bytes: &[u8]) -> AlignedVec<4> {
    let frame = own(pie_wire::decode_response, bytes);
    let len = match &frame.payload {
        pie_wire::ResponsePayload::Forward(forward) => pie_wire::response_len(forward),
        pie_wire::ResponsePayload::Status(_) => pie_wire::RESPONSE_ROOT_LEN,
    };
    assert!(
        len <= bytes.len() + PADDING,
        "{len} bytes for {}",
        bytes.len()
    );
    let mut again = exact::<4>(&vec![0xEE; len]);
    let (written, peak) = memory::peak(|| pie_wire::encode_response(&frame, &mut again));
    assert_eq!((written.expect("the length is right"), peak), (len, 0));
    assert!(pie_wire::encode_response(&frame, &mut vec![0; len - 1]).is_err());
    again
}
