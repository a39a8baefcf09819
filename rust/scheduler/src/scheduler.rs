//! The scheduler: what comes in, and what it knows.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pie_kv_cache::radix::Event as KvEvent;
use rustc_hash::FxHashMap;
use slab::Slab;

use crate::config::{Config, Limits, Policy};
use crate::constraint::ConstraintState;
use crate::copies::Copies;
use crate::error::{Refusal, SchedError};
use crate::flight::{Flight, Planned};
use crate::memory::{Held, Memory};
use crate::new_request::NewRequest;
use crate::output::{Finish, Outputs};
use crate::pace::Pace;
use crate::ratio::Ratio;
use crate::sequence::{Sequence, Shared, State};
use crate::stats::Stats;
use crate::suspects::Suspects;
use crate::text::TokenBytes;

/// A request that has not ended.
#[derive(Debug)]
pub(crate) struct Request {
    /// Where its sequences are, those that have ended among them.
    slots: Box<[usize]>,
    /// Sequences that have not ended.
    pub(crate) live: u32,
    /// Bytes of its parameters that count as kept by the driver: all of them from its first admission on.
    pub(crate) kept_bytes: u64,
}

/// Decides what each forward step of a driver computes. See the [crate](crate).
pub struct Scheduler<S> {
    pub(crate) config: Config,
    pub(crate) limits: Limits,
    pub(crate) text: Option<Arc<dyn TokenBytes>>,
    pub(crate) sequences: Slab<Sequence<S>>,
    pub(crate) requests: FxHashMap<u64, Request>,
    /// In the order of arrival.
    pub(crate) waiting: Vec<usize>,
    /// Running sequences: what was left out of the last step comes first.
    pub(crate) running: Vec<usize>,
    pub(crate) memory: Memory,
    pub(crate) pace: Pace,
    pub(crate) ratio: Ratio,
    /// Steps that are out, the older one first.
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) spare: Vec<Flight>,
    /// Of the last step.
    pub(crate) copies: Copies,
    pub(crate) outputs: Outputs,
    /// Steps planned, those among them that had nothing to compute.
    pub(crate) plans: u64,
    /// Before this plan nothing more fits, unless something ends.
    pub(crate) full_until: u64,
    /// Prompts got nothing of the last step.
    pub(crate) starved: bool,
    pub(crate) last_answer: u64,
    pub(crate) random: fastrand::Rng,
    pub(crate) counts: Stats,
    /// Room for a step's rows that draw nothing, and for the order of those that wait.
    pub(crate) rest: Vec<Planned>,
    pub(crate) candidates: Vec<usize>,
    pub(crate) spare_pages: Vec<u32>,
    /// Sequences with a constraint.
    pub(crate) constrained: usize,
    /// Sequences that stream.
    pub(crate) streaming: usize,
    /// Room for tokens without alternative.
    pub(crate) forced: Vec<u32>,
    /// Sequences that have ended since [`sweep`](Self::sweep).
    pub(crate) ended: Vec<usize>,
    orders: u64,
    contexts: u64,
    pub(crate) deadline: Option<u64>,
    pub(crate) suspects: Suspects,
    /// Grows when the driver may not have the parameters that rows before brought: they are brought again.
    pub(crate) registrations: u64,
    /// Bytes of parameters of admitted sequences.
    pub(crate) kept_bytes: u64,
}

