//! The test reference of the index: compares every position of a text.

use crate::index::search::{OFTEN, SECOND, share};
use crate::index::suffix::{NEWEST, SuffixLimits};
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

    /// The draft of suffix decoding after a suffix, which is the text's end if the index is its own: its tokens, the
    /// probability of each that it and all before it are right, and the length of its match.
    pub(crate) fn speculate(
        &self,
        suffix: &[u32],
        limits: SuffixLimits,
    ) -> (Vec<u32>, Vec<f32>, usize) {
        let mut best = (Vec::new(), Vec::new(), 0);
        let score = |probabilities: &[f32]| probabilities.iter().sum::<f32>();
        for length in (limits.shortest..=self.depth).rev() {
            let (tokens, probabilities) = self.follow(suffix, length, limits);
            if score(&probabilities) > score(&best.1) {
                best = (tokens, probabilities, length);
            }
        }
        best
    }

    /// Follows the continuations of the last `length` tokens of a suffix.
    fn follow(
        &self,
        suffix: &[u32],
        mut length: usize,
        limits: SuffixLimits,
    ) -> (Vec<u32>, Vec<f32>) {
        let (mut text, mut probabilities) = (suffix.to_vec(), Vec::<f32>::new());
        let most = limits.most(length);
        let mut copied = None;
        while probabilities.len() < most {
            let matching = self.matches(&text, length);
            let drafted = text.len() - suffix.len();
            if copied.is_none() && matching.len() == 1 && (drafted > 0 || !limits.own) {
                copied = Some(matching[0]);
            }
            let (token, part) = if let Some(at) = copied {
                let next = self.text.get(at + 1).copied();
                let draft = || text[suffix.len()..].get(at + 1 - self.text.len()).copied();
                (
                    next.or_else(|| draft().filter(|_| limits.own)),
                    share(1.0, 1.0, length),
                )
            } else {
                let (token, count, all) = self.counted(&matching, limits.own);
                (token, share(count, all, length))
            };
            let probability = probabilities.last().unwrap_or(&1.0) * part as f32;
            let likely = probability >= limits.min_probability;
            let Some(token) = token.filter(|&token| token != BOUNDARY && likely) else {
                break;
            };
            text.push(token);
            probabilities.push(probability);
            copied = copied.map(|at| at + 1);
            length = if copied.is_some() {
                length + 1
            } else {
                self.depth.min(length + 1)
            };
        }
        (text.split_off(suffix.len()), probabilities)
    }

    /// The likeliest continuation of these positions, its count and that of all.
    fn counted(&self, positions: &[usize], own: bool) -> (Option<u32>, f64, f64) {
        let end = self.text.len() - 1;
        // The text's end has no continuation yet.
        let positions = positions.iter().copied().filter(|&at| !own || at != end);
        let positions = &positions.collect::<Vec<_>>()[..];
        let all = positions.len();
        let likeliest = self.likeliest(positions, own);
        let frequent = self.most_frequent(positions);
        let continued = |token: Option<u32>| {
            let next = positions.iter().filter_map(|&at| self.continuation(at));
            next.filter(|&next| Some(next) == token).count()
        };
        let count = if likeliest == frequent {
            continued(frequent) as f64
        } else {
            let others = (all - continued(frequent)) as f64;
            (SECOND * others).max(NEWEST * all as f64)
        };
        (likeliest, count, all as f64)
    }
}
