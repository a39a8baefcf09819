//! The index against a matcher that compares every position.

use proptest::prelude::*;

use super::suffix::{Speculation, SuffixLimits};
use super::*;
use crate::reference::Reference;

fn own_draft(index: &Index, draft: Draft) -> Vec<u32> {
    let mut suffix = index.tail().to_vec();
    let start = suffix.len();
    let first = index
        .own_match()
        .filter(|found| found.length >= draft.shortest);
    if let Some(first) = first {
        index.draft(first, draft, &mut suffix, &mut Scratch::default());
    }
    suffix.split_off(start)
}

fn check(index: &Index, shortest: usize) {
    let naive = Reference {
        text: index.text(),
        depth: index.depth,
    };
    let draft = Draft {
        count: 6,
        shortest,
        own: true,
    };
    let last = index.text.len() - 1;
    if index.text[last] != BOUNDARY {
        let found = index.own_match().map(|found| found.length);
        assert_eq!(
            found,
            naive.own_match().map(|found| found.0),
            "{:?}",
            index.text()
        );
        let suffix = &index.text()[index.segment..];
        assert_eq!(
            own_draft(index, draft),
            naive.draft(suffix, draft),
            "{:?}",
            index.text()
        );
        check_speculation(index, suffix, true);
    }
}

fn check_foreign(index: &Index, suffix: &[u32], shortest: usize) {
    let naive = Reference {
        text: index.text(),
        depth: index.depth,
    };
    let draft = Draft {
        count: 6,
        shortest,
        own: false,
    };
    let mut scratch = Scratch::default();
    let found = index.find(suffix, index.depth, &mut scratch);
    let expected = naive.find(suffix, index.depth);
    assert_eq!(
        found.map(|found| found.length),
        expected.map(|found| found.0),
        "{:?} {suffix:?}",
        index.text()
    );
    let mut drafted = suffix.to_vec();
    if let Some(found) = found.filter(|found| found.length >= shortest) {
        index.draft(found, draft, &mut drafted, &mut scratch);
    }
    assert_eq!(
        drafted[suffix.len()..],
        naive.draft(suffix, draft),
        "{:?} {suffix:?}",
        index.text()
    );
    check_speculation(index, suffix, false);
}

/// Suffix decoding after `suffix` equals that of the reference, whatever its limits are.
fn check_speculation(index: &Index, suffix: &[u32], own: bool) {
    let naive = Reference {
        text: index.text(),
        depth: index.depth,
    };
    for (count, shortest, factor, min_probability) in
        [(9, 1, 4.0, 0.1), (5, 2, 1.0, 0.0), (20, 1, 0.5, 0.3)]
    {
        let limits = SuffixLimits {
            count,
            shortest,
            factor,
            min_probability,
            own,
        };
        let (mut text, mut found) = (suffix.to_vec(), Speculation::default());
        index.speculate(limits, &mut text, &mut found);
        let expected = naive.speculate(suffix, limits);
        assert_eq!(text, suffix);
        let found = (
            found.tokens().to_vec(),
            found.probabilities().to_vec(),
            found.match_length(),
        );
        assert_eq!(found, expected, "{:?} {suffix:?} {limits:?}", index.text());
    }
}

#[test]
fn the_longest_draft_is_not_rounded_off() {
    let limits = SuffixLimits {
        count: 64,
        shortest: 1,
        factor: 0.84,
        min_probability: 0.1,
        own: true,
    };
    assert_eq!(
        [1, 2, 75, 76].map(|length| limits.most(length)),
        [0, 1, 63, 63]
    );
    let unlimited = SuffixLimits {
        factor: f32::INFINITY,
        ..limits
    };
    assert_eq!(
        [0, 1, 255].map(|length| unlimited.most(length)),
        [0, 64, 64]
    );
}

#[test]
fn repetitive_text_is_followed_from_few_matches() {
    // Each match length is a candidate, and the longest says all.
    for period in [1, 2, 20] {
        let mut index = Index::new(255, true);
        (0..1000).for_each(|at| index.append(at % period));
        let (mut suffix, mut best) = (index.tail().to_vec(), Speculation::default());
        for own in [true, false] {
            let limits = SuffixLimits {
                count: 64,
                shortest: 1,
                factor: 4.0,
                min_probability: 0.1,
                own,
            };
            index.speculate(limits, &mut suffix, &mut best);
        }
        assert_eq!((best.tokens().len(), best.match_length()), (64, 255));
        assert_eq!(best.followed, 1, "period {period}");
    }
}

