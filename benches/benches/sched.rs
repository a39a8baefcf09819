//! The scheduler, and what the runtime does between an answer and the next request.

use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::report::Unit;
use pie_benches::sched::Decodes;
use pie_benches::timing::{self, Race, Samples};
use pie_engine::{EngineError, FrameBuilder, FrameRow, Link, Sampler};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Stop, Wait};

const CONTEXT: u32 = 2048;
const REQUESTS: [u32; 2] = [256, 1024];

/// A kind of call, timed while the other one continues.
fn calls(criterion: &mut Criterion, name: &str, timed: fn(&mut Decodes) -> Duration) {
    for requests in REQUESTS {
        let mut decodes = None;
        let turn = move |operations, samples: &mut Samples| {
            let decodes = decodes.get_or_insert_with(|| Decodes::new(requests, CONTEXT));
            let mut total = Duration::ZERO;
            for _ in 0..operations {
                let elapsed = timed(decodes);
                samples.record(elapsed);
                total += elapsed;
            }
            total
        };
        let row = format!("sched/{name}/{requests}x{CONTEXT}");
        Race::new_turns(row, Unit::Us, turn).run(criterion);
    }
}

fn sched(criterion: &mut Criterion) {
    calls(criterion, "step", |decodes| {
        let start = Instant::now();
        decodes.step();
        let elapsed = start.elapsed();
        decodes.answer();
        elapsed
    });
    calls(criterion, "answer", |decodes| {
        decodes.step();
        let start = Instant::now();
        decodes.answer();
        start.elapsed()
    });
}

struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// From an answer seen to the next request made, over a ring to a thread that answers at once.
fn relay(criterion: &mut Criterion) {
    for requests in REQUESTS {
        let name = format!("/pie_bench_relay_{}", std::process::id());
        let wait = Wait::SpinThenPark(Duration::from_micros(200));
        let mut config = ServerConfig::new(&name, [0; 8], Vec::new());
        config.layout = RegionLayout::new(2, 8 << 20, 1 << 16).expect("a region");
        let mut server = Server::create(&config, &ExitGuard::inert()).expect("a region");
        let stop = StopOnDrop(server.stop_handle());
        let mut answer = vec![0; 1 << 16];
        let length = pie_wire::encode_fast_tokens(0, &vec![7; requests as usize], &mut answer);
        answer.truncate(length.expect("it fits"));
        thread::scope(|scope| {
            // Its end, by a panic, too, ends the other thread.
            let _stop = stop;
            scope.spawn(|| {
                while let Ok(Some(lease)) = server.wait(wait) {
                    assert!(lease.reply(&answer).is_ok());
                }
            });
            let client = ClientConfig {
                wait,
                ..ClientConfig::default()
            };
            let client = Client::open(&name, [0; 8], client).expect("the server's region");
            let row = format!("runtime/relay/{requests}x{CONTEXT}");
            let turn =
                |operations, samples: &mut Samples| play(&client, requests, operations, samples);
            Race::new_turns(row, Unit::Us, turn).run(criterion);
        });
    }
}

/// Sends so many frames of decodes, each laid out while the one before is computed.
fn play<'c>(client: &'c Client, requests: u32, operations: u64, samples: &mut Samples) -> Duration {
    let sampler = Sampler::TopP {
        temperature: 0.6,
        p: 0.95,
    };
    let pages: Vec<u32> = (0..CONTEXT / 16).collect();
    let mut link = Link::new(client, FrameBuilder::new(16));
    let (mut left, mut total) = (operations + 1, Duration::ZERO);
    let turn = |row| FrameRow {
        context_id: row as u64 + 1,
        tokens: &[0],
        awaits: Some(row),
        start: CONTEXT - 1,
        pages: &pages,
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let next = |link: &mut Link<'c>| {
        left = left.saturating_sub(1);
        let turns = (0..requests as usize).map(turn);
        Ok(if left > 0 {
            Some(link.prepare(turns)?)
        } else {
            None
        })
    };
    let done = |exchange: &pie_engine::StepTiming| {
        let took = Duration::from_nanos(exchange.client_ns);
        samples.record(took);
        total += took;
    };
    link.pipeline::<EngineError>(next, done)
        .expect("it is answered");
    total
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = sched, relay
}
criterion_main!(benches);
