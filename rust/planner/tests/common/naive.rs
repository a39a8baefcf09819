//! A planner written from the protocol's text alone: slow, without reuse, one row at a time.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use pie_planner::{Limits, SlotClass};
use pie_wire::{ForwardRequest, LogprobOptions, RESPONSE_ROOT_LEN, Sampler, fast_tokens_len};

use crate::common::naive_request::request;

/// One token to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) token: u32,
    pub(crate) position: u32,
    /// KV index.
    pub(crate) index: u64,
    /// Storage slot of the pool.
    pub(crate) storage: i64,
}

/// One logit row and what is made of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slot {
    pub(crate) request: usize,
    /// Number among the request's tokens, or among its probes.
    pub(crate) number: usize,
    /// Row within the request.
    pub(crate) row: usize,
    pub(crate) class: SlotClass,
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    /// Seed, position and sampler slot; `None` = fresh randomness.
    pub(crate) key: Option<(u32, u32, usize)>,
    /// Tokens whose log-probabilities are asked for.
    pub(crate) labels: Vec<u32>,
}

impl Slot {
    /// Whether log-probabilities are asked for of its position, by a request that asks for some.
    pub(crate) fn returns_logprobs(&self) -> bool {
        self.class.is_token() || self.class == SlotClass::Prompt
    }

    /// Numbers that a probe returns.
    pub(crate) fn values(&self, vocab_size: u32) -> usize {
        match self.class {
            SlotClass::Dist => self.top_k as usize,
            SlotClass::Logits => vocab_size as usize,
            SlotClass::Logprobs => self.labels.len(),
            SlotClass::Entropy => 1,
            _ => 0,
        }
    }
}

/// One request: all that is wrong with it, and what is left to do.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    /// Fault kinds that forbid computing.
    pub(crate) refused: BTreeSet<&'static str>,
    /// Fault kinds that only cost the outputs.
    pub(crate) rejected: BTreeSet<&'static str>,
    pub(crate) rows: Vec<Row>,
    pub(crate) pages: Vec<u32>,
    pub(crate) drafts: Vec<u32>,
    pub(crate) slots: Vec<Slot>,
    /// Allowed tokens, where some but not necessarily all are.
    pub(crate) mask: Option<Vec<bool>>,
    /// For each row the KV indices that it sees, where the user's mask is not causal.
    pub(crate) sees: Option<Vec<Vec<bool>>>,
    pub(crate) adapter: Option<i64>,
    /// Computed in vain, its adapter was lost.
    pub(crate) dropped: bool,
    /// The log-probabilities that it asks for.
    pub(crate) asked: Option<LogprobOptions>,
}

impl Request {
    /// Whether some row sees KV that its own request stores after it.
    pub(crate) fn sees_ahead(&self) -> bool {
        self.sees.as_ref().is_some_and(|rows| {
            let prefix = rows[0].len() - rows.len();
            let mut rows = rows.iter().enumerate();
            rows.any(|(row, bits)| bits[prefix + row + 1..].contains(&true))
        })
    }
}

/// An engine's adapters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Adapters {
    /// Different bindings of a pass; 0 = the engine takes no adapters.
    pub(crate) slots: usize,
    pub(crate) loaded: BTreeSet<i64>,
}

/// Consecutive rows of one request in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) request: usize,
    /// Rows within the request.
    pub(crate) rows: Range<usize>,
}

/// What the protocol asks for one frame.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) requests: Vec<Request>,
    pub(crate) passes: Vec<Vec<Segment>>,
    /// Classes of the slots that the frame asks for.
    asked: BTreeSet<SlotClass>,
    /// Whether log-probabilities are asked for.
    has_logprobs: bool,
    /// Whether the reply fits.
    pub(crate) fits: bool,
}

/// Plans a frame whose arrays agree with each other, and some of whose requests ask for log-probabilities.
pub(crate) fn plan(
    limits: &Limits,
    adapters: &Adapters,
    frame: &ForwardRequest,
    asked: &HashMap<usize, LogprobOptions>,
) -> Plan {
    let count = frame.qo_indptr.len().saturating_sub(1);
    let mut requests: Vec<_> = (0..count)
        .map(|r| request(limits, adapters, frame, r, asked.get(&r)))
        .collect();
    let slots = requests.iter().flat_map(|request| &request.slots);
    let asked = slots.map(|slot| slot.class).collect();
    let has_logprobs = requests.iter().any(|request| logprob_words(request) > 0);
    let fits = empty_largest(limits, &mut requests, &asked, has_logprobs);
    let passes = cut(limits, adapters, &requests);
    Plan {
        requests,
        passes,
        asked,
        has_logprobs,
        fits,
    }
}

