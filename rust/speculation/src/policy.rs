//! How many drafts to verify, so that no batch gets slower.
//!
//! Verifying a draft costs a row of the step. The cost of rows is a staircase, since captured graphs exist for some row
//! counts only; the value of a draft is the probability that it is accepted. Both are learnt while serving: [`cost`] from
//! the times of steps, [`acceptance`] from the outcome of earlier drafts. A [`trial`] measures whether drafts gain what
//! these promise. For each batch, drafts are taken in the order of their probability: the number that gives the most tokens
//! per second.
//!
//! A context whose drafts fail gets none: it is quiet. It may start to repeat itself later, so drafts that are not worth
//! their row are probed now and then, within [`PROBE_ROWS`] of the rows and [`PROBE_TIME`] of the time.
//!
//! The policy reads no clock and draws no random number.

mod acceptance;
mod cost;
mod trial;

use std::fmt;
use std::mem;
use std::time::Duration;

use acceptance::Acceptance;
use cost::Cost;
use trial::Trial;

/// Share of the rows that may be spent on probes.
const PROBE_ROWS: f64 = 1.0 / 128.0;
/// Share of the time that may be spent on probes.
const PROBE_TIME: f64 = 1.0 / 256.0;
/// Most rows that may be saved up for probes.
const MOST_PROBES: f64 = 4.0;
/// Drafts less probable than this are never taken, even in rows that cost nothing.
const LEAST: f64 = 0.03;
/// Seconds that drafting for one request takes while the device waits.
const DRAFTING: f64 = 2e-6;
/// Drafts must gain at least this factor, since times are never exact. Of many graph sizes the one whose time was
/// underestimated looks best, so the error of times is required on top.
const GAIN: f64 = 1.01;
const ERRORS: f64 = 2.0;

/// The drafts that a request could have verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The context's id.
    pub context: u64,
    /// Tokens that matched before the first draft.
    pub match_length: usize,
    /// Tokens that are drafted.
    pub drafts: usize,
}

/// The outcome of drafting so far; its `Display` is a line for a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches that drafts were chosen for.
    pub steps: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Drafts that were accepted.
    pub accepted: u64,
    /// Drafts that were verified only to learn.
    pub probes: u64,
    /// Requests of the last batch that had drafts, none of which was likely enough.
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

/// A draft that may be taken; all before it in its request are at least as probable.
#[derive(Clone, Copy, Debug)]
struct Choice {
    probability: f64,
    request: usize,
}

/// Why steps with the same number of rows may cost differently. Costs are learnt for each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// The outputs are only tokens, and drafts are rows like others.
    #[default]
    Plain,
    /// Some outputs are not tokens. A step with drafts may take another path than one without.
    Probed,
    /// Some requests use adapters, with the same consequence.
    Bound,
}

/// The costs of steps of one kind.
#[derive(Debug)]
struct Costs {
    alone: Cost,
    /// The costs of steps with drafts, where these take another path.
    drafted: Option<Cost>,
    trial: Trial,
}

/// Chooses how many drafts of each request are verified.
#[derive(Debug)]
pub struct Policy {
    max_drafts: usize,
    acceptance: Acceptance,
    /// By [`Kind`].
    costs: [Costs; 3],
    /// The kind of the current batch.
    kind: Kind,
    counters: Counters,
    choices: Vec<Choice>,
    /// The choices in their order: probability, and number.
    ranked: Vec<u64>,
    /// Rows and seconds that probes may take.
    probe_rows: f64,
    probe_time: f64,
    /// Number of requests with offers that the last call of [`Self::preselect`] left out.
    left_out: usize,
    /// The request that probes start with, so that each has its turn.
    turn: usize,
}

impl Policy {
    /// A policy for at most `max_drafts` drafts per request. `graph_rows` are the row counts that steps may run with: a step
    /// costs as much as the next larger one, and a step beyond the largest gets no drafts.
    #[must_use]
    pub fn new(max_drafts: usize, graph_rows: &[usize]) -> Self {
        Self {
            max_drafts,
            acceptance: Acceptance::default(),
            costs: [Kind::Plain, Kind::Probed, Kind::Bound].map(|kind| Costs {
                alone: Cost::new(graph_rows),
                drafted: (kind != Kind::Plain).then(|| Cost::new(graph_rows)),
                trial: Trial::default(),
            }),
            kind: Kind::default(),
            counters: Counters::default(),
            choices: Vec::new(),
            ranked: Vec::new(),
            probe_rows: 0.0,
            probe_time: 0.0,
            left_out: 0,
            turn: 0,
        }
    }

    /// Sets the kind of the current batch, which the next ones are taken to have, too.
    pub fn set_kind(&mut self, kind: Kind) {
        self.kind = kind;
    }

