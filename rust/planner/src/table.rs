//! Host mirror of the device's block table, so that only changed entries are transferred.
//!
//! A context keeps its row while it is found by its id, whatever its index in the batch. The id is a hint: a row's pages are
//! compared with those of the frame.

pub(crate) mod common_lengths;
pub(crate) mod slot_mapping;
pub(crate) mod updates;

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::limits::Limits;
use crate::table::common_lengths::CommonLengths;

/// Context id of requests that name none.
const ANONYMOUS: u64 = 0;

#[derive(Debug, Clone, Default)]
struct TableRow {
    context: u64,
    /// Pages in the device's row. Entries beyond a shorter list stay, for later reuse.
    pages: Vec<u32>,
    /// Number of the last frame that used the row.
    used: u64,
    /// Neighbours in the LRU list.
    older: usize,
    newer: usize,
}

/// The mirror: one row per request of a pass, reused least recently used first.
#[derive(Debug)]
pub(crate) struct BlockTable {
    /// One more than the table has: the last is the sentinel of the LRU list.
    rows: Vec<TableRow>,
    by_context: FxHashMap<u64, usize>,
    /// Rows of this frame's requests so far, then those of the last frame: the next request most likely has the row of its
    /// predecessor.
    order: Vec<usize>,
    /// `[row, matching entries]` of [`BlockTable::precompare`], for each request of this frame.
    expected: Vec<[u32; 2]>,
    /// Requests of this frame that have a row.
    taken: usize,
    frame: u64,
    /// Common prefixes of rows.
    common_lengths: CommonLengths,
}

impl BlockTable {
    pub(crate) fn new(limits: &Limits) -> Self {
        let count = limits.max_requests as usize;
        // Twice the size, so that tombstones are removed without reallocation.
        let by_context = FxHashMap::with_capacity_and_hasher(2 * count, FxBuildHasher);
        let rows = (0..=count).map(|row| TableRow {
            older: row.checked_sub(1).unwrap_or(count),
            newer: if row == count { 0 } else { row + 1 },
            ..TableRow::default()
        });
        Self {
            rows: rows.collect(),
            by_context,
            order: Vec::with_capacity(count),
            expected: Vec::new(),
            taken: 0,
            frame: 0,
            common_lengths: CommonLengths::new(count),
        }
    }

    /// Number of the current frame.
    pub(crate) const fn frame(&self) -> u64 {
        self.frame
    }

    /// Number of rows.
    fn len(&self) -> usize {
        self.rows.len() - 1
    }

    /// Starts a frame: every row is free.
    pub(crate) fn start_frame(&mut self) {
        self.frame += 1;
        self.taken = 0;
        self.expected.clear();
    }

    /// Compares the pages of the next request with the row that it will most likely get. The mirror is large and cold: read for
    /// all requests in a row, its cache misses overlap.
    pub(crate) fn precompare(&mut self, pages: &[u32]) {
        let next = self.order.get(self.expected.len());
        let row = next.copied().unwrap_or(self.len());
        let matching = common_prefix(&self.rows[row].pages, pages);
        self.expected.push([row as u32, matching as u32]);
    }

    /// A free row for the next request, if possible that of its context; `None` when all are used.
    pub(crate) fn find_row(&self, context: u64) -> Option<usize> {
        if self.taken >= self.len() {
            return None;
        }
        let free = |row: &TableRow| row.used != self.frame;
        let expected = self.order.get(self.taken).copied();
        let expected = expected.filter(|&row| {
            let row = &self.rows[row];
            row.context == context && free(row)
        });
        let named = || {
            let row = self.by_context.get(&context).copied();
            row.filter(|&row| free(&self.rows[row]))
        };
        // Rows of this frame are the newest, so the oldest is free.
        let oldest = || self.rows[self.len()].newer;
        Some(expected.or_else(named).unwrap_or_else(oldest))
    }

    /// Length of the common prefix of the row and `pages`.
    pub(crate) fn matching(&self, row: usize, pages: &[u32]) -> usize {
        common_prefix(&self.rows[row].pages, pages)
    }

    /// [`BlockTable::matching`] for a free row and the pages of request `index`.
    pub(crate) fn matching_free(&self, row: usize, index: usize, pages: &[u32]) -> usize {
        match self.expected.get(index) {
            Some(&[expected, matching]) if expected as usize == row => matching as usize,
            _ => self.matching(row, pages),
        }
    }

    /// Assigns `row` to the next request of the frame.
    pub(crate) fn assign(&mut self, row: usize, context: u64) {
        self.rows[row].used = self.frame;
        self.make_newest(row);
        self.set_context(row, context);
        match self.order.get_mut(self.taken) {
            Some(entry) => *entry = row,
            None => self.order.push(row),
        }
        self.taken += 1;
    }

