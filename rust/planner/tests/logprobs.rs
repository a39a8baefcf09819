//! Log-probabilities: which positions are staged for a pass and for a graph, and how they are answered.

use std::collections::{BTreeMap, HashMap};

use crate::common::answer::answer;
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::{memory, next_group, next_pass};
use crate::common::generate::{self, VOCAB};
use crate::common::logprobs::{self, TokenCounts};
use pie_planner::{
    ComputedPlan, ForwardTimings, Layout, Limits, Outputs, Plan, Planner, STEP_EXTRA_WORDS,
    STEP_TOP, StageError, StepMemory,
};
use pie_wire::{
    ForwardRequest, LogprobOptions, LogprobRows, LogprobShape, PromptLogprobs, Sampler,
    split_request, split_response,
};
use proptest::collection::{hash_map, vec};
use proptest::prelude::*;

fn asked() -> impl Strategy<Value = LogprobOptions> {
    let prompt = (0_u32..40, 0_u32..60, 0..VOCAB).prop_map(|(from, end, next)| PromptLogprobs {
        from,
        end,
        next,
    });
    let top = prop_oneof![4 => 0_u32..4, 1 => Just(VOCAB)];
    let prompt = proptest::option::weighted(0.7, prompt);
    let hidden = prop_oneof![3 => Just(0), 1 => 1_u32..9];
    (any::<bool>(), top, vec(0..VOCAB, 0..4), prompt, hidden).prop_map(
        |(scaled, top, token_ids, prompt, hidden)| LogprobOptions {
            hidden,
            scaled,
            top,
            token_ids,
            prompt,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// Frames of any kind, some of whose requests ask for log-probabilities: positions, groups, answers and what does not fit.
    #[test]
    fn a_planner_with_logprobs_equals_the_naive_one(
        (limits, frames) in generate::sequence(),
        asked in vec(hash_map(0_usize..7, asked(), 0..5), 6),
        salt in any::<u32>(),
    ) {
        let mut device = Device::new(limits);
        for (number, (frame, asked)) in frames.iter().zip(asked).enumerate() {
            let requests = frame.qo_indptr.len() - 1;
            device.logprobs.asked = asked.into_iter().filter(|(at, _)| *at < requests).collect();
            let mut calls = salt.wrapping_add(number as u32);
            device.try_run(frame, |plan, slot| {
                calls = calls.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match plan.requests[slot.request].drafts.get(slot.number) {
                    Some(&draft) if calls >> 30 != 0 => draft,
                    _ if calls >> 25 == 0 => VOCAB,
                    _ => (calls >> 8) % VOCAB,
                }
            });
        }
    }
}

fn plan(
    planner: &mut Planner,
    frame: &ForwardRequest,
    asked: &HashMap<usize, LogprobOptions>,
) -> Plan {
    let bytes = logprobs::encode(frame, asked);
    let (archive, extension) = split_request(&bytes).unwrap();
    let encoded = Encoded::from_bytes(archive);
    planner
        .plan_extended(DRIVER, encoded.forward(), &extension)
        .unwrap()
}

fn top(top: u32) -> LogprobOptions {
    LogprobOptions {
        top,
        token_ids: vec![7, 8],
        ..LogprobOptions::default()
    }
}

/// A step of a graph of so many rows, and its memory.
struct Step {
    layout: Layout,
    block: Vec<u64>,
    words: Vec<i32>,
}

impl Step {
    fn new(rows: usize) -> Self {
        let layout = Layout::extended_graph(rows);
        Self {
            block: vec![u64::MAX; layout.bytes().div_ceil(8)],
            words: vec![-1; rows * 32 + 64 + STEP_EXTRA_WORDS],
            layout,
        }
    }

    fn positions(&self) -> &[[i32; 6]] {
        let field = self
            .layout
            .fields()
            .iter()
            .find(|field| field.name == "logprobs");
        let field = field.unwrap();
        let numbers: &[i32] = bytemuck::cast_slice(&self.block);
        numbers[field.offset / 4..][..field.capacity].as_chunks().0
    }

    /// Stages a plan, and answers token 40 and the words 100, 101 …
    fn run(&mut self, planner: &mut Planner, plan: Plan) -> (ComputedPlan, usize) {
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut self.block),
            mask_words: &mut self.words,
        };
        let step = planner.stage_graph(plan, &self.layout, memory, 3).unwrap();
        let words = step.logprob_words();
        (step.put_tokens(|_| 40, |word| 100 + word as u32), words)
    }
}

