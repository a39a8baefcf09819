//! One context: what it said, indexed.
//!
//! A fork freezes the index. Parent and child both stand on the frozen layer and write into one of their own, which
//! repeats the last tokens before it, so that its contexts are whole. Layers are searched one by one; counts are those of
//! a layer alone.

use std::sync::Arc;

use crate::config::LONGEST_CONTEXT;
use crate::copying::Copying;
use crate::index::{BOUNDARY, Index, Match, Scratch};

/// Most frozen layers of a context; a fork that would have more merges two neighbours.
const LAYERS: usize = 4;

/// Most tokens that are undone, or indexed again, to go back; where it would be more the context starts anew.
const REWOUND: usize = 4096;
/// A layer that others stand on is copied to go back in it: so many tokens of it are the work of one.
const COPIED: usize = 32;

/// Bytes that all contexts hold together.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) bytes: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) index: Index,
    /// The context's position at which the index starts.
    start: usize,
    /// Leading tokens that the layer below has, too.
    repeated: usize,
}

impl Layer {
    fn new(depth: usize, start: usize) -> Self {
        let index = Index::new(depth, true);
        Self {
            index,
            start,
            repeated: 0,
        }
    }

    /// The position behind the last token.
    fn end(&self) -> usize {
        self.start + self.index.len()
    }

    /// The first position that no layer below has.
    fn fresh(&self) -> usize {
        self.start + self.repeated
    }

    fn tokens(&self) -> &[u32] {
        &self.index.text()[1..]
    }
}

/// The longest match in a context's own text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) found: Match,
    /// The number of its layer: 0 is the top, then the newest frozen one.
    pub(crate) layer: usize,
    /// The context's position of what most often followed.
    pub(crate) next: usize,
}

/// A context's layers, and what of it the shared history has.
#[derive(Debug)]
pub(crate) struct Context {
    depth: usize,
    /// Frozen layers, the oldest first.
    layers: Vec<Arc<Layer>>,
    top: Layer,
    /// Bytes of `top` that the ledger knows.
    charged: usize,
    /// The shared history has what lies before this position.
    shared: usize,
    /// It is noted that the history lacks some.
    due: bool,
    /// What was last found to be copied.
    copying: Option<Copying>,
}

impl Context {
    /// A context whose tokens before `start` are not known.
    pub(crate) fn new(depth: usize, start: usize) -> Self {
        Self {
            depth,
            layers: Vec::new(),
            top: Layer::new(depth, start),
            charged: 0,
            shared: start,
            due: false,
            copying: None,
        }
    }

    /// First position that is known.
    fn start(&self) -> usize {
        self.layers
            .first()
            .map_or(self.top.start, |layer| layer.start)
    }

    /// The position behind the last token.
    pub(crate) fn end(&self) -> usize {
        self.top.end()
    }

    /// What is written to, whose text ends as the context does.
    pub(crate) fn top(&self) -> &Index {
        &self.top.index
    }

    /// The frozen layers, newest first.
    pub(crate) fn frozen(&self) -> impl Iterator<Item = &Index> {
        self.layers.iter().rev().map(|layer| &layer.index)
    }

    /// A layer's index, by [`Own::layer`].
    pub(crate) fn index(&self, layer: usize) -> &Index {
        match layer {
            0 => &self.top.index,
            _ => &self.layers[self.layers.len() - layer].index,
        }
    }

    /// The longest earlier match of the context's end, `suffix`; the newest layer's, if several have it.
    pub(crate) fn own_match(&self, suffix: &[u32], scratch: &mut Scratch) -> Option<Own> {
        let own = |layer: &Layer, number, found| {
            let Layer { index, start, .. } = layer;
            Own {
                found,
                layer: number,
                next: start + index.next(found) - 1,
            }
        };
        let mut best = (self.top.index.own_match()).map(|found| own(&self.top, 0, found));
        for (layer, number) in self.layers.iter().rev().zip(1..) {
            let length = best.map_or(0, |best| best.found.length);
            if length < self.depth
                && let Some(found) = layer.index.find(suffix, self.depth, scratch)
                && found.length > length
            {
                best = Some(own(layer, number, found));
            }
        }
        best
    }

    /// Finds what the context copies, by its longest match; returns it if a change has just ended.
    pub(crate) fn follow(&mut self, own: Option<Own>) -> Option<Copying> {
        let end = self.end();
        let (top, start) = (self.top.tokens(), self.top.start);
        let last = top.last();
        let matching = |source: usize| {
            let before = top.get(source.wrapping_sub(start + 1));
            if before.is_some() && before != last {
                return 0;
            }
            self.matching(source)
        };
        let found = own.map(|own| Copying {
            source: own.next,
            end,
            matched: own.found.length,
        });
        // Nothing matches better than the longest match.
        let goes_on = |copying: &Copying| {
            found.filter(|found| copying.end < end && copying.expected(end) == found.source)
        };
        let copying = self
            .copying
            .and_then(|copying| goes_on(&copying).or_else(|| copying.at(end, matching)));
        let yields = |found: &Copying| Copying::yields_to(copying, end, found.matched);
        let copying = found.filter(yields).or(copying);
        self.copying = copying;
        self.resumed()
    }

