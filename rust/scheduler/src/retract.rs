//! Retraction (preemption): taking the KV pages of running sequences, for decodes or for a request of better priority.

use std::cmp::Reverse;

use crate::grammar::GrammarState;
use crate::prefill_budget::ADMISSION_RETRY_STEPS;
use crate::scheduler::Scheduler;
use crate::step_plan::StepPlan;

impl<S> Scheduler<S> {
    /// Retracts sequences until the others have pages for their next token; `SGLang`'s `retract_decode`.
    pub(crate) fn retract_for_decodes(&mut self, plan: &mut StepPlan) {
        let mut retracted = false;
        loop {
            let wanted = self.missing_decode_pages(plan.rows);
            plan.decode_pages = wanted;
            if self.kv_cache.evict_until_free(wanted) || self.running.len() <= 1 {
                break;
            }
            self.retract_one();
            retracted = true;
        }
        if retracted {
            let running = || self.running.iter().map(|&slot| &self.sequences[slot]);
            let produced = running().map(|it| u64::from(it.produced())).sum();
            let most = running().map(|it| u64::from(it.shared.max_tokens)).sum();
            let requests = self.running.len();
            self.new_token_ratio.retracted(requests, produced, most);
            self.admission_blocked_until = self.plans + ADMISSION_RETRY_STEPS;
        } else {
            self.new_token_ratio.decay();
        }
    }

    /// Pages that the decodes of a step of so many rows lack.
    fn missing_decode_pages(&self, rows: u32) -> usize {
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        let decodes = running.filter(|sequence| sequence.decodes());
        let page_size = self.kv_cache.page_size;
        decodes
            .take(rows as usize)
            .filter(|it| it.len() as usize > it.kv.pages.len() * page_size)
            .count()
    }

    /// Retracts the running sequence of the worst priority; of several the one with the fewest output tokens, then the
    /// longest prompt.
    pub(crate) fn retract_one(&mut self) {
        let victim = self.running.iter().copied().max_by_key(|&slot| {
            let sequence = &self.sequences[slot];
            let produced = Reverse(sequence.produced());
            let prompt = sequence.shared.prompt_len;
            (sequence.shared.rank, produced, prompt, sequence.order)
        });
        if let Some(slot) = victim {
            self.retract(slot);
        }
    }

    /// Puts a running sequence back into the queue. Its KV stays in the prefix index until it is evicted.
    fn retract(&mut self, slot: usize) {
        self.cache_pages(slot, true, true);
        let sequence = &mut self.sequences[slot];
        self.kv_cache.free(&mut sequence.kv);
        sequence.retract();
        let order = sequence.order;
        self.running.retain(|&other| other != slot);
        let sequences = &self.sequences;
        let before = |&other: &usize| sequences[other].order < order;
        self.waiting
            .insert(self.waiting.partition_point(before), slot);
        self.counts.retractions += 1;
        self.admission_blocked_until = 0;
    }

    /// Retracts running sequences of worse priority where the best waiting request does not fit; `SGLang`'s
    /// `preempt_to_schedule`.
    pub(crate) fn preempt(&mut self) {
        let Some(threshold) = self.config.preemption_threshold else {
            return;
        };
        let rank = |&slot: &usize| (self.sequences[slot].shared.rank, self.sequences[slot].order);
        let is_ready = |slot: &usize| {
            let sequence = &self.sequences[*slot];
            sequence.pending == 0
                && !matches!(sequence.grammar, GrammarState::Compiling)
                && self.params_fit(self.new_params(*slot))
        };
        let best = self
            .waiting
            .iter()
            .copied()
            .filter(is_ready)
            .min_by_key(rank);
        let Some(best) = best.filter(|_| self.config.priority) else {
            return;
        };
        let size = self.kv_cache.page_size;
        let candidate = &self.sequences[best];
        let (cached, _) = self.kv_cache.peek(candidate.cacheable());
        let missing = candidate.known() as usize - cached * size + size;
        let wanted = f64::from(missing as u32 + candidate.expected());
        let mut lacking = wanted - self.unreserved_tokens(self.reserved_tokens());
        let is_full = self.running.len() >= self.config.max_running as usize;
        if !is_full && lacking < 0.0 {
            return;
        }
        let mut victims = self.running.clone();
        victims.sort_unstable_by_key(|slot| Reverse(rank(slot)));
        let better = candidate.shared.rank.saturating_add(threshold.into());
        victims.retain(|&slot| self.sequences[slot].shared.rank > better);
        let ratio = f64::from(self.new_token_ratio.now());
        let mut count = 0;
        for &victim in &victims {
            let victim = &self.sequences[victim];
            let freed = (victim.kv.pages.len() * size) as f64;
            lacking -= freed + f64::from(victim.expected()) * ratio;
            count += 1;
            if lacking <= 0.0 {
                break;
            }
        }
        if lacking <= 0.0 {
            for &victim in &victims[..count] {
                self.retract(victim);
            }
        }
    }
}
