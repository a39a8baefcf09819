//! The rules of a forward response, against a reader that takes the response apart and puts it together again.

use pie_wire::{ForwardResponse, ResponseRule};
use proptest::collection::vec;
use proptest::prelude::*;

/// The outputs of one request; each kind a list of entries, an entry a list of values.
#[derive(Debug, Clone, Default, PartialEq)]
struct Outputs {
    tokens: Vec<u32>,
    dists: Vec<Vec<(u32, f32)>>,
    logits: Vec<Vec<u8>>,
    logprobs: Vec<Vec<f32>>,
    entropies: Vec<f32>,
    drafts: Vec<(u32, u32)>,
}

/// Which kinds are spelled out even when no request has any: tokens, distributions, logits, log-probabilities, entropies,
/// drafts.
type Present = [bool; 6];

/// `0, n0, n0 + n1, …`, or nothing.
fn offsets(present: bool, lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length as u32);
    }
    offsets.retain(|_| present);
    offsets
}

/// Offsets per request and per entry.
fn nested<T>(present: bool, kinds: &[&Vec<Vec<T>>]) -> (Vec<u32>, Vec<u32>) {
    let entries = kinds
        .iter()
        .flat_map(|entries| entries.iter().map(Vec::len));
    (
        offsets(present, kinds.iter().map(|entries| entries.len())),
        offsets(present, entries),
    )
}

/// Writes the outputs as §8.1 says.
fn write(requests: &[Outputs], present: Present) -> ForwardResponse {
    fn flat<T: Clone>(requests: &[Outputs], values: impl Fn(&Outputs) -> Vec<T>) -> Vec<T> {
        requests.iter().flat_map(values).collect()
    }
    let has =
        |kind: usize, any: &dyn Fn(&Outputs) -> bool| present[kind] || requests.iter().any(any);
    let dists: Vec<_> = requests.iter().map(|r| &r.dists).collect();
    let logits: Vec<_> = requests.iter().map(|r| &r.logits).collect();
    let logprobs: Vec<_> = requests.iter().map(|r| &r.logprobs).collect();
    let (dists_req_indptr, dists_kv_indptr) = nested(has(1, &|r| !r.dists.is_empty()), &dists);
    let (logits_req_indptr, logits_byte_indptr) =
        nested(has(2, &|r| !r.logits.is_empty()), &logits);
    let (logprobs_req_indptr, logprobs_val_indptr) =
        nested(has(3, &|r| !r.logprobs.is_empty()), &logprobs);
    ForwardResponse {
        num_requests: requests.len() as u32,
        tokens_indptr: offsets(
            present[0] || !requests.is_empty(),
            requests.iter().map(|r| r.tokens.len()),
        ),
        tokens: flat(requests, |r| r.tokens.clone()),
        dists_req_indptr,
        dists_kv_indptr,
        dists_ids: flat(requests, |r| {
            r.dists.concat().iter().map(|pair| pair.0).collect()
        }),
        dists_probs: flat(requests, |r| {
            r.dists.concat().iter().map(|pair| pair.1).collect()
        }),
        logits_req_indptr,
        logits_byte_indptr,
        logits_bytes: flat(requests, |r| r.logits.concat()),
        logprobs_req_indptr,
        logprobs_val_indptr,
        logprobs_values: flat(requests, |r| r.logprobs.concat()),
        entropies_indptr: offsets(
            has(4, &|r| !r.entropies.is_empty()),
            requests.iter().map(|r| r.entropies.len()),
        ),
        entropies: flat(requests, |r| r.entropies.clone()),
        spec_indptr: offsets(
            has(5, &|r| !r.drafts.is_empty()),
            requests.iter().map(|r| r.drafts.len()),
        ),
        spec_tokens: flat(requests, |r| r.drafts.iter().map(|pair| pair.0).collect()),
        spec_positions: flat(requests, |r| r.drafts.iter().map(|pair| pair.1).collect()),
        ..ForwardResponse::default()
    }
}

/// The values that entry `index` of an offset array owns; an absent array owns none.
fn part<T: Clone>(offsets: &[u32], index: usize, values: &[T]) -> Option<Vec<T>> {
    if offsets.is_empty() {
        return Some(Vec::new());
    }
    let (start, end) = (*offsets.get(index)?, *offsets.get(index + 1)?);
    values.get(start as usize..end as usize).map(<[T]>::to_vec)
}

