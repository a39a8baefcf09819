//! Size of a step's rows in a frame, in bytes, for the scheduler's budget.

use pie_scheduler::FrameBytes;
use pie_wire::{
    ArchivedAdapterBinding, ArchivedBrle, ArchivedSampler, MAX_KEPT_WORDS, REQUEST_ROOT_LEN,
    params_len,
};

use super::params::{LARGE, MAX_FREED};
use crate::sampling::RowParams;

const WORD: u32 = size_of::<u32>() as u32;

/// Bytes of a frame besides its rows: root, alignment, first offsets, the extension's trailer, freed handles.
const FRAME: u32 = REQUEST_ROOT_LEN as u32 + 256 + MAX_FREED as u32 * PARAMS;
/// Bytes of parameters without lists: 19 words.
const PARAMS: u32 = 19 * WORD;

/// Upper bounds on the bytes of each part of a frame with `capacity` bytes, `image_bytes` of them for images.
pub(crate) fn frame_bytes(vocab_size: u32, capacity: usize, image_bytes: u32) -> FrameBytes {
    let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    // Run lengths are sent only where they take at most one word more than bits.
    let mask = WORD * (vocab_size.div_ceil(32) + 1);
    // Ten offsets, last page length, sampling index; context id; a flag.
    let own = (10 + 2) * WORD + 8 + 1;
    let parts = size_of::<ArchivedSampler>()
        + size_of::<ArchivedAdapterBinding>()
        + size_of::<ArchivedBrle>();
    // Three run lengths of a mask that forbids nothing.
    let row = own + parts as u32 + 4 * WORD + EXTENSION;
    FrameBytes {
        max: capacity.saturating_sub(FRAME).saturating_sub(image_bytes),
        row,
        // Id and position; image tokens have three more positions.
        token: 5 * WORD,
        draft: 2 * WORD,
        page: WORD,
        listed: WORD,
        mask,
        // The other half may belong to finished requests until it is replaced.
        params: (size_of::<u32>() * MAX_KEPT_WORDS / 2) as u64,
    }
}

/// Bytes of an extension row without lists: 8 words.
const EXTENSION: u32 = 8 * WORD;

