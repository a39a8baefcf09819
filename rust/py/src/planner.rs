//! The planner as Python sees it until a server takes it.

use pie_batch::Limits;
use pie_ring::RegionLayout;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Turns frames into passes over a staging block. Give it to `Server.serve`.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Planner {
    pub(crate) inner: Option<pie_batch::Planner>,
    layout: pie_batch::Layout,
}

#[pymethods]
impl Planner {
    /// A planner for a model and its KV pool.
    ///
    /// Args:
    ///     page_size: Tokens of a KV page.
    ///     total_pages: Pages that the runtime may name.
    ///     vocab_size: Rows of the embedding table.
    ///     max_positions: Rows of the position table.
    ///     row_pages: Pages of one block-table row.
    ///     max_requests: Requests of one pass.
    ///     chunk_tokens: Tokens of one pass.
    ///     max_slots: Logit rows computed at once.
    ///     random_seed: Key of the randomness of unseeded samplers.
    ///     states: Slots of the engine's pool of recurrent state that the runtime may name; 0 for none.
    ///     masks: The engine applies attention masks; otherwise requests whose mask is not causal are emptied.
    ///
    /// Raises:
    ///     ValueError: A limit is 0, or the pool has more storage slots than a 31-bit index names.
    #[new]
    #[pyo3(signature = (*, page_size, total_pages, vocab_size, max_positions, row_pages, max_requests, chunk_tokens, max_slots, random_seed, states = 0, masks = true))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword-only limits, named at the call"
    )]
    fn new(
        page_size: u32,
        total_pages: u32,
        vocab_size: u32,
        max_positions: u32,
        row_pages: u32,
        max_requests: u32,
        chunk_tokens: u32,
        max_slots: u32,
        random_seed: u64,
        states: u32,
        masks: bool,
    ) -> PyResult<Self> {
        let limits = Limits {
            page_size,
            total_pages,
            vocab_size,
            max_positions,
            row_pages,
            max_requests,
            chunk_tokens,
            max_slots,
            reply_bytes: RegionLayout::default().response_capacity() as u32,
        };
        limits
            .check()
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let inner = pie_batch::Planner::new(limits, random_seed).with_states(states);
        let inner = if masks { inner } else { inner.without_masks() };
        let layout = inner.layout().clone();
        Ok(Self {
            inner: Some(inner),
            layout,
        })
    }

    /// Size of the staging block in bytes.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// The arrays of the staging block: name to (dtype, byte offset, capacity in elements), in the order in which they lie.
    #[getter]
    fn layout(&self) -> Vec<(&'static str, (&'static str, usize, usize))> {
        let entry = |field: &pie_batch::Field| {
            (
                field.name,
                (field.dtype.name(), field.offset, field.capacity),
            )
        };
        self.layout.fields().iter().map(entry).collect()
    }
}
