//! Grammars as the scheduler's constraints.

use std::sync::Arc;

use pie_grammar::{Compiler, Follower, Grammar, Pending, Progress};
use pie_sched::{Begun, Constrain, Constraint};

/// A grammar for the sequences of requests: [`Arrival::constraint`](crate::Arrival::constraint).
///
/// It is compiled while the request waits in the queue, and masks are computed by the compiler's threads from the moment on at which a
/// token is known.
#[derive(Debug)]
pub struct GrammarConstraint {
    compiler: Compiler,
    pending: Pending,
}

impl GrammarConstraint {
    /// Asks for a grammar and returns at once.
    pub fn new(compiler: &Compiler, grammar: &Grammar) -> Self {
        Self {
            compiler: compiler.clone(),
            pending: compiler.compile(grammar),
        }
    }
}

impl Constrain for GrammarConstraint {
    fn begin(&self, most: u32, jumps: bool) -> Begun {
        match self.pending.progress() {
            Progress::Compiling => Begun::Waiting,
            Progress::Failed(error) => Begun::Failed(error.to_string().into()),
            Progress::Ready(ready) => {
                let follower = Follower::new(&self.compiler, &ready, jumps, most as usize);
                Begun::Ready(Box::new(Following(follower)))
            }
        }
    }
}

#[derive(Debug)]
struct Following(Follower);

impl Constraint for Following {
    fn take(&mut self, token: u32, most: u32) -> bool {
        self.0.take(&[token], most as usize)
    }

    fn next(&mut self, forced: &mut Vec<u32>, mask: &mut Vec<u32>) -> Result<(), Arc<str>> {
        let next = self.0.following().map_err(|error| error.to_string())?;
        forced.extend_from_slice(next.forced);
        mask.clear();
        mask.extend_from_slice(next.mask);
        Ok(())
    }
}