/// Everything that later appends and rewinds depend on.
fn state(index: &Index) -> impl PartialEq + std::fmt::Debug + use<> {
    let nodes = index.nodes.iter().map(|node| {
        (
            [node.best, node.best_count, node.count, node.second],
            node.edges,
        )
    });
    (
        index.text.clone(),
        nodes.collect::<Vec<_>>(),
        index.path.clone(),
        index.segment,
    )
}

fn fibonacci(length: usize) -> Vec<u32> {
    let (mut a, mut b) = (vec![1], vec![1, 2]);
    while b.len() < length {
        let next = [&b[..], &a[..]].concat();
        (a, b) = (b, next);
    }
    b.truncate(length);
    b
}

/// Every word of `order` letters once.
fn de_bruijn(letters: u32, order: u32) -> Vec<u32> {
    let words = letters.pow(order);
    let mut seen = vec![false; words as usize];
    let (mut word, mut text) = (0, vec![0; order as usize]);
    seen[0] = true;
    while let Some(letter) = (0..letters)
        .rev()
        .find(|letter| !seen[((word * letters + letter) % words) as usize])
    {
        word = (word * letters + letter) % words;
        seen[word as usize] = true;
        text.push(letter);
    }
    text
}

#[derive(Clone, Debug)]
enum Change {
    Append(Vec<u32>),
    Repeat(usize, usize),
    Rewind(usize),
    End,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => prop::collection::vec(0..3_u32, 1..8).prop_map(Change::Append),
        2 => prop::collection::vec(0..50_u32, 1..8).prop_map(Change::Append),
        4 => (0..200_usize, 1..12_usize).prop_map(|(from, count)| Change::Repeat(from, count)),
        3 => (1..20_usize).prop_map(Change::Rewind),
        1 => Just(Change::Rewind(1000)),
        1 => Just(Change::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn matches_equal_the_reference(
        depth in 1..8_usize, shortest in 1..3_usize, changes in prop::collection::vec(change(), 1..40),
    ) {
        let mut index = Index::new(depth, true);
        for change in changes {
            match change {
                Change::Append(tokens) => index.extend(&tokens),
                Change::Repeat(from, count) => {
                    let tokens: Vec<_> = index.text().iter().skip(from).take(count).copied().collect();
                    index.extend(&tokens);
                }
                Change::Rewind(count) => index.rewind(index.len().saturating_sub(count)),
                Change::End => index.end_text(),
            }
            check(&index, shortest);
            let text = index.text();
            for end in 1..text.len().min(12) {
                let start = text[..=end].iter().rposition(|&token| token == BOUNDARY).unwrap_or(0);
                let longer = [&text[start..=end], &[1, 0]].concat();
                check_foreign(&index, &text[start..=end], shortest);
                check_foreign(&index, &longer, shortest);
            }
        }
    }

    #[test]
    fn rewinding_restores_the_index(
        depth in 1..8_usize, tokens in prop::collection::vec(0..4_u32, 1..120), back in 1..60_usize,
    ) {
        let mut index = Index::new(depth, true);
        let mut states = Vec::new();
        for &token in &tokens {
            states.push(state(&index));
            index.append(if token == 3 { BOUNDARY } else { token });
        }
        while let Some(wanted) = states.pop().filter(|_| states.len() + back >= tokens.len()) {
            index.rewind(states.len());
            prop_assert_eq!(state(&index), wanted);
        }
        index.rewind(0);
        prop_assert_eq!(state(&index), state(&Index::new(depth, true)));
    }
}

#[test]
fn adversarial_texts() {
    let texts = [
        vec![7; 60],
        fibonacci(150),
        de_bruijn(2, 6),
        de_bruijn(3, 4),
        (0..60).collect(),
        [1, 2, 3, 4, 5].repeat(20),
    ];
    for text in texts {
        for depth in [1, 2, 3, 5, 18, 255] {
            let mut index = Index::new(depth, true);
            for &token in &text {
                index.append(token);
                check(&index, 1);
            }
            for left in (0..text.len()).rev().step_by(7) {
                index.rewind(left);
                check(&index, 1);
            }
        }
    }
}
