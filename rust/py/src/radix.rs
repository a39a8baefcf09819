//! The prefix index by itself, for engines other than the driver's.

use pie_kv_cache::radix::{Config, InsertParams, Key, Policy};
use pyo3::prelude::*;

use crate::arrays::{self, Array, Ids, NodeNumber, View};
use crate::error::{from_pages, from_radix};
use crate::pages::PagePool;
use crate::radix_results::{CacheEvent, Evicted, Inserted, Match, NodeInfo, moved};

/// Which KV pages hold the KV of which tokens: a radix tree over pages of tokens.
///
/// Ids of pages go in and come out; the index owns no memory. Tokens and pages go in as any one-dimensional array of 32-bit
/// or 64-bit integers, pages come out as NumPy arrays of int32. Tokens after the last whole page of a key are ignored.
/// Nodes have numbers; one that was evicted is never the number of another node.
///
/// Every call counts as one unit of time, which is what eviction goes by.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct RadixIndex {
    inner: pie_kv_cache::radix::RadixIndex,
    now: u64,
    tokens: Vec<u32>,
    pages: Vec<u32>,
    evicted: pie_kv_cache::radix::EvictResult,
}

#[pymethods]
impl RadixIndex {
    /// An empty index.
    ///
    /// Args:
    ///     page_size: Tokens of a page, 1 to 1,024.
    ///     policy: What is evicted first: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
    ///     bigram: Keys are pairs of neighbouring tokens: `n` tokens are `n - 1` units.
    ///     events: Record events, which cost a SHA-256 per page.
    ///     split_keeps_age: Both parts of a split node have the time of its creation, as in SGLang 0.5.23; without, the first part
    ///         is new, as in 0.5.17.
    ///
    /// Raises:
    ///     RadixError: A page size out of range, or an unknown policy.
    #[new]
    #[pyo3(signature = (page_size = 1, policy = "lru", *, bigram = false, events = false, split_keeps_age = false))]
    fn new(
        page_size: u32,
        policy: &str,
        bigram: bool,
        events: bool,
        split_keeps_age: bool,
    ) -> PyResult<Self> {
        let policy: Policy = policy.parse().map_err(|error| from_radix(&error))?;
        let config = Config {
            page_size,
            policy,
            bigram,
            events,
            split_keeps_age,
        };
        Ok(Self {
            inner: pie_kv_cache::radix::RadixIndex::new(config)
                .map_err(|error| from_radix(&error))?,
            now: 0,
            tokens: Vec::new(),
            pages: Vec::new(),
            evicted: pie_kv_cache::radix::EvictResult::default(),
        })
    }

    /// Finds the longest cached prefix, which becomes the most recently used.
    ///
    /// Args:
    ///     tokens: The key.
    ///     namespace: Sequences of different namespaces share nothing.
    ///     limit: Tokens of the key that count, from its start; None for all.
    ///
    /// Raises:
    ///     TypeError: `tokens` is not an array of integers.
    ///     OverflowError: A token does not fit into uint32.
    #[pyo3(signature = (tokens, *, namespace = None, limit = None))]
    fn match_prefix(
        &mut self,
        py: Python<'_>,
        tokens: Ids<'_, '_>,
        namespace: Option<&str>,
        limit: Option<usize>,
    ) -> PyResult<Match> {
        let now = self.begin_match(tokens, namespace, limit)?;
        let key = key(&self.tokens, namespace);
        let found = self.inner.match_prefix(key, now, &mut self.pages);
        Ok(Match::new(Array::new(py, &self.pages)?, found, None))
    }

    /// Finds the longest cached prefix and locks it, on all tiers: it is not evicted before it is unlocked.
    ///
    /// Use it as a context manager, or unlock it by `Match.unlock`.
    ///
    /// Args:
    ///     tokens: The key.
    ///     namespace: Sequences of different namespaces share nothing.
    ///     limit: Tokens of the key that count, from its start; None for all.
    ///
    /// Raises:
    ///     TypeError: `tokens` is not an array of integers.
    ///     OverflowError: A token does not fit into uint32.
    #[pyo3(signature = (tokens, *, namespace = None, limit = None))]
    fn match_and_lock(
        slf: &Bound<'_, Self>,
        tokens: Ids<'_, '_>,
        namespace: Option<&str>,
        limit: Option<usize>,
    ) -> PyResult<Match> {
        let mut index = slf.borrow_mut();
        let this = &mut *index;
        let now = this.begin_match(tokens, namespace, limit)?;
        let key = key(&this.tokens, namespace);
        let found = this.inner.match_and_lock(key, now, &mut this.pages);
        let pages = Array::new(slf.py(), &this.pages)?;
        Ok(Match::new(
            pages,
            found,
            Some(slf.clone().into_any().unbind()),
        ))
    }

