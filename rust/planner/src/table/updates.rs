//! Assigns block-table rows to the requests of a frame, and collects the changed entries.

use crate::error::RequestError;
use crate::frame::check::check_pages;
use crate::limits::Limits;
use crate::range32::Range32;
use crate::table::BlockTable;

/// The block-table row of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockTableRow {
    /// Its range of [`TableUpdates::updates`].
    updates: Range32,
    /// Its range of [`TableUpdates::spilled`], if it shares a row with an earlier request of the frame.
    spilled: Range32,
    index: u32,
    first_page: u32,
}

impl BlockTableRow {
    /// Index of the row.
    pub(crate) const fn index(&self) -> usize {
        self.index as usize
    }

    /// The first of the request's pages.
    pub(crate) const fn first_page(&self) -> u32 {
        self.first_page
    }

    pub(crate) const fn updates(&self) -> Range32 {
        self.updates
    }
}

/// The block-table updates of a frame.
#[derive(Debug, Default)]
pub(crate) struct TableUpdates {
    /// `[entry, first KV slot of its page]`.
    updates: Vec<[i64; 2]>,
    spilled: Vec<u32>,
}

impl TableUpdates {
    pub(crate) fn clear(&mut self) {
        self.updates.clear();
        self.spilled.clear();
    }

    /// Updates known before any pass is staged: all, unless requests share rows.
    pub(crate) fn updates(&self) -> &[[i64; 2]] {
        &self.updates
    }

    /// Whether some requests share rows.
    pub(crate) const fn spills(&self) -> bool {
        !self.spilled.is_empty()
    }

    /// The updates of a request that is staged now, spilled pages included.
    pub(crate) fn each(
        &self,
        table_row: &BlockTableRow,
        table: &mut BlockTable,
        limits: &Limits,
        mut put: impl FnMut([i64; 2]),
    ) {
        self.updates[table_row.updates.range()]
            .iter()
            .for_each(|&update| put(update));
        let pages = &self.spilled[table_row.spilled.range()];
        let matching = table.matching(table_row.index(), pages);
        table.update(table_row.index(), pages, matching, |column, page| {
            put(limits.table_update(table_row.index(), column, page));
        });
    }

    /// Assigns a row to request `index`, checks its pages and collects the updates.
    ///
    /// # Errors
    /// [`RequestError::PageId`] for a page outside the pool; nothing changes then.
    pub(crate) fn add(
        &mut self,
        table: &mut BlockTable,
        limits: &Limits,
        (index, context, pages): (usize, u64, &[u32]),
        table_row: &mut BlockTableRow,
    ) -> Result<(), RequestError> {
        table_row.first_page = pages.first().copied().unwrap_or(0);
        let Some(row) = table.find_row(context) else {
            check_pages(pages, limits)?;
            table_row.index = table.share_row() as u32;
            let first = self.spilled.len();
            self.spilled.extend_from_slice(pages);
            table_row.spilled = Range32::new(first, self.spilled.len());
            return Ok(());
        };
        // Entries of the mirror were checked before.
        let matching = table.matching_free(row, index, pages);
        check_pages(&pages[matching..], limits)?;
        table.assign(row, context);
        let first = self.updates.len();
        let updates = &mut self.updates;
        table.update(row, pages, matching, |column, page| {
            updates.push(limits.table_update(row, column, page));
        });
        table_row.index = row as u32;
        table_row.updates = Range32::new(first, self.updates.len());
        Ok(())
    }
}
