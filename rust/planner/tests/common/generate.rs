//! Random limits and frames: mostly valid, sometimes broken in one place.

use pie_planner::Limits;
use pie_wire::{Brle, ForwardRequest, Sampler};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::builder::{Req, brle, frame};

/// Ids below this one are vocabulary.
pub(crate) const VOCAB: u32 = 50;
/// Positions below this one are the model's.
pub(crate) const POSITIONS: u32 = 120;

/// Limits small enough for several passes and several slot groups.
pub(crate) fn limits() -> impl Strategy<Value = Limits> {
    let sizes = (
        prop_oneof![Just(1_u32), Just(3), Just(16)],
        4_u32..30,
        3_u32..26,
    );
    let reply_bytes = prop_oneof![4 => Just(1_u32 << 16), 3 => 176_u32..1500];
    let sizes = (sizes, 1_u32..5, 1_u32..11, 1_u32..6);
    (sizes, reply_bytes).prop_map(|(sizes, reply_bytes)| {
        let ((page_size, total_pages, row_pages), max_requests, chunk_tokens, max_slots) = sizes;
        Limits {
            page_size,
            total_pages,
            vocab_size: VOCAB,
            max_positions: POSITIONS,
            row_pages,
            max_requests,
            chunk_tokens,
            max_slots,
            reply_bytes,
        }
    })
}

/// Temperatures and shares, the odd ones included.
fn float() -> impl Strategy<Value = f32> {
    prop_oneof![
        // Not a range of floats: an assertion in proptest 1.12's sampler of such ranges fails now and then.
        4 => (1_u8..30).prop_map(|n| f32::from(n) / 20.0),
        2 => Just(0.0_f32),
        1 => Just(1.0),
        1 => prop_oneof![
            Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(-0.5), Just(1e-5), Just(1.1e-5),
            Just(f32::MIN_POSITIVE), Just(f32::MAX),
        ],
    ]
}

fn token_sampler() -> impl Strategy<Value = Sampler> {
    let k = || prop_oneof![0_u32..4, Just(VOCAB - 1), Just(VOCAB), Just(u32::MAX)];
    prop_oneof![
        (float(), prop_oneof![0_u32..4, Just(u32::MAX)])
            .prop_map(|(temperature, seed)| Sampler::Multinomial { temperature, seed }),
        (float(), k()).prop_map(|(temperature, k)| Sampler::TopK { temperature, k }),
        (float(), float()).prop_map(|(temperature, p)| Sampler::TopP { temperature, p }),
        (float(), float()).prop_map(|(temperature, p)| Sampler::MinP { temperature, p }),
        (float(), k(), float()).prop_map(|(temperature, k, p)| Sampler::TopKTopP {
            temperature,
            k,
            p
        }),
    ]
}

fn probe() -> impl Strategy<Value = Sampler> {
    let count = prop_oneof![0_u32..4, Just(VOCAB), Just(VOCAB + 1), Just(u32::MAX)];
    let label = || prop_oneof![4 => 0..VOCAB, 1 => Just(VOCAB), 1 => any::<u32>()];
    prop_oneof![
        1 => Just(Sampler::Embedding),
        2 => (float(), count).prop_map(|(temperature, num_tokens)| Sampler::Dist { temperature, num_tokens }),
        1 => Just(Sampler::RawLogits),
        1 => label().prop_map(|token_id| Sampler::Logprob { token_id }),
        2 => vec(label(), 0..4).prop_map(|token_ids| Sampler::Logprobs { token_ids }),
        1 => vec(label(), 90).prop_map(|token_ids| Sampler::Logprobs { token_ids }),
        1 => Just(Sampler::Entropy),
    ]
}

/// Samplers of one request: with or without probes.
fn samplers() -> impl Strategy<Value = Vec<(u32, Sampler)>> {
    let any_sampler = prop_oneof![1 => token_sampler(), 1 => probe()];
    prop_oneof![
        vec((any::<u32>(), token_sampler()), 0..7),
        vec((any::<u32>(), any_sampler), 0..7),
        Just(vec![(
            0,
            Sampler::TopP {
                temperature: 0.0,
                p: 1.0
            }
        )]),
    ]
}

/// Runs of a logit mask: none, all or some allowed, shorter and longer than the vocabulary.
pub(crate) fn logit_mask(vocab_size: u32) -> impl Strategy<Value = Vec<u32>> {
    let run = prop_oneof![2 => Just(0), 6 => 0_u32..40, 1 => Just(vocab_size), 1 => Just(u32::MAX)];
    prop_oneof![
        6 => vec(run, 0..9),
        1 => Just(vec![]),
        // Common to several requests.
        2 => Just(vec![5, 3]),
        1 => Just(vec![0, vocab_size]),
        1 => Just(vec![0, u32::MAX, u32::MAX, u32::MAX]),
        1 => prop_oneof![Just(0), Just(vocab_size), Just(u32::MAX)].prop_map(|run| vec![run]),
        1 => Just(vec![vocab_size - 1, 1]),
        1 => Just(vec![vocab_size, 1]),
    ]
}