/// The entries of a request, each with its values.
fn entries<T: Clone>(
    requests: &[u32],
    entries: &[u32],
    values: &[T],
    request: usize,
) -> Option<Vec<Vec<T>>> {
    let numbers: Vec<usize> = (0..entries.len().saturating_sub(1)).collect();
    let own = part(requests, request, &numbers)?;
    own.into_iter()
        .map(|entry| part(entries, entry, values))
        .collect()
}

/// Takes a response apart, request by request; `None` when an offset leads nowhere.
fn read(response: &ForwardResponse) -> Option<Vec<Outputs>> {
    let r = response;
    let pairs: Vec<_> = r
        .dists_ids
        .iter()
        .copied()
        .zip(r.dists_probs.iter().copied())
        .collect();
    let drafts: Vec<_> = r
        .spec_tokens
        .iter()
        .copied()
        .zip(r.spec_positions.iter().copied())
        .collect();
    (0..r.num_requests as usize)
        .map(|request| {
            Some(Outputs {
                tokens: part(&r.tokens_indptr, request, &r.tokens)?,
                dists: entries(&r.dists_req_indptr, &r.dists_kv_indptr, &pairs, request)?,
                logits: entries(
                    &r.logits_req_indptr,
                    &r.logits_byte_indptr,
                    &r.logits_bytes,
                    request,
                )?,
                logprobs: entries(
                    &r.logprobs_req_indptr,
                    &r.logprobs_val_indptr,
                    &r.logprobs_values,
                    request,
                )?,
                entropies: part(&r.entropies_indptr, request, &r.entropies)?,
                drafts: part(&r.spec_indptr, request, &drafts)?,
            })
        })
        .collect()
}

/// A response keeps the rules when it says exactly what a reader finds in it, nothing left over and nothing twice.
fn naive_check(response: &ForwardResponse) -> bool {
    if response.num_requests > 100 {
        // Too many offsets are missing for any array here.
        return false;
    }
    let Some(outputs) = read(response) else {
        return false;
    };
    let r = response;
    let present = [
        &r.tokens_indptr,
        &r.dists_req_indptr,
        &r.logits_req_indptr,
        &r.logprobs_req_indptr,
        &r.entropies_indptr,
        &r.spec_indptr,
    ]
    .map(|offsets| !offsets.is_empty());
    *response == write(&outputs, present)
}

fn outputs() -> impl Strategy<Value = Outputs> {
    let float = || (0_u8..9).prop_map(f32::from);
    let few = || 0..3_usize;
    let kinds = (
        vec(0_u32..9, few()),
        vec(vec((0_u32..9, float()), few()), few()),
        vec(vec(any::<u8>(), 0..6), few()),
        vec(vec(float(), few()), few()),
        vec(float(), few()),
        vec((0_u32..9, 0_u32..9), few()),
    );
    (kinds, any::<[bool; 6]>()).prop_map(|(kinds, keep)| {
        let (tokens, dists, logits, logprobs, entropies, drafts) = kinds;
        let mut outputs = Outputs {
            tokens,
            dists,
            logits,
            logprobs,
            entropies,
            drafts,
        };
        if !keep[1] {
            outputs.dists.clear();
        }
        if !keep[2] {
            outputs.logits.clear();
        }
        if !keep[3] {
            outputs.logprobs.clear();
        }
        if !keep[4] {
            outputs.entropies.clear();
        }
        if !keep[5] {
            outputs.drafts.clear();
        }
        outputs
    })
}

fn response() -> impl Strategy<Value = ForwardResponse> {
    (vec(outputs(), 0..4), any::<Present>()).prop_map(|(outputs, present)| write(&outputs, present))
}

type Change = fn(&mut ForwardResponse);
type WordSlice = fn(&mut ForwardResponse) -> &mut Vec<u32>;