    /// How many pages of a key are on the device, and how many after them only on the host. Changes nothing.
    #[pyo3(signature = (tokens, *, namespace = None, limit = None))]
    fn peek(
        &mut self,
        tokens: Ids<'_, '_>,
        namespace: Option<&str>,
        limit: Option<usize>,
    ) -> PyResult<(usize, usize)> {
        self.read_tokens(tokens, limit)?;
        Ok(self.inner.peek(key(&self.tokens, namespace)))
    }

    /// Looks, after a match of this key, for a page that begins as the key continues.
    ///
    /// Returns:
    ///     The page, how many of its tokens agree, its node, and whether it is on the device; None if there is none.
    #[pyo3(signature = (tokens, found, *, namespace = None))]
    fn partial(
        &mut self,
        tokens: Ids<'_, '_>,
        found: &Match,
        namespace: Option<&str>,
    ) -> PyResult<Option<(u32, usize, u64, bool)>> {
        self.read_tokens(tokens, None)?;
        let partial = self
            .inner
            .partial(key(&self.tokens, namespace), found.found());
        Ok(partial.map(|it| (it.page, it.tokens, it.node.to_bits(), it.on_device)))
    }

    /// Inserts a key whose KV is in these device pages.
    ///
    /// Args:
    ///     tokens: The key.
    ///     pages: One for each whole page of the key. What exists already keeps its own.
    ///     namespace: Sequences of different namespaces share nothing.
    ///     limit: Tokens of the key that count, from its start; None for all.
    ///     priority: Nodes on the path get at least this.
    ///     chunked: The sequence will be inserted again with more tokens: it does not count as a hit.
    ///     inserted: Tokens that this sequence has inserted before: nodes that end there, or before, do not count a hit.
    ///
    /// Raises:
    ///     RadixError: Not as many pages as the key has.
    ///     TypeError: Not arrays of integers.
    ///     OverflowError: A token does not fit into uint32, or a page not into int32.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    #[pyo3(signature = (tokens, pages, *, namespace = None, limit = None, priority = 0, chunked = false, inserted = 0))]
    fn insert(
        &mut self,
        tokens: Ids<'_, '_>,
        pages: Ids<'_, '_>,
        namespace: Option<&str>,
        limit: Option<usize>,
        priority: i32,
        chunked: bool,
        inserted: usize,
    ) -> PyResult<Inserted> {
        let now = self.begin(tokens, limit)?;
        arrays::read("pages", pages, None, arrays::PAGES, &mut self.pages)?;
        self.put(
            namespace,
            InsertParams {
                now,
                priority,
                chunked,
                inserted: inserted / self.inner.config().page_size as usize,
            },
        )
    }

