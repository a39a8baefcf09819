//! The shared history: the text of all contexts, up to a number of tokens.
//!
//! Two generations have half of the tokens each: the young one is appended to, and replaces the old one when it is full.
//!
//! **Text that the young generation would have drafted is not written again,** nor is the continuation of a copied position, as
//! in Lempel-Ziv compression. So a prompt that all contexts share is stored once, and a repetitive reply does not outvote
//! others. Text that only the old generation has is written again.
//!
//! Counts of long matches are those of the written text, so a rare continuation may get ahead of a common one that is not
//! written. Once the latter is looked up, it is written again.

use crate::index::{BOUNDARY, Index, Match, Scratch};

/// Shortest match whose continuation is not written again. 7 to 12 give equally accurate drafts.
const KNOWN: usize = 8;
/// One in this many tokens is looked up even while a copy continues.
const FOLLOWED: usize = 16;

#[derive(Debug)]
pub(crate) struct History {
    depth: usize,
    /// Most tokens of a generation.
    half: usize,
    young: Index,
    old: Option<Index>,
}

impl History {
    pub(crate) fn new(depth: usize, capacity: usize) -> Self {
        Self {
            depth,
            half: capacity / 2,
            young: Index::new(depth, false),
            old: None,
        }
    }

    /// Adds the new parts of `tokens`; of a text longer than a generation only its end.
    pub(crate) fn add(&mut self, tokens: &[u32], scratch: &mut Scratch) {
        for text in tokens.split(|&token| token == BOUNDARY) {
            let longest = self.half.saturating_sub(1);
            let text = &text[text.len().saturating_sub(longest)..];
            if text.len() > 1 {
                self.add_text(text, scratch);
            }
        }
    }

    fn add_text(&mut self, text: &[u32], scratch: &mut Scratch) {
        let (mut written, mut copied) = (0, None);
        for at in KNOWN.min(text.len() - 1)..text.len() {
            let skipped = at - written;
            let (token, before) = (text[at], &text[..at]);
            let has = |&index: &usize| self.young.text().get(index) == Some(&token);
            let next = copied.map(|copied| copied + 1);
            copied = next
                .filter(|next| at % FOLLOWED != 0 && has(next))
                .or_else(|| self.expected(before, skipped, scratch).filter(has));
            if copied.is_none() {
                self.write(&text[..=at], skipped);
                written = at + 1;
            }
        }
        self.close();
    }

    /// The position of the token that the young generation would draft after `text`, whose last `skipped` tokens were not
    /// written.
    fn expected(&self, text: &[u32], skipped: usize, scratch: &mut Scratch) -> Option<usize> {
        let found = match skipped {
            0 => self.young.own_match(),
            _ => self.young.find(text, self.depth, scratch),
        };
        let found = found.filter(|found| found.length >= KNOWN);
        found.map(|found| self.young.next(found))
    }

    /// Writes the last token of `text` after the `skipped` ones before it, or as many of these as a match may have.
    fn write(&mut self, text: &[u32], skipped: usize) {
        let context = self.depth.max(KNOWN);
        if skipped > context {
            self.close();
        }
        let mut repeated = skipped.min(context);
        if self.young.len() + repeated + 2 > self.half {
            self.start_generation();
            repeated = context.min(text.len() - 1);
        }
        self.young.extend(&text[text.len() - 1 - repeated..]);
    }

    /// Ends the text that is being written, if there is one.
    fn close(&mut self) {
        if self.young.text().last() != Some(&BOUNDARY) {
            self.young.end_text();
        }
    }

    fn start_generation(&mut self) {
        self.close();
        let young = Index::new(self.depth, false);
        self.old = Some(std::mem::replace(&mut self.young, young));
    }

    /// The longest match above `longer_than` tokens, and its generation; the young one, if both have it.
    pub(crate) fn find(
        &self,
        suffix: &[u32],
        longer_than: usize,
        scratch: &mut Scratch,
    ) -> Option<(Match, &Index)> {
        let mut best: Option<(Match, &Index)> = None;
        for index in self.generations() {
            let length = best.map_or(longer_than, |(found, _)| found.length);
            if length < self.depth
                && let Some(found) = index.find(suffix, self.depth, scratch)
                && found.length > length
            {
                best = Some((found, index));
            }
        }
        best
    }

    /// The generations, the young one first.
    pub(crate) fn generations(&self) -> impl Iterator<Item = &Index> {
        [Some(&self.young), self.old.as_ref()].into_iter().flatten()
    }

    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.generations().map(Index::bytes).sum()
    }
}

#[cfg(test)]
mod tests;
