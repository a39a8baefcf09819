//! Shared-prefix groups (cascade attention): sequences whose KV begins with the same pages, which attention reads once.
//!
//! Sequences with the same first page form a bucket, in the order of the step. Neighbours are compared page by page, and each
//! bucket is partitioned into the groups that save most.

use std::ops::Range;

/// Largest tile of the attention kernel, in tokens; shared prefixes are multiples of it.
const PREFIX_STEP: usize = 128;

/// Cost of a query token in a group, in tokens of KV read: measured break-even, because tokens outside of groups find most of
/// the shared KV in the L2 cache (`benches/notebook/gpu.md`). Tokens of one request share its KV anyway.
pub(crate) const ROW_COST: i64 = 512;

/// Bits of the filter for repeated first pages.
const FILTER_BITS: usize = 1 << 16;

/// The KV that the query tokens of one request read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    /// Its first page.
    pub(crate) first_page: u32,
    /// Its block-table row.
    pub(crate) table_row: usize,
    /// KV index of its first query token.
    pub(crate) kv_start: usize,
    /// Query tokens in the pass.
    pub(crate) rows: usize,
}

impl Sequence {
    /// Its first page, if it is full.
    fn first_page(&self, page_size: usize) -> Option<u32> {
        (self.kv_start >= page_size).then_some(self.first_page)
    }

    /// Number of full pages before its first query token.
    fn full_pages(&self, page_size: usize) -> usize {
        self.kv_start / page_size
    }
}

/// A sequence that may share its first page. Ordered by that page, then by index in the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    first_page: u32,
    index: u32,
}

/// A shared-prefix group: at least two sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    /// In [`PrefixGroups::members`].
    members: Range<usize>,
    /// Length of the shared prefix, in tokens.
    shared: usize,
}

/// The shared-prefix groups of one step; buffers are reused.
#[derive(Debug)]
pub(crate) struct PrefixGroups {
    /// Bit set of first pages, by their low bits.
    seen: Box<[u64; FILTER_BITS / 64]>,
    members: Vec<Member>,
    groups: Vec<Group>,
    /// KV reads saved, in tokens.
    saved: i64,
    partition: Partition,
}

impl Default for PrefixGroups {
    fn default() -> Self {
        Self {
            seen: Box::new([0; FILTER_BITS / 64]),
            members: Vec::new(),
            groups: Vec::new(),
            saved: 0,
            partition: Partition::default(),
        }
    }
}

impl PrefixGroups {
    /// Forgets the groups.
    pub(crate) fn clear(&mut self) {
        self.groups.clear();
        self.saved = 0;
    }

    /// Tokens of KV reads that the groups save, less their cost; positive if there are groups.
    pub(crate) const fn saved(&self) -> i64 {
        self.saved
    }

    /// Groups the sequences `0..count` of a step. `common(rows, max)` returns the number of common first pages of two table rows.
    pub(crate) fn find(
        &mut self,
        count: usize,
        page_size: usize,
        sequence: impl Fn(usize) -> Sequence,
        mut common: impl FnMut([usize; 2], usize) -> usize,
    ) {
        self.clear();
        let first_pages = || {
            let page = |index| sequence(index).first_page(page_size);
            (0..count).filter_map(move |index| Some((page(index)?, index)))
        };
        if !self.repeat(first_pages().map(|(page, _)| page)) {
            return;
        }
        self.members.clear();
        let member = |(first_page, index)| Member {
            first_page,
            index: index as u32,
        };
        self.members.extend(first_pages().map(member));
        self.members.sort_unstable();
        let mut first = 0;
        for bucket in self.members.chunk_by(|a, b| a.first_page == b.first_page) {
            if bucket.len() > 1 {
                let own = bucket.iter().map(|member| sequence(member.index as usize));
                self.partition.compare(own, page_size, &mut common);
                self.partition.solve();
                self.groups.extend(self.partition.groups(first));
                self.saved += self.partition.saved[0];
            }
            first += bucket.len();
        }
    }

