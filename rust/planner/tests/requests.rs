//! Rules about one request of a frame: what empties it, and that the others do not notice.

use std::slice;

use crate::common::builder::{Encoded, GREEDY, ROOMY, Req, decode, frame};
use crate::common::device::Device;
use crate::common::engine::{Engine, memory};
use pie_planner::{Limits, Medium, Planner, RequestFault};
use pie_wire::Sampler;

/// The fault of the first of two requests; the second must be served in any case.
fn fault(request: Req) -> Option<RequestFault> {
    let mut device = Device::new(ROOMY);
    let mut both = frame(&[request, decode(20, 8, &[40, 41])]);
    both.has_user_mask = true;
    let answer = device.run(&both, |_, slot| 100 + slot.request as u32);
    assert_eq!(answer.tokens()[1], [101]);
    assert!(device.faults().len() <= 1);
    device.faults().first().map(|(index, fault)| {
        assert_eq!(*index, 0);
        assert!(answer.tokens()[0].is_empty());
        fault.clone()
    })
}

#[test]
fn page_ids_stay_in_the_pool() {
    assert_eq!(fault(decode(3, 1, &[63])), None);
    for page in [64, u32::MAX] {
        let expected = RequestFault::PageId {
            page,
            total_pages: 64,
        };
        assert_eq!(fault(decode(20, 1, &[page, 3])), Some(expected));
    }
    assert_eq!(
        fault(decode(3, 1, &[])),
        Some(RequestFault::NoPages { tokens: 1 })
    );
}

#[test]
fn last_page_lengths_stay_in_the_page() {
    for length in [0, 17, u32::MAX] {
        let mut request = decode(3, 1, &[0]);
        request.last_page_len = length;
        assert_eq!(
            fault(request.clone()),
            Some(RequestFault::LastPageLength {
                length,
                page_size: 16
            })
        );
        request = request.verify(&[4, 5]);
        assert_eq!(
            fault(request),
            Some(RequestFault::LastPageLength {
                length,
                page_size: 16
            })
        );
    }
}

#[test]
fn pages_hold_all_tokens() {
    let prompt = |inputs: usize, last_page_len| Req {
        last_page_len,
        ..Req::new(16, 0, &vec![1; inputs], &[0, 1])
    };
    assert_eq!(fault(prompt(20, 4)), None);
    assert_eq!(
        fault(prompt(21, 4)),
        Some(RequestFault::Geometry {
            tokens: 21,
            capacity: 20
        })
    );
    // Two pages for 15 + 4 tokens; with 6 drafts the end wraps to the first page's share.
    assert_eq!(fault(prompt(15, 15).verify(&[1; 4])), None);
    assert_eq!(
        fault(prompt(15, 15).verify(&[1; 18])),
        Some(RequestFault::Geometry {
            tokens: 33,
            capacity: 17
        })
    );
}

#[test]
fn rows_of_the_block_table_are_not_exceeded() {
    let pages: Vec<u32> = (0..33).collect();
    assert_eq!(fault(decode(511, 1, &pages[..32])), None);
    let mut long = decode(512, 1, &pages);
    long.positions = vec![5];
    assert_eq!(
        fault(long),
        Some(RequestFault::KvLength {
            length: 513,
            limit: 512
        })
    );
}

#[test]
fn token_ids_stay_in_the_vocabulary() {
    assert_eq!(fault(decode(3, 999, &[0])), None);
    for token in [1000, u32::MAX] {
        let expected = Some(RequestFault::TokenId {
            token,
            vocab_size: 1000,
        });
        assert_eq!(fault(decode(3, token, &[0])), expected);
        assert_eq!(fault(decode(3, 1, &[0]).verify(&[4, token])), expected);
    }
}