fn logit_masks() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop_oneof![
        12 => Just(Vec::new()),
        8 => vec(logit_mask(VOCAB), 1),
        1 => vec(logit_mask(VOCAB), 2..4),
    ]
}

/// Mask rows of a request.
#[derive(Debug, Clone, Copy)]
enum Masks {
    Absent,
    /// `[0, position + 1]`, as the runtime writes them.
    Synthesized,
    /// Spelled out over the KV indices.
    Spelled,
    /// Causal below the KV end, anything from there on.
    LongTail,
    /// One row too many or too few.
    Miscounted,
    /// Rows without runs.
    Empty,
    /// One row that hides or shows too much.
    NotCausal,
    /// Rows see as many KV indices up to their own.
    Window(u32),
    /// Any runs, from this seed: below the KV end, after it, none at all.
    Random(u32),
}

/// The one thing that is wrong with a request.
#[derive(Debug, Clone, Copy)]
enum Flaw {
    Nothing,
    PageId,
    LastPageLength(u32),
    NoPages,
    FewPages,
    Token(u32),
    Draft,
    Position(u32),
    DraftPosition,
    Adapter(i64),
    Spans(u32, u32),
    SamplingIndex(u32),
    NoTokens,
    OddDraftCount,
}

fn masks() -> impl Strategy<Value = Masks> {
    prop_oneof![
        4 => Just(Masks::Absent),
        4 => Just(Masks::Synthesized),
        3 => Just(Masks::Spelled),
        1 => Just(Masks::LongTail),
        1 => Just(Masks::Miscounted),
        1 => Just(Masks::Empty),
        1 => Just(Masks::NotCausal),
        3 => (0_u32..9).prop_map(Masks::Window),
        3 => any::<u32>().prop_map(Masks::Random),
    ]
}

fn flaw() -> impl Strategy<Value = Flaw> {
    prop_oneof![
        30 => Just(Flaw::Nothing),
        1 => Just(Flaw::PageId),
        1 => prop_oneof![Just(0), Just(4), Just(17), Just(u32::MAX)].prop_map(Flaw::LastPageLength),
        1 => Just(Flaw::NoPages),
        1 => Just(Flaw::FewPages),
        1 => prop_oneof![Just(VOCAB), Just(u32::MAX)].prop_map(Flaw::Token),
        1 => Just(Flaw::Draft),
        1 => prop_oneof![Just(POSITIONS - 1), Just(POSITIONS), Just(u32::MAX)].prop_map(Flaw::Position),
        1 => Just(Flaw::DraftPosition),
        1 => prop_oneof![Just(0), Just(1), Just(-2), Just(i64::MAX), Just(i64::MIN)].prop_map(Flaw::Adapter),
        1 => (0_u32..2, 0_u32..3).prop_map(|(images, audios)| Flaw::Spans(images, audios)),
        1 => (0_u32..3).prop_map(Flaw::SamplingIndex),
        2 => Just(Flaw::NoTokens),
        1 => Just(Flaw::OddDraftCount),
    ]
}

/// One request for the given limits; pages come from a small pool, so requests share them.
fn request(limits: Limits) -> impl Strategy<Value = Req> {
    let longest = (limits.max_kv_len() as u32).min(40);
    let sizes = (
        1_u32..13,
        prop_oneof![3 => Just(0_u32), 2 => 1_u32..6],
        0_u32..longest,
    );
    let ids = (vec(0_u32..VOCAB, 20), vec(0..limits.total_pages, 60));
    let own_positions = proptest::option::weighted(0.2, vec(0_u32..POSITIONS, 20));
    let outputs = (samplers(), logit_masks());
    (sizes, ids, own_positions, outputs, masks(), flaw()).prop_map(
        move |((inputs, drafts, prefix), (ids, pages), own_positions, outputs, masks, flaw)| {
            let prefix = prefix.min(longest.saturating_sub(inputs + drafts));
            let end = prefix + inputs + drafts;
            let pages = &pages[..end.div_ceil(limits.page_size) as usize];
            let (tokens, rest) = ids.split_at(inputs as usize);
            let mut request = Req::new(limits.page_size, prefix, tokens, pages);
            if let Some(positions) = own_positions {
                request.positions = positions[..inputs as usize].to_vec();
            }
            if drafts > 0 {
                request = request.verify(&rest[..drafts as usize]);
            }
            let (samplers, logit_masks) = outputs;
            request.logit_masks = logit_masks.iter().map(|runs| brle(runs)).collect();
            let samplers = samplers.into_iter();
            request.samplers = samplers
                .map(|(row, sampler)| (row % inputs, sampler))
                .collect();
            request.masks = mask_rows(masks, &request, prefix);
            break_request(&mut request, flaw, limits);
            request
        },
    )
}

