//! A hierarchical bitmap: a set of small numbers with O(levels) access to the smallest.

const BITS: usize = u64::BITS as usize;

/// Bit `i` of a level says whether word `i` of the level below has a bit; the last level is one word.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    levels: Vec<Vec<u64>>,
}

impl Bitmap {
    /// The set of all numbers below `len`.
    pub(crate) fn full(len: usize) -> Self {
        let mut levels = Vec::new();
        let mut bits = len;
        loop {
            let mut words = vec![u64::MAX; bits / BITS];
            if !bits.is_multiple_of(BITS) {
                words.push((1 << (bits % BITS)) - 1);
            }
            bits = words.len();
            levels.push(words);
            if bits <= 1 {
                return Self { levels };
            }
        }
    }

    /// Removes and returns the smallest number.
    pub(crate) fn take_least(&mut self) -> Option<usize> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = *level.get(at)?;
            if word == 0 {
                return None;
            }
            at = at * BITS + word.trailing_zeros() as usize;
        }
        let mut rest = at;
        for level in &mut self.levels {
            let word = &mut level[rest / BITS];
            *word &= !(1 << (rest % BITS));
            if *word != 0 {
                break;
            }
            rest /= BITS;
        }
        Some(at)
    }

    /// Inserts a number.
    pub(crate) fn put(&mut self, number: usize) {
        let mut at = number;
        for level in &mut self.levels {
            let word = &mut level[at / BITS];
            let had_none = *word == 0;
            *word |= 1 << (at % BITS);
            if !had_none {
                break;
            }
            at /= BITS;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Bitmap;

    proptest! {
        #[test]
        fn equals_a_sorted_set(len in 0_usize..9000, steps in prop::collection::vec(any::<(bool, usize)>(), 0..400)) {
            let (mut bitmap, mut set) = (Bitmap::full(len), (0..len).collect::<BTreeSet<_>>());
            let mut taken = Vec::new();
            for (takes, choice) in steps {
                if takes || taken.is_empty() {
                    let least = bitmap.take_least();
                    prop_assert_eq!(least, set.pop_first());
                    taken.extend(least);
                } else {
                    let number = taken.swap_remove(choice % taken.len());
                    bitmap.put(number);
                    set.insert(number);
                }
            }
            while let Some(least) = set.pop_first() {
                prop_assert_eq!(bitmap.take_least(), Some(least));
            }
            prop_assert_eq!(bitmap.take_least(), None);
        }
    }
}
