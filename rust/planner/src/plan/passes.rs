//! The passes of a frame.

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::adapter::PassAdapters;
use crate::extent::Extent;
use crate::frame::request::{Request, Segment};
use crate::limits::Limits;
use crate::mask::{Visibility, attention_words, rows_within};

/// The rows of a frame, cut into passes.
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

    /// Cuts the rows into passes of at most `chunk_tokens` tokens and `max_requests` requests, in the frame's order, so
    /// that a later request's writes always land last. A pass is masked or causal as a whole, its masks have no more than
    /// [`Limits::attention_words`], and it needs no more adapters than its `adapter_slots` can hold, if the engine has some.
    pub(crate) fn cut(
        &mut self,
        requests: &[Request],
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
            let mut rows = request.rows().range();
            while !rows.is_empty() {
                let needed = match request.visibility() {
                    Visibility::Causal | Visibility::Masked => 1,
                    Visibility::MaskedAhead => rows.len(),
                };
                let kv_start = || request.prefix() + rows.start - request.rows().start();
                let full = tokens + needed > chunk
                    || (request.visibility() != Visibility::Causal
                        && words + attention_words(needed, kv_start() + needed) > max_words)
                    || self.segments.len() - first == max_requests
                    || (adapters && !self.adapters.admits(request.adapter(), max_adapters));
                let mixed = masked != (request.visibility() != Visibility::Causal);
                if tokens > 0 && (full || mixed) {
                    self.ranges.push(first..self.segments.len());
                    (first, tokens, words) = (self.segments.len(), 0, 0);
                    self.adapters.start();
                }
                if adapters {
                    self.adapters.add(request.adapter());
                }
                masked = request.visibility() != Visibility::Causal;
                let mut len = rows.len().min(chunk - tokens);
                if masked {
                    len = rows_within(max_words - words, kv_start(), len).max(1);
                    words += attention_words(len, kv_start() + len);
                }
                let own = Extent::new(rows.start, rows.start + len);
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
