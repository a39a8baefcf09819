//! The drafter against plain lists of tokens and a matcher that compares every position.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::index::{BOUNDARY, Index};
use crate::reference::Reference;

mod copies;
mod sharing;
mod suffixes;
mod trees;

/// A model of the drafter's contexts.
#[derive(Default)]
struct Model {
    /// First position and tokens.
    contexts: HashMap<u64, (usize, Vec<u32>)>,
}

impl Model {
    fn update(&mut self, id: u64, position: usize, tokens: &[u32]) {
        let (start, text) = self.contexts.entry(id).or_insert((position, Vec::new()));
        if position < *start || position > *start + text.len() {
            (*start, *text) = (position, Vec::new());
        }
        text.truncate(position - *start);
        text.extend(tokens);
    }
}

/// A text whose words come again in other orders.
fn words(length: usize) -> Vec<u32> {
    let word = |at: usize| (at * at / 7 + at / 3) % 50;
    let tokens =
        (0..).flat_map(|at| (0..3 + word(at) % 5).map(move |part| (10 * word(at) + part) as u32));
    tokens.take(length).collect()
}

#[test]
fn rewinds_are_cheap() {
    let (text, other) = (words(40_000), words(20));
    let config = Config {
        capacity: 0,
        ..Config::default()
    };
    let step = |position: usize, tokens| Step {
        context: 1,
        position: position as u32,
        tokens,
        drafts: 4,
    };
    let work = |drafter: &Drafter| drafter.contexts.peek(&1).unwrap().index().work;
    let mut anew = 0;
    for back in [1, 100, 3000, 5000, 15_000, 30_000, 39_000, 40_000] {
        let mut drafter = Drafter::new(config).unwrap();
        let mut drafts = Drafts::default();
        drafter.step(&[step(0, &text)], &mut drafts);
        let (position, before) = (text.len() - back, work(&drafter));
        let rewinds = drafter.can_rewind(1, position);
        drafter.step(&[step(position, &other)], &mut drafts);
        let after = work(&drafter);
        // A context that starts anew has done no work before.
        let done = if rewinds { after - before } else { after };
        assert!(
            done <= 4096 + other.len(),
            "{done} tokens of work to go back by {back}"
        );
        assert!(rewinds || back > 1000, "going back by {back} starts anew");
        anew += usize::from(!rewinds);
        assert_eq!(drafter.length(1), position + other.len());
        assert_eq!(drafter.holds(1, 0, &text[..position.min(9)]), rewinds);
        // In pieces it is all there again.
        if !rewinds {
            drafter.release(1);
            for start in (0..position).step_by(1000) {
                let end = position.min(start + 1000);
                drafter.append_known(1, start as u32, &text[start..end]);
            }
            drafter.step(&[step(position, &other)], &mut drafts);
        }
        assert_eq!(
            (drafts.tokens(0).to_vec(), drafts.match_length(0)),
            expected(&drafter, 1, 4)
        );
        let (start, all) = drafter.contexts.peek(&1).unwrap().all();
        assert!(start == 0 && all == [&text[..position], &other].concat());
    }
    assert!(anew > 2, "{anew}");
}

/// The texts that a context is matched with, in the order of preference.
fn texts(drafter: &Drafter, id: u64) -> Vec<&[u32]> {
    let Some(context) = drafter.contexts.peek(&id) else {
        return Vec::new();
    };
    let history = drafter.history.iter().flat_map(History::generations);
    let indices = [context.index()].into_iter().chain(history);
    indices.map(Index::text).collect()
}

