//! A context: its text, its n-gram index, and the part that the shared history has.
//!
//! Positions are those of the context: its first known token need not be at 0.

use crate::config::LONGEST_CONTEXT;
use crate::copy_tracker::CopyTracker;
use crate::index::{BOUNDARY, Index, Match};

/// Most tokens that a rewind undoes or indexes again. Beyond that the context restarts.
const MAX_REWIND: usize = 4096;

#[derive(Debug)]
pub(crate) struct Context {
    index: Index,
    /// Position of the first token.
    start: usize,
    /// Tokens before this position are in the shared history.
    shared: usize,
    /// Queued for sharing.
    queued: bool,
    /// The copy that was tracked last.
    copying: Option<CopyTracker>,
}

impl Context {
    /// A context with unknown tokens before `start`.
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

    /// Heap bytes.
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

    /// Tracks the copy by the longest match; returns it if an edit has just ended.
    pub(crate) fn follow(&mut self, own: Option<Match>) -> Option<CopyTracker> {
        let end = self.end();
        let found = own.map(|found| CopyTracker {
            source: self.start + self.index.next(found) - 1,
            end,
            matched: found.length,
        });
        // No position matches better than the longest match.
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

    /// The copy that is resumed after an edit.
    pub(crate) fn resumed(&self) -> Option<CopyTracker> {
        let ended = |copying: &CopyTracker| copying.end == self.end() && copying.is_resumed();
        let continues = |copying: &CopyTracker| self.token(copying.source) != Some(BOUNDARY);
        self.copying.filter(ended).filter(continues)
    }

    /// Matching tokens before position `source` and the context's end, at most the longest match, up to the first boundary.
    fn matching(&self, source: usize) -> usize {
        let tokens = self.tokens();
        let before = &tokens[..source.saturating_sub(self.start).min(tokens.len())];
        let pairs = before.iter().rev().zip(tokens.iter().rev());
        pairs
            .take(self.index.depth())
            .take_while(|&(a, b)| a == b && *a != BOUNDARY)
            .count()
    }

    /// Appends up to `count` tokens from `source` on to `suffix`. Past the context's end it continues with the appended tokens;
    /// a boundary ends it.
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

    /// Replaces the context from `position` on by `tokens`, keeping known ones. After a gap, or where [`Self::can_rewind`] is
    /// false, it restarts.
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

    /// How many of `tokens` are known from `position` on, which is within the context.
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

    /// Whether the context can be rewound to `end` within [`MAX_REWIND`] tokens of work.
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

    /// Tokens that are not in the shared history.
    fn unshared(&self) -> usize {
        self.end() - self.shared
    }

    /// Whether to queue the context: it is not queued, and `fewest` or more tokens are not shared.
    pub(crate) fn enqueue(&mut self, fewest: usize) -> bool {
        let was_queued = self.queued;
        self.queued = was_queued || self.unshared() >= fewest;
        self.queued && !was_queued
    }

    /// Marks all tokens as shared.
    pub(crate) fn count_as_shared(&mut self) {
        self.shared = self.end();
    }

    /// Marks all tokens as shared and returns those that were not, after up to `before` that were. Empty if there are fewer
    /// than `fewest`.
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