/// Empties the largest request, of several the last one, until the longest reply fits; `false` when it never does.
fn empty_largest(
    limits: &Limits,
    requests: &mut [Request],
    asked: &BTreeSet<SlotClass>,
    has_logprobs: bool,
) -> bool {
    // The end of the log-probabilities stays, whatever goes.
    let limit = (limits.reply_bytes as usize).saturating_sub(if has_logprobs { 16 } else { 0 });
    let one_token = |request: &Request| {
        request.drafts.is_empty()
            && request.adapter.is_none()
            && request.slots.len() == 1
            && request.slots[0].class.is_token()
    };
    let logprob_bytes = 4 * requests.iter().map(logprob_words).sum::<usize>();
    if requests.iter().all(one_token) && fast_tokens_len(requests.len()) + logprob_bytes <= limit {
        return !requests.is_empty() || archive_bytes(limits, requests, asked) <= limit;
    }
    while archive_bytes(limits, requests, asked) > limit {
        let size = |&r: &usize| own_words(limits, &requests[r]);
        let Some(largest) = (0..requests.len()).max_by_key(size) else {
            return false;
        };
        if size(&largest) == 0 {
            // Without log-probabilities there is no end to them either.
            return archive_bytes(limits, requests, asked) <= limits.reply_bytes as usize;
        }
        requests[largest].slots.clear();
        requests[largest].rejected.insert("oversize");
    }
    true
}

/// Length of the longest response: root, offsets of all requests for tokens and the kinds asked for, outputs.
fn archive_bytes(limits: &Limits, requests: &[Request], asked: &BTreeSet<SlotClass>) -> usize {
    if requests.is_empty() {
        return RESPONSE_ROOT_LEN;
    }
    let is_probe = |class: &&SlotClass| !class.is_token() && **class != SlotClass::Prompt;
    let probes = asked.iter().filter(is_probe);
    // A kind whose outputs have lengths of their own has a second array of offsets, which starts with 0.
    let nested = probes.clone().filter(|&&class| class != SlotClass::Entropy);
    let offsets = (1 + probes.count()) * (requests.len() + 1) + nested.count();
    let outputs = requests.iter().map(|request| own_words(limits, request));
    RESPONSE_ROOT_LEN + 4 * (offsets + outputs.sum::<usize>())
}

/// Words that the outputs of a request take at most.
fn own_words(limits: &Limits, request: &Request) -> usize {
    let word = |slot: &Slot| {
        let values = slot.values(limits.vocab_size);
        match slot.class {
            SlotClass::Dist => 1 + 2 * values,
            SlotClass::Logits | SlotClass::Logprobs => 1 + values,
            SlotClass::Prompt => 0,
            _ => 1,
        }
    };
    request.slots.iter().map(word).sum::<usize>() + logprob_words(request)
}

/// Words that the log-probabilities of a request take at most, with its row.
fn logprob_words(request: &Request) -> usize {
    let Some(asked) = &request.asked else {
        return 0;
    };
    let positions = request
        .slots
        .iter()
        .filter(|slot| slot.returns_logprobs())
        .count();
    let words =
        positions * (1 + 2 * asked.top as usize + asked.token_ids.len() + asked.hidden as usize);
    if positions > 0 { words + 6 } else { 0 }
}

/// The elements of request `r`; absent offsets count as zeros.
pub(crate) fn part<'a, T>(array: &'a [T], indptr: &[u32], r: usize) -> &'a [T] {
    if indptr.is_empty() {
        return &[];
    }
    &array[indptr[r] as usize..indptr[r + 1] as usize]
}

pub(crate) fn spans(indptr: &[u32], r: usize) -> u32 {
    if indptr.is_empty() {
        0
    } else {
        indptr[r + 1] - indptr[r]
    }
}

/// The engine's page 0 is padding, so the runtime's page p is the engine's page p + 1.
pub(crate) fn storage(limits: &Limits, pages: &[u32], index: u64) -> i64 {
    let page_size = u64::from(limits.page_size);
    let page = u64::from(pages[(index / page_size) as usize]);
    ((page + 1) * page_size + index % page_size) as i64
}