/// Every array of words, offsets first.
const WORDS: [(&str, WordSlice); 13] = [
    ("tokens_indptr", |r| &mut r.tokens_indptr),
    ("dists_req_indptr", |r| &mut r.dists_req_indptr),
    ("dists_kv_indptr", |r| &mut r.dists_kv_indptr),
    ("logits_req_indptr", |r| &mut r.logits_req_indptr),
    ("logits_byte_indptr", |r| &mut r.logits_byte_indptr),
    ("logprobs_req_indptr", |r| &mut r.logprobs_req_indptr),
    ("logprobs_val_indptr", |r| &mut r.logprobs_val_indptr),
    ("entropies_indptr", |r| &mut r.entropies_indptr),
    ("spec_indptr", |r| &mut r.spec_indptr),
    ("tokens", |r| &mut r.tokens),
    ("dists_ids", |r| &mut r.dists_ids),
    ("spec_tokens", |r| &mut r.spec_tokens),
    ("spec_positions", |r| &mut r.spec_positions),
];
const OFFSETS: usize = 9;

type Floats = fn(&mut ForwardResponse) -> &mut Vec<f32>;

const FLOATS: [Floats; 3] = [
    |r| &mut r.dists_probs,
    |r| &mut r.logprobs_values,
    |r| &mut r.entropies,
];

/// One change to a response.
#[derive(Debug, Clone)]
enum Damage {
    Requests(u32),
    Entry(usize, usize, u32),
    Push(usize, u32),
    Pop(usize),
    Clear(usize),
    PushFloat(usize),
    PopFloat(usize),
    PushByte,
    PopByte,
}

fn damage() -> impl Strategy<Value = Damage> {
    let value = || prop_oneof![8 => 0_u32..7, 1 => Just(u32::MAX)];
    let array = || 0..WORDS.len();
    let float = || 0..FLOATS.len();
    prop_oneof![
        1 => prop_oneof![0_u32..5, Just(u32::MAX)].prop_map(Damage::Requests),
        6 => (array(), any::<usize>(), value()).prop_map(|(array, at, to)| Damage::Entry(array, at, to)),
        2 => (array(), value()).prop_map(|(array, value)| Damage::Push(array, value)),
        2 => array().prop_map(Damage::Pop),
        2 => array().prop_map(Damage::Clear),
        1 => float().prop_map(Damage::PushFloat),
        1 => float().prop_map(Damage::PopFloat),
        1 => Just(Damage::PushByte),
        1 => Just(Damage::PopByte),
    ]
}

