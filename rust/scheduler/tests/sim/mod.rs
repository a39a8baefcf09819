//! A scheduler with a simulated driver and a virtual clock. After every event all bookkeeping is compared, and every token that comes
//! out is the one that the rule of the simulated model gives.

mod checks;
pub mod driver;
mod expected;
pub mod request;
pub mod rule;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use driver::{Driver, Frame, Reply};
use expected::Expected;
use pie_scheduler::{
    Config, Copies, Finish, Limits, Outputs, Scheduler, StepOutput, TokenBytes, ValidationError,
    WeightVersionEvent,
};
pub use request::{Poison, TestRequest};
use rule::Mind;

/// What a step takes, and what each of its tokens takes in addition.
pub const STEP_US: u64 = 50;
pub const TOKEN_US: u64 = 3;

/// Something that happens.
#[derive(Debug, Clone)]
pub enum Event {
    Submit(Box<TestRequest>),
    /// Ends one of the requests that were submitted.
    Abort(usize),
    /// Lays a step out, if one may be.
    Schedule,
    /// Answers the older step.
    Answer,
    /// Answers it, but one of its rows gets nothing.
    DropRow(usize),
    /// It fails; whether the copies of the one after it were made.
    StepFailed(bool),
    /// The driver dies; whether the older step may be why.
    DriverDied(bool),
    EndSession(u64),
    /// Also changes the weights.
    Flush,
    Wait(u16),
}

/// A step that is out.
#[derive(Debug)]
struct InFlight {
    frames: Vec<Frame>,
    copies: Copies,
    copied: bool,
}

/// How often what happened.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally(pub BTreeMap<&'static str, u64>);

impl Tally {
    pub fn add(&mut self, name: &'static str, count: u64) {
        *self.0.entry(name).or_default() += count;
    }
}

/// A sequence that has ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    pub id: u64,
    pub sample: u32,
    pub finish: Finish,
    pub cached_tokens: u32,
    pub retractions: u32,
}

pub struct Sim {
    pub tally: Tally,
    pub scheduler: Scheduler<u64>,
    pub now: u64,
    limits: Limits,
    running_limit_us: u64,
    stop_before_length: bool,
    weight_version: u32,
    driver: Driver,
    in_flight: VecDeque<InFlight>,
    /// Requests of the rows of the step that was scheduled last, and tokens that it computes.
    pub scheduled: Vec<(u64, usize)>,
    /// The last token of each row of the step that was answered last.
    answered: Vec<Option<u32>>,
    expected: BTreeMap<(u64, u32), Expected>,
    poisons: HashMap<u64, Poison>,
    /// Failures so far, and those of them since the last answer.
    pub failures: (u32, u32),
    salts: HashMap<u64, u64>,
    /// Words of log-probabilities of each request's positions, and the bytes that it brings to rows.
    words: HashMap<u64, (u32, u32)>,
    ids: u64,
    /// Sequences in the order of their ends.
    pub ended: Vec<Ended>,
    outputs: Outputs,
    text: Vec<Box<[u8]>>,
    pub steps: u64,
    seed: u64,
}

impl Sim {
    pub fn new(config: Config, limits: Limits, seed: u64) -> Self {
        let text = rule::text();
        let shared: Arc<dyn TokenBytes> = Arc::new(text.clone());
        let running_limit_us = config.running_limit_us;
        let stop_before_length = config.stop_before_length;
        Self {
            tally: Tally::default(),
            scheduler: Scheduler::new(config, limits, Some(shared)).expect("valid settings"),
            now: 0,
            limits,
            running_limit_us,
            stop_before_length,
            weight_version: 0,
            driver: Driver::new(limits, seed),
            in_flight: VecDeque::new(),
            scheduled: Vec::new(),
            answered: Vec::new(),
            expected: BTreeMap::new(),
            poisons: HashMap::new(),
            failures: (0, 0),
            salts: HashMap::new(),
            words: HashMap::new(),
            ids: 0,
            ended: Vec::new(),
            outputs: Outputs::default(),
            text,
            steps: 0,
            seed,
        }
    }

