//! Shared memory in which `SGLang`'s processors leave the pixels of images, one segment for each tensor.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Where Linux keeps POSIX shared memory.
const FOLDER: &str = "/dev/shm";
/// How `SGLang` begins the names of such segments; other files of the folder are not its own.
const PREFIX: &[u8] = b"sgl_shm_";

/// A segment, which is freed when this is dropped: the receiver of a tensor frees it.
#[derive(Debug)]
pub(crate) struct Segment(PathBuf);

impl Segment {
    /// By its name; `None` for a name that `SGLang` does not give.
    pub(crate) fn new(name: &[u8]) -> Option<Self> {
        let rest = name.strip_prefix(PREFIX)?;
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let name = str::from_utf8(name).ok()?;
        (rest.len() < 64 && rest.iter().all(is_plain)).then(|| Self(Path::new(FOLDER).join(name)))
    }

    /// Its first bytes.
    ///
    /// # Errors
    /// It is gone, or shorter.
    pub(crate) fn read(&self, bytes: usize) -> io::Result<Vec<u8>> {
        let file = File::open(&self.0)?;
        if file.metadata()?.len() < bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut data = Vec::with_capacity(bytes);
        let read = file.take(bytes as u64).read_to_end(&mut data)?;
        if read < bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(data)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // One that is gone needs no freeing.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_read_once() {
        let name = format!("sgl_shm_mm_{}_unit", std::process::id());
        let path = Path::new(FOLDER).join(&name);
        fs::write(&path, [1, 2, 3, 4]).unwrap();
        let segment = Segment::new(name.as_bytes()).unwrap();
        assert_eq!(segment.read(3).unwrap(), [1, 2, 3]);
        let short = segment.read(5).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        drop(segment);
        assert!(!path.exists());
        let gone = Segment::new(name.as_bytes()).unwrap().read(3).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            &b"pie_shmem_g0"[..],
            b"sgl_shm_/../../etc/passwd",
            b"sgl_shm_mm_1.2",
            b"sgl_shm_\xff",
            &[PREFIX, &[b'a'; 64]].concat(),
        ] {
            assert!(Segment::new(name).is_none(), "{name:?}");
        }
    }
}
