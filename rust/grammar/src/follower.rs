//! A matcher whose next mask is computed as soon as a token is known.

use std::fmt;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::compiler::Compiler;
use crate::error::GrammarError;
use crate::matcher::{Matcher, only};
use crate::pending::Ready;
use crate::threads::lock;

/// Follows one sequence. [`take`](Self::take) returns at once, and one of the compiler's threads goes on by the token and computes
/// the mask after it. [`following`](Self::following) gives that mask; where no thread has come to it yet, the caller's does the work.
pub struct Follower {
    compiler: Compiler,
    /// Tokens that have no alternative are taken by themselves.
    jumps: bool,
    shared: Arc<Shared>,
    forced: Vec<u32>,
}

struct Shared {
    ready: Arc<Ready>,
    state: Mutex<State>,
    /// The work on a token is over.
    done: Condvar,
}

/// How far the mask is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It is there.
    Fresh,
    /// Tokens were taken, and no thread has come to them.
    Queued,
    /// A thread is at it.
    Busy,
}

struct State {
    stage: Stage,
    /// None while a thread has it, and before the first token.
    matcher: Option<Matcher>,
    mask: Arc<Vec<u32>>,
    /// Room for the next one.
    spare: Arc<Vec<u32>>,
    /// Tokens that were taken, but not followed.
    taken: Vec<u32>,
    /// Tokens that the matcher has jumped over since the caller was given some.
    forced: Vec<u32>,
    /// Most tokens that it may jump over.
    most: usize,
    /// What a mask may take, by those before: a state that is followed fast may come before one that is not.
    took: Duration,
    error: Option<GrammarError>,
}

/// What may come next.
#[derive(Debug, PartialEq, Eq)]
pub struct Next<'a> {
    /// Tokens that come first, because they have no alternative.
    pub forced: &'a [u32],
    /// Which tokens may come after these, as [`Matcher::mask_into`] has it.
    pub mask: Arc<Vec<u32>>,
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("jumps", &self.jumps)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// At the start of a text of at most `most` tokens. With `jumps` it goes on over tokens without alternative.
    pub fn new(compiler: &Compiler, ready: &Arc<Ready>, jumps: bool, most: usize) -> Self {
        // The first mask is there; what it forces is not.
        let jumps_first = jumps && only(&ready.mask).is_some();
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
            most: if jumps { most } else { 0 },
            took: ready.took,
            error: None,
        };
        Self {
            compiler: compiler.clone(),
            jumps,
            shared: Arc::new(Shared {
                ready: Arc::clone(ready),
                state: Mutex::new(state),
                done: Condvar::new(),
            }),
            forced: Vec::new(),
        }
    }

    /// Goes on by tokens that were drawn. Returns whether the last of them ends the text. `most` tokens may follow.
    pub fn take(&mut self, tokens: &[u32], most: usize) -> bool {
        let ends = self.compiler.vocabulary().ends();
        let ended = tokens.last().is_some_and(|token| ends.contains(token));
        let mut state = self.shared.idle();
        state.taken.extend_from_slice(tokens);
        state.most = if self.jumps { most } else { 0 };
        state.stage = Stage::Queued;
        drop(state);
        if !ended {
            let shared = Arc::clone(&self.shared);
            self.compiler.ahead(move || shared.work());
        }
        ended
    }

    /// Whether [`following`](Self::following) has its answer, or gets it within the budget, of which the time is taken off. Where no
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

    /// What may come next; waits for it. Forced tokens are given out once; do not [`take`](Self::take) them.
    ///
    /// # Errors
    /// Why the grammar cannot be followed; again by every later call.
    pub fn following(&mut self) -> Result<Next<'_>, GrammarError> {
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
        Ok(Next { forced, mask })
    }
}

impl Drop for Follower {
    /// Its matcher has met states that others will meet, too.
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        let used = state.matcher.take().filter(|_| state.error.is_none());
        if let Some(used) = used {
            let ready = Arc::clone(&self.shared.ready);
            self.compiler.ahead(move || ready.give_back(used));
        }
    }
}

impl Shared {
    /// The state while no thread is at it.
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
    /// Follows what was taken, unless another thread does.
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
                matcher.advance(token)?;
            }
            if Arc::get_mut(&mut mask).is_none() {
                // It is still held elsewhere.
                mask = Arc::default();
            }
            let room = Arc::make_mut(&mut mask);
            room.resize(matcher.vocabulary().mask_words(), 0);
            matcher.jump(most, room, &mut forced)
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
