//! The history against lists of tokens and a matcher that compares every position.

use proptest::prelude::*;

use super::*;
use crate::reference::Reference;

/// A model of the history.
struct Model {
    depth: usize,
    half: usize,
    young: Vec<u32>,
    old: Vec<u32>,
}

impl Model {
    fn new(depth: usize, capacity: usize) -> Self {
        Self {
            depth,
            half: capacity / 2,
            young: vec![BOUNDARY],
            old: Vec::new(),
        }
    }

    fn add(&mut self, tokens: &[u32]) {
        for text in tokens.split(|&token| token == BOUNDARY) {
            let text = &text[text.len().saturating_sub(self.half.saturating_sub(1))..];
            if text.len() > 1 {
                self.add_text(text);
            }
        }
    }

    fn add_text(&mut self, text: &[u32]) {
        let context = self.depth.max(KNOWN);
        let (mut written, mut copied) = (0, None);
        for at in KNOWN.min(text.len() - 1)..text.len() {
            let has = |&index: &usize| self.young.get(index) == Some(&text[at]);
            let next = copied.map(|copied| copied + 1).filter(has);
            copied = match next {
                Some(_) if at % FOLLOWED != 0 => next,
                _ => self.expected(&text[..at], at == written).filter(has),
            };
            if copied.is_some() {
                continue;
            }
            let mut from = written;
            if at - written > context {
                self.end();
                from = at - context;
            }
            // Including the boundary at its end.
            if self.young.len() + at - from + 1 > self.half {
                self.end();
                self.old = std::mem::replace(&mut self.young, vec![BOUNDARY]);
                from = at.saturating_sub(context);
            }
            self.young.extend(&text[from..=at]);
            written = at + 1;
        }
        self.end();
    }

    fn end(&mut self) {
        if self.young.last() != Some(&BOUNDARY) {
            self.young.push(BOUNDARY);
        }
    }

    /// The position of the token that is drafted after `text`: where it last followed a different one, or became the most
    /// frequent. `written` tells whether the young generation ends with `text`.
    fn expected(&self, text: &[u32], written: bool) -> Option<usize> {
        let naive = Reference {
            text: &self.young,
            depth: self.depth,
        };
        let found = if written {
            naive.own_match()
        } else {
            naive.find(text, self.depth)
        };
        let (_, found) = found.filter(|found| found.0 >= KNOWN)?;
        let token = naive.most_frequent(&found);
        let came = (0..found.len()).rev().find(|&at| {
            let best = |seen: usize| naive.most_frequent(&found[..seen]);
            let mut before = found[..at].iter().rev();
            let before = before.find_map(|&at| naive.continuation(at));
            naive.continuation(found[at]) == token
                && best(at + 1) == token
                && (before != token || best(at) != token)
        });
        came.map(|at| found[at] + 1)
    }
}

fn texts(history: &History) -> (&[u32], &[u32]) {
    let old = history.old.as_ref().map_or(&[][..], Index::text);
    (history.young.text(), old)
}

fn held(history: &History) -> usize {
    history.generations().map(Index::len).sum()
}

#[derive(Clone, Debug)]
enum Text {
    New(Vec<u32>),
    /// Text number, where from and how many tokens, with the tokens before and after.
    Again(usize, usize, usize, Vec<u32>, Vec<u32>),
}

fn text() -> impl Strategy<Value = Text> {
    let tokens = || {
        prop_oneof![
            prop::collection::vec(0..2_u32, 0..40),
            prop::collection::vec(0..50_u32, 0..40),
            prop::collection::vec(prop_oneof![4 => 0..50_u32, 1 => Just(BOUNDARY)], 0..20),
        ]
    };
    let again = (0..50_usize, 0..40_usize, 0..60_usize, tokens(), tokens());
    prop_oneof![
        2 => tokens().prop_map(Text::New),
        3 => again.prop_map(|(number, from, count, before, after)| Text::Again(number, from, count, before, after)),
    ]
}

