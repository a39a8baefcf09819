//! The page pool.

use std::collections::VecDeque;
use std::ops::Range;

use crate::pages::bitmap::Bitmap;
use crate::pages::error::PoolError;

/// Which free page is allocated next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// The lowest id. Used pages stay together.
    #[default]
    LowestFirst,
    /// The page that was freed last, which may still be in caches. A new pool counts up.
    Lifo,
}

/// The result of [`Pool::make_unique`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unique {
    /// The caller has the only reference and may write the page.
    Kept(u32),
    /// The caller's reference moved to a new page: copy `from` to `to` before either is written.
    Copy {
        /// The shared page.
        from: u32,
        /// The caller's page, with one reference.
        to: u32,
    },
}

/// Pages by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// All pages.
    pub capacity: usize,
    /// Free pages.
    pub free: usize,
    /// Pages with a reference.
    pub used: usize,
    /// Used pages in the prefix index.
    pub cached: usize,
    /// Cached pages with other references, too: evicting them frees nothing.
    pub pinned: usize,
    /// Used pages that become free when running steps complete.
    pub leaving: usize,
    /// Peak of `used`.
    pub high_water: usize,
}

/// References to a page.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// References of requests, the prefix index and running steps.
    references: u32,
    /// References that end with a running step.
    leaving: u32,
    /// One is the prefix index's.
    cached: bool,
}

impl Slot {
    /// References of callers.
    fn held(self) -> u32 {
        self.references - self.leaving - u32::from(self.cached)
    }

    fn is_pinned(self) -> bool {
        self.cached && self.references > 1
    }

    fn is_leaving(self) -> bool {
        self.references > 0 && self.references == self.leaving
    }
}

#[derive(Debug, Clone)]
enum FreeList {
    Lowest(Bitmap),
    Lifo(Vec<u32>),
}

impl FreeList {
    fn full(order: Order, len: usize) -> Self {
        match order {
            Order::LowestFirst => Self::Lowest(Bitmap::full(len)),
            Order::Lifo => Self::Lifo((0..len as u32).rev().collect()),
        }
    }

    fn take(&mut self) -> Option<usize> {
        match self {
            Self::Lowest(bitmap) => bitmap.take_least(),
            Self::Lifo(stack) => stack.pop().map(|at| at as usize),
        }
    }

    fn put(&mut self, at: usize) {
        match self {
            Self::Lowest(bitmap) => bitmap.put(at),
            Self::Lifo(stack) => stack.push(at as u32),
        }
    }
}

/// A pool of the pages of one memory tier.
///
/// Give each tier its own range of ids, so that an id of another tier is an error. A rejected call changes nothing, however
/// long its list.
///
/// ```
/// use pie_kv_cache::pages::{Order, Pool, PoolError, Unique};
///
/// let mut pool = Pool::new(0..4, Order::LowestFirst);
/// let page = pool.allocate()?;
/// pool.share(&[page])?; // a fork of the request
/// assert_eq!(pool.make_unique(page)?, Unique::Copy { from: 0, to: 1 });
/// pool.free_after(&[1], 7)?; // step 7, which is running, writes it
/// assert_eq!((pool.available(), pool.complete(7), pool.available()), (2, 1, 3));
/// pool.free(&[page])?;
/// assert_eq!(pool.free(&[page]), Err(PoolError::NotHeld { page: 0 }));
/// # Ok::<(), PoolError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool {
    first: u32,
    slots: Vec<Slot>,
    free: FreeList,
    order: Order,
    stats: Stats,
    /// Deferred frees, by step.
    leaving: VecDeque<(u64, u32)>,
    completed: Option<u64>,
}

impl Pool {
    /// A pool of the pages `ids`, all free.
    pub fn new(ids: Range<u32>, order: Order) -> Self {
        let len = ids.len();
        Self {
            first: ids.start,
            slots: vec![Slot::default(); len],
            free: FreeList::full(order, len),
            order,
            stats: Stats {
                capacity: len,
                free: len,
                ..Stats::default()
            },
            leaving: VecDeque::new(),
            completed: None,
        }
    }

    /// Allocates a page, with one reference.
    ///
    /// # Errors
    ///
    /// [`PoolError::Exhausted`] when none is free.
    pub fn allocate(&mut self) -> Result<u32, PoolError> {
        let at = self
            .free
            .take()
            .ok_or(PoolError::Exhausted { wanted: 1, free: 0 })?;
        Ok(self.take(at))
    }

