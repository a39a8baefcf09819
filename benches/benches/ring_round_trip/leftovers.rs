//! Files of a pair of processes, which must not outlive it.

use std::fs;
use std::path::{Path, PathBuf};

/// A folder for files that are not shared memory.
pub(crate) fn folder(prefix: &str) -> PathBuf {
    std::env::temp_dir().join(prefix)
}

/// What is left in shared memory.
pub(crate) fn find(prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| has_prefix(path, prefix)).collect()
}

/// Removes everything that is left.
pub(crate) fn remove(prefix: &str) {
    let _ = fs::remove_dir_all(folder(prefix));
    for path in find(prefix) {
        let _ = fs::remove_file(path);
    }
}

/// Whether a name starts with the prefix, which another run's number must not continue.
fn has_prefix(path: &Path, prefix: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let rest = name.and_then(|name| name.strip_prefix(prefix));
    rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
}
