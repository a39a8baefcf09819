//! The n-gram drafter by itself, for engines other than the driver's.

use pie_speculation::{Config, Drafts, Step, Tree};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// N-gram drafter: indexes the tokens of sequences (contexts), and proposes draft trees of one size for each.
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
    /// Creates a drafter with an empty index.
    ///
    /// Args:
    ///     nodes: Nodes per tree, the context's last token included: `nodes - 1` drafts.
    ///     max_depth: Longest match, in tokens.
    ///     capacity: Tokens of the history that all contexts share, at most 64 bytes each.
    ///     context_bytes: Memory limit of the contexts' own text, in bytes; beyond it the least recently used context
    ///         is released.
    ///     branches: Whether trees may branch; otherwise each is a chain.
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

    /// Appends tokens to a context without drafting.
    ///
    /// Args:
    ///     context: Id of the context, not 0.
    ///     position: Position of the first of these tokens in the context.
    ///     tokens: Token ids, at least one.
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

    /// Appends tokens to contexts, and drafts after each.
    ///
    /// Args:
    ///     contexts: Ids of the contexts, none of them 0.
    ///     positions: Position of the first of these tokens in each context. Tokens that are already known from there
    ///         on are compared, and replaced from the first difference; after a gap the context starts again.
    ///     tokens: Token ids for each context, at least one.
    ///
    /// Returns:
    ///     Two buffers in native byte order, for `n` contexts: the tokens, int64 `(n, nodes)`, where node 0 is the
    ///     context's last token and missing nodes are token 0; and the tree mask, bytes `(n, nodes, nodes)`: 1 in row
    ///     `i` and column `j` if node `j` is node `i` or an ancestor of it.
    ///
    /// Raises:
    ///     ValueError: The lists differ in length, an id is 0, or a context has no tokens.
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

    /// Releases a context. Its text stays in the shared history.
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
