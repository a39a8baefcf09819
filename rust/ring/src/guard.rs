//! Removes the regions of a process that ends: on SIGTERM, or when the parent dies, a thread of its own
//! removes every region and ends the process, however busy the other threads are. Where no thread can do
//! anything, because the process is killed, the reaper does it, a process that knows every region.
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

/// The regions of this process.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    regions: Mutex<Vec<NamedFile>>,
    /// Live servers, whose clients wait for answers.
    rings: Mutex<Vec<Weak<Shared>>>,
    reaper: Option<Reaper>,
}

impl Tracker {
    /// The list, which no panic can leave in a bad state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<NamedFile>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the reaper that a region of this name is about to be made, or that it is the file `id`.
    pub(crate) fn tell_reaper(&self, name: &RegionName, id: Option<FileId>) {
        if let Some(reaper) = &self.reaper {
            reaper.tell(name, id);
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

    /// Takes a region from the list; its name stays.
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
    tracker: Arc<Tracker>,
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

    /// As [`Self::install`], with a line on stderr that tells why the process ends, as a log line of `name`.
    /// Where stderr does not accept it at once, it is lost.
    ///
    /// # Errors
    /// Those of [`Self::install`].
    pub fn install_named(name: &'static str) -> Result<Self, GuardError> {
        Self::install_as(Some(name))
    }

    fn install_as(name: Option<&'static str>) -> Result<Self, GuardError> {
        // Known before the thread starts, so that no change can be missed.
        let parent = rustix::process::getppid();
        let signal = TerminateSignal::register()?;
        let tracker = Arc::new(Tracker {
            // Best effort: the next owner replaces a region that stays.
            reaper: Reaper::start().ok(),
            ..Tracker::default()
        });
        let regions = Arc::clone(&tracker);
        let thread = thread::Builder::new()
            .name("pie-exit-guard".to_owned())
            .spawn(move || watch(&regions, parent, name))
            .map_err(|error| SystemError::new("start", "the exit guard's thread", error))?;
        let pid = std::process::id();
        let watch = Some(Watch {
            thread: Some(thread),
            pid,
            _signal: signal,
        });
        Ok(Self {
            tracker,
            _watch: watch,
        })
    }

    /// A guard that handles nothing, for hosts with their own signal handling, benches and tests.
    /// Regions are still removed when their server is dropped.
    pub fn inert() -> Self {
        Self {
            tracker: Arc::default(),
            _watch: None,
        }
    }

    /// Removes the regions, answers open requests with zero bytes and ends the process with `status`, from any thread and
    /// whatever the others do.
    pub fn exit(&self, status: i32) -> ! {
        leave(&self.tracker, status, || ())
    }

    pub(crate) fn tracker(&self) -> &Arc<Tracker> {
        &self.tracker
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

fn watch(regions: &Tracker, parent: Option<rustix::process::Pid>, name: Option<&str>) {
    signal::unblock();
    loop {
        let events = signal::wait(PARENT_CHECK);
        // Checked first: a parent may have the kernel send SIGTERM when it ends.
        let orphaned = rustix::process::getppid() != parent;
        if orphaned || events & signal::TERMINATE != 0 {
            let reason = if orphaned { ORPHANED } else { TERMINATED };
            leave(regions, 0, || {
                if let Some(name) = name {
                    stderr::log(name, reason);
                }
            });
        }
        if events & signal::CLOSE != 0 {
            return;
        }
    }
}

/// Removes all regions, refuses open requests, calls `say` and ends the process. The lock is kept, so no region can be made
/// any more.
fn leave(tracker: &Tracker, status: i32, say: impl FnOnce()) -> ! {
    let regions = tracker.lock();
    for region in regions.iter() {
        // Best effort: the next owner replaces a region that stays.
        let _ = region.remove();
    }
    tracker.refuse_requests();
    say();
    signal::exit_now(status)
}

/// Has the kernel kill this process as soon as the thread that started it ends, and with it its parent, which must be the
/// process `parent`. If it is another one, the parent is dead already, and so is this process.
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
