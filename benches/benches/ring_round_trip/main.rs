//! A request to another process and its answer back, over the ring and over what others would use.
//!
//! Two processes on two cores. In every transport the client brings the request to the server,
//! the server makes the response from it, and the client looks at the response. Where memory is
//! shared, each reads in place what the other wrote.

mod cores;
mod echo;
mod floor;
mod iceoryx;
mod leftovers;
mod pair;
mod ring;
mod socket;
mod topics;
mod transport;
mod zeromq;

use std::cell::{LazyCell, RefCell};

use criterion::Criterion;
use pie_benches::report::Unit;
use pie_benches::timing::{self, Race};
use pie_ring::Wait;

use crate::pair::Pair;
use crate::transport::{Kind, Setup};

const SPIN_SIZES: [usize; 4] = [64, 4096, 65536, 1_048_576];

fn main() {
    if let Some(setup) = Setup::of_server_process() {
        pair::serve(&setup);
        return;
    }
    let mut criterion = timing::criterion();
    for size in SPIN_SIZES {
        race(&mut criterion, "spin", size, Wait::Spin);
    }
    race(&mut criterion, "park", 64, Wait::Park);
    criterion.final_summary();
}

fn race(criterion: &mut Criterion, waiting: &str, size: usize, wait: Wait) {
    // Criterion's filter decides whether the processes are needed.
    let pair = LazyCell::new(|| RefCell::new(Pair::start(Setup::new(size, wait))));
    let turn = |kind| {
        let pair = &pair;
        move |operations, samples: &mut _| pair.borrow_mut().turn(kind, operations, samples)
    };
    let bench = format!("ring/round_trip/{waiting}/{size}");
    let mut race = Race::new_turns(bench, Unit::Ns, turn(Kind::Ring));
    for kind in Kind::PEERS {
        race = race.peer_turns(kind.name(), turn(kind));
    }
    race.run(criterion);
}
