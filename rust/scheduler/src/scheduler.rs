//! The public API of the scheduler, and its state.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pie_kv_cache::radix::Event as KvEvent;
use rustc_hash::FxHashMap;
use slab::Slab;

use crate::config::{Config, Limits, Policy};
use crate::copies::Copies;
use crate::error::{SchedulerError, ValidationError};
use crate::grammar::GrammarState;
use crate::in_flight::{InFlightStep, ScheduledRow};
use crate::kv_cache_manager::{KvCacheManager, SequencePages};
use crate::new_request::NewRequest;
use crate::new_token_ratio::NewTokenRatio;
use crate::output::{Finish, Outputs, WeightVersionEvent};
use crate::prefill_budget::PrefillBudget;
use crate::sequence::{Sequence, SharedRequest, State};
use crate::stats::Stats;
use crate::stop_criteria::TokenBytes;
use crate::suspects::Suspects;

/// The sequences of an unfinished request.
#[derive(Debug)]
pub(crate) struct RequestEntry {
    /// Slots of all its sequences, finished ones included.
    slots: Box<[usize]>,
    /// Unfinished sequences.
    pub(crate) live: u32,
    /// Bytes of its parameters that the driver keeps, from its first admission on.
    pub(crate) kept_bytes: u64,
}

/// Schedules requests. See the [crate](crate).
pub struct Scheduler<S> {
    pub(crate) config: Config,
    pub(crate) limits: Limits,
    pub(crate) text: Option<Arc<dyn TokenBytes>>,
    pub(crate) sequences: Slab<Sequence<S>>,
    pub(crate) requests: FxHashMap<u64, RequestEntry>,
    /// In the order of arrival.
    pub(crate) waiting: Vec<usize>,
    /// Running sequences; those left out of the last step come first.
    pub(crate) running: Vec<usize>,
    pub(crate) kv_cache: KvCacheManager,
    pub(crate) prefill_budget: PrefillBudget,
    pub(crate) new_token_ratio: NewTokenRatio,
    /// Steps in flight, the oldest first.
    pub(crate) in_flight: VecDeque<InFlightStep>,
    pub(crate) spare: Vec<InFlightStep>,
    /// Copies of the last step.
    pub(crate) copies: Copies,
    pub(crate) outputs: Outputs,
    /// Plans so far, empty ones included.
    pub(crate) plans: u64,
    /// No admission is tried before this plan, unless something ends.
    pub(crate) admission_blocked_until: u64,
    /// The last step had no tokens left for prefills.
    pub(crate) prefill_starved: bool,
    pub(crate) last_answer: u64,
    pub(crate) random: fastrand::Rng,
    pub(crate) counts: Stats,
    /// Buffers: rows without sampling, the admission order, pages.
    pub(crate) rest: Vec<ScheduledRow>,
    pub(crate) candidates: Vec<usize>,
    pub(crate) spare_pages: Vec<u32>,
    /// Number of constrained sequences.
    pub(crate) constrained: usize,
    /// Number of streaming sequences.
    pub(crate) streaming: usize,
    /// Buffer for jump-forward tokens.
    pub(crate) forced: Vec<u32>,
    /// Sequences that ended since [`remove_finished`](Self::remove_finished).
    pub(crate) ended: Vec<usize>,
    orders: u64,
    contexts: u64,
    pub(crate) deadline: Option<u64>,
    pub(crate) suspects: Suspects,
    /// Raised when the driver may have lost the parameters of requests: they are sent again.
    pub(crate) registrations: u64,
    /// Bytes of parameters of admitted requests.
    pub(crate) kept_bytes: u64,
    /// The one that computes now.
    pub(crate) weight_version: u32,
    /// Its changes during a sequence, in order, by [`Sequence::order`]; apart, because few sequences see one.
    pub(crate) weight_events: FxHashMap<u64, Vec<WeightVersionEvent>>,
}

