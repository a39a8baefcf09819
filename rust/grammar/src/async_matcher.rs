//! A matcher whose next mask is computed in the background as soon as a token is known.

use std::fmt;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::compiler::Compiler;
use crate::error::GrammarError;
use crate::matcher::{Matcher, only};
use crate::pending::CompiledGrammar;
use crate::threads::lock;

/// The background matcher of one sequence. [`accept_tokens`](Self::accept_tokens) returns at once; a thread of the compiler accepts
/// the token and computes the next mask. [`next_mask`](Self::next_mask) gives that mask; where no thread has come to it yet, the caller's does the work.
pub struct AsyncMatcher {
    compiler: Compiler,
    /// Jump-forward decoding: tokens without alternative are accepted without sampling.
    jump_forward: bool,
    shared: Arc<Shared>,
    forced: Vec<u32>,
}

struct Shared {
    ready: Arc<CompiledGrammar>,
    state: Mutex<State>,
    /// A thread has finished the mask.
    done: Condvar,
}

/// State of the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Computed.
    Fresh,
    /// Tokens wait for a thread.
    Queued,
    /// A thread computes it.
    Busy,
}

struct State {
    stage: Stage,
    /// `None` while a thread has it, and before the first token.
    matcher: Option<Matcher>,
    mask: Arc<Vec<u32>>,
    /// Buffer of the next mask.
    spare: Arc<Vec<u32>>,
    /// Tokens that the matcher has not accepted yet.
    taken: Vec<u32>,
    /// Jump-forward tokens that the caller has not received yet.
    forced: Vec<u32>,
    /// Maximum jump-forward tokens.
    most: usize,
    /// Estimated time of a mask: a decaying maximum.
    took: Duration,
    error: Option<GrammarError>,
}

/// The next mask.
#[derive(Debug, PartialEq, Eq)]
pub struct NextMask<'a> {
    /// Jump-forward tokens that come first.
    pub forced: &'a [u32],
    /// Which tokens may come after these, as [`Matcher::fill_bitmask`] has it.
    pub mask: Arc<Vec<u32>>,
}

impl fmt::Debug for AsyncMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("jumps", &self.jump_forward)
            .finish_non_exhaustive()
    }
}

impl AsyncMatcher {
    /// A matcher in the start state, for at most `most` tokens. `jump_forward` enables jump-forward decoding.
    pub fn new(
        compiler: &Compiler,
        ready: &Arc<CompiledGrammar>,
        jump_forward: bool,
        most: usize,
    ) -> Self {
        // The first mask is there; what it forces is not.
        let jumps_first = jump_forward && only(&ready.mask).is_some();
        let state = State {
            stage: if jumps_first {
                Stage::Queued
            } else {
                Stage::Fresh
            },
            matcher: None,
            mask: Arc::clone(&ready.mask),
            spare: Arc::default(),
            taken: Vec::new(),
            forced: Vec::new(),
            most: if jump_forward { most } else { 0 },
            took: ready.took,
            error: None,
        };
        Self {
            compiler: compiler.clone(),
            jump_forward,
            shared: Arc::new(Shared {
                ready: Arc::clone(ready),
                state: Mutex::new(state),
                done: Condvar::new(),
            }),
            forced: Vec::new(),
        }
    }

    /// Accepts sampled tokens. Returns whether the last one is EOS. At most `most` tokens may follow.
    pub fn accept_tokens(&mut self, tokens: &[u32], most: usize) -> bool {
        let ends = self.compiler.vocabulary().ends();
        let ended = tokens.last().is_some_and(|token| ends.contains(token));
        let mut state = self.shared.idle();
        state.taken.extend_from_slice(tokens);
        state.most = if self.jump_forward { most } else { 0 };
        state.stage = Stage::Queued;
        drop(state);
        if !ended {
            let shared = Arc::clone(&self.shared);
            self.compiler.ahead(move || shared.work());
        }
        ended
    }

    /// Whether [`next_mask`](Self::next_mask) has its answer, or gets it within the budget, of which the time is taken off. Where no
    /// thread has come to it yet, and the last masks took less, the caller's thread computes it.
    pub fn prepare(&mut self, budget: &mut Duration) -> bool {
        let begin = Instant::now();
        let mut state = lock(&self.shared.state);
        if state.stage == Stage::Queued && state.took < *budget {
            drop(state);
            self.shared.work();
            state = lock(&self.shared.state);
        }
        while state.stage == Stage::Busy {
            let left = budget.saturating_sub(begin.elapsed());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.done.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let fresh = state.stage == Stage::Fresh;
        drop(state);
        *budget = budget.saturating_sub(begin.elapsed());
        fresh
    }

    /// What may come next; waits for it. Forced tokens are given out once; do not accept them again.
    ///
    /// # Errors
    /// Why the grammar cannot be followed; again by every later call.
    pub fn next_mask(&mut self) -> Result<NextMask<'_>, GrammarError> {
        self.shared.work();
        let mut state = self.shared.idle();
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        self.forced.clear();
        mem::swap(&mut self.forced, &mut state.forced);
        let mask = Arc::clone(&state.mask);
        drop(state);
        let forced = &self.forced;
        Ok(NextMask { forced, mask })
    }
}

impl Drop for AsyncMatcher {
    /// Recycles the matcher, whose lexer states are warm.
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        let used = state.matcher.take().filter(|_| state.error.is_none());
        if let Some(used) = used {
            let ready = Arc::clone(&self.shared.ready);
            self.compiler.ahead(move || ready.recycle(used));
        }
    }
}

impl Shared {
    /// Waits until no thread works on the state.
    fn idle(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        while state.stage == Stage::Busy {
            let waited = self.done.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

impl Shared {
    /// Accepts the waiting tokens and computes the mask, unless another thread does.
    fn work(&self) {
        let mut state = lock(&self.state);
        if state.stage != Stage::Queued {
            return;
        }
        if state.error.is_some() {
            state.stage = Stage::Fresh;
            return;
        }
        state.stage = Stage::Busy;
        let most = state.most;
        let mut matcher = state.matcher.take();
        let mut taken = mem::take(&mut state.taken);
        let mut forced = mem::take(&mut state.forced);
        let mut mask = mem::take(&mut state.spare);
        drop(state);

        let begin = Instant::now();
        let follow = || {
            let matcher = matcher.get_or_insert_with(|| self.ready.matcher());
            for &token in &taken {
                matcher.accept_unchecked(token)?;
            }
            if Arc::get_mut(&mut mask).is_none() {
                // The caller still holds it.
                mask = Arc::default();
            }
            let mask = Arc::make_mut(&mut mask);
            mask.resize(matcher.vocabulary().mask_words(), 0);
            matcher.jump_forward_tokens(most, mask, &mut forced)
        };
        let result = panic::catch_unwind(AssertUnwindSafe(follow));
        let result = result.unwrap_or(Err(GrammarError::Broken));
        taken.clear();

        let mut state = lock(&self.state);
        state.matcher = matcher;
        (state.taken, state.forced) = (taken, forced);
        state.spare = mem::replace(&mut state.mask, mask);
        state.took = begin.elapsed().max(state.took / 2);
        state.error = result.err();
        state.stage = Stage::Fresh;
        drop(state);
        self.done.notify_all();
    }
}