/// Deals the rows out one by one.
fn cut(limits: &Limits, adapters: &Adapters, requests: &[Request]) -> Vec<Vec<Segment>> {
    let mut passes: Vec<Vec<Segment>> = Vec::new();
    let mut tokens = limits.chunk_tokens;
    for (request, row) in requests
        .iter()
        .enumerate()
        .flat_map(|(request, all)| (0..all.rows.len()).map(move |row| (request, row)))
    {
        let segments = passes.last().map_or(0, Vec::len);
        let known = passes
            .last()
            .and_then(|pass| pass.last())
            .is_some_and(|segment| segment.request == request);
        let all = &requests[request];
        let other_kind = passes
            .last()
            .and_then(|pass| pass.last())
            .is_some_and(|last| requests[last.request].sees.is_some() != all.sees.is_some());
        let bindings: BTreeSet<_> = passes
            .last()
            .into_iter()
            .flatten()
            .map(|segment| requests[segment.request].adapter)
            .chain([all.adapter])
            .collect();
        let whole = row == 0 && all.sees_ahead();
        let rest = (limits.chunk_tokens - tokens) as usize;
        if tokens == limits.chunk_tokens
            || (!known && segments == limits.max_requests as usize)
            || other_kind
            || (adapters.slots > 0 && bindings.len() > adapters.slots)
            || (whole && all.rows.len() > rest)
        {
            passes.push(Vec::new());
            tokens = 0;
        }
        tokens += 1;
        let pass = passes.last_mut().expect("there is a pass");
        match pass.last_mut() {
            Some(segment) if segment.request == request => segment.rows.end += 1,
            _ => pass.push(Segment {
                request,
                rows: row..row + 1,
            }),
        }
    }
    passes
}

impl Plan {
    /// The log-probabilities that are asked for of the position of a slot.
    pub(crate) fn asked_of(&self, slot: &Slot) -> Option<&LogprobOptions> {
        let asked = self.requests[slot.request].asked.as_ref();
        asked.filter(|_| slot.returns_logprobs())
    }

    /// The different adapters of a pass.
    pub(crate) fn pass_adapters(&self, pass: usize) -> BTreeSet<i64> {
        let segments = self.passes[pass].iter();
        segments
            .filter_map(|segment| self.requests[segment.request].adapter)
            .collect()
    }

    /// Drops the requests of an adapter that have rows in a pass from `pass` on.
    pub(crate) fn drop_adapter(&mut self, id: i64, pass: usize) {
        for segment in self.passes[pass..].iter().flatten() {
            let request = &mut self.requests[segment.request];
            if request.adapter == Some(id) {
                request.adapter = None;
                request.dropped = true;
                request.slots.clear();
                if request.rejected.is_empty() {
                    request.refused.insert("adapter-lost");
                }
            }
        }
    }

    /// Empties requests whose logits had NaN. The answer then lacks a token for some: others may be too large
    /// for it.
    pub(crate) fn spoil(&mut self, limits: &Limits, spoilt: &BTreeSet<usize>) {
        let is_left = |index: &&usize| !self.requests[**index].slots.is_empty();
        let spoilt: Vec<_> = spoilt.iter().filter(is_left).copied().collect();
        for &index in &spoilt {
            self.requests[index].slots.clear();
            self.requests[index].rejected.insert("logits");
        }
        if !spoilt.is_empty() {
            self.fits = empty_largest(limits, &mut self.requests, &self.asked, self.has_logprobs);
        }
    }

    /// The rows of a pass with the KV slots that they may write: the last one of each slot, padding else.
    pub(crate) fn pass_rows(&self, pass: usize) -> Vec<(Row, i64)> {
        let rows: Vec<Row> = self.passes[pass]
            .iter()
            .flat_map(|segment| {
                let request = &self.requests[segment.request];
                let mut rows = request.rows[segment.rows.clone()].to_vec();
                if request.dropped {
                    for row in &mut rows {
                        row.storage = 0;
                    }
                }
                rows
            })
            .collect();
        let last: HashMap<i64, usize> = rows
            .iter()
            .enumerate()
            .map(|(number, row)| (row.storage, number))
            .collect();
        let target = |(number, row): (usize, &Row)| {
            let wins = last[&row.storage] == number;
            (*row, if wins { row.storage } else { 0 })
        };
        rows.iter().enumerate().map(target).collect()
    }

    /// The slots of a pass in groups, each ordered by class, with the row of the pass.
    pub(crate) fn pass_groups(&self, pass: usize, limits: &Limits) -> Vec<Vec<(usize, Slot)>> {
        let mut start = 0;
        let mut slots = Vec::new();
        for segment in &self.passes[pass] {
            for slot in &self.requests[segment.request].slots {
                if segment.rows.contains(&slot.row) {
                    slots.push((start + slot.row - segment.rows.start, slot.clone()));
                }
            }
            start += segment.rows.len();
        }
        let mut groups: Vec<Vec<_>> = slots
            .chunks(limits.max_slots as usize)
            .map(<[_]>::to_vec)
            .collect();
        for group in &mut groups {
            // Stable: of one class, in the order of the requests.
            group.sort_by_key(|(_, slot)| slot.class);
        }
        groups
    }
}

/// Whether a sampler yields a token; otherwise it is a probe.
pub(crate) fn is_token(sampler: &Sampler) -> bool {
    matches!(
        sampler,
        Sampler::Multinomial { .. }
            | Sampler::TopK { .. }
            | Sampler::TopP { .. }
            | Sampler::MinP { .. }
            | Sampler::TopKTopP { .. }
    )
}
