//! No way out leaves a region.

use std::thread;
use std::time::Duration;

use pie_ring::{ExitGuard, GuardError, Server, Wait};
use rustix::process::Signal;

use crate::common::{Name, STRATEGIES, config, create, eventually, open, requests_sent};
use crate::roles::{Process, echo, is_gone, parse_pid};

/// The runtime kills a driver that has not ended by then.
const SOON: Duration = Duration::from_secs(5);

fn assert_clean_exit(process: &mut Process, name: &Name) {
    process.signal(Signal::TERM);
    let status = process.ended(SOON);
    assert!(status.success(), "{status}");
    assert!(!name.exists());
}

#[test]
fn sigterm_while_loading() {
    let name = Name::new();
    assert_clean_exit(&mut Process::ready("load", &name, Wait::Park), &name);
}

#[test]
fn sigterm_while_waiting_in_every_strategy() {
    for wait in STRATEGIES {
        let name = Name::new();
        let mut process = Process::ready("serve", &name, wait);
        assert!(name.exists());
        thread::sleep(Duration::from_millis(20));
        assert_clean_exit(&mut process, &name);
    }
}

#[test]
fn sigterm_after_serving() {
    let name = Name::new();
    let mut process = Process::ready("serve", &name, Wait::Park);
    echo(&name, Wait::Park);
    assert_clean_exit(&mut process, &name);
}

#[test]
fn sigterm_while_other_threads_burn_and_the_server_spins() {
    let name = Name::new();
    let mut process = Process::ready("burn", &name, Wait::Spin);
    assert_clean_exit(&mut process, &name);
}

#[test]
fn requests_are_answered_with_nothing_when_the_process_ends() {
    for (role, wait) in [("stuck", Wait::Park), ("stuck", Wait::Spin)] {
        let name = Name::new();
        let mut process = Process::ready(role, &name, wait);
        let client = open(&name, Wait::Park, Duration::from_secs(20));
        let answers: Vec<Vec<u8>> = thread::scope(|scope| {
            // One is in the server's hands, and two wait for it.
            let calls: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| client.call(b"x", <[u8]>::to_vec).unwrap()))
                .collect();
            eventually(SOON, "all are sent", || requests_sent(&name) == 3);
            assert_clean_exit(&mut process, &name);
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        assert_eq!(answers, [b"", b"", b""]);
    }
}

#[test]
fn more_sigterms_change_nothing() {
    let name = Name::new();
    let mut process = Process::ready("serve", &name, Wait::Park);
    for _ in 0..50 {
        process.signal(Signal::TERM);
    }
    assert_clean_exit(&mut process, &name);
}

#[test]
fn sigterm_while_waiting_for_a_live_owner_spares_the_owner() {
    let name = Name::new();
    let owner = create(&name).unwrap();
    let mut process = Process::ready("takeover", &name, Wait::Park);
    thread::sleep(Duration::from_millis(50));
    process.signal(Signal::TERM);
    assert!(process.ended(SOON).success());
    assert!(name.exists());
    drop(owner);
}

#[test]
fn the_death_of_the_parent_ends_the_server() {
    for wait_ms in [0, 150] {
        let name = Name::new();
        let mut parent = Process::start("parent", &name, Wait::Park);
        // Two processes tell one thing each, in any order.
        let told = [parent.told(), parent.told()];
        assert!(told.iter().any(|message| message == "ready"), "{told:?}");
        let server = told.iter().find_map(|message| parse_pid(message)).unwrap();
        thread::sleep(Duration::from_millis(wait_ms));
        assert!(name.exists());
        parent.kill();
        eventually(SOON, "the server ends", || is_gone(server));
        assert!(!name.exists());
    }
}

#[test]
fn a_killed_servers_region_is_removed() {
    for wait in STRATEGIES {
        let name = Name::new();
        let mut process = Process::ready("serve", &name, wait);
        echo(&name, wait);
        process.kill();
        eventually(SOON, "the region goes", || !name.exists());
    }
}

/// Drivers of other makes take a name without a lock: they remove it and make a file of their own.
#[test]
fn a_file_of_another_make_that_took_the_name_stays() {
    for (signal, bytes) in [
        (Signal::TERM, &[7_u8; 100][..]),
        (Signal::KILL, &[7; 100]),
        (Signal::TERM, &[]),
        (Signal::KILL, &[]),
    ] {
        let name = Name::new();
        let mut process = Process::ready("serve", &name, Wait::Park);
        std::fs::remove_file(name.path()).unwrap();
        std::fs::write(name.path(), bytes).unwrap();
        process.signal(signal);
        process.ended(SOON);
        // Long enough for a reaper.
        thread::sleep(Duration::from_millis(500));
        assert_eq!(std::fs::read(name.path()).ok().as_deref(), Some(bytes));
        std::fs::remove_file(name.path()).unwrap();
    }
}

/// Whether the reaper of a killed server or the next owner comes first.
#[test]
fn the_region_of_the_next_owner_stays() {
    let owners: Vec<_> = (0..20)
        .map(|_| {
            let name = Name::new();
            let mut process = Process::ready("serve", &name, Wait::Park);
            process.kill();
            let mut config = config(&name);
            config.takeover = SOON;
            let owner = Server::create(&config, &ExitGuard::inert()).unwrap();
            (owner, name)
        })
        .collect();
    thread::sleep(Duration::from_millis(1500));
    for (owner, name) in owners {
        assert!(name.exists());
        drop(owner);
        assert!(!name.exists());
    }
}

#[test]
fn a_forked_child_leaves_everything_to_its_parent() {
    let name = Name::new();
    let mut process = Process::ready("fork", &name, Wait::Park);
    echo(&name, Wait::Park);
    assert_clean_exit(&mut process, &name);
}

/// The only test that installs a guard in the test process.
#[test]
fn one_guard_per_process_at_a_time() {
    for _ in 0..3 {
        let guard = ExitGuard::install().unwrap();
        assert!(matches!(ExitGuard::install(), Err(GuardError::Active)));
        drop(guard);
    }
}
