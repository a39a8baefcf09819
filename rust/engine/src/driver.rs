//! A driver: spawned as the Pie runtime does it, watched, stopped.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pie_ring::{CallError, Client};
use serde::Serialize;

use crate::error::EngineError;
use crate::group;
use crate::handshake::{Capabilities, Handshake, lines};
use crate::log::{Log, LogSink};
use crate::process::{Pipes, Process};
use crate::settings::DriverSettings;

/// How often a driver that serves is looked at.
const WATCH: Duration = Duration::from_millis(20);
/// How long the last lines of a log may take once the process is gone.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A driver process. Dropped, it is stopped, whatever happened.
///
/// ```no_run
/// use std::sync::Arc;
/// use pie_engine::{Driver, DriverSettings};
///
/// let settings = DriverSettings::new("python3", "models/qwen3");
/// let mut driver = Driver::spawn(settings, Arc::new(|line: &str| eprintln!("{line}")))?;
/// let caps = driver.wait_ready()?;
/// let client = driver.connect()?;
/// // Frames go to the client; pie_engine::Link makes them.
/// driver.stop();
/// # Ok::<(), pie_engine::EngineError>(())
/// ```
#[derive(Debug)]
pub struct Driver {
    settings: DriverSettings,
    process: Arc<Process>,
    group: u32,
    log: Log,
    start: Start,
    stopping: Arc<AtomicBool>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// What is left of a start.
#[derive(Debug)]
struct Start {
    lines: Receiver<String>,
    handshake: Handshake,
    begin: Instant,
}

/// How a driver left.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exit {
    /// The exit status in words, or that it had to be killed.
    pub status: String,
    /// From the request to the end.
    pub seconds: f64,
    /// Whether it left its region; it is removed then.
    pub region_left: bool,
}

impl Driver {
    /// Starts the process and returns at once; [`wait_ready`](Self::wait_ready) must follow. Every line of its log goes to
    /// `sink`.
    ///
    /// # Errors
    /// [`EngineError::Model`], [`EngineError::Random`], [`EngineError::Spawn`].
    pub fn spawn(mut settings: DriverSettings, sink: LogSink) -> Result<Self, EngineError> {
        settings.model =
            fs::canonicalize(&settings.model).map_err(|source| EngineError::Model {
                path: settings.model.clone(),
                source,
            })?;
        let group = group::unused_id()?;
        let python = &settings.python;
        let failed = |source| EngineError::Spawn {
            python: python.clone(),
            source,
        };
        let (process, Pipes { handshake, log }) =
            Process::spawn(&settings, &settings.to_toml(group)).map_err(failed)?;
        let process = Arc::new(process);
        let readers = || -> io::Result<_> { Ok((Log::read(log, sink)?, lines(handshake)?)) };
        let (log, lines) = readers().map_err(|error| {
            process.kill();
            failed(error)
        })?;
        let start = Start {
            lines,
            handshake: Handshake::new(group),
            begin: Instant::now(),
        };
        Ok(Self {
            settings,
            process,
            group,
            log,
            start,
            stopping: Arc::default(),
            watch: Mutex::new(None),
        })
    }

    /// Reads the handshake to its end.
    ///
    /// # Errors
    /// [`EngineError::NotReady`], [`EngineError::Ended`], [`EngineError::Handshake`].
    pub fn wait_ready(&mut self) -> Result<Capabilities, EngineError> {
        loop {
            if let Some(caps) = self.poll_ready(Duration::from_secs(1))? {
                return Ok(caps);
            }
        }
    }

