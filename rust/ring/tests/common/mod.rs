//! Names that no other test uses, and an answering server.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pie_ring::{
    Client, ClientConfig, ExitGuard, Lease, RegionError, RegionLayout, RingError, Server,
    ServerConfig, Stop, Wait,
};

pub(crate) const HASH: [u8; 8] = *b"testhash";
pub(crate) const ABORT: &[u8] = b"the abort reply";
pub(crate) const STRATEGIES: [Wait; 3] = [
    Wait::Spin,
    Wait::SpinThenPark(Duration::from_micros(200)),
    Wait::Park,
];

/// A region name of one test. The test must leave nothing under it.
pub(crate) struct Name(String);

impl Name {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(format!("/pie_ring_test_{}_{number}", std::process::id()))
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm{}", self.0))
    }

    pub(crate) fn exists(&self) -> bool {
        self.path().exists()
    }
}

impl std::ops::Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let left = std::fs::remove_file(self.path()).is_ok();
        assert!(!left || thread::panicking(), "{self} was left over");
    }
}

pub(crate) fn config(name: &str) -> ServerConfig {
    let mut config = ServerConfig::new(name, HASH, ABORT.to_vec());
    config.layout = RegionLayout::new(4, 4096, 4096).unwrap();
    config.takeover = Duration::ZERO;
    config
}

pub(crate) fn create(name: &str) -> Result<Server, RegionError> {
    Server::create(&config(name), &ExitGuard::inert())
}

pub(crate) fn open(name: &str, wait: Wait, timeout: Duration) -> Client {
    Client::open(name, HASH, ClientConfig { wait, timeout }).unwrap()
}

/// What the answering server makes of a request.
pub(crate) fn answer(request: &[u8]) -> Vec<u8> {
    request.iter().rev().copied().collect()
}

/// How many requests were sent, in all slots.
pub(crate) fn requests_sent(name: &Name) -> u64 {
    let region = File::open(name.path()).unwrap();
    let header = |offset: u64| {
        let mut word = [0; 4];
        region.read_exact_at(&mut word, offset).unwrap();
        u64::from(u32::from_le_bytes(word))
    };
    let (slots, stride) = (header(8), header(12));
    let sent = |slot: u64| {
        let mut req_seq = [0; 8];
        region
            .read_exact_at(&mut req_seq, 64 + slot * stride)
            .unwrap();
        u64::from_le_bytes(req_seq)
    };
    (0..slots).map(sent).sum()
}

/// A copy of the request.
pub(crate) fn request(lease: &Lease) -> Vec<u8> {
    lease.copy_request(&mut Vec::new()).unwrap().to_vec()
}

/// Answers until stopped.
pub(crate) fn serve(server: &mut Server, wait: Wait) -> Result<(), RingError> {
    let mut words = Vec::new();
    while let Some(lease) = server.wait(wait)? {
        let response = answer(lease.copy_request(&mut words)?);
        let _ = lease.reply(&response)?;
    }
    Ok(())
}

/// A server on a thread of its own, stopped when dropped.
pub(crate) struct Running {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(server: Server, wait: Wait) -> Self {
        Self::start_with(server, move |server| serve(server, wait).unwrap())
    }

    pub(crate) fn start_with(
        mut server: Server,
        serve: impl FnOnce(&mut Server) + Send + 'static,
    ) -> Self {
        let stop = server.stop_handle();
        let thread = Some(thread::spawn(move || serve(&mut server)));
        Self { stop, thread }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop();
        let result = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || result.is_none_or(|result| result.is_ok()));
    }
}

/// Waits until the condition holds.
pub(crate) fn eventually(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(Duration::from_millis(2));
    }
}