    /// The sequences of each group, in the order of the step, and the length of their shared prefix.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (impl Iterator<Item = usize>, usize)> {
        self.groups.iter().map(|group| {
            let members = &self.members[group.members.clone()];
            (
                members.iter().map(|member| member.index as usize),
                group.shared,
            )
        })
    }

    /// Whether two of the pages may be equal; false positives are possible.
    fn repeat(&mut self, pages: impl Iterator<Item = u32>) -> bool {
        self.seen.fill(0);
        let mut repeated = 0;
        for page in pages {
            let bit = page as usize % FILTER_BITS;
            let (word, bit) = (&mut self.seen[bit / 64], 1 << (bit % 64));
            repeated |= *word & bit;
            *word |= bit;
        }
        repeated != 0
    }
}

/// A possible end of a group that begins with a certain member.
#[derive(Debug, Clone, Copy)]
struct End {
    /// Length of the shared prefix.
    shared: i64,
    /// The end with this length that saves most.
    member: usize,
}

/// Partition of a bucket into groups, which are intervals of members: dynamic programming from the last member to the first.
#[derive(Debug, Default)]
struct Partition {
    /// Shared prefix of each member and the next, rounded down to [`PREFIX_STEP`].
    shared: Vec<i64>,
    /// Prefix sums of query tokens.
    rows_before: Vec<i64>,
    /// Best savings of each suffix of members.
    saved: Vec<i64>,
    /// `(end, shared prefix)` of the group that begins with each member; 0 tokens = no group.
    begun: Vec<(usize, i64)>,
    /// Stack of ends; the nearest, which share most, are last.
    ends: Vec<End>,
}

impl Partition {
    /// Loads a bucket.
    fn compare(
        &mut self,
        bucket: impl Iterator<Item = Sequence>,
        page_size: usize,
        mut common: impl FnMut([usize; 2], usize) -> usize,
    ) {
        self.shared.clear();
        self.rows_before.clear();
        let (mut rows, mut previous) = (0, None);
        for sequence in bucket {
            if let Some(previous) = previous.replace(sequence) {
                let most = [previous, sequence].map(|sequence| sequence.full_pages(page_size));
                let rows = [previous, sequence].map(|sequence| sequence.table_row);
                let tokens = common(rows, most[0].min(most[1])) * page_size;
                self.shared.push((tokens - tokens % PREFIX_STEP) as i64);
            }
            self.rows_before.push(rows);
            rows += sequence.rows as i64;
        }
        self.rows_before.push(rows);
    }

    /// Finds the groups. There is one [`End`] per distinct shared length.
    fn solve(&mut self) {
        let members = self.shared.len() + 1;
        self.ends.clear();
        self.saved.clear();
        self.saved.resize(members + 1, 0);
        self.begun.clear();
        self.begun.resize(members, (members, 0));
        for first in (0..members - 1).rev() {
            self.add_end(first);
            let none = (self.saved[first + 1], (first + 1, 0));
            let mut most = none;
            for &End { shared, member } in &self.ends {
                let rows = self.rows_before[member] - self.rows_before[first];
                let own = (member - first - 1) as i64 * shared - rows * ROW_COST;
                let saved = own + self.saved[member];
                if saved > most.0 {
                    most = (saved, (member, shared));
                }
            }
            (self.saved[first], self.begun[first]) = most;
        }
    }

    /// Adds the end after `first` and the next member, which bounds the shared length of all longer groups.
    fn add_end(&mut self, first: usize) {
        let (shared, nearest) = (self.shared[first], first + 2);
        // With a shorter shared prefix nearer ends may be better, farther ones never.
        let mut farthest = nearest;
        while let Some(end) = self.ends.pop_if(|end| end.shared > shared) {
            farthest = end.member;
        }
        // Savings of an end, up to a common constant.
        let worth =
            |&end: &usize| self.saved[end] + end as i64 * shared - self.rows_before[end] * ROW_COST;
        let member = (nearest..=farthest).max_by_key(worth).unwrap_or(nearest);
        match self.ends.last_mut() {
            Some(end) if end.shared == shared => {
                end.member = std::cmp::max_by_key(member, end.member, worth);
            }
            _ => self.ends.push(End { shared, member }),
        }
    }