    /// Lets everything happen, and then everything end.
    pub fn play(&mut self, events: &[Event]) {
        for event in events {
            self.happen(event);
        }
        self.drain();
        self.scheduler.flush();
        let stats = self.scheduler.stats();
        assert_eq!(stats.free_pages, self.limits.total_pages as usize);
        assert_eq!((stats.cached_pages, stats.host_pages), (0, 0));
        // An admission ends by a retraction, or with its sequence.
        assert!(stats.admissions <= stats.retractions + stats.finished);
        assert!(stats.matched_tokens >= stats.cached_tokens);
        assert_eq!(stats.pending_tokens, 0);
    }

    pub fn drain(&mut self) {
        let mut idle = 0;
        while !self.scheduler.is_idle() || !self.in_flight.is_empty() {
            let before = self.steps;
            self.happen(&Event::Schedule);
            if self.in_flight.is_empty() || self.steps == before || self.now.is_multiple_of(2) {
                self.happen(&Event::Answer);
            }
            idle = if self.steps == before { idle + 1 } else { 0 };
            assert!(idle < 10, "nothing happens any more: {:?}", self.scheduler);
            assert!(
                self.steps < 2_000_000,
                "it does not end: {:?}",
                self.scheduler
            );
        }
        assert!(self.expected.is_empty(), "lost: {:?}", self.expected.keys());
    }

    pub fn happen(&mut self, event: &Event) {
        self.now += 1;
        match event {
            Event::Submit(request) => {
                self.submit(request);
            }
            Event::Abort(choice) => {
                let ids = self.ids;
                if ids > 0 {
                    self.scheduler.abort(*choice as u64 % ids);
                }
            }
            Event::Schedule => self.schedule(),
            Event::Answer => self.answer(None),
            Event::DropRow(choice) => self.answer(Some(*choice)),
            Event::StepFailed(copied) => self.fail(*copied),
            Event::DriverDied(blames) => self.die(*blames),
            Event::EndSession(session) => {
                self.scheduler.end_session(*session);
            }
            Event::Flush => {
                self.scheduler.flush();
                self.change_weights();
            }
            Event::Wait(time) => self.now += u64::from(*time),
        }
        self.read_outputs();
        if let Err(error) = self.scheduler.check_invariants() {
            panic!("{error} after {event:?}");
        }
    }

    fn change_weights(&mut self) {
        let old_version = self.weight_version;
        self.weight_version += 1;
        self.scheduler.set_weight_version(self.weight_version);
        for expected in self.expected.values_mut() {
            if !expected.tokens.is_empty() {
                expected.weight_events.push(WeightVersionEvent {
                    old_version,
                    num_output_tokens: expected.tokens.len() as u32,
                });
            }
        }
    }

