//! Work that needs the model: a planned batch, a copy of pages, or an adapter to load.

use std::sync::Arc;

use pie_batch::{Outputs, SlotClass};
use pie_serve::{DeviceTimes, Media, Note};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

use crate::error::from_stage;

/// What the server and its jobs share of Python's: the staging block and the log.
pub(crate) struct Shared {
    block: PyBuffer<u8>,
    report: Py<PyAny>,
}

impl Shared {
    pub(crate) fn new(block: PyBuffer<u8>, needed: usize, report: Py<PyAny>) -> PyResult<Self> {
        if block.readonly() || !block.is_c_contiguous() || block.len_bytes() < needed {
            return Err(PyValueError::new_err(format!(
                "the staging block must be writable, contiguous and at least {needed} bytes; it has {}",
                block.len_bytes()
            )));
        }
        Ok(Self { block, report })
    }

    pub(crate) fn report(&self, py: Python<'_>, notes: &[Note]) -> PyResult<()> {
        notes
            .iter()
            .try_for_each(|note| self.report.call1(py, (note.kind, &note.text)).map(drop))
    }

    /// The staging block as plain bytes.
    #[expect(unsafe_code, reason = "the one view over the engine's memory")]
    fn block_bytes<'a>(&'a self, _attached: Python<'a>) -> &'a mut [u8] {
        // SAFETY: `new` accepted the buffer as writable and contiguous, and the `PyBuffer` keeps its memory alive. By
        // the contract of `Server.serve` nobody else writes to it, and the engine reads it only between two calls of
        // the one open batch, never while this exclusive slice lives.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.block.buf_ptr().cast::<u8>(),
                self.block.len_bytes(),
            )
        }
    }
}

/// One staged forward pass.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Pass {
    /// Rows.
    tokens: usize,
    /// Requests.
    requests: usize,
    /// Whether every request has exactly one row, of text, which sees all KV up to itself.
    decode: bool,
    /// Sum of the KV lengths after the pass.
    seq_lens_sum: u64,
    /// Changed block-table entries.
    updates: usize,
    /// Sampling slots of the pass, over all its groups.
    slots: usize,
    /// What the rows may attend to; None when each sees all KV up to itself.
    mask: Option<Py<AttentionMask>>,
    /// `[requests]` int64: the adapter of each request, -1 for none; None when no request has one.
    adapters: Option<Py<PyBytes>>,
    /// Images that give some rows their embeddings; None when all rows are text.
    images: Option<Py<PassImages>>,
    /// `[requests, 2]` int64: slot of the state pool, 0 for the padding slot, and 1 where it starts from zeros; None for a
    /// model without recurrent state.
    states: Option<Py<PyByteArray>>,
}

/// Which KV indices each row of a pass may attend to.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct AttentionMask {
    /// `[requests]` int64: first word of each request.
    offsets: Py<PyByteArray>,
    /// `[words]` int32, row by row: bit `i` of a row's word `w` admits KV index `32 w + i`. A row has
    /// `ceil(KV length after the pass / 32)` words.
    words: Py<PyByteArray>,
}

impl AttentionMask {
    fn new(py: Python<'_>, mask: &pie_batch::AttentionMask<'_>) -> PyResult<Self> {
        let mut offsets: Vec<i64> = mask.offsets().map(|offset| offset as i64).collect();
        let bytes = size_of::<i32>() * offsets.pop().unwrap_or(0) as usize;
        let words = PyByteArray::new_with(py, bytes, |bytes| {
            // Python's allocator aligns more than that.
            let words = bytemuck::try_cast_slice_mut(bytes);
            mask.write(words.map_err(|error| PyRuntimeError::new_err(error.to_string()))?);
            Ok(())
        });
        Ok(Self {
            offsets: PyByteArray::new(py, bytemuck::cast_slice(&offsets)).unbind(),
            words: words?.unbind(),
        })
    }
}

/// The images of a pass. Their rows are staged with the token `vocab_size`, which no text has.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct PassImages {
    /// In the order of their rows.
    spans: Vec<Py<ImageSpan>>,
    /// `[3, tokens]` int64: rotary position of each row of the pass on the axes time, height and width.
    positions: Py<PyByteArray>,
}

impl PassImages {
    fn new(
        py: Python<'_>,
        images: pie_batch::PassImages,
        media: &Arc<Media>,
    ) -> PyResult<Py<Self>> {
        let spans = images.spans.into_iter().map(|inner| {
            let media = Arc::clone(media);
            Py::new(py, ImageSpan { inner, media })
        });
        let positions = bytemuck::cast_slice(&images.positions);
        let images = Self {
            spans: spans.collect::<PyResult<_>>()?,
            positions: PyByteArray::new(py, positions).unbind(),
        };
        Py::new(py, images)
    }
}