#[test]
fn positions_stay_in_the_models_table() {
    let at = |position| Req {
        positions: vec![position],
        ..decode(3, 1, &[0])
    };
    assert_eq!(fault(at(511)), None);
    for position in [512, u32::MAX] {
        assert_eq!(
            fault(at(position)),
            Some(RequestFault::Position {
                position,
                limit: 512
            })
        );
    }
    let drafted = |positions: &[u32]| Req {
        draft_positions: positions.to_vec(),
        ..at(510).verify(&[1, 2])
    };
    assert_eq!(fault(drafted(&[511, 511])), None);
    assert_eq!(
        fault(drafted(&[511, 512])),
        Some(RequestFault::Position {
            position: 512,
            limit: 512
        })
    );
    // Counted on from the last input when their number is wrong.
    assert_eq!(
        fault(drafted(&[3])),
        Some(RequestFault::Position {
            position: 512,
            limit: 512
        })
    );
    let miscounted = Req {
        draft_positions: vec![400; 3],
        ..at(20).verify(&[1, 2])
    };
    let plan = Device::new(ROOMY).compute(&frame(&[miscounted]), |_, _| 0);
    assert_eq!(
        plan.requests[0]
            .rows
            .iter()
            .map(|row| row.position)
            .collect::<Vec<_>>(),
        [20, 21, 22]
    );
}

#[test]
fn sampling_indices_stay_in_the_request() {
    for index in [1, u32::MAX] {
        let request = decode(3, 1, &[0]).sample(index, GREEDY);
        assert_eq!(
            fault(request),
            Some(RequestFault::SamplingIndex { index, rows: 1 })
        );
    }
    // Drafts are no rows to name.
    let request = decode(3, 1, &[0]).sample(1, GREEDY).verify(&[4, 5]);
    assert_eq!(
        fault(request),
        Some(RequestFault::SamplingIndex { index: 1, rows: 1 })
    );
}

#[test]
fn requests_without_tokens_compute_nothing() {
    let idle = Req {
        last_page_len: 77,
        ..Req::new(16, 5, &[], &[9999])
    };
    assert_eq!(fault(idle.clone()), None);
    assert_eq!(
        fault(idle.clone().sample(0, GREEDY)),
        Some(RequestFault::NoTokens)
    );
    assert_eq!(fault(idle.verify(&[3])), Some(RequestFault::NoTokens));
}

#[test]
fn mask_rows_are_one_per_token() {
    let prompt = || Req::new(16, 0, &[1, 2], &[0]).sample(1, GREEDY);
    assert_eq!(fault(prompt().masked([&[0, 1], &[0, 2]])), None);
    assert_eq!(fault(prompt()), None);
    assert_eq!(
        fault(prompt().masked([&[0, 1]])),
        Some(RequestFault::MaskRows { rows: 1, tokens: 2 })
    );
    let three = prompt().masked([&[0, 1], &[0, 2], &[0, 3]]);
    assert_eq!(
        fault(three.clone()),
        Some(RequestFault::MaskRows { rows: 3, tokens: 2 })
    );
    // Without the frame's flag they are not looked at.
    let answer = Device::new(ROOMY).run(&frame(&[three]), |_, _| 3);
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
    let mut device = Device::new(ROOMY);
    let mut masked = |rows: [&[u32]; 3]| {
        let mut request = frame(&[trimmed().masked(rows)]);
        request.has_user_mask = true;
        device.compute(&request, |_, _| 0).requests[0]
            .sees
            .is_some()
    };
    for rows in CAUSAL {
        assert_eq!(fault(trimmed().masked(rows)), None, "{rows:?}");
        assert!(!masked(rows), "{rows:?}");
    }
    for rows in NOT_CAUSAL {
        assert_eq!(fault(trimmed().masked(rows)), None, "{rows:?}");
        assert!(masked(rows), "{rows:?}");
    }
}

