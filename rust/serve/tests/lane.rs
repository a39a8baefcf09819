//! The fast lane over devices that answer at once, late, wrongly or not at all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pie_batch::{Layout, Limits, Planner, StepMemory};
use pie_launch::{Launch, LaunchError};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_serve::{Event, Lane, Memory, RehearsalError, Responder};
use pie_wire::{
    AdapterBinding, ArchivedResponsePayload, ForwardRequest, Frame, NativeSlice, Payload, Reply,
    Sampler,
};

const LIMITS: Limits = Limits {
    page_size: 16,
    total_pages: 32,
    vocab_size: 100,
    max_positions: 256,
    row_pages: 16,
    max_requests: 8,
    chunk_tokens: 32,
    max_slots: 8,
    reply_bytes: 1 << 16,
};
const ROWS: [usize; 3] = [1, 2, 6];

/// The words that the device writes.
#[derive(Clone, Default)]
struct Shared {
    results: Arc<[AtomicU64; 6]>,
}

impl Shared {
    fn put(&self, row: usize, step: i32, token: u64) {
        let word = u64::from(step.cast_unsigned()) << 32 | token;
        self.results[row].store(word, Ordering::Release);
    }
}

/// The lane's own view.
struct Host {
    shared: Shared,
    block: Vec<u64>,
    masks: Vec<i32>,
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
}

/// What a launch does, told the graph; and whether all has ended.
struct Device<L, E>(L, E);

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

fn lane(
    shared: &Shared,
    launch: impl FnMut(usize) -> Result<(), LaunchError> + Send + 'static,
    ended: impl FnMut() -> Result<bool, LaunchError> + Send + 'static,
    wait: Wait,
) -> Lane {
    let host = Host {
        shared: shared.clone(),
        block: vec![0; Layout::graph(6).bytes() / 8],
        masks: vec![0; 6 * LIMITS.mask_words()],
    };
    let device = Box::new(Device(launch, ended));
    Lane::new(device, Box::new(host), &ROWS, 4, wait)
}

fn responder(lane: Lane) -> Responder {
    Responder::new(Planner::new(LIMITS, 1), 0, Wait::Park).with_lane(lane)
}

/// One request per entry: its number of tokens; page r holds request r. One greedy sampler each.
fn frame(tokens: &[u32]) -> Vec<u8> {
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
    let request = ForwardRequest {
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
        adapter_bindings: vec![AdapterBinding::NONE; tokens.len()],
        ..ForwardRequest::default()
    };
    let frame = Frame {
        driver_id: 3,
        payload: Payload::Forward(request),
    };
    let mut bytes = vec![0; pie_wire::request_len(&frame).unwrap()];
    pie_wire::encode_request(&frame, &mut bytes).unwrap();
    bytes
}

/// A lane whose device knows its step from `number` and answers 10 times the row.
fn counting(shared: &Shared, launched: &Arc<Mutex<Vec<usize>>>, delay: Duration) -> Lane {
    let (device, launched) = (shared.clone(), Arc::clone(launched));
    let mut step = 0;
    let launch = move |graph: usize| {
        step += 1;
        launched.lock().unwrap().push(graph);
        let device = device.clone();
        thread::spawn(move || {
            // The last row comes first, and one by one.
            for row in (0..ROWS[graph]).rev() {
                thread::sleep(delay);
                device.put(row, step, 10 * row as u64);
            }
        });
        Ok(())
    };
    lane(
        shared,
        launch,
        || Ok(false),
        Wait::SpinThenPark(Duration::from_micros(50)),
    )
}

#[test]
fn the_smallest_graph_that_holds_the_rows_runs() {
    let (shared, launched) = (Shared::default(), Arc::default());
    let responder = responder(counting(&shared, &launched, Duration::from_micros(200)));
    let taken = |tokens: &[u32]| responder.rehearse_lane(&frame(tokens)).unwrap();
    assert!(taken(&[1]));
    assert!(taken(&[2]));
    assert!(taken(&[1, 1, 1]));
    assert!(taken(&[4, 1, 1]));
    assert!(!taken(&[5]), "more rows of one request than allowed");
    assert!(!taken(&[4, 3]), "more rows than any graph has");
    assert!(taken(&[1, 1]), "a batch that was left changes nothing");
    assert_eq!(*launched.lock().unwrap(), [0, 1, 2, 2, 1]);
}

