//! A leader, and workers that do the same.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use pie_driver::launch::LaunchError;
use pie_driver::{GraphPath, Leader, Memory, Worker, WorkerError};
use pie_planner::{Layout, StepMemory};
use pie_ring::{Broadcast, Wait};

use crate::devices::{Answer, Device, Host, ROWS, Shared, converse, frame, responder};

/// A graph that was launched, and the block at that time.
type Launched = (usize, Vec<u8>);

/// What a rank's device was launched with.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Launched>>>);

impl Log {
    fn graphs(&self) -> Vec<usize> {
        let log = self.0.lock().unwrap();
        log.iter().map(|(graph, _)| *graph).collect()
    }
}

/// Memory that notes what is in it when results are looked for, which is right after a launch.
struct Noting(Host, Log);

impl Memory for Noting {
    fn step(&mut self) -> StepMemory<'_> {
        self.0.step()
    }

    fn results(&self) -> &[AtomicU64] {
        let mut log = self.1.0.lock().unwrap();
        if let Some((graph, block)) = log.last_mut()
            && block.is_empty()
        {
            *block = self.0.staged(Layout::graph(ROWS[*graph]).bytes()).to_vec();
        }
        self.0.results()
    }

    fn logprobs(&self) -> &[AtomicU32] {
        self.0.logprobs()
    }
}

/// A graph path that remembers what it launched, and answers step after step; unless its device ends with an error.
fn recording(ended: Result<bool, LaunchError>) -> (GraphPath, Log) {
    let (shared, log) = (Shared::default(), Log::default());
    let (device, launched) = (shared.clone(), log.clone());
    let (fails, mut step) = (ended.is_err(), 0);
    let launch = move |graph: usize| {
        step += 1;
        launched.0.lock().unwrap().push((graph, Vec::new()));
        if !fails {
            (0..ROWS[graph]).for_each(|row| device.put(row, step, 10 * row as u64));
        }
        Ok(())
    };
    let memory = Box::new(Noting(Host::new(&shared), log.clone()));
    let device = Box::new(Device(launch, move || ended.clone()));
    (
        GraphPath::new(device, memory, &ROWS.map(Into::into), 4, Wait::Park),
        log,
    )
}

fn inherited(lead: &Leader) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", lead.fd());
    let file = File::options().read(true).write(true).open(path);
    file.unwrap().into()
}

/// A worker in a thread: its commands and their blocks, until it fails or receives `end`.
struct Follower {
    commands: Receiver<(Vec<u8>, Vec<u8>)>,
    thread: JoinHandle<Option<WorkerError>>,
}

fn follower(lead: &Leader, index: usize, graph_path: Option<GraphPath>) -> Follower {
    let mut follow = Worker::open(inherited(lead), index, graph_path, Wait::Park).unwrap();
    let (told, commands) = mpsc::channel();
    let thread = thread::spawn(move || {
        let mut block = vec![0; 64];
        loop {
            match follow.next(&mut block) {
                Ok(command) if command == b"end" => return None,
                Ok(command) => told.send((command, block.clone())).unwrap(),
                Err(error) => return Some(error),
            }
        }
    });
    Follower { commands, thread }
}

#[test]
fn every_rank_launches_what_the_leader_launches() {
    let lead = Leader::new(2).unwrap();
    let (ours, seen) = recording(Ok(false));
    let others: Vec<_> = (0..2)
        .map(|index| {
            let (graph_path, seen) = recording(Ok(false));
            (follower(&lead, index, Some(graph_path)), seen)
        })
        .collect();
    let responder = responder(ours.with_leader(lead.clone()));
    let frames = [frame(&[1, 1]), frame(&[2, 1]), frame(&[1]), frame(&[1; 6])];
    let (answers, told) = converse(&responder, &frames);
    assert!(told.is_empty(), "{told:?}");
    let rows = |answer: &Answer| answer.as_ref().unwrap().len();
    assert_eq!(answers.iter().map(rows).collect::<Vec<_>>(), [2, 2, 1, 6]);
    lead.command(&[b"end"]).unwrap();
    assert_eq!(seen.graphs(), [1, 2, 0, 2]);
    for (other, launched) in others {
        assert!(other.thread.join().unwrap().is_none());
        assert_eq!(*launched.0.lock().unwrap(), *seen.0.lock().unwrap());
    }
}

#[test]
fn commands_and_blocks_come_in_their_order() {
    let lead = Leader::new(1).unwrap();
    let other = follower(&lead, 0, None);
    let long = vec![5; 1 << 20];
    lead.block(&[1; 64]).unwrap();
    lead.command(&[b"fi", b"rst"]).unwrap();
    lead.block(&[2; 10]).unwrap();
    lead.command(&[]).unwrap();
    lead.command(&[&long]).unwrap();
    lead.command(&[b"end"]).unwrap();
    let half = [vec![2; 10], vec![1; 54]].concat();
    let expected = [
        (b"first".to_vec(), vec![1; 64]),
        (vec![], half.clone()),
        (long, half),
    ];
    assert!(other.commands.iter().eq(expected));
    assert!(other.thread.join().unwrap().is_none());
}

