//! What was served so far.

use pie_driver::{DIRECTIONS, Histogram};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Least exponent of the bounds that `Counts` lists: 2**10 ns is about a microsecond.
const FIRST: u32 = 10;
/// Greatest one: 2**34 ns are 17 seconds.
const LAST: u32 = 34;

/// What a server has served, as it was when it was read; or what came between two readings.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Counts {
    inner: pie_driver::Counts,
}

impl Counts {
    pub(crate) const fn new(inner: pie_driver::Counts) -> Self {
        Self { inner }
    }

    fn histogram(&self, name: &str) -> PyResult<&Histogram> {
        match name {
            "host" => Ok(&self.inner.host),
            "step" => Ok(&self.inner.step),
            _ => Err(pyo3::exceptions::PyValueError::new_err(format!(
                "{name:?} is neither \"host\" nor \"step\""
            ))),
        }
    }
}

#[pymethods]
impl Counts {
    /// Batches that needed the model.
    #[getter]
    const fn steps(&self) -> u64 {
        self.inner.steps()
    }

    /// Batches that the graph path ran.
    #[getter]
    const fn graph_steps(&self) -> u64 {
        self.inner.graph_steps
    }

    /// Batches that the Python path ran.
    #[getter]
    const fn python_steps(&self) -> u64 {
        self.inner.python_steps
    }

    /// Requests of all batches.
    #[getter]
    const fn requests(&self) -> u64 {
        self.inner.requests
    }

    /// Rows that the model computed, drafts included.
    #[getter]
    const fn computed_tokens(&self) -> u64 {
        self.inner.computed_tokens
    }

    /// Of these, input tokens of requests with more than one: prompts, not decodes.
    #[getter]
    const fn prompt_tokens(&self) -> u64 {
        self.inner.prompt_tokens
    }

    /// Tokens that were returned, accepted drafts included.
    #[getter]
    const fn generated_tokens(&self) -> u64 {
        self.inner.generated_tokens
    }

    /// Drafts that were verified.
    #[getter]
    const fn drafts(&self) -> u64 {
        self.inner.drafts
    }

    /// Of these, drafts that were accepted.
    #[getter]
    const fn accepted_drafts(&self) -> u64 {
        self.inner.accepted_drafts
    }

    /// Requests of the last batch.
    #[getter]
    const fn last_requests(&self) -> u64 {
        self.inner.last_requests
    }

    /// Different pages that the requests of one recent batch name: the first after the reading before this one.
    #[getter]
    const fn used_pages(&self) -> u64 {
        self.inner.used_pages
    }

    /// Slots of recurrent state that were copied.
    #[getter]
    const fn copied_states(&self) -> u64 {
        self.inner.copied_states
    }

    /// Batches that failed and were answered by an abort.
    #[getter]
    const fn aborted_batches(&self) -> u64 {
        self.inner.aborted_batches
    }

    /// Answers that came after the client had given up.
    #[getter]
    const fn abandoned(&self) -> u64 {
        self.inner.abandoned
    }

    /// Pages copied, by direction: `"D2H"`, `"H2D"`, `"D2D"` and `"H2H"`.
    #[getter]
    fn copied_pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for (direction, pages) in DIRECTIONS.iter().zip(self.inner.copied_pages) {
            found.set_item(format!("{direction:?}"), pages)?;
        }
        Ok(found)
    }

    /// Requests of batches, and frames, that were refused, by reason.
    #[getter]
    fn refused<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for (reason, count) in &self.inner.refused {
            found.set_item(reason, count)?;
        }
        Ok(found)
    }

    /// What came after `earlier` was read: `last_requests` and `used_pages` are as in this one.
    fn since(&self, earlier: &Self) -> Self {
        Self::new(self.inner.since(&earlier.inner))
    }

    /// The time that a share of the batches does not exceed, to a sixteenth.
    ///
    /// Args:
    ///     name: `"host"` for what the host takes while the device has nothing to do; `"step"` for the time from a
    ///         request's arrival to its answer.
    ///     share: 0.5 for the median, 0.99 for the 99th percentile.
    ///
    /// Returns:
    ///     Microseconds; None without batches.
    ///
    /// Raises:
    ///     ValueError: No times have this name.
    fn quantile_us(&self, name: &str, share: f64) -> PyResult<Option<f64>> {
        let found = self.histogram(name)?.quantile_ns(share);
        Ok(found.map(|ns| ns / 1e3))
    }

    /// Sum of the times, in seconds; names as for `quantile_us`.
    ///
    /// Raises:
    ///     ValueError: No times have this name.
    fn sum_s(&self, name: &str) -> PyResult<f64> {
        Ok(self.histogram(name)?.sum_ns() as f64 / 1e9)
    }

    /// How many times are below each of some bounds, which double; names as for `quantile_us`.
    ///
    /// Returns:
    ///     Of each bound its seconds and the count; the last bound is infinite.
    ///
    /// Raises:
    ///     ValueError: No times have this name.
    fn below(&self, name: &str) -> PyResult<Vec<(f64, u64)>> {
        let histogram = self.histogram(name)?;
        let bound = |exponent: u32| {
            (
                (1_u64 << exponent) as f64 / 1e9,
                histogram.count_below_power_of_two(exponent),
            )
        };
        let bounds = (FIRST..=LAST).map(bound);
        Ok(bounds.chain([(f64::INFINITY, histogram.count())]).collect())
    }
}
