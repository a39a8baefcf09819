//! The exit guard: on SIGTERM, or when the parent dies, a dedicated thread removes every region and ends the process, however
//! busy the other threads are. After SIGKILL the reaper process does it.
//!
//! The thread needs nothing from the rest of the process but the list of regions, whose lock is only
//! ever held for a few system calls. A region is made and listed under that lock, so none can exist
//! unlisted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::{GuardError, SystemError};
use crate::named_file::{FileId, NamedFile, RegionName};
use crate::reaper::Reaper;
use crate::shared::Shared;
use crate::signal::{self, TerminateSignal};
use crate::stderr;

/// Interval between two checks of the parent.
const PARENT_CHECK: Duration = Duration::from_millis(100);
const TERMINATED: &str = "stopped by SIGTERM";
const ORPHANED: &str = "the runtime that started this driver has ended";

/// The regions and rings of this process.
#[derive(Debug, Default)]
pub(crate) struct RegionRegistry {
    regions: Mutex<Vec<NamedFile>>,
    /// Live servers, whose clients wait for responses.
    rings: Mutex<Vec<Weak<Shared>>>,
    reaper: Option<Reaper>,
    /// Format of the last log line.
    last_line: Mutex<Option<String>>,
}

impl RegionRegistry {
    /// The list, which no panic can leave in a bad state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<NamedFile>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last_line(&self) -> MutexGuard<'_, Option<String>> {
        self.last_line
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies the reaper that a region of this name is about to be created, or that it is the file `id`.
    pub(crate) fn notify_reaper(&self, name: &RegionName, id: Option<FileId>) {
        if let Some(reaper) = &self.reaper {
            reaper.notify(name, id);
        }
    }

    /// Adds a server, whose open requests are refused when the process ends.
    pub(crate) fn serve(&self, ring: &Arc<Shared>) {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| ring.strong_count() > 0);
        rings.push(Arc::downgrade(ring));
    }

    fn refuse_requests(&self) {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        for ring in rings.iter().filter_map(Weak::upgrade) {
            ring.refuse_all();
        }
    }

    /// Removes a region from the list; its name stays.
    pub(crate) fn forget(&self, region: &NamedFile) {
        self.lock().retain(|listed| listed != region);
    }

    /// Removes a listed region's name, and the region from the list, as one step.
    pub(crate) fn remove(&self, region: &NamedFile) {
        let mut regions = self.lock();
        if let Some(index) = regions.iter().position(|listed| listed == region) {
            // Best effort: the next owner replaces a region that stays.
            let _ = region.remove();
            regions.swap_remove(index);
        }
    }
}

/// Ends the process cleanly on SIGTERM and on its parent's death, with exit status 0. Requests that are
/// open then are answered with zero bytes, so that their clients do not wait. The regions of a
/// process that is killed are removed by another process, if one can be forked off; it ends after
/// this one.
///
/// Install it first thing, before anything is loaded: from then on SIGTERM works at once. At most one
/// can be installed in a process. Programs that this process starts are not affected, and a forked
/// child neither removes its parent's regions nor is protected itself.
///
/// A library that sets its own SIGTERM handler later takes the signal away from the guard; the watch
/// of the parent stays. Dropping the guard restores the former handler.
#[derive(Debug)]
pub struct ExitGuard {
    registry: Arc<RegionRegistry>,
    _watch: Option<Watch>,
}

#[derive(Debug)]
struct Watch {
    thread: Option<JoinHandle<()>>,
    pid: u32,
    /// Restored on drop, after the thread has ended.
    _signal: TerminateSignal,
}

impl ExitGuard {
    /// Handles SIGTERM and watches the parent from now on.
    ///
    /// # Errors
    /// [`GuardError::Active`] if the process has a guard; [`GuardError::System`] if the handler
    /// cannot be set or the thread cannot be started.
    pub fn install() -> Result<Self, GuardError> {
        Self::install_as(None)
    }

