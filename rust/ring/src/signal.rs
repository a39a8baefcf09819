//! SIGTERM as a word that a thread can wait for.
//!
//! The native handler sets a bit and wakes the waiter: atomics and one futex call, both allowed in a
//! handler. A word in private memory needs no descriptor that could leak into a child, and a forked
//! child has its own copy. There the handler sees a foreign pid and gives SIGTERM its default effect
//! back, so that the child can be terminated without its parent noticing.

#![expect(
    unsafe_code,
    reason = "signal dispositions and _exit have no safe interface"
)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::error::{GuardError, SystemError};
use crate::futex;

/// SIGTERM arrived.
pub(crate) const TERMINATE: u32 = 1;
/// The waiter is no longer wanted.
pub(crate) const CLOSE: u32 = 2;

/// Pid of the process whose guard is installed; 0 before the first one.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// The bits above. The handler has nothing else to reach, hence the two statics.
static EVENTS: AtomicU32 = AtomicU32::new(0);

/// The registration for SIGTERM. Dropping it restores the former disposition.
#[derive(Debug)]
pub(crate) struct TerminateSignal {
    previous: libc::sigaction,
}

impl TerminateSignal {
    /// Registers the handler. One registration per process: two would race to end it.
    pub(crate) fn register() -> Result<Self, GuardError> {
        let pid = std::process::id();
        let current = OWNER.load(Ordering::Relaxed);
        // A foreign pid is that of a parent which forked this process.
        if current == pid
            || OWNER
                .compare_exchange(current, pid, Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
        {
            return Err(GuardError::Active);
        }
        EVENTS.store(0, Ordering::Relaxed);
        match set_disposition(&handler()) {
            Ok(previous) => Ok(Self { previous }),
            Err(error) => {
                OWNER.store(0, Ordering::Relaxed);
                Err(SystemError::new("handle", "SIGTERM", error).into())
            }
        }
    }
}

impl Drop for TerminateSignal {
    fn drop(&mut self) {
        if OWNER.load(Ordering::Relaxed) != std::process::id() {
            return;
        }
        // A handler that was set after this one stays.
        let ours = disposition().is_ok_and(|now| now.sa_sigaction == handler().sa_sigaction);
        if ours {
            let _ = set_disposition(&self.previous);
        }
        OWNER.store(0, Ordering::Relaxed);
        // SYNC: pairs with the release in `raise`.
        if EVENTS.load(Ordering::Acquire) & TERMINATE != 0 {
            // It came after the waiter's last check, so the former disposition gets it.
            // SAFETY: no preconditions.
            unsafe { libc::raise(libc::SIGTERM) };
        }
    }
}

/// Adds event bits and wakes the waiter.
pub(crate) fn raise(events: u32) {
    // SYNC: pairs with the acquire load in `wait`.
    EVENTS.fetch_or(events, Ordering::Release);
    futex::wake_all(&EVENTS);
}

/// Waits at most `timeout` for an event and returns the bits seen so far.
pub(crate) fn wait(timeout: Duration) -> u32 {
    // A failure is treated like the time-out: the caller comes again.
    let _ = futex::wait(&EVENTS, 0, Some(timeout));
    // SYNC: pairs with the release in `raise`.
    EVENTS.load(Ordering::Acquire)
}

/// Lets SIGTERM reach the calling thread, even if the process was started with it blocked.
pub(crate) fn unblock() {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set before it is used; the old mask is not asked for.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut());
    }
}

/// Ends the process at once: no exit handlers, no destructors, no waiting for other threads.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: _exit has no preconditions; the caller has finished its clean-up.
    unsafe { libc::_exit(status) }
}

extern "C" fn on_terminate(signal: libc::c_int) {
    if std::process::id() == OWNER.load(Ordering::Relaxed) {
        raise(TERMINATE);
    } else {
        // SAFETY: both calls are async-signal-safe; the signal is delivered after this handler.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

fn handler() -> libc::sigaction {
    // SAFETY: all-zero is a valid sigaction: an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_terminate as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    action
}

fn disposition() -> io::Result<libc::sigaction> {
    exchange(ptr::null())
}

fn set_disposition(action: &libc::sigaction) -> io::Result<libc::sigaction> {
    exchange(action)
}

/// Sets the disposition unless `action` is null, and returns the former one.
fn exchange(action: *const libc::sigaction) -> io::Result<libc::sigaction> {
    let mut previous = MaybeUninit::zeroed();
    // SAFETY: `action` is null or valid (only the two callers above); on success the kernel has
    // written `previous`, and zero bytes are a valid value in any case.
    let (result, previous) = unsafe {
        let result = libc::sigaction(libc::SIGTERM, action, previous.as_mut_ptr());
        (result, previous.assume_init())
    };
    if result == 0 {
        Ok(previous)
    } else {
        Err(io::Error::last_os_error())
    }
}
