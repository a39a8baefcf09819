//! Nothing is left over by SIGTERM after each single step of a server's life.
//!
//! The guard's thread sees the process through system calls and the lock of its list, so SIGTERM is
//! sent after each system call and each locked instruction.

use std::os::unix::process::ExitStatusExt;

use pie_ring::{ExitGuard, Server, ServerConfig};

use crate::common::{Name, config};
use crate::tracee::{Next, Tracee, alone, rest, stop};

#[test]
fn sigterm_after_any_step_leaves_nothing() {
    let _alone = alone();
    let mut clean = terminate_after_each_step(|config| {
        let guard = ExitGuard::install().unwrap();
        drop(Server::create(config, &guard).unwrap());
        std::mem::forget(guard);
    });
    // The default action up to the handler's installation, then the guard's.
    assert!(clean.len() > 50, "{}", clean.len());
    clean.dedup();
    assert_eq!(clean, [false, true]);
}

#[test]
fn sigterm_while_the_guard_goes_is_not_lost() {
    let _alone = alone();
    let clean = terminate_after_each_step(|_| drop(ExitGuard::install().unwrap()));
    // Towards the end it is the guard or the default action.
    assert!(clean.contains(&true) && !clean[0] && !clean[clean.len() - 1]);
}

/// Sends SIGTERM after each step of `life`, which nothing follows. Whether the process exited by
/// itself; if not, by the signal's default action.
fn terminate_after_each_step(life: fn(&ServerConfig)) -> Vec<bool> {
    let mut clean = Vec::new();
    for calls in 0.. {
        for atomics in 0.. {
            // The reaper of the life before may still look at its own.
            let name = Name::new();
            let config = config(&name);
            let mut child = Tracee::fork(|| {
                stop();
                life(&config);
                rest();
            });
            // Some calls depend on how far the guard's thread is: this life may have fewer of them.
            let mut rests = !(0..calls).all(|_| pass_call(&mut child));
            let call_comes =
                rests || child.step(atomics, |next| next == Next::Atomic, Next::is_call);
            rests |= child.next().rests();
            let status = child.terminate();
            assert!(!name.exists(), "after {calls} calls, {atomics} atomics");
            let default_action = status.signal() == Some(libc::SIGTERM);
            assert!(status.success() || default_action, "{status}");
            clean.push(status.success());
            if rests {
                return clean;
            }
            if call_comes {
                break;
            }
        }
    }
    clean
}

/// Runs past the next system call. False if that is where the child rests.
fn pass_call(child: &mut Tracee) -> bool {
    assert!(child.run_to_call());
    if child.entered().rests() {
        return false;
    }
    assert!(child.run_to_call());
    true
}
