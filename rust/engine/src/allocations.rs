//! Decode steps allocate nothing, from the scheduler to the encoded frame.

use allocation_counter::measure;
use pie_scheduler::{Config, FrameBytes, Limits, NewRequest, Outputs, Scheduler, StepOutput};
use pie_wire::Sampler;

use crate::frame::{FrameBuilder, FrameMeta, FrameRow};
use crate::sampling::{RowParams, SamplingParams};
use crate::step_loop::frame_row;

const LIMITS: Limits = Limits {
    total_pages: 40_000,
    host_pages: 0,
    page_size: 16,
    max_forward_tokens: 16_384,
    max_forward_requests: 1024,
    max_page_refs: 100_000,
    max_image_bytes: 0,
    max_model_len: 4096,
    vocab_size: 1000,
    max_logprob_words: 1 << 16,
    frame: FrameBytes::UNLIMITED,
};

const SAMPLER: Sampler = Sampler::TopP {
    temperature: 0.6,
    p: 0.95,
};

/// Scheduler and frame builder without a driver.
struct Steps {
    scheduler: Scheduler<RowParams>,
    builder: FrameBuilder,
    meta: FrameMeta,
    frame: Vec<u8>,
    outputs: Outputs,
    tokens: Vec<u32>,
    ends: Vec<u32>,
    now: u64,
}

impl Steps {
    fn new(requests: u32, streams: bool, params: impl Fn() -> RowParams) -> Self {
        let config = Config {
            max_running: requests,
            ..Config::default()
        };
        let mut scheduler = Scheduler::new(config, LIMITS, None).unwrap();
        for id in 0..requests {
            let prompt = vec![id % 1000; 80 + id as usize % 100];
            scheduler
                .submit(NewRequest {
                    streams,
                    ..NewRequest::new(id.into(), prompt, params(), 400)
                })
                .unwrap();
        }
        Self {
            scheduler,
            builder: FrameBuilder::new(LIMITS.page_size),
            meta: FrameMeta::default(),
            frame: vec![0; 8 << 20],
            outputs: Outputs::default(),
            tokens: vec![1; 1024],
            ends: (0..=1024).collect(),
            now: 0,
        }
    }

    /// Schedules and encodes a schedule; returns its rows and its sampled rows.
    fn schedule(&mut self) -> (usize, usize) {
        let schedule = self.scheduler.schedule(self.now).unwrap().unwrap();
        let rows = schedule.rows().map(|row| frame_row(&row));
        self.builder.build_into(&mut self.meta, rows);
        self.builder.encode(&mut self.frame).unwrap();
        (self.meta.requests, self.meta.sampled)
    }

    fn answer(&mut self, (rows, sampled): (usize, usize)) {
        self.now += 5000;
        for row in 0..=rows {
            self.ends[row] = row.min(sampled) as u32;
        }
        let answer = StepOutput {
            tokens: &self.tokens[..sampled],
            token_ends: &self.ends[..=rows],
            ..StepOutput::default()
        };
        self.scheduler.process_output(self.now, &answer).unwrap();
        self.scheduler.outputs(&mut self.outputs);
    }
}

#[test]
fn steps_of_decodes_allocate_nothing() {
    let penalized = SamplingParams {
        frequency_penalty: 0.5,
        logit_bias: (0..300).map(|token| (token, 0.5)).collect(),
        ..SamplingParams::default()
    };
    for (requests, streams, is_penalized) in [
        (256, true, false),
        (256, false, false),
        (1024, true, false),
        (256, true, true),
    ] {
        let mut steps = Steps::new(requests, streams, || {
            if is_penalized {
                penalized.row_params().unwrap()
            } else {
                SAMPLER.into()
            }
        });
        let mut out = steps.schedule();
        let mut round = |steps: &mut Steps| {
            let next = steps.schedule();
            steps.answer(std::mem::replace(&mut out, next));
        };
        while steps.scheduler.stats().waiting > 0 {
            round(&mut steps);
        }
        // Across several pages of each sequence, so that everything has grown as far as it will.
        for _ in 0..100 {
            round(&mut steps);
        }
        let counted = measure(|| (0..100).for_each(|_| round(&mut steps)));
        assert_eq!(
            counted.count_total, 0,
            "{requests} requests, {streams}, {is_penalized}"
        );
        assert_eq!(steps.meta.requests, requests as usize);
    }
}

/// Token bitmasks, shared by rows or not.
#[test]
fn frames_of_masks_allocate_nothing() {
    // A bit in every second place, and another one.
    let masks: Vec<Vec<u32>> = (0..32)
        .map(|bit| vec![0x5555_5555 ^ 1 << bit; 4096])
        .collect();
    let row = |at: usize| FrameRow {
        tokens: &[7],
        pages: &[3],
        sampler: Some(&SAMPLER),
        mask: Some(&masks[at / 32]),
        forbidden: if at % 16 < 8 { &[2, 9] } else { &[] },
        ..FrameRow::EMPTY
    };
    let mut builder = FrameBuilder::new(16).with_bit_masks(32 * 4096);
    let mut meta = FrameMeta::default();
    let mut frame = vec![0; 8 << 20];
    let mut round = || {
        builder.build_into(&mut meta, (0..1024).map(row));
        builder.encode(&mut frame).unwrap()
    };
    // The second one keeps the buffers of the first.
    (0..2).for_each(|_| _ = round());
    let counted = measure(|| _ = round());
    assert_eq!(counted.count_total, 0);
}
