//! An open batch.

use std::sync::Arc;

use pie_driver::DeviceTimes;
use pie_planner::Outputs;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::from_batch;
use crate::pass::Pass;
use crate::shared::Shared;
use crate::slot_group::SlotGroup;

/// A planned forward request. Stage and run every pass, hand in the tokens of every slot group, then commit. Dropped
/// without a commit it is answered by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Batch {
    inner: pie_driver::Batch,
    shared: Arc<Shared>,
}

impl Batch {
    pub(crate) const fn new(inner: pie_driver::Batch, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }

    fn plan(&self) -> PyResult<&pie_planner::Plan> {
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
    ///
    /// Raises:
    ///     StageError: The pass before is not done.
    fn drop_adapter(&mut self, adapter_id: i64, reason: &str) -> PyResult<()> {
        let dropped = self.inner.drop_adapter(adapter_id, reason);
        dropped.map_err(from_batch)
    }

    /// Does what can be done for drafts before tokens are known; call it while the device computes.
    fn prepare_drafts(&mut self, py: Python<'_>) {
        py.detach(|| self.inner.prepare_drafts());
    }

    /// Writes the next pass into the staging block; None when all are done.
    ///
    /// Raises:
    ///     StageError: The pass before has slots without outputs.
    fn stage(&mut self, py: Python<'_>) -> PyResult<Option<Pass>> {
        self.plan()?;
        let block = self.shared.block_bytes(py);
        let Some(pass) = self.inner.stage(block).map_err(from_batch)? else {
            return Ok(None);
        };
        Pass::new(py, pass, &self.inner).map(Some)
    }

    /// Writes the next slot group of the current pass into the staging block; None when all are done.
    ///
    /// Raises:
    ///     StageError: The group before has no outputs.
    fn stage_slots(&mut self, py: Python<'_>) -> PyResult<Option<SlotGroup>> {
        self.plan()?;
        let block = self.shared.block_bytes(py);
        let group = self.inner.stage_slots(block).map_err(from_batch)?;
        Ok(group.map(|inner| SlotGroup::of(inner, &self.inner)))
    }

    /// Says why the logit processor of a slot of the last staged group failed. Hand in a token outside the vocabulary for it: its
    /// request alone is then rejected, with this reason.
    fn fail_slot(&mut self, slot: usize, reason: &str) -> PyResult<()> {
        self.plan()?;
        self.inner.fail_slot(slot, reason);
        Ok(())
    }

    /// Takes what the last staged slot group yields: for each class its slots' values one after the other.
    ///
    /// Args:
    ///     tokens: `[token slots]` int64; one outside the vocabulary rejects its request.
    ///     dist_ids: `[listed]` int64: the tokens of each distribution, most probable first.
    ///     dist_probs: `[listed]` float32: their probabilities.
    ///     logits: `[raw slots * vocabulary]` float32.
    ///     logprobs: `[labels]` float32.
    ///     entropies: `[entropy slots]` float32.
    ///     logprob_words: `[words]` int32: of each position the log-probability of its token, the most probable tokens, best first,
    ///         their log-probabilities, those of tokens that are given for it; floats as their bits.
    ///
    /// Raises:
    ///     StageError: The group asks for another number of values, or there is none.
    #[pyo3(signature = (tokens, dist_ids = None, dist_probs = None, logits = None, logprobs = None, entropies = None, logprob_words = None))]
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
        logprob_words: Option<PyBuffer<i32>>,
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
            logprob_words: &values(py, logprob_words)?,
        };
        self.inner.put_outputs(&outputs).map_err(from_batch)
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
