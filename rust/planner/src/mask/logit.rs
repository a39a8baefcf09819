//! Logit masks of a frame: which tokens a slot may draw.

use pie_wire::{ArchivedBrle, NativeSlice, Words};

use crate::extent::Extent;
use crate::mask::{push_edges, set_bits};

/// Edges of a mask whose bits are staged.
const BITS: i32 = -1;

/// Where a logit mask lies.
#[derive(Debug, Clone, Copy)]
enum Mask {
    /// Its edges in [`LogitMasks::edges`].
    Edges(Extent),
    /// Its words in [`LogitMasks::bits`].
    Bits(Extent),
}

/// The logit masks of a frame. Slots whose masks are the same share one.
#[derive(Debug, Default)]
pub(crate) struct LogitMasks {
    masks: Vec<Mask>,
    /// Where a mask begins to allow tokens, and where it ends to, in turn.
    edges: Vec<i32>,
    /// Masks that came as bits.
    bits: Vec<i32>,
    /// Which of the frame's masks the last one of `masks` is, if it came as runs.
    last_runs: usize,
    /// Where the words of the last mask that came as bits lie, and its number.
    last_bits: Option<(usize, Option<usize>)>,
}

impl LogitMasks {
    pub(crate) fn clear(&mut self) {
        self.masks.clear();
        self.edges.clear();
        self.bits.clear();
        self.last_bits = None;
    }

    /// How many there are.
    pub(crate) const fn len(&self) -> usize {
        self.masks.len()
    }

    /// Plans mask number `index` of a frame; returns its number here, `None` when it forbids everything.
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
        let edges = Extent::new(first, self.edges.len());
        if edges.is_empty() {
            return None;
        }
        self.masks.push(Mask::Edges(edges));
        self.last_runs = index;
        Some(self.masks.len() - 1)
    }

    /// Plans a mask of a bit for each token; returns its number, `None` when it forbids everything.
    pub(crate) fn add_bits(&mut self, words: Words<'_>, vocab_size: u32) -> Option<usize> {
        let address = words.address();
        // Requests that share a mask have the very words.
        if let Some((of, mask)) = self.last_bits
            && of == address
        {
            return mask;
        }
        let mask = self.plan_bits(words, vocab_size);
        self.last_bits = Some((address, mask));
        mask
    }

    fn plan_bits(&mut self, words: Words<'_>, vocab_size: u32) -> Option<usize> {
        // Bits after the vocabulary allow nothing.
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
            .push(Mask::Bits(Extent::new(first, self.bits.len())));
        Some(self.masks.len() - 1)
    }

    /// Writes a mask into [`mask_words`](crate::Limits::mask_words) words: its edges, or its bits where they take less room.
    /// Returns the words in use and what [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says of its edges.
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