    /// The copy that goes on behind a change which has just ended.
    pub(crate) fn resumed(&self) -> Option<Copying> {
        let ended = |copying: &Copying| copying.end == self.end() && copying.is_resumed();
        let goes_on = |copying: &Copying| self.token(copying.source) != Some(BOUNDARY);
        self.copying.filter(ended).filter(goes_on)
    }

    /// How many tokens before position `source` are those of the context's end, of at most `depth` and none a boundary.
    fn matching(&self, source: usize) -> usize {
        let same = |a: Option<&u32>, b: Option<&u32>| a == b && a != Some(&BOUNDARY);
        let top = self.top.tokens();
        let before = match source.checked_sub(self.top.start) {
            Some(before) if before >= self.depth || self.layers.is_empty() => &top[..before],
            _ => {
                let places = (self.start()..source).rev().zip((0..self.end()).rev());
                let matching = places
                    .take(self.depth)
                    .take_while(|&(a, b)| same(self.token(a).as_ref(), self.token(b).as_ref()));
                return matching.count();
            }
        };
        let pairs = before.iter().rev().zip(top.iter().rev());
        pairs
            .take(self.depth)
            .take_while(|&(a, b)| same(Some(a), Some(b)))
            .count()
    }

    /// Appends `count` tokens of the context from `source` on to `suffix`, and behind its end those themselves, as far as
    /// no boundary comes.
    pub(crate) fn copy(&self, source: usize, count: usize, suffix: &mut Vec<u32>) {
        let (start, end) = (suffix.len(), self.end());
        for at in source..source + count {
            let token = self.token(at).unwrap_or_else(|| suffix[start + at - end]);
            if token == BOUNDARY {
                return;
            }
            suffix.push(token);
        }
    }

    /// Makes `tokens` the context's end, from `position` on. What is known of them already stays as it is; what lies
    /// behind them is forgotten. After a gap the context starts anew, and so it does if that is too much to take back.
    pub(crate) fn update(&mut self, position: usize, tokens: &[u32], ledger: &mut Ledger) {
        let long = self.top.index.len() + tokens.len() > LONGEST_CONTEXT;
        if position < self.start() || position > self.end() || long {
            self.restart(position, ledger);
        }
        let known = tokens.iter().zip(position..self.end());
        let known = known.take_while(|&(&token, at)| self.token(at) == Some(token));
        let mut known = known.count();
        if self.rewinds(position + known) {
            self.rewind(position + known, ledger);
        } else {
            self.restart(position, ledger);
            known = 0;
        }
        self.top.index.extend(&tokens[known..]);
        self.settle(ledger);
    }

    /// Whether these tokens are known from `position` on.
    pub(crate) fn holds(&self, position: usize, tokens: &[u32]) -> bool {
        (self.start()..=self.end()).contains(&position)
            && tokens
                .iter()
                .zip(position..)
                .all(|(&token, at)| self.token(at) == Some(token))
    }

    fn token(&self, position: usize) -> Option<u32> {
        let mut layers = self.layers.iter().rev().map(Arc::as_ref);
        let layer = if position >= self.top.start {
            &self.top
        } else {
            layers.find(|layer| position >= layer.start)?
        };
        layer.tokens().get(position - layer.start).copied()
    }

    fn restart(&mut self, position: usize, ledger: &mut Ledger) {
        self.release(ledger);
        *self = Self::new(self.depth, position);
    }

    /// Whether the context may go back to `end`, which it has: that is no more work than [`REWOUND`] tokens.
    pub(crate) fn rewinds(&self, end: usize) -> bool {
        if end == self.end() || end == self.start() {
            return true;
        }
        let work = |layer: &Layer| layer.index.rewind_work(end - layer.start);
        if end >= self.top.fresh() {
            return work(&self.top) <= REWOUND;
        }
        let mut copied = 0;
        for layer in self.layers.iter().rev() {
            if Arc::strong_count(layer) > 1 {
                copied += layer.index.len() / COPIED;
            }
            if end >= layer.fresh() {
                return copied + work(layer) <= REWOUND;
            }
        }
        true
    }

    fn rewind(&mut self, end: usize, ledger: &mut Ledger) {
        if end == self.end() {
            return;
        }
        if end == self.start() {
            return self.restart(end, ledger);
        }
        self.shared = self.shared.min(end);
        self.copying = self.copying.filter(|copying| copying.end <= end);
        while end < self.top.fresh() {
            let Some(layer) = self.layers.pop() else {
                break;
            };
            self.uncover(layer, ledger);
        }
        self.top.index.rewind(end - self.top.start);
    }

