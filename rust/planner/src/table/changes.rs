//! The rows of the block table that a frame's requests get, and what changes there.

use crate::extent::Extent;
use crate::fault::RequestFault;
use crate::frame::check::check_pages;
use crate::limits::Limits;
use crate::table::BlockTable;

/// Where a request stands in the block table.
#[derive(Debug, Clone, Default)]
pub(crate) struct TablePlace {
    /// Its changes in [`TableChanges::updates`].
    updates: Extent,
    /// Its pages in [`TableChanges::spilled`]: of a request that takes over a row in the middle of the frame.
    spilled: Extent,
    row: u32,
    first_page: u32,
}

impl TablePlace {
    /// Row of the table.
    pub(crate) const fn row(&self) -> usize {
        self.row as usize
    }

    /// The first of the request's pages.
    pub(crate) const fn first_page(&self) -> u32 {
        self.first_page
    }

    pub(crate) const fn updates(&self) -> Extent {
        self.updates
    }
}

/// The changes of a frame.
#[derive(Debug, Default)]
pub(crate) struct TableChanges {
    /// Index of each changed entry and first storage slot of the page that it now names.
    updates: Vec<[i64; 2]>,
    spilled: Vec<u32>,
}

impl TableChanges {
    pub(crate) fn clear(&mut self) {
        self.updates.clear();
        self.spilled.clear();
    }

    /// Changes that are known before any pass is staged: all, unless there are spilled pages.
    pub(crate) fn updates(&self) -> &[[i64; 2]] {
        &self.updates
    }

    /// Whether some requests take over rows in the middle of the frame.
    pub(crate) const fn spills(&self) -> bool {
        !self.spilled.is_empty()
    }

    /// The changed entries of a request that is staged now, spilled pages included.
    pub(crate) fn each(
        &self,
        place: &TablePlace,
        table: &mut BlockTable,
        limits: &Limits,
        mut put: impl FnMut([i64; 2]),
    ) {
        self.updates[place.updates.range()]
            .iter()
            .for_each(|&update| put(update));
        let pages = &self.spilled[place.spilled.range()];
        let matching = table.matching(place.row(), pages);
        table.update(place.row(), pages, matching, |column, page| {
            put(limits.table_update(place.row(), column, page));
        });
    }

    /// Finds the row of request `index`, checks its pages and notes which entries change.
    ///
    /// # Errors
    /// [`RequestFault::PageId`] for a page outside the pool; nothing changes then.
    pub(crate) fn add(
        &mut self,
        table: &mut BlockTable,
        limits: &Limits,
        (index, context, pages): (usize, u64, &[u32]),
        place: &mut TablePlace,
    ) -> Result<(), RequestFault> {
        place.first_page = pages.first().copied().unwrap_or(0);
        let Some(row) = table.find(context) else {
            check_pages(pages, limits)?;
            place.row = table.take_over() as u32;
            let first = self.spilled.len();
            self.spilled.extend_from_slice(pages);
            place.spilled = Extent::new(first, self.spilled.len());
            return Ok(());
        };
        // Entries that the mirror holds were checked when they came.
        let matching = table.matching_free(row, index, pages);
        check_pages(&pages[matching..], limits)?;
        table.take(row, context);
        let first = self.updates.len();
        let updates = &mut self.updates;
        table.update(row, pages, matching, |column, page| {
            updates.push(limits.table_update(row, column, page));
        });
        place.row = row as u32;
        place.updates = Extent::new(first, self.updates.len());
        Ok(())
    }
}