    /// Inserts a key and takes pages for what is new of it from a pool, whose index holds them then.
    ///
    /// Args:
    ///     tokens: The key.
    ///     pool: Gives the pages. After an eviction, `PagePool.uncache` takes them back.
    ///     namespace: Sequences of different namespaces share nothing.
    ///     limit: Tokens of the key that count, from its start; None for all.
    ///     priority: Nodes on the path get at least this.
    ///     chunked: The sequence will be inserted again with more tokens: it does not count as a hit.
    ///     inserted: Tokens that this sequence has inserted before: nodes that end there, or before, do not count a hit.
    ///
    /// Returns:
    ///     What was inserted, and the new pages, int32 `(pages - existing,)`.
    ///
    /// Raises:
    ///     PagesError: The pool has not enough free pages; nothing was inserted.
    ///     TypeError: `tokens` is not an array of integers.
    ///     OverflowError: A token does not fit into uint32.
    #[pyo3(signature = (tokens, pool, *, namespace = None, limit = None, priority = 0, chunked = false, inserted = 0))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn insert_new(
        &mut self,
        py: Python<'_>,
        tokens: Ids<'_, '_>,
        pool: &mut PagePool,
        namespace: Option<&str>,
        limit: Option<usize>,
        priority: i32,
        chunked: bool,
        inserted: usize,
    ) -> PyResult<(Inserted, Array)> {
        let now = self.begin(tokens, limit)?;
        let existing = self.inner.peek(key(&self.tokens, namespace)).0;
        let config = *self.inner.config();
        let units = self.tokens.len().saturating_sub(config.bigram.into());
        let wanted = units / config.page_size as usize;
        // What exists keeps its pages: these are not looked at.
        self.pages.clear();
        self.pages.resize(existing, 0);
        let pages = &mut self.pages;
        let taken = pool.inner.allocate_many(wanted - existing, pages);
        taken
            .and_then(|()| pool.inner.cache(&pages[existing..]))
            .map_err(from_pages)?;
        let how = InsertParams {
            now,
            priority,
            chunked,
            inserted: inserted / config.page_size as usize,
        };
        let inserted = self.put(namespace, how)?;
        Ok((inserted, Array::new(py, &self.pages[existing..])?))
    }

    /// Pages of the path that ends in a node which are on the device, int32, from the start of the sequence.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn path_pages(&mut self, py: Python<'_>, node: NodeNumber) -> PyResult<Array> {
        let found = self.inner.path_pages(node.0, &mut self.pages);
        found.map_err(|error| from_radix(&error))?;
        Array::new(py, &self.pages)
    }

    /// Locks a node and all above it; locks are counted.
    ///
    /// Returns:
    ///     Device pages that became protected by it.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn lock(&mut self, node: NodeNumber) -> PyResult<usize> {
        self.inner.lock(node.0).map_err(|error| from_radix(&error))
    }

    /// Takes a lock back.
    ///
    /// Returns:
    ///     Device pages that became evictable by it.
    ///
    /// Raises:
    ///     RadixError: The node is not locked, or was evicted.
    fn unlock(&mut self, node: NodeNumber) -> PyResult<usize> {
        self.inner
            .unlock(node.0)
            .map_err(|error| from_radix(&error))
    }

    /// Evicts leaves from the device until at least so many pages have left it, or no leaf is left that may.
    ///
    /// The last leaf may bring more pages than were asked for. Nodes with a copy on the host stay there.
    fn evict(&mut self, py: Python<'_>, pages: usize) -> PyResult<Evicted> {
        self.inner.evict(pages, &mut self.evicted);
        self.evicted(py)
    }

    /// `evict`, but what leaves the device moves to the host as long as there is room.
    ///
    /// Args:
    ///     pages: Device pages to evict.
    ///     free_host: Host pages to move to. Those that were not needed come back.
    fn evict_to_host(
        &mut self,
        py: Python<'_>,
        pages: usize,
        free_host: Ids<'_, '_>,
    ) -> PyResult<Evicted> {
        arrays::read("free_host", free_host, None, arrays::PAGES, &mut self.pages)?;
        let evicted = &mut self.evicted;
        self.inner.evict_to_host(pages, &self.pages, evicted);
        self.evicted(py)
    }

    /// Evicts leaves from the host until at least so many of its pages are free.
    fn evict_host(&mut self, py: Python<'_>, pages: usize) -> PyResult<Evicted> {
        self.inner.evict_host(pages, &mut self.evicted);
        self.evicted(py)
    }

    /// Gives a node of the device a copy on the host. Lock it until the copies are made.
    ///
    /// Args:
    ///     node: Its number.
    ///     host: Host pages, one for each of its own.
    ///
    /// Returns:
    ///     Copies to make, int32 `(n, 2)`: from a device page to a host page.
    ///
    /// Raises:
    ///     RadixError: Another number of pages, or a node that is not on the device, has a copy, or was evicted.
    fn backup(&mut self, py: Python<'_>, node: NodeNumber, host: Ids<'_, '_>) -> PyResult<Array> {
        arrays::read("host", host, None, arrays::PAGES, &mut self.pages)?;
        let mut moves = Vec::new();
        let copied = self.inner.backup(node.0, &self.pages, &mut moves);
        copied.map_err(|error| from_radix(&error))?;
        moved(py, &moves)
    }

    /// Brings a node, and what is above it, from the host back to the device. Lock it until the copies are made.
    ///
    /// Args:
    ///     node: Its number.
    ///     device: Device pages, as many as `Match.host_pages` said.
    ///
    /// Returns:
    ///     Copies to make, int32 `(n, 2)`: from a host page to a device page.
    ///
    /// Raises:
    ///     RadixError: Another number of pages, or a node that was evicted.
    fn load(&mut self, py: Python<'_>, node: NodeNumber, device: Ids<'_, '_>) -> PyResult<Array> {
        arrays::read("device", device, None, arrays::PAGES, &mut self.pages)?;
        let mut moves = Vec::new();
        let loaded = self.inner.load(node.0, &self.pages, &mut moves);
        loaded.map_err(|error| from_radix(&error))?;
        moved(py, &moves)
    }

    /// Removes everything, locked or not, and gives all pages back.
    fn reset(&mut self, py: Python<'_>) -> PyResult<Evicted> {
        self.inner.reset(&mut self.evicted);
        self.evicted(py)
    }

    /// Joins nodes that nothing locks with their only child where that copies nothing. Looks at every node: for idle times.
    ///
    /// Returns:
    ///     Nodes that it saved.
    fn merge(&mut self) -> usize {
        self.inner.merge()
    }

    /// A node's properties.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn info(&self, node: NodeNumber) -> PyResult<NodeInfo> {
        let info = self.inner.info(node.0);
        let info = info.map_err(|error| from_radix(&error))?;
        Ok(info.into())
    }

    /// Device pages that nothing locks.
    #[getter]
    fn evictable_pages(&self) -> usize {
        self.inner.evictable_pages()
    }

    /// Device pages that are locked.
    #[getter]
    fn protected_pages(&self) -> usize {
        self.inner.protected_pages()
    }

    /// Pages on the device.
    #[getter]
    fn device_pages(&self) -> usize {
        self.inner.device_pages()
    }

    /// Pages on the host.
    #[getter]
    fn host_pages(&self) -> usize {
        self.inner.host_pages()
    }

    /// Bytes that the index takes.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.inner.memory_bytes()
    }

    /// Takes what was recorded since the last call.
    fn take_events(&mut self) -> Vec<CacheEvent> {
        let events = self.inner.take_events();
        events.into_iter().map(CacheEvent::from).collect()
    }

    /// The tree for Graphviz, with sizes, locks and heat.
    fn to_dot(&self) -> String {
        self.inner.to_dot()
    }

    /// The tree as JSON.
    fn to_json(&self) -> String {
        self.inner.to_json()
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// True, empty or not.
    #[expect(clippy::unused_self, reason = "Python asks an instance")]
    fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self) -> String {
        let config = self.inner.config();
        format!(
            "RadixIndex(page_size={}, policy={}, nodes={}, evictable_pages={}, protected_pages={}, host_pages={})",
            config.page_size,
            format!("{:?}", config.policy).to_lowercase(),
            self.inner.len(),
            self.inner.evictable_pages(),
            self.inner.protected_pages(),
            self.inner.host_pages()
        )
    }
}

