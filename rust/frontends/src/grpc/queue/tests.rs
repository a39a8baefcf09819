//! Mailboxes against the obvious: a list of tokens for each sequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Each token has two words, and the prompt's come with the first.
fn words_of(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().flat_map(|&token| [token, !token]).collect()
}

const PROMPT_WORDS: [u32; 3] = [1, 2, 3];

fn delta(sample: u32, tokens: Vec<u32>, finish: Option<FinishReason>) -> OutputDelta {
    OutputDelta {
        logprobs: words_of(&tokens),
        tokens,
        finish,
        cached_tokens: 3,
        ..OutputDelta::finished(1, sample, FinishReason::Aborted)
    }
}

/// A move of the service or of the client.
#[derive(Clone, Debug)]
enum Move {
    Put {
        sample: u32,
        tokens: Vec<u32>,
        ends: bool,
    },
    Take,
}

fn moves(samples: u32) -> impl Strategy<Value = Vec<Move>> {
    let put = (
        0..samples + 1,
        vec(any::<u32>(), 0..4),
        prop::bool::weighted(0.1),
    );
    let put = put.prop_map(|(sample, tokens, ends)| Move::Put {
        sample,
        tokens,
        ends,
    });
    vec(prop_oneof![2 => put, 3 => Just(Move::Take)], 0..120)
}

/// What the client must get of a sequence, and what it has got.
#[derive(Clone, Default)]
struct Model {
    said: Vec<u32>,
    got: Vec<u32>,
    has_ended: bool,
    got_end: bool,
}

fn check(part: Part, models: &mut [Model], interval: StreamInterval) {
    match part {
        Part::Tokens {
            sample,
            tokens,
            counts,
            words,
        } => {
            let model = &mut models[sample as usize];
            assert!(interval.streams && !model.got_end && !tokens.is_empty());
            let first = model.got.is_empty();
            assert_eq!(words.prompt, first.then(|| PROMPT_WORDS.to_vec()));
            assert_eq!(words.tokens, words_of(&tokens));
            model.got.extend(&tokens);
            // Nothing is kept back, and nothing comes early.
            assert_eq!(model.got, model.said);
            assert_eq!(
                counts,
                Counts {
                    tokens: model.said.len() as u32,
                    cached: 3
                }
            );
            let passed = |count: usize| count.div_ceil(interval.interval as usize);
            let before = model.got.len() - tokens.len();
            assert!(first || model.has_ended || passed(model.got.len()) > passed(before));
        }
        Part::End {
            sample,
            tokens,
            counts,
            words,
            end,
        } => {
            let model = &mut models[sample as usize];
            assert!(model.has_ended && !model.got_end && end == FinishReason::Length);
            assert!(!interval.streams || model.got == model.said);
            assert_eq!(tokens, model.said);
            assert_eq!(words.tokens, words_of(&tokens));
            assert_eq!(words.prompt.is_some(), !tokens.is_empty());
            assert_eq!(counts.tokens as usize, model.said.len());
            model.got_end = true;
        }
    }
}

proptest! {
    #[test]
    fn every_token_comes_once_in_order_and_then_the_end(
        (samples, moves) in (1..4_u32).prop_flat_map(|samples| (Just(samples), moves(samples))),
        streams: bool,
        interval in 1..5_u32,
    ) {
        let interval = StreamInterval { streams, interval };
        let queue = OutputQueue::new(samples, interval);
        let mut models = vec![Model::default(); samples as usize];
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(Arc::clone(&bell));
        let mut context = Context::from_waker(&waker);
        let mut waits = false;
        // At the end everything ends, and the client takes all there is.
        let ends = (0..samples).map(|sample| Move::Put { sample, tokens: vec![7], ends: true });
        let takes = std::iter::repeat_n(Move::Take, 4 * samples as usize + 4);
        for step in moves.into_iter().chain(ends).chain(takes) {
            match step {
                Move::Put { sample, tokens, ends } => {
                    let mut said = delta(sample, tokens.clone(), ends.then_some(FinishReason::Length));
                    let begins = |model: &Model| model.said.is_empty() && !model.has_ended;
                    if !tokens.is_empty() && models.get(sample as usize).is_some_and(begins) {
                        said.prompt_logprobs = PROMPT_WORDS.to_vec();
                    }
                    let woken = queue.put(said);
                    // One that waits is woken once, and only if there is something.
                    prop_assert!(woken.is_none() || waits);
                    waits &= woken.is_none();
                    if let Some(model) = models.get_mut(sample as usize)
                        && !model.has_ended
                    {
                        model.said.extend(tokens);
                        model.has_ended = ends;
                    }
                }
                Move::Take => match queue.take(&mut context) {
                    Poll::Ready(Some(part)) => check(part, &mut models, interval),
                    Poll::Ready(None) => prop_assert!(models.iter().all(|model| model.got_end)),
                    Poll::Pending => {
                        waits = true;
                        prop_assert!(models.iter().all(|model| !model.has_ended || model.got_end));
                    }
                },
            }
        }
        prop_assert!(models.iter().all(|model| model.got_end));
        prop_assert_eq!(bell.0.load(Ordering::Relaxed), 0, "who puts wakes, not the queue");
    }
}

#[test]
fn a_waiting_client_is_woken_by_what_it_gets() {
    let interval = StreamInterval {
        streams: true,
        interval: 2,
    };
    let queue = OutputQueue::new(2, interval);
    let mut context = Context::from_waker(Waker::noop());
    assert!(queue.take(&mut context).is_pending());
    assert!(queue.put(delta(0, vec![], None)).is_none(), "nothing");
    assert!(
        queue.put(delta(0, vec![1], None)).is_some(),
        "the first token"
    );
    assert!(queue.take(&mut context).is_ready());
    assert!(queue.take(&mut context).is_pending());
    assert!(
        queue.put(delta(0, vec![2], None)).is_none(),
        "the second waits for the third"
    );
    assert!(
        queue
            .put(delta(1, vec![], Some(FinishReason::Length)))
            .is_some()
    );
    assert!(
        queue.put(delta(0, vec![3], None)).is_none(),
        "the end has woken it"
    );
    // In the order in which they came to be.
    let Poll::Ready(Some(Part::End { sample: 1, .. })) = queue.take(&mut context) else {
        panic!("the other one ends");
    };
    let Poll::Ready(Some(Part::Tokens { tokens, .. })) = queue.take(&mut context) else {
        panic!("tokens");
    };
    assert_eq!(tokens, [2, 3]);
}
