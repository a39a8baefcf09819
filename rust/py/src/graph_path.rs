//! The graph path as Python sets it up: memory and graphs.

use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};

use pie_driver::Leader;
use pie_driver::launch::{CudaGraphs, Launch, LaunchError};
use pie_planner::{Layout, STEP_LOGPROB_WORDS, StepMemory, StepSize};
use pie_ring::Wait;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::broadcast::Broadcast;

/// Captured graphs, and the memory that they share with the host. Give it to `Server.serve`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct GraphPath {
    /// `None` once it serves.
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    device: Box<dyn Launch>,
    memory: Buffers,
    sizes: Vec<StepSize>,
    /// Most slots of a graph.
    slots: usize,
    others: OtherGraphs,
    most: usize,
    lead: Option<Leader>,
}

/// Rows of the graphs besides the plain ones, each kind ascending.
struct OtherGraphs {
    grouped: Vec<usize>,
    extended: Vec<usize>,
    adapters: Vec<usize>,
    extended_adapters: Vec<usize>,
    drafting: Vec<usize>,
    extended_drafting: Vec<usize>,
}

#[pymethods]
impl GraphPath {
    /// CUDA graphs, launched by their raw handles on the current device.
    ///
    /// Args:
    ///     block: Writable bytes that graphs read, laid out as `graph_layout(rows, slots)`; large enough for every graph.
    ///     mask_words: `[slots * ceil(vocabulary / 32) + 2 * row_pages]` int32 that graphs read, with extended graphs
    ///         `STEP_EXTRA_WORDS` more: block-table changes for which the block has no room, logit masks, tokens to note, biases.
    ///     results: `[slots]` uint64 that graphs write: for each slot `step << 32 | token`, at once.
    ///     logprobs: `[words]` int32 that extended graphs write before the results: log-probabilities. Without such graphs it may
    ///         be empty, else it has `STEP_LOGPROB_WORDS`.
    ///     graphs: Rows and `cudaGraphExec_t` of each graph, fewest rows first.
    ///     slots: Most slots of a graph; it has as many as rows, if these are fewer.
    ///     stream: The `cudaStream_t` that they run on.
    ///     most: Most rows of one request.
    ///     owner: Owns graphs, stream and memory, and is kept alive with the graph path. Nothing else may use them.
    ///     grouped: Rows and handle of each graph whose block is `graph_layout(rows, slots, grouped=True)`, fewest first; they
    ///         run the steps in which rows read the same KV first, if they have room.
    ///     extended: Rows and handle of each graph whose block is `graph_layout(rows, slots, extended=True)`, fewest first; they
    ///         run the steps whose extension changes logits.
    ///     adapters: Rows and handle of each graph whose block is `graph_layout(rows, slots, adapters=True)`, fewest first; they
    ///         run the steps with LoRA adapters.
    ///     extended_adapters: The same with `extended=True`, for steps with both.
    ///     drafting: Rows and handle of each graph that runs a draft model, whose block is that of `graphs`, fewest first; they
    ///         run the steps whose drafts the planner wants.
    ///     extended_drafting: The same with `extended=True`.
    ///     drafts: `[slots, num_drafts]` int32 that these two write before the results: the drafts of the model after each
    ///         slot's token, -1 for none. None without a draft model.
    ///     num_drafts: Drafts of a slot.
    ///
    /// Raises:
    ///     RuntimeError: There is no CUDA driver, or no context on this thread.
    ///     ValueError: A buffer is too small, or a graph of `grouped` has more rows than slots.
    #[staticmethod]
    #[pyo3(signature = (block, mask_words, results, logprobs, graphs, slots, stream, most, owner, grouped = Vec::new(), extended = Vec::new(), adapters = Vec::new(), extended_adapters = Vec::new(), drafting = Vec::new(), extended_drafting = Vec::new(), drafts = None, num_drafts = 0))]
    #[expect(unsafe_code, reason = "raw handles come from Python as numbers")]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn cuda(
        block: PyBuffer<u8>,
        mask_words: PyBuffer<i32>,
        results: PyBuffer<u64>,
        logprobs: PyBuffer<i32>,
        graphs: Vec<(usize, usize)>,
        slots: usize,
        stream: usize,
        most: usize,
        owner: Py<PyAny>,
        grouped: Vec<(usize, usize)>,
        extended: Vec<(usize, usize)>,
        adapters: Vec<(usize, usize)>,
        extended_adapters: Vec<(usize, usize)>,
        drafting: Vec<(usize, usize)>,
        extended_drafting: Vec<(usize, usize)>,
        drafts: Option<PyBuffer<i32>>,
        num_drafts: usize,
    ) -> PyResult<Self> {
        let mut handles = Vec::new();
        let mut rows_of = |graphs: Vec<(usize, usize)>| {
            let (rows, own): (Vec<usize>, Vec<usize>) = graphs.into_iter().unzip();
            handles.extend(own);
            rows
        };
        let rows = rows_of(graphs);
        let others = OtherGraphs {
            grouped: rows_of(grouped),
            extended: rows_of(extended),
            adapters: rows_of(adapters),
            extended_adapters: rows_of(extended_adapters),
            drafting: rows_of(drafting),
            extended_drafting: rows_of(extended_drafting),
        };
        // SAFETY: the owner keeps the handles valid and to itself; see the docstring.
        let graphs = unsafe { CudaGraphs::new(stream, &handles) };
        let graphs = graphs.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let device = Box::new(Owned {
            graphs,
            _owner: owner,
        });
        let memory = Buffers {
            block,
            mask_words,
            results,
            logprobs,
            drafts: drafts.map(|buffer| (buffer, num_drafts)),
        };
        Self::new(device, memory, rows, others, slots, most)
    }

    /// Calls of a Python function in place of graphs, for a device that has none.
    ///
    /// Args:
    ///     block, mask_words, results, logprobs: As for `cuda`.
    ///     rows: Rows of each graph, fewest first.
    ///     slots, most: As for `cuda`.
    ///     run: Called as `run(graph)` with its number; the results are there when it returns.
    ///     grouped, extended, adapters, extended_adapters, drafting, extended_drafting: Rows of further graphs, as for `cuda`.
    ///     drafts, num_drafts: As for `cuda`.
    ///
    /// Raises:
    ///     ValueError: As for `cuda`.
    #[staticmethod]
    #[pyo3(signature = (block, mask_words, results, logprobs, rows, slots, most, run, grouped = Vec::new(), extended = Vec::new(), adapters = Vec::new(), extended_adapters = Vec::new(), drafting = Vec::new(), extended_drafting = Vec::new(), drafts = None, num_drafts = 0))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn call(
        block: PyBuffer<u8>,
        mask_words: PyBuffer<i32>,
        results: PyBuffer<u64>,
        logprobs: PyBuffer<i32>,
        rows: Vec<usize>,
        slots: usize,
        most: usize,
        run: Py<PyAny>,
        grouped: Vec<usize>,
        extended: Vec<usize>,
        adapters: Vec<usize>,
        extended_adapters: Vec<usize>,
        drafting: Vec<usize>,
        extended_drafting: Vec<usize>,
        drafts: Option<PyBuffer<i32>>,
        num_drafts: usize,
    ) -> PyResult<Self> {
        let device = Box::new(Call { run });
        let others = OtherGraphs {
            grouped,
            extended,
            adapters,
            extended_adapters,
            drafting,
            extended_drafting,
        };
        let memory = Buffers {
            block,
            mask_words,
            results,
            logprobs,
            drafts: drafts.map(|buffer| (buffer, num_drafts)),
        };
        Self::new(device, memory, rows, others, slots, most)
    }

    /// Sends every step to the other ranks of a model, so that their graph paths run it, too.
    ///
    /// Raises:
    ///     ValueError: The graph path already serves.
    fn lead(&self, broadcast: &Broadcast) -> PyResult<()> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = parts.as_mut().ok_or_else(already_serves)?;
        parts.lead = Some(broadcast.lead.clone());
        Ok(())
    }
}

