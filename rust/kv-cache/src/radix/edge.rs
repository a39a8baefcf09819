//! The tokens and page ids of a node: a range of a buffer that nodes share.

use std::sync::Arc;

use prefetch_index::prefetch_index;

use crate::radix::planes::{High, Planes};

/// Words of a cache line.
const LINE: usize = 16;
/// Cache lines that are prefetched of the low plane; half as many of the high plane.
const LOW_LINES: usize = 10;
/// Of fewer tokens one line each.
const SHORT: usize = 64;
/// Position of the width in `shape`.
const WIDTH_SHIFT: u32 = 30;

/// Pages of a buffer, or a single page of one token without a buffer. A buffer has page ids, then the lower 16 bits of all
/// tokens, then their upper bits: planes that are compared by vector operations; tokens below 2²⁴ take 3 bytes.
#[derive(Debug, Clone)]
pub(crate) struct Edge {
    words: Option<Arc<[u32]>>,
    /// The buffer's `capacity | width`, here so that a prefetch need not read the buffer.
    shape: u32,
    /// First page; without a buffer the token.
    start: u32,
    /// Number of pages; without a buffer the page id, or [`NO_PAGE`] if empty.
    len: u32,
}

/// Marks an empty edge.
const NO_PAGE: u32 = u32::MAX;

impl Default for Edge {
    fn default() -> Self {
        Self {
            words: None,
            shape: 0,
            start: 0,
            len: NO_PAGE,
        }
    }
}

impl Edge {
    /// An edge with its own buffer.
    ///
    /// `tokens` fill `pages`.
    pub(crate) fn new(tokens: &[u32], pages: &[u32]) -> Self {
        if let (&[token], &[page]) = (tokens, pages)
            && page != NO_PAGE
        {
            return Self {
                words: None,
                shape: 0,
                start: token,
                len: page,
            };
        }
        let (len, high) = (pages.len(), High::of(tokens));
        let (low, above) = high.words(tokens.len());
        let mut words: Arc<[u32]> = std::iter::repeat_n(0, len + low + above).collect();
        // No one else has it yet.
        if let Some(words) = Arc::get_mut(&mut words) {
            let (ids, planes) = words.split_at_mut(len);
            ids.copy_from_slice(pages);
            high.write(tokens, planes);
        }
        Self {
            words: Some(words),
            shape: len as u32 | (high as u32) << WIDTH_SHIFT,
            start: 0,
            len: len as u32,
        }
    }

