//! The test reference of the index: compares every position of a text.

use crate::index::search::OFTEN;
use crate::index::{BOUNDARY, Draft};

/// A search without an index.
pub(crate) struct Reference<'a> {
    pub(crate) text: &'a [u32],
    pub(crate) depth: usize,
}

impl Reference<'_> {
    /// How many tokens before and at `position` match the end of `suffix`; a boundary is the last that can.
    fn matching(&self, position: usize, suffix: &[u32]) -> usize {
        let known = self.text[..=position].iter().rev();
        let mut ended = false;
        let matching = known
            .zip(suffix.iter().rev())
            .take_while(|(known, wanted)| {
                let equal = !ended && known == wanted;
                ended = **known == BOUNDARY;
                equal
            });
        matching.take(self.depth).count()
    }

    /// All positions whose contexts end as `suffix` does, over `length` tokens.
    pub(crate) fn matches(&self, suffix: &[u32], length: usize) -> Vec<usize> {
        let positions = (0..self.text.len()).filter(|&position| self.text[position] != BOUNDARY);
        positions
            .filter(|&at| self.matching(at, suffix) >= length)
            .collect()
    }

    pub(crate) fn continuation(&self, position: usize) -> Option<u32> {
        let next = self.text.get(position + 1).copied();
        next.filter(|&token| token != BOUNDARY)
    }

    /// The longest match that has a continuation, of at most `limit` tokens, and where it is.
    pub(crate) fn find(&self, suffix: &[u32], limit: usize) -> Option<(usize, Vec<usize>)> {
        (1..=limit.min(self.depth)).rev().find_map(|length| {
            let matching = self.matches(suffix, length);
            let goes_on = matching.iter().any(|&at| self.continuation(at).is_some());
            goes_on.then_some((length, matching))
        })
    }

    /// The continuation that most of these positions have; of several the newest.
    pub(crate) fn most_frequent(&self, positions: &[usize]) -> Option<u32> {
        let next = positions
            .iter()
            .filter_map(|&at| Some((at, self.continuation(at)?)));
        let next: Vec<_> = next.collect();
        let count = |token| next.iter().filter(|(_, other)| *other == token).count();
        let best = next.iter().max_by_key(|(at, token)| (count(*token), *at));
        best.map(|&(_, token)| token)
    }

    /// The continuation that is drafted after these positions: the most frequent one, or with `newest` the last one unless
    /// the former came [`OFTEN`] times as often as all others.
    fn likeliest(&self, positions: &[usize], newest: bool) -> Option<u32> {
        let frequent = self.most_frequent(positions)?;
        let (came, others): (Vec<_>, Vec<_>) = positions
            .iter()
            .map(|&at| self.continuation(at))
            .partition(|&next| next == Some(frequent));
        let last = positions.iter().rev().find_map(|&at| self.continuation(at));
        let last = last.filter(|_| newest && OFTEN as usize * others.len() > came.len());
        last.or(Some(frequent))
    }

    /// The last continuation of these positions, which are in order, that was not the most frequent one when it came, or
    /// was replaced as that.
    pub(crate) fn second(&self, positions: &[usize]) -> Option<u32> {
        let (mut best, mut second) = (None, None);
        for seen in 1..=positions.len() {
            let Some(next) = self.continuation(positions[seen - 1]) else {
                continue;
            };
            let replaced = std::mem::replace(&mut best, self.most_frequent(&positions[..seen]));
            if replaced != best {
                second = replaced;
            } else if best != Some(next) {
                second = Some(next);
            }
        }
        second
    }

    /// The longest match of the text's own end before it, and where it is.
    pub(crate) fn own_match(&self) -> Option<(usize, Vec<usize>)> {
        let last = self.text.len() - 1;
        let ended = self.text[last] == BOUNDARY;
        (1..=self.depth)
            .rev()
            .filter(|_| !ended)
            .find_map(|length| {
                let mut matching = self.matches(self.text, length);
                matching.retain(|&at| at < last);
                self.most_frequent(&matching)?;
                Some((length, matching))
            })
    }

    pub(crate) fn draft(&self, suffix: &[u32], draft: Draft) -> Vec<u32> {
        let mut text = suffix.to_vec();
        let start = text.len();
        let mut limit = self.depth;
        while text.len() < start + draft.count {
            let first = draft.own && text.len() == start;
            let found = if first {
                self.own_match()
            } else {
                self.find(&text, limit)
            };
            let Some((length, matching)) = found.filter(|found| found.0 >= draft.shortest) else {
                break;
            };
            if let [only] = matching[..]
                && !first
            {
                let mut whole = self.text.to_vec();
                if draft.own {
                    whole.extend(&text[start..]);
                }
                let mut at = only + 1;
                while text.len() < start + draft.count && at < whole.len() && whole[at] != BOUNDARY
                {
                    text.push(whole[at]);
                    if draft.own {
                        whole.push(whole[at]);
                    }
                    at += 1;
                }
                break;
            }
            text.extend(self.likeliest(&matching, draft.own));
            limit = length + 1;
        }
        text.split_off(start)
    }
}
