//! A runtime and a model for tests of drafts: contexts whose tokens are a function of the position.

use std::time::Duration;

use crate::common::answer::{Answer, answer};
use crate::common::builder::{Encoded, GREEDY, Req, frame};
use pie_planner::{
    ComputedPlan, DraftCounters, DraftOptions, ForwardTimings, Layout, Limits, NgramConfig, Plan,
    Planner, StepMemory,
};

pub(crate) const NUM_DRAFTS: usize = 4;

pub(crate) const ROWS: usize = 64;

/// A planner that drafts, and a model that says `text[position]` at every position.
pub(crate) struct Server<F> {
    pub(crate) planner: Planner,
    pub(crate) text: F,
    /// How long a step takes by its rows.
    pub(crate) cost: fn(usize) -> Duration,
    /// Whether it prepares drafts before the tokens are known.
    pub(crate) early: bool,
    /// What it reported of drafts.
    pub(crate) reports: Vec<DraftCounters>,
    /// What a draft model says at a position; `None` without one.
    pub(crate) model: Option<fn(u32) -> u32>,
}

/// What a request was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) tokens: Vec<u32>,
    pub(crate) drafts: Vec<u32>,
    pub(crate) positions: Vec<u32>,
}

impl<F: Fn(u32) -> u32> Server<F> {
    pub(crate) fn new(limits: Limits, text: F) -> Self {
        Self::with_drafter(limits, text, NgramConfig::default())
    }

    pub(crate) fn with_drafter(limits: Limits, text: F, ngram: NgramConfig) -> Self {
        Self::with(limits, text, Some(ngram))
    }

    /// A server whose graphs draft `model(position)` at every position.
    pub(crate) fn with_model(limits: Limits, text: F, model: fn(u32) -> u32) -> Self {
        Self {
            model: Some(model),
            ..Self::with(limits, text, None)
        }
    }

    fn with(limits: Limits, text: F, ngram: Option<NgramConfig>) -> Self {
        let mut planner = Planner::new(limits, 9);
        let options = DraftOptions {
            ngram,
            num_drafts: NUM_DRAFTS,
            graph_sizes: vec![1, 2, 4, 8, 16, 32, ROWS],
            model_sizes: vec![1, 2, 4, 8, 16, 32, ROWS],
            host_pages: 8,
        };
        planner
            .enable_drafts(&options)
            .expect("the options are right");
        Self {
            planner,
            text,
            cost: |_| Duration::from_millis(1),
            early: true,
            reports: Vec::new(),
            model: None,
        }
    }

    /// Requests with their context, and whether they ask for drafts.
    pub(crate) fn run(&mut self, requests: &[(Req, u64, bool)]) -> (Vec<TokenCounts>, bool) {
        let parts: Vec<Req> = requests
            .iter()
            .map(|(request, ..)| request.clone())
            .collect();
        let mut frame = frame(&parts);
        frame.context_ids = requests.iter().map(|&(_, context, _)| context).collect();
        frame.output_spec_flags = requests.iter().map(|&(.., asks)| asks).collect();
        let encoded = Encoded::new(crate::common::device::DRIVER, &frame);
        let planned = self
            .planner
            .plan(crate::common::device::DRIVER, encoded.forward());
        let plan = planned.expect("a right frame");
        assert_eq!(plan.request_errors(), []);
        let positions: Vec<u32> = parts
            .iter()
            .flat_map(|request| request.positions.iter().chain(&request.draft_positions))
            .copied()
            .collect();
        let mut computed = self.compute(plan, &positions);
        let capacity = self.planner.limits().reply_bytes as usize;
        let mut words = vec![0_u64; capacity.div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let length = self
            .planner
            .reply(&mut computed, ForwardTimings::default(), bytes);
        let length = length.expect("the reply fits");
        let time = (self.cost)(positions.len());
        self.planner.record_step_time(&mut computed, time, time);
        self.planner.recycle(computed);
        self.reports.extend(self.planner.draft_report());
        match answer(&bytes[..length]) {
            Answer::Fast(tokens) => {
                let alone = |token| TokenCounts {
                    tokens: vec![token],
                    drafts: Vec::new(),
                    positions: Vec::new(),
                };
                (tokens.into_iter().map(alone).collect(), true)
            }
            Answer::Archive(response) => {
                response.check().expect("a response that keeps the rules");
                let part = |indptr: &[u32], values: &[u32], index: usize| match indptr {
                    [] => Vec::new(),
                    ends => values[ends[index] as usize..ends[index + 1] as usize].to_vec(),
                };
                let r = &response;
                let answered = |index| TokenCounts {
                    tokens: part(&r.tokens_indptr, &r.tokens, index),
                    drafts: part(&r.spec_indptr, &r.spec_tokens, index),
                    positions: part(&r.spec_indptr, &r.spec_positions, index),
                };
                ((0..requests.len()).map(answered).collect(), false)
            }
        }
    }

    pub(crate) fn compute(&mut self, mut plan: Plan, positions: &[u32]) -> ComputedPlan {
        let model = self
            .model
            .filter(|_| self.planner.runs_draft_model(&mut plan));
        let size = plan.graph_size(ROWS);
        let rows = size.expect("a graph takes it").rows;
        let layout = Layout::graph(rows);
        let mut block = vec![0_u64; layout.bytes().div_ceil(8)];
        let mut masks = vec![0; rows * self.planner.limits().mask_words()];
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut block),
            mask_words: &mut masks,
        };
        let staged = self.planner.stage_graph(plan, &layout, memory, 1);
        let mut staged = staged.expect("the memory fits");
        if self.early {
            self.planner.prepare_drafts(&mut staged);
        }
        if let Some(model) = model {
            let first = |word: usize| positions[word / NUM_DRAFTS] + 2;
            staged.put_drafts(NUM_DRAFTS, |word| {
                model(first(word) + (word % NUM_DRAFTS) as u32)
            });
        }
        let text = &self.text;
        staged.put_tokens(|row| text(positions[row] + 1), |_| 0)
    }
}

