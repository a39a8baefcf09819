//! Admission: which waiting requests begin, and which running ones give way to them.

use crate::constraint::ConstraintState;
use crate::layout::Plan;
use crate::memory::Held;
use crate::output::Admitted;
use crate::pace::LOOK_AGAIN;
use crate::scheduler::Scheduler;
use crate::sequence::{Awaited, Sequence, State};

/// Tokens that a request has in common with one that is being computed, from which on it waits for these; `SGLang`'s
/// `IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD`.
pub(crate) const WORTH_WAITING: usize = 32;

/// What became of an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    Done,
    /// There are no pages for what it may become.
    Full,
    /// The step has no room for a first part of it.
    NoRoom,
}

impl<S> Scheduler<S> {
    /// Admits what fits into the step, in the order of the policy.
    pub(crate) fn admit(&mut self, plan: &mut Plan, now: u64) {
        let may_run = self.config.max_running as usize;
        if self.waiting.is_empty() || self.running.len() >= may_run {
            return;
        }
        if self.plans < self.full_until && !self.running.is_empty() {
            return;
        }
        if plan.rows == 0 || plan.prompt == 0 {
            self.starved |= plan.flight.load.prompt_tokens == 0;
            return;
        }
        let mut candidates = std::mem::take(&mut self.candidates);
        self.order_waiting(now, &mut candidates);
        let (mut promised, mut newest) = (self.promised(), Vec::new());
        let mut params_fit = true;
        for &slot in &candidates {
            if self.running.len() >= may_run || plan.rows == 0 || plan.prompt == 0 {
                break;
            }
            let sequence = &self.sequences[slot];
            let is_due = sequence.pending == 0 && sequence.suspicion.group == plan.group;
            if !is_due || self.waits_for_prefix(slot) {
                continue;
            }
            // Where those of one do not fit, smaller ones behind it wait, too: else it could wait for ever.
            let more = self.new_params(slot);
            params_fit &= self.params_fit(more);
            if more > 0 && !params_fit || !self.follow(slot) {
                continue;
            }
            match self.admit_one(plan, slot, &mut promised, now) {
                Admission::Done => newest.push(self.sequences[slot].order),
                Admission::Full => {
                    self.full_until = self.plans + LOOK_AGAIN;
                    break;
                }
                Admission::NoRoom => {
                    self.starved |= plan.flight.load.prompt_tokens == 0;
                    break;
                }
            }
        }
        self.candidates = candidates;
        if !newest.is_empty() {
            let sequences = &self.sequences;
            self.waiting
                .retain(|&slot| sequences[slot].state == State::Waiting);
            self.count_overtakes(&newest);
        }
    }

    /// Tokens that are spoken for: what running requests still have to compute, and are expected to produce.
    fn promised(&self) -> f64 {
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        let ratio = f64::from(self.ratio.now());
        running
            .map(|sequence| {
                let expected = f64::from(sequence.expected()) * ratio;
                expected + f64::from(sequence.uncomputed())
            })
            .sum()
    }

    /// Tokens that nothing holds and that are not spoken for.
    fn unpromised(&self, promised: f64) -> f64 {
        (self.memory.available() * self.memory.page_size) as f64 - promised
    }

    fn admit_one(
        &mut self,
        plan: &mut Plan,
        slot: usize,
        promised: &mut f64,
        now: u64,
    ) -> Admission {
        let size = self.limits.page_size;
        let mut held = Held {
            pages: std::mem::take(&mut self.spare_pages),
            ..Held::default()
        };
        let most = self.sequences[slot].cacheable_len();
        let host_pages = self.claim(slot, &mut held, most, now);
        let sequence = &self.sequences[slot];
        let missing = sequence.known() - held.pages.len() as u32 * size;
        let wanted = f64::from(missing + sequence.expected() + size);
        if wanted >= self.unpromised(*promised) && !self.running.is_empty() {
            self.give_back(held);
            return Admission::Full;
        }
        let cached = (held.pages.len() + host_pages) as u32 * size;
        // The last page of a chunk is full, or the prompt's last.
        let first = (sequence.known() - cached).min(size - cached % size);
        let pages = (cached + first).div_ceil(size);
        if plan.prompt < first.min(self.pace.least()) || pages > plan.pages_left() {
            self.give_back(held);
            return Admission::NoRoom;
        }
        let on_the_device = held.pages.len();
        if host_pages > 0 {
            self.load(slot, &mut held, host_pages, now);
        }
        let cached = held.pages.len() as u32 * size;
        let admitted = Admitted {
            at: now,
            cached_tokens: cached,
            loaded_tokens: cached - on_the_device as u32 * size,
            first_token: None,
        };
        let sequence = &mut self.sequences[slot];
        let longest = (sequence.len() + sequence.expected()).div_ceil(size) as usize;
        held.pages.reserve(longest.saturating_sub(held.pages.len()));
        self.spare_pages = std::mem::replace(&mut sequence.held, held).pages;
        sequence.start(cached);
        self.running.push(slot);
        if !self.place_chunk(plan, slot) {
            self.running.pop();
            let held = std::mem::take(&mut self.sequences[slot].held);
            self.sequences[slot].stop();
            self.give_back(held);
            return Admission::NoRoom;
        }
        *promised += wanted;
        self.note_admission(slot, admitted);
        Admission::Done
    }

