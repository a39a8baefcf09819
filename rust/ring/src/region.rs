//! Ownership of a region: the process that holds an exclusive `flock` on the file of the name owns it.
//!
//! The kernel frees the lock when its owner dies, however it dies, so no pid and no age has to be
//! guessed. A file without a lock is a leftover and is replaced by a new one; it is never reused,
//! because its old client may still have it mapped.
//!
//! Between making a file and locking it there is a gap in which a rival may take the new file for a
//! leftover. Two rules make that harmless. Only the holder of a file's lock removes the file from the
//! name. And after taking a lock, each side checks that the name still leads to the locked file; if
//! not, it starts over. So the lock that counts is the one on the file that the name leads to, and at
//! most one process can hold it.
//!
//! The descriptor is close-on-exec: programs that the owner starts do not keep the lock. A child made
//! by `fork` without `exec` does share it until it ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation};
use rustix::io::Errno;

use crate::error::{RegionError, SystemError};
use crate::guard::RegionRegistry;
use crate::named_file::{NamedFile, RegionName, id_at};

/// Retry interval while a live owner holds the lock.
const RETRY: Duration = Duration::from_millis(20);

/// The file of a region, owned by this process. Dropping it removes the name, then the lock.
#[derive(Debug)]
pub(crate) struct RegionFile {
    file: OwnedFd,
    named: NamedFile,
    registry: Arc<RegionRegistry>,
    pid: u32,
}

/// The outcome of one try to own the name.
enum Attempt {
    Owned(RegionFile),
    /// A living process holds the lock.
    Occupied,
    /// A leftover was removed, or the name changed hands meanwhile.
    Changed,
}

impl RegionFile {
    /// Makes the region and reserves `bytes` for it, waiting up to `takeover` for a live owner.
    pub(crate) fn create(
        name: &RegionName,
        bytes: u64,
        takeover: Duration,
        registry: &Arc<RegionRegistry>,
    ) -> Result<Self, RegionError> {
        let start = Instant::now();
        registry.notify_reaper(name, None);
        loop {
            match Self::attempt(name, registry)? {
                Attempt::Owned(region) => {
                    region.reserve(bytes)?;
                    return Ok(region);
                }
                Attempt::Changed => {}
                Attempt::Occupied => {
                    let left = takeover.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        let (name, owner) = (name.as_str().to_owned(), owner(name));
                        return Err(RegionError::Owned {
                            name,
                            owner,
                            waited: takeover,
                        });
                    }
                    thread::sleep(left.min(RETRY));
                }
            }
        }
    }

    fn attempt(name: &RegionName, registry: &Arc<RegionRegistry>) -> Result<Attempt, SystemError> {
        let Some(region) = Self::make(name, registry)? else {
            return Ok(match remove_stale_file(name)? {
                StaleRegion::Removed | StaleRegion::None => Attempt::Changed,
                StaleRegion::Owned => Attempt::Occupied,
            });
        };
        if !try_lock(name, region.file())? {
            // A rival took the new file for a leftover. As holder of the lock it removes the file.
            region.registry.forget(&region.named);
            return Ok(Attempt::Occupied);
        }
        // Such a rival may also be done already.
        if region.named.is_current() {
            Ok(Attempt::Owned(region))
        } else {
            Ok(Attempt::Occupied)
        }
    }

    /// Makes the file and tracks it in one step; `None` if the name exists.
    fn make(
        name: &RegionName,
        registry: &Arc<RegionRegistry>,
    ) -> Result<Option<Self>, SystemError> {
        let (pid, registry) = (std::process::id(), Arc::clone(registry));
        let mut regions = registry.lock();
        let file = match name.make() {
            Ok(file) => file,
            Err(Errno::EXIST) => return Ok(None),
            Err(error) => return Err(name.failed("create", error)),
        };
        let named = NamedFile::new(name, file.as_fd())?;
        regions.push(named.clone());
        registry.notify_reaper(name, Some(named.id()));
        drop(regions);
        Ok(Some(Self {
            file,
            named,
            registry,
            pid,
        }))
    }

    /// Gives the file its size and its memory, so that no later access can run out of space.
    fn reserve(&self, needed: u64) -> Result<(), RegionError> {
        let name = self.named.name();
        let no_space = |available| RegionError::NoSpace {
            name: name.as_str().to_owned(),
            needed,
            available,
        };
        let space = rustix::fs::fstatvfs(&self.file);
        // A tmpfs without a limit says that it has 0 blocks.
        let available = space.ok().filter(|space| space.f_blocks > 0);
        let available = available.map(|space| space.f_bavail.saturating_mul(space.f_frsize));
        if let Some(available) = available.filter(|&available| available < needed) {
            return Err(no_space(available));
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, needed) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC | Errno::NOMEM | Errno::FBIG) => {
                    return Err(no_space(available.unwrap_or(0)));
                }
                Err(error) => return Err(name.failed("reserve the memory of", error).into()),
            }
        }
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Removes the name if it still leads to this file. Does nothing in a forked child.
    pub(crate) fn unlink(&self) {
        if std::process::id() == self.pid {
            self.registry.remove(&self.named);
        }
    }
}

