//! Two sides that spin make no system call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pie_ring::Wait;

use crate::common::{Name, Running, create, open};
use crate::tracee::{Next, Tracee, alone, stop};

/// Calls in a round: so few that on a busy machine, too, both sides keep their cores for one.
const CALLS: u32 = 100;
const LIMIT: Duration = Duration::from_mins(5);
const MARK: &[u8] = b"mark";

/// The end of a round, for the tracer.
fn mark() {
    let _ = rustix::process::getppid();
}

/// Follows the child until one of its rounds has no system call. In other rounds the other side may
/// have lost its core for a while; then a futex call is right, and the only one allowed.
///
/// An error, not a panic: a thread that calls the child is yet to be stopped.
fn find_silent_round(mut child: Tracee) -> Result<(), String> {
    let (start, mut calls, mut rounds) = (Instant::now(), 0, 0);
    while child.run_to_call() {
        match child.entered() {
            Next::Call(libc::SYS_getppid, _) => {
                if rounds > 0 && calls == 0 {
                    return Ok(());
                }
                (calls, rounds) = (0, rounds + 1);
            }
            Next::Call(libc::SYS_futex, operation) if operation == libc::FUTEX_WAKE as u64 => {
                calls += 1;
            }
            other => return Err(format!("system call {other:?} after {rounds} rounds")),
        }
        // The return from the same call.
        child.run_to_call();
        if start.elapsed() > LIMIT {
            return Err(format!("{rounds} rounds, {calls} calls in the last one"));
        }
    }
    Err(format!("the child ended after {rounds} rounds"))
}

#[test]
fn a_spinning_server_makes_no_system_call() {
    let _alone = alone();
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let client = open(&name, Wait::Spin, LIMIT);
    let done = AtomicBool::new(false);
    let child = Tracee::fork(|| {
        stop();
        let mut words = Vec::with_capacity(8);
        while let Some(lease) = server.wait(Wait::Spin).unwrap() {
            if lease.copy_request(&mut words).unwrap() == MARK {
                mark();
            }
            let _ = lease.reply(&[1; 64]).unwrap();
        }
    });
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for _ in 0..CALLS {
                    client.call(&[0; 64], |_| ()).unwrap();
                }
                // The last one is not answered, because the child is killed.
                let _ = client.call(MARK, |_| ());
            }
        });
        let found = find_silent_round(child);
        done.store(true, Ordering::Relaxed);
        client.abort();
        found.unwrap();
    });
}

#[test]
fn a_spinning_client_makes_no_system_call() {
    let _alone = alone();
    let name = Name::new();
    let running = Running::start(create(&name).unwrap(), Wait::Spin);
    let client = open(&name, Wait::Spin, LIMIT);
    let child = Tracee::fork(|| {
        stop();
        loop {
            for _ in 0..CALLS {
                client.call(&[0; 64], |_| ()).unwrap();
            }
            mark();
        }
    });
    find_silent_round(child).unwrap();
    drop(running);
}