impl RadixIndex {
    /// Reads a key; returns the time of the call.
    fn begin(&mut self, tokens: Ids<'_, '_>, limit: Option<usize>) -> PyResult<u64> {
        self.read_tokens(tokens, limit)?;
        self.now += 1;
        Ok(self.now)
    }

    /// `begin` for a lookup: where the first page is unknown, the rest of a long key is not read.
    fn begin_match(
        &mut self,
        tokens: Ids<'_, '_>,
        namespace: Option<&str>,
        limit: Option<usize>,
    ) -> PyResult<u64> {
        let config = self.inner.config();
        let first = config.page_size as usize + usize::from(config.bigram);
        let view = View::of("tokens", tokens)?;
        let start = limit.unwrap_or(first).min(first);
        view.read(Some(start), arrays::TOKENS, &mut self.tokens)?;
        self.now += 1;
        if self.inner.peek(key(&self.tokens, namespace)) != (0, 0) {
            view.read(limit, arrays::TOKENS, &mut self.tokens)?;
        }
        Ok(self.now)
    }

    fn read_tokens(&mut self, tokens: Ids<'_, '_>, limit: Option<usize>) -> PyResult<()> {
        arrays::read("tokens", tokens, limit, arrays::TOKENS, &mut self.tokens)
    }

    fn put(&mut self, namespace: Option<&str>, how: InsertParams) -> PyResult<Inserted> {
        let key = key(&self.tokens, namespace);
        let inserted = self.inner.insert(key, &self.pages, how);
        let inserted = inserted.map_err(|error| from_radix(&error))?;
        Ok(inserted.into())
    }

    fn evicted(&self, py: Python<'_>) -> PyResult<Evicted> {
        Evicted::new(py, &self.evicted)
    }
}

fn key<'a>(tokens: &'a [u32], namespace: Option<&'a str>) -> Key<'a> {
    Key { namespace, tokens }
}