/// The texts that are added.
fn written(texts: Vec<Text>) -> Vec<Vec<u32>> {
    let mut written: Vec<Vec<u32>> = Vec::new();
    for text in texts {
        let tokens = match text {
            Text::New(tokens) => tokens,
            Text::Again(number, from, count, before, after) => {
                let again = written.get(number % written.len().max(1));
                let again = again.into_iter().flatten().skip(from).take(count);
                (before.iter().chain(again).chain(&after))
                    .copied()
                    .collect()
            }
        };
        written.push(tokens);
    }
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn writes_equal_the_reference(
        depth in 1..20_usize, capacity in prop_oneof![0..80_usize, Just(300), Just(100_000)],
        texts in prop::collection::vec(text(), 1..30),
    ) {
        let (mut history, mut model) = (History::new(depth, capacity), Model::new(depth, capacity));
        for text in written(texts) {
            history.add(&text, &mut Scratch::default());
            model.add(&text);
            prop_assert_eq!(self::texts(&history), (&model.young[..], &model.old[..]));
            prop_assert!(held(&history) <= capacity);
        }
    }

    #[test]
    fn all_that_was_added_is_there(
        depth in 1..20_usize, capacity in 60..400_usize, texts in prop::collection::vec(text(), 1..30),
    ) {
        let mut history = History::new(depth, capacity);
        for mut text in written(texts) {
            text.retain(|&token| token != BOUNDARY);
            let before = (held(&history), self::texts(&history).1.len());
            history.add(&text, &mut Scratch::default());
            let (young, old) = self::texts(&history);
            if old.len() == before.1 {
                prop_assert!(held(&history) <= before.0 + text.len() + 1, "more than was added");
            }
            let kept = &text[text.len().saturating_sub(capacity / 2 - 1)..];
            for run in kept.windows(KNOWN + 1) {
                let mut known = young.windows(run.len()).chain(old.windows(run.len()));
                prop_assert!(known.any(|known| known == run), "{:?} is missing", run);
            }
        }
    }
}

fn add(history: &mut History, tokens: &[u32]) {
    history.add(tokens, &mut Scratch::default());
}

#[test]
fn repeated_text_takes_no_memory() {
    let mut history = History::new(18, 100_000);
    let shared: Vec<u32> = (0..1000).collect();
    add(&mut history, &shared);
    assert_eq!(held(&history), 1001);
    add(&mut history, &shared);
    assert_eq!(held(&history), 1001);
    // Others continue differently, and match as far back as before.
    for own in [2000, 3000] {
        let before = held(&history);
        let tokens: Vec<u32> = (0..500).chain(own..own + 100).collect();
        add(&mut history, &tokens);
        assert_eq!(held(&history) - before, 18 + 100 + 1);
        let end: Vec<u32> = (400..500).chain([own]).collect();
        let found = history.find(&end, 0, &mut Scratch::default());
        assert_eq!(found.map(|(found, _)| found.length), Some(18));
    }
    // A text that repeats itself is written until it is known.
    let before = held(&history);
    add(&mut history, &[7000, 7001, 7002].repeat(100));
    assert!(held(&history) - before < 40);
}

#[test]
fn a_rare_continuation_does_not_stay_ahead() {
    let mut history = History::new(18, 100_000);
    let said = |next: u32| -> Vec<u32> { (0..12).chain(next..next + 30).collect() };
    let drafted = |history: &History| {
        let suffix: Vec<u32> = (0..12).collect();
        let (found, index) = history.find(&suffix, 0, &mut Scratch::default())?;
        Some(index.text()[index.next(found)])
    };
    for _ in 0..10 {
        add(&mut history, &said(50));
    }
    add(&mut history, &said(90));
    assert_eq!(drafted(&history), Some(90));
    // Wherever it lies in what is added.
    for before in 0..FOLLOWED as u32 {
        add(
            &mut history,
            &[(200..200 + before).collect(), said(50)].concat(),
        );
    }
    assert_eq!(drafted(&history), Some(50));
}

#[test]
fn repeated_text_outlives_the_generation() {
    let mut history = History::new(18, 2000);
    let shared: Vec<u32> = (0..200).collect();
    for context in 1..20_u32 {
        let own = 1000 * context;
        let tokens: Vec<u32> = shared.iter().copied().chain(own..own + 200).collect();
        add(&mut history, &tokens);
        let found = history.find(&shared[100..150], 0, &mut Scratch::default());
        assert_eq!(found.map(|(found, _)| found.length), Some(18));
        assert!(held(&history) <= 2000);
    }
}