/// The expected draft of a context: the tokens and the length of the match.
fn expected(drafter: &Drafter, id: u64, count: usize) -> (Vec<u32>, usize) {
    if let Some(config) = drafter.config.suffix {
        return suffixes::expected(drafter, id, count, config);
    }
    let (depth, shortest) = (drafter.depth, drafter.config.min_n);
    let texts = texts(drafter, id);
    let Some((&own, shared)) = texts.split_first() else {
        return (Vec::new(), 0);
    };
    let start = own.iter().rposition(|&token| token == BOUNDARY);
    let suffix = &own[start.unwrap_or(0)..];
    let naive = |text| Reference { text, depth };
    let is_own = |text| std::ptr::eq::<[u32]>(text, own);
    let mut best = (naive(own).own_match().map_or(0, |found| found.0), own);
    let copied = copies::resumed(drafter, id, best.0, count);
    let known = copied.as_ref().map_or(best.0, |copied| copied.1);
    for &text in shared {
        let length = naive(text).find(suffix, depth).map_or(0, |found| found.0);
        let least = match known {
            _ if !is_own(best.1) => best.0 + 1,
            0 => 1,
            _ => known + 1 + SHARED_PENALTY,
        };
        if length >= least {
            best = (length, text);
        }
    }
    if let Some(copied) = copied.filter(|_| is_own(best.1) && count > 0) {
        return copied;
    }
    if best.0 < shortest || count == 0 {
        return (Vec::new(), 0);
    }
    let draft = Draft {
        count,
        shortest,
        own: is_own(best.1),
    };
    (naive(best.1).draft(suffix, draft), best.0)
}