    fn make_newest(&mut self, row: usize) {
        let TableRow { older, newer, .. } = self.rows[row];
        self.rows[older].newer = newer;
        self.rows[newer].older = older;
        let end = self.len();
        let newest = std::mem::replace(&mut self.rows[end].older, row);
        self.rows[newest].newer = row;
        (self.rows[row].older, self.rows[row].newer) = (newest, end);
    }

    /// A row for a request beyond the number of rows: that of the request `len()` before it, which is in an earlier pass. Update it
    /// when its pass is staged.
    pub(crate) fn share_row(&mut self) -> usize {
        let row = self.order[self.taken - self.len()];
        self.order.truncate(self.taken);
        self.order.push(row);
        self.taken += 1;
        row
    }

    /// Assigns `row` to `context`.
    fn set_context(&mut self, row: usize, context: u64) {
        let old = std::mem::replace(&mut self.rows[row].context, context);
        if old == context {
            return;
        }
        if self.by_context.get(&old) == Some(&row) {
            self.by_context.remove(&old);
        }
        if context != ANONYMOUS {
            self.by_context.insert(context, row);
        }
    }

    /// Sets `row` to `pages`, of which the first `matching` are equal already, and reports each changed `(column, page)`.
    pub(crate) fn update(
        &mut self,
        row: usize,
        pages: &[u32],
        matching: usize,
        mut changed: impl FnMut(usize, u32),
    ) {
        let mirror = &mut self.rows[row].pages;
        let mut same = pages.len();
        for (column, &page) in pages.iter().enumerate().skip(matching) {
            match mirror.get_mut(column) {
                Some(entry) if *entry == page => continue,
                Some(entry) => *entry = page,
                None => mirror.push(page),
            }
            same = same.min(column);
            changed(column, page);
        }
        if same < pages.len() {
            self.common_lengths.cut(row, same);
        }
    }

    /// Length of the common prefix of two rows, up to `count` entries. Known common entries are skipped.
    pub(crate) fn common_pages(&mut self, earlier: usize, later: usize, count: usize) -> usize {
        let [a, b] = [earlier, later].map(|row| &self.rows[row].pages[..count]);
        self.common_lengths.common(earlier, later, |start| {
            let start = start.min(count);
            start + common_prefix(&a[start..], &b[start..])
        })
    }

    /// The pages of a row; its request may have fewer.
    pub(crate) fn pages(&self, row: usize) -> &[u32] {
        &self.rows[row].pages
    }

    /// Clears the mirror: after a failed pass the device's table is unknown.
    pub(crate) fn invalidate(&mut self) {
        self.rows.iter_mut().for_each(|row| row.pages.clear());
        self.common_lengths.clear();
    }
}

