//! The reaper: a process that outlives this one and removes its regions.
//!
//! A process that is killed cannot clean up. So the exit guard forks another one off, first thing, while there is little to
//! copy. It is not a child of this process, and in none of its groups, and keeps no descriptor but its own. It receives a
//! region's name before the region is made, and its device and inode before it has memory. When this process has ended,
//! however it did, the reaper removes the names that still lead to these files, and leaves a file of anyone else alone. It
//! takes a file's lock first: the next owner of such a name finds the lock taken, and looks again. Where the reaper is
//! killed, too, as at the end of a container, the name stays for its next owner.
//!
//! A fork of a process with threads may find the allocator's locks taken for good. So the reaper makes system calls and
//! uses arrays, and allocates nothing in its whole life.

#![expect(unsafe_code, reason = "fork and its like have no safe interface")]

use std::ffi::CStr;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use crate::error::SystemError;
use crate::named_file::{FileId, OPEN, RegionName, id_at};
use crate::signal::exit_now;

/// Timeout for a lock that a forked child of the owner still holds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Retry interval for a held lock.
const RETRY: Duration = Duration::from_millis(20);
/// How long the first child may take, which makes some system calls and ends.
const CHILD_LIMIT: Duration = Duration::from_secs(5);
/// Most regions of a process that are remembered; of more, the last ones. Most processes have one.
const REGIONS: usize = 32;
/// Descriptors that are closed one by one where the kernel cannot close a range.
const MOST_DESCRIPTORS: libc::c_uint = 1 << 16;

/// A message to the reaper about a region.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Notice {
    /// Zero as long as the file is not made.
    id: FileId,
    /// Ends with a zero byte.
    path: [u8; 264],
}

/// The handle of the reaper in this process.
#[derive(Debug)]
pub(crate) struct Reaper(UnixStream);

impl Reaper {
    /// Forks the reaper.
    pub(crate) fn start() -> Result<Self, SystemError> {
        let failed = |error| SystemError::new("start", "the reaper of regions", error);
        let (own, others) = UnixStream::pair().map_err(failed)?;
        // A descriptor by which the end is seen even if other children keep the socket open; not all kernels have it.
        let process = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
        // SAFETY: the child makes only system calls, which is allowed after a fork. It allocates nothing, and does not
        // return.
        match unsafe { libc::fork() } {
            -1 => Err(failed(std::io::Error::last_os_error())),
            0 => detach(others, process.ok().as_ref()),
            child => {
                reap_child(Pid::from_raw(child), CHILD_LIMIT);
                Ok(Self(own))
            }
        }
    }

    /// Notifies the reaper that a region of this name may exist from now on, or that it is the file `id`.
    pub(crate) fn notify(&self, name: &RegionName, id: Option<FileId>) {
        let mut notice = Notice::zeroed();
        notice.id = id.unwrap_or(notice.id);
        let path = name.path().as_bytes();
        // A checked name leaves room for the zero byte.
        notice.path[..path.len()].copy_from_slice(path);
        // Best effort: the name's next owner replaces the region of a killed process.
        let _ = (&self.0).write_all(bytemuck::bytes_of(&notice));
    }
}

