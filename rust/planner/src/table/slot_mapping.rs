//! Slot mapping: the KV slot of each query token.

use crate::frame::request::{PlannedRequest, Segment};
use crate::limits::Limits;
use crate::table::BlockTable;

/// Assigns a KV slot to each token of a pass. If two tokens map to one slot, the later one keeps it.
#[derive(Debug)]
pub(crate) struct SlotMapping {
    /// Last pass that wrote each KV slot.
    writers: Vec<u32>,
    pass: u32,
}

impl SlotMapping {
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

    /// Writes the slot mapping of a pass, last token first. Overwritten tokens and requests without KV writes get slot 0, the
    /// padding page.
    pub(crate) fn write(
        &mut self,
        limits: &Limits,
        table: &BlockTable,
        segments: &[Segment],
        requests: &[PlannedRequest],
        out: &mut [i64],
    ) {
        let pass = self.number_pass();
        let writers = &mut self.writers[..];
        let base = segments[0].start();
        let page_size = limits.page_size;
        for segment in segments.iter().rev() {
            let request = &requests[segment.request()];
            let pages = table.pages(request.table_row().index());
            let prefix = segment.kv_start(request);
            let out = &mut out[segment.start() - base..][..segment.len()];
            if request.skips_kv_write() {
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