#[test]
fn an_engine_without_masks_serves_causal_ones() {
    let mut planner = Planner::new(ROOMY, 1).without_masks();
    let mut faults = |rows: [&[u32]; 3]| {
        let mut request = frame(&[trimmed().masked(rows)]);
        request.has_user_mask = true;
        let planned = planner.plan(1, Encoded::new(1, &request).forward());
        planned.expect("the frame's arrays agree").faults().to_vec()
    };
    for rows in CAUSAL {
        assert_eq!(faults(rows), [], "{rows:?}");
    }
    for rows in NOT_CAUSAL {
        let expected = (0, RequestFault::NonCausalMask);
        assert_eq!(faults(rows), [expected], "{rows:?}");
    }
}

/// The passes of a frame of masked requests, as tokens of each.
fn masked_passes(requests: &[Req]) -> Vec<usize> {
    let limits = Limits {
        chunk_tokens: 8,
        ..ROOMY
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
    let expected = RequestFault::MaskAhead {
        tokens: 257,
        limit: 256,
    };
    assert_eq!(fault(request.clone().masked([all; 257])), Some(expected));
    let behind: &[u32] = &[0, 1];
    assert_eq!(fault(request.masked([behind; 257])), None);
}

/// Contexts of a million tokens, whose mask rows have 128 KiB: 32 of them are as much as a pass may have.
const LONG: Limits = Limits {
    page_size: 1 << 15,
    max_positions: 1 << 21,
    row_pages: 64,
    chunk_tokens: 64,
    ..ROOMY
};

/// Rows of each pass, and what was refused.
fn long_passes(requests: &[Req]) -> (Vec<usize>, Vec<(usize, RequestFault)>) {
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
    (rows, computed.faults().to_vec())
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
    let (rows, faults) = long_passes(&[half(), ahead, half()]);
    assert_eq!((rows, faults), (vec![20, 31, 9], vec![]));
}

#[test]
fn a_mask_that_is_too_large_for_a_pass_and_cannot_be_cut_is_refused_alone() {
    let pages: Vec<u32> = (0..33).collect();
    let context = |rows: usize| Req::new(1 << 15, 1 << 20, &vec![1; rows], &pages);
    let all: &[u32] = &[0, 1 << 21];
    let fits = context(31).masked([all; 31]);
    assert_eq!(long_passes(slice::from_ref(&fits)), (vec![31], vec![]));
    let (rows, faults) = long_passes(&[context(40).masked([all; 40]), fits]);
    let fault = RequestFault::MaskWords {
        tokens: 40,
        kv_len: (1 << 20) + 40,
        bytes: 4 * 40 * 32_770,
        limit: 4 << 20,
        chunk: 6477,
    };
    let text = fault.to_string();
    assert!(
        text.ends_with("or set `chunked_prefill_size = 6477`"),
        "{text}"
    );
    assert_eq!((rows, faults), (vec![31], vec![(0, fault)]));
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
            ..ROOMY
        };
        assert_eq!(limits.attention_words(), words, "{chunk}, {pages}");
    }
}

#[test]
fn a_request_has_one_logit_mask() {
    let masked = |masks: &[Vec<u32>]| {
        let request = decode(3, 1, &[0]);
        masks
            .iter()
            .fold(request, |request, runs| request.allow(runs))
    };
    assert_eq!(fault(masked(&[])), None);
    for runs in [vec![], vec![0, 300], vec![9], vec![0, u32::MAX]] {
        assert_eq!(fault(masked(slice::from_ref(&runs))), None, "{runs:?}");
        for masks in [2, 3] {
            let several = masked(&vec![runs.clone(); masks]);
            let expected = RequestFault::LogitMasks { masks };
            assert_eq!(fault(several), Some(expected), "{runs:?}");
        }
    }
    // Without samplers they are not looked at.
    let flush = Req {
        samplers: Vec::new(),
        ..masked(&[vec![5, 3], vec![5, 3]])
    };
    assert_eq!(fault(flush), None);
}

