//! Names of regions, and the files that they lead to.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::error::{RegionError, SystemError};

/// Where the system keeps its shared-memory objects.
const DIRECTORY: &str = "/dev/shm";

/// How an existing region is opened. A link or a pipe of its name is not a region, and must neither be followed nor block.
pub(crate) const OPEN: OFlags = OFlags::RDWR
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK);

/// A checked region name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionName {
    name: String,
    path: String,
}

impl RegionName {
    pub(crate) fn new(name: &str) -> Result<Self, RegionError> {
        let usable = name.strip_prefix('/').is_some_and(|rest| {
            (1..=250).contains(&rest.len())
                && !rest.contains(['/', '\0'])
                && rest != "."
                && rest != ".."
        });
        if !usable {
            return Err(RegionError::Name {
                name: name.to_owned(),
            });
        }
        Ok(Self {
            name: name.to_owned(),
            path: format!("{DIRECTORY}{name}"),
        })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Opens the existing region.
    pub(crate) fn open(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::open(&self.path, OPEN, Mode::empty())
    }

    pub(crate) fn make(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(&self.path, flags, Mode::RUSR | Mode::WUSR)
    }

    pub(crate) fn failed(&self, action: &'static str, source: impl Into<io::Error>) -> SystemError {
        let source = source.into();
        SystemError {
            action,
            target: self.path.clone(),
            hint: remedy(action, &source),
            source,
        }
    }
}

/// The remedy for a region that the system refuses.
fn remedy(action: &str, error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::ROFS) => {
            "make /dev/shm writable, e.g. `mount -o remount,rw /dev/shm`; in a container mount a tmpfs there"
        }
        Some(Errno::NOSPC | Errno::DQUOT) => {
            "delete stale files in /dev/shm, or allow more: `mount -o remount,nr_inodes=0 /dev/shm` for their number, \
             `docker run --shm-size` for their size"
        }
        Some(Errno::NOENT | Errno::NOTDIR) => {
            "/dev/shm is missing: mount a tmpfs there, e.g. `mount -t tmpfs tmpfs /dev/shm`"
        }
        Some(Errno::ACCESS | Errno::PERM) if action == "create" => {
            "let this user write to /dev/shm, e.g. `chmod 1777 /dev/shm`"
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            "the file belongs to another user: end that user's server and remove the file as that user, or as root"
        }
        Some(Errno::ISDIR | Errno::LOOP | Errno::NXIO | Errno::NODEV) => {
            "it is not the file of a region: remove it"
        }
        Some(Errno::NOMEM | Errno::AGAIN) => {
            "raise the limit of this process's memory (`ulimit -v` and `-l`, or the container's)"
        }
        Some(Errno::MFILE | Errno::NFILE) => "raise the limit of open files (`ulimit -n`)",
        _ => "check that /dev/shm is a tmpfs that this user can write to",
    }
}

/// Identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl From<Stat> for FileId {
    fn from(stat: Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

impl FileId {
    #[cfg(test)]
    pub(crate) fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }
}

/// The file that a path names; of a link the link itself.
pub(crate) fn id_at(path: impl Arg) -> Result<FileId, Errno> {
    rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map(FileId::from)
}

/// A name together with the file that it should lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedFile {
    name: RegionName,
    id: FileId,
}

impl NamedFile {
    pub(crate) fn new(name: &RegionName, file: BorrowedFd<'_>) -> Result<Self, SystemError> {
        let stat = rustix::fs::fstat(file).map_err(|error| name.failed("inspect", error))?;
        Ok(Self {
            name: name.clone(),
            id: stat.into(),
        })
    }

    pub(crate) fn name(&self) -> &RegionName {
        &self.name
    }

    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    /// Whether the name still leads to the file.
    pub(crate) fn is_current(&self) -> bool {
        id_at(&self.name.path).is_ok_and(|id| id == self.id)
    }

    /// Removes the name unless it leads to another file by now.
    pub(crate) fn remove(&self) -> Result<(), SystemError> {
        if !self.is_current() {
            return Ok(());
        }
        match rustix::fs::unlink(&self.name.path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.name.failed("remove", error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["/region_0", "/a", &format!("/{}", "x".repeat(250))] {
            assert_eq!(RegionName::new(good).unwrap().as_str(), good);
        }
        for bad in [
            "",
            "/",
            "a",
            "/a/b",
            "//a",
            "/.",
            "/..",
            "/a\0",
            &format!("/{}", "x".repeat(251)),
        ] {
            assert!(RegionName::new(bad).is_err(), "{bad:?}");
        }
    }
}
