//! Frame to reply without the ring and the model.

use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::report::Unit;
use pie_benches::timing::{self, Race};
use pie_benches::{Bytes, HostPath, decode_frame};
use pie_wire::Reply;

const CONTEXT: u32 = 2048;
const SIZES: [u32; 3] = [1, 64, 256];
/// Steps of the same contexts in a row; every sixteenth adds a page to each.
const STEPS: u32 = 32;

fn wire(criterion: &mut Criterion) {
    for size in SIZES {
        let bytes = Bytes::of(&decode_frame(size, CONTEXT, 0));
        let access = || pie_wire::access_request(bytes.as_slice()).is_ok();
        assert!(access());
        Race::new(format!("wire/access/{size}x{CONTEXT}"), Unit::Ns, access).run(criterion);
    }
}

fn plan(criterion: &mut Criterion) {
    for size in SIZES {
        let frames: Vec<Bytes> = (0..STEPS)
            .map(|step| Bytes::of(&decode_frame(size, CONTEXT, step)))
            .collect();
        let mut path = HostPath::default();
        check(&mut path, &frames, size);
        let mut step = 0;
        let decode = || {
            step = (step + 1) % frames.len();
            path.run(frames[step].as_slice(), 7).len()
        };
        Race::new(format!("plan/decode/{size}x{CONTEXT}"), Unit::Ns, decode).run(criterion);
    }
}

/// Every request of every frame must come back with the token that was sampled for it.
fn check(path: &mut HostPath, frames: &[Bytes], size: u32) {
    for frame in frames {
        match pie_wire::decode_reply(path.run(frame.as_slice(), 7)).expect("a valid reply") {
            Reply::Tokens(tokens) => assert!(tokens.iter().eq((0..size).map(|_| 7))),
            Reply::Frame(_) => panic!("plain decode is answered by the fast reply"),
        }
    }
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = wire, plan
}
criterion_main!(benches);