fn apply(response: &mut ForwardResponse, damage: &Damage) {
    match *damage {
        Damage::Requests(requests) => response.num_requests = requests,
        Damage::Entry(array, at, value) => {
            let array = WORDS[array].1(response);
            let length = array.len().max(1);
            if let Some(entry) = array.get_mut(at % length) {
                *entry = value;
            }
        }
        Damage::Push(array, value) => WORDS[array].1(response).push(value),
        Damage::Pop(array) => _ = WORDS[array].1(response).pop(),
        Damage::Clear(array) => WORDS[array].1(response).clear(),
        Damage::PushFloat(array) => FLOATS[array](response).push(0.0),
        Damage::PopFloat(array) => _ = FLOATS[array](response).pop(),
        Damage::PushByte => response.logits_bytes.push(1),
        Damage::PopByte => _ = response.logits_bytes.pop(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn sound_responses_are_accepted(response in response()) {
        prop_assert!(naive_check(&response));
        prop_assert_eq!(response.check(), Ok(()));
    }

    #[test]
    fn the_check_equals_the_naive_one(mut response in response(), damages in vec(damage(), 1..4)) {
        for damage in &damages {
            apply(&mut response, damage);
        }
        prop_assert_eq!(response.check().is_ok(), naive_check(&response), "{:?}", response.check());
    }
}

/// Two requests with two outputs of every kind each.
fn rich() -> ForwardResponse {
    let outputs = Outputs {
        tokens: vec![1, 2],
        dists: vec![vec![(1, 0.5), (2, 0.25)]; 2],
        logits: vec![vec![1, 2, 3, 4]; 2],
        logprobs: vec![vec![-1.0, -2.0]; 2],
        entropies: vec![0.5, 0.75],
        drafts: vec![(1, 2), (3, 4)],
    };
    write(&[outputs.clone(), outputs], [true; 6])
}

/// The array that a broken rule names.
fn broken(response: &ForwardResponse) -> &'static str {
    assert!(!naive_check(response));
    let rule = response.check().expect_err("a rule is broken");
    match rule {
        ResponseRule::Length { array, .. } | ResponseRule::Order { array, .. } => {
            assert!(rule.to_string().contains(array));
            array
        }
    }
}

#[test]
fn the_rich_response_is_sound() {
    rich().check().expect("all rules are kept");
    ForwardResponse::default()
        .check()
        .expect("nothing is promised");
}

#[test]
fn every_offset_array_is_checked_entry_by_entry() {
    for (name, field) in &WORDS[..OFFSETS] {
        let length = field(&mut rich()).len();
        for index in 0..length {
            for value in [0, 1, 3, 5, 99, u32::MAX] {
                let mut response = rich();
                field(&mut response)[index] = value;
                assert_eq!(
                    response.check().is_ok(),
                    naive_check(&response),
                    "{name}[{index}] = {value}"
                );
            }
            // An end entry that is wrong always shows; a middle one where it leads past the next.
            let mut response = rich();
            field(&mut response)[index] = 1000;
            assert_eq!(broken(&response), *name);
        }
    }
}

#[test]
fn every_offset_array_has_one_entry_more_than_it_cuts() {
    for (name, field) in &WORDS[..OFFSETS] {
        // One level up, the last entry counts what the second level holds.
        let counted_by = match *name {
            "dists_kv_indptr" => "dists_req_indptr",
            "logits_byte_indptr" => "logits_req_indptr",
            "logprobs_val_indptr" => "logprobs_req_indptr",
            other => other,
        };
        let longer: fn(&mut Vec<u32>) = |offsets| offsets.push(offsets[offsets.len() - 1]);
        for change in [longer, |offsets| _ = offsets.pop(), Vec::clear] {
            let mut response = rich();
            change(field(&mut response));
            assert_eq!(broken(&response), counted_by);
        }
    }
}

#[test]
fn values_are_all_owned_and_parallel() {
    let cases: [(Change, &str); 12] = [
        (|r| r.tokens.push(1), "tokens_indptr"),
        (|r| _ = r.tokens.pop(), "tokens_indptr"),
        (|r| r.dists_ids.push(1), "dists_kv_indptr"),
        (|r| r.dists_probs.push(0.0), "dists_probs"),
        (|r| _ = r.dists_probs.pop(), "dists_probs"),
        (|r| r.logits_bytes.push(0), "logits_byte_indptr"),
        (|r| _ = r.logprobs_values.pop(), "logprobs_val_indptr"),
        (|r| r.entropies.push(0.0), "entropies_indptr"),
        (|r| r.spec_tokens.push(1), "spec_indptr"),
        (|r| r.spec_positions.push(1), "spec_positions"),
        (|r| r.num_requests = 1, "tokens_indptr"),
        (|r| r.num_requests = 3, "tokens_indptr"),
    ];
    for (change, array) in cases {
        let mut response = rich();
        change(&mut response);
        assert_eq!(broken(&response), array);
    }
}

#[test]
fn tokens_cannot_be_left_out() {
    let mut response = rich();
    response.tokens.clear();
    response.tokens_indptr.clear();
    assert_eq!(broken(&response), "tokens_indptr");
    // Nor given to no request.
    let orphans = ForwardResponse {
        tokens: vec![1],
        ..ForwardResponse::default()
    };
    assert_eq!(broken(&orphans), "tokens_indptr");
}

#[test]
fn absent_kinds_are_empty_or_spelled_out() {
    let spelled = write(&[Outputs::default(), Outputs::default()], [true; 6]);
    assert_eq!(spelled.dists_req_indptr, [0, 0, 0]);
    assert_eq!(spelled.dists_kv_indptr, [0]);
    spelled.check().expect("zeros, and a single zero");
    let absent = write(&[Outputs::default(), Outputs::default()], [false; 6]);
    assert!(absent.dists_req_indptr.is_empty());
    absent.check().expect("empty arrays");
    // Nothing in between.
    for (_, field) in &WORDS[1..OFFSETS - 2] {
        let mut half = spelled.clone();
        field(&mut half).clear();
        broken(&half);
    }
}

#[test]
fn a_probe_for_nobody_is_refused() {
    let mut response = write(&[], [false; 6]);
    response.entropies.push(0.5);
    assert_eq!(broken(&response), "entropies_indptr");
    let mut response = write(&[], [false; 6]);
    response.dists_probs.push(0.5);
    assert_eq!(broken(&response), "dists_probs");
}