/// Tokens of each request; `None` for an abort.
type Answer = Option<Vec<Vec<u32>>>;

fn decode(bytes: &[u8]) -> Answer {
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

/// The answers to some frames, over a ring, and what the responder told.
fn converse(responder: &Responder, frames: &[Vec<u8>]) -> (Vec<Answer>, Vec<String>) {
    let name = format!("/pie_lane_test_{}_{:p}", std::process::id(), responder);
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
                Event::Stopped => break,
                Event::Notes(notes) => told.extend(notes.into_iter().map(|note| note.text)),
                Event::Step(step) => told.push(format!("{}/{}", step.requests, step.tokens)),
                Event::Lost(error) => told.push(format!("lost: {error}")),
                Event::Job(_) => told.push("job".into()),
            }
        }
        answers.join().unwrap()
    });
    (answers, told)
}

#[test]
fn tokens_reach_the_client_without_a_job_and_steps_are_told_when_asked() {
    let (shared, launched) = (Shared::default(), Arc::default());
    let lane = counting(&shared, &launched, Duration::ZERO);
    let quiet = responder(lane);
    let frames = [frame(&[1, 1]), frame(&[2, 1]), frame(&[1; 6])];
    let singles = |tokens: &[u32]| Some(tokens.iter().map(|&token| vec![token]).collect());
    let expected = [
        singles(&[0, 10]),
        singles(&[10, 20]),
        singles(&[0, 10, 20, 30, 40, 50]),
    ];
    assert_eq!(converse(&quiet, &frames), (expected.to_vec(), vec![]));
    let lane = counting(&shared, &launched, Duration::ZERO);
    let telling = responder(lane).with_steps();
    let told = ["2/2", "2/3", "6/6"].map(String::from).to_vec();
    assert_eq!(converse(&telling, &frames), (expected.to_vec(), told));
}

#[test]
fn a_device_that_fails_costs_its_batch_and_the_reason_names_the_shape() {
    let shared = Shared::default();
    let device = shared.clone();
    let mut step = 0;
    let launch = move |graph: usize| {
        step += 1;
        if step == 1 {
            let text = "out of order".to_owned();
            return Err(LaunchError::Failed(text));
        }
        for row in 0..ROWS[graph] {
            device.put(row, step, 7);
        }
        Ok(())
    };
    let responder = responder(lane(&shared, launch, || Ok(false), Wait::Spin));
    let (answers, told) = converse(&responder, &[frame(&[1, 2]), frame(&[1])]);
    assert_eq!(answers, [None, Some(vec![vec![7]])]);
    let [told] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(
        told.contains("6 rows") && told.contains("3 in use"),
        "{told}"
    );
    assert!(told.contains("out of order"), "{told}");
}

#[test]
fn a_device_that_dies_or_forgets_results_ends_the_wait() {
    for (ended, expected) in [
        (Ok(true), "without a result in row 1"),
        (Err(LaunchError::Failed("dead".into())), "dead"),
    ] {
        for wait in [Wait::Spin, Wait::Park] {
            let (shared, ended) = (Shared::default(), ended.clone());
            let device = shared.clone();
            let launch = move |_| {
                device.put(0, 1, 7);
                // Of another step: not this one's.
                device.put(1, 9, 7);
                Ok(())
            };
            let lane = lane(&shared, launch, move || ended.clone(), wait);
            let error = responder(lane).rehearse_lane(&frame(&[1, 1])).unwrap_err();
            assert!(matches!(error, RehearsalError::Lane(_)));
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_empties_its_request_alone() {
    let shared = Shared::default();
    let device = shared.clone();
    let launch = move |_| {
        for (row, token) in [5, 100, 6].into_iter().enumerate() {
            device.put(row, 1, token);
        }
        Ok(())
    };
    let responder = responder(lane(&shared, launch, || Ok(false), Wait::Spin));
    let (answers, told) = converse(&responder, &[frame(&[1, 1, 1])]);
    assert_eq!(answers, [Some(vec![vec![5], vec![], vec![6]])]);
    let [told] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(told.contains("request 1 emptied"), "{told}");
}