fn check(drafter: &Drafter, model: &Model) {
    for (id, context) in &drafter.contexts {
        let (start, text) = context.all();
        let (known, wanted) = &model.contexts[id];
        // A context that was released for want of room has started anew.
        assert!(
            start >= *known && wanted.ends_with(&text),
            "context {id}: {text:?}, not {wanted:?}"
        );
        assert_eq!(start + text.len(), known + wanted.len());
    }
    let held = drafter.contexts.iter().map(|(_, context)| context.bytes());
    assert_eq!(held.sum::<usize>(), drafter.index_bytes);
    assert!(drafter.context_bytes() <= drafter.config.context_bytes);
    assert_eq!(drafter.contexts.iter().count(), drafter.contexts.len());
    if let Some(history) = &drafter.history {
        let generations: Vec<_> = history.generations().map(Index::len).collect();
        let tokens: usize = generations.iter().sum();
        assert!(tokens <= drafter.config.capacity, "{generations:?}");
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// Contexts with how far back their steps start, and what they add.
    Batch(Vec<(u64, i32, Vec<u32>)>),
    /// A context continues with tokens that another one has said.
    Echo(u64, u64, usize, usize),
    Release(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let id = || 0..5_u64;
    let tokens = prop_oneof![
        3 => prop::collection::vec(0..3_u32, 0..9),
        1 => prop::collection::vec(0..40_u32, 0..200),
        1 => prop::collection::vec(prop_oneof![Just(1), Just(BOUNDARY)], 0..4),
    ];
    let back = prop_oneof![6 => Just(0), 2 => 0..8_i32, 1 => 0..300_i32, 1 => -3..0_i32];
    prop_oneof![
        6 => prop::collection::vec((id(), back, tokens), 1..5).prop_map(Event::Batch),
        3 => (id(), id(), 0..200_usize, 1..40_usize).prop_map(|(to, from, start, count)| Event::Echo(to, from, start, count)),
        1 => id().prop_map(Event::Release),
    ]
}

struct Run {
    drafter: Drafter,
    drafts: Drafts,
    model: Model,
}

impl Run {
    fn new(config: Config) -> Self {
        Self {
            drafter: Drafter::new(config).expect("a valid config"),
            drafts: Drafts::default(),
            model: Model::default(),
        }
    }

    fn end(&self, id: u64) -> i32 {
        let known = self.model.contexts.get(&id);
        known.map_or(0, |(start, text)| (start + text.len()) as i32)
    }

    /// One batch; the drafts of each context's last step are compared.
    fn batch(&mut self, batch: &[(u64, i32, Vec<u32>)]) {
        let mut positions = Vec::new();
        for (id, back, tokens) in batch {
            let position = (self.end(*id) - back).max(0) as u32;
            positions.push(position);
            self.model.update(*id, position as usize, tokens);
        }
        let steps = batch.iter().zip(&positions);
        let steps = steps.map(|((context, _, tokens), &position)| Step {
            context: *context,
            position,
            tokens,
            drafts: 5,
        });
        // Later steps may have changed the history.
        let last = batch.len() - 1;
        let id = batch[last].0;
        let before = copies::before(&self.drafter, id);
        self.drafter
            .step(&steps.collect::<Vec<_>>(), &mut self.drafts);
        assert_eq!(self.drafts.len(), batch.len());
        if batch.iter().filter(|step| step.0 == id).count() == 1 {
            copies::check(&self.drafter, id, before);
        }
        let found = (
            self.drafts.tokens(last).to_vec(),
            self.drafts.match_length(last),
        );
        assert_eq!(found, expected(&self.drafter, batch[last].0, 5));
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Batch(batch) => self.batch(&batch),
            Event::Echo(to, from, start, count) => {
                let said = self
                    .model
                    .contexts
                    .get(&from)
                    .map(|(_, text)| text.iter().skip(start).take(count));
                let tokens = said.into_iter().flatten().copied().collect();
                self.batch(&[(to, 0, tokens)]);
            }
            Event::Release(id) => {
                self.drafter.release(id);
                self.model.contexts.remove(&id);
            }
        }
        self.drafter.flush_shared();
        check(&self.drafter, &self.model);
        for id in 0..5 {
            trees::check(&mut self.drafter, id, if id == 1 { 70 } else { 9 });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn contexts_and_drafts_equal_the_reference(
        depth in 1..8_usize, min_n in 1..3_usize, capacity in prop_oneof![Just(0), Just(60), Just(600), Just(100_000)],
        context_bytes in prop_oneof![1 => Just(6_000_usize), 3 => Just(1 << 30)],
        suffix in prop_oneof![Just(None), Just(Some(SuffixConfig::default()))],
        events in prop::collection::vec(event(), 1..40),
    ) {
        let config = Config { max_depth: depth, min_n: min_n.min(depth), max_n: None, capacity, context_bytes, suffix };
        let mut run = Run::new(config);
        for event in events {
            run.apply(event);
        }
        for id in 0..5 {
            run.drafter.release(id);
        }
        prop_assert_eq!((run.drafter.index_bytes, run.drafter.contexts()), (0, 0));
    }
}

fn new(capacity: usize, context_bytes: usize) -> Run {
    Run::new(Config {
        capacity,
        context_bytes,
        ..Config::default()
    })
}

impl Run {
    /// Drafts for a context after its step.
    fn say(&mut self, context: u64, position: u32, tokens: &[u32]) -> (&[u32], usize) {
        let step = Step {
            context,
            position,
            tokens,
            drafts: 4,
        };
        self.drafter.step(&[step], &mut self.drafts);
        (self.drafts.tokens(0), self.drafts.match_length(0))
    }

    fn history(&self) -> usize {
        let history = self.drafter.history.iter();
        history.flat_map(History::generations).map(Index::len).sum()
    }
}

#[test]
fn known_tokens_are_not_appended_again() {
    let mut run = new(10_000, usize::MAX);
    let text: Vec<u32> = (0..1000).collect();
    run.say(1, 0, &text);
    run.drafter.flush_shared();
    let history = run.history();
    assert!(history >= 1000);
    run.say(1, 0, &text);
    run.say(1, 300, &text[300..]);
    run.drafter.flush_shared();
    assert_eq!(run.history(), history);
}

#[test]
fn repetitive_text_leaves_room_in_trees() {
    let mut run = new(10_000, usize::MAX);
    run.say(1, 0, &[4, 5, 6, 7, 8].repeat(30));
    run.say(2, 0, &[5, 20, 21, 22].repeat(40));
    (1..3).for_each(|id| run.drafter.release(id));
    run.say(3, 0, &[9, 4, 5]);
    let mut tree = Tree::default();
    run.drafter.tree(3, 12, &mut tree);
    let first = tree.tokens().iter().zip(tree.parents());
    let first = first.filter(|&(_, &parent)| parent == crate::ROOT);
    assert_eq!(first.map(|(&token, _)| token).collect::<Vec<_>>(), [6, 20]);
}

#[test]
fn in_its_own_text_the_last_continuation_comes_first() {
    for (times, wanted) in [(3, 20), (4, 10)] {
        let mut run = new(10_000, usize::MAX);
        let often = (0..times).flat_map(|at| [1, 10, 100 + at]);
        let text: Vec<u32> = often.chain([1, 20, 30, 1]).collect();
        let end = text.len() as u32;
        assert_eq!(run.say(1, 0, &text).0[0], wanted);
        // What comes again is the last again; what is taken back was never said.
        assert_eq!(run.say(1, end, &[10, 40, 1]).0[0], 10);
        assert_eq!(run.say(1, end, &[]).0[0], wanted);
        // To others the more frequent one comes first.
        run.drafter.release(1);
        assert_eq!(run.say(2, 0, &[50, 1]).0[0], 10);
    }
}

#[test]
fn the_least_recently_used_context_is_released() {
    let text: Vec<u32> = (0..500).collect();
    let mut probe = new(0, usize::MAX);
    probe.say(1, 0, &text);
    let mut run = new(0, 5 * probe.drafter.index_bytes / 2);
    run.say(1, 0, &text);
    run.say(2, 0, &text);
    run.say(1, 500, &[]);
    run.say(3, 0, &text);
    run.drafter.flush_shared();
    let known: Vec<_> = run.drafter.contexts.iter().map(|(&id, _)| id).collect();
    assert_eq!(known, [3, 1]);
}

#[test]
fn limits_are_checked() {
    let config = Config::default();
    for (config, wanted) in [
        (
            Config {
                max_depth: 0,
                ..config
            },
            "max_depth is 0; it must be from 1 to 255",
        ),
        (
            Config {
                max_depth: 256,
                ..config
            },
            "max_depth is 256; it must be from 1 to 255",
        ),
        (
            Config { min_n: 0, ..config },
            "min_n is 0; it must be from 1 to 18, the smaller of max_depth and max_n",
        ),
        (
            Config {
                min_n: 5,
                max_n: Some(4),
                ..config
            },
            "min_n is 5; it must be from 1 to 4, the smaller of max_depth and max_n",
        ),
        (
            Config {
                capacity: 1 << 31,
                ..config
            },
            "capacity is 2147483648; it must be at most 1073741824",
        ),
        (
            suffixes::config(0.0, 0.1),
            "max_spec_factor is 0; it must be a number above 0",
        ),
        (
            suffixes::config(1.0, 1.5),
            "min_token_prob is 1.5; it must be from 0 to 1",
        ),
    ] {
        assert_eq!(Drafter::new(config).unwrap_err().to_string(), wanted);
    }
    // Matches longer than `max_n` count as that long.
    let mut run = Run::new(Config {
        max_n: Some(4),
        ..config
    });
    assert_eq!(
        run.say(1, 0, &[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]),
        (&[6, 1, 2, 3][..], 4)
    );
}

#[test]
fn out_of_range_tokens_end_the_text() {
    let mut run = new(1000, usize::MAX);
    for large in [BOUNDARY, 1 << 24, (1 << 24) + 2, u32::MAX] {
        let text = [1, 2, 3, large, 2, 9, large, 2, 9, large, 1, 2];
        // They are taken for the text's start, which is before its first token, too.
        assert_eq!(run.say(1, 0, &text), (&[3][..], 3));
        assert_eq!(run.say(1, 12, &[7, 9]), (&[][..], 0));
        assert_eq!(run.say(1, 14, &[large]), (&[][..], 0));
    }
}
