//! User attention masks: which KV indices a row may attend to, one bit each.

use std::ops::Range;

use pie_wire::{NativeSlice, brle};

use crate::extent::Extent;
use crate::frame::{Frame, range};
use crate::plan::{Planner, Request, Segment};

/// What the rows of a request may attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Sight {
    /// Every KV index up to the row's own.
    #[default]
    Causal,
    /// What the request's mask admits, and nothing behind the row.
    Masked,
    /// What the request's mask admits; of some row that is KV of later rows, so one pass must store all of them.
    MaskedAhead,
}

/// Mask rows of a frame's masked requests.
#[derive(Debug, Default)]
pub(crate) struct MaskRows {
    /// Where each row's runs lie.
    rows: Vec<Range<usize>>,
    runs: Vec<u32>,
}

impl MaskRows {
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.runs.clear();
    }

    /// Copies the rows of request `index`; returns where they stand.
    pub(crate) fn add(&mut self, frame: &Frame<'_>, index: usize) -> Extent {
        let first = self.rows.len();
        for row in &frame.masks[range(frame.mask_indptr, index)] {
            let start = self.runs.len();
            self.runs.extend_from_slice(row.buffer.native());
            self.rows.push(start..self.runs.len());
        }
        Extent::new(first, self.rows.len())
    }

    fn runs(&self, row: usize) -> &[u32] {
        &self.runs[self.rows[row].clone()]
    }
}

/// Words of the mask of `rows` rows that end with a context's KV index `kv_end - 1`: each row has a bit for each index.
pub(crate) const fn attention_words(rows: usize, kv_end: usize) -> usize {
    rows.saturating_mul(kv_end.div_ceil(WORD_BITS))
}

/// How many of `rows` rows, the first of which has KV index `kv_start`, have a mask of `room` words at most.
pub(crate) fn rows_within(room: usize, kv_start: usize, rows: usize) -> usize {
    let (mut fitting, mut excess) = (0, rows + 1);
    while excess - fitting > 1 {
        let middle = fitting.midpoint(excess);
        if attention_words(middle, kv_start + middle) <= room {
            fitting = middle;
        } else {
            excess = middle;
        }
    }
    fitting
}

/// Which KV indices the rows of a masked pass may attend to.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMask<'p> {
    planner: &'p Planner,
    segments: &'p [Segment],
}

impl AttentionMask<'_> {
    /// `[requests]`: first word of each request of the pass, then the words of all.
    pub fn offsets(&self) -> impl Iterator<Item = usize> {
        let ends = self.segments.iter().scan(0, |end, segment| {
            let request = &self.planner.requests[segment.request()];
            let kv_end = segment.kv_start(request) + segment.len();
            *end += attention_words(segment.len(), kv_end);
            Some(*end)
        });
        std::iter::once(0).chain(ends)
    }

    /// Writes the mask row by row: bit `i` of a row's word `w` admits KV index `32 w + i`. A row has `ceil(KV length after
    /// the pass / 32)` words.
    ///
    /// # Panics
    /// When there are fewer words than the last of [`Self::offsets`] says.
    pub fn write(&self, words: &mut [i32]) {
        let mut rest = words;
        for &segment in self.segments {
            let request = &self.planner.requests[segment.request()];
            let kv_end = segment.kv_start(request) + segment.len();
            let (own, others) = rest.split_at_mut(attention_words(segment.len(), kv_end));
            self.planner.mask_rows.write(segment, request, own);
            rest = others;
        }
    }
}

impl MaskRows {
    /// Writes the rows of a segment. Draft rows are causal, and so are rows without runs.
    fn write(&self, segment: Segment, request: &Request, words: &mut [i32]) {
        let kv_start = segment.kv_start(request);
        let kv_end = kv_start + segment.len();
        let first_row = segment.start() - request.rows.start();
        words.fill(0);
        for (row, words) in words.chunks_mut(kv_end.div_ceil(WORD_BITS)).enumerate() {
            let mask = request.mask_rows.range().nth(first_row + row);
            let runs = mask.map_or(&[][..], |mask| self.runs(mask));
            if runs.is_empty() {
                set_bits(words, 0..(kv_start + row + 1) as u64);
            }
            for visible in brle::true_ranges(runs, kv_end as u64) {
                set_bits(words, visible);
            }
        }
    }
}

impl Planner {
    /// The attention mask of the last staged pass, of [`Limits::attention_words`](crate::Limits::attention_words) at most;
    /// `None` when its rows are causal.
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        let pass = self.stage.next_pass.checked_sub(1)?;
        let segments = &self.segments[self.passes.get(pass)?.clone()];
        let masked = self.requests[segments[0].request()].sight != Sight::Causal;
        masked.then_some(AttentionMask {
            planner: self,
            segments,
        })
    }
}

const WORD_BITS: usize = u32::BITS as usize;

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

/// Appends where the runs begin to allow ids below `limit` and where they end to, in turn: no range is empty, and none touches
/// the next.
pub(crate) fn push_edges(runs: &[u32], limit: u32, edges: &mut Vec<i32>) {
    let (first, limit) = (edges.len(), u64::from(limit));
    // A forbidding run at the end changes nothing.
    let runs = runs.as_chunks::<2>().0.as_flattened();
    // Usually each run ends at an edge.
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
        fn as_many_rows_as_fit(room in 0_usize..3000, kv_start in 0_usize..5000, rows in 0_usize..200) {
            let fits = |count: &usize| attention_words(*count, kv_start + count) <= room;
            let expected = (0..=rows).take_while(fits).last().unwrap_or(0);
            prop_assert_eq!(rows_within(room, kv_start, rows), expected);
        }

        /// Behind those of another mask, whatever that one ends with.
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
