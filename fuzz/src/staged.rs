//! What is staged for a pass, held to what any engine relies on, and outputs to match.

use bytemuck::Pod;
use pie_planner::{FieldId, Layout, Limits, LogprobPosition, Outputs, Pass, SlotClass, SlotGroup};

use crate::common::generate::VOCAB;

/// Outputs of the right lengths.
pub(crate) struct Blank {
    tokens: Vec<i64>,
    dist_ids: Vec<i64>,
    /// Probabilities, logits, log-probabilities, entropies.
    values: [Vec<f32>; 4],
    logprob_words: Vec<i32>,
}

impl Blank {
    /// For a group with so many labels, and these positions with the tokens that are given for them.
    pub(crate) fn of(
        staged: &Staged<'_>,
        group: &SlotGroup,
        labels: usize,
        (positions, given): (&[LogprobPosition], &[[i64; 2]]),
    ) -> Self {
        let count = |class| group.count(class);
        let classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens: usize = classes.into_iter().map(count).sum();
        let listed = staged.array::<i32>(FieldId::TopKs, group.len());
        let listed = &listed[tokens..tokens + count(SlotClass::Dist)];
        let listed: usize = listed.iter().map(|&count| count as usize).sum();
        let logits = count(SlotClass::Logits) * staged.limits.vocab_size as usize;
        let lengths = [listed, logits, labels, count(SlotClass::Entropy)];
        Self {
            tokens: (0..tokens as i64)
                .map(|slot| slot % i64::from(VOCAB))
                .collect(),
            dist_ids: vec![3; listed],
            values: lengths.map(|length| vec![0.25; length]),
            logprob_words: vec![7; Self::check_positions(staged, group, positions, given)],
        }
    }

    pub(crate) fn with<T>(&self, take: impl FnOnce(&Outputs<'_>) -> T) -> T {
        let [dist_probs, logits, logprobs, entropies] = &self.values;
        take(&Outputs {
            tokens: &self.tokens,
            dist_ids: &self.dist_ids,
            dist_probs,
            logits,
            logprobs,
            entropies,
            logprob_words: &self.logprob_words,
        })
    }

    /// Checks all that an engine relies on, and counts the words of the positions.
    fn check_positions(
        staged: &Staged<'_>,
        group: &SlotGroup,
        positions: &[LogprobPosition],
        given: &[[i64; 2]],
    ) -> usize {
        let vocab = i64::from(staged.limits.vocab_size);
        assert!(positions.is_sorted_by(|position, next| position[0] < next[0]));
        for &[slot, token, top, scaled, hidden] in positions {
            assert!((0..group.len() as i64).contains(&slot));
            assert!((-1..vocab).contains(&token) && (0..=vocab).contains(&top));
            assert!((0..=1).contains(&scaled));
            assert!((0..=i64::from(u32::MAX)).contains(&hidden));
        }
        assert!(given.is_sorted_by_key(|given| given[0]));
        for &[position, token] in given {
            assert!((0..positions.len() as i64).contains(&position) && (0..vocab).contains(&token));
        }
        let words = |position: &LogprobPosition| 1 + 2 * position[2] + position[4];
        let listed: i64 = positions.iter().map(words).sum();
        listed as usize + given.len()
    }
}

/// A staging block: every index that the engine follows is one that it has.
pub(crate) struct Staged<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) layout: &'a Layout,
    pub(crate) block: &'a [u64],
}

impl Staged<'_> {
    pub(crate) fn check_pass(&self, pass: &Pass) {
        let limits = self.limits;
        assert!((1..=limits.chunk_tokens as usize).contains(&pass.tokens));
        assert!((1..=limits.max_requests as usize).contains(&pass.requests));
        self.check(FieldId::InputIds, pass.tokens, limits.vocab_size as usize);
        self.check(
            FieldId::Positions,
            pass.tokens,
            limits.max_positions as usize,
        );
        self.check(FieldId::OutCacheLoc, pass.tokens, limits.storage_slots());
        self.check(
            FieldId::SeqLens,
            pass.requests,
            limits.max_kv_len() as usize + 1,
        );
        let row_pages = limits.row_pages as usize;
        for update in self
            .array::<i64>(FieldId::TableUpdates, 2 * pass.updates)
            .chunks(2)
        {
            assert!(
                update[0] >= row_pages as i64
                    && below(update[0], row_pages * (limits.max_requests as usize + 1))
            );
            assert!(
                below(update[1], limits.storage_slots())
                    && update[1] % i64::from(limits.page_size) == 0
            );
        }
    }

    pub(crate) fn check_group(&self, pass: &Pass, group: &SlotGroup) {
        assert!(!group.is_empty() && group.len() <= self.limits.max_slots as usize);
        self.check(FieldId::SlotRows, group.len(), pass.tokens);
        let words = self.array::<i32>(FieldId::MaskWords, group.mask_words);
        let masks = self.array::<i32>(FieldId::SlotMasks, 2 * group.len());
        for &[first, edges] in masks.as_chunks().0 {
            let width = usize::try_from(edges).unwrap_or(self.limits.mask_words());
            let words = &words[first as usize..][..width];
            let end = self.limits.vocab_size as i32;
            assert!(
                edges < 0
                    || (edges % 2 == 0
                        && words.is_sorted_by(|a, b| a < b)
                        && words.iter().all(|edge| (0..=end).contains(edge))),
                "{words:?}"
            );
        }
    }

    /// The first `count` elements lie in `0..end`.
    fn check(&self, id: FieldId, count: usize, end: usize) {
        let values = self.array::<i64>(id, count);
        assert!(
            values.iter().all(|&value| below(value, end)),
            "{id:?} {values:?}, must be below {end}"
        );
    }

    fn array<T: Pod>(&self, id: FieldId, count: usize) -> &[T] {
        let field = self.layout.field(id);
        assert!(count <= field.capacity, "{} overflows", field.name);
        let bytes: &[u8] = bytemuck::cast_slice(self.block);
        bytemuck::cast_slice(&bytes[field.offset..][..count * size_of::<T>()])
    }
}

fn below(value: i64, end: usize) -> bool {
    usize::try_from(value).is_ok_and(|value| value < end)
}
