//! The acceptance probability of a draft, by match length or estimated probability, and by context.
//!
//! Contexts share decayed counts of accepted and rejected drafts for each match length, with the counts of all lengths as
//! prior; and for each grade of drafts with an estimated probability, with that as prior. A context has its own counts and the
//! expected ones; their odds ratio is its difference from the others.

use rustc_hash::FxHashMap;

use super::grades::{self, GRADES, Grades};

/// Decay of shared counts, per draft.
const KEPT: f64 = 0.998;
/// Decay of a context's counts, per draft.
const KEPT_BY_CONTEXT: f32 = 0.95;
/// Buckets of match lengths: upper bounds; longer ones share another.
const LENGTHS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 18];
/// Contexts per generation.
const CONTEXTS: usize = 1 << 15;

/// Weight of an estimated probability, in drafts: it says more than the mean of all drafts.
const ESTIMATED: f64 = 20.0;
/// Least estimate, and least doubt of one.
const LEAST: f64 = 0.02;
/// Weight of the prior, in drafts.
const PRIOR: f64 = 2.0;

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    right: f64,
    wrong: f64,
}

impl Count {
    fn probability(self, expected: f64, weight: f64) -> f64 {
        (self.right + weight * expected) / (self.right + self.wrong + weight)
    }

    fn learn(&mut self, right: bool) {
        self.right = self.right * KEPT + f64::from(u8::from(right));
        self.wrong = self.wrong * KEPT + f64::from(u8::from(!right));
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    right: f32,
    wrong: f32,
    /// Expected value of `right`.
    expected: f32,
}

impl Record {
    /// The context's odds divided by the shared odds, with one draft of either outcome as prior.
    fn odds(self) -> f64 {
        let all = self.right + self.wrong;
        let right = (self.right + 1.0) / (self.expected + 1.0);
        let wrong = (self.wrong + 1.0) / (all - self.expected + 1.0);
        f64::from(right / wrong)
    }
}

#[derive(Debug, Default)]
pub(super) struct Acceptance {
    counts: [Count; LENGTHS.len() + 1],
    /// Counts of drafts with estimates, by grade.
    graded: [Count; GRADES as usize + 1],
    /// Counts of all lengths.
    all: Count,
    /// Two generations, so that contexts that are never released do not accumulate.
    young: FxHashMap<u64, Record>,
    old: FxHashMap<u64, Record>,
}

/// Drafts that share counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Length(usize),
    Grade(usize),
}

impl Class {
    /// The class of a request's draft, whose match is `length` tokens long.
    pub(super) fn new(length: usize, draft: usize, grades: Grades) -> Self {
        let by_length = Self::Length(length_class(length + draft));
        grades.get(draft).map_or(by_length, Self::Grade)
    }
}

fn length_class(length: usize) -> usize {
    LENGTHS.partition_point(|&longest| longest < length)
}

impl Acceptance {
    /// A context's odds ratio.
    pub(super) fn odds(&self, context: u64) -> f64 {
        let record = self.young.get(&context).or_else(|| self.old.get(&context));
        record.map_or(1.0, |record| record.odds())
    }

    /// Acceptance probability of a draft of this class, given that the drafts before are accepted.
    pub(super) fn probability(&self, class: Class, odds: f64) -> f64 {
        let probability = self.common(class);
        let odds = odds * probability / (1.0 - probability);
        odds / (1.0 + odds)
    }

    /// The shared probability.
    fn common(&self, class: Class) -> f64 {
        match class {
            Class::Length(class) => {
                let all = self.all.probability(0.5, PRIOR);
                self.counts[class].probability(all, PRIOR)
            }
            Class::Grade(grade) => {
                let estimate = grades::probability(grade).clamp(LEAST, 1.0 - LEAST);
                self.graded[grade].probability(estimate, ESTIMATED)
            }
        }
    }

    pub(super) fn learn(&mut self, context: u64, class: Class, right: bool) {
        let expected = self.common(class) as f32;
        match class {
            Class::Length(class) => {
                self.counts[class].learn(right);
                self.all.learn(right);
            }
            Class::Grade(grade) => self.graded[grade].learn(right),
        }
        let record = self.record(context);
        record.right = record.right * KEPT_BY_CONTEXT + f32::from(u8::from(right));
        record.wrong = record.wrong * KEPT_BY_CONTEXT + f32::from(u8::from(!right));
        record.expected = record.expected * KEPT_BY_CONTEXT + expected;
    }

