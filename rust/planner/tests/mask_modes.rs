//! Attention masks of requests: causal or custom, and how they split passes.

use std::slice;

use pie_planner::{Limits, Planner, RequestError};

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::Device;
use crate::common::engine::{Engine, memory};
use crate::requests::error;

#[test]
fn mask_rows_are_one_per_token() {
    let prompt = || Req::new(16, 0, &[1, 2], &[0]).sample(1, GREEDY);
    assert_eq!(error(prompt().masked([&[0, 1], &[0, 2]])), None);
    assert_eq!(error(prompt()), None);
    assert_eq!(
        error(prompt().masked([&[0, 1]])),
        Some(RequestError::MaskRows { rows: 1, tokens: 2 })
    );
    let three = prompt().masked([&[0, 1], &[0, 2], &[0, 3]]);
    assert_eq!(
        error(three.clone()),
        Some(RequestError::MaskRows { rows: 3, tokens: 2 })
    );
    // Without the frame's flag they are not looked at.
    let answer = Device::new(LARGE).run(&frame(&[three]), |_, _| 3);
    assert_eq!(answer.tokens(), [[3]]);
}

/// KV indices 18, 19, 20 at positions 40, 41, 42: a trimmed list.
fn trimmed() -> Req {
    Req {
        positions: vec![40, 41, 42],
        ..Req::new(16, 18, &[1, 2, 3], &[0, 1]).sample(2, GREEDY)
    }
}

const CAUSAL: [[&[u32]; 3]; 5] = [
    [&[0, 41], &[0, 42], &[0, 43]],
    [&[0, 19], &[0, 20], &[0, 21]],
    [&[0, 19, 2], &[0, 20, 1], &[0, 21, 99]],
    [&[0, 9, 0, 10], &[0, 20, 1, 5], &[0, u32::MAX]],
    [&[], &[0, 20], &[]],
];

const NOT_CAUSAL: [[&[u32]; 3]; 7] = [
    [&[0, 18], &[0, 20], &[0, 21]],
    [&[0, 20], &[0, 20], &[0, 21]],
    [&[0, 19], &[1, 19], &[0, 21]],
    [&[0, 19], &[0, 20], &[0, 4, 1, 16]],
    [&[0, 19], &[0, 20], &[21]],
    [&[0, 19], &[0], &[0, 21]],
    [&[0, 42], &[0, 42], &[0, 43]],
];

#[test]
fn causal_masks_are_no_masks() {
    let mut device = Device::new(LARGE);
    let mut masked = |rows: [&[u32]; 3]| {
        let mut request = frame(&[trimmed().masked(rows)]);
        request.has_user_mask = true;
        device.compute(&request, |_, _| 0).requests[0]
            .sees
            .is_some()
    };
    for rows in CAUSAL {
        assert_eq!(error(trimmed().masked(rows)), None, "{rows:?}");
        assert!(!masked(rows), "{rows:?}");
    }
    for rows in NOT_CAUSAL {
        assert_eq!(error(trimmed().masked(rows)), None, "{rows:?}");
        assert!(masked(rows), "{rows:?}");
    }
}

#[test]
fn an_engine_without_masks_serves_causal_ones() {
    let mut planner = Planner::new(LARGE, 1).without_masks();
    let mut errors = |rows: [&[u32]; 3]| {
        let mut request = frame(&[trimmed().masked(rows)]);
        request.has_user_mask = true;
        let planned = planner.plan(1, Encoded::new(1, &request).forward());
        planned
            .expect("the frame's arrays agree")
            .request_errors()
            .to_vec()
    };
    for rows in CAUSAL {
        assert_eq!(errors(rows), [], "{rows:?}");
    }
    for rows in NOT_CAUSAL {
        let expected = (0, RequestError::NonCausalMask);
        assert_eq!(errors(rows), [expected], "{rows:?}");
    }
}

/// The passes of a frame of masked requests, as tokens of each.
fn masked_passes(requests: &[Req]) -> Vec<usize> {
    let limits = Limits {
        chunk_tokens: 8,
        ..LARGE
    };
    let mut request = frame(requests);
    request.has_user_mask = true;
    let plan = Device::new(limits).compute(&request, |_, _| 0);
    let tokens = plan.passes.iter().map(|pass| {
        let lengths = pass.iter().map(|segment| segment.rows.len());
        lengths.sum()
    });
    tokens.collect()
}

#[test]
fn passes_are_masked_or_causal_as_a_whole() {
    let causal = |token| decode(3, token, &[token]);
    let masked = |token| causal(token).masked([&[1, 3]]);
    let requests = [causal(1), causal(2), masked(3), masked(4), causal(5)];
    assert_eq!(masked_passes(&requests), [2, 2, 1]);
    assert_eq!(masked_passes(&[masked(1), causal(2), masked(3)]), [1, 1, 1]);
}