    /// The kind of the current batch.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The cost of steps like the current one, with drafts or without. Until one with drafts has run, they are taken to cost
    /// the same.
    fn cost(&self, drafted: bool) -> &Cost {
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

    /// The outcome of drafting so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Marks the requests of a batch that are worth drafting for, by the drafts they would get before their next token is
    /// known. These are those whose drafts are likely, and those whose turn it is to be probed. The others may be left out of
    /// [`Self::choose`]. So drafting after the token, while the device waits, is limited to requests that may gain.
    pub fn preselect(&mut self, offers: &[Offer], marks: &mut Vec<bool>) {
        let requests = offers.len();
        marks.clear();
        marks.resize(requests, false);
        self.left_out = 0;
        let (alone, more) = (
            self.cost(false).of(requests, requests),
            self.cost(true).of(requests + 1, requests),
        );
        let (Some(alone), Some(more)) = (alone, more) else {
            // The cost of steps is not known yet, or there is no room for drafts.
            marks.fill(self.cost(false).is_empty());
            return;
        };
        // A token is worth a request's share of the step, and a draft costs a row; half of that, since some are likelier.
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
            let offer = &offers[index];
            if offer.drafts == 0 || self.max_drafts == 0 {
                continue;
            }
            let odds = self.acceptance.odds(offer.context);
            let likely = self.acceptance.probability(offer.match_length, odds) >= least;
            marks[index] = likely || probes > 0;
            probes -= usize::from(!likely && probes > 0);
            self.left_out += usize::from(!marks[index]);
        }
    }

    /// Chooses how many drafts of each request to verify, for a batch with one row per request.
    pub fn choose(&mut self, offers: &[Offer], lengths: &mut Vec<usize>) {
        lengths.clear();
        lengths.resize(offers.len(), 0);
        self.counters.steps += 1;
        self.counters.requests = offers.len();
        self.rank(offers);
        let (count, promise) = self.worthwhile(offers.len());
        let error = self.cost(false).error();
        if self.costs[self.kind as usize].trial.takes(promise, error) {
            for &key in &self.ranked[..count] {
                lengths[self.choice(key).request] += 1;
            }
        }
        self.probe(offers, lengths);
    }

    /// Ranks all drafts that are likely enough, the most probable first.
    fn rank(&mut self, offers: &[Offer]) {
        self.choices.clear();
        self.counters.quiet = mem::take(&mut self.left_out);
        let offered = offers.iter().enumerate();
        for (request, offer) in offered.filter(|(_, offer)| offer.drafts > 0) {
            let odds = self.acceptance.odds(offer.context);
            let (before, mut probability) = (self.choices.len(), 1.0);
            for draft in 0..offer.drafts.min(self.max_drafts) {
                let length = offer.match_length + draft;
                probability *= self.acceptance.probability(length, odds);
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
        // The lower half is the choice's number, which keeps equal ones in order, so that the sort need not be stable and
        // allocates nothing. Positive floats order as their bits do.
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

    /// How many of the ranked drafts give the most tokens per second, and that rate relative to the rate without drafts.
    fn worthwhile(&self, requests: usize) -> (usize, f64) {
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
        let promise = if best.0 == 0 { 1.0 } else { best.1 / plain };
        (best.0, promise)
    }

    /// Takes one draft each of some requests that got none, as far as the budget for probes allows.
    fn probe(&mut self, offers: &[Offer], lengths: &mut [usize]) {
        let rows = offers.len() + lengths.iter().sum::<usize>();
        let Some(cost) = self.cost(rows > offers.len()).of(rows, rows) else {
            return;
        };
        self.probe_time = (self.probe_time + PROBE_TIME * cost).min(2.0 * cost);
        let earned = PROBE_ROWS * offers.len() as f64;
        let toll = self.costs[self.kind as usize].trial.toll();
        self.probe_rows = (self.probe_rows + earned / toll).min(MOST_PROBES.max(earned));
        let (first, max_drafts) = (self.turn, self.max_drafts);
        let waiting = |request: usize, length: usize| {
            length == 0 && offers[request].drafts > 0 && max_drafts > 0
        };
        let turns = || (0..offers.len()).map(|turn| (first + turn) % offers.len());
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

    /// Learns that the first `accepted` of `drafted` tokens were right. The match length is the [`Offer`]'s.
    pub fn verified(&mut self, context: u64, match_length: usize, drafted: usize, accepted: usize) {
        let accepted = accepted.min(drafted);
        self.counters.drafted += drafted as u64;
        self.counters.accepted += accepted as u64;
        for draft in 0..drafted.min(accepted + 1) {
            let right = draft < accepted;
            self.acceptance.learn(context, match_length + draft, right);
        }
    }

    /// Learns how long a step with `rows` rows took; `drafted` says whether some of them were drafts.
    pub fn timed(&mut self, rows: usize, drafted: bool, time: Duration) {
        let Costs {
            alone,
            drafted: with,
            ..
        } = &mut self.costs[self.kind as usize];
        let cost = with.as_mut().filter(|_| drafted).unwrap_or(alone);
        cost.learn(rows, time.as_secs_f64());
    }

    /// Learns that the current batch was answered with `tokens` tokens, `time` after the answer before it: the cost of drafts
    /// besides the step's time is learnt from that.
    pub fn answered(&mut self, tokens: usize, time: Duration) {
        let trial = &mut self.costs[self.kind as usize].trial;
        trial.answered(tokens, time.as_secs_f64());
    }
}

#[cfg(test)]
mod tests;
