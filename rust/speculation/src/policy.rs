//! How many drafts of each request to verify for the most tokens per second.
//!
//! A draft costs a row of the step. The cost of rows is a staircase, since captured graphs exist for some row counts only; the
//! value of a draft is its acceptance probability. Both are learnt: [`step_cost`] from step times, [`acceptance`] from earlier
//! drafts. An [`experiment`] measures whether drafts gain what these predict. For each batch, drafts are taken in the order of
//! their probability.
//!
//! A context whose drafts fail gets none: it is quiet. Since it may start to repeat itself, drafts that are not worth their row
//! are probed now and then, within [`PROBE_ROWS`] of the rows and [`PROBE_TIME`] of the time.
//!
//! Deterministic: no clock, no random number.

mod acceptance;
mod draft_model;
mod experiment;
mod grades;
mod loss_budget;
mod step_cost;

use std::fmt;
use std::mem;
use std::time::Duration;

use acceptance::{Acceptance, Class};
use draft_model::DraftModel;
use experiment::Experiment;
pub use grades::Grades;
pub use loss_budget::DecodeStep;
use step_cost::StepCost;

/// Share of rows for probes.
const PROBE_ROWS: f64 = 1.0 / 128.0;
/// Share of time for probes.
const PROBE_TIME: f64 = 1.0 / 256.0;
/// Most rows that may be saved up for probes.
const MOST_PROBES: f64 = 4.0;
/// Least acceptance probability of a draft, even in rows that cost nothing.
const LEAST: f64 = 0.03;
/// Seconds of drafting for one request while the device is idle.
const DRAFTING: f64 = 2e-6;
/// Least predicted gain of drafts, since times are noisy; plus this many errors of times, since of many graph sizes the one
/// with the most underestimated time looks best.
const GAIN: f64 = 1.01;
const ERRORS: f64 = 2.0;

/// The drafts of a request that may be verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftProposal {
    /// Context id.
    pub context: u64,
    /// Match length before the first draft.
    pub match_length: usize,
    /// Number of drafts.
    pub drafts: usize,
    /// Their estimated probabilities, if there are any: then acceptance is learnt by these instead of the match length.
    pub grades: Grades,
}

impl DraftProposal {
    fn class(&self, draft: usize) -> Class {
        Class::new(self.match_length, draft, self.grades)
    }
}

/// Totals; `Display` is a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches.
    pub steps: u64,
    /// Verified drafts.
    pub drafted: u64,
    /// Accepted drafts.
    pub accepted: u64,
    /// Verified drafts that were probes.
    pub probes: u64,
    /// Requests of the last batch whose drafts were all too unlikely.
    pub quiet: usize,
    /// Requests of the last batch.
    pub requests: usize,
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            steps,
            drafted,
            accepted,
            probes,
            quiet,
            requests,
        } = self;
        let percent = 100.0 * *accepted as f64 / (*drafted).max(1) as f64;
        write!(
            f,
            "{accepted} of {drafted} drafts accepted ({percent:.0} %) in {steps} steps, {probes} probes, \
             {quiet} of {requests} contexts quiet"
        )
    }
}

/// A draft; all before it in its request are at least as probable.
#[derive(Clone, Copy, Debug)]
struct Choice {
    probability: f64,
    request: usize,
}

/// Kinds of steps that cost differently with the same number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepKind {
    /// Token outputs only.
    #[default]
    Plain,
    /// Some outputs are not tokens: a step with drafts may take another path than one without.
    Probed,
    /// Some requests use adapters, with the same consequence.
    Adapters,
}

/// Costs of one kind of steps.
#[derive(Debug)]
struct StepCosts {
    alone: StepCost,
    /// Costs with drafts, where these take another path; of steps that run a draft model, if there is one.
    drafted: Option<StepCost>,
    experiment: Experiment,
}

/// Chooses how many drafts of each request to verify.
#[derive(Debug)]
pub struct Policy {
    max_drafts: usize,
    acceptance: Acceptance,
    /// By [`StepKind`].
    costs: [StepCosts; 3],
    /// The kind of the current batch.
    kind: StepKind,
    counters: Counters,
    choices: Vec<Choice>,
    /// Sort keys of the choices: probability, and index.
    ranked: Vec<u64>,
    /// Rows and seconds left for probes.
    probe_rows: f64,
    probe_time: f64,
    /// Requests with drafts that [`Self::preselect`] left out.
    left_out: usize,
    /// The request that probes start with (round-robin).
    turn: usize,
    /// A draft model proposes the drafts.
    model: Option<DraftModel>,
}

