//! The page pool by itself, for engines other than the driver's.

use pie_kv_cache::pages::{Order, Pool, Unique};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{self, Array, Ids, PageId};
use crate::error::from_pages;

/// The pages of one tier of memory, by id: which are free, and how often each of the others is held.
///
/// A pool owns no memory. Give each tier a range of ids of its own, so that an id of another tier is an error. A call that
/// is refused changes nothing. Ids go in as any array of integers and come out as NumPy arrays of int32.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct PagePool {
    pub(crate) inner: Pool,
    ids: Vec<u32>,
}

/// How many pages of a pool are in which state.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct PoolStats {
    /// All pages.
    capacity: usize,
    /// Pages that can be allocated.
    free: usize,
    /// All others.
    used: usize,
    /// Used pages that the prefix index holds.
    cached: usize,
    /// Cached pages that others hold, too, so that evicting them frees nothing.
    pinned: usize,
    /// Used pages that become free when running steps complete.
    leaving: usize,
    /// Most pages that were used at once.
    high_water: usize,
}

#[pymethods]
impl PoolStats {
    fn __repr__(&self) -> String {
        format!(
            "PoolStats(capacity={}, free={}, used={}, cached={}, pinned={}, leaving={}, high_water={})",
            self.capacity,
            self.free,
            self.used,
            self.cached,
            self.pinned,
            self.leaving,
            self.high_water
        )
    }
}

#[pymethods]
impl PagePool {
    /// A pool whose pages are all free.
    ///
    /// Args:
    ///     pages: How many there are.
    ///     first: Id of the first one; the others follow.
    ///     order: Which free page is allocated next: `lowest`, the one with the lowest id, or `lifo`, the one that was freed
    ///         last.
    ///
    /// Raises:
    ///     ValueError: An unknown order, or ids that do not fit into int32.
    #[new]
    #[pyo3(signature = (pages, *, first = 0, order = "lowest"))]
    fn new(pages: u32, first: u32, order: &str) -> PyResult<Self> {
        let order = match order {
            "lowest" => Order::LowestFirst,
            "lifo" => Order::Lifo,
            _ => {
                let text = format!("order is {order:?}; it must be \"lowest\" or \"lifo\"");
                return Err(PyValueError::new_err(text));
            }
        };
        let end = first.checked_add(pages);
        let end = end.filter(|&end| end <= arrays::PAGES).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{pages} pages from {first} on are too many; ids must be less than {}",
                arrays::PAGES
            ))
        })?;
        Ok(Self {
            inner: Pool::new(first..end, order),
            ids: Vec::new(),
        })
    }

    /// Takes free pages, with one reference each: all or none.
    ///
    /// Returns:
    ///     Their ids, int32 `(count,)`.
    ///
    /// Raises:
    ///     PagesError: Fewer pages are free.
    #[pyo3(signature = (count = 1))]
    fn allocate(&mut self, py: Python<'_>, count: usize) -> PyResult<Array> {
        self.ids.clear();
        let taken = self.inner.allocate_many(count, &mut self.ids);
        taken.map_err(from_pages)?;
        Array::new(py, &self.ids)
    }

    /// Adds a reference to each page.
    ///
    /// Raises:
    ///     PagesError: A page is free, leaving or of another pool.
    fn share(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.share(&self.ids).map_err(from_pages)
    }

    /// Drops a reference to each page; a page without any is free.
    ///
    /// Raises:
    ///     PagesError: A page is free already, of another pool, or held only by the prefix index.
    fn free(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.free(&self.ids).map_err(from_pages)
    }

    /// Drops a reference to each page once a step is complete: until then the step may write them.
    ///
    /// Raises:
    ///     PagesError: As of `free`.
    fn free_after(&mut self, pages: Ids<'_, '_>, step: u64) -> PyResult<()> {
        self.read(pages)?;
        self.inner.free_after(&self.ids, step).map_err(from_pages)
    }

    /// Says that all steps up to this one are complete.
    ///
    /// Returns:
    ///     How many pages became free.
    fn complete(&mut self, step: u64) -> usize {
        self.inner.complete(step)
    }

    /// Gives the caller's reference to each page to the prefix index.
    ///
    /// Raises:
    ///     PagesError: A page is in the index already, free, or of another pool.
    fn cache(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.cache(&self.ids).map_err(from_pages)
    }

    /// Drops the prefix index's reference to each page: the index has evicted it.
    ///
    /// Raises:
    ///     PagesError: A page is not in the index, or of another pool.
    fn uncache(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.uncache(&self.ids).map_err(from_pages)
    }

    /// `uncache` once a step is complete: for pages that a copy to another tier still reads.
    ///
    /// Raises:
    ///     PagesError: As of `uncache`.
    fn uncache_after(&mut self, pages: Ids<'_, '_>, step: u64) -> PyResult<()> {
        self.read(pages)?;
        let uncached = self.inner.uncache_after(&self.ids, step);
        uncached.map_err(from_pages)
    }

    /// Makes a page of the caller writable: copy-on-write.
    ///
    /// Returns:
    ///     The page to write, and whether `page` must be copied to it first. Without a copy they are the same.
    ///
    /// Raises:
    ///     PagesError: There is no page to copy to, or the caller does not hold this one.
    fn make_unique(&mut self, page: PageId) -> PyResult<(u32, bool)> {
        let unique = self.inner.make_unique(page.0).map_err(from_pages)?;
        Ok(match unique {
            Unique::Kept(page) => (page, false),
            Unique::Copy { to, .. } => (to, true),
        })
    }

    /// References to a page: of callers, of the prefix index and of running steps.
    ///
    /// Raises:
    ///     PagesError: The page is of another pool.
    fn references(&self, page: PageId) -> PyResult<u32> {
        self.inner.references(page.0).map_err(from_pages)
    }

    /// Pages that can be allocated.
    #[getter]
    fn available(&self) -> usize {
        self.inner.available()
    }

    /// Counts of pages by state.
    fn stats(&self) -> PoolStats {
        let stats = self.inner.stats();
        PoolStats {
            capacity: stats.capacity,
            free: stats.free,
            used: stats.used,
            cached: stats.cached,
            pinned: stats.pinned,
            leaving: stats.leaving,
            high_water: stats.high_water,
        }
    }

    /// Compares the references with what their holders list: each page as often as it is held, those of the prefix index
    /// once. Takes time and memory for every page.
    ///
    /// Raises:
    ///     PagesError: A page leaked, or was freed too often.
    fn audit(&mut self, held: Ids<'_, '_>) -> PyResult<()> {
        self.read(held)?;
        let audited = self.inner.check_invariants(self.ids.iter().copied());
        audited.map_err(from_pages)
    }

    /// Frees every page, no matter what holds it.
    fn reset(&mut self) {
        self.inner.reset();
    }

    fn __len__(&self) -> usize {
        self.inner.stats().capacity
    }

    fn __repr__(&self) -> String {
        let (ids, stats) = (self.inner.ids(), self.inner.stats());
        format!(
            "PagePool(ids={}..{}, free={}, used={}, cached={})",
            ids.start, ids.end, stats.free, stats.used, stats.cached
        )
    }
}

impl PagePool {
    fn read(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        arrays::read("pages", pages, None, arrays::PAGES, &mut self.ids)
    }
}