/// An image with rows in a pass. Its buffer is the pixels: float32 `[patches, values of a patch]`, little-endian, at any
/// address.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct ImageSpan {
    inner: pie_batch::ImageSpan,
    media: Arc<Media>,
}

#[pymethods]
impl ImageSpan {
    /// Tells it from every other image that the planner has seen.
    #[getter]
    const fn number(&self) -> u64 {
        self.inner.number
    }

    /// Its request within the pass.
    #[getter]
    const fn request(&self) -> usize {
        self.inner.request
    }

    /// KV indices of its first row and behind its last one, also of rows in other passes.
    #[getter]
    const fn kv(&self) -> (usize, usize) {
        (self.inner.kv.start, self.inner.kv.end)
    }

    /// Whether a later pass has rows of it.
    #[getter]
    const fn continues(&self) -> bool {
        self.inner.continues
    }

    /// Patches in time, height and width.
    #[getter]
    const fn grid(&self) -> (u32, u32, u32) {
        let [time, height, width] = self.inner.grid;
        (time, height, width)
    }

    /// The pixels, as bytes.
    #[getter]
    fn pixels<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    #[expect(unsafe_code, reason = "the buffer protocol is a C interface")]
    // SAFETY: the interpreter alone calls it, with a view that its buffer protocol lets it fill.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        let span = slf.get();
        let pixels = &span.media.pixels()[span.inner.pixels.clone()];
        let (start, len) = (pixels.as_ptr().cast_mut().cast(), pixels.len() as isize);
        // SAFETY: the interpreter hands in a `Py_buffer` to fill. The bytes live as long as `slf`, to which the view
        // holds a reference; nobody writes to them, and the view is read-only.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        match status {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

/// Staged slots, class by class in the order of the attributes.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct SlotGroup {
    inner: pie_batch::SlotGroup,
    labels: Vec<[i64; 2]>,
}

#[pymethods]
impl SlotGroup {
    /// A group of the given sizes; the planner makes them, tests may.
    #[new]
    #[pyo3(signature = (greedy = 0, plain = 0, filtered = 0, dists = 0, logits = 0, logprobs = 0, entropies = 0))]
    fn new(
        greedy: usize,
        plain: usize,
        filtered: usize,
        dists: usize,
        logits: usize,
        logprobs: usize,
        entropies: usize,
    ) -> Self {
        let counts = [greedy, plain, filtered, dists, logits, logprobs, entropies];
        let inner = pie_batch::SlotGroup {
            counts,
            ..pie_batch::SlotGroup::default()
        };
        Self {
            inner,
            labels: Vec::new(),
        }
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Arg-max slots.
    #[getter]
    const fn greedy(&self) -> usize {
        self.inner.count(SlotClass::Greedy)
    }

    /// Slots that sample the whole distribution.
    #[getter]
    const fn plain(&self) -> usize {
        self.inner.count(SlotClass::Plain)
    }

    /// Slots with top-k, top-p or min-p.
    #[getter]
    const fn filtered(&self) -> usize {
        self.inner.count(SlotClass::Filtered)
    }

    /// Slots that return the most probable tokens.
    #[getter]
    const fn dists(&self) -> usize {
        self.inner.count(SlotClass::Dist)
    }

    /// Slots that return their logits.
    #[getter]
    const fn logits(&self) -> usize {
        self.inner.count(SlotClass::Logits)
    }

    /// Slots that return log-probabilities.
    #[getter]
    const fn logprobs(&self) -> usize {
        self.inner.count(SlotClass::Logprobs)
    }

    /// Slots that return their entropy.
    #[getter]
    const fn entropies(&self) -> usize {
        self.inner.count(SlotClass::Entropy)
    }

    /// Words of the staged logit masks.
    #[getter]
    const fn mask_words(&self) -> usize {
        self.inner.mask_words
    }

    /// Of each log-probability that is asked for: the slot, counted from the first log-probability slot, and the token;
    /// `[labels, 2]` int64.
    #[getter]
    fn labels<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, bytemuck::cast_slice(&self.labels))
    }
}

/// A planned forward request. Stage and run every pass, hand in the tokens of every slot group, then commit. Dropped
/// without a commit it is answered by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Batch {
    inner: pie_serve::Batch,
    shared: Arc<Shared>,
}

impl Batch {
    pub(crate) const fn new(inner: pie_serve::Batch, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }

    fn plan(&self) -> PyResult<&pie_batch::Planner> {
        self.inner
            .plan()
            .ok_or_else(|| PyRuntimeError::new_err("the batch was already answered"))
    }
}

#[pymethods]
impl Batch {
    /// When the request was seen, in nanoseconds of `time.perf_counter_ns`.
    #[getter]
    fn received_ns(&self) -> u64 {
        self.inner.timing().received_ns
    }

