//! A driver that answers anything, to a scheduler: what is read fits the step that was sent, and every request ends once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use arbitrary::{Arbitrary, Unstructured};
use pie_engine::{FrameBuilder, FrameMeta, FrameRow, RowExtension, StepReply};
use pie_scheduler::{Config, FrameBytes, Limits, Logprobs, NewRequest, Outputs, Row, Scheduler};
use pie_wire::{
    ForwardResponse, LogprobOptions, LogprobRows, LogprobShape, RequestExtension, ResponseFrame,
    ResponsePayload, Sampler, StatusResponse,
};

use crate::memory;

const VOCAB: u32 = 50;
/// Steps after which every request has ended.
const MOST_STEPS: usize = 4096;
const SHAPE: LogprobShape = LogprobShape {
    top: 1,
    given: 0,
    hidden: 0,
};
const LIMITS: Limits = Limits {
    total_pages: 32,
    host_pages: 0,
    page_size: 4,
    max_forward_tokens: 24,
    max_forward_requests: 6,
    max_page_refs: 64,
    max_image_bytes: 0,
    max_model_len: 60,
    vocab_size: VOCAB,
    max_logprob_words: 64,
    frame: FrameBytes::UNLIMITED,
};

/// Requests, and what the driver answers to their steps, one after the other.
#[derive(Debug, Arbitrary)]
struct Case {
    requests: Vec<Ask>,
    replies: Vec<Reply>,
}

#[derive(Debug, Arbitrary)]
struct Ask {
    prompt: u8,
    tokens: u8,
    samples: u8,
    drafts: bool,
    stops: bool,
    scores: bool,
}

#[derive(Debug, Arbitrary)]
enum Reply {
    /// As it should be, with so many accepted drafts, and drafts for the next step, at most.
    Right(u8, u8),
    /// The same, with an element of one of its arrays changed, added or removed.
    Edited(u8, u8, Vec<(u8, u8, u32)>),
    /// The same, with words of its bytes changed, by their offsets from the end, or cut.
    Damaged(u8, u8, Vec<(u16, u32)>, Option<u16>),
    /// The fast reply.
    Fast(Vec<u8>),
    Status(i32),
    Aborted,
    Bytes(Vec<u8>),
    /// The driver dies.
    Death,
}

/// What a request asks of its rows.
type Asked = Option<Arc<RequestExtension>>;

/// What an answer has to fit of a row.
#[derive(Debug)]
struct Expected {
    samples: bool,
    scores: bool,
    drafts: Vec<u32>,
    wants_drafts: bool,
    /// Position after its tokens.
    end: u32,
}

/// A step that the driver has.
struct Sent {
    meta: FrameMeta,
    rows: Vec<Expected>,
}

struct Harness {
    scheduler: Scheduler<Asked>,
    builder: FrameBuilder,
    reply: StepReply,
    sent: VecDeque<Sent>,
    now: u64,
    /// Most tokens of each sequence that has not ended.
    open: BTreeMap<(u64, u32), u32>,
}

/// Bytes of a [`Case`].
pub(crate) fn check(data: &[u8]) {
    let Ok(case) = Case::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    let mut harness = Harness::new();
    for (id, ask) in case.requests.iter().take(16).enumerate() {
        harness.submit(id as u64, ask);
    }
    for reply in &case.replies {
        harness.turn(reply);
    }
    for _ in 0..MOST_STEPS {
        if harness.scheduler.is_idle() {
            break;
        }
        harness.turn(&Reply::Right(u8::MAX, 0));
    }
    harness.read_outputs();
    assert!(harness.open.is_empty(), "{:?} have no end", harness.open);
}

impl Harness {
    fn new() -> Self {
        let config = Config {
            chunk_tokens: 16,
            max_running: 6,
            ..Config::default()
        };
        Self {
            scheduler: Scheduler::new(config, LIMITS, None).expect("the settings are right"),
            builder: FrameBuilder::new(LIMITS.page_size),
            reply: StepReply::default(),
            sent: VecDeque::new(),
            now: 0,
            open: BTreeMap::new(),
        }
    }

