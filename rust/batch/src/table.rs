//! The host's mirror of the device's block table: only entries that differ travel.

use crate::Limits;

/// For each row, the pages that the device's row names.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    rows: Vec<Vec<u32>>,
}

impl BlockTable {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            rows: vec![Vec::new(); limits.max_requests as usize],
        }
    }

    /// Makes `row` name `pages` and reports each `(column, page)` that changed.
    pub(crate) fn update(
        &mut self,
        row: usize,
        pages: &[u32],
        mut changed: impl FnMut(usize, u32),
    ) {
        let mirror = &mut self.rows[row];
        let same = common_prefix(mirror, pages);
        for (column, &page) in pages.iter().enumerate().skip(same) {
            if mirror.get(column) != Some(&page) {
                changed(column, page);
            }
        }
        // Entries behind `pages` are still on the device: keep them, they may be right again later.
        let kept = mirror.len().min(pages.len());
        mirror[same..kept].copy_from_slice(&pages[same..kept]);
        mirror.extend_from_slice(&pages[kept..]);
    }

    /// Forgets what the device holds: after a failed pass its state is unknown.
    pub(crate) fn forget(&mut self) {
        self.rows.iter_mut().for_each(Vec::clear);
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A device that only ever sees the reported changes names the right pages after every update.
        #[test]
        fn changes_alone_keep_the_device_true(
            updates in proptest::collection::vec((0_usize..3, proptest::collection::vec(0_u32..6, 0..12), any::<bool>()), 1..40),
        ) {
            let mut mirror = BlockTable { rows: vec![Vec::new(); 3] };
            let mut device = vec![vec![u32::MAX; 12]; 3];
            for (row, pages, lost) in updates {
                if lost {
                    mirror.forget();
                    device[row].fill(u32::MAX);
                }
                mirror.update(row, &pages, |column, page| device[row][column] = page);
                prop_assert_eq!(&device[row][..pages.len()], &pages[..]);
                let mut again = 0;
                mirror.update(row, &pages, |_, _| again += 1);
                prop_assert_eq!(again, 0);
            }
        }
    }
}
