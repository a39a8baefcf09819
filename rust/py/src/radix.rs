//! The prefix index by itself, for engines other than the driver's.

use pie_kv_cache::radix::{Config, InsertParams, Key, Policy};
use pyo3::prelude::*;

use crate::arrays::{self, Array, Ids, NodeNumber, View};
use crate::error::{from_pages, from_radix};
use crate::pages::PagePool;
use crate::radix_results::{CacheEvent, Evicted, Inserted, Match, NodeInfo, moved};

/// Prefix cache index: a radix tree that maps token sequences to KV page ids.
///
/// It owns no memory. Tokens and page ids are passed as one-dimensional arrays of 32-bit or 64-bit integers; page ids
/// are returned as NumPy arrays of int32. Tokens after the last whole page of a key are ignored. Nodes are identified
/// by numbers, which are not reused after an eviction.
///
/// Recency is counted in calls: each call is one unit of the time by which `lru` and similar policies evict.
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
    /// Creates an empty index.
    ///
    /// Args:
    ///     page_size: Tokens per page, 1 to 1,024.
    ///     policy: Eviction policy: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
    ///     bigram: Keys are pairs of neighbouring tokens: `n` tokens are `n - 1` units.
    ///     events: Record KV events, at the cost of one SHA-256 per page.
    ///     split_keeps_age: Both parts of a split node keep its creation time, as in SGLang 0.5.23; otherwise the
    ///         first part is new, as in 0.5.17.
    ///
    /// Raises:
    ///     RadixError: The page size is out of range, or the policy is unknown.
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

    /// Finds the longest cached prefix, and marks it as the most recently used.
    ///
    /// Args:
    ///     tokens: The key: token ids below 2^32.
    ///     namespace: Sequences in different namespaces never share KV.
    ///     limit: Use only this many tokens from the start of the key; None for all.
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

    /// Finds the longest cached prefix and locks it on all tiers, so that it is not evicted before it is unlocked.
    ///
    /// Use the result as a context manager, or unlock it with `Match.unlock`.
    ///
    /// Args:
    ///     tokens: The key: token ids below 2^32.
    ///     namespace: Sequences in different namespaces never share KV.
    ///     limit: Use only this many tokens from the start of the key; None for all.
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

    /// Number of pages of a key on the device, and of those after them on the host only. Does not update the recency.
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

    /// Finds a cached page that shares a prefix with the rest of a key, after `found`, for copy-on-write.
    ///
    /// Returns:
    ///     Page id, number of shared tokens, node, and whether the page is on the device; None if there is no such
    ///     page.
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

    /// Inserts a key whose KV is in the given device pages.
    ///
    /// Args:
    ///     tokens: The key: token ids below 2^32.
    ///     pages: Page ids, one for each whole page of the key. Cached parts of the key keep their pages.
    ///     namespace: Sequences in different namespaces never share KV.
    ///     limit: Use only this many tokens from the start of the key; None for all.
    ///     priority: Minimum priority of the nodes on the path, for the policy `priority`.
    ///     chunked: A chunk of a prompt that will be inserted again with more tokens: does not count as a hit.
    ///     inserted: Number of tokens that this sequence inserted before: nodes within them count no hit.
    ///
    /// Raises:
    ///     RadixError: The number of page ids is not the number of whole pages of the key.
    ///     TypeError: `tokens` or `pages` is not an array of integers.
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

    /// Inserts a key, and allocates the pages of its new part from a pool, as pages of the prefix index.
    ///
    /// Args:
    ///     tokens: The key: token ids below 2^32.
    ///     pool: Where pages are allocated. After an eviction, return them with `PagePool.uncache`.
    ///     namespace: Sequences in different namespaces never share KV.
    ///     limit: Use only this many tokens from the start of the key; None for all.
    ///     priority: Minimum priority of the nodes on the path, for the policy `priority`.
    ///     chunked: A chunk of a prompt that will be inserted again with more tokens: does not count as a hit.
    ///     inserted: Number of tokens that this sequence inserted before: nodes within them count no hit.
    ///
    /// Returns:
    ///     The result, and the ids of the new pages, int32 `(pages - existing,)`.
    ///
    /// Raises:
    ///     PagesError: The pool has too few free pages; nothing was inserted.
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

    /// Device page ids of the path to a node, int32, from the start of the sequence.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn path_pages(&mut self, py: Python<'_>, node: NodeNumber) -> PyResult<Array> {
        let found = self.inner.path_pages(node.0, &mut self.pages);
        found.map_err(|error| from_radix(&error))?;
        Array::new(py, &self.pages)
    }

    /// Locks a node and its ancestors against eviction; locks are counted.
    ///
    /// Returns:
    ///     Number of device pages that became protected.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn lock(&mut self, node: NodeNumber) -> PyResult<usize> {
        self.inner.lock(node.0).map_err(|error| from_radix(&error))
    }

    /// Releases one lock of a node and its ancestors.
    ///
    /// Returns:
    ///     Number of device pages that became evictable.
    ///
    /// Raises:
    ///     RadixError: The node is not locked, or was evicted.
    fn unlock(&mut self, node: NodeNumber) -> PyResult<usize> {
        self.inner
            .unlock(node.0)
            .map_err(|error| from_radix(&error))
    }

    /// Evicts leaves from the device until at least `pages` pages are evicted, or no unlocked leaf is left.
    ///
    /// Leaves are evicted whole, so the result may have more pages. Nodes with a host copy stay on the host.
    fn evict(&mut self, py: Python<'_>, pages: usize) -> PyResult<Evicted> {
        self.inner.evict(pages, &mut self.evicted);
        self.evicted(py)
    }

    /// Like `evict`, but moves evicted nodes to the host while host pages are left.
    ///
    /// Args:
    ///     pages: Device pages to evict.
    ///     free_host: Ids of free host pages. Unused ones are returned in `Evicted.host`.
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

    /// Evicts leaves from the host until at least `pages` host pages are free, or no unlocked leaf is left.
    fn evict_host(&mut self, py: Python<'_>, pages: usize) -> PyResult<Evicted> {
        self.inner.evict_host(pages, &mut self.evicted);
        self.evicted(py)
    }

    /// Registers a host copy of a device node. Keep the node locked until the copies are done.
    ///
    /// Args:
    ///     node: Its number.
    ///     host: Host page ids, one for each of its device pages.
    ///
    /// Returns:
    ///     Copies to make, int32 `(n, 2)`: from a device page to a host page.
    ///
    /// Raises:
    ///     RadixError: The number of pages differs, or the node is not on the device, already has a host copy, or was
    ///         evicted.
    fn backup(&mut self, py: Python<'_>, node: NodeNumber, host: Ids<'_, '_>) -> PyResult<Array> {
        arrays::read("host", host, None, arrays::PAGES, &mut self.pages)?;
        let mut moves = Vec::new();
        let copied = self.inner.backup(node.0, &self.pages, &mut moves);
        copied.map_err(|error| from_radix(&error))?;
        moved(py, &moves)
    }

    /// Loads a node and its ancestors from the host to the device. Keep the node locked until the copies are done.
    ///
    /// Args:
    ///     node: Its number.
    ///     device: Device page ids, `Match.host_pages` of them.
    ///
    /// Returns:
    ///     Copies to make, int32 `(n, 2)`: from a host page to a device page.
    ///
    /// Raises:
    ///     RadixError: The number of pages differs, or the node was evicted.
    fn load(&mut self, py: Python<'_>, node: NodeNumber, device: Ids<'_, '_>) -> PyResult<Array> {
        arrays::read("device", device, None, arrays::PAGES, &mut self.pages)?;
        let mut moves = Vec::new();
        let loaded = self.inner.load(node.0, &self.pages, &mut moves);
        loaded.map_err(|error| from_radix(&error))?;
        moved(py, &moves)
    }

    /// Clears the index, locked nodes included, and returns all pages.
    fn reset(&mut self, py: Python<'_>) -> PyResult<Evicted> {
        self.inner.reset(&mut self.evicted);
        self.evicted(py)
    }

    /// Merges unlocked nodes with their only child where this copies nothing. Visits every node, so call it when
    /// idle.
    ///
    /// Returns:
    ///     Number of nodes removed.
    fn merge(&mut self) -> usize {
        self.inner.merge()
    }

    /// Properties of a node.
    ///
    /// Raises:
    ///     RadixError: The node was evicted.
    fn info(&self, node: NodeNumber) -> PyResult<NodeInfo> {
        let info = self.inner.info(node.0);
        let info = info.map_err(|error| from_radix(&error))?;
        Ok(info.into())
    }

    /// Number of unlocked device pages.
    #[getter]
    fn evictable_pages(&self) -> usize {
        self.inner.evictable_pages()
    }

    /// Number of locked device pages.
    #[getter]
    fn protected_pages(&self) -> usize {
        self.inner.protected_pages()
    }

    /// Number of pages on the device.
    #[getter]
    fn device_pages(&self) -> usize {
        self.inner.device_pages()
    }

    /// Number of pages on the host.
    #[getter]
    fn host_pages(&self) -> usize {
        self.inner.host_pages()
    }

    /// Memory of the index, in bytes.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.inner.memory_bytes()
    }

    /// Returns the KV events since the last call.
    fn take_events(&mut self) -> Vec<CacheEvent> {
        let events = self.inner.take_events();
        events.into_iter().map(CacheEvent::from).collect()
    }

    /// The tree in Graphviz's DOT language, with sizes, locks and recency.
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

    /// Returns True, also if the index is empty.
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
