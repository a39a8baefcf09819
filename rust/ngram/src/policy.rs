//! How many drafts to try, so that nobody gets slower.
//!
//! A verified draft costs a row. Rows cost by steps, since graphs exist for a ladder of row counts; a draft is worth the
//! probability that it is accepted. Both are learnt while serving: [`cost`] from the times of steps, [`acceptance`] from
//! what became of earlier drafts. Whether drafts win what these promise is found out by [`trial`]. For each batch drafts
//! are taken in the order of their probability, as many as give the most tokens per second.
//!
//! A context whose drafts fail gets none: it is quiet. So that it is heard again when it starts to repeat itself, drafts
//! that are not worth their row are tried now and then, within [`PROBE_ROWS`] of the rows and [`PROBE_TIME`] of the time.
//!
//! Nothing here reads a clock or draws a random number.

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
/// Share of the time that may be spent on them.
const PROBE_TIME: f64 = 1.0 / 256.0;
/// Rows that probes may save up.
const MOST_PROBES: f64 = 4.0;
/// Drafts less probable than this are not worth their trouble, even in rows that are there anyway.
const LEAST: f64 = 0.03;
/// Seconds that drafting behind an answer takes, which the device waits for.
const DRAFTING: f64 = 2e-6;
/// Drafts must make a step better by so much: times are never quite right. Of many rungs the one whose time is too short
/// looks best, so errors count as well.
const GAIN: f64 = 1.01;
const ERRORS: f64 = 2.0;

/// What a request could have verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The context's id.
    pub context: u64,
    /// Tokens that matched before the first draft.
    pub match_length: usize,
    /// Tokens that are drafted.
    pub drafts: usize,
}

/// What was tried so far. It is written to logs as a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Batches that were chosen for.
    pub steps: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Drafts that were accepted.
    pub accepted: u64,
    /// Drafts that were tried only to learn.
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

/// A draft that may be taken: all before it in its request are more probable.
#[derive(Clone, Copy, Debug)]
struct Choice {
    probability: f64,
    request: usize,
}

/// What makes a step cost something else than others of as many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: it is of tokens alone, and drafts are rows like others.
    #[default]
    Plain,
    /// Other outputs than tokens. With drafts it may run in another way than without.
    Probed,
    /// Adapters, with the same consequence.
    Bound,
}

/// What steps of one kind cost.
#[derive(Debug)]
struct Costs {
    alone: Cost,
    /// With drafts, where that is another way to run them.
    drafted: Option<Cost>,
    trial: Trial,
}

/// Chooses how many drafts of each request are verified.
#[derive(Debug)]
pub struct Policy {
    most: usize,
    acceptance: Acceptance,
    /// By [`Kind`].
    costs: [Costs; 3],
    /// Of the batch at hand.
    kind: Kind,
    counters: Counters,
    choices: Vec<Choice>,
    /// The choices in their order: probability, and number.
    ranked: Vec<u64>,
    /// Rows and seconds that probes may take.
    probe_rows: f64,
    probe_time: f64,
    /// Requests with offers that the last call of [`Self::listen`] left out.
    unheard: usize,
    /// The request that probes start with, so that all have their turn.
    turn: usize,
}

impl Policy {
    /// A policy for at most `num_drafts` drafts per request, and for graphs with so many rows. A step with more rows than
    /// the largest gets no drafts.
    #[must_use]
    pub fn new(num_drafts: usize, rungs: &[usize]) -> Self {
        Self {
            most: num_drafts,
            acceptance: Acceptance::default(),
            costs: [Kind::Plain, Kind::Probed, Kind::Bound].map(|kind| Costs {
                alone: Cost::new(rungs),
                drafted: (kind != Kind::Plain).then(|| Cost::new(rungs)),
                trial: Trial::default(),
            }),
            kind: Kind::default(),
            counters: Counters::default(),
            choices: Vec::new(),
            ranked: Vec::new(),
            probe_rows: 0.0,
            probe_time: 0.0,
            unheard: 0,
            turn: 0,
        }
    }

    /// Says of what kind the batch at hand is, as the next ones of its contexts will be: what steps cost is learnt apart.
    pub fn is_of(&mut self, kind: Kind) {
        self.kind = kind;
    }

    /// Of what kind the batch at hand is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What steps like the one at hand cost, with drafts or without. Of those with drafts it is supposed that they are no
    /// other, until one has run.
    fn cost(&self, drafted: bool) -> &Cost {
        let costs = &self.costs[self.kind as usize];
        match &costs.drafted {
            Some(cost) if drafted && !cost.is_empty() => cost,
            _ => &costs.alone,
        }
    }

