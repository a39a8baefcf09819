//! SIGTERM after each single step of a server's life leaves nothing behind.
//!
//! The guard's thread sees the process through system calls and the lock of its list, so SIGTERM is
//! sent after each system call and each locked instruction.

use std::os::unix::process::ExitStatusExt;

use pie_ring::{ExitGuard, Server};

use crate::common::{Name, config};
use crate::tracee::{Next, Tracee, alone, rest, stop};

#[test]
fn sigterm_after_any_step_leaves_nothing() {
    let _alone = alone();
    let name = Name::new();
    let mut clean = Vec::new();
    let mut rests = false;
    for calls in 0.. {
        for atomics in 0.. {
            let mut child = live(&name);
            for _ in 0..calls {
                // Entry and return.
                assert!(child.run_to_call() && child.run_to_call());
            }
            let call_comes = child.step(atomics, |next| next == Next::Atomic, Next::is_call);
            rests = child.next().rests();
            let status = child.terminate();
            assert!(!name.exists(), "after {calls} calls, {atomics} atomics");
            let default_action = status.signal() == Some(libc::SIGTERM);
            assert!(status.success() || default_action, "{status}");
            clean.push(status.success());
            if call_comes {
                break;
            }
        }
        if rests {
            break;
        }
    }
    // The guard is there from some step on, up to another.
    assert!(clean.len() > 50, "{}", clean.len());
    clean.dedup();
    assert_eq!(clean, [false, true, false]);
}

/// A whole life, followed by nothing.
fn live(name: &Name) -> Tracee {
    let config = config(name);
    Tracee::fork(|| {
        stop();
        let guard = ExitGuard::install().unwrap();
        drop(Server::create(&config, &guard).unwrap());
        drop(guard);
        rest();
    })
}
