//! What contexts share by the history.

use super::*;

#[test]
fn repeated_text_is_not_shared_again() {
    let mut run = new(10_000, usize::MAX);
    let text: Vec<u32> = (0..1000).collect();
    run.drafter.append_known(1, 0, &text);
    run.drafter.flush_shared();
    assert_eq!((run.history(), run.drafter.length(1)), (0, 1000));
    assert_eq!(run.say(1, 1000, &[7, 8]).0, [9, 10, 11, 12]);
    // What follows is, with the tokens before it.
    run.say(1, 1002, &text[..200]);
    run.drafter.flush_shared();
    assert_eq!(run.history(), 2 + 200 + 8 + 1);
}

#[test]
fn rewound_text_is_shared_later() {
    let mut run = new(10_000, usize::MAX);
    let text: Vec<u32> = (0..300).collect();
    let mut append = |position, tokens| {
        let step = Step {
            context: 1,
            position,
            tokens,
            drafts: 0,
        };
        run.drafter.append(&step, &mut run.drafts);
    };
    append(0, &text[..200]);
    append(100, &[]);
    run.drafter.flush_shared();
    assert_eq!(run.history(), 0);
    run.say(1, 100, &text[100..]);
    run.drafter.flush_shared();
    assert_eq!(run.history(), 301);
}

#[test]
fn matches_do_not_cross_texts_of_the_history() {
    let mut run = new(10_000, usize::MAX);
    for (context, start) in [(1, 100), (2, 200)] {
        run.say(context, 0, &(start..start + 50).collect::<Vec<_>>());
        run.drafter.release(context);
    }
    assert_eq!(run.say(3, 0, &[145, 146, 147]), (&[148, 149][..], 3));
}

#[test]
fn a_short_context_is_shared_on_release() {
    let mut run = new(10_000, usize::MAX);
    run.say(1, 0, &[5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(run.say(2, 0, &[4, 5, 6]).0, []);
    run.drafter.release(1);
    assert_eq!(run.say(2, 0, &[4, 5, 6]), (&[7, 8, 9, 10][..], 2));
}

#[test]
fn a_history_match_must_be_longer() {
    let mut run = new(10_000, usize::MAX);
    run.say(1, 0, &[9, 9, 1, 2, 3, 4, 50, 51, 52, 53]);
    run.drafter.release(1);
    // Its own text knows (3 4); the history (2 3 4), then (1 2 3 4).
    assert_eq!(
        run.say(2, 0, &[3, 4, 60, 61, 2, 3, 4]),
        (&[60, 61, 2, 3][..], 2)
    );
    assert_eq!(
        run.say(3, 0, &[3, 4, 60, 61, 1, 2, 3, 4]),
        (&[50, 51, 52, 53][..], 4)
    );
}

#[test]
fn contexts_that_decode_together_do_not_share_in_the_same_step() {
    let mut run = new(200_000, usize::MAX);
    let (mut most, mut before) = (0, 0);
    for at in 0..600_u32 {
        let tokens: Vec<_> = (0..64).map(|context| [context * 1000 + at]).collect();
        let step = |(tokens, context)| Step {
            context,
            position: at,
            tokens,
            drafts: 0,
        };
        let steps: Vec<_> = tokens
            .iter()
            .map(|tokens| &tokens[..])
            .zip(1..)
            .map(step)
            .collect();
        run.drafter.step(&steps, &mut run.drafts);
        most = most.max(run.history() - before);
        before = run.history();
    }
    assert!(most < 500, "{most} in one step");
    // Prompts do not wait.
    let prompts: Vec<u32> = (100_000..110_000).collect();
    let step = |(tokens, context)| Step {
        context,
        position: 0,
        tokens,
        drafts: 0,
    };
    let steps: Vec<_> = prompts.chunks(1000).zip(101..).map(step).collect();
    run.drafter.step(&steps, &mut run.drafts);
    run.drafter.flush_shared();
    assert_eq!(run.history(), before + 10 * 1001);
    assert!(before > 64 * 400, "{before} of all");
}

#[test]
fn a_shared_prompt_is_in_the_history_once() {
    let mut run = new(100_000, usize::MAX);
    let shared: Vec<u32> = (0..2000).collect();
    for context in 1..=100_u32 {
        let own = 10_000 * context;
        let tokens: Vec<_> = shared.iter().copied().chain(own..own + 50).collect();
        run.say(context.into(), 0, &tokens);
        run.drafter.flush_shared();
    }
    // The first one whole, of the others what they say and the longest match before it.
    assert_eq!(run.history(), 2051 + 99 * (18 + 50 + 1));
    assert_eq!(run.say(200, 0, &shared[30..40]).0, &shared[40..44]);
}