#[test]
fn every_probe_is_served_at_the_ends_of_its_parameters() {
    let dist = |temperature, num_tokens| Sampler::Dist {
        temperature,
        num_tokens,
    };
    let labels = |token_ids: &[u32]| Sampler::Logprobs {
        token_ids: token_ids.to_vec(),
    };
    for (probe, values) in [
        (dist(0.0, 0), 1000),
        (dist(f32::NAN, 1), 1),
        (dist(1.0, 999), 999),
        (dist(1.0, 1000), 1000),
        (dist(f32::INFINITY, 1001), 1000),
        (dist(-1.0, u32::MAX), 1000),
        (Sampler::RawLogits, 1000),
        (Sampler::Logprob { token_id: u32::MAX }, 1),
        (labels(&[]), 0),
        (labels(&[1000, u32::MAX, 3, 3]), 4),
        (labels(&[7; 2000]), 2000),
        (Sampler::Entropy, 1),
    ] {
        let request = decode(3, 1, &[0]).sample(0, probe.clone());
        let mut device = Device::new(ROOMY);
        let answer = device.run(&frame(&[request]), |_, _| 5);
        let outputs = answer.outputs().remove(0);
        let dists = outputs.dists.iter().map(|(ids, _)| ids.len());
        let floats = outputs.logits.iter().chain(&outputs.logprobs).map(Vec::len);
        let found: Vec<_> = dists
            .chain(floats)
            .chain(outputs.entropies.iter().map(|_| 1))
            .collect();
        assert_eq!(found, [values], "{probe:?}");
        assert_eq!(outputs.tokens, [5]);
    }
}

#[test]
fn the_reserved_sampler_is_no_fault() {
    let request = decode(3, 1, &[0]).sample(0, Sampler::Embedding);
    assert_eq!(fault(request), None);
}

#[test]
fn adapters_and_media_are_refused() {
    for (id, expected) in [
        (-1, None),
        (0, Some(RequestFault::AdapterId { id: 0 })),
        (-2, Some(RequestFault::AdapterId { id: -2 })),
        (7, Some(RequestFault::AdaptersOff { id: 7 })),
        (i64::MAX, Some(RequestFault::AdaptersOff { id: i64::MAX })),
    ] {
        let request = Req {
            adapter: id,
            ..decode(3, 1, &[0])
        };
        assert_eq!(fault(request), expected);
    }
    let media = |images, audios| Req {
        images,
        audios,
        ..decode(3, 1, &[0])
    };
    let refused = |medium, spans| Some(RequestFault::Media { medium, spans });
    assert_eq!(fault(media(1, 0)), refused(Medium::Image, 1));
    assert_eq!(fault(media(0, 1)), refused(Medium::Audio, 1));
    assert_eq!(fault(media(2, 3)), refused(Medium::Image, 2));
}

#[test]
fn sampler_parameters_are_brought_into_range() {
    let mut request = Req::new(16, 3, &[1], &[0]);
    for temperature in [f32::NAN, -1.0, 0.0, 1e-5, 1e-4, 1.0, f32::INFINITY] {
        for share in [f32::NAN, -1.0, 0.0, 0.5, 1.0, 2.0, f32::INFINITY] {
            for k in [0, 1, 999, 1000, 1001, u32::MAX] {
                request = request
                    .sample(
                        0,
                        Sampler::TopP {
                            temperature,
                            p: share,
                        },
                    )
                    .sample(
                        0,
                        Sampler::MinP {
                            temperature,
                            p: share,
                        },
                    )
                    .sample(
                        0,
                        Sampler::TopKTopP {
                            temperature,
                            k,
                            p: share,
                        },
                    )
                    .sample(0, Sampler::TopK { temperature, k });
            }
        }
    }
    let limits = Limits {
        max_slots: 100,
        ..ROOMY
    };
    Device::new(limits).run(&frame(&[request]), |_, slot| slot.number as u32 % 1000);
}
