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

/// Writes a line, or loses it: `form` with the text for `{text}`, and the local time for `{time}` (`YYYY-MM-DD HH:MM:SS.mmm`)
/// or `{iso}` (as in ISO 8601, with the offset from UTC).
pub(crate) fn log(form: &str, text: &str) {
    let (time, iso) = local_time();
    let form = form.replace("{time}", &time).replace("{iso}", &iso);
    let line = form.replace("{text}", text) + "\n";
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

fn local_time() -> (String, String) {
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
    let (year, month, day) = (1900 + local.tm_year, 1 + local.tm_mon, local.tm_mday);
    let (hour, minute, second) = (local.tm_hour, local.tm_min, local.tm_sec);
    let date = format!("{year:04}-{month:02}-{day:02}");
    let time = format!(
        "{hour:02}:{minute:02}:{second:02}.{:03}",
        now.subsec_millis()
    );
    let sign = if local.tm_gmtoff < 0 { '-' } else { '+' };
    let offset = local.tm_gmtoff.unsigned_abs() / 60;
    let iso = format!("{date}T{time}{sign}{:02}:{:02}", offset / 60, offset % 60);
    (format!("{date} {time}"), iso)
}