    /// Most drafts of a request.
    #[must_use]
    pub fn num_drafts(&self) -> usize {
        self.most
    }

    /// What was tried so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Says behind which requests of a batch the next token is worth drafting, by what is offered before that token is known:
    /// those whose drafts are likely to come true, and those whose turn it is to be probed. Offers of the others may be
    /// left out of [`Self::choose`].
    pub fn listen(&mut self, offers: &[Offer], marks: &mut Vec<bool>) {
        let requests = offers.len();
        marks.clear();
        marks.resize(requests, false);
        self.unheard = 0;
        let (alone, more) = (
            self.cost(false).of(requests, requests),
            self.cost(true).of(requests + 1, requests),
        );
        let (Some(alone), Some(more)) = (alone, more) else {
            // Nothing is known of what steps cost yet, or there is no room for drafts.
            marks.fill(self.cost(false).is_empty());
            return;
        };
        // A token is worth a request's share of the step, and a draft costs a row; half of that, for some are likelier.
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
            if offer.drafts == 0 || self.most == 0 {
                continue;
            }
            let odds = self.acceptance.odds(offer.context);
            let likely = self.acceptance.probability(offer.match_length, odds) >= least;
            marks[index] = likely || probes > 0;
            probes -= usize::from(!likely && probes > 0);
            self.unheard += usize::from(!marks[index]);
        }
    }

    /// Chooses for a batch with one row for each request: how many of its drafts to verify.
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

    /// Lists all drafts that are likely enough, the most probable first.
    fn rank(&mut self, offers: &[Offer]) {
        self.choices.clear();
        self.counters.quiet = mem::take(&mut self.unheard);
        let offered = offers.iter().enumerate();
        for (request, offer) in offered.filter(|(_, offer)| offer.drafts > 0) {
            let odds = self.acceptance.odds(offer.context);
            let (before, mut probability) = (self.choices.len(), 1.0);
            for draft in 0..offer.drafts.min(self.most) {
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
        // Numbers of the choices below, so that equal ones stay in their order: the sort needs no memory then. Positive
        // floats are in the order of their bits.
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

    /// How many of the ranked drafts give the most tokens per second, and how many times as many as none.
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

    /// Tries drafts of requests that got none, if they may cost that much.
    fn probe(&mut self, offers: &[Offer], lengths: &mut [usize]) {
        let rows = offers.len() + lengths.iter().sum::<usize>();
        let Some(cost) = self.cost(rows > offers.len()).of(rows, rows) else {
            return;
        };
        self.probe_time = (self.probe_time + PROBE_TIME * cost).min(2.0 * cost);
        let earned = PROBE_ROWS * offers.len() as f64;
        let toll = self.costs[self.kind as usize].trial.toll();
        self.probe_rows = (self.probe_rows + earned / toll).min(MOST_PROBES.max(earned));
        let (first, most) = (self.turn, self.most);
        let waiting =
            |request: usize, length: usize| length == 0 && offers[request].drafts > 0 && most > 0;
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

    /// Learns that the first `accepted` of `drafted` tokens were right. The match length is the offer's.
    pub fn verified(&mut self, context: u64, match_length: usize, drafted: usize, accepted: usize) {
        let accepted = accepted.min(drafted);
        self.counters.drafted += drafted as u64;
        self.counters.accepted += accepted as u64;
        for draft in 0..drafted.min(accepted + 1) {
            let right = draft < accepted;
            self.acceptance.learn(context, match_length + draft, right);
        }
    }

    /// Learns how long a step with so many rows took, some of them drafts or none.
    pub fn timed(&mut self, rows: usize, drafted: bool, time: Duration) {
        let Costs {
            alone,
            drafted: with,
            ..
        } = &mut self.costs[self.kind as usize];
        let cost = with.as_mut().filter(|_| drafted).unwrap_or(alone);
        cost.learn(rows, time.as_secs_f64());
    }

    /// Learns that the batch at hand was answered with so many tokens, so long after the answer before it: what drafts
    /// cost beside the step's time is learnt from that.
    pub fn answered(&mut self, tokens: usize, time: Duration) {
        let trial = &mut self.costs[self.kind as usize].trial;
        trial.answered(tokens, time.as_secs_f64());
    }
}

#[cfg(test)]
mod tests;