impl Drop for RegionFile {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Whether there is a region of this name, or anything else under it.
#[must_use]
pub fn region_exists(name: &str) -> bool {
    RegionName::new(name).is_ok_and(|name| id_at(name.path()).is_ok())
}

/// Removes the region `name` if the process that owned it has ended, and returns whether it was there. The region of a live
/// process stays, whichever process that is: the kernel's lock on the file decides, not its name.
///
/// # Errors
/// [`RegionError::Name`], or [`RegionError::System`] if the file cannot be opened, locked or removed.
pub fn remove_stale_region(name: &str) -> Result<bool, RegionError> {
    let found = remove_stale_file(&RegionName::new(name)?)?;
    Ok(found == StaleRegion::Removed)
}

/// What became of a region whose owner is taken for dead.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StaleRegion {
    Removed,
    /// A living process holds the lock.
    Owned,
    /// There is no such file, any more.
    None,
}

/// Removes the existing file if its owner is dead.
fn remove_stale_file(name: &RegionName) -> Result<StaleRegion, SystemError> {
    let file = match name.open() {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(StaleRegion::None),
        Err(error) => return Err(name.failed("take over", error)),
    };
    if !try_lock(name, file.as_fd())? {
        return Ok(StaleRegion::Owned);
    }
    NamedFile::new(name, file.as_fd())?.remove()?;
    Ok(StaleRegion::Removed)
}

fn try_lock(name: &RegionName, file: BorrowedFd<'_>) -> Result<bool, SystemError> {
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(name.failed("lock", error)),
        }
    }
}

/// The pid that holds the lock on the name's file, if the kernel shows it.
fn owner(name: &RegionName) -> Option<u32> {
    let stat = rustix::fs::statat(CWD, name.path(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let (major, minor) = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    find_lock(
        &std::fs::read_to_string("/proc/locks").ok()?,
        &format!("{major:02x}:{minor:02x}:{}", stat.st_ino),
    )
}

/// Lines look like `1: FLOCK  ADVISORY  WRITE 4711 00:1a:567 0 EOF`.
fn find_lock(locks: &str, file: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let kind = words.next()?;
        let pid = words.nth(2)?;
        (kind == "FLOCK" && words.next()? == file).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_table() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:1a:567 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 00:1a:568 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 14 00:1a:567 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 13 00:1a:567 0 EOF\n";
        assert_eq!(find_lock(locks, "00:1a:567"), Some(13));
        assert_eq!(find_lock(locks, "00:1a:569"), None);
        assert_eq!(find_lock("garbage\n\n1:", "00:1a:567"), None);
    }
}