#[test]
fn a_request_that_sees_ahead_is_not_cut() {
    let behind = || Req::new(16, 0, &[1; 5], &[0]).masked([&[1]; 5]);
    let ahead = |page| Req::new(16, 0, &[1; 5], &[page]).masked([&[0, 5]; 5]);
    assert_eq!(masked_passes(&[behind(), behind()]), [8, 2]);
    assert_eq!(masked_passes(&[behind(), ahead(1), behind()]), [5, 8, 2]);
    assert_eq!(masked_passes(&[ahead(1), ahead(2)]), [5, 5]);
    // Seven inputs and a draft just fit, of which only the draft lies ahead.
    let last = |drafts: &[u32]| {
        let rows: [&[u32]; 7] = [&[0, 1], &[1], &[1], &[1], &[1], &[1], &[0, 8]];
        let prompt = Req::new(16, 0, &[1; 7], &[0]).sample(6, GREEDY);
        prompt.verify(drafts).masked(rows)
    };
    assert_eq!(masked_passes(&[behind(), last(&[3])]), [5, 8]);
    assert_eq!(masked_passes(&[last(&[3, 4])]), [0; 0]);
}

#[test]
fn a_request_that_sees_ahead_must_fit_one_pass() {
    let tokens = [1; 257];
    let request = Req::new(16, 0, &tokens, &(0..17).collect::<Vec<_>>());
    let all: &[u32] = &[0, 257];
    let expected = RequestError::MaskAhead {
        tokens: 257,
        limit: 256,
    };
    assert_eq!(error(request.clone().masked([all; 257])), Some(expected));
    let behind: &[u32] = &[0, 1];
    assert_eq!(error(request.masked([behind; 257])), None);
}

/// Contexts of a million tokens, whose mask rows have 128 KiB: 32 of them are as much as a pass may have.
const LONG: Limits = Limits {
    page_size: 1 << 15,
    max_positions: 1 << 21,
    row_pages: 64,
    chunk_tokens: 64,
    ..LARGE
};

/// Rows of each pass, and what was refused.
fn long_passes(requests: &[Req]) -> (Vec<usize>, Vec<(usize, RequestError)>) {
    let mut request = frame(requests);
    request.has_user_mask = true;
    let encoded = Encoded::new(3, &request);
    let mut planner = Planner::new(LONG, 1);
    let plan = planner.plan(3, encoded.forward()).unwrap();
    let mut block = memory(planner.layout());
    let block = bytemuck::cast_slice_mut(&mut block);
    let mut rows = Vec::new();
    let computed = Engine::default().run_seeing(&mut planner, plan, block, |pass, _| {
        let words = pass.attention_mask().unwrap().offsets().last().unwrap();
        assert!(words <= LONG.attention_words(), "{words} words");
        rows.push(pass.pass().tokens);
    });
    (rows, computed.request_errors().to_vec())
}

#[test]
fn passes_are_cut_where_their_masks_become_too_large() {
    let pages: Vec<u32> = (0..33).collect();
    let context = |rows: usize| Req::new(1 << 15, 1 << 20, &vec![1; rows], &pages);
    assert_eq!(LONG.attention_words(), 1 << 20);
    assert_eq!(long_passes(&[context(40).masked([&[1]; 40])]).0, [31, 9]);
    let half = || context(20).masked([&[1]; 20]);
    assert_eq!(long_passes(&[half(), half()]).0, [31, 9]);
    // What cannot be cut begins a pass of its own.
    let all: &[u32] = &[0, (1 << 20) + 20];
    let ahead = context(20).masked([all; 20]);
    let (rows, errors) = long_passes(&[half(), ahead, half()]);
    assert_eq!((rows, errors), (vec![20, 31, 9], vec![]));
}

#[test]
fn a_mask_that_is_too_large_for_a_pass_and_cannot_be_cut_is_refused_alone() {
    let pages: Vec<u32> = (0..33).collect();
    let context = |rows: usize| Req::new(1 << 15, 1 << 20, &vec![1; rows], &pages);
    let all: &[u32] = &[0, 1 << 21];
    let fits = context(31).masked([all; 31]);
    assert_eq!(long_passes(slice::from_ref(&fits)), (vec![31], vec![]));
    let (rows, errors) = long_passes(&[context(40).masked([all; 40]), fits]);
    let error = RequestError::MaskWords {
        tokens: 40,
        kv_len: (1 << 20) + 40,
        bytes: 4 * 40 * 32_770,
        limit: 4 << 20,
        chunk: 6477,
    };
    let text = error.to_string();
    assert!(
        text.ends_with("or set `chunked_prefill_size = 6477`"),
        "{text}"
    );
    assert_eq!((rows, errors), (vec![31], vec![(0, error)]));
    // So it does.
    let limits = Limits {
        chunk_tokens: 6477,
        ..LONG
    };
    assert!(limits.attention_words() >= 40 * 32_770);
}

#[test]
fn a_pass_takes_the_mask_of_a_row_and_that_of_a_prompt() {
    for (chunk, pages, words) in [
        // All that there can be is less than the bound.
        (256, 32, 256 * 16),
        (64, 1 << 16, 1 << 20),
        (8192, 1 << 16, 8192 * 256),
        (1, 1 << 22, 1 << 21),
        (2, 1 << 22, 1 << 21),
    ] {
        let limits = Limits {
            chunk_tokens: chunk,
            row_pages: pages,
            ..LARGE
        };
        assert_eq!(limits.attention_words(), words, "{chunk}, {pages}");
    }
}