/// A context that is decoded as an inferlet does.
pub(crate) struct Context {
    pub(crate) id: u64,
    pub(crate) pages: Vec<u32>,
    pub(crate) stored: u32,
    pub(crate) input: u32,
    pub(crate) drafts: Vec<u32>,
    pub(crate) drafted: usize,
}

impl Context {
    pub(crate) fn new(id: u64, pages: std::ops::Range<u32>, input: u32) -> Self {
        Self {
            id,
            pages: pages.collect(),
            stored: 0,
            input,
            drafts: Vec::new(),
            drafted: 0,
        }
    }

    pub(crate) fn request(&self) -> Req {
        let end = self.stored + 1 + self.drafts.len() as u32;
        let pages = &self.pages[..end.div_ceil(16) as usize];
        Req::new(16, self.stored, &[self.input], pages)
            .sample(0, GREEDY)
            .verify(&self.drafts)
    }

    pub(crate) fn take(&mut self, answered: &TokenCounts) {
        let TokenCounts {
            tokens,
            drafts,
            positions,
        } = answered;
        let first = self.stored + tokens.len() as u32 + 1;
        assert_eq!(positions, &(first..).take(drafts.len()).collect::<Vec<_>>());
        assert!(drafts.len() <= NUM_DRAFTS);
        self.drafted += self.drafts.len();
        self.stored += tokens.len() as u32;
        self.input = tokens[tokens.len() - 1];
        self.drafts.clone_from(drafts);
    }
}

/// Decodes contexts together until the first one has stored `length` tokens; returns the steps.
pub(crate) fn decode<F: Fn(u32) -> u32>(
    server: &mut Server<F>,
    contexts: &mut [Context],
    asks: bool,
    length: u32,
) -> usize {
    let mut steps = 0;
    while contexts[0].stored < length {
        let requests: Vec<_> = contexts.iter().map(|c| (c.request(), c.id, asks)).collect();
        let (answers, _) = server.run(&requests);
        for (context, answered) in contexts.iter_mut().zip(&answers) {
            let from = context.stored + 1;
            let expected: Vec<u32> = (from..)
                .take(answered.tokens.len())
                .map(&server.text)
                .collect();
            assert_eq!(answered.tokens, expected);
            context.take(answered);
        }
        steps += 1;
    }
    steps
}

pub(crate) fn cycle(position: u32) -> u32 {
    100 + position % 7
}

/// Short words in an order that nothing foretells.
pub(crate) fn noise(position: u32) -> u32 {
    (position.wrapping_mul(2_654_435_761) >> 13) % 5
}
