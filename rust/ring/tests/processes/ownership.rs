//! One owner per name: live ones are respected, dead ones replaced.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use pie_ring::{ExitGuard, RegionError, RegionLayout, Server, Wait};
use rustix::process::Signal;

use crate::common::{Name, config, create};
use crate::roles::{Process, echo};

#[test]
fn a_region_has_its_size_its_memory_and_its_mode() {
    let name = Name::new();
    let server = create(&name).unwrap();
    let file = name.path().metadata().unwrap();
    let bytes = server.layout().total_bytes() as u64;
    assert_eq!(file.len(), bytes);
    assert!(file.blocks() * 512 >= bytes, "the memory is not reserved");
    assert_eq!(file.permissions().mode() & 0o7777, 0o600);
    assert_eq!(file.nlink(), 1);
}

#[test]
fn a_killed_owner_is_replaced_at_once() {
    let name = Name::new();
    let mut process = Process::ready("own", &name, Wait::Park);
    process.kill();
    assert!(name.exists());
    // It does not wait for its takeover's time, which is none.
    drop(create(&name).unwrap());
}

#[test]
fn a_started_program_does_not_keep_the_lock_of_its_killed_parent() {
    let name = Name::new();
    let mut process = Process::start("exec", &name, Wait::Park);
    let sleeper = process.told_pid();
    assert_eq!(process.told(), "ready");
    process.kill();
    let result = create(&name).map(drop);
    rustix::process::kill_process(sleeper, Signal::KILL).unwrap();
    result.unwrap();
}

#[test]
fn a_live_owner_is_named_and_kept() {
    let name = Name::new();
    let process = Process::ready("serve", &name, Wait::Park);
    let mut config = config(&name);
    config.takeover = Duration::from_millis(120);
    let start = Instant::now();
    let error = Server::create(&config, &ExitGuard::inert())
        .map(drop)
        .unwrap_err();
    assert!((120..5_000).contains(&start.elapsed().as_millis()));
    let RegionError::Owned { owner, .. } = error else {
        panic!("{error}")
    };
    let pid = process.pid().as_raw_nonzero().get().cast_unsigned();
    assert!(
        owner.is_none_or(|owner| owner == pid),
        "{owner:?} is not {pid}"
    );
    echo(&name, Wait::Park);
    process.signal(Signal::TERM);
    crate::common::eventually(Duration::from_secs(5), "the owner leaves", || {
        !name.exists()
    });
}

#[test]
fn an_owner_on_its_way_out_is_waited_for() {
    for signal in [Signal::TERM, Signal::KILL] {
        let name = Name::new();
        let mut process = Process::ready("serve", &name, Wait::Park);
        let mut config = config(&name);
        config.takeover = Duration::from_secs(10);
        thread::scope(|scope| {
            let create = scope.spawn(|| Server::create(&config, &ExitGuard::inert()).map(drop));
            thread::sleep(Duration::from_millis(100));
            assert!(!create.is_finished());
            process.signal(signal);
            process.ended(Duration::from_secs(5));
            create.join().unwrap().unwrap();
        });
    }
}

/// Drivers that start at the same moment, over a leftover or not: exactly one wins, and the name
/// leads to the winner.
#[test]
fn exactly_one_of_several_rivals_wins() {
    for round in 0..150 {
        let name = Name::new();
        if round % 2 == 0 {
            std::fs::write(name.path(), b"a leftover").unwrap();
        }
        let barrier = Barrier::new(4);
        let rivals: Vec<_> = thread::scope(|scope| {
            let rivals = [(); 4].map(|()| {
                scope.spawn(|| {
                    barrier.wait();
                    create(&name)
                })
            });
            rivals
                .into_iter()
                .map(|rival| rival.join().unwrap())
                .collect()
        });
        let refused = rivals
            .iter()
            .filter(|r| matches!(r, Err(RegionError::Owned { .. })))
            .count();
        assert_eq!(refused, 3, "round {round}");
        assert_eq!(
            name.path().metadata().unwrap().len(),
            64 + 4 * (64 + 4096 + 4096)
        );
    }
}

#[test]
fn a_server_does_not_remove_what_took_its_name() {
    let name = Name::new();
    let first = create(&name).unwrap();
    std::fs::remove_file(name.path()).unwrap();
    let second = create(&name).unwrap();
    drop(first);
    assert!(name.exists());
    second.unlink();
    assert!(!name.exists());
    let third = create(&name).unwrap();
    drop(second);
    assert!(name.exists());
    drop(third);
}

#[test]
fn a_link_under_the_name_is_not_followed() {
    let (name, target) = (Name::new(), Name::new());
    std::fs::write(target.path(), b"precious").unwrap();
    std::os::unix::fs::symlink(target.path(), name.path()).unwrap();
    let error = create(&name).map(drop).unwrap_err();
    assert!(matches!(error, RegionError::System { .. }), "{error}");
    assert_eq!(std::fs::read(target.path()).unwrap(), b"precious");
    std::fs::remove_file(name.path()).unwrap();
    std::fs::remove_file(target.path()).unwrap();
}

#[test]
fn a_full_file_system_is_a_clear_error() {
    let space = rustix::fs::statvfs("/dev/shm").unwrap();
    if space.f_blocks == 0 {
        return;
    }
    let slot = 3u64 << 30;
    let slots = space.f_blocks * space.f_frsize / slot + 1;
    let name = Name::new();
    let mut config = config(&name);
    config.layout = RegionLayout::new(slots as u32, 2 << 30, 1 << 30).unwrap();
    let error = Server::create(&config, &ExitGuard::inert())
        .map(drop)
        .unwrap_err();
    let needed = config.layout.total_bytes().to_string();
    assert!(matches!(error, RegionError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains(&needed), "{error}");
    assert!(!name.exists());
    let now = rustix::fs::statvfs("/dev/shm").unwrap();
    assert!(now.f_bavail * now.f_frsize + (1 << 30) > space.f_bavail * space.f_frsize);
}
