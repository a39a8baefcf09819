//! The number of a driver, which names its region of shared memory.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::RuntimeError;

/// Groups of a Pie server on this host count from 0; these cannot meet them.
const FIRST: u32 = 1 << 31;
/// Process ids are below this: the kernel's own limit.
const PROCESSES: u32 = 1 << 22;
/// Numbers of one process.
const PER_PROCESS: u32 = (u32::MAX - FIRST) / PROCESSES + 1;

/// A number that no other driver of this host has, and a folder for the driver's files. Both are free again when it is
/// dropped.
#[derive(Debug)]
pub(crate) struct Group {
    id: u32,
    folder: TempDir,
}

impl Group {
    /// Claims the first number that is free: the one that makes the folder has it.
    pub(crate) fn claim() -> Result<Self, RuntimeError> {
        let (process, home) = (std::process::id(), std::env::temp_dir());
        for index in 0..PER_PROCESS {
            let name = format!("pie-runtime-{process}-{index}");
            let made = tempfile::Builder::new()
                .prefix(&name)
                .rand_bytes(0)
                .tempdir_in(&home);
            match made {
                Ok(folder) => {
                    let id = FIRST + index * PROCESSES + process % PROCESSES;
                    return Ok(Self { id, folder });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => {
                    let path = home.join(name);
                    return Err(RuntimeError::File { path, source });
                }
            }
        }
        Err(RuntimeError::Groups {
            limit: PER_PROCESS,
            folder: home,
        })
    }

    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    /// The region's name.
    pub(crate) fn region(&self) -> String {
        region(self.id)
    }

    pub(crate) fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The region's name of a group.
pub(crate) fn region(group: u32) -> String {
    format!("/pie_shmem_g{group}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ_and_come_back() {
        let [first, second] = [(); 2].map(|()| Group::claim().unwrap());
        assert_ne!(first.id(), second.id());
        assert_eq!(first.id().abs_diff(second.id()) % PROCESSES, 0);
        assert!(first.id().min(second.id()) >= FIRST);
        let (id, file) = (first.id(), first.file("driver.toml"));
        drop(first);
        assert!(!file.parent().unwrap().exists());
        // Other tests of this process claim numbers, too, so it need not be the next one.
        let again: Vec<Group> = (0..8).map(|_| Group::claim().unwrap()).collect();
        assert!(again.iter().any(|group| group.id() == id));
    }

    #[test]
    fn the_last_number_fits() {
        let last = u64::from(FIRST)
            + u64::from(PER_PROCESS - 1) * u64::from(PROCESSES)
            + u64::from(PROCESSES - 1);
        assert_eq!(last, u64::from(u32::MAX));
    }
}