fn answered(
    planner: &mut Planner,
    computed: &mut ComputedPlan,
) -> (Vec<Vec<u32>>, BTreeMap<u32, TokenCounts>) {
    let mut words = vec![0_u64; planner.limits().reply_bytes as usize / 8];
    let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    let length = planner
        .reply(computed, ForwardTimings::default(), buffer)
        .unwrap();
    let (reply, extension) = split_response(&buffer[..length]).unwrap();
    let rows = extension.rows().map(|row| {
        let words: Vec<u32> = row.words().collect();
        let (prompt, tokens) = row.position_counts();
        let mut positions = words.chunks_exact(row.shape().words()).map(<[u32]>::to_vec);
        let prompt = positions.by_ref().take(prompt as usize).collect();
        let tokens = positions.take(tokens as usize).collect();
        (row.request(), TokenCounts { prompt, tokens })
    });
    (answer(reply).tokens(), rows.collect())
}

#[test]
fn a_graph_writes_the_logprobs_of_accepted_drafts() {
    let mut planner = Planner::new(LARGE, 1);
    let temperature = Sampler::Multinomial {
        temperature: 0.5,
        seed: 0,
    };
    // Of two drafts the first one is accepted.
    let requests = [
        decode(30, 5, &[1, 2]),
        decode(19, 6, &[3, 4]).verify(&[40, 8]),
        Req::new(16, 40, &[7], &[5, 6, 7]).sample(0, temperature),
    ];
    let scaled = LogprobOptions {
        scaled: true,
        ..top(3)
    };
    let asked = HashMap::from([(1, top(2)), (2, scaled)]);
    let plan = plan(&mut planner, &frame(&requests), &asked);
    assert!(plan.is_extended() && plan.request_errors().is_empty());
    let size = plan.graph_size(8).unwrap();
    assert_eq!(size.rows, 5);
    let mut step = Step::new(8);
    let (mut computed, words) = step.run(&mut planner, plan);
    // A token, two or three others with their ids, and two that are given.
    assert_eq!(words, 3 * (1 + 4 + 2) + (1 + 6 + 2));
    let one = 1.0_f32.to_bits().cast_signed();
    let positions = step.positions();
    assert_eq!(positions[0], [0; 6]);
    // Both requests have the tokens that are given after the words of masks, each its own.
    for row in 0..3 {
        assert_eq!(positions[1 + row], [1, 7 * row as i32, 2, 2, 0, one]);
    }
    assert_eq!(
        positions[4],
        [1, 21, 3, 2, 2, 0.5_f32.to_bits().cast_signed()]
    );
    assert_eq!(step.words[..4], [7, 8, 7, 8]);
    let (tokens, rows) = answered(&mut planner, &mut computed);
    assert_eq!(tokens, [vec![40], vec![40, 40], vec![40]]);
    let position =
        |first: u32, words: u32| (100 + first..100 + first + words).collect::<Vec<u32>>();
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(rows[&1].tokens, [position(0, 7), position(7, 7)]);
    assert_eq!(rows[&2].tokens, [position(21, 9)]);
}

#[test]
fn fast_replies_have_logprobs_too() {
    let mut planner = Planner::new(LARGE, 1);
    let requests = [decode(30, 5, &[1, 2]), decode(19, 6, &[3, 4])];
    let asked = HashMap::from([(1, LogprobOptions::default())]);
    let plan = plan(&mut planner, &frame(&requests), &asked);
    let (mut computed, words) = Step::new(2).run(&mut planner, plan);
    assert_eq!(words, 1);
    let mut buffer = [0_u8; 256];
    let length = planner
        .reply(&mut computed, ForwardTimings::default(), &mut buffer)
        .unwrap();
    let fast = pie_wire::fast_tokens_len(2);
    assert_eq!(
        length,
        fast + LogprobRows::ROW_BYTES + 4 + LogprobRows::END_BYTES
    );
    let (reply, _) = split_response(&buffer[..length]).unwrap();
    assert_eq!(reply.len(), fast);
}