    fn record(&mut self, context: u64) -> &mut Record {
        if self.young.len() >= CONTEXTS && !self.young.contains_key(&context) {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        let old = &mut self.old;
        let record = self.young.entry(context);
        record.or_insert_with(|| old.remove(&context).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matching(length: usize) -> Class {
        Class::Length(length_class(length))
    }

    #[test]
    fn estimates_hold_until_drafts_say_otherwise() {
        let mut acceptance = Acceptance::default();
        let [likely, unlikely] = [0.9, 0.3].map(|probability| {
            let grades = Grades::new(&[probability]);
            Class::new(1, 0, grades)
        });
        assert!((acceptance.probability(likely, 1.0) - 0.9).abs() < 0.05);
        assert!((acceptance.probability(unlikely, 1.0) - 0.3).abs() < 0.05);
        // Drafts by match length have counts of their own.
        (0..500).for_each(|_| acceptance.learn(1, matching(1), false));
        assert!((acceptance.probability(likely, 1.0) - 0.9).abs() < 0.05);
        // An estimate weighs as much as twenty drafts.
        (0..20).for_each(|_| acceptance.learn(2, likely, false));
        assert!((acceptance.probability(likely, 1.0) - 0.45).abs() < 0.05);
        (0..500).for_each(|round| acceptance.learn(2, likely, round % 2 == 0));
        assert!((acceptance.probability(likely, 1.0) - 0.5).abs() < 0.1);
        assert!((acceptance.probability(unlikely, 1.0) - 0.3).abs() < 0.05);
    }

    #[test]
    fn contexts_differ_from_what_all_have_in_common() {
        let mut acceptance = Acceptance::default();
        for round in 0..2000 {
            acceptance.learn(1, matching(2), round % 10 != 0);
            acceptance.learn(2, matching(2), round % 10 == 0);
            acceptance.learn(3, matching(9), true);
        }
        let probability =
            |length, context| acceptance.probability(matching(length), acceptance.odds(context));
        for (length, context, wanted) in [
            (2, 1, 0.9),
            (2, 2, 0.1),
            (2, 4, 0.5),
            (9, 3, 1.0),
            (9, 4, 1.0),
        ] {
            let found = probability(length, context);
            assert!(
                (found - wanted).abs() < 0.06,
                "{found} for {context} at {length}"
            );
        }
        // A length without counts is like the others.
        let all = probability(30, 4);
        assert!((all - 2.0 / 3.0).abs() < 0.06, "{all}");
    }

    #[test]
    fn a_change_is_noticed() {
        let mut acceptance = Acceptance::default();
        (0..1000).for_each(|_| acceptance.learn(1, matching(2), false));
        assert!(acceptance.probability(matching(2), acceptance.odds(1)) < 0.01);
        (0..60).for_each(|_| acceptance.learn(1, matching(2), true));
        assert!(acceptance.probability(matching(2), acceptance.odds(1)) > 0.5);
        assert!(
            acceptance.probability(matching(2), 1.0) < 0.2,
            "the others have not changed yet"
        );
    }

    #[test]
    fn forgotten_contexts_do_not_accumulate() {
        let mut acceptance = Acceptance::default();
        for context in 0..1_000_000 {
            acceptance.learn(context, matching(2), true);
        }
        assert!(acceptance.young.len() + acceptance.old.len() <= 2 * CONTEXTS);
        // One that is counted again moves to the young ones.
        let old = *acceptance.old.keys().next().unwrap();
        acceptance.learn(old, matching(2), true);
        assert!(acceptance.young.contains_key(&old) && !acceptance.old.contains_key(&old));
        let Record { right, wrong, .. } = acceptance.young[&old];
        assert_eq!((right, wrong), (1.95, 0.0));
    }

    #[test]
    fn lengths_are_distinguished_while_it_matters() {
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 300].map(length_class),
            [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 8]
        );
    }
}
