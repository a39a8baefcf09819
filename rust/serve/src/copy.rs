//! An open copy of pages.

use pie_ring::Lease;

use crate::note::Note;

/// A copy of whole KV pages within the device pool, pair by pair. Dropped without a commit it is
/// answered by an abort.
pub struct Copy {
    lease: Option<Lease>,
    driver_id: u32,
    sources: Vec<u32>,
    targets: Vec<u32>,
}

impl Copy {
    pub(crate) const fn new(
        lease: Lease,
        driver_id: u32,
        sources: Vec<u32>,
        targets: Vec<u32>,
    ) -> Self {
        Self {
            lease: Some(lease),
            driver_id,
            sources,
            targets,
        }
    }

    /// Pages to read.
    #[must_use]
    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    /// Pages to write, as many as sources.
    #[must_use]
    pub fn targets(&self) -> &[u32] {
        &self.targets
    }

    /// Answers with a code of [`crate::status`], once.
    pub fn commit(&mut self, code: i32) -> Option<Note> {
        answer(self.lease.take()?, self.driver_id, code)
    }
}

/// Publishes a status frame.
pub(crate) fn answer(lease: Lease, driver_id: u32, code: i32) -> Option<Note> {
    Note::of_publication(lease.reply(&pie_wire::status_frame(driver_id, code, false)))
}
