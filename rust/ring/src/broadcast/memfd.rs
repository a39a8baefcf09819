//! The file of a broadcast. It never has a name: workers inherit its descriptor, and it is gone when
//! the last of them and the leader are. Its size is sealed, so no worker can cut it under the others.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, FdFlags};

use super::layout::{BroadcastLayout, HEADER_BYTES, NAME};
use super::listener::Listener;
use super::mapping::Mapping;
use super::sender::Broadcast;
use crate::error::{BroadcastError, HeaderError, SystemError};

impl Broadcast {
    /// Makes a broadcast to `readers` readers, 1 to 64: 2 MiB of memory, all of it reserved and mapped.
    ///
    /// # Errors
    /// [`BroadcastError::Readers`] for none or too many, [`BroadcastError::System`] without memory.
    pub fn create(readers: usize) -> Result<Self, BroadcastError> {
        Self::with_layout(BroadcastLayout::new(readers)?)
    }

    pub(super) fn with_layout(layout: BroadcastLayout) -> Result<Self, BroadcastError> {
        let file = make(layout)?;
        let mapping = Mapping::new(file, layout).map_err(|error| failed("map", error))?;
        Ok(Self::new(mapping))
    }

    /// The file, to be inherited by the workers. It is close-on-exec: clear that flag for a worker's process when it
    /// is started.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }
}

impl Listener {
    /// Opens an inherited broadcast as reader number `reader`, counted from 0. Each number can be
    /// taken once, and everything sent from the beginning on arrives. The descriptor is made
    /// close-on-exec.
    ///
    /// # Errors
    /// [`BroadcastError::Header`] if this is not a broadcast of this version, [`BroadcastError::Reader`] or
    /// [`BroadcastError::ReaderTaken`] for a bad number, [`BroadcastError::System`] otherwise.
    pub fn open(fd: OwnedFd, reader: usize) -> Result<Self, BroadcastError> {
        let layout = read_layout(&fd)?;
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| failed("keep", error))?;
        let mapping = Mapping::new(fd, layout).map_err(|error| failed("map", error))?;
        Self::new(mapping, reader)
    }
}

fn failed(action: &'static str, source: impl Into<std::io::Error>) -> SystemError {
    SystemError::new(action, format!("the {NAME}"), source)
}

fn make(layout: BroadcastLayout) -> Result<OwnedFd, SystemError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let name = format!("pie_{NAME}");
    let file = rustix::fs::memfd_create(name, flags).map_err(|error| failed("create", error))?;
    let bytes = layout.total_bytes() as u64;
    loop {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed("reserve the memory of", error)),
        }
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(|error| failed("seal", error))?;
    rustix::io::pwrite(&file, &layout.encode_header(), 0)
        .map_err(|error| failed("write the header of", error))?;
    Ok(file)
}

fn read_layout(file: &OwnedFd) -> Result<BroadcastLayout, BroadcastError> {
    let stat = rustix::fs::fstat(file).map_err(|error| failed("inspect", error))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut header = [0; HEADER_BYTES];
    let read = rustix::io::pread(file, &mut header, 0);
    if read.map_err(|error| failed("read", error))? < HEADER_BYTES {
        let (name, needed) = (NAME.to_owned(), HEADER_BYTES as u64);
        return Err(HeaderError::TooShort { name, size, needed }.into());
    }
    Ok(BroadcastLayout::decode_header(&header, size)?)
}
