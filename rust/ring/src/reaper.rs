//! A process that outlives this one, and removes the regions that it leaves behind.
//!
//! A process that is killed cannot clean up. So the exit guard forks another one off, first thing, while there is little to
//! copy. It is no child of this process and of none of its groups, keeps no descriptor but its own, and hears of a region's
//! name before the region is made. When this process has ended, however it did, it takes the names' locks: what it can lock
//! is a leftover. Whoever wants such a name in this moment finds the lock taken, and looks again. What kills it, too, as the
//! end of a container does, leaves the name to its next owner.

#![expect(unsafe_code, reason = "fork and its like have no safe interface")]

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions};

use crate::error::RingError;
use crate::region::{RegionName, remove_leftover};
use crate::signal::exit_now;

/// How long a lock may outlive its owner, in a child that shares it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Descriptors that are closed one by one where the kernel cannot close a range.
const MOST_DESCRIPTORS: libc::c_uint = 1 << 16;

/// This process's end.
#[derive(Debug)]
pub(crate) struct Reaper(UnixStream);

impl Reaper {
    /// Forks the other process off.
    pub(crate) fn start() -> Result<Self, RingError> {
        let failed = |error| RingError::system("start", "the reaper of regions", error);
        let (own, others) = UnixStream::pair().map_err(failed)?;
        // A descriptor by which the end is seen even if other children keep the socket open; not all kernels have it.
        let process = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
        // SAFETY: the child calls nothing but what may be called behind a fork: system calls, and the allocator, which the C
        // library keeps usable there. It does not return.
        match unsafe { libc::fork() } {
            -1 => Err(failed(std::io::Error::last_os_error())),
            0 => orphan(others, process.ok().as_ref()),
            child => {
                // It ends at once. If somebody else has waited for it, it is gone.
                let child = Pid::from_raw(child);
                while matches!(
                    rustix::process::waitpid(child, WaitOptions::empty()),
                    Err(Errno::INTR)
                ) {}
                Ok(Self(own))
            }
        }
    }

    /// Says that a region of this name may exist from now on.
    pub(crate) fn tell(&self, name: &RegionName) {
        // Best effort: what a killed process leaves, the name's next owner replaces.
        let _ = (&self.0).write_all(format!("{}\0", name.as_str()).as_bytes());
    }
}

/// Leaves all that it shares, and forks once more, so that the process which stays is somebody else's child. The first one
/// waits for this, so that it is done when a region is made.
fn orphan(socket: UnixStream, process: Option<&OwnedFd>) -> ! {
    // What is sent to the terminal's or the driver's group is not for this process.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"pie-reaper");
    let _ = rustix::process::chdir("/");
    block_signals();
    let kept = [Some(socket.as_raw_fd()), process.map(AsRawFd::as_raw_fd)];
    close_others(kept.into_iter().flatten().collect());
    // SAFETY: as in `Reaper::start`.
    if unsafe { libc::fork() } == 0 {
        outlive(socket, process);
    }
    exit_now(0)
}

fn outlive(socket: UnixStream, process: Option<&OwnedFd>) -> ! {
    let heard = listen(socket, process);
    let heard = String::from_utf8_lossy(&heard);
    for name in heard.split('\0').collect::<BTreeSet<_>>() {
        if let Ok(name) = RegionName::new(name) {
            remove_leftover(&name, PATIENCE);
        }
    }
    exit_now(0)
}

/// All that is said until the other process ends.
fn listen(mut socket: UnixStream, process: Option<&OwnedFd>) -> Vec<u8> {
    let mut heard = Vec::new();
    if socket.set_nonblocking(true).is_err() {
        return heard;
    }
    loop {
        let descriptors = [Some(socket.as_fd()), process.map(AsFd::as_fd)];
        let mut watched: Vec<_> = descriptors
            .into_iter()
            .flatten()
            .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
            .collect();
        match rustix::event::poll(&mut watched, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return heard,
        }
        // Looked at first: what was said before the end is read behind it.
        let ended = watched.get(1).is_some_and(|end| !end.revents().is_empty());
        drop(watched);
        if !read_on(&mut socket, &mut heard) || ended {
            return heard;
        }
    }
}

/// Reads what is there; returns false at the end.
fn read_on(socket: &mut UnixStream, heard: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 512];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => heard.extend_from_slice(&bytes[..count]),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => {}
                kind => return kind == ErrorKind::WouldBlock,
            },
        }
    }
}

fn block_signals() {
    let mut all = MaybeUninit::uninit();
    // SAFETY: sigfillset initializes the set before it is used; the old mask is not asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut());
    }
}

/// Closes all descriptors but those. Whoever waits for the end of a pipe must not wait for this process.
fn close_others(mut kept: Vec<RawFd>) {
    kept.sort_unstable();
    let mut first = 0;
    for descriptor in kept.into_iter().map(RawFd::cast_unsigned) {
        if let Some(last) = descriptor.checked_sub(1) {
            close_range(first, last);
        }
        first = descriptor + 1;
    }
    close_range(first, libc::c_uint::MAX);
}

fn close_range(first: libc::c_uint, last: libc::c_uint) {
    if first > last {
        return;
    }
    // SAFETY: the owners of these descriptors live in the copied memory and are never used or dropped.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0;
    if !done {
        for descriptor in first..=last.min(MOST_DESCRIPTORS) {
            // SAFETY: as above.
            unsafe { libc::close(descriptor.cast_signed()) };
        }
    }
}