    /// Nanoseconds spent on validating the archive.
    #[getter]
    fn parse_ns(&self) -> u64 {
        self.inner.timing().parse.as_nanos() as u64
    }

    /// Nanoseconds spent on planning and staging so far.
    #[getter]
    fn plan_ns(&self) -> u64 {
        self.inner.timing().plan.as_nanos() as u64
    }

    /// Nanoseconds spent on building the response; 0 before the commit.
    #[getter]
    fn respond_ns(&self) -> u64 {
        self.inner.timing().respond.as_nanos() as u64
    }

    /// Requests of the frame.
    #[getter]
    fn requests(&self) -> PyResult<usize> {
        Ok(self.plan()?.request_count())
    }

    /// Rows that the model computes, drafts included.
    #[getter]
    fn tokens(&self) -> PyResult<usize> {
        Ok(self.plan()?.token_count())
    }

    /// The different adapters that the next pass needs.
    fn next_adapters(&self) -> Vec<i64> {
        self.inner.next_adapters()
    }

    /// Empties the requests that the next passes bind to an adapter that cannot be had.
    ///
    /// Args:
    ///     adapter_id: One that the next pass needs.
    ///     reason: What happened and what to do, for the log.
    fn drop_adapter(&mut self, adapter_id: i64, reason: &str) {
        self.inner.drop_adapter(adapter_id, reason);
    }

    /// Does what can be done for drafts before tokens are known; call it while the device computes.
    fn prepare_drafts(&mut self, py: Python<'_>) {
        py.detach(|| self.inner.prepare_drafts());
    }

    /// Writes the next pass into the staging block; None when all are done.
    fn stage(&mut self, py: Python<'_>) -> PyResult<Option<Pass>> {
        self.plan()?;
        let block = self.shared.block_bytes(py);
        let Some(pass) = self.inner.stage(block).map_err(from_stage)? else {
            return Ok(None);
        };
        let mask = self.inner.attention_mask();
        let mask = mask.map(|mask| Py::new(py, AttentionMask::new(py, &mask)?));
        let adapters = self.inner.pass_adapters();
        let adapters = adapters.map(|ids| PyBytes::new(py, bytemuck::cast_slice(&ids)).unbind());
        let images = self.inner.pass_images();
        let images = images.map(|(images, media)| PassImages::new(py, images, media));
        let states = self.inner.pass_states();
        let states =
            states.map(|states| PyByteArray::new(py, bytemuck::cast_slice(&states)).unbind());
        Ok(Some(Pass {
            tokens: pass.tokens,
            requests: pass.requests,
            decode: pass.decode,
            seq_lens_sum: pass.seq_lens_sum,
            updates: pass.updates,
            slots: pass.slots,
            mask: mask.transpose()?,
            adapters,
            images: images.transpose()?,
            states,
        }))
    }

    /// Writes the next slot group of the current pass into the staging block; None when all are done.
    fn stage_slots(&mut self, py: Python<'_>) -> PyResult<Option<SlotGroup>> {
        self.plan()?;
        let block = self.shared.block_bytes(py);
        let group = self.inner.stage_slots(block).map_err(from_stage)?;
        Ok(group.map(|inner| SlotGroup {
            inner,
            labels: self.inner.group_labels().to_vec(),
        }))
    }

    /// Takes what the last staged slot group yields: for each class its slots' values one behind the other.
    ///
    /// Args:
    ///     tokens: `[token slots]` int64; one outside the vocabulary empties its request.
    ///     dist_ids: `[listed]` int64: the tokens of each distribution, most probable first.
    ///     dist_probs: `[listed]` float32: their probabilities.
    ///     logits: `[raw slots * vocabulary]` float32.
    ///     logprobs: `[labels]` float32.
    ///     entropies: `[entropy slots]` float32.
    ///
    /// Raises:
    ///     StageError: The group asks for another number of values.
    #[pyo3(signature = (tokens, dist_ids = None, dist_probs = None, logits = None, logprobs = None, entropies = None))]
    #[expect(clippy::too_many_arguments, reason = "one argument per kind of output")]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn put_outputs(
        &mut self,
        py: Python<'_>,
        tokens: PyBuffer<i64>,
        dist_ids: Option<PyBuffer<i64>>,
        dist_probs: Option<PyBuffer<f32>>,
        logits: Option<PyBuffer<f32>>,
        logprobs: Option<PyBuffer<f32>>,
        entropies: Option<PyBuffer<f32>>,
    ) -> PyResult<()> {
        self.plan()?;
        let [dist_probs, logits, logprobs, entropies] =
            [dist_probs, logits, logprobs, entropies].map(|part| values(py, part));
        let outputs = Outputs {
            tokens: &tokens.to_vec(py)?,
            dist_ids: &values(py, dist_ids)?,
            dist_probs: &dist_probs?,
            logits: &logits?,
            logprobs: &logprobs?,
            entropies: &entropies?,
        };
        self.inner.put_outputs(&outputs).map_err(from_stage)
    }

    /// Builds the response in the slot and publishes it.
    ///
    /// Args:
    ///     h2d_us: Microseconds of host-to-device copies.
    ///     launch_us: Microseconds of issuing the forward pass and sampling.
    ///     sync_us: Microseconds of waiting for the sampled tokens.
    #[pyo3(signature = (*, h2d_us = 0, launch_us = 0, sync_us = 0))]
    fn commit(
        &mut self,
        py: Python<'_>,
        h2d_us: u32,
        launch_us: u32,
        sync_us: u32,
    ) -> PyResult<()> {
        self.plan()?;
        let notes = self.inner.commit(DeviceTimes {
            h2d_us,
            launch_us,
            sync_us,
        });
        self.shared.report(py, &notes)
    }

    /// Answers with an abort, after an engine error: the device's block table counts as lost.
    fn fail(&mut self) {
        self.inner.fail();
    }
}