impl Policy {
    /// A policy for at most `max_drafts` drafts per request. `graph_rows` are the captured row counts: a step costs as much as
    /// the next larger one, and a step beyond the largest gets no drafts.
    #[must_use]
    pub fn new(max_drafts: usize, graph_rows: &[usize]) -> Self {
        Self {
            max_drafts,
            acceptance: Acceptance::default(),
            costs: [StepKind::Plain, StepKind::Probed, StepKind::Adapters].map(|kind| StepCosts {
                alone: StepCost::new(graph_rows),
                drafted: (kind != StepKind::Plain).then(|| StepCost::new(graph_rows)),
                experiment: Experiment::default(),
            }),
            kind: StepKind::default(),
            counters: Counters::default(),
            choices: Vec::new(),
            ranked: Vec::new(),
            probe_rows: 0.0,
            probe_time: 0.0,
            left_out: 0,
            turn: 0,
            model: None,
        }
    }

    /// A policy for drafts of a draft model, as [`Self::new`]. The model runs in steps of up to the largest of `model_rows`, and
    /// only if [`Self::runs_model`] says so.
    #[must_use]
    pub fn for_model(max_drafts: usize, graph_rows: &[usize], model_rows: &[usize]) -> Self {
        let mut policy = Self::new(max_drafts, graph_rows);
        let costs = &mut policy.costs[StepKind::Plain as usize];
        let mut drafted = StepCost::new(model_rows);
        drafted.reach_all();
        costs.alone.reach_all();
        costs.drafted = Some(drafted);
        policy.model = Some(DraftModel::new(graph_rows));
        policy
    }

    /// Sets the kind of the current batch and the next ones.
    pub fn set_kind(&mut self, kind: StepKind) {
        self.kind = kind;
    }

    /// The kind of the current batch.
    #[must_use]
    pub fn kind(&self) -> StepKind {
        self.kind
    }

    /// Costs of the current kind with or without drafts. Until a step with drafts has run, they are taken to cost the same.
    fn cost(&self, drafted: bool) -> &StepCost {
        let costs = &self.costs[self.kind as usize];
        match &costs.drafted {
            Some(cost) if drafted && !cost.is_empty() => cost,
            _ => &costs.alone,
        }
    }

    /// Most drafts of a request.
    #[must_use]
    pub fn max_drafts(&self) -> usize {
        self.max_drafts
    }

    /// Totals.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Marks the requests worth drafting for before their next token is known: likely drafts, and those due for a probe. The
    /// others may be left out of [`Self::choose`]. This limits drafting while the device is idle.
    pub fn preselect(&mut self, proposals: &[DraftProposal], marks: &mut Vec<bool>) {
        let requests = proposals.len();
        marks.clear();
        marks.resize(requests, false);
        self.left_out = 0;
        let (alone, more) = (
            self.cost(false).of(requests, requests),
            self.cost(true).of(requests + 1, requests),
        );
        let (Some(alone), Some(more)) = (alone, more) else {
            // Costs are unknown, or there is no room for drafts.
            marks.fill(self.cost(false).is_empty());
            return;
        };
        // A token is worth a request's share of the step, a draft costs a row; half of that, since some are likelier.
        let doubled = self.cost(true).of(2 * requests, requests).unwrap_or(more);
        let least = LEAST
            .max(DRAFTING * requests as f64 / alone)
            .max(0.5 * (doubled / alone - 1.0));
        let probe_time = self.probe_time + PROBE_TIME * alone;
        let probed = self.cost(true).at_most(requests + 1, requests);
        let affordable = probed.is_some_and(|probed| probed - alone <= probe_time);
        let mut probes = if affordable {
            self.probe_rows as usize
        } else {
            0
        };
        let turns = (0..requests).map(|turn| (self.turn + turn) % requests);
        for index in turns {
            let proposal = &proposals[index];
            if proposal.drafts == 0 || self.max_drafts == 0 {
                continue;
            }
            let odds = self.acceptance.odds(proposal.context);
            let likely = self.acceptance.probability(proposal.class(0), odds) >= least;
            marks[index] = likely || probes > 0;
            probes -= usize::from(!likely && probes > 0);
            self.left_out += usize::from(!marks[index]);
        }
    }

    /// Chooses how many drafts of each request to verify, for a batch with one row per request.
    pub fn choose(&mut self, proposals: &[DraftProposal], lengths: &mut Vec<usize>) {
        lengths.clear();
        lengths.resize(proposals.len(), 0);
        self.counters.steps += 1;
        self.counters.requests = proposals.len();
        self.rank(proposals);
        if self.model.is_some() {
            self.choose_of_model(proposals, lengths);
            return;
        }
        let (count, predicted_gain) = self.best_draft_count(proposals.len());
        let error = self.cost(false).error();
        if self.costs[self.kind as usize]
            .experiment
            .uses_drafts(predicted_gain, error)
        {
            self.take_ranked(count, lengths);
        }
        self.probe(proposals, lengths);
    }

    /// Chooses the first `count` ranked drafts.
    fn take_ranked(&self, count: usize, lengths: &mut [usize]) {
        for &key in &self.ranked[..count] {
            lengths[self.choice(key).request] += 1;
        }
    }