impl GraphPath {
    fn new(
        device: Box<dyn Launch>,
        memory: Buffers,
        rows: Vec<usize>,
        others: OtherGraphs,
        slots: usize,
        most: usize,
    ) -> PyResult<Self> {
        check_rows(&rows, &others, slots)?;
        let sizes = step_sizes(rows, slots);
        memory.check(&sizes, &others, slots)?;
        Ok(Self {
            parts: Mutex::new(Some(Parts {
                device,
                memory,
                sizes,
                slots,
                others,
                most,
                lead: None,
            })),
        })
    }

    /// The graph path for a responder, once.
    pub(crate) fn take(&self, wait: Wait) -> PyResult<pie_driver::GraphPath> {
        let parts = self.parts.lock();
        let parts = parts.unwrap_or_else(PoisonError::into_inner).take();
        let Parts {
            device,
            memory,
            sizes,
            slots,
            others,
            most,
            lead,
        } = parts.ok_or_else(already_serves)?;
        let graph_path = pie_driver::GraphPath::new(device, Box::new(memory), &sizes, most, wait);
        let graph_path = graph_path
            .grouped(&others.grouped)
            .extended(&others.extended)
            .adapters(
                &step_sizes(others.adapters, slots),
                &others.extended_adapters,
            )
            .drafting(
                &step_sizes(others.drafting, slots),
                &others.extended_drafting,
            );
        Ok(match lead {
            Some(lead) => graph_path.with_leader(lead),
            None => graph_path,
        })
    }
}

