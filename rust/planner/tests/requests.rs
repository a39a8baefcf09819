//! Rules about one request of a frame: what empties it, and that the others do not notice.

use std::slice;

use pie_planner::{Limits, Modality, RequestError};
use pie_wire::Sampler;

use crate::common::builder::{GREEDY, LARGE, Req, decode, frame};
use crate::common::device::Device;

/// The error of the first of two requests; the second must be served in any case.
pub(crate) fn error(request: Req) -> Option<RequestError> {
    let mut device = Device::new(LARGE);
    let mut both = frame(&[request, decode(20, 8, &[40, 41])]);
    both.has_user_mask = true;
    let answer = device.run(&both, |_, slot| 100 + slot.request as u32);
    assert_eq!(answer.tokens()[1], [101]);
    assert!(device.request_errors().len() <= 1);
    device.request_errors().first().map(|(index, error)| {
        assert_eq!(*index, 0);
        assert!(answer.tokens()[0].is_empty());
        error.clone()
    })
}

#[test]
fn page_ids_stay_in_the_pool() {
    assert_eq!(error(decode(3, 1, &[63])), None);
    for page in [64, u32::MAX] {
        let expected = RequestError::PageId {
            page,
            total_pages: 64,
        };
        assert_eq!(error(decode(20, 1, &[page, 3])), Some(expected));
    }
    assert_eq!(
        error(decode(3, 1, &[])),
        Some(RequestError::NoPages { tokens: 1 })
    );
}

#[test]
fn last_page_lengths_stay_in_the_page() {
    for length in [0, 17, u32::MAX] {
        let mut request = decode(3, 1, &[0]);
        request.last_page_len = length;
        assert_eq!(
            error(request.clone()),
            Some(RequestError::LastPageLength {
                length,
                page_size: 16
            })
        );
        request = request.verify(&[4, 5]);
        assert_eq!(
            error(request),
            Some(RequestError::LastPageLength {
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
    assert_eq!(error(prompt(20, 4)), None);
    assert_eq!(
        error(prompt(21, 4)),
        Some(RequestError::Geometry {
            tokens: 21,
            capacity: 20
        })
    );
    // Two pages for 15 + 4 tokens; with 6 drafts the end wraps to the first page's share.
    assert_eq!(error(prompt(15, 15).verify(&[1; 4])), None);
    assert_eq!(
        error(prompt(15, 15).verify(&[1; 18])),
        Some(RequestError::Geometry {
            tokens: 33,
            capacity: 17
        })
    );
}

#[test]
fn rows_of_the_block_table_are_not_exceeded() {
    let pages: Vec<u32> = (0..33).collect();
    assert_eq!(error(decode(511, 1, &pages[..32])), None);
    let mut long = decode(512, 1, &pages);
    long.positions = vec![5];
    assert_eq!(
        error(long),
        Some(RequestError::KvLength {
            length: 513,
            limit: 512
        })
    );
}

#[test]
fn token_ids_stay_in_the_vocabulary() {
    assert_eq!(error(decode(3, 999, &[0])), None);
    for token in [1000, u32::MAX] {
        let expected = Some(RequestError::TokenId {
            token,
            vocab_size: 1000,
        });
        assert_eq!(error(decode(3, token, &[0])), expected);
        assert_eq!(error(decode(3, 1, &[0]).verify(&[4, token])), expected);
    }
}

#[test]
fn positions_stay_in_the_models_table() {
    let at = |position| Req {
        positions: vec![position],
        ..decode(3, 1, &[0])
    };
    assert_eq!(error(at(511)), None);
    for position in [512, u32::MAX] {
        assert_eq!(
            error(at(position)),
            Some(RequestError::Position {
                position,
                limit: 512
            })
        );
    }
    let drafted = |positions: &[u32]| Req {
        draft_positions: positions.to_vec(),
        ..at(510).verify(&[1, 2])
    };
    assert_eq!(error(drafted(&[511, 511])), None);
    assert_eq!(
        error(drafted(&[511, 512])),
        Some(RequestError::Position {
            position: 512,
            limit: 512
        })
    );
    // Counted on from the last input when their number is wrong.
    assert_eq!(
        error(drafted(&[3])),
        Some(RequestError::Position {
            position: 512,
            limit: 512
        })
    );
    let miscounted = Req {
        draft_positions: vec![400; 3],
        ..at(20).verify(&[1, 2])
    };
    let plan = Device::new(LARGE).compute(&frame(&[miscounted]), |_, _| 0);
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
            error(request),
            Some(RequestError::SamplingIndex { index, rows: 1 })
        );
    }
    // Drafts are no rows to name.
    let request = decode(3, 1, &[0]).sample(1, GREEDY).verify(&[4, 5]);
    assert_eq!(
        error(request),
        Some(RequestError::SamplingIndex { index: 1, rows: 1 })
    );
}

#[test]
fn requests_without_tokens_compute_nothing() {
    let idle = Req {
        last_page_len: 77,
        ..Req::new(16, 5, &[], &[9999])
    };
    assert_eq!(error(idle.clone()), None);
    assert_eq!(
        error(idle.clone().sample(0, GREEDY)),
        Some(RequestError::NoTokens)
    );
    assert_eq!(error(idle.verify(&[3])), Some(RequestError::NoTokens));
}

#[test]
fn a_request_has_one_logit_mask() {
    let masked = |masks: &[Vec<u32>]| {
        let request = decode(3, 1, &[0]);
        masks
            .iter()
            .fold(request, |request, runs| request.allow(runs))
    };
    assert_eq!(error(masked(&[])), None);
    for runs in [vec![], vec![0, 300], vec![9], vec![0, u32::MAX]] {
        assert_eq!(error(masked(slice::from_ref(&runs))), None, "{runs:?}");
        for masks in [2, 3] {
            let several = masked(&vec![runs.clone(); masks]);
            let expected = RequestError::LogitMasks { masks };
            assert_eq!(error(several), Some(expected), "{runs:?}");
        }
    }
    // Without samplers they are not looked at.
    let flush = Req {
        samplers: Vec::new(),
        ..masked(&[vec![5, 3], vec![5, 3]])
    };
    assert_eq!(error(flush), None);
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
        let mut device = Device::new(LARGE);
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
    assert_eq!(error(request), None);
}

#[test]
fn adapters_and_media_are_refused() {
    for (id, expected) in [
        (-1, None),
        (0, Some(RequestError::AdapterId { id: 0 })),
        (-2, Some(RequestError::AdapterId { id: -2 })),
        (7, Some(RequestError::AdaptersOff { id: 7 })),
        (i64::MAX, Some(RequestError::AdaptersOff { id: i64::MAX })),
    ] {
        let request = Req {
            adapter: id,
            ..decode(3, 1, &[0])
        };
        assert_eq!(error(request), expected);
    }
    let media = |images, audios| Req {
        images,
        audios,
        ..decode(3, 1, &[0])
    };
    let refused = |medium, spans| Some(RequestError::Media { medium, spans });
    assert_eq!(error(media(1, 0)), refused(Modality::Image, 1));
    assert_eq!(error(media(0, 1)), refused(Modality::Audio, 1));
    assert_eq!(error(media(2, 3)), refused(Modality::Image, 2));
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
        ..LARGE
    };
    Device::new(limits).run(&frame(&[request]), |_, slot| slot.number as u32 % 1000);
}