    fn submit(&mut self, id: u64, ask: &Ask) {
        let prompt: Vec<u32> = (0..u32::from(ask.prompt % 40))
            .map(|at| at % VOCAB)
            .collect();
        let tokens = u32::from(ask.tokens % 16);
        let scores = RequestExtension {
            logprobs: Some(LogprobOptions {
                hidden: 0,
                scaled: false,
                top: SHAPE.top,
                token_ids: Vec::new(),
                prompt: None,
            }),
            ..RequestExtension::default()
        };
        let scores = ask.scores.then(|| Arc::new(scores));
        let mut arrival = NewRequest::new(id, prompt, scores, tokens);
        arrival.samples = u32::from(ask.samples % 4).max(1);
        arrival.drafts = ask.drafts;
        arrival.stop.stop_tokens = if ask.stops { vec![3, 7] } else { Vec::new() };
        arrival.logprobs = ask.scores.then(|| Logprobs {
            uncached: false,
            words: SHAPE.words() as u32,
            prompt_from: None,
        });
        let samples = arrival.samples;
        if self.scheduler.submit(arrival).is_ok() {
            self.open
                .extend((0..samples).map(|sample| ((id, sample), tokens)));
        }
    }

    /// Lays a step out, and has the one before answered: as the loop between scheduler and driver does.
    fn turn(&mut self, reply: &Reply) {
        self.now += 50;
        self.lay_out();
        if self.sent.is_empty() {
            return;
        }
        if matches!(reply, Reply::Death) {
            self.scheduler.driver_died();
            self.sent.clear();
        } else if let Some(sent) = self.sent.pop_front() {
            let bytes = encoded(reply, &sent.rows);
            let asked = sent.meta.expected();
            let (read, peak) = memory::peak(|| self.reply.read(&bytes, asked.clone()));
            assert!(
                peak <= (1 << 12) + 16 * bytes.len(),
                "{peak} bytes for {}",
                bytes.len()
            );
            match read {
                Ok(_) => {
                    let answered = self
                        .scheduler
                        .process_output(self.now, &self.reply.to_scheduler());
                    answered.expect("what was read fits the step");
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    self.scheduler.step_failed(true);
                    self.sent.clear();
                }
            }
        }
        self.scheduler
            .check_invariants()
            .expect("the bookkeeping is consistent");
        self.read_outputs();
    }

    fn lay_out(&mut self) {
        let Some(step) = self.scheduler.schedule(self.now).expect("no bug was found") else {
            return;
        };
        let rows = step.rows().map(|row| Expected {
            samples: row.sampling.is_some(),
            scores: row.params.is_some() && row.sampling.is_some(),
            drafts: row.drafts.to_vec(),
            wants_drafts: row.wants_drafts,
            end: row.start + (row.tokens.len() + row.drafts.len()) as u32,
        });
        let rows = rows.collect();
        let meta = self.builder.build(step.rows().map(turn));
        self.sent.push_back(Sent { meta, rows });
    }

