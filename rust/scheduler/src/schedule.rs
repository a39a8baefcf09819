//! Scheduling of one step: decodes, then running prefills, then admission.

use std::mem;

use crate::error::SchedulerError;
use crate::in_flight::InFlightStep;
use crate::prefill_budget::MIN_PREFILL_TOKENS;
use crate::scheduler::Scheduler;
use crate::step::Step;
use crate::step_plan::StepPlan;

/// Most steps in flight.
const MAX_IN_FLIGHT: usize = 2;

impl<S> Scheduler<S> {
    /// Schedules the next step. `None`: there is nothing to compute, or nothing before the next output.
    ///
    /// # Errors
    ///
    /// [`SchedulerError::Inconsistent`]: a bug. [`driver_lost`](Self::driver_lost) resets all page counts.
    pub fn schedule(&mut self, now: u64) -> Result<Option<Step<'_, S>>, SchedulerError> {
        self.kv_cache.check_fault()?;
        self.expire(now);
        let must_wait = |step: &InFlightStep| step.has_drafts || step.is_constrained;
        if self.in_flight.len() == MAX_IN_FLIGHT || self.in_flight.back().is_some_and(must_wait) {
            return Ok(None);
        }
        if self.is_idle() {
            self.new_token_ratio.reset();
            return Ok(None);
        }
        self.plans += 1;
        let buffers = (
            self.spare.pop().unwrap_or_default(),
            mem::take(&mut self.rest),
        );
        let mut plan = StepPlan::new(&self.limits, now, buffers);
        self.fill_plan(&mut plan, now);
        self.remove_finished();
        self.kv_cache.check_fault()?;
        let mut step;
        (step, self.rest) = plan.finish();
        if step.rows.is_empty() {
            self.recycle(step);
            return Ok(None);
        }
        mem::swap(&mut self.copies, &mut self.kv_cache.copies);
        self.kv_cache.copies.clear();
        step.load.copied_pages = self.copies.len() as u32;
        self.counts.steps += 1;
        self.counts.rows = step.rows.len();
        self.counts.total_rows += step.rows.len() as u64;
        self.counts.prompt_steps += u64::from(step.load.prompt_tokens > 0);
        self.counts.prefill_tokens += u64::from(step.load.prompt_tokens);
        self.in_flight.push_back(step);
        Ok(Some(Step {
            number: self.counts.steps,
            copies: &self.copies,
            scheduler: self,
        }))
    }

    fn fill_plan(&mut self, plan: &mut StepPlan, now: u64) {
        self.kv_cache.prefer_host = self.prefill_budget.prefer_host(self.kv_cache.page_size);
        if self.constrained > 0 {
            self.advance_running_grammars();
        }
        self.retract_for_decodes(plan);
        self.preempt();
        let prefills_first = mem::take(&mut self.prefill_starved);
        let groups = self.groups();
        for &group in &*groups {
            if plan.is_empty() {
                plan.group = group;
                self.fill_group(plan, prefills_first, now);
            }
        }
        let is_blocked = plan.is_empty() && self.in_flight.is_empty();
        if is_blocked && self.advance_late_grammars() {
            self.fill_running(plan, &groups);
        }
        while plan.is_empty() && self.in_flight.is_empty() && self.running.len() > 1 {
            self.retract_one();
            self.fill_running(plan, &groups);
        }
        if !plan.is_empty() {
            self.record_group(plan.group);
        }
    }

    fn fill_group(&mut self, plan: &mut StepPlan, prefills_first: bool, now: u64) {
        if !prefills_first {
            self.schedule_decodes(plan);
        }
        self.set_prefill_budget(plan, prefills_first);
        self.schedule_prefills(plan);
        self.admit(plan, now);
        if prefills_first {
            self.schedule_decodes(plan);
        }
    }

    /// Schedules running sequences of the first of these groups that has any, without admission.
    fn fill_running(&mut self, plan: &mut StepPlan, groups: &[u64]) {
        for &group in groups {
            if plan.is_empty() {
                plan.group = group;
                self.schedule_decodes(plan);
                self.set_prefill_budget(plan, false);
                self.schedule_prefills(plan);
            }
        }
    }

    /// Sets the prefill tokens of the step, next to decodes that are scheduled already or, with `decodes_follow`, afterwards.
    fn set_prefill_budget(&self, plan: &mut StepPlan, decodes_follow: bool) {
        let decodes = self.limits.max_forward_tokens - plan.tokens;
        if self.streaming == 0 {
            let most = self.prefill_budget.max_step_tokens();
            let left = most.saturating_sub(decodes).max(MIN_PREFILL_TOKENS);
            plan.prefill_tokens = most.min(left).min(plan.tokens);
            return;
        }
        let left = self.config.chunk_tokens.saturating_sub(decodes);
        let decodes_stream = |&slot: &usize| {
            let sequence = &self.sequences[slot];
            sequence.streams && sequence.decodes()
        };
        let load = plan.step.load;
        let streams = load.streams || decodes_follow && self.running.iter().any(decodes_stream);
        let budget = if streams && !decodes_follow {
            // Running sequences without a decode in this step are prefilling, or their mask is late.
            let prefilling = self.running.len().saturating_sub(load.decodes as usize);
            let waiting = prefilling + self.waiting.len();
            self.prefill_budget.tokens_with_waiting(load, waiting)
        } else {
            self.prefill_budget.tokens(streams)
        };
        plan.prefill_tokens = budget.min(left.max(MIN_PREFILL_TOKENS)).min(plan.tokens);
    }
}
