//! The n-gram drafter by itself, for engines other than the driver's.

use pie_speculation::{Config, Drafts, Step, Tree};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// Remembers what contexts said, and drafts what they will say next as trees of one size.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Drafter {
    inner: pie_speculation::Drafter,
    nodes: usize,
    branches: bool,
    drafts: Drafts,
    tree: Tree,
}

#[pymethods]
impl Drafter {
    /// A drafter that knows nothing.
    ///
    /// Args:
    ///     nodes: Nodes of every tree, the context's last token included.
    ///     max_depth: Longest match, in tokens.
    ///     capacity: Tokens of the history that contexts share.
    ///     context_bytes: Memory of contexts, above which the one that was not used for longest is released.
    ///     branches: Trees may branch; otherwise each is one chain.
    ///
    /// Raises:
    ///     ValueError: A limit is out of range.
    #[new]
    #[pyo3(signature = (*, nodes, max_depth, capacity, context_bytes, branches))]
    fn new(
        nodes: usize,
        max_depth: usize,
        capacity: usize,
        context_bytes: usize,
        branches: bool,
    ) -> PyResult<Self> {
        if nodes == 0 {
            return Err(PyValueError::new_err(
                "a tree of 0 nodes was asked for; it must be 1 at least",
            ));
        }
        let config = Config {
            max_depth,
            capacity,
            context_bytes,
            ..Config::default()
        };
        let inner = pie_speculation::Drafter::new(config)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self {
            inner,
            nodes,
            branches,
            drafts: Drafts::default(),
            tree: Tree::default(),
        })
    }

    /// Appends to a context, as `draft` does, and drafts nothing.
    ///
    /// Args:
    ///     context: Its id, not 0.
    ///     position: The position of the first token here.
    ///     tokens: At least one.
    ///
    /// Raises:
    ///     ValueError: The id is 0, or there are no tokens.
    fn append(
        &mut self,
        py: Python<'_>,
        context: u64,
        position: u32,
        tokens: Vec<u32>,
    ) -> PyResult<()> {
        let tokens = [tokens];
        let steps = steps(&[context], &[position], &tokens)?;
        py.detach(|| self.inner.step(&steps, &mut self.drafts));
        Ok(())
    }

    /// Takes the ends of some contexts, and drafts after each.
    ///
    /// Args:
    ///     contexts: Their ids, none of them 0.
    ///     positions: The position of each one's first token here. What is known from there on is compared, and taken back
    ///         as far as it differs; after a gap the context starts anew.
    ///     tokens: At least one of each.
    ///
    /// Returns:
    ///     The trees one after the other, in native byte order: the tokens of their nodes as int64, the first one's being
    ///     the context's last; and a row of bytes for each node, 1 for itself and the nodes that it follows. A node that
    ///     is missing is a 0 after the first.
    ///
    /// Raises:
    ///     ValueError: There are not as many of each, an id is 0, or a context has no tokens.
    #[expect(clippy::needless_pass_by_value, reason = "made from Python's lists")]
    fn draft<'py>(
        &mut self,
        py: Python<'py>,
        contexts: Vec<u64>,
        positions: Vec<u32>,
        tokens: Vec<Vec<u32>>,
    ) -> PyResult<(Bound<'py, PyByteArray>, Bound<'py, PyByteArray>)> {
        let steps = steps(&contexts, &positions, &tokens)?;
        let (nodes, mask) = py.detach(|| self.grow(&steps));
        Ok((
            PyByteArray::new(py, bytemuck::cast_slice(&nodes)),
            PyByteArray::new(py, &mask),
        ))
    }

    /// Forgets a context; the shared history keeps what it said.
    fn release(&mut self, py: Python<'_>, context: u64) {
        py.detach(|| self.inner.release(context));
    }
}

impl Drafter {
    fn grow(&mut self, steps: &[Step<'_>]) -> (Vec<i64>, Vec<u8>) {
        self.inner.step(steps, &mut self.drafts);
        let (mut tokens, mut mask) = (Vec::new(), Vec::new());
        for step in steps {
            let count = self.nodes - 1;
            if self.branches {
                self.inner.tree(step.context, count, &mut self.tree);
            } else {
                self.inner.chain(step.context, count, &mut self.tree);
            }
            let last = step.tokens.last().copied().unwrap_or(0);
            (self.tree).append_padded(last, self.nodes, &mut tokens, &mut mask);
        }
        (tokens, mask)
    }
}

fn steps<'a>(
    contexts: &[u64],
    positions: &[u32],
    tokens: &'a [Vec<u32>],
) -> PyResult<Vec<Step<'a>>> {
    let numbers @ [all, positioned, spoken] = [contexts.len(), positions.len(), tokens.len()];
    if numbers != [all; 3] {
        let text = format!(
            "{all} contexts, {positioned} positions and tokens of {spoken} were given; their numbers must be equal"
        );
        return Err(PyValueError::new_err(text));
    }
    let all = contexts.iter().zip(positions).zip(tokens);
    all.map(|((&context, &position), tokens)| {
        if tokens.is_empty() || context == 0 {
            let text = format!(
                "context {context} has {} tokens; its id must not be 0, and it needs one token at least",
                tokens.len()
            );
            return Err(PyValueError::new_err(text));
        }
        Ok(Step {
            context,
            position,
            tokens,
            drafts: 0,
        })
    })
    .collect()
}
