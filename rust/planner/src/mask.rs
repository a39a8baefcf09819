//! Custom attention masks, one bit per query token and KV index.

pub(crate) mod attention;
pub(crate) mod logit;

use std::ops::Range;

use pie_wire::{NativeSlice, brle};

use crate::frame::{Frame, range};
use crate::range32::Range32;

/// The attention mask of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum MaskMode {
    /// Causal attention.
    #[default]
    Causal,
    /// A custom mask within the causal mask.
    Custom,
    /// A custom mask in which some token attends to later ones, so one pass must hold the whole request.
    CustomLookahead,
}

/// Run-length encoded mask rows of the requests with custom masks.
#[derive(Debug, Default)]
pub(crate) struct MaskRows {
    /// Range of each row's runs.
    rows: Vec<Range<usize>>,
    runs: Vec<u32>,
}

impl MaskRows {
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.runs.clear();
    }

    /// Copies the mask rows of request `index`; returns their range.
    pub(crate) fn add(&mut self, frame: &Frame<'_>, index: usize) -> Range32 {
        let first = self.rows.len();
        for row in &frame.masks[range(frame.mask_indptr, index)] {
            let start = self.runs.len();
            self.runs.extend_from_slice(row.buffer.native());
            self.rows.push(start..self.runs.len());
        }
        Range32::new(first, self.rows.len())
    }

    /// The runs of a row: masked, visible, masked, … KV indices.
    pub(crate) fn runs(&self, row: usize) -> &[u32] {
        &self.runs[self.rows[row].clone()]
    }
}

/// Words of the mask of `rows` query tokens with KV length `kv_end`: `[rows, ceil(kv_end / 32)]`.
pub(crate) const fn attention_words(rows: usize, kv_end: usize) -> usize {
    rows.saturating_mul(kv_end.div_ceil(WORD_BITS))
}

/// How many of `rows` query tokens, the first with KV index `kv_start`, have a mask of at most `limit` words.
pub(crate) fn rows_within(limit: usize, kv_start: usize, rows: usize) -> usize {
    let (mut fitting, mut excess) = (0, rows + 1);
    while excess - fitting > 1 {
        let middle = fitting.midpoint(excess);
        if attention_words(middle, kv_start + middle) <= limit {
            fitting = middle;
        } else {
            excess = middle;
        }
    }
    fitting
}

/// Bits of a word of a mask.
pub(crate) const WORD_BITS: usize = u32::BITS as usize;

/// Sets a range of bits that is not empty; bit `i` of word `w` is bit `32 w + i`.
pub(crate) fn set_bits(words: &mut [i32], bits: Range<u64>) {
    let (start, last) = (bits.start as usize, bits.end as usize - 1);
    let head = u32::MAX << (start % WORD_BITS);
    let tail = u32::MAX >> (WORD_BITS - 1 - last % WORD_BITS);
    let (first_word, last_word) = (start / WORD_BITS, last / WORD_BITS);
    if first_word == last_word {
        words[first_word] |= (head & tail).cast_signed();
        return;
    }
    words[first_word] |= head.cast_signed();
    words[first_word + 1..last_word].fill(-1);
    words[last_word] |= tail.cast_signed();
}

/// Appends the edges of allowed ranges below `limit`: start, end, start, end, …; ranges are not empty and do not touch.
pub(crate) fn push_edges(runs: &[u32], limit: u32, edges: &mut Vec<i32>) {
    let (first, limit) = (edges.len(), u64::from(limit));
    // A masked run at the end has no effect.
    let runs = runs.as_chunks::<2>().0.as_flattened();
    // Fast path: each run ends at an edge.
    let (mut end, mut empty) = (0, 0);
    edges.extend(runs.iter().map(|&run| {
        end += u64::from(run);
        empty += u32::from(run == 0);
        end as i32
    }));
    let first_empty = u32::from(runs.first() == Some(&0));
    if empty > first_empty || end > limit {
        edges.truncate(first);
        let ranges = brle::true_ranges(runs, limit);
        edges.extend(ranges.flat_map(|allowed| [allowed.start as i32, allowed.end as i32]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// As counted row by row.
        #[test]
        fn as_many_rows_as_fit(limit in 0_usize..3000, kv_start in 0_usize..5000, rows in 0_usize..200) {
            let fits = |count: &usize| attention_words(*count, kv_start + count) <= limit;
            let expected = (0..=rows).take_while(fits).last().unwrap_or(0);
            prop_assert_eq!(rows_within(limit, kv_start, rows), expected);
        }

        /// After those of another mask, whatever that one ends with.
        #[test]
        fn edges_are_those_of_the_true_ranges(
            runs in proptest::collection::vec(prop_oneof![1 => Just(0), 4 => 1_u32..9, 1 => 9_u32..=u32::MAX], 0..12),
            limit in 1_u32..60,
            before in 0_i32..60,
        ) {
            let mut edges = vec![before];
            push_edges(&runs, limit, &mut edges);
            let mut expected = vec![before];
            for allowed in brle::true_ranges(&runs, u64::from(limit)) {
                expected.extend([allowed.start as i32, allowed.end as i32]);
            }
            prop_assert_eq!(edges, expected);
        }
    }
}