#[test]
fn what_a_graph_cannot_find_goes_by_passes() {
    let limits = Limits {
        reply_bytes: 1 << 20,
        ..LARGE
    };
    let size = |asked: LogprobOptions| {
        let mut planner = Planner::new(limits, 1);
        let asked = HashMap::from([(0, asked)]);
        let request = decode(30, 5, &[1, 2]);
        let plan = plan(&mut planner, &frame(&[request]), &asked);
        assert!(plan.request_errors().is_empty());
        plan.graph_size(8).map(|size| size.rows)
    };
    assert_eq!(size(top(STEP_TOP)), Some(1));
    assert_eq!(size(top(STEP_TOP + 1)), None);
    let many = LogprobOptions {
        token_ids: vec![1; STEP_EXTRA_WORDS / 2 - 1],
        ..LogprobOptions::default()
    };
    assert_eq!(size(many.clone()), Some(1));
    let more = LogprobOptions { top: 1, ..many };
    assert_eq!(size(more), None, "two words more");
    let prompt = LogprobOptions {
        prompt: Some(PromptLogprobs {
            from: 0,
            end: 40,
            next: 3,
        }),
        ..top(1)
    };
    assert_eq!(size(prompt), None, "prompts go by passes");
}

/// A prompt in parts: each part has the positions of its rows, the token after the last one by its name.
#[test]
fn parts_of_a_prompt_have_their_positions() {
    let prompt: Vec<u32> = (100..112).collect();
    let mut device = Device::new(Limits {
        chunk_tokens: 3,
        max_slots: 2,
        ..LARGE
    });
    let mut run = |start: usize, end: usize, samples: bool| {
        let next = prompt.get(end).copied().unwrap_or(0);
        let asked = LogprobOptions {
            prompt: Some(PromptLogprobs {
                from: 4,
                end: prompt.len() as u32,
                next,
            }),
            ..LogprobOptions::default()
        };
        device.logprobs.asked = HashMap::from([(0, asked)]);
        let request = Req::new(16, start as u32, &prompt[start..end], &[1]);
        let request = if samples {
            request.sample((end - start) as u32 - 1, GREEDY)
        } else {
            request
        };
        device.run(&frame(&[request]), |_, _| 5);
        let positions = device.answered_logprobs.remove(&0).unwrap_or_default();
        (positions.prompt.len(), positions.tokens.len())
    };
    // Tokens 4 and 5, 6 to 10, and 11 with the one that is sampled.
    assert_eq!(run(0, 5, false), (2, 0));
    assert_eq!(run(5, 10, false), (5, 0));
    assert_eq!(run(10, 12, true), (1, 1));
    // From a cached prefix on: nothing is computed of the tokens before.
    assert_eq!(run(8, 12, true), (3, 1));
}

#[test]
fn logprob_words_of_another_number_are_refused() {
    let mut planner = Planner::new(LARGE, 1);
    let asked = HashMap::from([(0, top(2))]);
    let plan = plan(&mut planner, &frame(&[decode(30, 5, &[1, 2])]), &asked);
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let pass = next_pass(&mut planner, plan, block).unwrap_or_else(|_| panic!("a pass"));
    let mut group = next_group(&planner, pass, block).unwrap_or_else(|_| panic!("a group"));
    // A token, two others with their ids, and two that are given.
    for words in [0, 6, 8] {
        let wrong = Outputs {
            tokens: &[5],
            logprob_words: &[0; 8][..words],
            ..Outputs::default()
        };
        let (same, error) = group.put_outputs(&wrong).expect_err("7 words");
        let expected = StageError::OutputCount {
            array: "logprob_words",
            found: words,
            expected: 7,
        };
        assert_eq!(error, expected);
        group = same;
    }
    let right = Outputs {
        tokens: &[5],
        logprob_words: &[0; 7],
        ..Outputs::default()
    };
    assert!(group.put_outputs(&right).is_ok());
}

#[test]
fn shapes_read_their_positions() {
    let shape = LogprobShape {
        top: 2,
        given: 1,
        hidden: 0,
    };
    let words = [
        1.0_f32.to_bits(),
        5,
        6,
        0.5_f32.to_bits(),
        0.25_f32.to_bits(),
        2.0_f32.to_bits(),
        9,
    ];
    let positions: Vec<_> = shape.positions(&words).collect();
    assert_eq!(positions.len(), 1);
    assert_eq!(positions[0].top, [(5, 0.5), (6, 0.25)]);
    assert_eq!(
        (positions[0].token, &positions[0].given[..]),
        (1.0, &[2.0][..])
    );
}
