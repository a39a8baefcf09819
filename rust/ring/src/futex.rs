//! Sleeping on a word that several processes share. The private flag would tie the word to one address
//! space, so it is never set here.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

use crate::error::SystemError;

/// Wakes every waiter of the word and returns how many slept. It cannot fail on mapped memory, and it
/// is safe to call from a signal handler.
pub(crate) fn wake_all(word: &AtomicU32) -> usize {
    futex::wake(word, Flags::empty(), i32::MAX.cast_unsigned()).unwrap_or(0)
}

/// Sleeps while the word has the value `expected`, at most for `timeout`. Returns for any reason,
/// so the caller must check its condition again.
pub(crate) fn wait(
    word: &AtomicU32,
    expected: u32,
    timeout: Option<Duration>,
) -> Result<(), SystemError> {
    // A time-out too long for the kernel is as good as none.
    let timeout = timeout.and_then(|limit| Timespec::try_from(limit).ok());
    match futex::wait(word, Flags::empty(), expected, timeout.as_ref()) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(SystemError::new("wait on", "a wake counter", error)),
    }
}
