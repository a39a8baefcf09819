//! A staged forward pass.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::images::PassImages;

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
    /// `[tokens, 2]` int64: storage slots, and the tokens that they have KV of, to be recorded with those of the pass; None when
    /// no tokens need be recorded.
    token_history: Option<Py<PyBytes>>,
}

impl Pass {
    /// The staged pass of a batch.
    pub(crate) fn new(
        py: Python<'_>,
        pass: pie_planner::Pass,
        batch: &pie_driver::Batch,
    ) -> PyResult<Self> {
        let mask = batch.attention_mask();
        let mask = mask.map(|mask| Py::new(py, AttentionMask::new(py, &mask)?));
        let adapters = batch.pass_adapters();
        let adapters = adapters.map(|ids| PyBytes::new(py, bytemuck::cast_slice(&ids)).unbind());
        let images = batch.pass_images();
        let images = images.map(|(images, media)| PassImages::new(py, images, media));
        let states = batch.pass_states();
        let states =
            states.map(|states| PyByteArray::new(py, bytemuck::cast_slice(&states)).unbind());
        let token_history = batch.pass_token_history();
        let token_history =
            token_history.map(|pairs| PyBytes::new(py, bytemuck::cast_slice(pairs)).unbind());
        Ok(Self {
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
            token_history,
        })
    }
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
    fn new(py: Python<'_>, mask: &pie_planner::AttentionMask<'_>) -> PyResult<Self> {
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