/// The values of an optional buffer.
fn values<T: Element>(py: Python<'_>, buffer: Option<PyBuffer<T>>) -> PyResult<Vec<T>> {
    buffer.map_or_else(|| Ok(Vec::new()), |buffer| buffer.to_vec(py))
}

/// A copy of whole KV pages within or between the device pool and the host pool, or of recurrent state. Dropped without a commit it is answered
/// by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Copy {
    inner: pie_serve::Copy,
    shared: Arc<Shared>,
}

impl Copy {
    pub(crate) const fn new(inner: pie_serve::Copy, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

#[pymethods]
impl Copy {
    /// Number of pages or slots.
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// The pools of sources and targets: `"D2H"`, `"H2D"`, `"D2D"` or `"H2H"`, with D for device and H for host.
    #[getter]
    fn direction(&self) -> String {
        format!("{:?}", self.inner.direction())
    }

    /// Whether slots of recurrent state are copied, not pages.
    #[getter]
    fn states(&self) -> bool {
        self.inner.states()
    }

    /// Sources and targets, cut so that copying the parts in order, and each of them at once, gives the result of
    /// copying pair by pair. Only lists that overlap have more than one part.
    fn groups(&self) -> Vec<(&[u32], &[u32])> {
        self.inner.groups().collect()
    }

    /// Answers with a status code: 0 = done, 5 = internal failure.
    fn commit(&mut self, py: Python<'_>, status: i32) -> PyResult<()> {
        let note = self.inner.commit(status);
        self.shared.report(py, note.as_slice())
    }
}

/// A batch that the fast lane answered.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Step {
    /// Requests of the batch.
    requests: usize,
    /// Rows that the model computed.
    tokens: usize,
    /// When the request was seen, by `time.perf_counter_ns`.
    received_ns: u64,
    /// Nanoseconds of copying and validating the archive.
    parse_ns: u64,
    /// Nanoseconds of planning and staging.
    plan_ns: u64,
    /// Nanoseconds of the launch.
    launch_ns: u64,
    /// Nanoseconds of waiting for the tokens.
    wait_ns: u64,
    /// Nanoseconds of building the response.
    respond_ns: u64,
}

impl Step {
    pub(crate) fn new(step: &pie_serve::Step) -> Self {
        let nanos = |duration: std::time::Duration| duration.as_nanos() as u64;
        Self {
            requests: step.requests,
            tokens: step.tokens,
            received_ns: step.timing.received_ns,
            parse_ns: nanos(step.timing.parse),
            plan_ns: nanos(step.timing.plan),
            launch_ns: u64::from(step.device.launch_us) * 1000,
            wait_ns: u64::from(step.device.sync_us) * 1000,
            respond_ns: nanos(step.timing.respond),
        }
    }
}

/// Another thread has called `Server.wake`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Wake;

/// An adapter to load, in the place of the one that has its id already. Dropped without a commit it is answered by an
/// abort, and requests find what they found before.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Load {
    inner: pie_serve::Load,
    shared: Arc<Shared>,
}

impl Load {
    pub(crate) const fn new(inner: pie_serve::Load, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

#[pymethods]
impl Load {
    /// The id that requests bind, at least 1.
    #[getter]
    const fn adapter_id(&self) -> i64 {
        self.inner.id()
    }

    /// Where the adapter lies.
    #[getter]
    fn path(&self) -> &str {
        self.inner.path()
    }

    /// Answers with a status code: 0 = done, requests may bind the adapter from now on; 5 = it cannot be had.
    fn commit(&mut self, py: Python<'_>, status: i32) -> PyResult<()> {
        let note = self.inner.commit(status);
        self.shared.report(py, note.as_slice())
    }
}