    fn read_outputs(&mut self) {
        let mut outputs = Outputs::default();
        self.scheduler.outputs(&mut outputs);
        for output in outputs.iter() {
            let key = (output.id, output.sample);
            let left = self.open.get_mut(&key).expect("it has not ended");
            assert!(
                output.tokens.iter().all(|&token| token < VOCAB),
                "{:?}",
                output.tokens
            );
            *left = left
                .checked_sub(output.tokens.len() as u32)
                .expect("not more than asked");
            if output.finish.is_some() {
                self.open.remove(&key);
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "a row is a few references")]
fn turn(row: Row<'_, Asked>) -> FrameRow<'_> {
    const GREEDY: Sampler = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };
    FrameRow {
        context_id: row.context,
        tokens: row.tokens,
        awaits: row.awaits.map(|row| row as usize),
        start: row.start,
        drafts: row.drafts,
        wants_drafts: row.wants_drafts,
        pages: row.pages,
        sampler: row.sampling.map(|_| &GREEDY),
        adapter: None,
        forbidden: row.forbidden,
        mask: row.mask,
        extension: row.params.as_ref().map(|params| RowExtension {
            params,
            history: row.history,
            prompt_logprobs: row.prompt_logprobs,
            next: row.next,
        }),
        images: None,
    }
}

/// What a driver that works answers.
fn right(rows: &[Expected], accepted: u8, drafted: u8) -> (ForwardResponse, LogprobRows) {
    let mut response = ForwardResponse {
        num_requests: rows.len() as u32,
        tokens_indptr: vec![0],
        spec_indptr: vec![0],
        ..ForwardResponse::default()
    };
    let mut scores = LogprobRows::default();
    for (request, row) in rows.iter().enumerate() {
        let accepted = row.drafts.len().min(accepted.into());
        let before = response.tokens.len();
        if row.samples {
            response.tokens.extend(&row.drafts[..accepted]);
            response.tokens.push((row.end * 7 + 11) % VOCAB);
        }
        let tokens = (response.tokens.len() - before) as u32;
        response.tokens_indptr.push(response.tokens.len() as u32);
        if row.wants_drafts && row.samples {
            let first = row.end + tokens;
            let drafts = (0..u32::from(drafted % 4)).map(|at| (first + at, (first + at) % VOCAB));
            for (position, token) in drafts {
                response.spec_positions.push(position);
                response.spec_tokens.push(token);
            }
        }
        response.spec_indptr.push(response.spec_tokens.len() as u32);
        if row.scores {
            let words = [(-1.0_f32).to_bits(), 3, (-0.5_f32).to_bits()];
            let words = (0..tokens).flat_map(|_| words);
            scores.push(request as u32, SHAPE, (0, tokens), words);
        }
    }
    (response, scores)
}

fn encoded(reply: &Reply, rows: &[Expected]) -> Vec<u8> {
    match reply {
        Reply::Right(accepted, drafted) => {
            let (response, scores) = right(rows, *accepted, *drafted);
            forward(response, &scores)
        }
        Reply::Edited(accepted, drafted, edits) => {
            let (mut response, scores) = right(rows, *accepted, *drafted);
            for &(array, at, value) in edits {
                edit(&mut response, array, at, value);
            }
            forward(response, &scores)
        }
        Reply::Damaged(accepted, drafted, damage, cut) => {
            let (response, scores) = right(rows, *accepted, *drafted);
            let mut bytes = forward(response, &scores);
            for &(from_end, value) in damage {
                let words = bytes.len() / 4;
                let at = 4 * (words - 1 - usize::from(from_end) % words);
                bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            if let Some(cut) = cut {
                bytes.truncate(usize::from(*cut) % (bytes.len() + 1));
            }
            bytes
        }
        Reply::Fast(tokens) => {
            let tokens: Vec<u32> = tokens.iter().map(|&token| token.into()).collect();
            let mut bytes = vec![0; 64 + 4 * tokens.len()];
            let length = pie_wire::encode_fast_tokens(0, &tokens, &mut bytes);
            bytes.truncate(length.expect("there is room"));
            bytes
        }
        Reply::Status(status) => frame(
            ResponsePayload::Status(StatusResponse { status: *status }),
            false,
        ),
        Reply::Aborted => frame(ResponsePayload::Status(StatusResponse { status: 0 }), true),
        Reply::Bytes(bytes) => bytes.clone(),
        Reply::Death => Vec::new(),
    }
}

fn edit(response: &mut ForwardResponse, array: u8, at: u8, value: u32) {
    let arrays = [
        &mut response.tokens_indptr,
        &mut response.tokens,
        &mut response.spec_indptr,
        &mut response.spec_tokens,
        &mut response.spec_positions,
    ];
    let count = arrays.len();
    let Some(array) = arrays.into_iter().nth(usize::from(array) % (count + 1)) else {
        response.num_requests = value;
        return;
    };
    match (usize::from(at), array.len()) {
        (255, _) => _ = array.pop(),
        (at, len) if at < len => array[at] = value,
        _ => array.push(value),
    }
}

fn forward(response: ForwardResponse, scores: &LogprobRows) -> Vec<u8> {
    let mut bytes = frame(ResponsePayload::Forward(response), false);
    if scores.bytes() > 0 {
        let at = bytes.len();
        bytes.resize(at + scores.bytes(), 0);
        scores.append(&mut bytes, at).expect("there is room");
    }
    bytes
}

fn frame(payload: ResponsePayload, aborted: bool) -> Vec<u8> {
    let frame = ResponseFrame {
        driver_id: 0,
        aborted,
        payload,
    };
    let mut bytes = vec![0; 1 << 14];
    let length = pie_wire::encode_response(&frame, &mut bytes).expect("there is room");
    bytes.truncate(length);
    bytes
}
