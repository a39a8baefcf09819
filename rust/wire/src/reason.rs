//! Why a request was refused, in words, in front of the status answer.
//!
//! The root of an archive is at its end, so a client that does not know of reasons reads the status alone.

/// The first 8 bytes of an answer with a reason.
pub const REASON_MAGIC: [u8; 8] = *b"PIEXTRE1";
/// Bytes of the longest reason; a longer one is cut.
pub const MAX_REASON: usize = 4096;

/// Magic number, length of the text, and padding.
const HEADER: usize = 16;
/// What the archive after the text is aligned to.
const ALIGN: usize = 16;

/// A status answer with a reason in front; the answer alone for an empty one.
///
/// `answer` is what [`status_frame`](crate::status_frame) gives.
pub fn with_reason(answer: &[u8], reason: &str) -> Vec<u8> {
    let reason = &reason[..reason.floor_char_boundary(MAX_REASON)];
    let mut bytes = Vec::with_capacity(HEADER + reason.len() + ALIGN + answer.len());
    if let Ok(length @ 1..) = u32::try_from(reason.len()) {
        bytes.extend(REASON_MAGIC);
        bytes.extend(length.to_le_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend(reason.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    }
    bytes.extend(answer);
    bytes
}

/// The reason in an answer; none where it has none, or not all of it.
pub fn reason_of(answer: &[u8]) -> Option<&str> {
    let rest = answer.strip_prefix(&REASON_MAGIC)?;
    let (length, _) = rest.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let text = answer.get(HEADER..)?.get(..length)?;
    std::str::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rkyv::util::AlignedVec;

    use super::*;
    use crate::{Reply, decode_reply, status_frame};

    /// Aligned, as a slot of the ring is.
    fn status_in(bytes: &[u8]) -> i32 {
        let mut aligned = AlignedVec::<16>::new();
        aligned.extend_from_slice(bytes);
        let Ok(Reply::Frame(frame)) = decode_reply(&aligned) else {
            panic!("no archive");
        };
        match &frame.payload {
            crate::ArchivedResponsePayload::Status(status) => status.status.to_native(),
            crate::ArchivedResponsePayload::Forward(_) => panic!("no status"),
        }
    }

    proptest! {
        #[test]
        fn a_client_that_knows_no_reasons_reads_the_status(reason in ".{0,200}", status in any::<i32>()) {
            let answer = with_reason(&status_frame(7, status, false), &reason);
            prop_assert_eq!(status_in(&answer), status);
            prop_assert_eq!(reason_of(&answer).unwrap_or(""), reason);
        }

        #[test]
        fn any_bytes_are_read_or_not(bytes in prop::collection::vec(any::<u8>(), 0..64), magic in any::<bool>()) {
            let mut answer = if magic { REASON_MAGIC.to_vec() } else { Vec::new() };
            answer.extend(bytes);
            let _ = reason_of(&answer);
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let answer = with_reason(&status_frame(0, 5, false), &"ä€".repeat(3000));
        let reason = reason_of(&answer).unwrap();
        assert!((MAX_REASON - 3..=MAX_REASON).contains(&reason.len()));
        assert_eq!(status_in(&answer), 5);
        assert_eq!(reason_of(&status_frame(0, 5, false)), None);
    }
}