    /// Number of pages.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self.words {
            Some(_) => self.len as usize,
            None => usize::from(self.len != NO_PAGE),
        }
    }

    /// Ids of the pages.
    #[inline]
    pub(crate) fn pages(&self) -> &[u32] {
        match &self.words {
            Some(words) => &words[self.start as usize..][..self.len as usize],
            None => &std::slice::from_ref(&self.len)[..self.len()],
        }
    }

    /// The token of an edge without a buffer.
    #[inline]
    fn single(&self) -> Option<&[u32]> {
        let single = std::slice::from_ref(&self.start);
        self.words.is_none().then(|| &single[..self.len()])
    }

    /// Prefetches the first page ids, and as much of both planes as most turns of a conversation take.
    #[inline]
    pub(crate) fn prefetch(&self, size: usize) {
        let Some(words) = &self.words else {
            return;
        };
        let (capacity, start) = (self.capacity(), self.start as usize);
        let low = capacity + start * size / 2;
        let high = capacity + (capacity * size).div_ceil(2) + start * size / 4;
        prefetch_index(words, start);
        if self.len as usize * size < SHORT {
            prefetch_index(words, low);
            prefetch_index(words, high);
            return;
        }
        // A fixed count: a mispredicted loop end costs more than superfluous lines.
        for line in 0..LOW_LINES {
            prefetch_index(words, low + line * LINE);
        }
        for line in 0..LOW_LINES / 2 {
            prefetch_index(words, high + line * LINE);
        }
    }

    /// Prefetches the page ids.
    #[inline]
    pub(crate) fn prefetch_pages(&self) {
        if let Some(words) = &self.words {
            prefetch_index(words, self.start as usize);
        }
    }

    /// Leading tokens that equal `tokens`; `size` tokens are a page.
    #[inline]
    pub(crate) fn common_prefix(&self, size: usize, tokens: &[u32]) -> usize {
        if let Some(single) = self.single() {
            return usize::from(!single.is_empty() && tokens.first() == single.first());
        }
        let count = tokens.len().min(self.len() * size);
        let tokens = &tokens[..count];
        self.planes(size, count).common(tokens)
    }

    /// Appends the first `count` tokens to `tokens`.
    pub(crate) fn tokens(&self, size: usize, count: usize, tokens: &mut Vec<u32>) {
        if let Some(single) = self.single() {
            return tokens.extend_from_slice(&single[..count]);
        }
        self.planes(size, count).append_to(tokens);
    }

    /// The last token.
    pub(crate) fn last_token(&self, size: usize) -> u32 {
        if self.words.is_none() {
            return self.start;
        }
        let mut tail = self.clone();
        tail.start += tail.len - 1;
        tail.len = 1;
        let mut page = Vec::with_capacity(size);
        tail.tokens(size, size, &mut page);
        page[size - 1]
    }

    /// Splits off the first `at` pages, without a copy.
    pub(crate) fn split(&mut self, at: usize) -> Self {
        if self.words.is_none() {
            // There is nothing in between.
            return if at == 0 {
                Self::default()
            } else {
                std::mem::take(self)
            };
        }
        let upper = Self {
            words: self.words.clone(),
            shape: self.shape,
            start: self.start,
            len: at as u32,
        };
        self.start += at as u32;
        self.len -= at as u32;
        upper
    }

    /// Prepends `upper`, if it is the range right before this one.
    pub(crate) fn join(&mut self, upper: &Self) -> bool {
        let fits = self.shares(upper) && upper.start + upper.len == self.start;
        if fits {
            self.start = upper.start;
            self.len += upper.len;
        }
        fits
    }

    /// Whether both are ranges of one buffer.
    pub(crate) fn shares(&self, other: &Self) -> bool {
        matches!((&self.words, &other.words), (Some(own), Some(others)) if Arc::ptr_eq(own, others))
    }

    /// Whether no other edge is a range of this buffer.
    pub(crate) fn is_only(&self) -> bool {
        self.words
            .as_ref()
            .is_none_or(|words| Arc::strong_count(words) == 1)
    }

    /// Heap bytes of the buffer.
    pub(crate) fn bytes(&self) -> usize {
        // Two counts precede the words.
        self.words
            .as_ref()
            .map_or(0, |words| size_of_val(&**words) + 2 * size_of::<usize>())
    }

    /// End of this range within the buffer, and capacity, in pages.
    pub(crate) fn reach(&self) -> (usize, usize) {
        ((self.start + self.len) as usize, self.capacity())
    }

    /// First page within the buffer.
    pub(crate) fn start(&self) -> usize {
        self.words.as_ref().map_or(0, |_| self.start as usize)
    }

    /// The pages of the buffer up to `end`.
    pub(crate) fn head(&self, end: usize) -> Self {
        Self {
            words: self.words.clone(),
            shape: self.shape,
            start: 0,
            len: end as u32,
        }
    }

    /// The same range of another buffer.
    pub(crate) fn moved_to(&self, other: &Self) -> Self {
        match &other.words {
            Some(words) => Self {
                words: Some(Arc::clone(words)),
                shape: other.shape,
                ..*self
            },
            // Its one page is all there is.
            None => other.clone(),
        }
    }

    /// Replaces the page ids: in place, if only this edge uses the whole buffer.
    ///
    /// Returns the old edge, if a new buffer was made.
    pub(crate) fn set_pages(&mut self, size: usize, pages: &[u32]) -> Option<Self> {
        let (start, len) = (self.start as usize, self.len());
        if len == self.capacity()
            && let Some(words) = self.words.as_mut().and_then(Arc::get_mut)
        {
            words[start..][..len].copy_from_slice(pages);
            return None;
        }
        let mut tokens = Vec::with_capacity(len * size);
        self.tokens(size, len * size, &mut tokens);
        Some(std::mem::replace(self, Self::new(&tokens, pages)))
    }

    #[inline]
    fn words(&self) -> &[u32] {
        self.words.as_deref().unwrap_or_default()
    }

    #[inline]
    fn capacity(&self) -> usize {
        (self.shape & ((1 << WIDTH_SHIFT) - 1)) as usize
    }

    /// The first `count` tokens.
    #[inline]
    fn planes(&self, size: usize, count: usize) -> Planes<'_> {
        let (capacity, start) = (self.capacity(), self.start as usize * size);
        let words = self.words();
        let (low, above) = words[capacity..].split_at((capacity * size).div_ceil(2));
        Planes::new(low, above, self.shape >> WIDTH_SHIFT, start, count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Edge;

    fn token() -> impl Strategy<Value = u32> {
        prop_oneof![0_u32..4, 0_u32..70_000, 0_u32..1 << 25, any::<u32>()]
    }

    #[test]
    fn a_page_of_one_token_has_no_buffer() {
        for (token, page, bytes) in [(7, 9, 0), (u32::MAX, 0, 0), (3, u32::MAX, 24)] {
            let mut edge = Edge::new(&[token], &[page]);
            assert_eq!(
                (edge.len(), edge.pages(), edge.bytes()),
                (1, &[page][..], bytes)
            );
            assert_eq!(
                [&[token, 1][..], &[token ^ 1], &[]].map(|text| edge.common_prefix(1, text)),
                [1, 0, 0]
            );
            assert_eq!(edge.last_token(1), token);
            let mut tokens = Vec::new();
            edge.tokens(1, 1, &mut tokens);
            assert_eq!(tokens, [token]);
            edge.set_pages(1, &[5]);
            assert_eq!(edge.pages(), [5]);
            assert!(!edge.shares(&edge.clone()) || bytes > 0);
            let upper = edge.split(1);
            assert_eq!((upper.pages(), edge.len()), (&[5][..], 0));
            assert_eq!(edge.common_prefix(1, &[token]), 0);
        }
        let none = Edge::default();
        assert_eq!((none.len(), none.pages(), none.bytes()), (0, &[][..], 0));
        assert!(none.is_only());
    }

    proptest! {
        #[test]
        fn ranges_keep_tokens_and_pages(
            size in 1_usize..40,
            text in prop::collection::vec(token(), 40..400),
            cut in any::<prop::sample::Index>(),
            other in any::<(prop::sample::Index, u32)>(),
        ) {
            let pages: Vec<u32> = (7..7 + (text.len() / size) as u32).collect();
            let text = &text[..pages.len() * size];
            let mut lower = Edge::new(text, &pages);
            let at = cut.index(pages.len() + 1);
            let upper = lower.split(at);
            prop_assert_eq!(upper.pages(), &pages[..at]);
            prop_assert_eq!(lower.pages(), &pages[at..]);
            for (edge, text) in [(&upper, &text[..at * size]), (&lower, &text[at * size..])] {
                let mut tokens = Vec::new();
                edge.tokens(size, text.len(), &mut tokens);
                prop_assert_eq!(&tokens[..], text);
                prop_assert_eq!(edge.common_prefix(size, text), text.len());
                if let Some(last) = text.last() {
                    prop_assert_eq!(edge.last_token(size), *last);
                    let index = other.0.index(text.len());
                    tokens[index] = other.1;
                    tokens.push(1);
                    let matched = text.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
                    prop_assert_eq!(edge.common_prefix(size, &tokens), matched);
                }
            }
            let mut joined = lower.clone();
            prop_assert!(joined.join(&upper));
            prop_assert_eq!(joined.common_prefix(size, text), text.len());
            let fresh: Vec<u32> = lower.pages().iter().map(|page| page + 1000).collect();
            lower.set_pages(size, &fresh);
            prop_assert_eq!(lower.pages(), &fresh[..]);
            prop_assert_eq!(lower.common_prefix(size, &text[at * size..]), text.len() - at * size);
            prop_assert_eq!(upper.pages(), &pages[..at]);
        }
    }
}
