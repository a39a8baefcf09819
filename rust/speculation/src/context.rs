//! One context: its text, the index over it, and which part of it the shared history has.
//!
//! Positions are the context's: that of its first token need not be 0, since a context may become known in the middle.

use crate::config::LONGEST_CONTEXT;
use crate::copy_tracker::CopyTracker;
use crate::index::{BOUNDARY, Index, Match};

/// Going back undoes at most this many tokens, or indexes as many again. Beyond that the context starts anew.
const MAX_REWIND: usize = 4096;

#[derive(Debug)]
pub(crate) struct Context {
    index: Index,
    /// Position of the first token.
    start: usize,
    /// The shared history has the tokens before this position.
    shared: usize,
    /// Waits in the drafter's queue for its turn to be shared.
    queued: bool,
    /// The copy that was found last.
    copying: Option<CopyTracker>,
}

impl Context {
    /// A context whose tokens before `start` are not known.
    pub(crate) fn new(depth: usize, start: usize) -> Self {
        Self {
            index: Index::new(depth, true),
            start,
            shared: start,
            queued: false,
            copying: None,
        }
    }

    /// The position after the last token.
    pub(crate) fn end(&self) -> usize {
        self.start + self.index.len()
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.index.bytes()
    }

    fn tokens(&self) -> &[u32] {
        &self.index.text()[1..]
    }

    fn token(&self, position: usize) -> Option<u32> {
        let at = position.checked_sub(self.start)?;
        self.tokens().get(at).copied()
    }

    /// Finds what the context copies, by the longest match of its end; returns it if a change has just ended.
    pub(crate) fn follow(&mut self, own: Option<Match>) -> Option<CopyTracker> {
        let end = self.end();
        let found = own.map(|found| CopyTracker {
            source: self.start + self.index.next(found) - 1,
            end,
            matched: found.length,
        });
        // No place matches better than the longest match.
        let continued = |copying: &CopyTracker| {
            found.filter(|found| copying.end < end && copying.expected(end) == found.source)
        };
        let matching = |source: usize| self.matching(source);
        let copying = self
            .copying
            .and_then(|copying| continued(&copying).or_else(|| copying.at(end, matching)));
        let yields = |found: &CopyTracker| CopyTracker::yields_to(copying, end, found.matched);
        self.copying = found.filter(yields).or(copying);
        self.resumed()
    }

    /// The copy that goes on after a change which has just ended.
    pub(crate) fn resumed(&self) -> Option<CopyTracker> {
        let ended = |copying: &CopyTracker| copying.end == self.end() && copying.is_resumed();
        let continues = |copying: &CopyTracker| self.token(copying.source) != Some(BOUNDARY);
        self.copying.filter(ended).filter(continues)
    }

    /// Number of tokens before position `source` that equal the context's end, at most the longest match and up to the
    /// first boundary.
    fn matching(&self, source: usize) -> usize {
        let tokens = self.tokens();
        let before = &tokens[..source.saturating_sub(self.start).min(tokens.len())];
        let pairs = before.iter().rev().zip(tokens.iter().rev());
        pairs
            .take(self.index.depth())
            .take_while(|&(a, b)| a == b && *a != BOUNDARY)
            .count()
    }

    /// Appends up to `count` tokens of the context from `source` on to `suffix`. Past the context's end it continues with
    /// the tokens that it has appended; a boundary ends it.
    pub(crate) fn copy(&self, source: usize, count: usize, suffix: &mut Vec<u32>) {
        let (first, end) = (suffix.len(), self.end());
        for at in source..source + count {
            let token = self
                .token(at)
                .unwrap_or_else(|| suffix[first + at.saturating_sub(end)]);
            if token == BOUNDARY {
                return;
            }
            suffix.push(token);
        }
    }

    /// Makes `tokens` the context's end, from `position` on. Tokens that are known already stay as they are, and later ones
    /// are forgotten. After a gap the context starts anew, and so it does where [`Self::can_rewind`] is false.
    pub(crate) fn update(&mut self, position: usize, tokens: &[u32]) {
        let long = self.index.len() + tokens.len() > LONGEST_CONTEXT;
        if position < self.start || position > self.end() || long {
            self.restart(position);
        }
        let mut known = self.known(position, tokens);
        if self.can_rewind(position + known) {
            self.rewind(position + known);
        } else {
            self.restart(position);
            known = 0;
        }
        self.index.extend(&tokens[known..]);
    }

    /// How many of `tokens` the context has from `position` on. `position` is within the context.
    fn known(&self, position: usize, tokens: &[u32]) -> usize {
        let known = &self.tokens()[position - self.start..];
        let pairs = known.iter().zip(tokens);
        pairs.take_while(|(known, token)| known == token).count()
    }

    /// Whether the context has these tokens from `position` on.
    pub(crate) fn holds(&self, position: usize, tokens: &[u32]) -> bool {
        (self.start..=self.end()).contains(&position)
            && self.known(position, tokens) == tokens.len()
    }

    fn restart(&mut self, position: usize) {
        *self = Self::new(self.index.depth(), position);
    }

    /// Whether the context can go back to `end`, at most its end, within [`MAX_REWIND`] tokens of work.
    pub(crate) fn can_rewind(&self, end: usize) -> bool {
        end == self.end()
            || end <= self.start
            || self.index.rewind_work(end - self.start) <= MAX_REWIND
    }

    fn rewind(&mut self, end: usize) {
        if end == self.end() {
            return;
        }
        if end == self.start {
            return self.restart(end);
        }
        self.shared = self.shared.min(end);
        self.copying = self.copying.filter(|copying| copying.end <= end);
        self.index.rewind(end - self.start);
    }

    /// Number of tokens that the shared history does not have.
    fn unshared(&self) -> usize {
        self.end() - self.shared
    }

    /// Whether the context is to be queued: `fewest` tokens or more are not shared, and it does not wait yet.
    pub(crate) fn enqueue(&mut self, fewest: usize) -> bool {
        let was_queued = self.queued;
        self.queued = was_queued || self.unshared() >= fewest;
        self.queued && !was_queued
    }

    /// Counts all tokens as shared.
    pub(crate) fn count_as_shared(&mut self) {
        self.shared = self.end();
    }

    /// The tokens that the shared history does not have, after up to `before` that it has. They count as shared from now
    /// on. Empty if there are fewer than `fewest`.
    pub(crate) fn share(&mut self, fewest: usize, before: usize) -> &[u32] {
        self.queued = false;
        if self.unshared() < fewest {
            return &[];
        }
        let from = self.shared.saturating_sub(before).max(self.start);
        self.shared = self.end();
        &self.tokens()[from - self.start..]
    }
}

#[cfg(test)]
impl Context {
    pub(crate) fn copying(&self) -> Option<CopyTracker> {
        self.copying
    }

    /// The first position and all tokens from there on.
    pub(crate) fn all(&self) -> (usize, Vec<u32>) {
        (self.start, self.tokens().to_vec())
    }
}
