//! Chunked prefill: the passes of a frame.

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::adapter::PassAdapters;
use crate::frame::request::{PlannedRequest, Segment};
use crate::limits::Limits;
use crate::mask::{MaskMode, attention_words, rows_within};
use crate::range32::Range32;

/// The query tokens of a frame, split into passes.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    segments: Vec<Segment>,
    /// Segments of each pass.
    ranges: Vec<Range<usize>>,
    adapters: PassAdapters,
}

impl Passes {
    /// Number of passes.
    pub(crate) const fn len(&self) -> usize {
        self.ranges.len()
    }

    /// The segments of all passes.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The segments of one pass; `None` when there are fewer passes.
    pub(crate) fn get(&self, pass: usize) -> Option<&[Segment]> {
        Some(&self.segments[self.ranges.get(pass)?.clone()])
    }

    /// The segments from a pass on.
    pub(crate) fn from(&self, pass: usize) -> &[Segment] {
        self.ranges
            .get(pass)
            .map_or(&[], |pass| &self.segments[pass.start..])
    }

    /// Splits the tokens into passes of at most `chunk_tokens` tokens and `max_requests` requests, in the frame's order, so that
    /// a later request's KV writes come last. A pass is causal or masked as a whole, its masks have at most
    /// [`Limits::attention_words`] words, and it has at most `adapter_slots` distinct adapters.
    pub(crate) fn cut(
        &mut self,
        requests: &[PlannedRequest],
        limits: &Limits,
        adapter_slots: Option<NonZeroUsize>,
    ) {
        self.segments.clear();
        self.ranges.clear();
        let (chunk, max_requests) = (limits.chunk_tokens as usize, limits.max_requests as usize);
        let max_words = limits.attention_words();
        let (mut first, mut tokens, mut masked, mut words) = (0, 0, false, 0);
        self.adapters.start();
        let (adapters, max_adapters) = match adapter_slots {
            Some(slots) => (true, slots.get()),
            None => (false, 0),
        };
        for (index, request) in requests.iter().enumerate() {
            let mut rows = request.tokens().range();
            while !rows.is_empty() {
                let needed = match request.mask_mode() {
                    MaskMode::Causal | MaskMode::Custom => 1,
                    MaskMode::CustomLookahead => rows.len(),
                };
                let kv_start = || request.prefix() + rows.start - request.tokens().start();
                let full = tokens + needed > chunk
                    || (request.mask_mode() != MaskMode::Causal
                        && words + attention_words(needed, kv_start() + needed) > max_words)
                    || self.segments.len() - first == max_requests
                    || (adapters && !self.adapters.admits(request.adapter(), max_adapters));
                let mixed = masked != (request.mask_mode() != MaskMode::Causal);
                if tokens > 0 && (full || mixed) {
                    self.ranges.push(first..self.segments.len());
                    (first, tokens, words) = (self.segments.len(), 0, 0);
                    self.adapters.start();
                }
                if adapters {
                    self.adapters.add(request.adapter());
                }
                masked = request.mask_mode() != MaskMode::Causal;
                let mut len = rows.len().min(chunk - tokens);
                if masked {
                    len = rows_within(max_words - words, kv_start(), len).max(1);
                    words += attention_words(len, kv_start() + len);
                }
                let own = Range32::new(rows.start, rows.start + len);
                self.segments.push(Segment::new(index, own));
                tokens += len;
                rows.start += len;
            }
        }
        if first < self.segments.len() {
            self.ranges.push(first..self.segments.len());
        }
    }
}
