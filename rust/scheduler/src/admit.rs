//! Admission: which waiting sequences start to run.

use crate::kv_cache_manager::SequencePages;
use crate::output::Admitted;
use crate::prefill_budget::ADMISSION_RETRY_STEPS;
use crate::scheduler::Scheduler;
use crate::sequence::{PrefixLeader, Sequence, State};
use crate::step_plan::StepPlan;

/// Tokens of a common prefix with a running prefill from which on a request waits for its pages; `SGLang`'s
/// `IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD`.
pub(crate) const PREFIX_WAIT_TOKENS: usize = 32;

/// The result of an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    Done,
    /// There are not enough pages for its expected length.
    NoPages,
    /// The step has no room for its first prefill chunk.
    NoBudget,
}

impl<S> Scheduler<S> {
    /// Admits waiting sequences in queue order, as long as they fit.
    pub(crate) fn admit(&mut self, plan: &mut StepPlan, now: u64) {
        let may_run = self.config.max_running as usize;
        if self.waiting.is_empty() || self.running.len() >= may_run {
            return;
        }
        if self.plans < self.admission_blocked_until && !self.running.is_empty() {
            return;
        }
        if plan.rows == 0 || plan.prefill_tokens == 0 {
            self.prefill_starved |= plan.step.load.prompt_tokens == 0;
            return;
        }
        let mut candidates = std::mem::take(&mut self.candidates);
        self.sort_waiting(now, &mut candidates);
        let (mut reserved, mut newest) = (self.reserved_tokens(), Vec::new());
        let mut params_fit = true;
        for &slot in &candidates {
            if self.running.len() >= may_run || plan.rows == 0 || plan.prefill_tokens == 0 {
                break;
            }
            let sequence = &self.sequences[slot];
            let is_due = sequence.pending == 0 && sequence.suspicion.group == plan.group;
            if !is_due || self.awaits_prefix(slot) {
                continue;
            }
            // If the parameters of one do not fit, later ones wait, too: otherwise it could starve.
            let more = self.new_params(slot);
            params_fit &= self.params_fit(more);
            if more > 0 && !params_fit || !self.advance_grammar(slot) {
                continue;
            }
            match self.admit_one(plan, slot, &mut reserved, now) {
                Admission::Done => newest.push(self.sequences[slot].order),
                Admission::NoPages => {
                    self.admission_blocked_until = self.plans + ADMISSION_RETRY_STEPS;
                    break;
                }
                Admission::NoBudget => {
                    self.prefill_starved |= plan.step.load.prompt_tokens == 0;
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

    /// Tokens that running sequences still have to compute or are expected to generate.
    pub(crate) fn reserved_tokens(&self) -> f64 {
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        let ratio = f64::from(self.new_token_ratio.now());
        running
            .map(|sequence| {
                let expected = f64::from(sequence.expected()) * ratio;
                expected + f64::from(sequence.uncomputed())
            })
            .sum()
    }

    /// Tokens of free or evictable pages, without reserved ones.
    pub(crate) fn unreserved_tokens(&self, reserved: f64) -> f64 {
        (self.kv_cache.available() * self.kv_cache.page_size) as f64 - reserved
    }

    fn admit_one(
        &mut self,
        plan: &mut StepPlan,
        slot: usize,
        reserved: &mut f64,
        now: u64,
    ) -> Admission {
        let size = self.limits.page_size;
        let mut kv = SequencePages {
            pages: std::mem::take(&mut self.spare_pages),
            ..SequencePages::default()
        };
        let most = self.sequences[slot].cacheable_len();
        let host_pages = self.match_and_lock(slot, &mut kv, most, now);
        let sequence = &self.sequences[slot];
        let missing = sequence.known() - kv.pages.len() as u32 * size;
        let wanted = f64::from(missing + sequence.expected() + size);
        if wanted >= self.unreserved_tokens(*reserved) && !self.running.is_empty() {
            self.free(kv);
            return Admission::NoPages;
        }
        let cached = (kv.pages.len() + host_pages) as u32 * size;
        // A chunk ends at a page boundary or at the prompt's end.
        let first = (sequence.known() - cached).min(size - cached % size);
        let pages = (cached + first).div_ceil(size);
        if plan.prefill_tokens < first.min(self.prefill_budget.min_tokens()) || pages > plan.pages {
            self.free(kv);
            return Admission::NoBudget;
        }
        let on_the_device = kv.pages.len();
        if host_pages > 0 {
            self.load_from_host(slot, &mut kv, host_pages, now);
        }
        let cached = kv.pages.len() as u32 * size;
        let admitted = Admitted {
            at: now,
            cached_tokens: cached,
            loaded_tokens: cached - on_the_device as u32 * size,
            first_token: None,
        };
        let sequence = &mut self.sequences[slot];
        let longest = (sequence.len() + sequence.expected()).div_ceil(size) as usize;
        kv.pages.reserve(longest.saturating_sub(kv.pages.len()));
        self.spare_pages = std::mem::replace(&mut sequence.kv, kv).pages;
        sequence.start(cached);
        self.running.push(slot);
        if !self.schedule_chunk(plan, slot) {
            self.running.pop();
            let kv = std::mem::take(&mut self.sequences[slot].kv);
            self.sequences[slot].reset_progress();
            self.free(kv);
            return Admission::NoBudget;
        }
        *reserved += wanted;
        self.record_admission(slot, admitted);
        Admission::Done
    }

    /// Matches and locks the cached prefix of the first `most` tokens. A prefix that ends inside an image is cut before it: an
    /// image is computed as a whole. Returns the pages that follow on the host.
    fn match_and_lock(
        &mut self,
        slot: usize,
        kv: &mut SequencePages,
        most: u32,
        now: u64,
    ) -> usize {
        let sequence = &self.sequences[slot];
        let mut most = most;
        loop {
            let host_pages = self.kv_cache.match_and_lock(kv, sequence.key(most), now);
            let cached = (kv.pages.len() + host_pages) as u32 * self.limits.page_size;
            let Some(image) = sequence.cut_image(cached) else {
                return host_pages;
            };
            most = image.start;
            self.kv_cache.free(kv);
        }
    }

    /// Loads the host pages of the matched prefix, if there are free device pages.
    fn load_from_host(&mut self, slot: usize, kv: &mut SequencePages, host_pages: usize, now: u64) {
        let sequence = &self.sequences[slot];
        let size = self.limits.page_size;
        let wanted = (kv.pages.len() + host_pages) as u32 * size;
        let key = sequence.key(wanted);
        self.kv_cache.load_from_host(kv, key, host_pages, now);
        if let Some(image) = sequence.cut_image(kv.pages.len() as u32 * size) {
            let most = image.start;
            self.kv_cache.free(kv);
            self.match_and_lock(slot, kv, most, now);
        }
    }

    /// Bytes of parameters that the driver does not keep yet for this request.
    pub(crate) fn new_params(&self, slot: usize) -> u64 {
        let shared = &self.sequences[slot].shared;
        match shared.request.params_bytes {
            0 => 0,
            bytes => {
                let request = self.requests.get(&shared.request.id);
                u64::from(bytes) - request.map_or(0, |request| request.kept_bytes)
            }
        }
    }

    /// Whether the driver can keep so many bytes of parameters more. Those of a single request always fit.
    pub(crate) fn params_fit(&self, more: u64) -> bool {
        let kept = self.kept_bytes;
        more == 0 || kept == 0 || kept + more <= self.limits.frame.params
    }

    fn record_admission(&mut self, slot: usize, admitted: Admitted) {
        let more = self.new_params(slot);
        if more > 0
            && let Some(request) = self.requests.get_mut(&self.sequences[slot].id())
        {
            request.kept_bytes += more;
            self.kept_bytes += more;
        }
        self.counts.admissions += 1;
        self.counts.matched_tokens += u64::from(admitted.cached_tokens);
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

    /// Unlocks and frees the pages of a failed admission.
    fn free(&mut self, mut kv: SequencePages) {
        self.kv_cache.free(&mut kv);
        self.spare_pages = kv.pages;
    }

    /// Whether a sequence should wait for the pages of a running prefill that it shares a prefix with.
    fn awaits_prefix(&mut self, slot: usize) -> bool {
        if !self.kv_cache.prefix_cache {
            return false;
        }
        if let Some(prefix_leader) = self.sequences[slot].prefix_leader
            && self.is_computing(prefix_leader)
        {
            return true;
        }
        let prefix_leader = self.find_prefix_leader(slot);
        self.sequences[slot].prefix_leader = prefix_leader;
        prefix_leader.is_some()
    }

    /// Whether the leader still computes the shared pages.
    fn is_computing(&self, prefix_leader: PrefixLeader) -> bool {
        self.sequences
            .get(prefix_leader.slot)
            .is_some_and(|leader| {
                leader.order == prefix_leader.order
                    && leader.state == State::Running
                    && leader.kv.shared < prefix_leader.pages
            })
    }

    fn find_prefix_leader(&self, slot: usize) -> Option<PrefixLeader> {
        let size = self.kv_cache.page_size;
        let follower = &self.sequences[slot];
        let key = follower.cacheable();
        let mut cached = None;
        let leaders = self.running.iter().copied();
        leaders
            .filter(|&at| self.sequences[at].computes_prompt(size))
            .find_map(|at| {
                let leader = &self.sequences[at];
                let pages = leader.common_pages(follower, key.tokens.len(), size);
                if pages * size < PREFIX_WAIT_TOKENS {
                    return None;
                }
                let cached = *cached.get_or_insert_with(|| {
                    let (device, host) = self.kv_cache.peek(key);
                    device + host
                });
                let gained = pages.saturating_sub(cached) * size;
                (gained >= PREFIX_WAIT_TOKENS && leader.kv.shared < pages).then_some(PrefixLeader {
                    slot: at,
                    order: leader.order,
                    pages,
                })
            })
    }

    /// Counts overtakes of waiting sequences by newer ones that were admitted.
    fn count_overtakes(&mut self, admitted: &[u64]) {
        for &slot in &self.waiting {
            let sequence = &mut self.sequences[slot];
            if sequence.prefix_leader.is_none() && sequence.pending == 0 {
                let later = admitted.iter().filter(|&&order| order > sequence.order);
                sequence.overtaken += later.count() as u32;
            }
        }
    }
}

impl<S> Sequence<S> {
    /// Whether pages of its prompt are not in the prefix index yet.
    fn computes_prompt(&self, page_size: usize) -> bool {
        self.kv.shared < self.prompt_len as usize / page_size
    }

    /// Full pages of the common prefix with another sequence.
    fn common_pages(&self, other: &Self, limit: usize, page_size: usize) -> usize {
        if self.shared.request.namespace != other.shared.request.namespace {
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
