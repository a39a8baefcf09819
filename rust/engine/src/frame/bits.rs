//! Masks as bits: converted once where several rows have the same, in buffers that are used again.

use std::ptr;

use pie_scheduler::is_shorter_as_bits;

use super::Step;
use crate::mask::{write_all_but, write_bits};

/// Makes the masks of one frame after the other.
#[derive(Debug)]
pub(super) struct BitMasks {
    vocab_size: u32,
    /// Words of a mask.
    words: usize,
    /// Buffers of frames before; no more than a frame had masks, and one to compare with.
    spare: Vec<Vec<u32>>,
}

/// The last row of a frame that has a mask of its own, and what that was made of.
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

    /// Takes the rows of a frame for their buffers.
    pub(super) fn recycle(&mut self, rows: impl Iterator<Item = Step>) {
        let masks = rows.map(|row| row.mask);
        self.spare.extend(masks.filter(|mask| !mask.is_empty()));
    }

    /// Puts a mask without the forbidden tokens into its row, which comes after `rows`; `last` is of these. An empty mask is
    /// one of all tokens. Does nothing and returns false where it takes less room as runs.
    pub(super) fn put<'a>(
        &mut self,
        mask: &'a [u32],
        forbidden: &'a [u32],
        rows: &[Step],
        last: &mut Option<Source<'a>>,
        row: &mut Option<Step>,
    ) -> bool {
        // Grammars in the same place, as within a string, often allow the same.
        if last.is_some_and(|last| is_same(last.mask, mask) && is_same(last.forbidden, forbidden)) {
            row.get_or_insert_default().shares_mask = true;
            return true;
        }
        // An empty one stands for all tokens, of which runs leave each forbidden one out.
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
            [] => write_all_but(&mut bits, forbidden, self.vocab_size),
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

/// Whether two arrays hold the same; they are not read where they are one.
fn is_same(one: &[u32], other: &[u32]) -> bool {
    ptr::eq(one, other) || one == other
}
