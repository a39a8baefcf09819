//! Where rows store their KV.

use crate::frame::request::{Request, Segment};
use crate::limits::Limits;
use crate::table::BlockTable;

/// Gives each row of a pass a storage slot. When two rows name one slot, the later row keeps it.
#[derive(Debug)]
pub(crate) struct Storage {
    /// Per storage slot: the last pass that wrote it.
    writers: Vec<u32>,
    pass: u32,
}

impl Storage {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            writers: vec![0; limits.storage_slots()],
            pass: 0,
        }
    }

    fn number_pass(&mut self) -> u32 {
        self.pass = self.pass.wrapping_add(1);
        if self.pass == 0 {
            self.writers.fill(0);
            self.pass = 1;
        }
        self.pass
    }

    /// Writes the storage slots of a pass, last row first. A row whose slot a later one has writes into the padding page,
    /// as dropped requests do.
    pub(crate) fn write(
        &mut self,
        limits: &Limits,
        table: &BlockTable,
        segments: &[Segment],
        requests: &[Request],
        out: &mut [i64],
    ) {
        let pass = self.number_pass();
        let writers = &mut self.writers[..];
        let base = segments[0].start();
        let page_size = limits.page_size;
        for segment in segments.iter().rev() {
            let request = &requests[segment.request()];
            let pages = table.pages(request.place().row());
            let prefix = segment.kv_start(request);
            let out = &mut out[segment.start() - base..][..segment.len()];
            if request.is_dropped() {
                out.fill(0);
                continue;
            }
            for (row, out) in out.iter_mut().enumerate().rev() {
                let index = (prefix + row) as u32;
                let page = pages[(index / page_size) as usize];
                let slot = limits.first_slot(page) as usize + (index % page_size) as usize;
                let taken = writers[slot] == pass;
                writers[slot] = pass;
                *out = if taken { 0 } else { slot as i64 };
            }
        }
    }
}