    /// The groups, in order, of a bucket whose first member is number `base`.
    fn groups(&self, base: usize) -> impl Iterator<Item = Group> {
        let mut member = 0;
        let steps = std::iter::from_fn(move || {
            let &(end, shared) = self.begun.get(member)?;
            let members = base + member..base + end;
            member = end;
            Some(Group {
                members,
                shared: shared as usize,
            })
        });
        steps.filter(|group| group.shared > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::common_prefix;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A request with its own list of pages.
    #[derive(Debug, Clone)]
    struct Owned {
        pages: Vec<u32>,
        kv_start: usize,
        rows: usize,
    }

    fn find(
        groups: &mut PrefixGroups,
        page_size: usize,
        step: &[Owned],
    ) -> Vec<(Vec<usize>, usize)> {
        let sequence = |index: usize| {
            let request = &step[index];
            Sequence {
                first_page: request.pages.first().copied().unwrap_or(0),
                table_row: index,
                kv_start: request.kv_start,
                rows: request.rows,
            }
        };
        let common = |rows: [usize; 2], most| {
            let [a, b] = rows.map(|row| &step[row].pages[..most]);
            common_prefix(a, b)
        };
        groups.find(step.len(), page_size, sequence, common);
        let groups = groups.groups();
        groups
            .map(|(members, shared)| (members.collect(), shared))
            .collect()
    }

    /// The pages that are full before the request's rows.
    fn full(page_size: usize, request: &Owned) -> &[u32] {
        &request.pages[..request.kv_start / page_size]
    }

    /// Tokens of the full pages that all requests begin with.
    fn common_tokens(page_size: usize, requests: &[&Owned]) -> usize {
        let first = full(page_size, requests[0]);
        let in_all = |index: usize| {
            let mut pages = requests.iter().map(|r| full(page_size, r).get(index));
            pages.all(|page| page == first.get(index))
        };
        (0..first.len()).take_while(|&index| in_all(index)).count() * page_size
    }

    fn value(page_size: usize, requests: &[&Owned]) -> i64 {
        let rows: usize = requests.iter().map(|request| request.rows).sum();
        let shared = common_tokens(page_size, requests) / PREFIX_STEP * PREFIX_STEP;
        (requests.len() as i64 - 1) * shared as i64 - rows as i64 * ROW_COST
    }

    /// The most that any set of disjoint intervals saves.
    fn most(page_size: usize, requests: &[&Owned]) -> i64 {
        let Some((_, others)) = requests.split_first() else {
            return 0;
        };
        let begun = (2..=requests.len()).map(|end| {
            let (group, rest) = requests.split_at(end);
            value(page_size, group) + most(page_size, rest)
        });
        begun.chain([most(page_size, others)]).max().unwrap_or(0)
    }

    /// The buckets of a step.
    fn buckets(page_size: usize, step: &[Owned]) -> Vec<Vec<&Owned>> {
        let mut buckets: Vec<Vec<&Owned>> = Vec::new();
        for request in step.iter().filter(|request| request.kv_start >= page_size) {
            match buckets
                .iter_mut()
                .find(|b| b[0].pages[0] == request.pages[0])
            {
                Some(bucket) => bucket.push(request),
                None => buckets.push(vec![request]),
            }
        }
        buckets
    }

    /// Contexts that fork from earlier ones: each keeps some pages of one and adds some of its own.
    fn step() -> impl Strategy<Value = (usize, Vec<Owned>)> {
        let page_size = prop_oneof![Just(1_usize), Just(16), Just(64), Just(100), Just(256)];
        let fork = (
            any::<u32>(),
            0_usize..2600,
            0_usize..600,
            0_usize..300,
            1_usize..5,
        );
        let requests = (page_size, vec(fork, 0..11));
        requests.prop_map(|(page_size, forks)| {
            let mut step: Vec<Owned> = Vec::new();
            for (number, (parent, kept, added, written, rows)) in forks.into_iter().enumerate() {
                // Few roots, of which some differ in high bits only.
                let root = parent % 8 / 3;
                let parent = step.get(parent as usize / 8 % (number + 1));
                let mut pages = parent.map_or_else(
                    || (root << 16..).take(2600 / page_size).collect(),
                    |parent| parent.pages.clone(),
                );
                pages.truncate(kept / page_size);
                let first_own = (8 + number as u32) << 12;
                pages.extend((first_own..).take(added / page_size + 1));
                step.push(Owned {
                    kv_start: (pages.len() * page_size).saturating_sub(written + rows),
                    pages,
                    rows,
                });
            }
            (page_size, step)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Groups are valid, and no others save more; a step leaves nothing to the next one.
        #[test]
        fn groups_save_most(steps in vec(step(), 1..4)) {
            let mut groups = PrefixGroups::default();
            for (page_size, step) in steps {
                let found = find(&mut groups, page_size, &step);
                let mut taken = vec![false; step.len()];
                let mut saved = 0;
                for (members, shared) in found {
                    prop_assert!(members.len() >= 2 && members.is_sorted());
                    for &member in &members {
                        prop_assert!(!std::mem::replace(&mut taken[member], true));
                        prop_assert!(shared <= step[member].kv_start);
                    }
                    let members: Vec<_> = members.iter().map(|&member| &step[member]).collect();
                    prop_assert!(shared <= common_tokens(page_size, &members));
                    prop_assert!(shared > 0 && shared % PREFIX_STEP == 0);
                    let own = value(page_size, &members);
                    prop_assert!(own > 0);
                    saved += own;
                }
                let buckets = buckets(page_size, &step);
                let best: i64 = buckets.iter().map(|bucket| most(page_size, bucket)).sum();
                prop_assert_eq!((saved, groups.saved()), (best, best));
            }
        }
    }

    /// Decodes whose pages hold 128 tokens; the last page is their own.
    fn decodes(pages: &[&[u32]]) -> Vec<Owned> {
        let decode = |(number, pages): (usize, &&[u32])| Owned {
            pages: pages
                .iter()
                .copied()
                .chain([1000 + number as u32])
                .collect(),
            kv_start: pages.len() * 128 + 7,
            rows: 1,
        };
        pages.iter().enumerate().map(decode).collect()
    }

    #[test]
    fn pages_of_a_former_step_are_not_seen_again() {
        let mut groups = PrefixGroups::default();
        for pages in [[5, 70_000], [70_000, 5]] {
            assert!(!groups.repeat(pages.into_iter()));
        }
        assert!(groups.repeat([5, 70_000, 5].into_iter()));
    }

    #[test]
    fn a_group_may_begin_where_few_tokens_are_shared() {
        // The smallest common prefix stands inside the second group, which no cut at it finds.
        let long: Vec<u32> = (0..40).collect();
        let step = decodes(&[&long, &long, &long[..11], &long[..10]]);
        let found = find(&mut PrefixGroups::default(), 128, &step);
        assert_eq!(found, [(vec![0, 1], 40 * 128), (vec![2, 3], 10 * 128)]);
    }

    #[test]
    fn buckets_keep_the_order_of_the_step() {
        let [a, b]: [Vec<u32>; 2] = [(20..30).collect(), (0..10).collect()];
        // 65,536 and 0 are one to the filter.
        let alike = [65_536; 10];
        let step = decodes(&[&a, &alike, &b, &a, &[], &b, &a]);
        let found = find(&mut PrefixGroups::default(), 128, &step);
        assert_eq!(found, [(vec![2, 5], 1280), (vec![0, 3, 6], 1280)]);
    }
}
