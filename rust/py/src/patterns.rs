//! The layer patterns of an adapter's configuration.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The keys of a PEFT `rank_pattern` or `alpha_pattern`, matched in linear time whatever they are.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct LayerPatterns(pie_grammar::patterns::LayerPatterns);

#[pymethods]
impl LayerPatterns {
    /// Takes the patterns in the configuration's order.
    ///
    /// Raises:
    ///     ValueError: There are too many, or one is too long, cannot be read, or would mean something else to Python's `re`.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn new(py: Python<'_>, patterns: Vec<String>) -> PyResult<Self> {
        py.detach(|| pie_grammar::patterns::LayerPatterns::new(&patterns))
            .map(Self)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The number of the first pattern that matches a layer's name, as PEFT matches them; None if none does.
    ///
    /// Raises:
    ///     ValueError: The name is too long.
    fn first(&self, py: Python<'_>, name: &str) -> PyResult<Option<usize>> {
        py.detach(|| self.0.first(name))
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
