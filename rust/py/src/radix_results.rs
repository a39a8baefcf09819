//! Results of the prefix index.

use std::sync::atomic::{AtomicBool, Ordering};

use pie_kv_cache::radix::Event;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arrays::Array;

/// The longest cached prefix of a key. The result of `match_and_lock` is a context manager that holds the lock.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Match {
    /// Pages of the prefix on the device, int32.
    pages: Array,
    found: pie_kv_cache::radix::MatchResult,
    /// The index in which a lock is held.
    index: Option<Py<PyAny>>,
    held: AtomicBool,
}

impl Match {
    /// A match, with a lock in `index`.
    pub(crate) fn new(
        pages: Array,
        found: pie_kv_cache::radix::MatchResult,
        index: Option<Py<PyAny>>,
    ) -> Self {
        let held = AtomicBool::new(index.is_some());
        Self {
            pages,
            found,
            index,
            held,
        }
    }

    pub(crate) fn found(&self) -> &pie_kv_cache::radix::MatchResult {
        &self.found
    }
}

#[pymethods]
impl Match {
    /// Device page ids of the prefix, int32 `(n,)`.
    #[getter]
    fn pages(&self, py: Python<'_>) -> Array {
        self.pages.clone_ref(py)
    }

    /// The node at which the prefix ends, on any tier; 0 without a match.
    #[getter]
    fn node(&self) -> u64 {
        self.found.node.to_bits()
    }

    /// The node at which the device part of the prefix ends.
    #[getter]
    fn device_node(&self) -> u64 {
        self.found.device_node.to_bits()
    }

    /// Number of pages of the prefix after the device part, which are on the host only.
    #[getter]
    fn host_pages(&self) -> usize {
        self.found.host_pages
    }

    /// Releases the lock.
    ///
    /// Raises:
    ///     RuntimeError: The match has no lock: it was released before, or comes from `match_prefix`.
    fn unlock(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.swap(false, Ordering::Relaxed);
        let index = self.index.as_ref().filter(|_| held);
        let index = index.ok_or_else(|| PyRuntimeError::new_err("this match holds no lock"))?;
        index.call_method1(py, "unlock", (self.node(),)).map(drop)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.held.load(Ordering::Relaxed) {
            self.unlock(py)
        } else {
            Ok(())
        }
    }

    fn __repr__(&self) -> String {
        let held = if self.held.load(Ordering::Relaxed) {
            ", locked"
        } else {
            ""
        };
        format!(
            "Match(node={}, device_pages={}, host_pages={}{held})",
            self.node(),
            self.found.device_pages,
            self.found.host_pages
        )
    }
}

/// Result of an insertion.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Inserted {
    /// Number of pages of the key that were cached on the device before: the caller's pages for them are duplicates.
    existing: usize,
    /// Number of whole pages of the key.
    pages: usize,
    /// The node at which the key ends; 0 if the key has no whole page.
    node: u64,
}

impl From<pie_kv_cache::radix::InsertResult> for Inserted {
    fn from(inserted: pie_kv_cache::radix::InsertResult) -> Self {
        Self {
            existing: inserted.existing,
            pages: inserted.pages,
            node: inserted.node.to_bits(),
        }
    }
}

#[pymethods]
impl Inserted {
    fn __repr__(&self) -> String {
        let Self {
            existing,
            pages,
            node,
        } = self;
        format!("Inserted(existing={existing}, pages={pages}, node={node})")
    }
}

/// Result of an eviction. The caller makes the copies, in order, before it writes to any of the pages.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Evicted {
    device: Array,
    moves: Array,
    host: Array,
}

impl Evicted {
    pub(crate) fn new(
        py: Python<'_>,
        evicted: &pie_kv_cache::radix::EvictResult,
    ) -> PyResult<Self> {
        Ok(Self {
            device: Array::new(py, &evicted.device)?,
            moves: moved(py, &evicted.moves)?,
            host: Array::new(py, &evicted.host)?,
        })
    }
}

#[pymethods]
impl Evicted {
    /// Evicted device page ids, int32, those in `moves` included.
    #[getter]
    fn device(&self, py: Python<'_>) -> Array {
        self.device.clone_ref(py)
    }

    /// Copies to make, int32 `(n, 2)`: from a device page to a host page.
    #[getter]
    fn moves(&self, py: Python<'_>) -> Array {
        self.moves.clone_ref(py)
    }

    /// Host page ids that are free now, int32.
    #[getter]
    fn host(&self, py: Python<'_>) -> Array {
        self.host.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "Evicted(device={}, moves={}, host={})",
            self.device.len(py)?,
            self.moves.len(py)?,
            self.host.len(py)?
        ))
    }
}

/// Properties of a node.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct NodeInfo {
    /// The parent node; 0 for a child of the root.
    parent: u64,
    /// Number of pages.
    pages: usize,
    /// Number of pages from the start of the sequence to the node's end.
    depth: usize,
    /// Number of locks on the node and its descendants.
    locks: u32,
    /// Number of insertions through the node.
    hits: u32,
    /// The highest priority of its insertions.
    priority: i32,
    /// Whether its pages are on the device.
    on_device: bool,
    /// Whether its pages have copies on the host.
    on_host: bool,
    /// Number of child nodes.
    children: usize,
}

impl From<pie_kv_cache::radix::NodeInfo> for NodeInfo {
    fn from(info: pie_kv_cache::radix::NodeInfo) -> Self {
        Self {
            parent: info.parent.to_bits(),
            pages: info.pages,
            depth: info.depth,
            locks: info.locks,
            hits: info.hits,
            priority: info.priority,
            on_device: info.on_device,
            on_host: info.on_host,
            children: info.children,
        }
    }
}

/// A KV event in SGLang's terms: a block is a page.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct CacheEvent {
    /// `stored`, `removed` or `cleared`.
    kind: &'static str,
    /// Hashes of the blocks, 64-bit; of stored blocks each is the parent of the next one.
    hashes: Vec<i64>,
    /// Hash of the first block's parent.
    parent: Option<i64>,
    /// Tokens of all stored blocks; with pairs one more.
    tokens: Vec<u32>,
    /// Tokens (or pairs) per block.
    block_size: u32,
    /// Whether keys are pairs of neighbouring tokens.
    bigram: bool,
    /// The namespace of the stored sequence.
    namespace: Option<String>,
    /// Tier: `GPU` or `CPU_PINNED`; empty for `cleared`.
    medium: &'static str,
}

impl From<Event> for CacheEvent {
    fn from(event: Event) -> Self {
        let cleared = Self {
            kind: "cleared",
            hashes: Vec::new(),
            parent: None,
            tokens: Vec::new(),
            block_size: 0,
            bigram: false,
            namespace: None,
            medium: "",
        };
        match event {
            Event::Stored {
                hashes,
                parent,
                tokens,
                block_size,
                bigram,
                namespace,
                medium,
            } => Self {
                kind: "stored",
                hashes,
                parent,
                tokens,
                block_size,
                bigram,
                namespace: namespace.map(|name| (*name).to_owned()),
                medium: medium.name(),
            },
            Event::Removed { hashes, medium } => Self {
                kind: "removed",
                hashes,
                medium: medium.name(),
                ..cleared
            },
            Event::Cleared => cleared,
        }
    }
}

/// Copies as pairs of pages, `(n, 2)`.
pub(crate) fn moved(py: Python<'_>, moves: &[pie_kv_cache::radix::PageCopy]) -> PyResult<Array> {
    let ids: Vec<_> = moves.iter().map(|it| [it.from, it.to]).collect();
    Array::pairs(py, &ids)
}