/// Waits for a child that exits at once, and kills it after `limit`.
fn reap_child(child: Option<Pid>, limit: Duration) {
    let start = Instant::now();
    loop {
        match rustix::process::waitpid(child, WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => {}
            Ok(Some(_)) | Err(_) => return,
        }
        if let Some(child) = child.filter(|_| start.elapsed() >= limit) {
            let _ = rustix::process::kill_process(child, Signal::KILL);
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// The intermediate child (double fork): detaches from session, signals and descriptors, and forks the reaper, which init adopts.
fn detach(socket: UnixStream, process: Option<&OwnedFd>) -> ! {
    // Signals to the terminal's or the parent's group are not for this process.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"pie-reaper");
    let _ = rustix::process::chdir(c"/");
    block_signals();
    let own = socket.as_raw_fd();
    close_others(own, process.map_or(own, AsRawFd::as_raw_fd));
    // SAFETY: as in `Reaper::start`.
    if unsafe { libc::fork() } == 0 {
        run_reaper(socket, process);
    }
    exit_now(0)
}

fn run_reaper(mut socket: UnixStream, process: Option<&OwnedFd>) -> ! {
    let mut regions = [Notice::zeroed(); REGIONS];
    receive_notices(&mut socket, process, &mut regions);
    for region in &regions {
        if region.path[0] != 0 {
            let _ = remove(region);
        }
    }
    exit_now(0)
}

/// Receives notices until the other process ends.
fn receive_notices(
    socket: &mut UnixStream,
    process: Option<&OwnedFd>,
    regions: &mut [Notice; REGIONS],
) {
    if socket.set_nonblocking(true).is_err() {
        return;
    }
    let mut next = 0;
    let mut notice = Notice::zeroed();
    let mut filled = 0;
    loop {
        let ends = [socket.as_fd(), process.map_or(socket.as_fd(), AsFd::as_fd)];
        let mut watched = ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN));
        match rustix::event::poll(&mut watched, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        // Checked first, so that notices sent before the end are read below.
        let ended = process.is_some() && !watched[1].revents().is_empty();
        loop {
            let bytes = bytemuck::bytes_of_mut(&mut notice);
            match socket.read(&mut bytes[filled..]) {
                Ok(0) => return,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return,
            }
            if filled == size_of::<Notice>() {
                filled = 0;
                record(&notice, regions, &mut next);
            }
        }
        if ended {
            return;
        }
    }
}

/// Stores a notice, replacing an earlier one of the same name.
fn record(notice: &Notice, regions: &mut [Notice; REGIONS], next: &mut usize) {
    let known = regions.iter().position(|region| region.path == notice.path);
    let index = known.unwrap_or(*next % REGIONS);
    *next += usize::from(known.is_none());
    regions[index] = *notice;
}

/// Removes a region that its owner has left, if the name still leads to it.
fn remove(region: &Notice) -> Result<(), Errno> {
    let Ok(path) = CStr::from_bytes_until_nul(&region.path) else {
        return Ok(());
    };
    let file = rustix::fs::open(path, OPEN, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_ours = if region.id == FileId::zeroed() {
        // Killed while it made the file: that has no memory yet. Every other file has.
        stat.st_size == 0
    } else {
        FileId::from(stat) == region.id
    };
    if !is_ours {
        return Ok(());
    }
    let start = Instant::now();
    while let Err(error) = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if !matches!(error, Errno::WOULDBLOCK | Errno::INTR) || start.elapsed() >= LOCK_TIMEOUT {
            return Err(error);
        }
        thread::sleep(RETRY);
    }
    if id_at(path)? == stat.into() {
        rustix::fs::unlink(path)?;
    }
    Ok(())
}

fn block_signals() {
    let mut all = MaybeUninit::uninit();
    // SAFETY: sigfillset initializes the set before it is used; the old mask is not asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut());
    }
}

/// Closes all descriptors but two, which may be the same, so that readers of inherited pipes see their end.
fn close_others(one: RawFd, other: RawFd) {
    let kept = [one.min(other), one.max(other)].map(RawFd::cast_unsigned);
    let mut first = 0;
    for descriptor in kept {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_does_not_end_is_not_waited_for_without_a_limit() {
        // SAFETY: the child makes one system call, again and again.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no preconditions.
                unsafe { libc::pause() };
            }
        }
        let (start, limit) = (Instant::now(), Duration::from_millis(50));
        reap_child(Pid::from_raw(child), limit);
        assert!((limit..Duration::from_secs(5)).contains(&start.elapsed()));
        // It is gone, and waited for.
        let again = rustix::process::waitpid(Pid::from_raw(child), WaitOptions::NOHANG);
        assert_eq!(again.unwrap_err(), Errno::CHILD);
    }

    /// The state after a kill between making the file and announcing its id.
    #[test]
    fn a_region_that_was_only_announced_is_removed_while_it_is_empty() {
        let name = format!("/pie_ring_test_{}_announced", std::process::id());
        let path = format!("/dev/shm{name}");
        let mut notice = Notice::zeroed();
        notice.path[..path.len()].copy_from_slice(path.as_bytes());
        assert_eq!(remove(&notice), Err(Errno::NOENT));
        std::fs::write(&path, b"of another make").unwrap();
        remove(&notice).unwrap();
        assert!(std::fs::exists(&path).unwrap());
        std::fs::write(&path, b"").unwrap();
        remove(&notice).unwrap();
        assert!(!std::fs::exists(&path).unwrap());
    }

    #[test]
    fn the_last_word_on_each_name_counts() {
        let mut regions = [Notice::zeroed(); REGIONS];
        let mut next = 0;
        let notice = |number: u8, inode| {
            let mut notice = Notice::zeroed();
            notice.path[0] = number;
            notice.id = FileId::new(1, inode);
            notice
        };
        for round in 1..4 {
            for number in 1..=REGIONS as u8 {
                record(&notice(number, round), &mut regions, &mut next);
            }
        }
        assert!(regions.iter().all(|region| region.id == FileId::new(1, 3)));
        record(&notice(200, 9), &mut regions, &mut next);
        assert_eq!(regions[0].path[0], 200);
        assert_eq!(regions[1].path[0], 2);
    }
}
