//! Suffix decoding of the drafter: the best draft of all its sources.

use super::{Drafter, Reference, Run, copies, texts};
use crate::context::Context;
use crate::copy_tracker::RESUMED_BONUS;
use crate::index::suffix::{Speculation, SuffixLimits};
use crate::index::{BOUNDARY, share};
use crate::{Config, Grades, SuffixConfig};

pub(super) fn config(max_spec_factor: f32, min_token_prob: f32) -> Config {
    Config {
        suffix: Some(SuffixConfig {
            max_spec_factor,
            min_token_prob,
        }),
        ..Config::default()
    }
}

/// The draft with the largest sum of probabilities: of the resumed copy, the own text, or the history.
pub(super) fn expected(
    drafter: &Drafter,
    id: u64,
    count: usize,
    config: SuffixConfig,
) -> (Vec<u32>, usize) {
    let texts = texts(drafter, id);
    let Some(&own) = texts.first() else {
        return (Vec::new(), 0);
    };
    let start = own.iter().rposition(|&token| token == BOUNDARY);
    let suffix = &own[start.unwrap_or(0)..];
    let limits = SuffixLimits {
        count,
        shortest: drafter.config.min_n,
        factor: config.max_spec_factor,
        min_probability: config.min_token_prob,
        own: true,
    };
    let mut copied = Speculation::default();
    if let Some(copying) = drafter.contexts.peek(&id).and_then(Context::resumed) {
        let (tokens, length) = copies::resumed(drafter, id, 0, count).unwrap_or_default();
        assert!(length == 0 || length == copying.matched + RESUMED_BONUS);
        copied.offer_copy(&tokens, length, limits);
    }
    let mut best = (
        copied.tokens().to_vec(),
        copied.probabilities().to_vec(),
        copied.match_length(),
    );
    for (text, own) in texts.iter().zip([true, false, false]) {
        let naive = Reference {
            text,
            depth: drafter.depth,
        };
        let found = naive.speculate(suffix, SuffixLimits { own, ..limits });
        if found.1.iter().sum::<f32>() > best.1.iter().sum::<f32>() {
            best = found;
        }
    }
    (best.0, best.2)
}

#[test]
fn a_draft_is_as_long_as_its_probability_says() {
    let mut run = Run::new(config(4.0, 0.1));
    // What followed a long match once is copied far; a short match is followed by a few tokens.
    let text: Vec<u32> = (0..40).chain(0..20).collect();
    let (far, length) = run.say(1, 0, &text);
    assert_eq!((far, length), (&[20, 21, 22, 23][..], 18));
    let (near, length) = run.say(2, 0, &[1, 2, 3, 4, 5, 6, 1]);
    assert_eq!((near, length), (&[2, 3, 4][..], 1));
    // One of eight continuations is not worth a draft.
    let unlike: Vec<u32> = (10..18).flat_map(|token| [1, token]).chain([1]).collect();
    run.say(3, 0, &unlike);
    assert!(run.drafts.tokens(0).len() <= 1);
}

#[test]
fn a_shorter_match_that_says_more_is_followed() {
    let mut run = Run::new(config(4.0, 0.1));
    // After 9 and 1 came 50 once, but after 1 alone 7 eight times.
    let often = (0..8).flat_map(|at| [1, 7, 8, 20 + at]);
    for context in 1..9 {
        let text: Vec<u32> = often.clone().collect();
        run.say(context, 0, &text);
        run.drafter.release(context);
    }
    let (found, length) = run.say(20, 0, &[9, 1]);
    assert_eq!((&found[..2], length), (&[7, 8][..], 1));
}

#[test]
fn drafts_have_grades() {
    let mut run = Run::new(config(4.0, 0.1));
    let text: Vec<u32> = (0..40).chain(0..20).collect();
    run.say(1, 0, &text);
    // The text before was continued once; a match that is in the text twice has at most 18 tokens.
    let mut likely = 1.0;
    let reached = [18, 18, 19, 20].map(|length| {
        likely *= share(1.0, 1.0, length) as f32;
        likely
    });
    let grades = Grades::new(&reached);
    assert_eq!(run.drafts.grades(0), grades);
    let mut run = Run::new(Config::default());
    run.say(1, 0, &text);
    assert_eq!(run.drafts.grades(0), Grades::NONE);
}
