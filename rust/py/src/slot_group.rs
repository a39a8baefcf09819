//! A staged slot group.

use pie_batch::SlotClass;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Staged slots, class by class in the order of the attributes.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct SlotGroup {
    inner: pie_batch::SlotGroup,
    labels: Vec<[i64; 2]>,
}

impl SlotGroup {
    /// The staged group of a batch.
    pub(crate) fn of(inner: pie_batch::SlotGroup, batch: &pie_serve::Batch) -> Self {
        let labels = batch.group_labels().to_vec();
        Self { inner, labels }
    }
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
