//! The planner as Python sees it until a server takes it.

use std::num::NonZeroUsize;

use pie_planner::{DraftOptions, LimitError, Limits, NgramConfig, SuffixConfig, VisionConfig};
use pie_ring::RegionLayout;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Turns frames into passes over a staging block. Give it to `Server.serve`.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Planner {
    pub(crate) inner: Option<pie_planner::Planner>,
    layout: pie_planner::Layout,
    attention_mask_bytes: usize,
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
    ///     masks: The engine applies attention masks; otherwise requests whose mask is not causal are rejected.
    ///     adapter_slots: Adapters that a pass can hold, no adapter being one of them; 0 for an engine without adapters.
    ///     vision: What the engine's encoder takes: numbers of a patch, patches that are merged per side, and patches of
    ///         the longest side. None: requests with images are rejected.
    ///     embedding_size: Numbers of a pooled row of an embedding model; 0 for a model that generates.
    ///     embed_size: Numbers of an embedding of `input_embeds`; 0: requests with some are rejected.
    ///
    /// Raises:
    ///     ValueError: A limit is 0, or the pool has more storage slots than a 31-bit index names.
    #[new]
    #[pyo3(signature = (*, page_size, total_pages, vocab_size, max_positions, row_pages, max_requests, chunk_tokens, max_slots, random_seed, states = 0, masks = true, adapter_slots = 0, vision = None, embedding_size = 0, embed_size = 0))]
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
        adapter_slots: usize,
        vision: Option<(u32, u32, u32)>,
        embedding_size: u32,
        embed_size: u32,
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
        let refuse = |error: LimitError| PyValueError::new_err(error.to_string());
        limits.check().map_err(refuse)?;
        let mut inner = pie_planner::Planner::new(limits, random_seed)
            .with_states(states)
            .with_embeddings(embedding_size)
            .with_input_embeds(embed_size);
        if !masks {
            inner = inner.without_masks();
        }
        if let Some(slots) = NonZeroUsize::new(adapter_slots) {
            inner = inner.with_adapters(slots);
        }
        if let Some((patch_values, merge_size, max_side)) = vision {
            let vision = VisionConfig {
                patch_values,
                merge_size,
                max_side,
            };
            vision.check().map_err(refuse)?;
            inner = inner.with_vision(vision);
        }
        let layout = inner.layout().clone();
        Ok(Self {
            inner: Some(inner),
            layout,
            attention_mask_bytes: size_of::<i32>() * limits.attention_words(),
        })
    }

    /// Drafts for requests that ask for them, from what contexts have said.
    ///
    /// Args:
    ///     num_drafts: Most drafts of a request.
    ///     max_depth: Longest match, in tokens.
    ///     min_n: Shortest match that drafts.
    ///     max_n: Longest match, if that is less than `max_depth`.
    ///     capacity: Tokens of the history that contexts share.
    ///     context_bytes: Memory of contexts, above which the one that was not used for longest is released.
    ///     host_pages: Size of the engine's host pool.
    ///     graph_sizes: Rows of the graphs that a step may run as, rising.
    ///     suffix: For suffix decoding its `max_spec_factor` and `min_token_prob`; None for n-gram drafts only.
    ///
    /// Raises:
    ///     ValueError: A limit is out of range, or the planner was given away.
    #[pyo3(signature = (*, num_drafts, max_depth, min_n, max_n, capacity, context_bytes, host_pages, graph_sizes, suffix))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword-only limits, named at the call"
    )]
    fn draft(
        &mut self,
        num_drafts: usize,
        max_depth: usize,
        min_n: usize,
        max_n: Option<usize>,
        capacity: usize,
        context_bytes: usize,
        host_pages: u32,
        graph_sizes: Vec<usize>,
        suffix: Option<(f32, f32)>,
    ) -> PyResult<()> {
        let options = DraftOptions {
            ngram: Some(NgramConfig {
                max_depth,
                min_n,
                max_n,
                capacity,
                context_bytes,
                suffix: suffix.map(|(max_spec_factor, min_token_prob)| SuffixConfig {
                    max_spec_factor,
                    min_token_prob,
                }),
            }),
            num_drafts,
            graph_sizes,
            model_sizes: Vec::new(),
            host_pages,
        };
        self.enable_drafts(&options)
    }

    /// Drafts for requests that ask for them, as the draft model computes them in the graphs of the steps.
    ///
    /// Args:
    ///     num_drafts: Most drafts of a request.
    ///     host_pages: Size of the engine's host pool.
    ///     graph_sizes: Rows of the graphs that a step may run as, rising.
    ///     model_sizes: Rows of those that run the draft model, rising.
    ///
    /// Raises:
    ///     ValueError: The planner was given away.
    #[pyo3(signature = (*, num_drafts, host_pages, graph_sizes, model_sizes))]
    fn draft_by_model(
        &mut self,
        num_drafts: usize,
        host_pages: u32,
        graph_sizes: Vec<usize>,
        model_sizes: Vec<usize>,
    ) -> PyResult<()> {
        self.enable_drafts(&DraftOptions {
            ngram: None,
            num_drafts,
            graph_sizes,
            model_sizes,
            host_pages,
        })
    }

    /// Size of the staging block in bytes.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Bytes of the largest attention mask of a pass, outside of the staging block.
    #[getter]
    fn attention_mask_bytes(&self) -> usize {
        self.attention_mask_bytes
    }

    /// The arrays of the staging block, in the order in which they lie.
    ///
    /// Returns:
    ///     Of each array its name, and dtype, byte offset and capacity in elements.
    #[getter]
    fn layout(&self) -> Vec<Field> {
        fields(&self.layout)
    }
}

impl Planner {
    fn enable_drafts(&mut self, options: &DraftOptions) -> PyResult<()> {
        let given_away = || PyValueError::new_err("the planner already serves");
        let planner = self.inner.as_mut().ok_or_else(given_away)?;
        planner
            .enable_drafts(options)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// The arrays of the block of a graph, in the order in which they lie; see `Planner.layout`.
///
/// Args:
///     rows: Tokens that it has room for.
///     slots: Of these, how many can be sampled. With fewer slots than rows the block says the row of each slot.
///     grouped: Whether the block says which rows read the same KV first; then there are as many slots as rows.
///     extended: Whether the block says how logits are changed before they are sampled; then there are as many slots as rows.
///     adapters: Whether the block has the device slot of the LoRA adapter of each row; not with `grouped`.
#[pyfunction]
#[pyo3(signature = (rows, slots, grouped = false, extended = false, adapters = false))]
pub(crate) fn graph_layout(
    rows: usize,
    slots: usize,
    grouped: bool,
    extended: bool,
    adapters: bool,
) -> Vec<Field> {
    let size = pie_planner::StepSize {
        rows,
        slots: slots.min(rows),
    };
    fields(&match (grouped, extended, adapters) {
        (_, true, true) => pie_planner::Layout::extended_adapter_graph(rows),
        (_, true, false) => pie_planner::Layout::extended_graph(rows),
        (true, ..) => pie_planner::Layout::grouped_graph(rows),
        (false, false, true) => pie_planner::Layout::adapter_graph(size),
        (false, false, false) => pie_planner::Layout::graph(size),
    })
}

/// Name, and dtype, byte offset and capacity in elements.
type Field = (&'static str, (&'static str, usize, usize));

fn fields(layout: &pie_planner::Layout) -> Vec<Field> {
    let entry = |field: &pie_planner::Field| {
        (
            field.name,
            (field.dtype.name(), field.offset, field.capacity),
        )
    };
    layout.fields().iter().map(entry).collect()
}
