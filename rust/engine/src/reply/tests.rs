use pie_wire::{ForwardResponse, ResponseFrame, ResponsePayload};

use super::*;

/// A decode at position 9.
const TOKEN: ExpectedReply<'_> = ExpectedReply {
    samples: true,
    drafts: &[],
    wants_drafts: false,
    end: 10,
    logprobs: ExpectedLogprobs {
        shape: None,
        prompt: 0,
    },
};

fn expected(
    requests: usize,
    sampled: usize,
) -> impl Iterator<Item = ExpectedReply<'static>> + Clone {
    (0..requests).map(move |request| ExpectedReply {
        samples: request < sampled,
        ..TOKEN
    })
}

fn response(indptr: &[u32], tokens: &[u32]) -> ForwardResponse {
    ForwardResponse {
        num_requests: indptr.len() as u32 - 1,
        tokens_indptr: indptr.to_vec(),
        tokens: tokens.to_vec(),
        probe_plan_us: 7,
        probe_sync_us: 9,
        ..ForwardResponse::default()
    }
}

fn archive(indptr: &[u32], tokens: &[u32]) -> Vec<u8> {
    encoded(response(indptr, tokens))
}

fn encoded(forward: ForwardResponse) -> Vec<u8> {
    let frame = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(forward),
    };
    let mut buffer = vec![0; 4096];
    let length = pie_wire::encode_response(&frame, &mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

fn outcome(bytes: &[u8], requests: usize, sampled: usize) -> Result<Vec<u32>, ReplyError> {
    let mut reply = StepReply::default();
    reply.tokens.push(99);
    match reply.read(bytes, expected(requests, sampled)) {
        Ok(_) => {
            reply.check_none_rejected(expected(requests, sampled))?;
            Ok(reply.tokens)
        }
        Err(EngineError::Reply(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_request_must_have_its_token() {
    assert_eq!(outcome(&archive(&[0, 1, 2], &[5, 6]), 2, 2), Ok(vec![5, 6]));
    assert_eq!(outcome(&archive(&[0, 1, 1], &[5]), 2, 1), Ok(vec![5]));
    let rejected = outcome(&archive(&[0, 1, 1], &[5]), 2, 2);
    assert_eq!(rejected, Err(token_count(1, 0, 1)));
    let mut reply = StepReply::default();
    reply
        .read(&archive(&[0, 1, 1], &[5]), expected(2, 2))
        .unwrap();
    assert_eq!(
        [0, 1].map(|request| reply.last_of(request)),
        [Some(5), None]
    );
    let surplus = outcome(&archive(&[0, 2], &[5, 6]), 1, 1);
    assert_eq!(surplus, Err(token_count(0, 2, 1)));
    let beyond = outcome(&archive(&[0, 1, 2], &[5]), 2, 2);
    assert_eq!(beyond, Err(ReplyError::Offsets));
    let other = outcome(&archive(&[0, 1], &[5]), 2, 2);
    assert!(matches!(other, Err(ReplyError::Requests { found: 1, .. })));
}

#[test]
fn a_fast_reply_has_a_token_for_each() {
    let mut buffer = [0; 64];
    let length = pie_wire::encode_fast_tokens(0, &[8, 9], &mut buffer).unwrap();
    assert_eq!(outcome(&buffer[..length], 2, 2), Ok(vec![8, 9]));
    let other = outcome(&buffer[..length], 3, 3);
    assert!(matches!(other, Err(ReplyError::Requests { found: 2, .. })));
    let more = outcome(&buffer[..length], 1, 1);
    assert!(matches!(more, Err(ReplyError::Requests { found: 2, .. })));
    let surplus = outcome(&buffer[..length], 2, 1);
    assert_eq!(surplus, Err(token_count(1, 1, 0)));
}

#[test]
fn refusals_are_told_apart() {
    let status = pie_wire::status_frame(0, 2, false);
    assert_eq!(outcome(&status, 1, 1), Err(ReplyError::Status(2)));
    let abort = pie_wire::abort_frame(0);
    assert_eq!(outcome(&abort, 1, 1), Err(ReplyError::Aborted));
}

#[test]
fn an_archive_brings_the_probes() {
    let wanted = Probes {
        plan: 7,
        sync: 9,
        ..Probes::default()
    };
    let bytes = archive(&[0, 1], &[5]);
    let probes = StepReply::default().read(&bytes, expected(1, 1)).unwrap();
    assert_eq!(probes, Some(wanted));
}

#[test]
fn pooled_rows_come_in_the_place_of_log_probabilities() {
    let rows = |indptr: &[u32], bytes: &[u32]| ForwardResponse {
        logits_req_indptr: indptr.to_vec(),
        logits_byte_indptr: bytes.to_vec(),
        logits_bytes: [1.5_f32, -2.0, 0.25, 8.0]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        ..response(&[0, 0, 0, 0], &[])
    };
    let mut reply = StepReply::default();
    let right = encoded(rows(&[0, 1, 2, 2], &[0, 8, 16]));
    reply.read(&right, expected(3, 2)).unwrap();
    let output = reply.to_scheduler();
    let words = output.logprobs.iter();
    let floats: Vec<f32> = words.map(|&word| f32::from_bits(word)).collect();
    assert_eq!(floats, [1.5, -2.0, 0.25, 8.0]);
    assert_eq!(output.logprob_ends, [0, 2, 4, 4]);
    assert_eq!(output.token_ends, [0, 1, 2, 2]);
    for (indptr, bytes) in [
        (&[0, 1, 3, 3], &[0, 8, 16][..]),
        (&[0, 1, 2, 2], &[0, 8, 17]),
        (&[0, 2, 1, 2], &[0, 8, 16]),
        (&[0, 1, 2, 2], &[]),
    ] {
        let wrong = outcome(&encoded(rows(indptr, bytes)), 3, 2);
        assert_eq!(wrong, Err(ReplyError::Offsets), "{indptr:?} {bytes:?}");
    }
}

/// The worked example of the protocol: two requests that want drafts, the first with four to verify.
fn read_drafted(response: ForwardResponse) -> Result<StepReply, ReplyError> {
    let drafts = ExpectedReply {
        wants_drafts: true,
        ..TOKEN
    };
    let verifies = ExpectedReply {
        drafts: &[40, 41, 42, 43],
        ..drafts
    };
    let mut reply = StepReply::default();
    match reply.read(&encoded(response), [verifies, drafts, TOKEN].into_iter()) {
        Ok(_) => Ok(reply),
        Err(EngineError::Reply(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn drafts_follow_what_was_accepted() {
    let right = ForwardResponse {
        spec_indptr: vec![0, 2, 3, 3],
        spec_tokens: vec![50, 51, 60],
        spec_positions: vec![13, 14, 11],
        ..response(&[0, 3, 4, 5], &[40, 41, 5, 6, 7])
    };
    let reply = read_drafted(right.clone()).unwrap();
    assert_eq!(
        [0, 1, 2].map(|request| reply.tokens_of(request)),
        [&[40, 41, 5][..], &[6], &[7]]
    );
    assert_eq!(
        [0, 1, 2].map(|request| reply.drafts_of(request)),
        [&[50, 51][..], &[60], &[]]
    );

    let none = read_drafted(response(&[0, 1, 2, 3], &[5, 6, 7])).unwrap();
    assert_eq!(
        [0, 1, 2].map(|request| none.drafts_of(request).len()),
        [0; 3]
    );

    let wrong = |change: fn(&mut ForwardResponse)| {
        let mut response = right.clone();
        change(&mut response);
        read_drafted(response).unwrap_err()
    };
    assert_eq!(wrong(|of| of.tokens[1] = 42), ReplyError::Accepted(0));
    let misplaced = |request, drafts| ReplyError::Drafts { request, drafts };
    assert_eq!(wrong(|of| of.spec_positions[1] = 15), misplaced(0, 2));
    assert_eq!(wrong(|of| of.spec_positions[2] = 10), misplaced(1, 1));
    assert_eq!(
        wrong(|of| of.spec_indptr = vec![0, 2, 2, 3]),
        misplaced(2, 1)
    );
    assert_eq!(
        wrong(|of| of.spec_indptr = vec![0, 2, 3]),
        ReplyError::Offsets
    );
    assert_eq!(
        wrong(|of| of.spec_indptr = vec![0, 3, 2, 3]),
        ReplyError::Offsets
    );
    assert_eq!(
        wrong(|of| of.spec_positions.truncate(2)),
        ReplyError::Offsets
    );
    // Six tokens for four drafts.
    let surplus = response(&[0, 6, 7, 8], &[40, 41, 42, 43, 44, 45, 6, 7]);
    assert_eq!(read_drafted(surplus).unwrap_err(), token_count(0, 6, 1));
}