impl<S> fmt::Debug for Scheduler<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl<S> Scheduler<S> {
    /// A scheduler without requests. Without `text`, requests with stop strings are rejected.
    ///
    /// # Errors
    ///
    /// [`SchedulerError::Setting`].
    pub fn new(
        config: Config,
        limits: Limits,
        text: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, SchedulerError> {
        config.check(&limits)?;
        let chunk = config.chunk_tokens.min(limits.max_forward_tokens);
        Ok(Self {
            kv_cache: KvCacheManager::new(&config, &limits)?,
            prefill_budget: PrefillBudget::new(&config, chunk),
            new_token_ratio: NewTokenRatio::new(config.conservativeness),
            random: fastrand::Rng::with_seed(config.seed),
            config,
            limits,
            text,
            sequences: Slab::new(),
            requests: FxHashMap::default(),
            waiting: Vec::new(),
            running: Vec::new(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            copies: Copies::default(),
            outputs: Outputs::default(),
            plans: 0,
            admission_blocked_until: 0,
            prefill_starved: false,
            last_answer: 0,
            counts: Stats::default(),
            rest: Vec::new(),
            candidates: Vec::new(),
            spare_pages: Vec::new(),
            constrained: 0,
            streaming: 0,
            forced: Vec::new(),
            ended: Vec::new(),
            orders: 0,
            contexts: 0,
            deadline: None,
            suspects: Suspects::default(),
            registrations: 1,
            kept_bytes: 0,
            weight_version: 0,
            weight_events: FxHashMap::default(),
        })
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    ///
    /// A [`ValidationError`]. If the queue is full and a waiting request has a worse priority, that one ends as
    /// [`Finish::Displaced`].
    pub fn submit(&mut self, mut request: NewRequest<S>) -> Result<(), ValidationError> {
        request.stop.stop_tokens.sort_unstable();
        request.stop.stop_tokens.dedup();
        let longest = self.check(&request)?;
        let rank = self.rank(request.priority);
        self.make_queue_space(request.samples, rank)?;
        let shared = Arc::new(SharedRequest {
            prompt_len: request.prompt.len() as u32,
            max_tokens: request.stop.max_tokens.min(longest),
            min_tokens: request.stop.min_tokens.min(longest),
            rank,
            registered: AtomicU64::new(0),
            request,
        });
        let slots = (0..shared.request.samples).map(|sample| self.enter(&shared, sample));
        let slots: Box<[usize]> = slots.collect();
        self.waiting.extend_from_slice(&slots);
        let live = slots.len() as u32;
        self.requests.insert(
            shared.request.id,
            RequestEntry {
                slots,
                live,
                kept_bytes: 0,
            },
        );
        let deadlines = [shared.request.deadline, shared.request.admit_by];
        if let Some(deadline) = deadlines.into_iter().flatten().min() {
            self.deadline = Some(self.deadline.map_or(deadline, |first| first.min(deadline)));
        }
        // The new request may fit where others do not, if it may go first.
        if self.config.policy != Policy::Fcfs || self.config.priority {
            self.admission_blocked_until = 0;
        }
        Ok(())
    }

    fn enter(&mut self, shared: &Arc<SharedRequest<S>>, sample: u32) -> usize {
        let kept = shared
            .request
            .session
            .and_then(|id| self.kv_cache.sessions.take_context(id));
        let context = kept.unwrap_or_else(|| {
            self.contexts += 1;
            self.contexts
        });
        self.orders += 1;
        self.constrained += usize::from(shared.request.grammar.is_some());
        self.streaming += usize::from(shared.request.streams);
        let sequence = Sequence::new(shared.clone(), sample, context, self.orders);
        self.sequences.insert(sequence)
    }

    /// Aborts all sequences of a request. Returns whether there was one.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(request) = self.requests.get(&id) else {
            return false;
        };
        for slot in request.slots.clone() {
            if self.sequences.get(slot).is_some_and(|s| s.id() == id) {
                self.abort_sequence(slot);
            }
        }
        self.remove_finished();
        true
    }

    /// Aborts every request.
    pub fn abort_all(&mut self) {
        let mut slots: Vec<usize> = self.sequences.iter().map(|(slot, _)| slot).collect();
        slots.sort_unstable_by_key(|&slot| self.sequences[slot].order);
        for slot in slots {
            self.abort_sequence(slot);
        }
        self.remove_finished();
    }

    fn abort_sequence(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let grammar = sequence.shared.request.grammar.as_ref();
        let compiling = matches!(sequence.grammar, GrammarState::Compiling);
        let finish = match grammar {
            Some(grammar) if compiling && grammar.is_compiling() => Finish::Unready,
            _ => Finish::Aborted,
        };
        self.finish(slot, 0, finish);
    }

    /// The driver answered the oldest step with an error, and its KV is what it was before that step. A later step in flight is
    /// void, too: do not send it. `copied` says whether its copies were made; else they come again. The copies of a single step
    /// in flight count as made: make them even if the step cannot be sent.
    ///
    /// The rows are computed again, in halves, until the request that makes steps fail is alone. It ends as [`Finish::Failed`];
    /// the others lose nothing.
    ///
    /// If a copy fails, call [`driver_lost`](Self::driver_lost).
    pub fn step_failed(&mut self, copied: bool) {
        self.registrations += 1;
        if self.in_flight.len() > 1 && !copied {
            self.kv_cache.copies.prepend(&self.copies);
        }
        let mut first = true;
        while let Some(step) = self.in_flight.pop_front() {
            for row in &step.rows {
                if let Some(sequence) = self.sequences.get_mut(row.slot)
                    && sequence.order == row.order
                    && sequence.state != State::Ended
                {
                    sequence.discard_in_flight();
                }
            }
            if std::mem::take(&mut first) {
                self.suspect(&step.rows);
            }
            self.recycle(step);
        }
        self.remove_finished();
    }

    /// [`driver_lost`](Self::driver_lost), where the oldest step in flight is suspected. A request that kills drivers again and
    /// again is found as by [`step_failed`](Self::step_failed).
    pub fn driver_died(&mut self) {
        for (_, sequence) in &mut self.sequences {
            sequence.discard_in_flight();
        }
        if let Some(step) = self.in_flight.pop_front() {
            self.suspect(&step.rows);
            self.recycle(step);
            self.remove_finished();
        }
        self.driver_lost();
    }

    /// The driver is gone with all KV, on the host, too. Steps in flight are void. Every request is recomputed from its tokens
    /// by the next driver, in the order of arrival; no token is emitted twice.
    pub fn driver_lost(&mut self) {
        self.registrations += 1;
        while let Some(step) = self.in_flight.pop_front() {
            self.recycle(step);
        }
        for (_, sequence) in &mut self.sequences {
            sequence.discard_in_flight();
            if sequence.state == State::Running {
                sequence.kv = SequencePages::default();
                sequence.retract();
                self.counts.retractions += 1;
            }
        }
        self.waiting.append(&mut self.running);
        let sequences = &self.sequences;
        self.waiting
            .sort_unstable_by_key(|&slot| sequences[slot].order);
        self.kv_cache.reset();
        self.copies.clear();
        self.admission_blocked_until = 0;
    }

    /// Moves new outputs to `outputs`, which is cleared first.
    pub fn outputs(&mut self, outputs: &mut Outputs) {
        std::mem::swap(&mut self.outputs, outputs);
        self.outputs.clear();
    }

    /// The expected time of the newest step in flight in µs, a low estimate; `None` while unknown. A caller that schedules the
    /// next step shortly before its output includes every request until then.
    pub fn expected_us(&self) -> Option<u64> {
        let expected = self
            .prefill_budget
            .expected_us(self.in_flight.back()?.load)?;
        Some(expected as u64)
    }

    /// The earliest deadline. [`schedule`](Self::schedule) and [`expire`](Self::expire) end requests whose deadline has passed.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Ends requests whose deadline has passed, as [`Finish::Deadline`]; for times without calls of
    /// [`schedule`](Self::schedule), as while a driver starts.
    pub fn expire(&mut self, now: u64) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        let mut late = Vec::new();
        self.deadline = None;
        for (slot, sequence) in &self.sequences {
            match sequence.deadline(self.config.running_limit_us) {
                Some(deadline) if deadline <= now => late.push((sequence.order, slot)),
                other => self.deadline = self.deadline.into_iter().chain(other).min(),
            }
        }
        late.sort_unstable();
        for (_, slot) in late {
            self.finish(slot, 0, Finish::Deadline);
        }
        self.remove_finished();
    }

