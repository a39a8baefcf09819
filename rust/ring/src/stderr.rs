//! A last line on stderr that never waits: nothing may read the pipe or the terminal any more.

#![expect(unsafe_code, reason = "the local time has no safe interface")]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};

/// Writes `HH:MM:SS.mmm INFO name: text` in local time, or loses it.
pub(crate) fn log(name: &str, text: &str) {
    let line = format!("{} INFO {name}: {text}\n", time_of_day());
    write_at_once(std::io::stderr().as_fd(), line.as_bytes());
}

fn write_at_once(stderr: BorrowedFd<'_>, line: &[u8]) {
    // The offset -1 is the file's own position.
    let flags = ReadWriteFlags::NOWAIT;
    let written = rustix::io::pwritev2(stderr, &[IoSlice::new(line)], u64::MAX, flags);
    let Err(error) = written else { return };
    if error == Errno::AGAIN && is_pipe(stderr) {
        return;
    }
    // Terminals, some file systems and old kernels do not know the flag.
    let mut watched = [PollFd::new(&stderr, PollFlags::OUT)];
    if rustix::event::poll(&mut watched, Some(&Timespec::default())) == Ok(1)
        && watched[0].revents().contains(PollFlags::OUT)
    {
        let _ = rustix::io::write(stderr, line);
    }
}

fn is_pipe(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
}

fn time_of_day() -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = libc::time_t::try_from(now.as_secs()).unwrap_or_default();
    let mut local = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both are valid places; zero bytes are a valid `tm` should the call fail.
    let local = unsafe {
        libc::localtime_r(ptr::from_ref(&seconds), local.as_mut_ptr());
        local.assume_init()
    };
    let (hour, minute, second) = (local.tm_hour, local.tm_min, local.tm_sec);
    format!(
        "{hour:02}:{minute:02}:{second:02}.{:03}",
        now.subsec_millis()
    )
}
