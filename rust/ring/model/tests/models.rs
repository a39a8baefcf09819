//! Runs the models.

use std::time::Duration;

use pie_ring_model::{self as model, Ending, Wait};

const BRIEFLY: Wait = Wait::SpinThenPark(Duration::from_secs(1));

#[test]
fn echo_spin_spin() {
    model::echo(Wait::Spin, Wait::Spin, 2);
}

#[test]
fn echo_spin_park() {
    model::echo(Wait::Spin, Wait::Park, 2);
}

#[test]
fn echo_park_spin() {
    model::echo(Wait::Park, Wait::Spin, 2);
}

#[test]
fn echo_park_park() {
    model::echo(Wait::Park, Wait::Park, 2);
}

#[test]
fn echo_across_the_wrap() {
    model::echo_across_the_wrap(Wait::Spin);
    model::echo_across_the_wrap(Wait::Park);
}

#[test]
fn an_idle_server_makes_deferred_wakes() {
    model::an_idle_server_makes_deferred_wakes();
}

#[test]
fn an_answer_meets_the_end_of_spinning() {
    for ending in [Ending::Drop, Ending::Poll, Ending::Stop, Ending::Park] {
        model::an_answer_meets_the_end_of_spinning(ending);
    }
}

#[test]
fn stop() {
    for wait in [Wait::Spin, BRIEFLY, Wait::Park] {
        model::stop(wait);
    }
}

#[test]
fn wake() {
    for wait in [Wait::Spin, BRIEFLY, Wait::Park] {
        model::wake(wait);
    }
}

#[test]
fn abort() {
    for wait in [Wait::Spin, Wait::Park] {
        model::abort(wait);
    }
}

#[test]
fn time_out() {
    for wait in [Wait::Spin, Wait::Park] {
        model::time_out(wait);
    }
}

#[test]
fn a_request_behind_a_lease() {
    for wait in [Wait::Spin, Wait::Park] {
        model::a_request_behind_a_lease(wait);
    }
}

#[test]
fn a_refusal_meets_an_answer() {
    for wait in [Wait::Spin, Wait::Park] {
        model::a_refusal_meets_an_answer(wait);
    }
}

#[test]
fn a_stale_lease() {
    model::a_stale_lease();
}

#[test]
fn oldest_first() {
    model::oldest_first(2, 3);
    model::oldest_first(3, 2);
}

/// Who waits how for a broadcast.
const READERS: [[Wait; 2]; 3] = [
    [Wait::Spin, Wait::Spin],
    [Wait::Spin, Wait::Park],
    [Wait::Park, Wait::Park],
];

#[test]
fn a_broadcast_wakes_every_reader() {
    for waits in READERS {
        model::broadcast(&[4], waits, 2);
    }
    model::broadcast(&[1], [Wait::Park; 2], 3);
}

/// The longest models: each is a test of its own, so that they share the cores.
mod a_broadcast_uses_its_slots_again {
    use super::{READERS, Wait, model};

    #[test]
    fn readers_spin() {
        model::broadcast(&[4, 1], READERS[0], 1);
    }

    #[test]
    fn one_parks() {
        model::broadcast(&[4, 1], READERS[1], 1);
    }

    #[test]
    fn readers_park() {
        model::broadcast(&[4, 1], READERS[2], 1);
    }

    #[test]
    fn of_other_sizes() {
        model::broadcast(&[0, 5], [Wait::Park; 2], 1);
    }
}
