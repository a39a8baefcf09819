//! What a frame's extension asks for, as it is staged for a pass and for a graph.

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::DRIVER;
use crate::common::engine::{memory, next_group, next_pass};
use pie_planner::{
    Layout, Plan, Planner, RECORD_WORDS, RequestError, STEP_EXTRA_WORDS, SamplerParams, SlotClass,
    StepMemory, StepSize,
};
use pie_wire::{
    CombinedSampler, LogprobOptions, Penalties, PromptLogprobs, RequestExtension, append_extension,
    extension_len, split_request,
};

pub(crate) type Record = [i32; RECORD_WORDS];

pub(crate) const NEVER: i32 = f32::NEG_INFINITY.to_bits().cast_signed();

pub(crate) fn bits(value: f32) -> i32 {
    value.to_bits().cast_signed()
}

/// Penalties for what comes after a prompt of so many tokens.
pub(crate) fn penalized(prompt: u32) -> RequestExtension {
    RequestExtension {
        penalties: Penalties {
            frequency: 0.5,
            presence: 0.25,
            repetition: 2.0,
            counted_from: prompt,
        },
        ..RequestExtension::default()
    }
}

/// Plans a frame with the rows of its extension.
pub(crate) fn plan(
    planner: &mut Planner,
    requests: &[Req],
    rows: &[(u32, RequestExtension)],
) -> Plan {
    let listed = rows.iter().map(|(request, row)| (*request, row));
    planned(planner, requests, |bytes, length| {
        bytes.resize(length + extension_len(listed.clone()), 0);
        append_extension(listed, bytes, length).unwrap();
    })
}

pub(crate) fn planned(
    planner: &mut Planner,
    requests: &[Req],
    extend: impl FnOnce(&mut Vec<u8>, usize),
) -> Plan {
    let mut bytes = Encoded::new(DRIVER, &frame(requests)).bytes().to_vec();
    let length = bytes.len();
    extend(&mut bytes, length);
    let (archive, extension) = split_request(&bytes).unwrap();
    let encoded = Encoded::from_bytes(archive);
    let planned = planner.plan_extended(DRIVER, encoded.forward(), &extension);
    planned.expect("a consistent frame")
}

/// Records and words of the one group of the one pass, and what the pass notes.
pub(crate) fn staged(
    planner: &mut Planner,
    plan: Plan,
) -> (Vec<Record>, Vec<i32>, Option<Vec<[i64; 2]>>) {
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let Ok(pass) = next_pass(planner, plan, block) else {
        panic!("a pass is left");
    };
    let noted = pass.token_history().map(<[_]>::to_vec);
    let Ok(group) = next_group(planner, pass, block) else {
        panic!("a group is left");
    };
    let (records, words) = group.records();
    (records.to_vec(), words.to_vec(), noted)
}

#[test]
fn each_slot_has_the_record_of_its_request() {
    let mut planner = Planner::new(LARGE, 1);
    let bias = RequestExtension {
        biases: vec![(7, 1.5), (9, -2.0)],
        suppressed: vec![3],
        suppressed_until: 21,
        ..RequestExtension::default()
    };
    // The second one verifies two drafts: of its positions 20, 21 and 22 stop tokens are forbidden for the first.
    let requests = [
        decode(30, 5, &[1, 2]),
        decode(19, 6, &[3, 4]).verify(&[8, 8]),
        decode(40, 7, &[5, 6, 7]),
    ];
    let rows = [(0, penalized(25)), (1, bias)];
    let plan = plan(&mut planner, &requests, &rows);
    assert!(plan.is_extended() && plan.request_errors().is_empty());
    let (records, words, noted) = staged(&mut planner, plan);
    let penalties = [bits(0.5), bits(0.25), bits(2.0)];
    let row = |record: &Record| record[0];
    assert_eq!(
        records[0][1..],
        [&[25, 31], &penalties[..], &[0, 0]].concat()
    );
    let none = [bits(0.0), bits(0.0), bits(1.0)];
    for (number, (first, count)) in [(0, 3), (6, 2), (10, 2)].into_iter().enumerate() {
        let end = 20 + number as i32;
        let expected = [&[end, end], &none[..], &[first, count]].concat();
        assert_eq!(records[1 + number][1..], expected);
    }
    assert_eq!(row(&records[1]), row(&records[3]));
    assert_ne!(row(&records[0]), row(&records[1]));
    assert_eq!(records[4], [0; RECORD_WORDS]);
    let biases = [7, bits(1.5), 9, bits(-2.0)];
    assert_eq!(words, [&biases[..], &[3, NEVER], &biases, &biases].concat());
    assert_eq!(noted, Some(Vec::new()));
}