    /// Whether there is no request.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Ends a session: unlocks its pages, and later those of its requests that still run. Returns whether it had pages.
    pub fn end_session(&mut self, session: u64) -> bool {
        self.admission_blocked_until = 0;
        for (_, sequence) in &mut self.sequences {
            if sequence.session == Some(session) {
                sequence.session = None;
            }
        }
        self.kv_cache.end_session(session)
    }

    /// Evicts every prefix that no request uses, and ends all sessions; `SGLang`'s `flush_cache`. Returns how many device pages
    /// were freed.
    pub fn flush(&mut self) -> usize {
        self.admission_blocked_until = 0;
        self.kv_cache.flush()
    }

    /// The driver's weights have another version from now on; it begins with 0. Sequences with output tokens record the change.
    ///
    /// Tokens of a step in flight count as the new version's: call it while there is none.
    pub fn set_weight_version(&mut self, version: u32) {
        let old_version = std::mem::replace(&mut self.weight_version, version);
        if old_version == version {
            return;
        }
        let mut before = std::mem::take(&mut self.weight_events);
        for (_, sequence) in &self.sequences {
            let num_output_tokens = sequence.known() - sequence.prompt_len;
            if num_output_tokens > 0 && sequence.state != State::Ended {
                let mut events = before.remove(&sequence.order).unwrap_or_default();
                events.push(WeightVersionEvent {
                    old_version,
                    num_output_tokens,
                });
                self.weight_events.insert(sequence.order, events);
            }
        }
    }