    /// As [`wait_ready`](Self::wait_ready), but `None` when `wait` is over.
    ///
    /// # Errors
    /// Those of [`wait_ready`](Self::wait_ready).
    pub fn poll_ready(&mut self, wait: Duration) -> Result<Option<Capabilities>, EngineError> {
        let after = self.settings.ready_timeout;
        let until = Instant::now() + wait;
        loop {
            let left = after.saturating_sub(self.start.begin.elapsed());
            let now = until.saturating_duration_since(Instant::now());
            match self.start.lines.recv_timeout(left.min(now)) {
                Ok(line) => {
                    let caps = self.start.handshake.line(&line)?;
                    if caps.is_some() {
                        return Ok(caps);
                    }
                }
                Err(RecvTimeoutError::Timeout) if self.start.begin.elapsed() >= after => {
                    let log = self.log.tail(Duration::ZERO);
                    return Err(EngineError::NotReady { after, log });
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.ended("before it was ready"));
                }
            }
        }
    }

    /// Opens the region. From now on the end of the process ends every call of the client, by [`CallError::Aborted`].
    ///
    /// # Errors
    /// [`EngineError::Call`] if there is no usable region.
    pub fn connect(&self) -> Result<Arc<Client>, EngineError> {
        let client = Client::open(
            &group::region(self.group),
            pie_wire::SCHEMA_HASH,
            self.settings.client(),
        )?;
        let client = Arc::new(client);
        let watched = Arc::clone(&client);
        let (process, stopping) = (Arc::clone(&self.process), Arc::clone(&self.stopping));
        let watch = thread::Builder::new().name("pie-driver-watch".to_owned());
        let watch = watch.spawn(move || {
            while !stopping.load(Ordering::Relaxed) {
                if process.end().is_some() {
                    return watched.abort();
                }
                thread::sleep(WATCH);
            }
        });
        let watch = watch.map_err(|source| EngineError::Spawn {
            python: self.settings.python.clone(),
            source,
        })?;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(client)
    }

    /// The driver's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Whether its process has not ended.
    pub fn is_running(&self) -> bool {
        self.process.end().is_none()
    }

    /// What an error of a call means: whether the driver has ended or is stuck, with the end of its log.
    #[must_use]
    pub fn explain(&self, error: EngineError) -> EngineError {
        match error {
            EngineError::Call(CallError::Aborted) => self.ended("while it served"),
            EngineError::Call(CallError::TimedOut { after, .. }) => EngineError::Stuck {
                after,
                log: self.log.tail(Duration::ZERO),
            },
            EngineError::Reply(error) => EngineError::Refused {
                what: error.to_string(),
                log: self.log.tail(Duration::ZERO),
            },
            other => other,
        }
    }

    /// SIGTERM; after [`stop_timeout`](DriverSettings::stop_timeout) SIGKILL. Then removes what is left of the region.
    pub fn stop(&self) -> Exit {
        self.leave(|process, limit| {
            process.terminate();
            process.wait(limit).unwrap_or_else(|| {
                process.kill();
                format!("killed, because it was still there {limit:?} after SIGTERM")
            })
        })
    }

    /// SIGKILL, without a warning: for a driver that is stuck.
    pub fn kill(&self) -> Exit {
        self.leave(|process, _| {
            process.kill();
            "killed".to_owned()
        })
    }

    fn leave(&self, end: impl FnOnce(&Process, Duration) -> String) -> Exit {
        self.stopping.store(true, Ordering::Relaxed);
        let started = Instant::now();
        let ended = self.process.end();
        let status = ended.unwrap_or_else(|| end(&self.process, self.settings.stop_timeout));
        self.process.wait_group();
        let seconds = started.elapsed().as_secs_f64();
        self.log.wait(LAST_LINES);
        let watch = self
            .watch
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(watch) = watch {
            // It only fails by a panic, and does nothing that panics.
            let _ = watch.join();
        }
        Exit {
            status,
            seconds,
            region_left: pie_ring::remove_stale_region(&group::region(self.group)).unwrap_or(false),
        }
    }

    fn ended(&self, when: &'static str) -> EngineError {
        // A process that has closed its pipe may need a moment to end.
        let status = self.process.wait(self.settings.stop_timeout);
        let how = status.map_or_else(
            || "closed its pipe".to_owned(),
            |status| format!("ended ({status})"),
        );
        let log = self.log.tail(LAST_LINES);
        EngineError::Ended { how, when, log }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.stopping.load(Ordering::Relaxed) {
            self.stop();
        }
    }
}