/// Length of the common prefix of two lists.
pub(crate) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    // Block comparison is vectorized; the block that differs is in the cache when it is read again.
    const LARGE: usize = 1024;
    const SMALL: usize = 64;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut common = 0;
    for block in [LARGE, SMALL] {
        while common < len {
            let end = len.min(common + block);
            if a[common..end] != b[common..end] {
                break;
            }
            common = end;
        }
        if common == len {
            return len;
        }
    }
    let entries = a[common..].iter().zip(&b[common..]);
    common + entries.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROWS: usize = 4;

    fn table() -> BlockTable {
        let limits = Limits {
            page_size: 1,
            total_pages: 1,
            vocab_size: 1,
            max_positions: 1,
            row_pages: 12,
            max_requests: ROWS as u32,
            chunk_tokens: 1,
            max_slots: 1,
            reply_bytes: 1 << 12,
        };
        BlockTable::new(&limits)
    }

    /// One frame of `(context, pages)`; returns the row of each and the number of updates.
    fn frame(table: &mut BlockTable, requests: &[(u64, Vec<u32>)]) -> (Vec<usize>, usize) {
        table.start_frame();
        for (_, pages) in requests {
            table.precompare(pages);
        }
        let mut rows = Vec::new();
        let mut updates = 0;
        for (index, (context, pages)) in requests.iter().enumerate() {
            let row = table
                .find_row(*context)
                .unwrap_or_else(|| panic!("{rows:?} leave a row"));
            let matching = table.matching_free(row, index, pages);
            table.assign(row, *context);
            table.update(row, pages, matching, |_, _| updates += 1);
            rows.push(row);
        }
        (rows, updates)
    }

    #[test]
    fn contexts_keep_their_rows_when_their_order_changes() {
        let mut table = table();
        let context = |id: u64| (id, vec![id as u32; 5]);
        let (before, updates) = frame(&mut table, &[context(7), context(8), context(9)]);
        assert_eq!(updates, 15);
        let (after, updates) = frame(&mut table, &[context(9), context(7)]);
        assert_eq!((after, updates), (vec![before[2], before[0]], 0));
        // A new context takes the row that was never used, not that of the context which only paused.
        let (all, updates) = frame(
            &mut table,
            &[context(5), context(8), context(9), context(7)],
        );
        assert_eq!(all[1..], [before[1], before[2], before[0]]);
        assert_eq!(updates, 5);
    }

    #[test]
    fn the_longest_unused_row_is_taken_first() {
        let mut table = table();
        let context = |id: u64| (id, vec![id as u32]);
        frame(&mut table, &[1, 2, 3, 4].map(context));
        let (rows, _) = frame(&mut table, &[1, 2, 4].map(context));
        let three = (0..ROWS).find(|row| !rows.contains(row));
        frame(&mut table, &[1, 2, 4].map(context));
        let (newcomer, _) = frame(&mut table, &[5].map(context));
        assert_eq!(Some(newcomer[0]), three, "{rows:?}");
    }

    #[test]
    fn a_context_that_stands_twice_has_two_rows() {
        let mut table = table();
        let (rows, _) = frame(&mut table, &[(3, vec![1, 2]), (3, vec![1, 5])]);
        assert_ne!(rows[0], rows[1]);
        let (again, updates) = frame(&mut table, &[(3, vec![1, 2]), (3, vec![1, 5])]);
        assert_eq!((again, updates), (rows, 0));
    }

    #[test]
    fn requests_without_a_context_keep_their_rows() {
        let mut table = table();
        let pages = |first| (ANONYMOUS, vec![first, 4, 4]);
        let (rows, _) = frame(&mut table, &[pages(1), pages(2), pages(3)]);
        let (again, updates) = frame(&mut table, &[pages(1), pages(2), pages(9)]);
        assert_eq!((again, updates), (rows, 1));
    }

    #[test]
    fn prefixes() {
        for (length, differs) in [
            (0, 0),
            (3, 1),
            (64, 63),
            (64, 64),
            (65, 64),
            (200, 128),
            (200, 199),
            (3000, 1023),
            (3000, 1024),
            (3000, 2047),
            (3000, 2999),
        ] {
            let a: Vec<u32> = (0..length).collect();
            let mut b = a.clone();
            b.extend([7; 3]);
            assert_eq!(common_prefix(&a, &b), length as usize);
            if let Some(entry) = b.get_mut(differs).filter(|_| differs < length as usize) {
                *entry ^= 1;
                assert_eq!(common_prefix(&a, &b), differs);
                assert_eq!(common_prefix(&b, &a), differs);
            }
        }
    }

    proptest! {
        /// A device that only ever sees the reported changes names the right pages for every request of every frame,
        /// with a row of its own for each, and nothing travels twice.
        #[test]
        fn changes_alone_keep_the_device_true(
            frames in proptest::collection::vec(
                (proptest::collection::vec((0_u64..7, proptest::collection::vec(0_u32..3, 0..12)), 0..=ROWS), any::<bool>()), 1..40),
        ) {
            let mut table = table();
            let mut device = vec![vec![u32::MAX; 12]; ROWS];
            for (requests, lost) in frames {
                if lost {
                    table.invalidate();
                    device = vec![vec![u32::MAX; 12]; ROWS];
                }
                table.start_frame();
                for (_, pages) in &requests {
                    table.precompare(pages);
                }
                let mut used = Vec::new();
                for (index, (context, pages)) in requests.iter().enumerate() {
                    let row = table.find_row(*context).expect("no more requests than rows");
                    let matching = table.matching_free(row, index, pages);
                    prop_assert_eq!(matching, table.matching(row, pages));
                    table.assign(row, *context);
                    table.update(row, pages, matching, |column, page| {
                        assert_ne!(device[row][column], page);
                        device[row][column] = page;
                    });
                    prop_assert_eq!(&table.pages(row)[..pages.len()], &pages[..]);
                    prop_assert!(!used.contains(&row));
                    used.push(row);
                }
                for (row, (_, pages)) in used.iter().zip(&requests) {
                    prop_assert_eq!(&device[*row][..pages.len()], &pages[..]);
                }
                // What is remembered of former frames is true in this one.
                let lists = used.iter().zip(&requests).map(|(&row, (_, pages))| (row, pages));
                for ((a, pages), (b, others)) in lists.clone().zip(lists.skip(1)) {
                    let most = pages.len().min(others.len());
                    let common = common_prefix(pages, others);
                    prop_assert_eq!(table.common_pages(a, b, most), common);
                    prop_assert_eq!(table.common_pages(a, b, most / 2), common.min(most / 2));
                }
                prop_assert_eq!(table.find_row(1).is_none(), requests.len() == ROWS);
            }
        }
    }
}
