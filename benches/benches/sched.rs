//! The scheduler.

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::report::Unit;
use pie_benches::sched::Decodes;
use pie_benches::timing::{self, Race, Samples};

const CONTEXT: u32 = 2048;
const REQUESTS: [u32; 2] = [256, 1024];

/// A kind of call, timed while the other one goes on.
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

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = sched
}
criterion_main!(benches);
