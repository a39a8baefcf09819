//! The packed custom attention mask of a pass.

use pie_wire::brle;

use crate::frame::request::{PlannedRequest, Segment};
use crate::mask::{MaskRows, WORD_BITS, attention_words, set_bits};

/// The custom attention mask of a pass.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMask<'p> {
    rows: &'p MaskRows,
    requests: &'p [PlannedRequest],
    segments: &'p [Segment],
}

impl<'p> AttentionMask<'p> {
    pub(crate) const fn new(
        rows: &'p MaskRows,
        requests: &'p [PlannedRequest],
        segments: &'p [Segment],
    ) -> Self {
        Self {
            rows,
            requests,
            segments,
        }
    }

    /// `[requests]`: first word of each request of the pass, then the words of all.
    pub fn offsets(&self) -> impl Iterator<Item = usize> {
        let ends = self.segments.iter().scan(0, |end, segment| {
            let request = &self.requests[segment.request()];
            let kv_end = segment.kv_start(request) + segment.len();
            *end += attention_words(segment.len(), kv_end);
            Some(*end)
        });
        std::iter::once(0).chain(ends)
    }

    /// Writes the packed mask: bit `i` of word `w` of a query token allows KV index `32 w + i`, with `ceil(KV length after the pass /
    /// 32)` words per token.
    ///
    /// # Panics
    /// When there are fewer words than the last of [`Self::offsets`] says.
    pub fn write(&self, words: &mut [i32]) {
        let mut rest = words;
        for &segment in self.segments {
            let request = &self.requests[segment.request()];
            let kv_end = segment.kv_start(request) + segment.len();
            let (own, others) = rest.split_at_mut(attention_words(segment.len(), kv_end));
            self.write_segment(segment, request, own);
            rest = others;
        }
    }

    /// Writes the rows of a segment. Drafts and rows without runs are causal.
    fn write_segment(&self, segment: Segment, request: &PlannedRequest, words: &mut [i32]) {
        let kv_start = segment.kv_start(request);
        let kv_end = kv_start + segment.len();
        let first_row = segment.start() - request.tokens().start();
        words.fill(0);
        for (row, words) in words.chunks_mut(kv_end.div_ceil(WORD_BITS)).enumerate() {
            let mask = request.mask_rows().nth(first_row + row);
            let runs = mask.map_or(&[][..], |mask| self.rows.runs(mask));
            if runs.is_empty() {
                set_bits(words, 0..(kv_start + row + 1) as u64);
            }
            for visible in brle::true_ranges(runs, kv_end as u64) {
                set_bits(words, visible);
            }
        }
    }
}
