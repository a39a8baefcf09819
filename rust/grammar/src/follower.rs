//! A matcher whose next mask is computed as soon as a token is known.

use std::mem;
use std::sync::{Arc, Mutex};

use crate::compiler::{Compiler, Ready, lock};
use crate::error::GrammarError;
use crate::matcher::{Matcher, only};

/// Follows one sequence. [`take`](Self::take) returns at once, and one of the compiler's threads goes on by the token and computes
/// the mask after it. [`following`](Self::following) gives that mask; where no thread has come to it yet, the caller's does the work.
#[derive(Debug)]
pub struct Follower {
    compiler: Compiler,
    /// Tokens that have no alternative are taken by themselves.
    jumps: bool,
    state: Arc<Mutex<State>>,
    /// Of [`following`](Self::following), so that a caller need not hold a lock.
    mask: Vec<u32>,
    forced: Vec<u32>,
}

#[derive(Debug)]
struct State {
    ready: Arc<Ready>,
    /// Made of `ready` when the first token is followed.
    matcher: Option<Matcher>,
    mask: Vec<u32>,
    /// Tokens that were taken, but not followed.
    taken: Vec<u32>,
    /// Tokens that `matcher` has jumped over since the caller was given some.
    forced: Vec<u32>,
    /// Most tokens that it may jump over.
    most: usize,
    fresh: bool,
    error: Option<GrammarError>,
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next<'a> {
    /// Tokens that come first, because they have no alternative.
    pub forced: &'a [u32],
    /// A bit for each token that may come after these, as [`Matcher::mask_into`] has it.
    pub mask: &'a [u32],
}

impl Follower {
    /// At the start of a text of at most `most` tokens. With `jumps` it goes on over tokens without alternative.
    pub fn new(compiler: &Compiler, ready: &Arc<Ready>, jumps: bool, most: usize) -> Self {
        let state = State {
            ready: Arc::clone(ready),
            matcher: None,
            mask: ready.mask.to_vec(),
            taken: Vec::new(),
            forced: Vec::new(),
            most: if jumps { most } else { 0 },
            // The first mask is there; what it forces is not.
            fresh: !jumps || only(&ready.mask).is_none(),
            error: None,
        };
        Self {
            compiler: compiler.clone(),
            jumps,
            mask: state.mask.clone(),
            state: Arc::new(Mutex::new(state)),
            forced: Vec::new(),
        }
    }

    /// Goes on by tokens that were drawn. Returns whether the last of them ends the text. `most` tokens may follow.
    pub fn take(&mut self, tokens: &[u32], most: usize) -> bool {
        let ends = self.compiler.vocabulary().ends();
        let ended = tokens.last().is_some_and(|token| ends.contains(token));
        let mut state = lock(&self.state);
        state.taken.extend_from_slice(tokens);
        state.most = if self.jumps { most } else { 0 };
        state.fresh = false;
        drop(state);
        if !ended {
            let state = Arc::clone(&self.state);
            self.compiler.ahead(move || lock(&state).work());
        }
        ended
    }

    /// What may come next. Forced tokens are given out once; do not [`take`](Self::take) them.
    ///
    /// # Errors
    /// Why the grammar cannot be followed; again by every later call.
    pub fn following(&mut self) -> Result<Next<'_>, GrammarError> {
        let mut state = lock(&self.state);
        state.work();
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        self.forced.clear();
        mem::swap(&mut self.forced, &mut state.forced);
        self.mask.copy_from_slice(&state.mask);
        drop(state);
        Ok(Next {
            forced: &self.forced,
            mask: &self.mask,
        })
    }
}

impl State {
    fn work(&mut self) {
        if self.fresh || self.error.is_some() {
            return;
        }
        let result = self.follow();
        self.taken.clear();
        self.error = result.err();
        self.fresh = true;
    }

    fn follow(&mut self) -> Result<(), GrammarError> {
        let matcher = self.matcher.get_or_insert_with(|| self.ready.matcher());
        for &token in &self.taken {
            matcher.commit(token)?;
        }
        matcher.jump(self.most, &mut self.mask, &mut self.forced)
    }
}
