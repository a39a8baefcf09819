//! A pool held to lists of who holds what, after every step.

use pie_kv_cache::pages::{Order, Pool, PoolError, Stats, Unique};

const FIRST: u32 = 100;

/// What is done to a pool. Pages are named by indices, one of which is not of the pool.
#[derive(Debug, Clone)]
pub enum Step {
    Allocate(usize),
    Share(Vec<usize>),
    Free(Vec<usize>),
    FreeAfter(Vec<usize>, u64),
    Complete(u64),
    Cache(Vec<usize>),
    Uncache(Vec<usize>),
    UncacheAfter(Vec<usize>, u64),
    MakeUnique(usize),
    Reset,
}

/// Lists of holders: a page stands in each as often as it is held.
#[derive(Debug, Default, Clone)]
struct Naive {
    pages: u32,
    held: Vec<u32>,
    cached: Vec<u32>,
    /// By the step they wait for.
    leaving: Vec<(u64, u32)>,
    completed: Option<u64>,
}

fn take(list: &mut Vec<u32>, page: u32) -> bool {
    let index = list.iter().position(|other| *other == page);
    index.map(|index| list.swap_remove(index)).is_some()
}

impl Naive {
    fn is_page(&self, page: u32) -> bool {
        (FIRST..FIRST + self.pages).contains(&page)
    }

    /// All lists as one.
    fn holders(&self) -> impl Iterator<Item = u32> {
        let leaving = self.leaving.iter().map(|(_, page)| page);
        self.held.iter().chain(&self.cached).chain(leaving).copied()
    }

    fn references(&self, page: u32) -> usize {
        self.holders().filter(|other| *other == page).count()
    }

    /// How often each page stands in a list.
    fn count(&self, list: impl Iterator<Item = u32>) -> Vec<usize> {
        let mut counts = vec![0; self.pages as usize];
        for page in list {
            counts[(page - FIRST) as usize] += 1;
        }
        counts
    }

    fn free(&self) -> Vec<u32> {
        let counts = self.count(self.holders());
        (FIRST..)
            .zip(counts)
            .filter_map(|(page, count)| (count == 0).then_some(page))
            .collect()
    }

    /// Takes a holder's reference to each page, or says why not.
    fn give_up(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        for &page in pages {
            if !self.is_page(page) {
                return Err(foreign(self.pages, page));
            }
            if !take(&mut self.held, page) {
                return Err(if self.cached.contains(&page) {
                    PoolError::Cached { page }
                } else {
                    PoolError::NotHeld { page }
                });
            }
        }
        Ok(())
    }

    fn leave(&mut self, pages: &[u32], step: u64) {
        if self.completed >= Some(step) {
            return;
        }
        let last = self
            .leaving
            .last()
            .map_or(step, |(last, _)| step.max(*last));
        self.leaving.extend(pages.iter().map(|page| (last, *page)));
    }

    fn uncache(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        for &page in pages {
            if !self.is_page(page) {
                return Err(foreign(self.pages, page));
            }
            if !take(&mut self.cached, page) {
                return Err(PoolError::NotCached { page });
            }
        }
        Ok(())
    }

    fn share(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        for &page in pages {
            if !self.is_page(page) {
                return Err(foreign(self.pages, page));
            }
            if !self.held.contains(&page) && !self.cached.contains(&page) {
                return Err(PoolError::NotHeld { page });
            }
            self.held.push(page);
        }
        Ok(())
    }

    fn cache(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        for &page in pages {
            if !self.is_page(page) {
                return Err(foreign(self.pages, page));
            }
            if self.cached.contains(&page) {
                return Err(PoolError::AlreadyCached { page });
            }
            if !take(&mut self.held, page) {
                return Err(PoolError::NotHeld { page });
            }
            self.cached.push(page);
        }
        Ok(())
    }
}

fn foreign(pages: u32, page: u32) -> PoolError {
    PoolError::Foreign {
        page,
        first: FIRST,
        end: FIRST + pages,
    }
}

/// A pool, its model, and what both say to a step.
pub struct Both {
    pool: Pool,
    naive: Naive,
    order: Order,
    most: usize,
}

impl Both {
    pub fn new(pages: u32, order: Order) -> Self {
        Self {
            pool: Pool::new(FIRST..FIRST + pages, order),
            naive: Naive {
                pages,
                ..Naive::default()
            },
            order,
            most: 0,
        }
    }

    /// Does a step to both; the model keeps what was before if it refuses.
    fn both(
        &mut self,
        pool: impl FnOnce(&mut Pool) -> Result<(), PoolError>,
        naive: impl FnOnce(&mut Naive) -> Result<(), PoolError>,
    ) {
        let before = self.naive.clone();
        let wanted = naive(&mut self.naive);
        if wanted.is_err() {
            self.naive = before;
        }
        assert_eq!(pool(&mut self.pool), wanted);
    }