#[test]
fn a_step_that_fails_on_the_leader_is_the_end() {
    let lead = Leader::new(1).unwrap();
    let dead = LaunchError::Failed("dead".into());
    let (ours, _) = recording(Err(dead));
    let (theirs, _) = recording(Ok(false));
    let other = follower(&lead, 0, Some(theirs));
    let responder = responder(ours.with_leader(lead.clone()));
    let (answers, told) = converse(&responder, &[frame(&[1, 1])]);
    assert_eq!(answers, [None]);
    assert!(
        matches!(&told[..], [text] if text.starts_with("lost: ") && text.contains("dead")),
        "{told:?}"
    );
    lead.command(&[b"end"]).unwrap();
    assert!(other.thread.join().unwrap().is_none());
}

#[test]
fn a_step_that_fails_on_a_follower_ends_it() {
    let lead = Leader::new(1).unwrap();
    let (ours, _) = recording(Ok(false));
    let (theirs, _) = recording(Err(LaunchError::Failed("dead".into())));
    let other = follower(&lead, 0, Some(theirs));
    converse(&responder(ours.with_leader(lead)), &[frame(&[1, 1])]);
    let error = other.thread.join().unwrap().unwrap();
    assert!(matches!(error, WorkerError::GraphPath(_)), "{error}");
    assert!(error.to_string().contains("2 rows"), "{error}");
}

/// A step's message: its head, and so many zero bytes.
fn step(head: [u32; 5], rest: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = head.into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.resize(bytes.len() + rest, 0);
    bytes
}

/// Numbers of steps have 32 bits, which some weeks use up. A slot that was not used since the start has a word of an equal number.
#[test]
fn results_of_before_the_numbers_began_again_are_not_taken_for_new_ones() {
    let shared = Shared::default();
    let device = shared.clone();
    let mut written = [(1, 2), (-1, 1), (1, 1)].into_iter();
    let launch = move |_: usize| {
        let (step, rows) = written.next().unwrap();
        (0..rows).for_each(|row| device.put(row, step, 7));
        Ok(())
    };
    let memory = Box::new(Host::new(&shared));
    let device = Box::new(Device(launch, || Ok(true)));
    let graph_path = GraphPath::new(device, memory, &ROWS.map(Into::into), 4, Wait::Park);
    let mut leader = Broadcast::create(1).unwrap();
    let fd = leader.fd().try_clone_to_owned().unwrap();
    let mut follow = Worker::open(fd, 0, Some(graph_path), Wait::Park).unwrap();
    let block = Layout::graph(ROWS[1]).bytes();
    for (number, rows) in [(1, 2), (u32::MAX, 1), (1, 2)] {
        leader
            .send(2, &[&step([1, rows, rows, number, 0], block)])
            .unwrap();
    }
    leader.send(0, &[b"end"]).unwrap();
    let error = follow.next(&mut [0; 64]).unwrap_err();
    assert!(error.to_string().contains("slot 1"), "{error}");
}

#[test]
fn a_follower_refuses_what_it_is_not_made_for() {
    let fitting = Layout::graph(ROWS[1]).bytes();
    let cases = [
        (9, vec![], "kind 9"),
        (1, vec![0; 65], "65 bytes of a block of 64"),
        (2, vec![0; 19], "a step of 19 bytes"),
        (2, step([1, 2, 2, 1, u32::MAX], fitting), "a step of"),
        (2, step([3, 2, 2, 1, 0], fitting), "graph: 3"),
        (2, step([1, 0, 1, 1, 0], fitting), "rows: 0"),
        (2, step([1, 3, 2, 1, 0], fitting), "rows: 3"),
        (2, step([1, 2, 0, 1, 0], fitting), "results: 0"),
        (2, step([1, 2, 3, 1, 0], fitting), "results: 3"),
        (2, step([1, 2, 2, 1, 0], fitting - 8), "graph: 1"),
    ];
    for (kind, message, expected) in cases {
        let mut leader = Broadcast::create(1).unwrap();
        let fd = leader.fd().try_clone_to_owned().unwrap();
        let (graph_path, seen) = recording(Ok(false));
        let mut follow = Worker::open(fd, 0, Some(graph_path), Wait::Spin).unwrap();
        leader.send(kind, &[&message]).unwrap();
        let error = follow.next(&mut [0; 64]).unwrap_err();
        assert!(matches!(error, WorkerError::Message { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(seen.graphs().is_empty());
    }
}

#[test]
fn a_rank_without_a_graph_path_refuses_steps() {
    let lead = Leader::new(1).unwrap();
    let (ours, _) = recording(Ok(false));
    let other = follower(&lead, 0, None);
    converse(&responder(ours.with_leader(lead)), &[frame(&[1])]);
    let error = other.thread.join().unwrap().unwrap();
    assert!(
        error.to_string().contains("a step of the graph path"),
        "{error}"
    );
}
