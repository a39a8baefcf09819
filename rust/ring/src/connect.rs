//! How a client finds its region.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use crate::client::{Client, ClientConfig};
use crate::error::{HeaderError, RegionError};
use crate::layout::{HEADER_BYTES, RegionLayout};
use crate::mapping::Mapping;
use crate::named_file::RegionName;

impl Client {
    /// Opens an existing region, whose only client should be this one; nothing but this rule keeps others away.
    ///
    /// # Errors
    /// [`RegionError::NotFound`] or [`RegionError::Header`] if there is no usable region, [`RegionError::Name`] or
    /// [`RegionError::System`] otherwise.
    pub fn open(
        name: &str,
        schema_hash: [u8; 8],
        config: ClientConfig,
    ) -> Result<Self, RegionError> {
        let name = RegionName::new(name)?;
        let file = name.open().map_err(|error| match error {
            Errno::NOENT => RegionError::NotFound {
                name: name.as_str().to_owned(),
            },
            error => name.failed("open", error).into(),
        })?;
        let layout = read_layout(&name, &file, schema_hash)?;
        let mapping =
            Mapping::new(file.as_fd(), layout, false).map_err(|error| name.failed("map", error))?;
        Ok(Self::new(mapping, config))
    }
}

fn read_layout(
    name: &RegionName,
    file: &OwnedFd,
    schema_hash: [u8; 8],
) -> Result<RegionLayout, RegionError> {
    let stat = rustix::fs::fstat(file).map_err(|error| name.failed("inspect", error))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut header = [0; HEADER_BYTES];
    let read = rustix::io::pread(file, &mut header, 0);
    if read.map_err(|error| name.failed("read", error))? < HEADER_BYTES {
        let (name, needed) = (format!("region {}", name.as_str()), HEADER_BYTES as u64);
        return Err(HeaderError::TooShort { name, size, needed }.into());
    }
    Ok(RegionLayout::decode_header(
        &header,
        schema_hash,
        name.as_str(),
        size,
    )?)
}