    /// KV cache events since the last call, in order; none unless [`Config::kv_events`].
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.kv_cache.take_events()
    }

    /// Current counts.
    pub fn stats(&self) -> Stats {
        let waiting = || self.waiting.iter().map(|&slot| &self.sequences[slot]);
        let asks = |sequence: &&Sequence<S>| matches!(sequence.grammar, GrammarState::Compiling);
        let running = || self.running.iter().map(|&slot| &self.sequences[slot]);
        let prefills = running().filter(|running| running.prefills());
        let pending = waiting().map(Sequence::known);
        let pending = pending.chain(prefills.map(Sequence::uncomputed));
        Stats {
            waiting: self.waiting.len(),
            retracted: waiting()
                .filter(|waiting| waiting.admitted.is_some())
                .count(),
            grammar_queue: waiting().filter(asks).count(),
            running: self.running.len(),
            running_tokens: running().map(|running| u64::from(running.known())).sum(),
            pending_tokens: pending.map(u64::from).sum(),
            free_pages: self.kv_cache.free_pages(),
            cached_pages: self.kv_cache.cached_pages(),
            host_pages: self.kv_cache.host_pages(),
            new_token_ratio: self.new_token_ratio.now(),
            prompt_budget: self.prefill_budget.tokens(true),
            ..self.counts
        }
    }

    /// Checks that the reference counts of all pages match their holders, and that every sequence is in one queue. Takes time
    /// for every page: for tests.
    ///
    /// # Errors
    ///
    /// [`SchedulerError::Inconsistent`].
    pub fn check_invariants(&self) -> Result<(), SchedulerError> {
        let own = |(_, sequence): (usize, &'_ Sequence<S>)| {
            sequence.kv.pages[sequence.kv.shared..].to_vec()
        };
        self.kv_cache
            .check_invariants(self.sequences.iter().flat_map(own))?;
        let are_in = |slots: &[usize], state| {
            slots.iter().all(|&slot| {
                self.sequences
                    .get(slot)
                    .is_some_and(|sequence| sequence.state == state)
            })
        };
        let queued = self.waiting.len() + self.running.len();
        let live: u32 = self.requests.values().map(|request| request.live).sum();
        let fits = are_in(&self.waiting, State::Waiting)
            && are_in(&self.running, State::Running)
            && queued == self.sequences.len()
            && queued == live as usize
            && self
                .waiting
                .is_sorted_by_key(|&slot| self.sequences[slot].order);
        if fits {
            return Ok(());
        }
        Err(SchedulerError::Inconsistent(
            "a sequence is lost".to_owned(),
        ))
    }
}