    /// As [`Self::install`], with a line on stderr that says why the process ends, as a log line of `name`; see [`Self::set_last_line`].
    /// Where stderr does not accept it at once, it is lost.
    ///
    /// # Errors
    /// Those of [`Self::install`].
    pub fn install_named(name: &str) -> Result<Self, GuardError> {
        Self::install_as(Some(format!("{{time}} INFO {name}: {{text}}")))
    }

    fn install_as(last_line: Option<String>) -> Result<Self, GuardError> {
        // Known before the thread starts, so that no change can be missed.
        let parent = rustix::process::getppid();
        let signal = TerminateSignal::register()?;
        let registry = Arc::new(RegionRegistry {
            // Best effort: the next owner replaces a region that stays.
            reaper: Reaper::start().ok(),
            last_line: Mutex::new(last_line),
            ..RegionRegistry::default()
        });
        let regions = Arc::clone(&registry);
        let thread = thread::Builder::new()
            .name("pie-exit-guard".to_owned())
            .spawn(move || watch(&regions, parent))
            .map_err(|error| SystemError::new("start", "the exit guard's thread", error))?;
        let pid = std::process::id();
        let watch = Some(Watch {
            thread: Some(thread),
            pid,
            _signal: signal,
        });
        Ok(Self {
            registry,
            _watch: watch,
        })
    }

    /// Changes the line that tells why the process ends: `form` with the reason for `{text}`, and the local time for `{time}`
    /// (`YYYY-MM-DD HH:MM:SS.mmm`) or `{iso}` (as in ISO 8601).
    pub fn set_last_line(&self, form: String) {
        *self.registry.last_line() = Some(form);
    }

    /// A guard that handles nothing, for hosts with their own signal handling, benches and tests.
    /// Regions are still removed when their server is dropped.
    pub fn inert() -> Self {
        Self {
            registry: Arc::default(),
            _watch: None,
        }
    }

    /// Removes the regions, answers open requests with zero bytes and ends the process with `status`, from any thread and
    /// whatever the others do.
    pub fn exit(&self, status: i32) -> ! {
        shut_down(&self.registry, status, || ())
    }

    pub(crate) fn registry(&self) -> &Arc<RegionRegistry> {
        &self.registry
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if std::process::id() == self.pid {
            signal::raise(signal::CLOSE);
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

fn watch(regions: &RegionRegistry, parent: Option<rustix::process::Pid>) {
    signal::unblock();
    loop {
        let events = signal::wait(PARENT_CHECK);
        // Checked first: a parent may have the kernel send SIGTERM when it ends.
        let orphaned = rustix::process::getppid() != parent;
        if orphaned || events & signal::TERMINATE != 0 {
            let reason = if orphaned { ORPHANED } else { TERMINATED };
            shut_down(regions, 0, || {
                if let Some(form) = regions.last_line().as_deref() {
                    stderr::log(form, reason);
                }
            });
        }
        if events & signal::CLOSE != 0 {
            return;
        }
    }
}

/// Removes all regions, refuses open requests, calls `log` and ends the process. Keeps the lock, so that no region is created.
fn shut_down(registry: &RegionRegistry, status: i32, log: impl FnOnce()) -> ! {
    let regions = registry.lock();
    for region in regions.iter() {
        // Best effort: the next owner replaces a region that stays.
        let _ = region.remove();
    }
    registry.refuse_requests();
    log();
    signal::exit_now(status)
}

/// Sets the parent-death signal of this process to SIGKILL. If its parent is not the process `parent` any more, exits at once.
///
/// # Errors
/// [`SystemError`] if the kernel refuses.
pub fn die_with_parent(parent: u32) -> Result<(), SystemError> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| SystemError::new("follow", "the parent process", error))?;
    // Checked after the call: a parent that dies from here on takes this process along.
    let found = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    if found != Some(parent) {
        signal::exit_now(0);
    }
    Ok(())
}
