//! Splits a list of page copies into batches without dependences.

use std::collections::HashSet;

/// Consecutive batches of the pairs. Within a batch no target is written twice, and no source was written before, so that all of
/// it can be copied in parallel.
///
/// `one_pool`: sources and targets count the same pages.
pub(crate) fn copy_batches<'a>(
    mut sources: &'a [u32],
    mut targets: &'a [u32],
    one_pool: bool,
) -> impl Iterator<Item = (&'a [u32], &'a [u32])> {
    std::iter::from_fn(move || {
        let length = independent(sources, targets, one_pool);
        let group = (&sources[..length], &targets[..length]);
        (sources, targets) = (&sources[length..], &targets[length..]);
        (length > 0).then_some(group)
    })
}

/// Length of the first batch.
fn independent(sources: &[u32], targets: &[u32], one_pool: bool) -> usize {
    let mut written = HashSet::new();
    sources
        .iter()
        .zip(targets)
        .take_while(|&(source, target)| {
            !(one_pool && written.contains(source)) && written.insert(target)
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::copy_batches;
    use proptest::prelude::*;

    const PAGES: u32 = 8;

    /// What the pages of both pools hold after the copies, pair by pair; the second pool is the first one if there is
    /// only one.
    fn one_by_one(pairs: &[(u32, u32)], one_pool: bool) -> Vec<u32> {
        let (mut pages, shift) = pools(one_pool);
        for &(source, target) in pairs {
            pages[target as usize + shift] = pages[source as usize];
        }
        pages
    }

    fn group_by_group(pairs: &[(u32, u32)], one_pool: bool) -> (Vec<u32>, Vec<usize>) {
        let (sources, targets): (Vec<u32>, Vec<u32>) = pairs.iter().copied().unzip();
        let (mut pages, shift) = pools(one_pool);
        let mut lengths = Vec::new();
        for (sources, targets) in copy_batches(&sources, &targets, one_pool) {
            let read: Vec<u32> = sources.iter().map(|&page| pages[page as usize]).collect();
            // In any order: no target is written twice.
            for (&target, value) in targets.iter().zip(read).rev() {
                pages[target as usize + shift] = value;
            }
            lengths.push(sources.len());
        }
        (pages, lengths)
    }

    fn pools(one_pool: bool) -> (Vec<u32>, usize) {
        let shift = if one_pool { 0 } else { PAGES };
        ((0..PAGES + shift).collect(), shift as usize)
    }

    proptest! {
        #[test]
        fn groups_give_the_result_of_single_copies(
            pairs in prop::collection::vec((0..PAGES, 0..PAGES), 0..24),
            one_pool: bool,
        ) {
            let (pages, lengths) = group_by_group(&pairs, one_pool);
            prop_assert_eq!(pages, one_by_one(&pairs, one_pool));
            prop_assert_eq!(lengths.iter().sum::<usize>(), pairs.len());
            // No cut without a reason: the first pair after it meets a target of the group.
            let mut start = 0;
            for length in lengths {
                let written: Vec<u32> = pairs[start..start + length].iter().map(|pair| pair.1).collect();
                start += length;
                if let Some((source, target)) = pairs.get(start) {
                    let meets = written.contains(target) || one_pool && written.contains(source);
                    prop_assert!(meets, "cut before {source} -> {target} without a reason");
                }
            }
        }
    }

    #[test]
    fn what_the_runtime_sends_is_one_group() {
        let (sources, targets): (Vec<u32>, Vec<u32>) =
            ((0..1000).collect(), (1000..2000).collect());
        assert_eq!(copy_batches(&sources, &targets, true).count(), 1);
        assert_eq!(copy_batches(&[], &[], true).count(), 0);
    }
}