    /// Allocates `count` pages, with one reference each, and appends their ids to `pages`.
    ///
    /// # Errors
    ///
    /// [`PoolError::Exhausted`] when fewer are free; then none is allocated.
    pub fn allocate_many(&mut self, count: usize, pages: &mut Vec<u32>) -> Result<(), PoolError> {
        if count > self.stats.free {
            return Err(PoolError::Exhausted {
                wanted: count,
                free: self.stats.free,
            });
        }
        pages.reserve(count);
        for _ in 0..count {
            let Some(at) = self.free.take() else {
                unreachable!("as many are free as are counted");
            };
            pages.push(self.take(at));
        }
        Ok(())
    }

    /// Adds a reference to each page.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`], [`PoolError::NotHeld`] for a page that is free or leaving, and
    /// [`PoolError::TooManyReferences`].
    pub fn share(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        self.change_all(pages, Self::share_one, Self::free_one)
    }

    /// Drops the caller's reference to each page; a page without any is free.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`]; [`PoolError::NotHeld`] for a page that was freed before; [`PoolError::Cached`] when the
    /// only reference is the prefix index's.
    pub fn free(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        // Two passes: undoing a free would change the order of the free list.
        self.change_all(pages, Self::leave_one, Self::stay_one)?;
        for &page in pages {
            self.drop_leaving(page);
        }
        Ok(())
    }

    /// Drops the caller's reference to each page once step `step` is [complete](Self::complete), because the step may still
    /// write it. At once if it is complete already.
    ///
    /// Steps count up; a smaller one than in an earlier call counts as that one.
    ///
    /// # Errors
    ///
    /// Those of [`free`](Self::free).
    pub fn free_after(&mut self, pages: &[u32], step: u64) -> Result<(), PoolError> {
        if self.completed >= Some(step) {
            return self.free(pages);
        }
        self.change_all(pages, Self::leave_one, Self::stay_one)?;
        self.leave(pages, step);
        Ok(())
    }

    /// Completes all steps up to `step`. Returns how many pages became free.
    pub fn complete(&mut self, step: u64) -> usize {
        self.completed = self.completed.max(Some(step));
        let free = self.stats.free;
        while let Some(&(last, page)) = self.leaving.front()
            && last <= step
        {
            self.leaving.pop_front();
            self.drop_leaving(page);
        }
        self.stats.free - free
    }

    /// Moves the caller's reference to each page to the prefix index.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`]; [`PoolError::AlreadyCached`]: a page is in the index already;
    /// [`PoolError::NotHeld`].
    pub fn cache(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        self.change_all(pages, Self::cache_one, Self::return_one)
    }

    /// Drops the prefix index's reference to each page, after an eviction.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`] and [`PoolError::NotCached`].
    pub fn uncache(&mut self, pages: &[u32]) -> Result<(), PoolError> {
        self.change_all(pages, Self::return_one, Self::cache_one)?;
        self.free(pages)
    }

    /// [`uncache`](Self::uncache) once step `step` is complete, for pages that a copy to another tier still reads.
    ///
    /// # Errors
    ///
    /// Those of [`uncache`](Self::uncache).
    pub fn uncache_after(&mut self, pages: &[u32], step: u64) -> Result<(), PoolError> {
        self.change_all(pages, Self::return_one, Self::cache_one)?;
        self.free_after(pages, step)
    }

    /// Copy-on-write: makes a page of the caller writable.
    ///
    /// A page with other references is replaced by a new one, and the caller's reference to the old one is dropped: copy before
    /// anything may write the old page.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`]; [`PoolError::NotHeld`]; [`PoolError::Cached`]; [`PoolError::Exhausted`].
    pub fn make_unique(&mut self, page: u32) -> Result<Unique, PoolError> {
        let slot = self.slots[self.at(page)?];
        self.check_held(page)?;
        if slot.references == 1 {
            return Ok(Unique::Kept(page));
        }
        let to = self.allocate()?;
        self.free_one(page)?;
        Ok(Unique::Copy { from: page, to })
    }

    /// Number of references to a page.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`].
    pub fn references(&self, page: u32) -> Result<u32, PoolError> {
        Ok(self.slots[self.at(page)?].references)
    }

    /// Free pages.
    pub fn available(&self) -> usize {
        self.stats.free
    }

    /// Pages by state; O(1).
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The ids of this pool.
    pub fn ids(&self) -> Range<u32> {
        self.first..self.end()
    }

    /// Checks reference counts against the holders' lists: each id as often as it is held, the prefix index's once, without
    /// running steps. Finds leaks; takes time and memory for every page.
    ///
    /// # Errors
    ///
    /// [`PoolError::Foreign`], and [`PoolError::Unbalanced`] with the first page that disagrees.
    pub fn check_invariants(&self, held: impl IntoIterator<Item = u32>) -> Result<(), PoolError> {
        let mut holders = vec![0; self.slots.len()];
        for page in held {
            holders[self.at(page)?] += 1;
        }
        let unbalanced = self.slots.iter().zip(holders).zip(self.first..);
        for ((slot, held), page) in unbalanced {
            let references = slot.references - slot.leaving;
            if references != held {
                return Err(PoolError::Unbalanced {
                    page,
                    references,
                    held,
                });
            }
        }
        Ok(())
    }