    /// Submits a request. Returns its id.
    pub fn submit(&mut self, wanted: &TestRequest) -> u64 {
        let id = self.ids;
        self.ids += 1;
        let request = wanted.request(id, self.now);
        let limits = &self.limits;
        let pages = limits.total_pages.min(limits.max_page_refs);
        let longest = limits.max_model_len.min(pages * limits.page_size) as usize;
        match self.scheduler.submit(request.clone()) {
            Ok(()) => {}
            Err(ValidationError::TooLong { .. }) => {
                assert!(request.prompt.len() > longest);
                return id;
            }
            Err(ValidationError::Empty) => {
                assert!(request.prompt.is_empty());
                return id;
            }
            Err(ValidationError::QueueFull { .. }) => return id,
            Err(ValidationError::Image { tokens, bytes, .. }) => {
                let most = i64::from(limits.max_forward_tokens)
                    - i64::from(limits.max_forward_requests)
                    + 1;
                assert!(i64::from(tokens) > most.max(0) || bytes > limits.max_image_bytes);
                return id;
            }
            Err(ValidationError::ImageLogprobs { from, first }) => {
                assert!(from < first && request.images.iter().any(|image| image.end() == first));
                return id;
            }
            Err(ValidationError::Logprobs { words, limit }) => {
                assert!(words > limit && limit == limits.max_logprob_words);
                return id;
            }
            Err(ValidationError::RowBytes { bytes, limit }) => {
                assert!(bytes > limit.into() && limit == limits.frame.max);
                self.tally.add("too large for a frame", 1);
                return id;
            }
            Err(error) => panic!("{error}"),
        }
        self.salts.insert(id, request.sampling);
        self.poisons
            .extend(wanted.poison.map(|poison| (id, poison)));
        let words = request.logprobs.map_or(0, |wanted| wanted.words);
        self.words.insert(id, (words, request.params_bytes));
        let from = request.logprobs.and_then(|wanted| wanted.prompt_from);
        for sample in 0..request.samples {
            let mut mind = Mind::new(request.sampling);
            let mut prompt_logprobs = Vec::new();
            for (at, &token) in request.prompt.iter().enumerate() {
                if at > 0 && from.is_some_and(|from| at >= from as usize) {
                    prompt_logprobs.extend(mind.score(token, words));
                }
                mind.read(token);
            }
            let most = (longest + 1 - request.prompt.len()).min(request.stop.max_tokens as usize);
            let expected = Expected {
                request: request.clone(),
                mind,
                tokens: Vec::new(),
                text: Vec::new(),
                most,
                hurt: false,
                prompt_logprobs,
                stop_before_length: self.stop_before_length,
                weight_events: Vec::new(),
            };
            self.expected.insert((id, sample), expected);
        }
        id
    }

    fn schedule(&mut self) {
        let Some(step) = self
            .scheduler
            .schedule(self.now)
            .expect("consistent bookkeeping")
        else {
            return;
        };
        assert!(self.in_flight.len() < 2);
        let (salts, words) = (&self.salts, &self.words);
        let frames: Vec<Frame> = step
            .rows()
            .map(|row| Frame::new(&row, salts[&row.id], words[&row.id]))
            .collect();
        let copies = step.copies.clone();
        self.scheduled = frames
            .iter()
            .map(|frame| (frame.id, frame.tokens.len()))
            .collect();
        self.driver.check(&frames);
        // Those whose time was over have ended.
        self.read_outputs();
        self.check_params();
        self.check_images(&frames);
        let count = |kind: &dyn Fn(&&Frame) -> bool| frames.iter().filter(kind).count() as u64;
        self.tally.add("steps", 1);
        self.tally
            .add("rows scheduled ahead", count(&|f| f.awaits.is_some()));
        self.tally.add("parts of prompts", count(&|f| !f.samples));
        let scored = count(&|f| f.prompt_logprobs.0 < f.prompt_logprobs.1);
        self.tally
            .add("rows with log-probabilities of prompts", scored);
        self.tally
            .add("rows with drafts", count(&|f| !f.drafts.is_empty()));
        self.tally
            .add("rows that forbid", count(&|f| !f.forbidden.is_empty()));
        self.tally
            .add("pages to the host", copies.to_host.len() as u64);
        self.tally
            .add("pages to the device", copies.to_device.len() as u64);
        if let Some(before) = self.in_flight.back() {
            for frame in &frames {
                if let Some(row) = frame.awaits {
                    let awaited = &before.frames[row as usize];
                    assert_eq!((awaited.id, awaited.sample), (frame.id, frame.sample));
                    assert!(awaited.samples);
                }
            }
        } else {
            assert!(frames.iter().all(|frame| frame.awaits.is_none()));
        }
        self.in_flight.push_back(InFlight {
            frames,
            copies,
            copied: false,
        });
        self.steps += 1;
    }

