//! A matcher whose next mask is computed as soon as a token is known.

use std::fmt;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::compiler::{Compiler, Ready, lock};
use crate::error::GrammarError;
use crate::matcher::{Matcher, only};

/// What masks become for the caller, by the thread that computes them: it fills a `T` from the words of a mask.
pub type Shape<T> = fn(&mut T, &[u32]);

/// Follows one sequence. [`take`](Self::take) returns at once, and one of the compiler's threads goes on by the token and computes
/// the mask after it. [`following`](Self::following) gives that mask; where no thread has come to it yet, the caller's does the work.
pub struct Follower<T> {
    compiler: Compiler,
    /// Tokens that have no alternative are taken by themselves.
    jumps: bool,
    shared: Arc<Shared<T>>,
    forced: Vec<u32>,
}

struct Shared<T> {
    ready: Arc<Ready>,
    shape: Shape<T>,
    state: Mutex<State<T>>,
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

struct State<T> {
    stage: Stage,
    /// None while a thread has it, and before the first token.
    matcher: Option<Matcher>,
    mask: Arc<T>,
    /// Room for the next one.
    spare: Arc<T>,
    words: Vec<u32>,
    /// Tokens that were taken, but not followed.
    taken: Vec<u32>,
    /// Tokens that the matcher has jumped over since the caller was given some.
    forced: Vec<u32>,
    /// Most tokens that it may jump over.
    most: usize,
    /// What the last mask took.
    took: Duration,
    error: Option<GrammarError>,
}

/// What may come next.
#[derive(Debug, PartialEq, Eq)]
pub struct Next<'a, T> {
    /// Tokens that come first, because they have no alternative.
    pub forced: &'a [u32],
    /// Which tokens may come after these, as the [`Shape`] makes it of [`Matcher::mask_into`]'s words.
    pub mask: Arc<T>,
}

impl<T> fmt::Debug for Follower<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("jumps", &self.jumps)
            .finish_non_exhaustive()
    }
}

impl<T: Default + Send + Sync + 'static> Follower<T> {
    /// At the start of a text of at most `most` tokens. With `jumps` it goes on over tokens without alternative.
    pub fn new(
        compiler: &Compiler,
        ready: &Arc<Ready>,
        jumps: bool,
        most: usize,
        shape: Shape<T>,
    ) -> Self {
        let mut mask = T::default();
        shape(&mut mask, &ready.mask);
        // The first mask is there; what it forces is not.
        let jumps_first = jumps && only(&ready.mask).is_some();
        let state = State {
            stage: if jumps_first {
                Stage::Queued
            } else {
                Stage::Fresh
            },
            matcher: None,
            mask: Arc::new(mask),
            spare: Arc::default(),
            words: Vec::new(),
            taken: Vec::new(),
            forced: Vec::new(),
            most: if jumps { most } else { 0 },
            took: Duration::ZERO,
            error: None,
        };
        Self {
            compiler: compiler.clone(),
            jumps,
            shared: Arc::new(Shared {
                ready: Arc::clone(ready),
                shape,
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

    /// Whether [`following`](Self::following) has its answer. Where no thread has come to it, and the last mask took no longer than
    /// `spare`, the caller's thread computes it.
    pub fn prepare(&mut self, spare: Duration) -> bool {
        let state = lock(&self.shared.state);
        let (stage, took) = (state.stage, state.took);
        drop(state);
        if stage == Stage::Queued && took <= spare {
            self.shared.work();
            return true;
        }
        stage == Stage::Fresh
    }

    /// What may come next; waits for it. Forced tokens are given out once; do not [`take`](Self::take) them.
    ///
    /// # Errors
    /// Why the grammar cannot be followed; again by every later call.
    pub fn following(&mut self) -> Result<Next<'_, T>, GrammarError> {
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

impl<T> Drop for Follower<T> {
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

impl<T> Shared<T> {
    /// The state while no thread is at it.
    fn idle(&self) -> MutexGuard<'_, State<T>> {
        let mut state = lock(&self.state);
        while state.stage == Stage::Busy {
            let waited = self.done.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

impl<T: Default> Shared<T> {
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
        let mut words = mem::take(&mut state.words);
        let mut mask = mem::take(&mut state.spare);
        drop(state);

        let begin = Instant::now();
        let follow = || {
            let matcher = matcher.get_or_insert_with(|| self.ready.matcher());
            words.resize(matcher.vocabulary().mask_words(), 0);
            for &token in &taken {
                matcher.advance(token)?;
            }
            matcher.jump(most, &mut words, &mut forced)?;
            let room = match Arc::get_mut(&mut mask) {
                Some(room) => room,
                // The caller still has it.
                None => Arc::get_mut(mask_anew(&mut mask)).ok_or(GrammarError::Broken)?,
            };
            (self.shape)(room, &words);
            Ok(())
        };
        let result = panic::catch_unwind(AssertUnwindSafe(follow));
        let result = result.unwrap_or(Err(GrammarError::Broken));
        taken.clear();

        let mut state = lock(&self.state);
        state.matcher = matcher;
        (state.taken, state.forced, state.words) = (taken, forced, words);
        state.spare = mem::replace(&mut state.mask, mask);
        state.took = begin.elapsed();
        state.error = result.err();
        state.stage = Stage::Fresh;
        drop(state);
        self.done.notify_all();
    }
}

fn mask_anew<T: Default>(mask: &mut Arc<T>) -> &mut Arc<T> {
    *mask = Arc::default();
    mask
}