    /// Takes the cached pages of a sequence's first `most` tokens, but none that would leave a part of an image to compute:
    /// that needs what the whole of it needs. Returns how many come after them, on the host.
    fn claim(&mut self, slot: usize, held: &mut Held, most: u32, now: u64) -> usize {
        let sequence = &self.sequences[slot];
        let mut most = most;
        loop {
            let host_pages = self.memory.claim(held, sequence.key(most), now);
            let cached = (held.pages.len() + host_pages) as u32 * self.limits.page_size;
            let Some(image) = sequence.cut_image(cached) else {
                return host_pages;
            };
            most = image.start;
            self.memory.release(held);
        }
    }

    /// Brings the pages from the host that a sequence begins with, if there is room.
    fn load(&mut self, slot: usize, held: &mut Held, host_pages: usize, now: u64) {
        let sequence = &self.sequences[slot];
        let size = self.limits.page_size;
        let wanted = (held.pages.len() + host_pages) as u32 * size;
        let key = sequence.key(wanted);
        self.memory.load(held, key, host_pages, now);
        if let Some(image) = sequence.cut_image(held.pages.len() as u32 * size) {
            let most = image.start;
            self.memory.release(held);
            self.claim(slot, held, most, now);
        }
    }

    /// Bytes of parameters that the driver has to keep for a sequence, and does not for another one of its request.
    fn new_params(&self, slot: usize) -> u64 {
        let shared = &self.sequences[slot].shared;
        match shared.arrival.params_bytes {
            0 => 0,
            bytes => {
                let request = self.requests.get(&shared.arrival.id);
                u64::from(bytes) - request.map_or(0, |request| request.kept_bytes)
            }
        }
    }

    /// Whether the driver has room for so many bytes of parameters more. Those of one request it always has.
    fn params_fit(&self, more: u64) -> bool {
        let kept = self.kept_bytes;
        more == 0 || kept == 0 || kept + more <= self.limits.frame.params
    }

    fn note_admission(&mut self, slot: usize, admitted: Admitted) {
        let more = self.new_params(slot);
        if more > 0
            && let Some(request) = self.requests.get_mut(&self.sequences[slot].id())
        {
            request.kept_bytes += more;
            self.kept_bytes += more;
        }
        let sequence = &mut self.sequences[slot];
        if sequence.admitted.is_none() {
            sequence.admitted = Some(admitted);
            let deadline = sequence.deadline(self.config.running_limit_us);
            self.deadline = self.deadline.into_iter().chain(deadline).min();
            self.counts.prompt_tokens += u64::from(sequence.shared.prompt_len);
            self.counts.cached_tokens += u64::from(admitted.cached_tokens);
            self.counts.loaded_tokens += u64::from(admitted.loaded_tokens);
        }
    }

    /// Takes pages back that a request would have begun with.
    fn give_back(&mut self, mut held: Held) {
        self.memory.release(&mut held);
        self.spare_pages = held.pages;
    }

    /// Whether a request should wait until one that begins alike is computed, and go on from its pages.
    fn waits_for_prefix(&mut self, slot: usize) -> bool {
        if !self.memory.prefix_cache {
            return false;
        }
        if let Some(awaited) = self.sequences[slot].awaited
            && self.is_computing(awaited)
        {
            return true;
        }
        let awaited = self.find_leader(slot);
        self.sequences[slot].awaited = awaited;
        awaited.is_some()
    }

