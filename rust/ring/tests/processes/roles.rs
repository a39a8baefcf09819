//! What a started process does, and how a test starts, watches and ends it.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use pie_ring::{ExitGuard, Server, Wait};
use rustix::process::{Pid, Signal};

use crate::broadcast;
use crate::common::{self, config, open, serve};

const ROLE: &str = "PIE_RING_TEST_ROLE";
const NAME: &str = "PIE_RING_TEST_NAME";
const BUDGET: &str = "PIE_RING_TEST_BUDGET";

/// Entry of a started process; does nothing in the test run itself.
#[test]
fn role() {
    let Ok(role) = env::var(ROLE) else { return };
    let name = env::var(NAME).unwrap_or_default();
    let budget = env::var(BUDGET)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    let wait = Wait::from_spin_budget_us(budget);
    match role.as_str() {
        "load" => load(),
        "serve" => serve_forever(&name, wait, || ()),
        "stuck" => get_stuck(&name, wait),
        "own" => own(&name, || ()),
        "burn" => serve_forever(&name, wait, burn),
        "exec" => own(&name, start_sleeper),
        "takeover" => take_over(&name),
        "call" => call(&name),
        "parent" => parent(&name),
        "fork" => fork(&name),
        "listen" => broadcast::listen(&name, wait),
        "hold" => broadcast::hold(&name, wait),
        other => panic!("unknown role {other}"),
    }
}

/// Tells the test something. The leading newline separates it from the harness's own output.
pub(crate) fn tell(message: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@{message}").unwrap();
    out.flush().unwrap();
}

/// Loading a model: the guard exists, the region does not.
fn load() {
    let _guard = ExitGuard::install().unwrap();
    tell("ready");
    thread::sleep(Duration::from_secs(20));
}

fn serve_forever(name: &str, wait: Wait, extra: fn()) {
    let guard = ExitGuard::install().unwrap();
    let mut server = Server::create(&config(name), &guard).unwrap();
    extra();
    tell("ready");
    serve(&mut server, wait).unwrap();
}

/// Takes a request and never answers it.
fn get_stuck(name: &str, wait: Wait) {
    let guard = ExitGuard::install().unwrap();
    let mut server = Server::create(&config(name), &guard).unwrap();
    tell("ready");
    let _lease = server.wait(wait).unwrap();
    thread::sleep(Duration::from_secs(20));
}

/// An owner without a guard: nothing removes what it leaves.
fn own(name: &str, extra: fn()) {
    let _server = Server::create(&config(name), &ExitGuard::inert()).unwrap();
    extra();
    tell("ready");
    thread::sleep(Duration::from_secs(20));
}

fn burn() {
    for _ in 0..3 {
        thread::spawn(|| while !std::hint::black_box(false) {});
    }
}

/// A program that outlives its parent's death by a while.
#[expect(clippy::zombie_processes, reason = "the test ends it")]
fn start_sleeper() {
    let sleeper = Command::new("sleep")
        .arg("20")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    tell(&format!("pid {}", sleeper.id()));
}

/// Waits long for a region that has a live owner.
fn take_over(name: &str) {
    let guard = ExitGuard::install().unwrap();
    let mut config = config(name);
    config.takeover = Duration::from_secs(20);
    tell("ready");
    let _server = Server::create(&config, &guard);
    tell("done");
}

fn call(name: &str) {
    let client = open(name, Wait::Park, Duration::from_secs(20));
    let _ = client.call(b"from a doomed client", |_| ());
}

/// Stands between the test and a server.
#[expect(
    clippy::zombie_processes,
    reason = "this process is killed before its child"
)]
fn parent(name: &str) {
    let child = command("serve", name, Wait::Park)
        .stdout(Stdio::inherit())
        .spawn()
        .unwrap();
    tell(&format!("pid {}", child.id()));
    thread::sleep(Duration::from_secs(20));
}

/// A forked child drops everything it inherited and is terminated: none of the parent's business.
#[expect(
    unsafe_code,
    reason = "fork without exec, as Python's multiprocessing does it"
)]
fn fork(name: &str) {
    let guard = ExitGuard::install().unwrap();
    let mut server = Server::create(&config(name), &guard).unwrap();
    let client = open(name, Wait::Park, Duration::from_secs(5));
    thread::scope(|scope| {
        let call = scope.spawn(|| client.call(b"x", <[u8]>::to_vec).unwrap());
        let lease = server.wait(Wait::Park).unwrap().unwrap();
        // SAFETY: the child only frees memory, makes system calls and ends by a signal.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop((lease, server, guard));
            // SAFETY: no preconditions; _exit is the way out if the signal does not end the child.
            unsafe {
                libc::raise(libc::SIGTERM);
                libc::_exit(1);
            }
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(ExitStatus::from_raw(status).signal(), Some(libc::SIGTERM));
        assert!(std::path::Path::new(&format!("/dev/shm{name}")).exists());
        let _ = lease.reply(b"answered by the parent").unwrap();
        assert_eq!(call.join().unwrap(), b"answered by the parent");
        tell("ready");
        serve(&mut server, Wait::Park).unwrap();
    });
}

fn command(role: &str, name: &str, wait: Wait) -> Command {
    let budget = match wait {
        Wait::Spin => u64::MAX,
        Wait::SpinThenPark(budget) => budget.as_micros() as u64,
        Wait::Park => 0,
    };
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["roles::role", "--exact", "--nocapture"]);
    command
        .env(ROLE, role)
        .env(NAME, name)
        .env(BUDGET, budget.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A started process, killed when dropped.
pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(role: &str, name: &str, wait: Wait) -> Self {
        Self::spawn(&mut command(role, name, wait))
    }

    /// Starts a process whose standard input is `file`.
    pub(crate) fn inheriting(role: &str, name: &str, wait: Wait, file: OwnedFd) -> Self {
        Self::spawn(command(role, name, wait).stdin(file))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Starts a process and waits until it is ready.
    pub(crate) fn ready(role: &str, name: &str, wait: Wait) -> Self {
        let mut process = Self::start(role, name, wait);
        assert_eq!(process.told(), "ready");
        process
    }

    /// The next thing the process tells.
    pub(crate) fn told(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "the process ended silently"
            );
            if let Some(message) = line.trim_end().strip_prefix('@') {
                return message.to_owned();
            }
        }
    }

    /// The next thing the process tells must be a pid.
    pub(crate) fn told_pid(&mut self) -> Pid {
        let message = self.told();
        parse_pid(&message).expect(&message)
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until the process has ended.
    pub(crate) fn ended(&mut self, limit: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                start.elapsed() < limit,
                "the process still runs after {limit:?}"
            );
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The pid in a message of the form `pid 4711`.
pub(crate) fn parse_pid(message: &str) -> Option<Pid> {
    Pid::from_raw(message.strip_prefix("pid ")?.parse().ok()?)
}

/// Whether a process that is no child of ours has ended.
pub(crate) fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    })
}

/// A call that must be answered by the answering server.
pub(crate) fn echo(name: &str, wait: Wait) {
    let client = open(name, wait, Duration::from_secs(5));
    for round in 0..100u32 {
        let request = round.to_le_bytes();
        assert_eq!(
            client.call(&request, <[u8]>::to_vec).unwrap(),
            common::answer(&request)
        );
    }
}
