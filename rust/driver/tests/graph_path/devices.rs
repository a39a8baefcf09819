//! Devices that answer as a test says, graph paths over them, and frames for these.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pie_driver::launch::{Launch, LaunchError};
use pie_driver::{Event, GraphPath, Memory, Responder};
use pie_planner::{Layout, Limits, Planner, StepMemory, StepSize};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{
    AdapterBinding, ArchivedResponsePayload, ForwardRequest, Frame, NativeSlice, Payload, Reply,
    Sampler,
};

pub(crate) const LIMITS: Limits = Limits {
    page_size: 16,
    total_pages: 64,
    vocab_size: 100,
    max_positions: 1024,
    row_pages: 64,
    max_requests: 8,
    chunk_tokens: 32,
    max_slots: 8,
    reply_bytes: 1 << 16,
};
pub(crate) const ROWS: [usize; 3] = [1, 2, 6];

/// The words that the device writes.
#[derive(Clone, Default)]
pub(crate) struct Shared {
    pub(crate) results: Arc<[AtomicU64; 6]>,
}

impl Shared {
    pub(crate) fn put(&self, row: usize, step: i32, token: u64) {
        let word = u64::from(step.cast_unsigned()) << 32 | token;
        self.results[row].store(word, Ordering::Release);
    }
}

/// The graph path's own view.
pub(crate) struct Host {
    shared: Shared,
    block: Vec<u64>,
    masks: Vec<i32>,
}

impl Host {
    pub(crate) fn new(shared: &Shared) -> Self {
        Self {
            shared: shared.clone(),
            // Room for the rows of slots, too.
            block: vec![0; Layout::grouped_graph(16).bytes() / 8],
            masks: vec![0; 6 * LIMITS.mask_words()],
        }
    }

    /// The beginning of the block.
    pub(crate) fn staged(&self, len: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.block)[..len]
    }
}

impl Memory for Host {
    fn step(&mut self) -> StepMemory<'_> {
        StepMemory {
            block: bytemuck::cast_slice_mut(&mut self.block),
            mask_words: &mut self.masks,
        }
    }

    fn results(&self) -> &[AtomicU64] {
        &self.shared.results[..]
    }

    fn logprobs(&self) -> &[AtomicU32] {
        &[]
    }
}

/// What a launch does, given the graph; and whether all has ended.
pub(crate) struct Device<L, E>(pub(crate) L, pub(crate) E);

impl<L, E> Launch for Device<L, E>
where
    L: FnMut(usize) -> Result<(), LaunchError> + Send,
    E: FnMut() -> Result<bool, LaunchError> + Send,
{
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError> {
        (self.0)(graph)
    }

    fn ended(&mut self) -> Result<bool, LaunchError> {
        (self.1)()
    }
}

pub(crate) fn graph_path(
    shared: &Shared,
    launch: impl FnMut(usize) -> Result<(), LaunchError> + Send + 'static,
    ended: impl FnMut() -> Result<bool, LaunchError> + Send + 'static,
    wait: Wait,
) -> GraphPath {
    graph_path_of(&ROWS.map(Into::into), shared, Device(launch, ended), wait)
}

pub(crate) fn graph_path_of(
    sizes: &[StepSize],
    shared: &Shared,
    device: impl Launch + 'static,
    wait: Wait,
) -> GraphPath {
    let memory = Box::new(Host::new(shared));
    GraphPath::new(Box::new(device), memory, sizes, 4, wait)
}

pub(crate) fn responder(graph_path: GraphPath) -> Responder {
    Responder::new(Planner::new(LIMITS, 1), 0, Wait::Park).with_graph_path(graph_path)
}

/// One request per entry: its number of tokens; page r holds request r. One greedy sampler each.
pub(crate) fn frame(tokens: &[u32]) -> Vec<u8> {
    bound_frame(tokens, &vec![-1; tokens.len()])
}

/// The same of contexts 1, 2 and so on, which want drafts.
pub(crate) fn drafting_frame(tokens: &[u32]) -> Vec<u8> {
    encoded(ForwardRequest {
        context_ids: (1..=tokens.len() as u64).collect(),
        output_spec_flags: vec![true; tokens.len()],
        ..request(tokens, &vec![-1; tokens.len()])
    })
}

/// As [`frame`], with the adapter of each request, -1 for none.
pub(crate) fn bound_frame(tokens: &[u32], adapters: &[i64]) -> Vec<u8> {
    encoded(request(tokens, adapters))
}

fn request(tokens: &[u32], adapters: &[i64]) -> ForwardRequest {
    let ends = |count: fn(u32) -> u32| -> Vec<u32> {
        let sums = tokens.iter().scan(0, |sum, &n| {
            *sum += count(n);
            Some(*sum)
        });
        [0].into_iter().chain(sums).collect()
    };
    let greedy = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };
    ForwardRequest {
        token_ids: tokens.iter().flat_map(|&n| 0..n).collect(),
        position_ids: tokens.iter().flat_map(|&n| 0..n).collect(),
        qo_indptr: ends(|n| n),
        kv_page_indices: (0..tokens.len() as u32).collect(),
        kv_page_indptr: (0..=tokens.len() as u32).collect(),
        kv_last_page_lens: tokens.to_vec(),
        sampling_indices: tokens.iter().map(|&n| n - 1).collect(),
        sampling_indptr: ends(|_| 1),
        samplers: vec![greedy; tokens.len()],
        sampler_indptr: ends(|_| 1),
        adapter_bindings: adapters
            .iter()
            .map(|&adapter_id| AdapterBinding {
                adapter_id,
                ..AdapterBinding::NONE
            })
            .collect(),
        ..ForwardRequest::default()
    }
}