/// Sizes of graphs with a slot for each row, or `slots` of them.
fn step_sizes(rows: impl IntoIterator<Item = usize>, slots: usize) -> Vec<StepSize> {
    let size = |rows: usize| StepSize {
        rows,
        slots: slots.min(rows),
    };
    rows.into_iter().map(size).collect()
}

/// Rows of each kind of graph rise, and those of the graphs that have a slot for each row are at most `slots`.
fn check_rows(rows: &[usize], others: &OtherGraphs, slots: usize) -> PyResult<()> {
    if rows.is_empty() || !rows.is_sorted_by(|a, b| a < b) || rows[0] == 0 || slots == 0 {
        let text =
            format!("rows are {rows:?} of {slots} slots; both must be positive, and rows rise");
        return Err(PyValueError::new_err(text));
    }
    let OtherGraphs {
        grouped,
        extended,
        adapters,
        extended_adapters,
        drafting,
        extended_drafting,
    } = others;
    for (name, others, most) in [
        ("grouped", grouped, slots),
        ("extended", extended, slots),
        ("adapters", adapters, usize::MAX),
        ("extended_adapters", extended_adapters, slots),
        ("drafting", drafting, usize::MAX),
        ("extended_drafting", extended_drafting, slots),
    ] {
        let exceeds = others.last().is_some_and(|&rows| rows > most);
        if !others.is_sorted_by(|a, b| a < b) || exceeds {
            let text = format!(
                "`{name}` has {others:?} rows of {slots} slots; they must rise up to these"
            );
            return Err(PyValueError::new_err(text));
        }
    }
    Ok(())
}

fn already_serves() -> PyErr {
    PyValueError::new_err("the graph path already serves")
}

fn check<T: Element>(name: &str, buffer: &PyBuffer<T>, needed: usize) -> PyResult<()> {
    if buffer.readonly() || !buffer.is_c_contiguous() || buffer.len_bytes() < needed {
        let found = buffer.len_bytes();
        return Err(PyValueError::new_err(format!(
            "`{name}` must be writable, contiguous and at least {needed} bytes; it has {found}"
        )));
    }
    Ok(())
}

/// Memory of Python's, pinned for a GPU.
struct Buffers {
    block: PyBuffer<u8>,
    mask_words: PyBuffer<i32>,
    results: PyBuffer<u64>,
    logprobs: PyBuffer<i32>,
    /// Of a draft model, with its drafts per slot.
    drafts: Option<(PyBuffer<i32>, usize)>,
}