impl<S> fmt::Debug for Scheduler<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl<S> Scheduler<S> {
    /// A scheduler without requests. Without `text`, requests with stop strings are refused.
    ///
    /// # Errors
    ///
    /// [`SchedError::Setting`].
    pub fn new(
        config: Config,
        limits: Limits,
        text: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, SchedError> {
        config.check(&limits)?;
        let chunk = config.chunk_tokens.min(limits.max_forward_tokens);
        Ok(Self {
            memory: Memory::new(&config, &limits)?,
            pace: Pace::new(&config, chunk),
            ratio: Ratio::new(config.conservativeness),
            random: fastrand::Rng::with_seed(config.seed),
            config,
            limits,
            text,
            sequences: Slab::new(),
            requests: FxHashMap::default(),
            waiting: Vec::new(),
            running: Vec::new(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            copies: Copies::default(),
            outputs: Outputs::default(),
            plans: 0,
            full_until: 0,
            starved: false,
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
        })
    }

    /// Takes a request into the queue.
    ///
    /// # Errors
    ///
    /// A [`Refusal`]. When the queue is full and the request has a better priority than one that waits, that one gives
    /// way, as [`Finish::Displaced`].
    pub fn submit(&mut self, mut arrival: NewRequest<S>) -> Result<(), Refusal> {
        arrival.ends.stop_tokens.sort_unstable();
        arrival.ends.stop_tokens.dedup();
        let longest = self.check(&arrival)?;
        let rank = self.rank(arrival.priority);
        self.make_place(arrival.samples, rank)?;
        let shared = Arc::new(Shared {
            prompt_len: arrival.prompt.len() as u32,
            max_tokens: arrival.ends.max_tokens.min(longest),
            min_tokens: arrival.ends.min_tokens.min(longest),
            rank,
            registered: AtomicU64::new(0),
            arrival,
        });
        let slots = (0..shared.arrival.samples).map(|sample| self.enter(&shared, sample));
        let slots: Box<[usize]> = slots.collect();
        self.waiting.extend_from_slice(&slots);
        let live = slots.len() as u32;
        self.requests.insert(
            shared.arrival.id,
            Request {
                slots,
                live,
                kept_bytes: 0,
            },
        );
        let deadlines = [shared.arrival.deadline, shared.arrival.admit_by];
        if let Some(deadline) = deadlines.into_iter().flatten().min() {
            self.deadline = Some(self.deadline.map_or(deadline, |first| first.min(deadline)));
        }
        // The new request may fit where what waits does not, if it may go first.
        if self.config.policy != Policy::Fcfs || self.config.priority {
            self.full_until = 0;
        }
        Ok(())
    }

    fn enter(&mut self, shared: &Arc<Shared<S>>, sample: u32) -> usize {
        let kept = shared
            .arrival
            .session
            .and_then(|id| self.memory.sessions.take_context(id));
        let context = kept.unwrap_or_else(|| {
            self.contexts += 1;
            self.contexts
        });
        self.orders += 1;
        self.constrained += usize::from(shared.arrival.constraint.is_some());
        self.streaming += usize::from(shared.arrival.streams);
        let sequence = Sequence::new(shared.clone(), sample, context, self.orders);
        self.sequences.insert(sequence)
    }

    /// Ends all sequences of a request, wherever they are. Whether there was one.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(request) = self.requests.get(&id) else {
            return false;
        };
        for slot in request.slots.clone() {
            if self.sequences.get(slot).is_some_and(|s| s.id() == id) {
                self.end_by_abort(slot);
            }
        }
        self.sweep();
        true
    }

    /// Ends every request.
    pub fn abort_all(&mut self) {
        let mut slots: Vec<usize> = self.sequences.iter().map(|(slot, _)| slot).collect();
        slots.sort_unstable_by_key(|&slot| self.sequences[slot].order);
        for slot in slots {
            self.end_by_abort(slot);
        }
        self.sweep();
    }

    fn end_by_abort(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let constraint = sequence.shared.arrival.constraint.as_ref();
        let asked = matches!(sequence.constraint_state, ConstraintState::Asked);
        let finish = match constraint {
            Some(constraint) if asked && constraint.is_waiting() => Finish::Unready,
            _ => Finish::Aborted,
        };
        self.finish(slot, 0, finish);
    }

    /// The driver answered the older step with an error, and its KV is what it was before that. A step that was laid out
    /// after it is void, too: do not send it. `copied` says whether the copies of that one were made; else they come again.
    /// Of a single step that is out they count as made: make them even where the step then cannot be sent.
    ///
    /// The rows of the step are computed again, in halves, until the request that makes steps fail is alone. It ends as
    /// [`Finish::Failed`]; the others lose nothing.
    ///
    /// When a copy fails, the KV is not what the scheduler thinks: call [`driver_lost`](Self::driver_lost).
    pub fn step_failed(&mut self, copied: bool) {
        self.registrations += 1;
        if self.flights.len() > 1 && !copied {
            self.memory.copies.prepend(&self.copies);
        }
        let mut first = true;
        while let Some(flight) = self.flights.pop_front() {
            for row in &flight.rows {
                if let Some(sequence) = self.sequences.get_mut(row.slot)
                    && sequence.order == row.order
                    && sequence.state != State::Ended
                {
                    sequence.forget_steps();
                }
            }
            if std::mem::take(&mut first) {
                self.suspect(&flight.rows);
            }
            self.recycle(flight);
        }
        self.sweep();
    }

    /// The driver ended, or does not answer: [`driver_lost`](Self::driver_lost), and the older step that is out may be why. If
    /// drivers die of a request again and again, it is found as by [`step_failed`](Self::step_failed), and ends alone.
    pub fn driver_died(&mut self) {
        for (_, sequence) in &mut self.sequences {
            sequence.forget_steps();
        }
        if let Some(flight) = self.flights.pop_front() {
            self.suspect(&flight.rows);
            self.recycle(flight);
            self.sweep();
        }
        self.driver_lost();
    }