fn mask_rows(masks: Masks, request: &Req, prefix: u32) -> Vec<Brle> {
    let inputs = request.tokens.len() as u32;
    let kv_end = prefix + inputs;
    let row = |row: u32| {
        let visible = prefix + row + 1;
        let position = request.positions[row as usize];
        match masks {
            Masks::Absent => unreachable!("no rows"),
            Masks::Synthesized | Masks::Miscounted => brle(&[0, position + 1]),
            Masks::Spelled => brle(&[0, visible - 1, 0, 1, kv_end - visible]),
            Masks::LongTail => brle(&[0, visible, kv_end - visible, u32::MAX, 1, u32::MAX]),
            Masks::Empty => brle(&[]),
            Masks::NotCausal if row > 0 => brle(&[0, visible]),
            Masks::NotCausal => brle(&[0, visible + 1]),
            Masks::Window(width) => {
                let width = width.min(visible);
                brle(&[visible - width, width])
            }
            Masks::Random(seed) => brle(&random_runs(seed, row, kv_end)),
        }
    };
    let count = match masks {
        Masks::Absent => 0,
        Masks::Miscounted if inputs > 1 => inputs - 1,
        Masks::Miscounted => return vec![row(0), row(0)],
        _ => inputs,
    };
    (0..count).map(row).collect()
}

/// At most six runs that together may be shorter or longer than the KV.
fn random_runs(seed: u32, row: u32, kv_end: u32) -> Vec<u32> {
    let mut state = seed ^ row.wrapping_mul(2_654_435_761);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let count = next() % 7;
    (0..count).map(|_| next() % (kv_end / 2 + 2)).collect()
}

fn break_request(request: &mut Req, flaw: Flaw, limits: Limits) {
    let last = request.tokens.len() - 1;
    match flaw {
        Flaw::Nothing => {}
        Flaw::PageId => request.pages[0] = limits.total_pages,
        Flaw::LastPageLength(length) => request.last_page_len = length,
        Flaw::NoPages => request.pages.clear(),
        Flaw::FewPages => _ = request.pages.pop(),
        Flaw::Token(id) => request.tokens[last] = id,
        Flaw::Draft => request.drafts.iter_mut().for_each(|id| *id = VOCAB),
        Flaw::Position(position) => request.positions[last] = position,
        Flaw::DraftPosition => request
            .draft_positions
            .iter_mut()
            .for_each(|at| *at = POSITIONS),
        Flaw::Adapter(id) => request.adapter = id,
        Flaw::Spans(images, audios) => (request.images, request.audios) = (images, audios),
        Flaw::SamplingIndex(behind) => {
            let row = request.tokens.len() as u32 + behind;
            request
                .samplers
                .iter_mut()
                .for_each(|sampler| sampler.0 = row);
        }
        Flaw::NoTokens => {
            request.tokens.clear();
            request.positions.clear();
        }
        Flaw::OddDraftCount => request.draft_positions.push(3),
    }
}

/// One frame for the given limits.
fn forward(limits: Limits) -> impl Strategy<Value = ForwardRequest> {
    let flags = (any::<bool>(), any::<bool>(), proptest::bool::weighted(0.2));
    // Few contexts: they come back elsewhere, with other pages, twice in one frame, or without an id (0).
    let contexts = vec(0_u64..6, 7);
    (vec(request(limits), 0..7), contexts, flags).prop_map(|(requests, contexts, flags)| {
        let (user, elide, no_positions) = flags;
        let mut request = frame(&requests);
        request.has_user_mask = user;
        request.context_ids = contexts[..requests.len()].to_vec();
        if no_positions {
            request.spec_position_ids.clear();
        }
        if elide {
            elide_empty(&mut request);
        }
        request
    })
}

/// Leaves out every optional offset array without data, and the optional per-request arrays.
pub(crate) fn elide_empty(request: &mut ForwardRequest) {
    let images = request.image_grids.len();
    for (indptr, data) in [
        (&mut request.mask_indptr, request.masks.len()),
        (&mut request.logit_mask_indptr, request.logit_masks.len()),
        (&mut request.spec_indptr, request.spec_token_ids.len()),
        (&mut request.image_indptr, images),
        (&mut request.audio_indptr, request.audio_anchor_rows.len()),
    ] {
        if data == 0 {
            indptr.clear();
        }
    }
    request.context_ids.clear();
    request.output_spec_flags.clear();
}

/// Limits and a sequence of frames that one planner sees.
pub(crate) fn sequence() -> impl Strategy<Value = (Limits, Vec<ForwardRequest>)> {
    limits().prop_flat_map(|limits| (Just(limits), vec(forward(limits), 1..6)))
}