    /// Whether a sequence still computes pages that another one waits for.
    fn is_computing(&self, awaited: Awaited) -> bool {
        self.sequences.get(awaited.slot).is_some_and(|leader| {
            leader.order == awaited.order
                && leader.state == State::Running
                && leader.held.shared < awaited.pages
        })
    }

    fn find_leader(&self, slot: usize) -> Option<Awaited> {
        let size = self.memory.page_size;
        let follower = &self.sequences[slot];
        let key = follower.cacheable();
        let mut cached = None;
        let leaders = self.running.iter().copied();
        leaders
            .filter(|&at| self.sequences[at].computes_prompt(size))
            .find_map(|at| {
                let leader = &self.sequences[at];
                let pages = leader.common_pages(follower, key.tokens.len(), size);
                if pages * size < WORTH_WAITING {
                    return None;
                }
                let cached = *cached.get_or_insert_with(|| {
                    let (device, host) = self.memory.peek(key);
                    device + host
                });
                let gained = pages.saturating_sub(cached) * size;
                (gained >= WORTH_WAITING && leader.held.shared < pages).then_some(Awaited {
                    slot: at,
                    order: leader.order,
                    pages,
                })
            })
    }

    /// Requests were admitted: those that came earlier and still wait were overtaken.
    fn count_overtakes(&mut self, admitted: &[u64]) {
        for &slot in &self.waiting {
            let sequence = &mut self.sequences[slot];
            if sequence.awaited.is_none() && sequence.pending == 0 {
                let later = admitted.iter().filter(|&&order| order > sequence.order);
                sequence.overtaken += later.count() as u32;
            }
        }
    }

    /// Where a request of better priority finds no room, takes the pages of running ones of worse priority: `SGLang`'s
    /// `preempt_to_schedule`.
    pub(crate) fn preempt(&mut self) {
        let Some(threshold) = self.config.preemption_threshold else {
            return;
        };
        let rank = |&slot: &usize| (self.sequences[slot].shared.rank, self.sequences[slot].order);
        let ready = |slot: &usize| {
            let sequence = &self.sequences[*slot];
            sequence.pending == 0
                && !matches!(sequence.constraint_state, ConstraintState::Asked)
                && self.params_fit(self.new_params(*slot))
        };
        let best = self.waiting.iter().copied().filter(ready).min_by_key(rank);
        let Some(best) = best.filter(|_| self.config.priority) else {
            return;
        };
        let size = self.memory.page_size;
        let candidate = &self.sequences[best];
        let (cached, _) = self.memory.peek(candidate.cacheable());
        let missing = candidate.known() as usize - cached * size + size;
        let wanted = f64::from(missing as u32 + candidate.expected());
        let mut lacks = wanted - self.unpromised(self.promised());
        let is_full = self.running.len() >= self.config.max_running as usize;
        if !is_full && lacks < 0.0 {
            return;
        }
        let mut victims = self.running.clone();
        victims.sort_unstable_by_key(|slot| std::cmp::Reverse(rank(slot)));
        let better = candidate.shared.rank.saturating_add(threshold.into());
        victims.retain(|&slot| self.sequences[slot].shared.rank > better);
        let ratio = f64::from(self.ratio.now());
        let gains = |slot: &usize| {
            let victim = &self.sequences[*slot];
            (victim.held.pages.len() * size) as f64 + f64::from(victim.expected()) * ratio
        };
        let mut count = 0;
        for victim in &victims {
            lacks -= gains(victim);
            count += 1;
            if lacks <= 0.0 {
                break;
            }
        }
        if count == 0 || lacks > 0.0 {
            return;
        }
        for &victim in &victims[..count] {
            self.retract(victim);
        }
    }
}

impl<S> Sequence<S> {
    /// Whether pages of its prompt are not in the index yet.
    fn computes_prompt(&self, page_size: usize) -> bool {
        self.held.shared < self.prompt_len as usize / page_size
    }

    /// Full pages that its prompt and the first tokens of another sequence have in common.
    fn common_pages(&self, other: &Self, limit: usize, page_size: usize) -> usize {
        if self.shared.arrival.namespace != other.shared.arrival.namespace {
            return 0;
        }
        let limit = limit.min(self.prompt_len as usize);
        let pages = self.tokens[..limit].chunks_exact(page_size);
        let others = other.tokens[..limit].chunks_exact(page_size);
        pages
            .zip(others)
            .take_while(|(own, others)| own == others)
            .count()
    }
}
