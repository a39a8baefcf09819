//! Logit masks of a frame: the tokens that a slot may sample.

use pie_wire::{ArchivedBrle, NativeSlice, WordSlice};

use crate::mask::{push_edges, set_bits};
use crate::range32::Range32;

/// Number of edges of a bit mask.
const BITS: i32 = -1;

/// A logit mask.
#[derive(Debug, Clone, Copy)]
enum Mask {
    /// Range of [`LogitMasks::edges`].
    Edges(Range32),
    /// Range of [`LogitMasks::bits`].
    Bits(Range32),
}

/// The logit masks of a frame; equal consecutive masks are shared.
#[derive(Debug, Default)]
pub(crate) struct LogitMasks {
    masks: Vec<Mask>,
    /// Edges of allowed ranges: start, end, start, end, …
    edges: Vec<i32>,
    /// Bit masks.
    bits: Vec<i32>,
    /// Index in the frame of the last mask, if it is run-length encoded.
    last_runs: usize,
    /// Address and index of the last bit mask.
    last_bits: Option<(usize, Option<usize>)>,
}

impl LogitMasks {
    pub(crate) fn clear(&mut self) {
        self.masks.clear();
        self.edges.clear();
        self.bits.clear();
        self.last_bits = None;
    }

    /// Number of masks.
    pub(crate) const fn len(&self) -> usize {
        self.masks.len()
    }

    /// Adds mask `index` of the frame; returns its index here, `None` when it allows no token.
    pub(crate) fn add_runs(
        &mut self,
        masks: &[ArchivedBrle],
        index: usize,
        vocab_size: u32,
    ) -> Option<usize> {
        let runs = masks[index].buffer.native();
        if let Some((last, Mask::Edges(_))) = self.last()
            && *masks[self.last_runs].buffer.native() == *runs
        {
            return Some(last);
        }
        let first = self.edges.len();
        push_edges(runs, vocab_size, &mut self.edges);
        let edges = Range32::new(first, self.edges.len());
        if edges.is_empty() {
            return None;
        }
        self.masks.push(Mask::Edges(edges));
        self.last_runs = index;
        Some(self.masks.len() - 1)
    }

    /// Adds a bit mask; returns its index, `None` when it allows no token.
    pub(crate) fn add_bits(&mut self, words: WordSlice<'_>, vocab_size: u32) -> Option<usize> {
        let address = words.address();
        // Requests that share a mask have the same address.
        if let Some((of, mask)) = self.last_bits
            && of == address
        {
            return mask;
        }
        let mask = self.plan_bits(words, vocab_size);
        self.last_bits = Some((address, mask));
        mask
    }

    fn plan_bits(&mut self, words: WordSlice<'_>, vocab_size: u32) -> Option<usize> {
        // Bits beyond the vocabulary are ignored.
        let tail = u32::MAX >> ((32 - vocab_size % 32) % 32);
        let last_word = words.len().saturating_sub(1);
        let first = self.bits.len();
        self.bits.extend(words.iter().map(u32::cast_signed));
        let last = self.last();
        let (earlier, own) = self.bits.split_at_mut(first);
        own[last_word] &= tail.cast_signed();
        let same = match last {
            Some((last, Mask::Bits(bits))) if earlier[bits.range()] == *own => Some(last),
            _ => None,
        };
        if same.is_some() || own.iter().all(|&word| word == 0) {
            self.bits.truncate(first);
            return same;
        }
        self.masks
            .push(Mask::Bits(Range32::new(first, self.bits.len())));
        Some(self.masks.len() - 1)
    }

    /// Writes a mask into [`mask_words`](crate::Limits::mask_words) words: its edges, or bits if these are smaller.
    /// Returns the words in use, and the number of edges for [`FieldId::SlotMasks`](crate::FieldId::SlotMasks).
    pub(crate) fn put(&self, mask: usize, words: &mut [i32]) -> (usize, i32) {
        let edges = match self.masks[mask] {
            Mask::Edges(edges) => &self.edges[edges.range()],
            Mask::Bits(bits) => {
                words.copy_from_slice(&self.bits[bits.range()]);
                return (words.len(), BITS);
            }
        };
        if let Some(words) = words.get_mut(..edges.len()) {
            words.copy_from_slice(edges);
            return (edges.len(), edges.len() as i32);
        }
        words.fill(0);
        for allowed in edges.chunks_exact(2) {
            set_bits(words, allowed[0] as u64..allowed[1] as u64);
        }
        (words.len(), BITS)
    }

    fn last(&self) -> Option<(usize, Mask)> {
        let last = self.masks.len().checked_sub(1)?;
        Some((last, self.masks[last]))
    }
}
