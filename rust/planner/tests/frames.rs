//! Rules about a frame as a whole: array lengths, offsets, and what may be absent.

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, brle, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::generate::elide_empty;
use pie_planner::{FrameError, Planner};
use pie_wire::ForwardRequest;

/// Three requests with masks, drafts, logit masks and samplers; every offset array has something to partition.
fn rich() -> ForwardRequest {
    let prompt = Req::new(16, 0, &[1, 2, 3], &[0, 1]).sample(2, GREEDY);
    let mut prompt = prompt.masked([&[0, 1], &[0, 2], &[0, 3]]);
    prompt.pages.truncate(1);
    prompt.logit_masks = vec![brle(&[])];
    let mut media = Req::new(16, 3, &[4], &[2]).masked([&[0, 4]]);
    (media.images, media.audios) = (2, 1);
    let verify = decode(7, 5, &[3]).verify(&[6, 7]).masked([&[0, 8]]);
    frame(&[prompt, media, verify])
}

fn plan(request: &ForwardRequest) -> Result<(), FrameError> {
    let planned = Planner::new(LARGE, 0).plan(DRIVER, Encoded::new(DRIVER, request).forward());
    planned.map(drop)
}

type Change = fn(&mut ForwardRequest);
type Field = fn(&mut ForwardRequest) -> &mut Vec<u32>;

/// Every per-request offset array.
const INDPTRS: [(&str, Field); 9] = [
    ("qo_indptr", |r| &mut r.qo_indptr),
    ("kv_page_indptr", |r| &mut r.kv_page_indptr),
    ("sampling_indptr", |r| &mut r.sampling_indptr),
    ("sampler_indptr", |r| &mut r.sampler_indptr),
    ("mask_indptr", |r| &mut r.mask_indptr),
    ("logit_mask_indptr", |r| &mut r.logit_mask_indptr),
    ("spec_indptr", |r| &mut r.spec_indptr),
    ("image_indptr", |r| &mut r.image_indptr),
    ("audio_indptr", |r| &mut r.audio_indptr),
];

#[test]
fn the_rich_frame_is_sound() {
    plan(&rich()).expect("all arrays agree");
}

#[test]
fn offsets_must_have_one_entry_more_than_requests() {
    for (name, field) in INDPTRS {
        let lengthen: fn(&mut Vec<u32>) = |indptr| indptr.push(*indptr.last().unwrap());
        for change in [lengthen, |indptr| _ = indptr.pop(), Vec::clear] {
            let mut request = rich();
            change(field(&mut request));
            let error = plan(&request).expect_err(name);
            // The number of requests is that of `qo_indptr`, so its own length shows in the others.
            match error {
                FrameError::IndptrLength {
                    array,
                    found,
                    expected,
                } => {
                    assert_eq!((array, expected), (name, 4));
                    assert_eq!(found, field(&mut request).len());
                }
                FrameError::Length { .. } => assert_eq!(name, "qo_indptr"),
                other => panic!("{name}: {other}"),
            }
        }
    }
}

#[test]
fn offsets_must_rise_from_zero_to_the_end() {
    for (name, field) in INDPTRS {
        let mut sound = rich();
        let end = *field(&mut sound).last().unwrap();
        assert!(end > 0, "{name} partitions nothing");
        for (index, value) in [
            (0, 1),
            (0, u32::MAX),
            (1, end + 1),
            (2, end + 1),
            (1, u32::MAX),
            (3, end + 1),
            (3, end - 1),
            (3, 0),
            (3, u32::MAX),
        ] {
            let mut request = sound.clone();
            field(&mut request)[index] = value;
            let error = plan(&request).expect_err(name);
            let FrameError::IndptrOrder {
                array, end: found, ..
            } = error
            else {
                panic!("{name}[{index}] = {value}: {error}");
            };
            assert_eq!((array, found), (name, end as usize));
            assert!(error.to_string().contains(name));
        }
        // Falls in the middle.
        let mut request = sound.clone();
        field(&mut request)[1..3].copy_from_slice(&[end, end - 1]);
        assert!(matches!(
            plan(&request),
            Err(FrameError::IndptrOrder { array, index: 2, .. }) if array == name
        ));
    }
}

#[test]
fn offsets_of_one_request_and_of_none_are_checked_too() {
    let mut one = frame(&[decode(3, 1, &[0])]);
    one.mask_indptr = vec![0];
    assert!(plan(&one).is_err());
    one.mask_indptr = vec![0, 1];
    assert!(plan(&one).is_err());
    // No request owns the token.
    let mut none = ForwardRequest {
        token_ids: vec![1],
        position_ids: vec![0],
        ..frame(&[])
    };
    assert!(plan(&none).is_err());
    none.qo_indptr = vec![0, 0];
    assert!(plan(&none).is_err());
}

#[test]
fn per_request_arrays_must_have_one_entry_per_request() {
    let cases: [(&str, Change); 12] = [
        ("position_ids", |r| r.position_ids.push(0)),
        ("position_ids", |r| _ = r.position_ids.pop()),
        ("position_ids", |r| r.position_ids.clear()),
        ("kv_last_page_lens", |r| r.kv_last_page_lens.push(1)),
        ("kv_last_page_lens", |r| r.kv_last_page_lens.clear()),
        ("adapter_bindings", |r| _ = r.adapter_bindings.pop()),
        ("adapter_bindings", |r| r.adapter_bindings.clear()),
        ("context_ids", |r| _ = r.context_ids.pop()),
        ("context_ids", |r| r.context_ids.push(9)),
        ("output_spec_flags", |r| _ = r.output_spec_flags.pop()),
        ("rs_slot_ids", |r| r.rs_slot_ids = vec![0]),
        ("rs_slot_flags", |r| r.rs_slot_flags = vec![0; 4]),
    ];
    for (name, change) in cases {
        let mut request = rich();
        change(&mut request);
        let error = plan(&request).expect_err(name);
        assert!(
            matches!(error, FrameError::Length { array, .. } if array == name),
            "{name}: {error}"
        );
    }
}

#[test]
fn samplers_and_their_rows_are_partitioned_alike() {
    let requests = [decode(3, 1, &[0]), decode(3, 1, &[1])];
    let mut request = frame(&requests);
    request.sampling_indptr = vec![0, 2, 2];
    assert_eq!(
        plan(&request),
        Err(FrameError::SamplerPartition { index: 1 })
    );
}

#[test]
fn a_refused_frame_leaves_nothing_behind() {
    let mut device = Device::new(LARGE);
    device.run(&frame(&[decode(3, 1, &[0])]), |_, _| 5);
    let mut broken = rich();
    broken.position_ids.clear();
    device
        .planner
        .plan(DRIVER, Encoded::new(DRIVER, &broken).forward())
        .expect_err("no positions");
    device.run(&frame(&[decode(3, 1, &[0])]), |_, _| 5);
}

#[test]
fn optional_arrays_may_be_absent() {
    let mut request = frame(&[decode(3, 1, &[0]), decode(9, 2, &[1])]);
    elide_empty(&mut request);
    assert!(request.mask_indptr.is_empty() && request.audio_indptr.is_empty());
    let answer = Device::new(LARGE).run(&request, |_, slot| slot.request as u32);
    assert_eq!(answer.tokens(), [[0], [1]]);
}