#[test]
fn plain_frames_note_and_change_nothing() {
    let mut planner = Planner::new(LARGE, 1);
    let sampler = CombinedSampler {
        temperature: 0.5,
        top_k: 9,
        top_p: 0.75,
        min_p: 0.125,
        seed: Some(u64::MAX),
    };
    let row = RequestExtension {
        sampler: Some(sampler),
        suppressed: vec![2],
        suppressed_until: 31,
        ..RequestExtension::default()
    };
    let plan = plan(&mut planner, &[decode(31, 5, &[1, 2])], &[(0, row)]);
    assert!(!plan.is_extended(), "its stop tokens are free");
    assert_eq!(plan.graph_size(8), Some(StepSize::from(1)));
    let (records, words, noted) = staged(&mut planner, plan);
    assert!(records.is_empty() && words.is_empty() && noted.is_none());
    let (class, params) = SamplerParams::combined(&sampler, 1000);
    assert_eq!(class, SlotClass::Filtered);
    // Of the whole distribution, and never a key of samplers without a seed.
    assert_eq!((params.top_p, params.seed), (-0.75, Some(u64::MAX >> 1)));
    let all = CombinedSampler {
        top_k: 0,
        ..sampler
    };
    let (_, params) = SamplerParams::combined(&all, 1000);
    assert_eq!((params.top_p, params.top_k), (0.75, 1000));
    let greedy = CombinedSampler {
        temperature: 0.0,
        ..sampler
    };
    assert_eq!(SamplerParams::combined(&greedy, 1000).0, SlotClass::Greedy);
}

