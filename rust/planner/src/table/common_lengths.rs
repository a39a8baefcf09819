//! Memoized common prefix lengths of block-table rows.
//!
//! Shared prefixes have up to thousands of pages and last for many steps. The common length of each compared pair is kept,
//! shortened when a row changes, and the next comparison continues from there.

/// The pairs of a row: it is the later row of at most one pair, and the earlier row of at most one.
#[derive(Debug, Clone, Copy)]
struct RowPair {
    /// The earlier row that this one was compared with.
    earlier: usize,
    /// The later row that this one was compared with.
    later: usize,
    /// Common entries with `earlier`, valid if that row's `later` is this one.
    common: usize,
}

const NONE: usize = usize::MAX;

/// Common prefix lengths of pairs of rows.
#[derive(Debug)]
pub(crate) struct CommonLengths(Box<[RowPair]>);

impl CommonLengths {
    pub(crate) fn new(rows: usize) -> Self {
        let none = RowPair {
            earlier: NONE,
            later: NONE,
            common: 0,
        };
        Self(vec![none; rows].into())
    }

    /// Common prefix length of two rows; `compare` continues from the length that is known.
    pub(crate) fn common(
        &mut self,
        earlier: usize,
        later: usize,
        compare: impl FnOnce(usize) -> usize,
    ) -> usize {
        let known = self.0[later];
        let start = if known.earlier == earlier && self.0[earlier].later == later {
            known.common
        } else {
            0
        };
        let common = compare(start);
        self.0[earlier].later = later;
        self.0[later].earlier = earlier;
        // The comparison may have been limited to a shorter list.
        self.0[later].common = common.max(start);
        common
    }

    /// Shortens what is known of a row whose entries changed from `column` on.
    pub(crate) fn cut(&mut self, row: usize, column: usize) {
        let own = &mut self.0[row];
        own.common = own.common.min(column);
        // The later row may be in another pair by now; then this only shortens its length.
        if let Some(later) = self.0.get_mut(self.0[row].later) {
            later.common = later.common.min(column);
        }
    }

    /// Forgets all lengths.
    pub(crate) fn clear(&mut self) {
        self.0.iter_mut().for_each(|row| row.common = 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::table::common_prefix;

    #[derive(Debug, Clone)]
    enum Act {
        /// Compares the first entries of two rows.
        Compare(usize, usize, usize),
        /// Writes entries of a row from a column on.
        Write(usize, usize, Vec<u32>),
        Clear,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            6 => (0..5_usize, 0..5_usize, 0..30_usize).prop_map(|(a, b, n)| Act::Compare(a, b, n)),
            4 => (0..5_usize, 0..25_usize, vec(0..2_u32, 0..5)).prop_map(|(r, c, p)| Act::Write(r, c, p)),
            1 => Just(Act::Clear),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Whatever is written and compared when, it is as if everything were compared.
        #[test]
        fn what_is_remembered_is_true(acts in vec(act(), 1..80)) {
            let mut lengths = CommonLengths::new(5);
            let mut rows = vec![[0_u32; 30]; 5];
            for act in acts {
                match act {
                    Act::Compare(earlier, later, most) => {
                        let (a, b) = (&rows[earlier][..most], &rows[later][..most]);
                        let common = lengths.common(earlier, later, |start| {
                            let start = start.min(most);
                            start + common_prefix(&a[start..], &b[start..])
                        });
                        prop_assert_eq!(common, common_prefix(a, b));
                    }
                    Act::Write(row, column, pages) => {
                        rows[row][column..column + pages.len()].copy_from_slice(&pages);
                        lengths.cut(row, column);
                    }
                    Act::Clear => lengths.clear(),
                }
            }
        }
    }

    #[test]
    fn what_has_been_compared_is_not_compared_again() {
        let mut lengths = CommonLengths::new(3);
        let start = |lengths: &mut CommonLengths, rows: [usize; 2], common| {
            let mut begun = 0;
            lengths.common(rows[0], rows[1], |start| {
                begun = start;
                common
            });
            begun
        };
        assert_eq!(start(&mut lengths, [0, 1], 100), 0);
        assert_eq!(start(&mut lengths, [1, 2], 70), 0);
        assert_eq!(start(&mut lengths, [0, 1], 101), 100);
        lengths.cut(1, 80);
        assert_eq!(start(&mut lengths, [0, 1], 90), 80);
        assert_eq!(start(&mut lengths, [1, 2], 70), 70);
        lengths.cut(1, 5);
        assert_eq!(start(&mut lengths, [1, 2], 5), 5);
        // Another pair of a row is begun anew.
        assert_eq!(start(&mut lengths, [0, 2], 9), 0);
        assert_eq!(start(&mut lengths, [0, 1], 9), 0);
    }
}