    /// Frees every page. The peak and the completed steps stay.
    pub fn reset(&mut self) {
        let (high_water, completed) = (self.stats.high_water, self.completed);
        *self = Self::new(self.ids(), self.order);
        self.stats.high_water = high_water;
        self.completed = completed;
    }

    fn end(&self) -> u32 {
        self.first + self.slots.len() as u32
    }

    fn at(&self, page: u32) -> Result<usize, PoolError> {
        let foreign = PoolError::Foreign {
            page,
            first: self.first,
            end: self.end(),
        };
        let at = page.checked_sub(self.first).ok_or(foreign)? as usize;
        (at < self.slots.len()).then_some(at).ok_or(foreign)
    }

    fn check_held(&self, page: u32) -> Result<(), PoolError> {
        let slot = self.slots[self.at(page)?];
        match slot.held() {
            0 if slot.cached => Err(PoolError::Cached { page }),
            0 => Err(PoolError::NotHeld { page }),
            _ => Ok(()),
        }
    }

    /// Changes one page and the statistics.
    fn change(&mut self, at: usize, change: impl FnOnce(&mut Slot)) -> Slot {
        let slot = &mut self.slots[at];
        let before = *slot;
        change(slot);
        let after = *slot;
        let count = |count: &mut usize, was: bool, is: bool| {
            *count = *count + usize::from(is) - usize::from(was);
        };
        let stats = &mut self.stats;
        count(&mut stats.cached, before.cached, after.cached);
        count(&mut stats.pinned, before.is_pinned(), after.is_pinned());
        count(&mut stats.leaving, before.is_leaving(), after.is_leaving());
        count(&mut stats.used, before.references > 0, after.references > 0);
        count(
            &mut stats.free,
            before.references == 0,
            after.references == 0,
        );
        stats.high_water = stats.high_water.max(stats.used);
        after
    }

    /// Applies `change` to all pages or, if one fails, to none.
    fn change_all(
        &mut self,
        pages: &[u32],
        change: fn(&mut Self, u32) -> Result<(), PoolError>,
        undo: fn(&mut Self, u32) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        for (done, &page) in pages.iter().enumerate() {
            if let Err(error) = change(self, page) {
                for &page in pages[..done].iter().rev() {
                    undo(self, page)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn take(&mut self, at: usize) -> u32 {
        self.change(at, |slot| slot.references = 1);
        self.first + at as u32
    }

    fn share_one(&mut self, page: u32) -> Result<(), PoolError> {
        let at = self.at(page)?;
        let slot = self.slots[at];
        if slot.references == slot.leaving {
            return Err(PoolError::NotHeld { page });
        }
        if slot.references == u32::MAX {
            return Err(PoolError::TooManyReferences { page });
        }
        self.change(at, |slot| slot.references += 1);
        Ok(())
    }

    fn free_one(&mut self, page: u32) -> Result<(), PoolError> {
        self.leave_one(page)?;
        self.drop_leaving(page);
        Ok(())
    }

    fn leave_one(&mut self, page: u32) -> Result<(), PoolError> {
        self.check_held(page)?;
        let at = self.at(page)?;
        self.change(at, |slot| slot.leaving += 1);
        Ok(())
    }

    fn stay_one(&mut self, page: u32) -> Result<(), PoolError> {
        let at = self.at(page)?;
        self.change(at, |slot| slot.leaving -= 1);
        Ok(())
    }

    fn cache_one(&mut self, page: u32) -> Result<(), PoolError> {
        let at = self.at(page)?;
        if self.slots[at].cached {
            return Err(PoolError::AlreadyCached { page });
        }
        self.check_held(page)?;
        self.change(at, |slot| slot.cached = true);
        Ok(())
    }

    fn return_one(&mut self, page: u32) -> Result<(), PoolError> {
        let at = self.at(page)?;
        if !self.slots[at].cached {
            return Err(PoolError::NotCached { page });
        }
        self.change(at, |slot| slot.cached = false);
        Ok(())
    }

    fn leave(&mut self, pages: &[u32], step: u64) {
        let last = self
            .leaving
            .back()
            .map_or(step, |(last, _)| step.max(*last));
        self.leaving.extend(pages.iter().map(|&page| (last, page)));
    }

    /// Drops a deferred reference.
    fn drop_leaving(&mut self, page: u32) {
        let at = (page - self.first) as usize;
        let slot = self.change(at, |slot| {
            slot.leaving -= 1;
            slot.references -= 1;
        });
        if slot.references == 0 {
            self.free.put(at);
        }
    }
}