    /// Replaces the top by the layer below it, which is copied if others stand on it.
    fn uncover(&mut self, layer: Arc<Layer>, ledger: &mut Ledger) {
        ledger.bytes -= self.charged;
        match Arc::try_unwrap(layer) {
            Ok(layer) => {
                self.charged = layer.index.bytes();
                self.top = layer;
            }
            Err(layer) => {
                self.charged = 0;
                self.top = Layer::clone(&layer);
            }
        }
    }

    /// Enters what the top has grown by.
    fn settle(&mut self, ledger: &mut Ledger) {
        let bytes = self.top.index.bytes();
        ledger.bytes = ledger.bytes + bytes - self.charged;
        self.charged = bytes;
    }

    /// Takes all that the context held alone out of the ledger.
    pub(crate) fn release(&mut self, ledger: &mut Ledger) {
        ledger.bytes -= std::mem::take(&mut self.charged);
        for layer in self.layers.drain(..) {
            ledger.bytes -= Arc::into_inner(layer).map_or(0, |layer| layer.index.bytes());
        }
    }

    /// A second context with the same tokens.
    pub(crate) fn fork(&mut self, ledger: &mut Ledger) -> Self {
        // A top that has nothing of its own is not worth a layer.
        if self.top.index.len() > self.top.repeated {
            self.freeze(ledger);
        }
        let mut fork = Self {
            depth: self.depth,
            layers: self.layers.clone(),
            top: self.top.clone(),
            charged: 0,
            shared: self.shared,
            due: false,
            copying: self.copying,
        };
        fork.settle(ledger);
        fork
    }

    fn freeze(&mut self, ledger: &mut Ledger) {
        let end = self.end();
        let tokens = self.top.tokens();
        // With the boundary before them they are as long as the longest match and the token before it.
        let repeated = tokens.len().min(self.depth + 1);
        let mut top = Layer::new(self.depth, end - repeated);
        top.index.extend(&tokens[tokens.len() - repeated..]);
        top.repeated = repeated;
        self.layers
            .push(Arc::new(std::mem::replace(&mut self.top, top)));
        self.charged = 0;
        self.settle(ledger);
        if self.layers.len() > LAYERS {
            self.merge(ledger);
        }
    }

    /// Makes one layer of the two neighbours that are shortest together.
    fn merge(&mut self, ledger: &mut Ledger) {
        let length =
            |pair: &[Arc<Layer>]| pair.iter().map(|layer| layer.index.len()).sum::<usize>();
        let pairs = self.layers.windows(2).enumerate();
        let shortest = pairs.min_by_key(|(_, pair)| length(pair));
        let Some((lower, _)) = shortest else { return };
        let upper = self.layers.remove(lower + 1);
        let below = std::mem::replace(&mut self.layers[lower], Arc::clone(&upper));
        let both = below.index.bytes();
        let (mut merged, held) = match Arc::try_unwrap(below) {
            Ok(layer) => (layer, both),
            Err(layer) => (Layer::clone(&layer), 0),
        };
        merged.index.extend(&upper.tokens()[upper.repeated..]);
        ledger.bytes = ledger.bytes + merged.index.bytes() - held;
        self.layers[lower] = Arc::new(merged);
        ledger.bytes -= Arc::into_inner(upper).map_or(0, |layer| layer.index.bytes());
    }

    /// Tokens that the shared history does not have.
    fn unshared(&self) -> usize {
        self.end() - self.shared
    }

    /// Whether they are `fewest` or more, and that was not said since they were last shared.
    pub(crate) fn falls_due(&mut self, fewest: usize) -> bool {
        let was_due = self.due;
        self.due = was_due || self.unshared() >= fewest;
        self.due && !was_due
    }

    /// Counts everything as shared.
    pub(crate) fn count_as_shared(&mut self) {
        self.shared = self.end();
    }

    /// What the shared history does not have, with at most `before` tokens before it, as far as the top has them; it
    /// counts as shared from now on. Nothing if it is less than `fewest` tokens.
    pub(crate) fn share(&mut self, fewest: usize, before: usize) -> &[u32] {
        self.due = false;
        if self.unshared() < fewest {
            return &[];
        }
        let from = self.shared.saturating_sub(before).max(self.top.start);
        self.shared = self.end();
        &self.top.tokens()[from - self.top.start..]
    }
}

#[cfg(test)]
impl Context {
    pub(crate) fn copying(&self) -> Option<Copying> {
        self.copying
    }

    /// The first position and all tokens from there on.
    pub(crate) fn all(&self) -> (usize, Vec<u32>) {
        let tokens = (self.start()..self.end()).filter_map(|at| self.token(at));
        (self.start(), tokens.collect())
    }

    /// The memory of each index by address, so that shared ones count once.
    pub(crate) fn held(&self) -> impl Iterator<Item = (*const Index, usize)> {
        let indices = self.frozen().chain([self.top()]);
        indices.map(|index| (std::ptr::from_ref(index), index.bytes()))
    }
}