/// Decodes of so many contexts, which share 896 tokens and have one of their own.
pub(crate) fn forks(count: u32) -> Vec<u8> {
    let mut request = ForwardRequest {
        token_ids: vec![1; count as usize],
        position_ids: vec![896; count as usize],
        qo_indptr: (0..=count).collect(),
        kv_page_indices: (0..count)
            .flat_map(|own| (0..56).chain([56 + own]))
            .collect(),
        kv_page_indptr: (0..=count).map(|request| 57 * request).collect(),
        kv_last_page_lens: vec![1; count as usize],
        sampling_indices: vec![0; count as usize],
        sampling_indptr: (0..=count).collect(),
        sampler_indptr: (0..=count).collect(),
        adapter_bindings: vec![AdapterBinding::NONE; count as usize],
        ..ForwardRequest::default()
    };
    let greedy = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };
    request.samplers = vec![greedy; count as usize];
    encoded(request)
}

fn encoded(request: ForwardRequest) -> Vec<u8> {
    let frame = Frame {
        driver_id: 3,
        payload: Payload::Forward(request),
    };
    let mut bytes = vec![0; pie_wire::request_len(&frame).unwrap()];
    pie_wire::encode_request(&frame, &mut bytes).unwrap();
    bytes
}

/// A graph path whose device knows its step from `number` and answers 10 times the row.
pub(crate) fn counting(
    shared: &Shared,
    launched: &Arc<Mutex<Vec<usize>>>,
    delay: Duration,
) -> GraphPath {
    let (device, launched) = (shared.clone(), Arc::clone(launched));
    let mut step = 0;
    let launch = move |graph: usize| {
        step += 1;
        launched.lock().unwrap().push(graph);
        let device = device.clone();
        thread::spawn(move || {
            // The last row comes first, and one by one.
            let rows = ROWS.iter().chain(&[3, 6]).nth(graph).unwrap();
            for row in (0..*rows).rev() {
                thread::sleep(delay);
                device.put(row, step, 10 * row as u64);
            }
        });
        Ok(())
    };
    graph_path(
        shared,
        launch,
        || Ok(false),
        Wait::SpinThenPark(Duration::from_micros(50)),
    )
}

/// Tokens of each request; `None` for an abort.
pub(crate) type Answer = Option<Vec<Vec<u32>>>;

pub(crate) fn decode(bytes: &[u8]) -> Answer {
    match pie_wire::decode_reply(bytes).unwrap() {
        Reply::Tokens(tokens) => Some(tokens.iter().map(|token| vec![token]).collect()),
        Reply::Frame(frame) if frame.aborted => None,
        Reply::Frame(frame) => match &frame.payload {
            ArchivedResponsePayload::Status(status) => panic!("status {}", status.status),
            ArchivedResponsePayload::Forward(forward) => {
                let (ends, tokens) = (forward.tokens_indptr.native(), forward.tokens.native());
                let range = |pair: &[u32]| tokens[pair[0] as usize..pair[1] as usize].to_vec();
                Some(ends.windows(2).map(range).collect())
            }
        },
    }
}

/// The answers to some frames, over a ring, and what the responder reported.
pub(crate) fn converse(responder: &Responder, frames: &[Vec<u8>]) -> (Vec<Answer>, Vec<String>) {
    let name = format!(
        "/pie_graph_path_test_{}_{:p}",
        std::process::id(),
        responder
    );
    let abort = pie_wire::abort_frame(0).to_vec();
    let mut config = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort);
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&name, pie_wire::SCHEMA_HASH, ClientConfig::default()).unwrap();
    let stop = ring.stop_handle();
    let mut told = Vec::new();
    let answers = thread::scope(|scope| {
        let answers = scope.spawn(move || {
            let call = |bytes: &Vec<u8>| client.call(bytes, decode).unwrap();
            let answers: Vec<_> = frames.iter().map(call).collect();
            stop.stop();
            answers
        });
        loop {
            match responder.next(&mut ring).unwrap() {
                Event::Woken => unreachable!("no thread calls"),
                Event::Stopped => break,
                Event::LogLines(log_lines) => {
                    told.extend(log_lines.into_iter().map(|log_line| log_line.text));
                }
                Event::Step(step) => told.push(format!("{}/{}", step.requests, step.tokens)),
                Event::DeviceLost(error) => told.push(format!("lost: {error}")),
                Event::Job(_) => told.push("job".into()),
            }
        }
        answers.join().unwrap()
    });
    (answers, told)
}