impl Buffers {
    /// Checks that each buffer is large enough for every graph.
    fn check(&self, sizes: &[StepSize], others: &OtherGraphs, slots: usize) -> PyResult<()> {
        let OtherGraphs {
            grouped,
            extended,
            adapters,
            extended_adapters,
            drafting,
            extended_drafting,
        } = others;
        let bound = step_sizes(adapters.iter().copied(), slots);
        let drafting = step_sizes(drafting.iter().copied(), slots);
        let plain = sizes.iter().chain(&drafting);
        let plain = plain.map(|&size| Layout::graph(size));
        let extended = || extended.iter().chain(extended_drafting);
        let layouts = plain
            .chain(grouped.iter().map(|&rows| Layout::grouped_graph(rows)))
            .chain(extended().map(|&rows| Layout::extended_graph(rows)))
            .chain(bound.iter().map(|&size| Layout::adapter_graph(size)))
            .chain((extended_adapters.iter()).map(|&rows| Layout::extended_adapter_graph(rows)));
        let bytes = layouts.map(|layout| layout.bytes()).max();
        // The others have as many slots as rows.
        let sampled = sizes.iter().chain(&bound).chain(&drafting);
        let sampled = sampled.map(|size| size.slots);
        let rows = grouped.iter().chain(extended()).chain(extended_adapters);
        let results = sampled.chain(rows.copied()).max();
        check("block", &self.block, bytes.unwrap_or(0))?;
        check("mask_words", &self.mask_words, 0)?;
        check(
            "results",
            &self.results,
            results.unwrap_or(0) * size_of::<u64>(),
        )?;
        if let Some((drafts, num_drafts)) = &self.drafts {
            let words = results.unwrap_or(0) * num_drafts;
            check("drafts", drafts, words * size_of::<i32>())?;
        }
        let words = if extended().chain(extended_adapters).next().is_none() {
            0
        } else {
            STEP_LOGPROB_WORDS
        };
        check("logprobs", &self.logprobs, words * size_of::<i32>())
    }
}

#[expect(unsafe_code, reason = "views over the engine's memory")]
impl pie_driver::Memory for Buffers {
    fn step(&mut self) -> StepMemory<'_> {
        // SAFETY: `GraphPath::new` accepted the buffers as writable and contiguous, and they keep their memory alive. By the
        // contract of `GraphPath.cuda` and `GraphPath.call` nothing else writes to them, and the graphs read them only between a
        // launch and its results, when no such view lives.
        unsafe {
            StepMemory {
                block: std::slice::from_raw_parts_mut(
                    self.block.buf_ptr().cast::<u8>(),
                    self.block.len_bytes(),
                ),
                mask_words: std::slice::from_raw_parts_mut(
                    self.mask_words.buf_ptr().cast::<i32>(),
                    self.mask_words.item_count(),
                ),
            }
        }
    }

    fn results(&self) -> &[AtomicU64] {
        // SAFETY: as above, aligned for its element type; a device writes to it at any time, hence the atomic words.
        unsafe {
            std::slice::from_raw_parts(
                self.results.buf_ptr().cast::<AtomicU64>(),
                self.results.item_count(),
            )
        }
    }

    fn logprobs(&self) -> &[AtomicU32] {
        // SAFETY: as for the results.
        unsafe {
            std::slice::from_raw_parts(
                self.logprobs.buf_ptr().cast::<AtomicU32>(),
                self.logprobs.item_count(),
            )
        }
    }

    fn drafts(&self) -> (&[AtomicU32], usize) {
        let Some((drafts, num_drafts)) = &self.drafts else {
            return (&[], 0);
        };
        // SAFETY: as for the results.
        let words = unsafe {
            std::slice::from_raw_parts(drafts.buf_ptr().cast::<AtomicU32>(), drafts.item_count())
        };
        (words, *num_drafts)
    }
}

/// CUDA graphs and the Python object that owns them.
struct Owned {
    graphs: CudaGraphs,
    _owner: Py<PyAny>,
}

impl Launch for Owned {
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError> {
        self.graphs.launch(graph)
    }

    fn ended(&mut self) -> Result<bool, LaunchError> {
        self.graphs.ended()
    }
}

/// Runs a step by calling Python.
struct Call {
    run: Py<PyAny>,
}

impl Launch for Call {
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError> {
        Python::attach(|py| self.run.call1(py, (graph,)).map(drop))
            .map_err(|error| LaunchError::Failed(error.to_string()))
    }

    fn ended(&mut self) -> Result<bool, LaunchError> {
        Ok(true)
    }
}