    fn answer(&mut self, refused: Option<usize>) {
        if let Some(poison) = self.find_poison() {
            self.tally.add("steps with poison", 1);
            self.failures = (self.failures.0 + 1, self.failures.1 + 1);
            return if poison.kills {
                self.die(true);
            } else {
                self.fail(false);
            };
        }
        let Some(mut flight) = self.in_flight.pop_front() else {
            return;
        };
        self.failures.1 = 0;
        if !flight.copied {
            self.driver.copy(&flight.copies);
        }
        let refused = refused.map(|choice| choice % flight.frames.len());
        let mut replies = Vec::new();
        for (at, frame) in flight.frames.iter_mut().enumerate() {
            let known = frame.awaits.map(|row| self.answered[row as usize]);
            if let Some(Some(token)) = known {
                frame.tokens[0] = token;
            }
            let refuses = refused == Some(at) && frame.samples;
            if refuses && let Some(it) = self.expected.get_mut(&(frame.id, frame.sample)) {
                it.hurt = true;
            }
            let nothing = known == Some(None) || refuses;
            let reply = if nothing {
                Reply::default()
            } else {
                self.driver.compute(frame)
            };
            replies.push(reply);
        }
        self.answered = replies
            .iter()
            .map(|reply| reply.tokens.last().copied())
            .collect();
        let tokens: usize = flight.frames.iter().map(|frame| frame.tokens.len()).sum();
        let copies_us = flight.copies.len() as u64 * 7;
        self.now += STEP_US + TOKEN_US * tokens as u64 + copies_us;
        let [tokens, token_ends] = flatten(replies.iter().map(|reply| &reply.tokens));
        let [drafts, draft_ends] = flatten(replies.iter().map(|reply| &reply.drafts));
        let [logprobs, logprob_ends] = flatten(replies.iter().map(|reply| &reply.logprobs));
        let answer = StepOutput {
            logprobs: &logprobs,
            logprob_ends: if logprobs.is_empty() {
                &[]
            } else {
                &logprob_ends
            },
            tokens: &tokens,
            token_ends: &token_ends,
            drafts: &drafts,
            draft_ends: if drafts.is_empty() { &[] } else { &draft_ends },
            failures: &[],
            copies_us,
        };
        self.scheduler
            .process_output(self.now, &answer)
            .expect("its step");
    }

    fn fail(&mut self, copied: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        for (at, flight) in self.in_flight.iter().enumerate() {
            if !flight.copied && (at == 0 || copied) {
                self.driver.copy(&flight.copies);
            }
        }
        self.hurt();
        self.driver.registered.clear();
        self.scheduler.step_failed(copied);
    }

    fn die(&mut self, blames: bool) {
        self.seed += 1;
        self.driver = Driver::new(self.limits, self.seed);
        if blames {
            self.hurt();
            self.scheduler.driver_died();
        } else {
            self.in_flight.clear();
            self.scheduler.driver_lost();
        }
    }

    /// The older step fails: only a request that is alone in it may be ended by that.
    fn hurt(&mut self) {
        if let Some(flight) = self.in_flight.front()
            && let [frame] = &flight.frames[..]
            && let Some(expected) = self.expected.get_mut(&(frame.id, frame.sample))
        {
            expected.hurt = true;
        }
        self.in_flight.clear();
    }

    /// What makes the older step fail.
    fn find_poison(&self) -> Option<Poison> {
        let mut frames = self.in_flight.front()?.frames.iter();
        frames.find_map(|frame| {
            let poison = self.poisons.get(&frame.id)?;
            let end = frame.start as usize + frame.tokens.len();
            (end >= poison.from.into()).then_some(*poison)
        })
    }
}

fn flatten<'a>(lists: impl Iterator<Item = &'a Vec<u32>>) -> [Vec<u32>; 2] {
    let (mut values, mut ends) = (Vec::new(), vec![0]);
    for list in lists {
        values.extend_from_slice(list);
        ends.push(values.len() as u32);
    }
    [values, ends]
}