/// A mask that requests share is staged once; one that forbids everything forbids it to all of them.
#[test]
fn requests_share_a_mask() {
    let mask = |word: u32| RequestExtension {
        mask: vec![word; 32],
        ..RequestExtension::default()
    };
    let shared = RequestExtension {
        shares_mask: true,
        ..RequestExtension::default()
    };
    let requests: Vec<Req> = (0..5).map(|row| decode(4 + row, 5, &[9 + row])).collect();
    let rows = [
        (0, mask(0b101)),
        (1, shared.clone()),
        (2, mask(0)),
        (3, shared),
    ];
    let mut planner = Planner::new(LARGE, 1);
    let plan = plan(&mut planner, &requests, &rows);
    let layout = Layout::graph(8);
    let mut block = vec![u64::MAX; layout.bytes().div_ceil(8)];
    let mut words = vec![-1; 8 * 32 + 2 * 32];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut words,
    };
    let step = planner.stage_graph(plan, &layout, memory, 7).unwrap();
    assert_eq!(step.mask_words(), 32);
    assert_eq!(
        words[..32],
        [0b101; 32].map(|word| if word == 0 { -1 } else { word })[..]
    );
    let numbers: &[i32] = bytemuck::cast_slice(&block);
    let field = layout
        .fields()
        .iter()
        .find(|field| field.name == "slot_masks");
    let masks = &numbers[field.unwrap().offset / 4..][..10];
    assert_eq!(masks, [0, -1, 0, -1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_graph_gets_records_and_history_beside_its_block() {
    let mut planner = Planner::new(LARGE, 1);
    let history = RequestExtension {
        history: vec![90, 91, 92],
        biases: vec![(7, 1.5)],
        ..penalized(12)
    };
    let mask = RequestExtension {
        mask: vec![u32::MAX; 32],
        ..RequestExtension::default()
    };
    // The history lies on both sides of the border of two pages.
    let requests = [
        decode(4, 5, &[9]),
        Req::new(16, 18, &[1, 2], &[40, 50]).sample(1, GREEDY),
    ];
    let rows = [(0, mask), (1, history)];
    let plan = plan(&mut planner, &requests, &rows);
    assert_eq!(plan.graph_size(8), Some(StepSize { rows: 3, slots: 2 }));
    let layout = Layout::extended_graph(4);
    let mut block = vec![u64::MAX; layout.bytes().div_ceil(8)];
    let mut words = vec![-1; 4 * 32 + 2 * 32 + STEP_EXTRA_WORDS];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut words,
    };
    let step = planner.stage_graph(plan, &layout, memory, 7).unwrap();
    let field = |name: &str| {
        let field = layout
            .fields()
            .iter()
            .find(|field| field.name == name)
            .unwrap();
        let numbers: &[i32] = bytemuck::cast_slice(&block);
        &numbers[field.offset / 4..][..field.capacity]
    };
    let header = field("header");
    // The mask of the first request has 32 words; bits after the vocabulary of 1000 allow nothing.
    assert_eq!(words[31], 0xFF);
    assert_eq!(header[3..7], [32 + 6 + 2, 0, 32, 3]);
    assert_eq!(step.mask_words(), 40);
    let slot = |page: i32, offset: i32| (page + 1) * 16 + offset;
    let pairs = [slot(40, 15), 90, slot(50, 0), 91, slot(50, 1), 92];
    assert_eq!(words[32..40], [&pairs[..], &[7, bits(1.5)]].concat());
    let records = field("records").as_chunks::<RECORD_WORDS>().0;
    assert_eq!(records.len(), 4);
    assert_eq!(records[0][6..], [38, 0]);
    assert_eq!(records[2][1..3], [12, 20]);
    assert_eq!(records[2][6..], [38, 1]);
    assert_eq!([records[1], records[3]], [[0; RECORD_WORDS]; 2]);
}

#[test]
fn a_prompt_of_which_nothing_counts_is_plain() {
    let mut planner = Planner::new(LARGE, 1);
    let tokens: Vec<u32> = (0..12).collect();
    let prompt = |samples: bool| {
        let request = Req::new(16, 0, &tokens, &[1]);
        if samples {
            request.sample(11, GREEDY)
        } else {
            request
        }
    };
    let biased = RequestExtension {
        biases: vec![(1, 1.0)],
        ..RequestExtension::default()
    };
    for (samples, row, extended) in [
        (true, penalized(12), false),
        (true, penalized(11), true),
        (false, penalized(11), true),
        (true, biased.clone(), true),
        (false, biased, false),
    ] {
        let planned = plan(&mut planner, &[prompt(samples)], &[(0, row)]);
        assert_eq!(planned.is_extended(), extended);
        planner.invalidate_block_table();
    }
}

#[test]
fn too_much_for_a_graph_goes_by_passes() {
    let mut planner = Planner::new(LARGE, 1);
    let biases = (0..1000).map(|id| (id, 1.0)).collect();
    let row = RequestExtension {
        biases,
        ..RequestExtension::default()
    };
    // One position of a request with drafts has as many words as the next.
    let request = |page: u32| {
        let drafts: Vec<u32> = vec![1; 11];
        decode(1, 5, &[page]).verify(&drafts)
    };
    let requests: Vec<Req> = (0..3).map(request).collect();
    let rows: Vec<_> = (0..3).map(|request| (request, row.clone())).collect();
    let plan = plan(&mut planner, &requests, &rows);
    assert_eq!(plan.graph_size(16), None);
    let (records, words, _) = staged(&mut planner, plan);
    assert_eq!((records.len(), words.len()), (36, 72_000));
}

#[test]
fn parts_of_a_prompt_are_noted_and_history_once() {
    let limits = pie_planner::Limits {
        chunk_tokens: 4,
        ..LARGE
    };
    let mut planner = Planner::new(limits, 1);
    let row = RequestExtension {
        history: vec![8],
        ..penalized(1)
    };
    let tokens: Vec<u32> = (0..10).collect();
    let request = Req::new(16, 2, &tokens, &[1]).sample(9, GREEDY);
    let mut plan = plan(&mut planner, &[request], &[(0, row)]);
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let mut noted = Vec::new();
    for _ in 0..2 {
        let Ok(pass) = next_pass(&mut planner, plan, block) else {
            panic!("three passes");
        };
        noted.push(pass.token_history().map(<[_]>::to_vec));
        plan = next_group(&planner, pass, block).expect_err("only the last one samples");
    }
    let (records, _, last) = staged(&mut planner, plan);
    noted.push(last);
    assert_eq!(noted, [Some(vec![[33, 8]]), Some(vec![]), Some(vec![])]);
    assert_eq!(records[0][1..3], [1, 12]);
}

#[test]
fn what_has_no_meaning_is_refused_by_name() {
    let refused = |row: RequestExtension| {
        let mut planner = Planner::new(LARGE, 1);
        let requests = [decode(31, 5, &[1, 2]), decode(31, 5, &[3, 4])];
        let plan = plan(&mut planner, &requests, &[(1, row)]);
        let [(1, error)] = plan.request_errors() else {
            panic!("{:?}", plan.request_errors());
        };
        assert!(error.keeps_kv());
        match error {
            RequestError::Extension { parameter, .. } => (*parameter).to_owned(),
            other => other.kind().to_owned(),
        }
    };
    let changed = |change: fn(&mut RequestExtension)| {
        let mut row = RequestExtension::default();
        change(&mut row);
        refused(row)
    };
    assert_eq!(changed(|row| row.suppressed = vec![1000]), "stop_token_ids");
    assert_eq!(changed(|row| row.history = vec![1; 32]), "history");
    assert_eq!(changed(|row| row.history = vec![1000]), "history");
    assert_eq!(changed(|row| row.mask = vec![1; 31]), "mask");
    let asks = |asked: LogprobOptions| RequestExtension {
        logprobs: Some(asked),
        ..RequestExtension::default()
    };
    for (asked, parameter) in [
        (
            LogprobOptions {
                top: 1001,
                ..LogprobOptions::default()
            },
            "top_logprobs_num",
        ),
        (
            LogprobOptions {
                token_ids: vec![1000],
                ..LogprobOptions::default()
            },
            "token_ids_logprob",
        ),
        (
            LogprobOptions {
                prompt: Some(PromptLogprobs {
                    next: 1000,
                    ..PromptLogprobs::default()
                }),
                ..LogprobOptions::default()
            },
            "next_token",
        ),
    ] {
        assert_eq!(refused(asks(asked)), parameter);
    }
    assert_eq!(
        changed(|row| row.penalties.presence = f32::INFINITY),
        "presence_penalty"
    );
    let both = |planner: &mut Planner| {
        let request = decode(31, 5, &[1, 2]).allow(&[0, 5]);
        let row = RequestExtension {
            mask: vec![1; 32],
            ..RequestExtension::default()
        };
        plan(planner, &[request], &[(0, row)])
            .request_errors()
            .to_vec()
    };
    let errors = both(&mut Planner::new(LARGE, 1));
    assert_eq!(errors, [(0, RequestError::LogitMasks { masks: 2 })]);
}

#[test]
fn hidden_states_of_another_size_fail_their_own_request() {
    let states = |hidden| RequestExtension {
        logprobs: Some(LogprobOptions {
            hidden,
            ..LogprobOptions::default()
        }),
        ..RequestExtension::default()
    };
    let requests = [decode(31, 5, &[1, 2]), decode(31, 5, &[3, 4])];
    let rows = [(0, states(9)), (1, states(8))];
    let mut planner = Planner::new(LARGE, 1);
    assert_eq!(plan(&mut planner, &requests, &rows).request_errors(), []);
    planner.set_hidden_size(8);
    let found = plan(&mut planner, &requests, &rows);
    let error = RequestError::HiddenSize {
        requested: 9,
        found: 8,
    };
    assert!(error.is_for_client() && error.keeps_kv());
    assert_eq!(found.request_errors(), [(0, error)]);
}
