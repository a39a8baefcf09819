//! Token bitmasks of a frame: rows with equal masks share one.

use std::ptr;

use pie_scheduler::is_shorter_as_bits;

use super::ExtensionRow;
use crate::mask::{write_bits, write_bits_except};

/// Writes the bitmasks of one frame after the other, in reused buffers.
#[derive(Debug)]
pub(super) struct BitMasks {
    vocab_size: u32,
    /// Words of a mask.
    words: usize,
    /// Buffers of previous frames.
    spare: Vec<Vec<u32>>,
}

/// The last row with a mask of its own, and what that mask was made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    mask: &'a [u32],
    forbidden: &'a [u32],
    row: usize,
}

impl BitMasks {
    pub(super) const fn new(vocab_size: u32) -> Self {
        Self {
            vocab_size,
            words: vocab_size.div_ceil(32) as usize,
            spare: Vec::new(),
        }
    }

    /// Keeps the buffers of a frame's rows for the next frame.
    pub(super) fn recycle(&mut self, rows: impl Iterator<Item = ExtensionRow>) {
        let masks = rows.map(|row| row.mask);
        self.spare.extend(masks.filter(|mask| !mask.is_empty()));
    }

    /// Writes `mask` without the `forbidden` tokens into `row`, which comes after `rows`, or has it share the mask of `last`.
    /// An empty mask allows all tokens. Returns false, with nothing done, where run lengths are shorter than bits.
    pub(super) fn put<'a>(
        &mut self,
        mask: &'a [u32],
        forbidden: &'a [u32],
        rows: &[ExtensionRow],
        last: &mut Option<Source<'a>>,
        row: &mut Option<ExtensionRow>,
    ) -> bool {
        // Sequences in the same grammar state, as within a JSON string, have equal masks.
        if last.is_some_and(|last| is_same(last.mask, mask) && is_same(last.forbidden, forbidden)) {
            row.get_or_insert_default().shares_mask = true;
            return true;
        }
        // Two run lengths for each forbidden token.
        let are_shorter = match mask {
            [] => 2 * forbidden.len() > self.words,
            _ => is_shorter_as_bits(mask, self.words),
        };
        if !are_shorter {
            return false;
        }
        let row = row.get_or_insert_default();
        let mut bits = self.spare.pop().unwrap_or_default();
        match mask {
            [] => write_bits_except(&mut bits, forbidden, self.vocab_size),
            _ => write_bits(&mut bits, mask, forbidden, self.words),
        }
        row.shares_mask = last.is_some_and(|last| rows[last.row].mask == bits);
        if row.shares_mask {
            self.spare.push(bits);
        } else {
            row.mask = bits;
            *last = Some(Source {
                mask,
                forbidden,
                row: rows.len(),
            });
        }
        true
    }
}

/// Whether two arrays are equal; the same array is not read.
fn is_same(one: &[u32], other: &[u32]) -> bool {
    ptr::eq(one, other) || one == other
}
