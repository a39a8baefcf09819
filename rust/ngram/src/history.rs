//! What all contexts have said, within a number of tokens.
//!
//! Two generations, each with half of the tokens: the young one is written to, and when it is full it becomes the old one,
//! whose predecessor goes.

use crate::index::{Index, Match, Scratch};

#[derive(Debug)]
pub(crate) struct History {
    depth: usize,
    /// Tokens of a generation.
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

    /// Adds a text, of which the end is kept if it is too long.
    pub(crate) fn add(&mut self, tokens: &[u32]) {
        let tokens = &tokens[tokens.len().saturating_sub(self.half.saturating_sub(1))..];
        if tokens.len() < 2 {
            return;
        }
        if self.young.len() + tokens.len() + 1 > self.half {
            let young = Index::new(self.depth, false);
            self.old = Some(std::mem::replace(&mut self.young, young));
        }
        self.young.extend(tokens);
        self.young.end_text();
    }

    /// The longest match and the generation that has it, the young one of two with the same.
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
