//! The group id of a driver, which names its region of shared memory.

use std::io;

use rustix::rand::GetRandomFlags;

use crate::error::EngineError;

/// A Pie server numbers its groups from 0; ids of this crate have the highest bit.
const OWN: u32 = 1 << 31;

/// A group id that no live driver has: 31 random bits. `/dev/shm` may be shared by containers, in which neither process ids nor
/// files elsewhere are unique. Should two processes draw the same number at the same time, the second driver finds the region
/// locked and does not start.
pub(crate) fn unused_id() -> Result<u32, EngineError> {
    unused(random, |id| pie_ring::region_exists(&region(id)))
}

fn unused(
    random: impl Fn() -> io::Result<u32>,
    is_used: impl Fn(u32) -> bool,
) -> Result<u32, EngineError> {
    loop {
        let id = random().map_err(EngineError::Random)? | OWN;
        if !is_used(id) {
            return Ok(id);
        }
    }
}

fn random() -> io::Result<u32> {
    let mut bytes = [0; 4];
    // So few bytes come at once, or not at all.
    rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u32::from_ne_bytes(bytes))
}

/// The region's name of a group.
pub(crate) fn region(group: u32) -> String {
    format!("/pie_shmem_g{group}")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pie_ring::{ExitGuard, RegionLayout, Server, ServerConfig};

    use super::*;

    fn serve(id: u32) -> Server {
        let mut config = ServerConfig::new(region(id), pie_wire::SCHEMA_HASH, Vec::new());
        config.layout = RegionLayout::new(1, 64, 64).unwrap();
        Server::create(&config, &ExitGuard::inert()).unwrap()
    }

    #[test]
    fn ids_differ_from_those_of_pie_and_from_each_other() {
        let [first, second] = [(); 2].map(|()| unused_id().unwrap());
        assert_ne!(first, second);
        assert!(first.min(second) >= OWN);
    }

    /// As in two containers that share `/dev/shm` and have equal process ids: both draw the same numbers.
    #[test]
    fn a_process_that_draws_the_number_of_another_ones_driver_takes_the_next() {
        let first = unused_id().unwrap();
        let server = serve(first);
        let next = Cell::new(first.wrapping_sub(1));
        let draw = || {
            next.set(next.get().wrapping_add(1));
            Ok(next.get())
        };
        let second = unused(draw, |id| pie_ring::region_exists(&region(id))).unwrap();
        assert_ne!(second, first);
        // And whoever cleans up by the name of a live driver removes nothing.
        assert!(!pie_ring::remove_stale_region(&region(first)).unwrap());
        assert!(pie_ring::region_exists(&region(first)));
        drop(server);
        assert!(!pie_ring::region_exists(&region(first)));
    }
}
