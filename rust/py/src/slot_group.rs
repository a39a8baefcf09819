//! A staged slot group.

use pie_planner::{CustomSlot, LogprobPosition, RECORD_WORDS, SlotClass};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A slot with a processor of this process.
type Custom<'py> = (usize, u64, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Staged slots, class by class in the order of the attributes.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct SlotGroup {
    inner: pie_planner::SlotGroup,
    labels: Vec<[i64; 2]>,
    records: Vec<[i32; RECORD_WORDS]>,
    bias_words: Vec<i32>,
    logprob_positions: Vec<LogprobPosition>,
    given: Vec<[i64; 2]>,
    custom: Vec<CustomSlot>,
}

impl SlotGroup {
    /// The staged group of a batch.
    pub(crate) fn of(inner: pie_planner::SlotGroup, batch: &pie_driver::Batch) -> Self {
        let labels = batch.group_labels().to_vec();
        let (records, bias_words) = batch.group_records();
        let (logprob_positions, given) = batch.group_logprob_positions();
        Self {
            inner,
            labels,
            records: records.to_vec(),
            bias_words: bias_words.to_vec(),
            logprob_positions: logprob_positions.to_vec(),
            given: given.to_vec(),
            custom: batch.group_custom().to_vec(),
        }
    }
}

#[pymethods]
impl SlotGroup {
    /// A group of the given sizes; the planner makes them, tests may.
    #[new]
    #[pyo3(signature = (greedy = 0, plain = 0, filtered = 0, dists = 0, logits = 0, logprobs = 0, entropies = 0, prompts = 0))]
    #[expect(clippy::too_many_arguments, reason = "one argument per class")]
    fn new(
        greedy: usize,
        plain: usize,
        filtered: usize,
        dists: usize,
        logits: usize,
        logprobs: usize,
        entropies: usize,
        prompts: usize,
    ) -> Self {
        let counts = [
            greedy, plain, filtered, dists, logits, logprobs, entropies, prompts,
        ];
        let inner = pie_planner::SlotGroup {
            counts,
            ..pie_planner::SlotGroup::default()
        };
        Self {
            inner,
            labels: Vec::new(),
            records: Vec::new(),
            bias_words: Vec::new(),
            logprob_positions: Vec::new(),
            given: Vec::new(),
            custom: Vec::new(),
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

    /// Slots for the log-probabilities of a prompt's tokens.
    #[getter]
    const fn prompts(&self) -> usize {
        self.inner.count(SlotClass::Prompt)
    }

    /// The slots whose log-probabilities the extension asks for, in the group's order; `[positions, 5]` int64. Number of the slot
    /// in the group; its token, or -1 for the one that is sampled; most probable tokens that are wanted; 1 for log-probabilities
    /// after the temperature; numbers of its hidden state.
    #[getter]
    fn logprob_positions<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, bytemuck::cast_slice(&self.logprob_positions))
    }

    /// Tokens that are given for positions; `[tokens, 2]` int64: number of the position, and token.
    #[getter]
    fn given<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, bytemuck::cast_slice(&self.given))
    }

    /// The slots whose logits a processor of this process changes: slot within the group, context id, the processor, and the
    /// tokens of the sequence so far as uint32.
    #[getter]
    fn custom<'py>(&self, py: Python<'py>) -> Vec<Custom<'py>> {
        let custom = self.custom.iter().map(|own| {
            let tokens = bytemuck::cast_slice(&own.tokens);
            let (payload, tokens) = (PyBytes::new(py, own.payload()), PyBytes::new(py, tokens));
            (own.slot, own.context, payload, tokens)
        });
        custom.collect()
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

    /// What is asked of each slot's logits before they are sampled, `[slots, 8]` int32, empty when nothing is. Row of the
    /// block table, KV indices of the first token that counts and after the last one, frequency, presence and repetition
    /// penalty (bits of float32), first word of biases, how many they are.
    #[getter]
    fn records<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, bytemuck::cast_slice(&self.records))
    }

    /// `[words]` int32: biases of the records, each a token and what is added to its logit (bits of float32).
    #[getter]
    fn bias_words<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, bytemuck::cast_slice(&self.bias_words))
    }
}
