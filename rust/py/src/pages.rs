//! The page pool by itself, for engines other than the driver's.

use pie_kv_cache::pages::{Order, Pool, Unique};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{self, Array, Ids, PageId};
use crate::error::from_pages;

/// Page allocator of one memory tier, with reference counts.
///
/// It tracks page ids and owns no memory. Give each tier its own range of ids, so that an id of another tier is an
/// error. A call that raises changes nothing. Page ids are passed as one-dimensional arrays of 32-bit or 64-bit
/// integers, and returned as NumPy arrays of int32.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct PagePool {
    pub(crate) inner: Pool,
    ids: Vec<u32>,
}

/// Page counts of a `PagePool` by state.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct PoolStats {
    /// Pages of the pool.
    capacity: usize,
    /// Pages that can be allocated.
    free: usize,
    /// Pages with at least one reference: `capacity - free`.
    used: usize,
    /// Used pages with a reference of the prefix index.
    cached: usize,
    /// Cached pages that also have other references: evicting them frees nothing.
    pinned: usize,
    /// Used pages that become free when running steps complete.
    leaving: usize,
    /// Highest number of used pages so far.
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
    /// Creates a pool whose pages are all free.
    ///
    /// Args:
    ///     pages: Number of pages.
    ///     first: Id of the first page; ids are `first` to `first + pages - 1`.
    ///     order: Which free page is allocated next: `lowest` takes the lowest id, `lifo` the page freed last.
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

    /// Allocates free pages with one reference each: all or none.
    ///
    /// Returns:
    ///     Their ids, int32 `(count,)`.
    ///
    /// Raises:
    ///     PagesError: Fewer than `count` pages are free.
    #[pyo3(signature = (count = 1))]
    fn allocate(&mut self, py: Python<'_>, count: usize) -> PyResult<Array> {
        self.ids.clear();
        let taken = self.inner.allocate_many(count, &mut self.ids);
        taken.map_err(from_pages)?;
        Array::new(py, &self.ids)
    }

    /// Adds one reference to each page.
    ///
    /// Raises:
    ///     PagesError: A page is free, waits for a step to be freed, or belongs to another pool.
    fn share(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.share(&self.ids).map_err(from_pages)
    }

    /// Releases one reference to each page; a page without references is free.
    ///
    /// Raises:
    ///     PagesError: A page is already free, belongs to another pool, or is referenced by the prefix index only.
    fn free(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.free(&self.ids).map_err(from_pages)
    }

    /// Releases one reference to each page once `step` is complete: until then the step may write to the page.
    ///
    /// Raises:
    ///     PagesError: As for `free`.
    fn free_after(&mut self, pages: Ids<'_, '_>, step: u64) -> PyResult<()> {
        self.read(pages)?;
        self.inner.free_after(&self.ids, step).map_err(from_pages)
    }

    /// Marks all steps up to `step` as complete, and frees the pages that waited for them.
    ///
    /// Returns:
    ///     Number of pages that became free.
    fn complete(&mut self, step: u64) -> usize {
        self.inner.complete(step)
    }

    /// Transfers the caller's reference to each page to the prefix index.
    ///
    /// Raises:
    ///     PagesError: A page is already in the index, is free, or belongs to another pool.
    fn cache(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.cache(&self.ids).map_err(from_pages)
    }

    /// Releases the prefix index's reference to each page, after the index has evicted it.
    ///
    /// Raises:
    ///     PagesError: A page is not in the index, or belongs to another pool.
    fn uncache(&mut self, pages: Ids<'_, '_>) -> PyResult<()> {
        self.read(pages)?;
        self.inner.uncache(&self.ids).map_err(from_pages)
    }

    /// Like `uncache`, once `step` is complete: for pages that a copy to another tier still reads.
    ///
    /// Raises:
    ///     PagesError: As of `uncache`.
    fn uncache_after(&mut self, pages: Ids<'_, '_>, step: u64) -> PyResult<()> {
        self.read(pages)?;
        let uncached = self.inner.uncache_after(&self.ids, step);
        uncached.map_err(from_pages)
    }

    /// Makes a page of the caller writable by copy-on-write.
    ///
    /// Returns:
    ///     The page to write to, and whether `page` must be copied to it first. If not, it is `page` itself.
    ///
    /// Raises:
    ///     PagesError: No page is free for the copy, or the caller holds no reference to `page`.
    fn make_unique(&mut self, page: PageId) -> PyResult<(u32, bool)> {
        let unique = self.inner.make_unique(page.0).map_err(from_pages)?;
        Ok(match unique {
            Unique::Kept(page) => (page, false),
            Unique::Copy { to, .. } => (to, true),
        })
    }

    /// Number of references to a page: of callers, the prefix index and running steps.
    ///
    /// Raises:
    ///     PagesError: The page belongs to another pool.
    fn references(&self, page: PageId) -> PyResult<u32> {
        self.inner.references(page.0).map_err(from_pages)
    }

    /// Pages that can be allocated.
    #[getter]
    fn available(&self) -> usize {
        self.inner.available()
    }

    /// Returns page counts by state.
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

    /// Checks the reference counts against all references. Takes time and memory proportional to the number of pages.
    ///
    /// Args:
    ///     held: Page ids, one entry per reference; a page of the prefix index counts one.
    ///
    /// Raises:
    ///     PagesError: A page leaked, or was freed too often.
    fn audit(&mut self, held: Ids<'_, '_>) -> PyResult<()> {
        self.read(held)?;
        let audited = self.inner.check_invariants(self.ids.iter().copied());
        audited.map_err(from_pages)
    }

    /// Frees every page, whatever its references.
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