    pub fn step(&mut self, step: &Step) {
        // One of the ids is not of the pool.
        let ids = |indices: &[usize]| -> Vec<u32> {
            let pages = self.naive.pages as usize + 1;
            indices
                .iter()
                .map(|index| FIRST + (index % pages) as u32)
                .collect()
        };
        match step {
            Step::Allocate(count) => self.allocate(*count),
            Step::Share(indices) => {
                let pages = ids(indices);
                self.both(|pool| pool.share(&pages), |naive| naive.share(&pages));
            }
            Step::Free(indices) => {
                let pages = ids(indices);
                self.both(|pool| pool.free(&pages), |naive| naive.give_up(&pages));
            }
            Step::FreeAfter(indices, step) => {
                let pages = ids(indices);
                let naive =
                    |naive: &mut Naive| naive.give_up(&pages).map(|()| naive.leave(&pages, *step));
                self.both(|pool| pool.free_after(&pages, *step), naive);
            }
            Step::Complete(step) => {
                let before = self.naive.free().len();
                self.naive.completed = self.naive.completed.max(Some(*step));
                self.naive.leaving.retain(|(last, _)| last > step);
                let freed = self.naive.free().len() - before;
                assert_eq!(self.pool.complete(*step), freed);
            }
            Step::Cache(indices) => {
                let pages = ids(indices);
                self.both(|pool| pool.cache(&pages), |naive| naive.cache(&pages));
            }
            Step::Uncache(indices) => {
                let pages = ids(indices);
                self.both(|pool| pool.uncache(&pages), |naive| naive.uncache(&pages));
            }
            Step::UncacheAfter(indices, step) => {
                let pages = ids(indices);
                let naive =
                    |naive: &mut Naive| naive.uncache(&pages).map(|()| naive.leave(&pages, *step));
                self.both(|pool| pool.uncache_after(&pages, *step), naive);
            }
            Step::MakeUnique(index) => self.make_unique(ids(&[*index])[0]),
            Step::Reset => {
                self.pool.reset();
                self.naive = Naive {
                    pages: self.naive.pages,
                    completed: self.naive.completed,
                    ..Naive::default()
                };
            }
        }
        self.compare();
    }

    fn allocate(&mut self, count: usize) {
        let free = self.naive.free();
        let mut pages = Vec::new();
        let result = self.pool.allocate_many(count, &mut pages);
        if count > free.len() {
            let error = PoolError::Exhausted {
                wanted: count,
                free: free.len(),
            };
            assert_eq!(result, Err(error));
            assert!(pages.is_empty());
            return;
        }
        assert_eq!(result, Ok(()));
        if self.order == Order::LowestFirst {
            assert_eq!(pages, free[..count]);
        }
        assert!(pages.iter().all(|page| free.contains(page)));
        self.naive.held.extend(pages);
    }

    fn make_unique(&mut self, page: u32) {
        let before = self.naive.clone();
        let allowed = self.naive.give_up(&[page]);
        self.naive = before;
        let result = self.pool.make_unique(page);
        if let Err(error) = allowed {
            assert_eq!(result, Err(error));
        } else if self.naive.references(page) == 1 {
            assert_eq!(result, Ok(Unique::Kept(page)));
        } else if self.naive.free().is_empty() {
            assert_eq!(result, Err(PoolError::Exhausted { wanted: 1, free: 0 }));
        } else {
            let Ok(Unique::Copy { from, to }) = result else {
                panic!("{result:?}");
            };
            assert_eq!((from, self.naive.references(to)), (page, 0));
            assert!(take(&mut self.naive.held, from));
            self.naive.held.push(to);
        }
    }

    fn compare(&mut self) {
        let naive = &self.naive;
        let held = naive.count(naive.held.iter().copied());
        let cached = naive.count(naive.cached.iter().copied());
        let leaving = naive.count(naive.leaving.iter().map(|(_, page)| *page));
        let mut wanted = Stats {
            capacity: naive.pages as usize,
            ..Stats::default()
        };
        for (at, page) in (FIRST..FIRST + naive.pages).enumerate() {
            let references = held[at] + cached[at] + leaving[at];
            assert_eq!(self.pool.references(page), Ok(references as u32));
            wanted.free += usize::from(references == 0);
            wanted.used += usize::from(references > 0);
            wanted.cached += usize::from(cached[at] > 0);
            wanted.pinned += usize::from(cached[at] > 0 && references > 1);
            wanted.leaving += usize::from(leaving[at] > 0 && leaving[at] == references);
        }
        self.most = self.most.max(wanted.used);
        wanted.high_water = self.most;
        assert_eq!(self.pool.stats(), wanted);
        assert_eq!(self.pool.available(), wanted.free);
        let holders = self.naive.held.iter().chain(&self.naive.cached).copied();
        assert_eq!(self.pool.check_invariants(holders), Ok(()));
        if let Some(lost) = self.naive.held.first() {
            let holders = self.naive.held[1..]
                .iter()
                .chain(&self.naive.cached)
                .copied();
            let found = self.pool.check_invariants(holders);
            assert!(matches!(found, Err(PoolError::Unbalanced { page, .. }) if page == *lost));
        }
    }
}
