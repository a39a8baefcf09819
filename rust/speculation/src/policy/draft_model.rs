//! Drafts of a draft model: whether a step runs it, which is chosen before the step, by costs of steps with and without it.
//!
//! A step that runs the draft model takes longer, even if none of its drafts is verified, so its costs are learnt apart from
//! those of plain steps. A [`LossBudget`] limits what drafts and probes together cost against plain decoding.

use std::time::Duration;

use super::loss_budget::{DecodeStep, LossBudget};
use super::{DraftProposal, Policy};

/// Requests of a probe.
const PROBED: usize = 4;

/// What the draft model of a step is run for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Purpose {
    #[default]
    None,
    /// Drafts that are predicted to gain.
    Gain,
    /// To learn whether drafts of so many requests are accepted.
    Probe(usize),
}

#[derive(Debug)]
pub(super) struct DraftModel {
    /// Of the current step.
    purpose: Purpose,
    budget: LossBudget,
}

impl DraftModel {
    pub(super) fn new(graph_rows: &[usize]) -> Self {
        Self {
            purpose: Purpose::None,
            budget: LossBudget::new(graph_rows),
        }
    }
}

impl Policy {
    /// Whether the next step, of `rows` rows, runs the draft model. `proposals` are what it would draft for each request, of
    /// which [`Self::choose`] chooses after the step. `probes`: it may be run to learn from its drafts alone.
    pub fn runs_model(&mut self, proposals: &[DraftProposal], rows: usize, probes: bool) -> bool {
        let Some(model) = &self.model else {
            return false;
        };
        let (requests, allowed) = (proposals.len(), model.budget.allows(proposals.len()));
        self.rank(proposals);
        // What an experiment measures without a budget is not what drafts gain.
        let (count, gain) = if allowed {
            self.best_draft_count(requests)
        } else {
            (0, 1.0)
        };
        let error = self.cost(false).error();
        let experiment = &mut self.costs[self.kind as usize].experiment;
        let uses_drafts = experiment.uses_drafts(gain, error) && count > 0;
        experiment.starts_now();
        // Drafts of a probe are verified by the next step, whose own would cost even more.
        let may_probe = probes && !experiment.measures() && rows == requests;
        let purpose = if uses_drafts {
            Purpose::Gain
        } else if may_probe {
            self.affordable_probe(proposals)
        } else {
            Purpose::None
        };
        let runs = purpose != Purpose::None;
        self.left_out = if runs { 0 } else { offered(proposals).count() };
        if let Some(model) = &mut self.model {
            model.purpose = purpose;
        }
        runs
    }

    /// The largest probe that the budget affords: a step that runs the draft model, and one that verifies its drafts.
    fn affordable_probe(&self, proposals: &[DraftProposal]) -> Purpose {
        let (requests, plain) = (proposals.len(), self.cost(false));
        let is_affordable = |&count: &usize| {
            let Some(model) = &self.model else {
                return false;
            };
            // A batch that fills the largest graph with the draft model cannot verify its drafts.
            let fits = self.cost(true).of(requests + 1, requests).is_some();
            let verified = requests + count * self.max_drafts;
            let steps = (
                plain.of(requests, requests),
                self.cost(true).at_most(requests, requests),
                plain.at_most(verified, requests),
            );
            let (Some(alone), Some(drafting), Some(verifying)) = steps else {
                return false;
            };
            let lost = (drafting - alone).max(0.0) + verifying - alone;
            fits && model.budget.affords(lost, requests)
        };
        let most = offered(proposals).take(PROBED).count();
        let found = (1..=most).rev().find(is_affordable);
        found.map_or(Purpose::None, Purpose::Probe)
    }

    /// Chooses how many of the drafts of a step to verify, as the draft model was run for.
    pub(super) fn choose_of_model(&mut self, proposals: &[DraftProposal], lengths: &mut [usize]) {
        let purpose = self.model.as_ref().map(|model| model.purpose);
        match purpose.unwrap_or_default() {
            Purpose::None => {}
            Purpose::Gain => {
                let (count, _) = self.best_draft_count(proposals.len());
                self.take_ranked(count, lengths);
            }
            Purpose::Probe(count) => {
                let first = self.turn;
                let turns = (0..proposals.len()).map(|turn| (first + turn) % proposals.len());
                for request in turns.filter(|&turn| proposals[turn].drafts > 0).take(count) {
                    lengths[request] = proposals[request].drafts.min(self.max_drafts);
                    self.counters.probes += lengths[request] as u64;
                    self.turn = request + 1;
                }
            }
        }
    }

    /// Records the time of a decode step of a model with a draft model.
    pub fn decoded(&mut self, step: DecodeStep, time: Duration) {
        let mut seconds = time.as_secs_f64();
        if let Some(model) = &mut self.model {
            seconds = model.budget.record(step, seconds);
        }
        self.timed(step.rows, step.ran_model, Duration::from_secs_f64(seconds));
    }
}

fn offered(proposals: &[DraftProposal]) -> impl Iterator<Item = &DraftProposal> {
    proposals.iter().filter(|proposal| proposal.drafts > 0)
}
