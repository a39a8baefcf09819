//! A pool held to lists of who holds what, after every step.

use std::collections::BTreeMap;

use pie_pages::{Order, Pool, PoolError, Unique};

const FIRST: u32 = 100;

/// What is done to a pool. Pages are named by places, one of which is not of the pool.
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
    let place = list.iter().position(|other| *other == page);
    place.map(|place| list.swap_remove(place)).is_some()
}

impl Naive {
    fn is_page(&self, page: u32) -> bool {
        (FIRST..FIRST + self.pages).contains(&page)
    }

    fn references(&self, page: u32) -> usize {
        let leaving = self.leaving.iter().map(|(_, page)| page);
        self.held
            .iter()
            .chain(&self.cached)
            .chain(leaving)
            .filter(|other| **other == page)
            .count()
    }

    fn free(&self) -> Vec<u32> {
        (FIRST..FIRST + self.pages)
            .filter(|page| self.references(*page) == 0)
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
        let ids = |places: &[usize]| -> Vec<u32> {
            let pages = self.naive.pages as usize + 1;
            places
                .iter()
                .map(|place| FIRST + (place % pages) as u32)
                .collect()
        };
        match step {
            Step::Allocate(count) => self.allocate(*count),
            Step::Share(places) => {
                let pages = ids(places);
                self.both(|pool| pool.share(&pages), |naive| naive.share(&pages));
            }
            Step::Free(places) => {
                let pages = ids(places);
                self.both(|pool| pool.free(&pages), |naive| naive.give_up(&pages));
            }
            Step::FreeAfter(places, step) => {
                let pages = ids(places);
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
            Step::Cache(places) => {
                let pages = ids(places);
                self.both(|pool| pool.cache(&pages), |naive| naive.cache(&pages));
            }
            Step::Uncache(places) => {
                let pages = ids(places);
                self.both(|pool| pool.uncache(&pages), |naive| naive.uncache(&pages));
            }
            Step::UncacheAfter(places, step) => {
                let pages = ids(places);
                let naive =
                    |naive: &mut Naive| naive.uncache(&pages).map(|()| naive.leave(&pages, *step));
                self.both(|pool| pool.uncache_after(&pages, *step), naive);
            }
            Step::MakeUnique(place) => self.make_unique(ids(&[*place])[0]),
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
        let mut counts = BTreeMap::new();
        let pages = FIRST..FIRST + self.naive.pages;
        for page in pages {
            let references = self.naive.references(page);
            assert_eq!(self.pool.references(page), Ok(references as u32));
            let cached = self.naive.cached.contains(&page);
            let leaving = self
                .naive
                .leaving
                .iter()
                .filter(|(_, other)| *other == page)
                .count();
            for (state, holds) in [
                ("free", references == 0),
                ("used", references > 0),
                ("cached", cached),
                ("pinned", cached && references > 1),
                ("leaving", leaving > 0 && leaving == references),
            ] {
                *counts.entry(state).or_insert(0) += usize::from(holds);
            }
        }
        let stats = self.pool.stats();
        let count = |state| counts.get(state).copied().unwrap_or(0);
        self.most = self.most.max(count("used"));
        assert_eq!(stats.capacity, self.naive.pages as usize);
        assert_eq!(
            (stats.free, self.pool.available()),
            (count("free"), count("free"))
        );
        assert_eq!((stats.used, stats.cached), (count("used"), count("cached")));
        assert_eq!(
            (stats.pinned, stats.leaving),
            (count("pinned"), count("leaving"))
        );
        assert_eq!(stats.high_water, self.most);
        let holders = self.naive.held.iter().chain(&self.naive.cached).copied();
        assert_eq!(self.pool.audit(holders), Ok(()));
        if let Some(lost) = self.naive.held.first() {
            let holders = self.naive.held[1..]
                .iter()
                .chain(&self.naive.cached)
                .copied();
            let found = self.pool.audit(holders);
            assert!(matches!(found, Err(PoolError::Unbalanced { page, .. }) if page == *lost));
        }
    }
}
