//! How many pages two rows of the block table have in common, from the first on, remembered from step to step.
//!
//! Requests that share a prefix share it for long, and a prefix may have thousands of pages. Of each pair of rows that was
//! compared the common length is kept, and cut where one of them changes; the next comparison goes on from there.

/// A row's partners: each row is the later one of at most one pair, and the earlier one of at most one.
#[derive(Debug, Clone, Copy)]
struct Partners {
    /// The row that this one was compared with as the later of the two.
    earlier: usize,
    /// The row that this one was compared with as the earlier of the two.
    later: usize,
    /// Entries that this row and `earlier` certainly have in common, if that row's `later` is this one.
    common: usize,
}

const NONE: usize = usize::MAX;

/// The pairs of a table's rows.
#[derive(Debug)]
pub(crate) struct Pairs(Box<[Partners]>);

impl Pairs {
    pub(crate) fn new(rows: usize) -> Self {
        let none = Partners {
            earlier: NONE,
            later: NONE,
            common: 0,
        };
        Self(vec![none; rows].into())
    }

    /// Where a comparison of the two may begin: they agree on all entries before. It becomes what `compare` makes of that.
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
        // A shorter list may have been asked for, and what is known beyond it stays true.
        self.0[later].common = common.max(start);
        common
    }

    /// Notes that a row's entries may have changed from `column` on.
    pub(crate) fn cut(&mut self, row: usize, column: usize) {
        let own = &mut self.0[row];
        own.common = own.common.min(column);
        // Another row may have taken this one's place in the pair, and knows less then.
        if let Some(later) = self.0.get_mut(self.0[row].later) {
            later.common = later.common.min(column);
        }
    }

    /// Forgets all that is known.
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
            let mut pairs = Pairs::new(5);
            let mut rows = vec![[0_u32; 30]; 5];
            for act in acts {
                match act {
                    Act::Compare(earlier, later, most) => {
                        let (a, b) = (&rows[earlier][..most], &rows[later][..most]);
                        let common = pairs.common(earlier, later, |start| {
                            let start = start.min(most);
                            start + common_prefix(&a[start..], &b[start..])
                        });
                        prop_assert_eq!(common, common_prefix(a, b));
                    }
                    Act::Write(row, column, pages) => {
                        rows[row][column..column + pages.len()].copy_from_slice(&pages);
                        pairs.cut(row, column);
                    }
                    Act::Clear => pairs.clear(),
                }
            }
        }
    }

    #[test]
    fn what_has_been_compared_is_not_compared_again() {
        let mut pairs = Pairs::new(3);
        let start = |pairs: &mut Pairs, rows: [usize; 2], common| {
            let mut begun = 0;
            pairs.common(rows[0], rows[1], |start| {
                begun = start;
                common
            });
            begun
        };
        assert_eq!(start(&mut pairs, [0, 1], 100), 0);
        assert_eq!(start(&mut pairs, [1, 2], 70), 0);
        assert_eq!(start(&mut pairs, [0, 1], 101), 100);
        pairs.cut(1, 80);
        assert_eq!(start(&mut pairs, [0, 1], 90), 80);
        assert_eq!(start(&mut pairs, [1, 2], 70), 70);
        pairs.cut(1, 5);
        assert_eq!(start(&mut pairs, [1, 2], 5), 5);
        // Another pair of a row is begun anew.
        assert_eq!(start(&mut pairs, [0, 2], 9), 0);
        assert_eq!(start(&mut pairs, [0, 1], 9), 0);
    }
}