/// Bytes of the parameters that a request's first row carries, and of the handles that are freed to make room for them.
pub(crate) fn params_bytes(params: &RowParams) -> u32 {
    let bytes = params.extension.as_deref().map_or(0, params_len);
    let bytes = bytes + bytes / LARGE * PARAMS as usize;
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pie_scheduler::{
        Config, GrammarHandle, GrammarMatcher, GrammarStatus, Limits, Mask, NewRequest, Outputs,
        StepOutput,
    };
    use pie_scheduler::{Finish, Scheduler, ValidationError};
    use pie_wire::{LogprobOptions, Penalties, RequestExtension};

    use super::*;
    use crate::frame::FrameBuilder;
    use crate::sampling::SamplingParams;
    use crate::step_loop::frame_row;

    const VOCAB: u32 = 262_144;
    const CAPACITY: usize = 8 << 20;

    /// Every mask is another one, and shorter as bits.
    #[derive(Debug)]
    struct Changing(u32);

    impl GrammarHandle for Changing {
        fn create_matcher(&self, _: u32, _: bool) -> GrammarStatus {
            GrammarStatus::Ready(Box::new(Self(self.0)))
        }

        fn is_compiling(&self) -> bool {
            false
        }
    }

    impl GrammarMatcher for Changing {
        fn accept_token(&mut self, _: u32, _: u32) -> bool {
            self.0 += 1000;
            false
        }

        fn next_mask(&mut self, _: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
            let words = (0..VOCAB / 32).map(|word| word.wrapping_mul(self.0 + 1) | 0x5555_0001);
            Ok(Some(Arc::new(words.collect())))
        }
    }

    /// A scheduler whose steps are encoded into slots of [`CAPACITY`] bytes, and answered with token 7.
    struct Harness {
        scheduler: Scheduler<RowParams>,
        builder: FrameBuilder,
        frame: Vec<u8>,
        now: u64,
        ends: Vec<(u64, Finish)>,
        steps: usize,
    }

    impl Harness {
        fn new() -> Self {
            let limits = Limits {
                total_pages: 10_000,
                host_pages: 0,
                page_size: 16,
                max_forward_tokens: 16_384,
                max_forward_requests: 512,
                max_page_refs: 100_000,
                max_image_bytes: 0,
                max_model_len: 4096,
                vocab_size: VOCAB,
                max_logprob_words: 1 << 16,
                frame: frame_bytes(VOCAB, CAPACITY, 0),
            };
            let config = Config {
                max_running: 512,
                ..Config::default()
            };
            Self {
                scheduler: Scheduler::new(config, limits, None).unwrap(),
                builder: FrameBuilder::new(16).with_bit_masks(VOCAB),
                frame: vec![0; CAPACITY],
                now: 0,
                ends: Vec::new(),
                steps: 0,
            }
        }

        fn submit(&mut self, mut arrival: NewRequest<RowParams>) -> Result<(), ValidationError> {
            arrival.params_bytes = params_bytes(&arrival.sampling);
            self.scheduler.submit(arrival)
        }

        /// Runs a step. Returns the requests that sampled.
        fn step(&mut self) -> Vec<u64> {
            self.now += 1000;
            let step = self.scheduler.schedule(self.now).unwrap().unwrap();
            let rows: Vec<_> = step.rows().collect();
            self.builder.build(rows.iter().map(frame_row));
            let max = frame_bytes(VOCAB, CAPACITY, 0).max;
            let length = self.builder.encode(&mut self.frame).expect("it fits");
            assert!(length <= max as usize + FRAME as usize);
            let sampled = rows.iter().filter(|row| row.sampling.is_some());
            let sampled: Vec<u64> = sampled.map(|row| row.id).collect();
            let ends: Vec<u32> = (0..=rows.len())
                .map(|row| row.min(sampled.len()) as u32)
                .collect();
            let answer = StepOutput {
                tokens: &vec![7; sampled.len()],
                token_ends: &ends,
                ..StepOutput::default()
            };
            self.scheduler.process_output(self.now, &answer).unwrap();
            let mut outputs = Outputs::default();
            self.scheduler.outputs(&mut outputs);
            let ends = outputs.iter().filter_map(|it| Some((it.id, it.finish?)));
            self.ends.extend(ends);
            self.steps += 1;
            sampled
        }

        fn run(&mut self) {
            while !self.scheduler.is_idle() {
                self.step();
            }
            let all_ended = self
                .ends
                .iter()
                .all(|(_, finish)| *finish == Finish::Length);
            assert!(all_ended, "{:?}", self.ends);
        }
    }

    fn greedy() -> RowParams {
        let greedy = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        greedy.row_params().unwrap()
    }

    #[test]
    fn a_grammar_for_each_of_256_requests_on_a_large_vocabulary() {
        let mut harness = Harness::new();
        for id in 0..256 {
            let mut arrival = NewRequest::new(id, vec![id as u32 + 1; 20], greedy(), 4);
            arrival.grammar = Some(Arc::new(Changing(id as u32)));
            arrival.streams = false;
            harness.submit(arrival).unwrap();
        }
        harness.run();
        assert_eq!(harness.ends.len(), 256);
        // All masks are 8 MiB, a little more than a frame takes.
        assert!((5..=12).contains(&harness.steps), "{} steps", harness.steps);
    }

    #[test]
    fn requests_in_the_same_place_of_a_grammar_share_their_mask() {
        let mut harness = Harness::new();
        for id in 0..400 {
            let mut arrival = NewRequest::new(id, vec![id as u32 + 1; 4], greedy(), 4);
            arrival.grammar = Some(Arc::new(Changing(0)));
            arrival.streams = false;
            harness.submit(arrival).unwrap();
        }
        let mut most = 0;
        while !harness.scheduler.is_idle() {
            most = most.max(harness.step().len());
        }
        // Masks of their own would take 13 MiB.
        assert!(most > 390, "{most} rows");
    }

    #[test]
    fn requests_that_bias_the_whole_vocabulary_leave_their_neighbours_a_place_in_each_step() {
        let mut harness = Harness::new();
        for id in 0..8 {
            let arrival = NewRequest::new(id, vec![id as u32 + 1; 20], greedy(), 16);
            harness.submit(arrival).unwrap();
        }
        harness.step();
        for id in 8..72 {
            let sampling = SamplingParams {
                logit_bias: (0..VOCAB).map(|token| (token, 0.5)).collect(),
                ..SamplingParams::default()
            };
            let arrival = NewRequest::new(
                id,
                vec![id as u32 + 1; 20],
                sampling.row_params().unwrap(),
                2,
            );
            harness.submit(arrival).unwrap();
        }
        for _ in 1..16 {
            let sampled = harness.step();
            assert_eq!(
                sampled.iter().filter(|&&id| id < 8).count(),
                8,
                "{sampled:?}"
            );
        }
        harness.run();
        assert_eq!(harness.ends.len(), 72);
        // Three at once.
        assert!(harness.steps <= 64 * 2 / 3 + 24, "{} steps", harness.steps);
    }

    #[test]
    fn a_request_that_no_frame_has_room_for_is_refused() {
        let mut harness = Harness::new();
        let mut params = greedy();
        let ids = vec![5; CAPACITY / 4];
        let extension = Arc::make_mut(params.extension.get_or_insert_default());
        extension.logprobs = Some(LogprobOptions {
            token_ids: ids,
            ..LogprobOptions::default()
        });
        let refusal = harness
            .submit(NewRequest::new(0, vec![1], params, 4))
            .unwrap_err();
        let text = refusal.to_string();
        assert!(
            text.contains("token_ids_logprob") && text.contains("and a frame has 838"),
            "{text}"
        );
        // As many stop tokens as there are go as bits.
        let mut arrival = NewRequest::new(0, vec![1], greedy(), 2);
        arrival.stop.min_tokens = 2;
        arrival.stop.stop_tokens = (0..VOCAB).rev().collect();
        harness.submit(arrival).unwrap();
        harness.run();
    }

    #[test]
    fn rows_take_no_more_than_is_budgeted() {
        let frame = frame_bytes(VOCAB, CAPACITY, 0);
        let mut builder = FrameBuilder::new(16).with_bit_masks(VOCAB);
        let mut buffer = vec![0; CAPACITY];
        let sampler = pie_wire::Sampler::RawLogits;
        let asked = Arc::new(RequestExtension {
            penalties: Penalties {
                frequency: 0.5,
                ..Penalties::NONE
            },
            ..RequestExtension::default()
        });
        for forbidden in 0..100 {
            let forbidden: Vec<u32> = (0..forbidden).map(|at| 3 * at + 5).collect();
            let row = crate::frame::FrameRow {
                context_id: 3,
                tokens: &[1, 2, 3],
                drafts: &[4],
                start: 0,
                pages: &[1],
                sampler: Some(&sampler),
                forbidden: &forbidden,
                extension: Some(crate::frame::RowExtension {
                    params: &asked,
                    history: &[],
                    prompt_logprobs: (0, 0),
                    next: None,
                }),
                ..crate::frame::FrameRow::EMPTY
            };
            let rows = 50;
            builder.build((0..rows).map(|_| row));
            let length = builder.encode(&mut buffer).unwrap();
            let listed = (2 * frame.listed * forbidden.len() as u32).min(frame.mask);
            let each = frame.row + 3 * frame.token + frame.draft + frame.page + listed;
            assert!(
                length <= (FRAME + rows * each) as usize,
                "{length}, {each} each"
            );
        }
    }
}
