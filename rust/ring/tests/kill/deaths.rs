//! Client or server dies after each single step of a send or of an answer. The other side must not
//! hang, must see whole messages only, and must continue.
//!
//! The child is executed instruction by instruction. All that its peer and its successor can see of
//! it is the region and the effect of its system calls, so it is killed after each instruction that
//! changed the region and after each system call.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pie_ring::{CallError, Client, Lease, LeaseError, Publish, Server, Wait};

use crate::common::{ABORT, Name, Running, answer, create, eventually, open, request};
use crate::tracee::{Next, Tracee, alone, stop};

const LIMIT: Duration = Duration::from_secs(10);
/// The request of the peer that dies, or its client's.
const LAST_WORDS: &[u8; 40] = b"a request to be seen as a whole, or not.";
/// Of the peer that dies. All others sleep.
const STRATEGIES: [Wait; 2] = [Wait::Spin, Wait::Park];

/// Whether an instruction was a system call or has changed the region.
fn watch(region: &File) -> impl FnMut(Next) -> bool {
    let read = || {
        let mut bytes = vec![0; region.metadata().unwrap().len() as usize];
        region.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let mut before = read();
    move |done| {
        let now = read();
        let changed = std::mem::replace(&mut before, now) != before;
        changed || done.is_call()
    }
}

/// Calls in every slot, twice. The first slot comes last.
fn assert_served(client: &Client) {
    for byte in 0..8 {
        let request = [byte, 0, 0, 0, 1];
        assert_eq!(
            client.call(&request, <[u8]>::to_vec).unwrap(),
            answer(&request)
        );
    }
}

/// Answers until stopped, and takes note of the last words.
fn serve(server: &mut Server, heard: &AtomicBool) {
    let mut words = Vec::new();
    while let Some(lease) = server.wait(Wait::Park).unwrap() {
        let request = lease.copy_request(&mut words).unwrap();
        if request == LAST_WORDS {
            heard.store(true, Ordering::Relaxed);
        } else {
            assert!(matches!(request, [0..8, 0, 0, 0, 1]), "torn: {request:?}");
        }
        let response = answer(request);
        let _ = lease.reply(&response).unwrap();
    }
}

/// False up to some step, true after it.
fn assert_one_step(seen: &[bool]) {
    assert!(seen.is_sorted(), "{seen:?}");
    assert!(!seen[0] && seen[seen.len() - 1], "of {}", seen.len());
}

#[test]
fn a_client_may_die_after_any_step_of_a_send() {
    let _alone = alone();
    for wait in STRATEGIES {
        let (name, heard) = (Name::new(), Arc::new(AtomicBool::new(false)));
        let hears = Arc::clone(&heard);
        let running = Running::start_with(create(&name).unwrap(), move |server| {
            serve(server, &hears);
        });
        let region = File::open(name.path()).unwrap();
        let (doomed, survivor) = (open(&name, wait, LIMIT), open(&name, Wait::Park, LIMIT));
        survivor.call(&[0, 0, 0, 0, 1], |_| ()).unwrap();
        let mut seen = Vec::new();
        for steps in 0.. {
            let mut child = Tracee::fork(|| {
                stop();
                let _ = doomed.call(LAST_WORDS, |_| ());
            });
            let ends = child.step(steps, watch(&region), Next::waits_or_exits);
            child.kill();
            assert_served(&survivor);
            seen.push(heard.swap(false, Ordering::Relaxed));
            if ends {
                break;
            }
        }
        drop(running);
        assert_one_step(&seen);
    }
}

/// How a server answers.
type Answer = fn(Lease) -> Result<Publish, LeaseError>;

#[test]
fn a_server_may_die_after_any_step_of_an_answer() {
    let _alone = alone();
    let replies: Answer = |lease| {
        let response = answer(&request(&lease));
        lease.reply(&response)
    };
    let aborts: Answer = |lease| {
        drop(lease);
        Ok(Publish::Delivered)
    };
    for wait in STRATEGIES {
        for (how, expected) in [(replies, answer(LAST_WORDS)), (aborts, ABORT.to_vec())] {
            let name = Name::new();
            let mut seen = Vec::new();
            for steps in 0.. {
                let (ends, answered) = die_answering(&name, wait, how, steps, &expected);
                assert_restarts(&name);
                seen.push(answered);
                if ends {
                    break;
                }
            }
            assert_one_step(&seen);
        }
    }
}

/// A server is killed so many steps after it was ready to answer. Whether it had no more to
/// do, and whether the client got the expected answer.
fn die_answering(
    name: &Name,
    wait: Wait,
    how: Answer,
    steps: usize,
    expected: &[u8],
) -> (bool, bool) {
    let mut child = Tracee::fork(|| {
        let mut server = create(name).unwrap();
        stop();
        let lease = server.wait(wait).unwrap().unwrap();
        assert_eq!(request(&lease), LAST_WORDS);
        assert_eq!(how(lease).unwrap(), Publish::Delivered);
        std::mem::forget(server);
    });
    let client = open(name, Wait::Park, LIMIT);
    let region = File::open(name.path()).unwrap();
    let word = |offset: u64| {
        let mut bytes = [0; 8];
        region.read_exact_at(&mut bytes, 64 + offset).unwrap();
        u64::from_le_bytes(bytes)
    };
    thread::scope(|scope| {
        let call = scope.spawn(|| client.call(LAST_WORDS, <[u8]>::to_vec));
        eventually(LIMIT, "the request is sent", || word(0) == 1);
        let ends = child.step(steps, watch(&region), Next::exits);
        child.kill();
        let answered = word(8) == 1;
        // Instead of its time-out. An answer goes first.
        client.abort();
        match call.join().unwrap() {
            Ok(response) => assert!(answered && response == expected, "{response:?}"),
            Err(error) => assert!(!answered && matches!(error, CallError::Aborted), "{error}"),
        }
        (ends, answered)
    })
}

/// The next server takes the dead one's place at once, and leaves nothing.
fn assert_restarts(name: &Name) {
    assert!(name.exists());
    let running = Running::start(create(name).unwrap(), Wait::Park);
    assert_served(&open(name, Wait::Park, LIMIT));
    drop(running);
    assert!(!name.exists());
}

#[test]
fn the_client_of_a_dead_server_times_out() {
    let _alone = alone();
    for wait in STRATEGIES {
        let name = Name::new();
        Tracee::fork(|| {
            let _server = create(&name).unwrap();
            stop();
        })
        .kill();
        let client = open(&name, wait, Duration::from_millis(50));
        let error = client.call(LAST_WORDS, |_| ()).unwrap_err();
        assert!(matches!(error, CallError::TimedOut { .. }), "{error}");
        assert_restarts(&name);
    }
}