    /// Ranks drafts by probability.
    fn rank(&mut self, proposals: &[DraftProposal]) {
        self.choices.clear();
        self.counters.quiet = mem::take(&mut self.left_out);
        let offered = proposals.iter().enumerate();
        for (request, proposal) in offered.filter(|(_, proposal)| proposal.drafts > 0) {
            let odds = self.acceptance.odds(proposal.context);
            let (before, mut probability) = (self.choices.len(), 1.0);
            for draft in 0..proposal.drafts.min(self.max_drafts) {
                let class = proposal.class(draft);
                probability *= self.acceptance.probability(class, odds);
                if probability < LEAST {
                    break;
                }
                self.choices.push(Choice {
                    probability,
                    request,
                });
            }
            self.counters.quiet += usize::from(self.choices.len() == before);
        }
        // The lower half is the index, for a stable order by an unstable sort, which does not allocate. Positive floats order
        // as their bits.
        self.ranked.clear();
        let keys = self.choices.iter().zip(0_u64..).map(|(choice, number)| {
            u64::from(!(choice.probability as f32).to_bits()) << 32 | number
        });
        self.ranked.extend(keys);
        self.ranked.sort_unstable();
    }

    fn choice(&self, key: u64) -> Choice {
        self.choices[key as u32 as usize]
    }

    /// The number of ranked drafts with the most tokens per second, and the predicted gain over no drafts.
    fn best_draft_count(&self, requests: usize) -> (usize, f64) {
        let Some(alone) = self.cost(false).of(requests, requests) else {
            return (0, 1.0);
        };
        let mut tokens = requests as f64;
        let plain = tokens / alone;
        let gain = GAIN + ERRORS * self.cost(false).error();
        let mut best = (0, gain * plain);
        for (index, &key) in self.ranked.iter().enumerate() {
            tokens += self.choice(key).probability;
            let Some(cost) = self.cost(true).of(requests + index + 1, requests) else {
                break;
            };
            if tokens / cost > best.1 {
                best = (index + 1, tokens / cost);
            }
        }
        let predicted_gain = if best.0 == 0 { 1.0 } else { best.1 / plain };
        (best.0, predicted_gain)
    }

    /// Adds a draft to some requests without one, within the budget of probes.
    fn probe(&mut self, proposals: &[DraftProposal], lengths: &mut [usize]) {
        let rows = proposals.len() + lengths.iter().sum::<usize>();
        let Some(cost) = self.cost(rows > proposals.len()).of(rows, rows) else {
            return;
        };
        self.probe_time = (self.probe_time + PROBE_TIME * cost).min(2.0 * cost);
        let earned = PROBE_ROWS * proposals.len() as f64;
        let threshold = self.costs[self.kind as usize].experiment.threshold();
        self.probe_rows = (self.probe_rows + earned / threshold).min(MOST_PROBES.max(earned));
        let (first, max_drafts) = (self.turn, self.max_drafts);
        let waiting = |request: usize, length: usize| {
            length == 0 && proposals[request].drafts > 0 && max_drafts > 0
        };
        let turns = || (0..proposals.len()).map(|turn| (first + turn) % proposals.len());
        let waits = turns().filter(|&request| waiting(request, lengths[request]));
        let count = waits.take(self.probe_rows as usize).count();
        let more = self.cost(true).at_most(rows + count, rows);
        let Some(more) = more.filter(|_| count > 0) else {
            return;
        };
        if more - cost > self.probe_time {
            return;
        }
        self.probe_time -= more - cost;
        self.probe_rows -= count as f64;
        self.counters.probes += count as u64;
        let mut left = count;
        for request in turns() {
            if left > 0 && waiting(request, lengths[request]) {
                (lengths[request], self.turn) = (1, request + 1);
                left -= 1;
            }
        }
    }

    /// Records that of a proposal `drafted` tokens were verified, and `accepted` of them accepted.
    pub fn verified(&mut self, proposal: &DraftProposal, drafted: usize, accepted: usize) {
        let accepted = accepted.min(drafted);
        self.counters.drafted += drafted as u64;
        self.counters.accepted += accepted as u64;
        for draft in 0..drafted.min(accepted + 1) {
            let right = draft < accepted;
            let class = proposal.class(draft);
            self.acceptance.learn(proposal.context, class, right);
        }
    }

    /// Records the time of a step with `rows` rows; `drafted`: some of them were drafts.
    pub fn timed(&mut self, rows: usize, drafted: bool, time: Duration) {
        let StepCosts {
            alone,
            drafted: with,
            ..
        } = &mut self.costs[self.kind as usize];
        let cost = with.as_mut().filter(|_| drafted).unwrap_or(alone);
        cost.learn(rows, time.as_secs_f64());
    }

    /// Records that the current batch gave `tokens` tokens, `time` after the previous output: this includes the cost of drafts
    /// outside of the step.
    pub fn answered(&mut self, tokens: usize, time: Duration) {
        let experiment = &mut self.costs[self.kind as usize].experiment;
        experiment.answered(tokens, time.as_secs_f64());
    }
}

#[cfg(test)]
mod tests;