    /// The driver is gone, and all KV with it, the host's too. Steps that are out are void. Every request is computed again
    /// from its tokens by the next driver, in the order of arrival; no token is given out twice.
    pub fn driver_lost(&mut self) {
        self.registrations += 1;
        while let Some(flight) = self.flights.pop_front() {
            self.recycle(flight);
        }
        for (_, sequence) in &mut self.sequences {
            sequence.forget_steps();
            if sequence.state == State::Running {
                sequence.held = Held::default();
                sequence.forget_pages();
                self.counts.retractions += 1;
            }
        }
        self.waiting.append(&mut self.running);
        let sequences = &self.sequences;
        self.waiting
            .sort_unstable_by_key(|&slot| sequences[slot].order);
        self.memory.reset();
        self.copies.clear();
        self.full_until = 0;
    }

    /// Moves what is new into `outputs`, whose content is dropped.
    pub fn outputs(&mut self, outputs: &mut Outputs) {
        std::mem::swap(&mut self.outputs, outputs);
        self.outputs.clear();
    }

    /// What the step that was laid out last takes, in µs, by what steps like it took; rather less than more. `None` while that is
    /// not known. A caller that lays the next one out shortly before the answer has every request in it that came until then.
    pub fn expected_us(&self) -> Option<u64> {
        let expected = self.pace.expect(self.flights.back()?.load)?;
        Some(expected as u64)
    }

    /// The earliest deadline. [`step`](Self::step) and [`expire`](Self::expire) end requests whose deadline has passed.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Ends the requests whose deadline has passed, as [`Finish::Deadline`]; [`step`](Self::step) does so, too. For times in
    /// which no step is asked for, as while a driver is being started.
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
        self.sweep();
    }

    /// Whether no request is there.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Lets the pages of a session go. Whether there was one.
    pub fn end_session(&mut self, session: u64) -> bool {
        self.full_until = 0;
        self.memory.end_session(session)
    }

    /// Forgets every prefix that no request uses, and all sessions; `SGLang`'s `flush_cache`. Returns how many device pages
    /// that freed.
    pub fn flush(&mut self) -> usize {
        self.full_until = 0;
        self.memory.flush()
    }

    /// Changes of what is cached since the last call, in their order; none unless [`Config::kv_events`].
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.memory.take_events()
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        let waiting = || self.waiting.iter().map(|&slot| &self.sequences[slot]);
        let asks =
            |sequence: &&Sequence<S>| matches!(sequence.constraint_state, ConstraintState::Asked);
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        Stats {
            waiting: self.waiting.len(),
            retracted: waiting()
                .filter(|waiting| waiting.admitted.is_some())
                .count(),
            unbound: waiting().filter(asks).count(),
            running: self.running.len(),
            running_tokens: running.map(|running| u64::from(running.known())).sum(),
            free_pages: self.memory.free_pages(),
            cached_pages: self.memory.cached_pages(),
            host_pages: self.memory.host_pages(),
            new_token_ratio: self.ratio.now(),
            prompt_budget: self.pace.budget(true),
            ..self.counts
        }
    }

    /// Compares the books of all pages with what holds them: each page has the holders that it counts, and every sequence
    /// is in one place. For tests and for doubts; takes time for every page.
    ///
    /// # Errors
    ///
    /// [`SchedError::Books`].
    pub fn audit(&self) -> Result<(), SchedError> {
        let own = |(_, sequence): (usize, &'_ Sequence<S>)| {
            sequence.held.pages[sequence.held.shared..].to_vec()
        };
        self.memory.audit(self.sequences.iter().flat_map(own))?;
        let in_place = |slots: &[usize], state| {
            slots.iter().all(|&slot| {
                self.sequences
                    .get(slot)
                    .is_some_and(|sequence| sequence.state == state)
            })
        };
        let places = self.waiting.len() + self.running.len();
        let live: u32 = self.requests.values().map(|request| request.live).sum();
        let fits = in_place(&self.waiting, State::Waiting)
            && in_place(&self.running, State::Running)
            && places == self.sequences.len()
            && places == live as usize
            && self
                .waiting
                .is_sorted_by_key(|&slot| self.sequences[slot].order);
        if fits {
            return Ok(());
        }
        Err(SchedError::Books("a sequence is lost".to_owned()))
    }
}
