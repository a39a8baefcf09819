//! Why requests of a frame failed, in words, after the answer.

use super::{ExtensionError, WORD, word};
use crate::error::WireError;

/// The last 8 bytes of an answer with failures.
pub const FAILURES_MAGIC: [u8; 8] = *b"PIEXTRF1";
/// Bytes of the longest text; a longer one is cut.
pub const MAX_FAILURE: usize = 1024;

/// Words at the end: words before it, magic number.
const TRAILER: usize = 3;

/// The failures of an answer: requests and texts.
#[derive(Debug, Clone, Default)]
pub struct Failures<'a>(&'a [[u8; WORD]]);

impl<'a> Iterator for Failures<'a> {
    type Item = (u32, &'a str);

    fn next(&mut self) -> Option<(u32, &'a str)> {
        let (head, rest) = self.0.split_at_checked(2)?;
        let (request, bytes) = (word(head, 0), word(head, 1) as usize);
        let (text, rest) = rest.split_at_checked(bytes.div_ceil(WORD))?;
        self.0 = rest;
        let text = &text.as_flattened()[..bytes];
        Some((request, std::str::from_utf8(text).unwrap_or("it failed")))
    }
}

/// Appends the failures of requests to an answer of `len` bytes at the start of `buffer`, as many as fit; returns the
/// length of both. Without any nothing is written.
///
/// # Errors
/// [`WireError::BufferTooSmall`] for an answer longer than the buffer.
pub fn append_failures<'a>(
    failures: impl IntoIterator<Item = (u32, &'a str)>,
    buffer: &mut [u8],
    len: usize,
) -> Result<usize, WireError> {
    let capacity = buffer.len();
    let too_small = WireError::BufferTooSmall {
        needed: len,
        capacity,
    };
    let free = buffer.get_mut(len..).ok_or(too_small)?;
    let mut used = 0;
    for (request, text) in failures {
        let text = &text[..text.floor_char_boundary(MAX_FAILURE)];
        let end = used + 2 * WORD + text.len().next_multiple_of(WORD);
        if end + WORD * TRAILER > free.len() {
            break;
        }
        free[used..end].fill(0);
        free[used..][..WORD].copy_from_slice(&request.to_le_bytes());
        free[used + WORD..][..WORD].copy_from_slice(&(text.len() as u32).to_le_bytes());
        free[used + 2 * WORD..][..text.len()].copy_from_slice(text.as_bytes());
        used = end;
    }
    if used == 0 {
        return Ok(len);
    }
    let words = (used / WORD) as u32;
    free[used..][..WORD].copy_from_slice(&words.to_le_bytes());
    free[used + WORD..][..FAILURES_MAGIC.len()].copy_from_slice(&FAILURES_MAGIC);
    Ok(len + used + WORD * TRAILER)
}

/// Splits an answer into the part for [`split_response`](super::split_response) and its failures.
///
/// # Errors
/// [`ExtensionError::Length`] where it announces more than it has.
pub fn split_failures(bytes: &[u8]) -> Result<(&[u8], Failures<'_>), ExtensionError> {
    let Some(rest) = bytes.strip_suffix(&FAILURES_MAGIC) else {
        return Ok((bytes, Failures::default()));
    };
    let length = |words: u32| ExtensionError::Length {
        rows: 0,
        words,
        needed: WORD as u64 * (u64::from(words) + TRAILER as u64),
        len: bytes.len(),
    };
    let Some((rest, words)) = rest.split_last_chunk::<WORD>() else {
        return Err(length(0));
    };
    let words = u32::from_le_bytes(*words);
    let start = (words as usize)
        .checked_mul(WORD)
        .and_then(|taken| rest.len().checked_sub(taken));
    let (answer, failures) = rest.split_at(start.ok_or_else(|| length(words))?);
    Ok((answer, Failures(failures.as_chunks().0)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_appended_is_read(texts in prop::collection::vec(("[a-z\u{e4}]{0,20}", any::<u32>()), 0..5), len in 0_usize..40) {
            let mut buffer = vec![7; 1024];
            let given = || texts.iter().map(|(text, request)| (*request, text.as_str()));
            let end = append_failures(given(), &mut buffer, len).unwrap();
            let (answer, found) = split_failures(&buffer[..end]).unwrap();
            prop_assert_eq!(answer, &vec![7; len][..]);
            prop_assert!(found.eq(given()));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), magic in any::<bool>()) {
            let mut answer = bytes;
            if magic {
                answer.extend(FAILURES_MAGIC);
            }
            if let Ok((_, failures)) = split_failures(&answer) {
                let _ = failures.count();
            }
        }
    }

    #[test]
    fn texts_are_cut_and_left_out_where_there_is_no_room() {
        let mut buffer = vec![0; 2200];
        let long = "\u{e4}\u{20ac}".repeat(1000);
        let end = append_failures([(1, &*long), (2, &*long), (3, &*long)], &mut buffer, 8).unwrap();
        let (_, found) = split_failures(&buffer[..end]).unwrap();
        let found: Vec<_> = found.collect();
        assert_eq!(found.len(), 2);
        assert!((MAX_FAILURE - 3..=MAX_FAILURE).contains(&found[0].1.len()));
        assert!(append_failures([(1, "a")], &mut buffer[..4], 8).is_err());
    }
}
