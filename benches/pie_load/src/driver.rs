//! The driver process: spawned as the Pie runtime does it, watched, stopped.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use pie_ring::{CallError, Client, ClientConfig};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tempfile::TempDir;

use crate::args::DriverArgs;
use crate::config;
use crate::error::LoadError;
use crate::handshake::{Capabilities, Handshake, lines, region};

const HANDSHAKE_FD: i32 = 3;
/// How long the runtime waits after SIGTERM.
const STOP: Duration = Duration::from_secs(5);
const LOG_LINES: usize = 25;
/// Groups of a Pie server on this host count from 0; these cannot meet them.
const FIRST_GROUP: u32 = 1 << 31;

/// A running driver. Dropped, it is stopped, whatever happened.
pub(crate) struct Driver {
    child: Arc<Mutex<Child>>,
    stopping: Arc<AtomicBool>,
    group: u32,
    log: PathBuf,
    trace: Option<PathBuf>,
    timeout: Duration,
    args: DriverArgs,
    _folder: TempDir,
}

/// How a driver left after SIGTERM.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Exit {
    pub(crate) status: String,
    pub(crate) seconds: f64,
    /// Whether its region was still there; it is removed then.
    pub(crate) region_left: bool,
}

impl Driver {
    /// Spawns the process. It must then be [waited for](Self::wait_ready).
    pub(crate) fn spawn(args: &DriverArgs) -> Result<(Self, io::PipeReader), LoadError> {
        let at = |action, path: &Path, source| LoadError::File {
            action,
            path: path.to_owned(),
            source,
        };
        let mut args = args.clone();
        args.model = fs::canonicalize(&args.model)
            .map_err(|source| at("cannot find the model", &args.model, source))?;
        let folder = tempfile::Builder::new()
            .prefix("pie_load.")
            .tempdir()
            .map_err(|source| at("cannot make a folder in", &env::temp_dir(), source))?;
        let in_folder = |name: &str| folder.path().join(name);
        let group = FIRST_GROUP + std::process::id();
        let trace = args.trace.then(|| in_folder("trace.json"));
        let log = args.log.clone().unwrap_or_else(|| in_folder("driver.log"));
        let toml = in_folder("driver.toml");
        let options = config::options(&args, trace.as_deref())?;
        fs::write(&toml, config::driver_toml(&args, group, options))
            .map_err(|source| at("cannot write", &toml, source))?;
        let file = File::create(&log).map_err(|source| at("cannot write", &log, source))?;
        let (pipe, child) =
            spawn(&args.python, &toml, file).map_err(|source| LoadError::Spawn {
                python: args.python.clone(),
                source,
            })?;
        let driver = Self {
            child: Arc::new(Mutex::new(child)),
            stopping: Arc::default(),
            group,
            log,
            trace,
            timeout: Duration::from_secs_f64(args.timeout_s),
            args,
            _folder: folder,
        };
        Ok((driver, pipe))
    }

    /// Reads the handshake.
    pub(crate) fn wait_ready(&self, pipe: io::PipeReader) -> Result<Capabilities, LoadError> {
        let after = Duration::from_secs_f64(self.args.ready_timeout_s);
        let (lines, started) = (lines(pipe), Instant::now());
        let mut handshake = Handshake::new(self.group);
        loop {
            let left = after.saturating_sub(started.elapsed());
            match lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(caps) = handshake.line(&line)? {
                        return Ok(caps);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let log = self.log_tail();
                    return Err(LoadError::NotReady { after, log });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.ended("before it was ready"));
                }
            }
        }
    }

    /// Opens the region. From now on the end of the process ends every call.
    pub(crate) fn connect(&self) -> Result<Arc<Client>, LoadError> {
        let config = ClientConfig {
            wait: self.args.profile.wait(),
            timeout: self.timeout,
        };
        let client = Client::open(&region(self.group), pie_wire::SCHEMA_HASH, config)?;
        let client = Arc::new(client);
        let (watched, child) = (Arc::clone(&client), Arc::clone(&self.child));
        let stopping = Arc::clone(&self.stopping);
        thread::spawn(move || {
            while !stopping.load(Ordering::Relaxed) {
                if !matches!(lock(&child).try_wait(), Ok(None)) {
                    return watched.abort();
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        Ok(client)
    }

    /// The trace's path, if the driver writes one.
    pub(crate) fn trace(&self) -> Option<&Path> {
        self.trace.as_deref()
    }

    /// What an error of a workload means, with the end of the driver's log.
    pub(crate) fn explain(&self, error: LoadError) -> LoadError {
        match error {
            LoadError::Call(CallError::Aborted) => self.ended("while it served"),
            LoadError::Call(CallError::TimedOut { after, .. }) => LoadError::Stuck {
                after,
                log: self.log_tail(),
            },
            LoadError::Answer(error) => LoadError::Refused {
                what: error.to_string(),
                log: self.log_tail(),
            },
            other => other,
        }
    }

    /// SIGTERM, five seconds, SIGKILL; then removes what is left of the region.
    pub(crate) fn stop(&self) -> Exit {
        self.stopping.store(true, Ordering::Relaxed);
        let started = Instant::now();
        let mut child = lock(&self.child);
        let status = wait(&mut child, Duration::ZERO).or_else(|| {
            // A failure means that the process is gone, which the wait then shows.
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
            wait(&mut child, STOP)
        });
        let status = status.map_or_else(
            || {
                let _ = child.kill();
                let _ = child.wait();
                format!("killed, because it was still there {STOP:?} after SIGTERM")
            },
            |status| status.to_string(),
        );
        Exit {
            status,
            seconds: started.elapsed().as_secs_f64(),
            region_left: rustix::shm::unlink(region(self.group)).is_ok(),
        }
    }

    fn ended(&self, when: &'static str) -> LoadError {
        // A process that has closed its pipe may need a moment to end.
        let status = wait(&mut lock(&self.child), STOP);
        let how = status.map_or_else(
            || "closed its pipe".to_owned(),
            |status| format!("ended ({status})"),
        );
        let log = self.log_tail();
        LoadError::Ended { how, when, log }
    }

    fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.stopping.load(Ordering::Relaxed) {
            self.stop();
        }
    }
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exit status, if the process ends in time.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if started.elapsed() >= limit {
            return None;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Starts the process with the write end of a pipe as descriptor 3 and returns the read end. The driver watches its
/// parent by itself, so nothing ties the two lives together here.
fn spawn(python: &Path, toml: &Path, log: File) -> io::Result<(io::PipeReader, Child)> {
    let (read, write) = io::pipe()?;
    let mut command = Command::new(python);
    command
        .args(["-m", "pie_driver_sglang", "--config"])
        .arg(toml)
        .args(["--handshake-fd", &HANDSHAKE_FD.to_string()])
        .env("PATH", search_path(python))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let mapping = FdMapping {
        parent_fd: write.into(),
        child_fd: HANDSHAKE_FD,
    };
    command
        .fd_mappings(vec![mapping])
        .map_err(io::Error::other)?;
    Ok((read, command.spawn()?))
}

/// `PATH` with the interpreter's folder in front.
fn search_path(python: &Path) -> OsString {
    let rest = env::var_os("PATH").unwrap_or_default();
    let first = python.parent().map(Path::to_owned).into_iter();
    let folders = first.chain(env::split_paths(&rest));
    env::join_paths(folders.filter(|folder| !folder.as_os_str().is_empty())).unwrap_or(rest)
}
