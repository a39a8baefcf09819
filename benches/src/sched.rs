//! A scheduler in the middle of its work.

use pie_scheduler::{Config, FrameBytes, Limits, NewRequest, Outputs, Scheduler, StepOutput};

const PAGE_SIZE: u32 = 16;
/// Tokens that a request produces. Its prompt is shorter than the context by half of them.
const OUTPUT: u32 = 1024;
/// What a step takes, in µs.
const STEP_US: u64 = 3000;

/// Requests that decode, one step ahead. One that ends is replaced by another.
pub struct Decodes {
    scheduler: Scheduler<()>,
    outputs: Outputs,
    requests: u64,
    prompt: u32,
    now: u64,
    /// Rows of the steps that are out, those that sample and all.
    out: Vec<(usize, usize)>,
    tokens: Vec<u32>,
    ends: Vec<u32>,
}

impl Decodes {
    /// So many requests, of `context` tokens on average, at different positions of their output, with one step out.
    ///
    /// # Panics
    ///
    /// When the scheduler refuses them.
    #[must_use]
    pub fn new(requests: u32, context: u32) -> Self {
        let pages = requests * (context + OUTPUT).div_ceil(PAGE_SIZE);
        let limits = Limits {
            total_pages: pages,
            host_pages: 0,
            page_size: PAGE_SIZE,
            max_forward_tokens: 16_384,
            max_forward_requests: requests,
            max_page_refs: pages,
            max_image_bytes: 0,
            max_model_len: 1 << 20,
            vocab_size: 151_936,
            max_logprob_words: 1 << 16,
            frame: FrameBytes::UNLIMITED,
        };
        let config = Config {
            max_running: requests,
            chunk_tokens: 8192,
            ..Config::default()
        };
        let mut decodes = Self {
            scheduler: Scheduler::new(config, limits, None).expect("valid settings"),
            outputs: Outputs::default(),
            requests: 0,
            prompt: context - OUTPUT / 2,
            now: 0,
            out: Vec::new(),
            tokens: Vec::new(),
            ends: Vec::new(),
        };
        for request in 0..requests {
            decodes.submit(OUTPUT * (request + 1) / requests);
        }
        decodes.step();
        let prompts = u64::from(requests) * u64::from(decodes.prompt);
        while decodes.scheduler.stats().prompt_tokens < prompts {
            decodes.step();
            decodes.answer();
        }
        decodes
    }

    fn submit(&mut self, output: u32) {
        let id = self.requests;
        self.requests += 1;
        let token = |at: u32| (id as u32 * 7919 + at * 31) % 150_000;
        let prompt = (0..self.prompt).map(token).collect();
        let arrival = NewRequest::new(id, prompt, (), output);
        self.scheduler.submit(arrival).expect("it fits");
    }

    /// Lays the next step out and looks at its rows, as a frame is made of them. Returns the pages that they list.
    ///
    /// # Panics
    ///
    /// When there is none.
    pub fn step(&mut self) -> usize {
        let step = self
            .scheduler
            .schedule(self.now)
            .expect("consistent bookkeeping");
        let step = step.expect("there is work");
        let (mut samples, mut pages) = (0, 0);
        for row in step.rows() {
            samples += usize::from(row.sampling.is_some());
            pages += row.pages.len();
        }
        self.out.push((samples, step.rows().len()));
        pages
    }

    /// Answers the older step, takes what comes out, and replaces what has ended. Returns how many tokens came.
    ///
    /// # Panics
    ///
    /// When there is no step.
    pub fn answer(&mut self) -> usize {
        let (samples, rows) = self.out.remove(0);
        self.tokens.resize(samples, 7);
        self.ends.clear();
        self.ends
            .extend((0..=rows).map(|row| row.min(samples) as u32));
        self.now += STEP_US;
        let answer = StepOutput {
            tokens: &self.tokens,
            token_ends: &self.ends,
            ..StepOutput::default()
        };
        self.scheduler
            .process_output(self.now, &answer)
            .expect("its step");
        self.scheduler.outputs(&mut self.outputs);
        let ended = self.outputs.iter().filter(|output| output.finish.is_some());
        for _ in 0..ended.count() {
            self.submit(OUTPUT);
        }
        samples
    }
}
