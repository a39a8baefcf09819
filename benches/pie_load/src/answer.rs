//! Reading the driver's answers.

use pie_wire::{ArchivedForwardResponse, ArchivedResponsePayload, NativeSlice, Reply};
use serde::Serialize;

use crate::error::{AnswerError, LoadError};

/// The driver's own times of a batch in µs, which only an archive carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Probes {
    pub(crate) parse: u32,
    pub(crate) plan: u32,
    pub(crate) h2d: u32,
    pub(crate) launch: u32,
    pub(crate) sync: u32,
    pub(crate) respond: u32,
}

/// Reads the tokens into `tokens`. The first `sampled` requests have one token each, the rest of the `requests` none.
pub(crate) fn read(
    bytes: &[u8],
    requests: usize,
    sampled: usize,
    tokens: &mut Vec<u32>,
) -> Result<Option<Probes>, LoadError> {
    tokens.clear();
    match pie_wire::decode_reply(bytes)? {
        Reply::Tokens(reply) => {
            check_requests(reply.len(), requests)?;
            if let Some(request) = (sampled < requests).then_some(sampled) {
                return Err(wrong_tokens(request, 1, 0).into());
            }
            tokens.extend(reply.iter());
            Ok(None)
        }
        Reply::Frame(frame) if frame.aborted => Err(AnswerError::Aborted.into()),
        Reply::Frame(frame) => match &frame.payload {
            ArchivedResponsePayload::Status(status) => {
                Err(AnswerError::Status(status.status.to_native()).into())
            }
            ArchivedResponsePayload::Forward(forward) => {
                read_archive(forward, requests, sampled, tokens)?;
                Ok(Some(probes(forward)))
            }
        },
    }
}

fn read_archive(
    forward: &ArchivedForwardResponse,
    requests: usize,
    sampled: usize,
    tokens: &mut Vec<u32>,
) -> Result<(), AnswerError> {
    check_requests(forward.num_requests.to_native() as usize, requests)?;
    let (ends, all) = (forward.tokens_indptr.native(), forward.tokens.native());
    if ends.len() != requests + 1 {
        return Err(AnswerError::Offsets);
    }
    for (request, range) in ends.windows(2).enumerate() {
        let (first, end) = (range[0] as usize, range[1] as usize);
        let found = all.get(first..end).ok_or(AnswerError::Offsets)?;
        let expected = usize::from(request < sampled);
        if found.len() != expected {
            return Err(wrong_tokens(request, found.len(), expected));
        }
        tokens.extend(found);
    }
    Ok(())
}

fn check_requests(found: usize, expected: usize) -> Result<(), AnswerError> {
    if found != expected {
        return Err(AnswerError::Requests { found, expected });
    }
    Ok(())
}

const fn wrong_tokens(request: usize, found: usize, expected: usize) -> AnswerError {
    AnswerError::Tokens {
        request,
        found,
        expected,
    }
}

fn probes(forward: &ArchivedForwardResponse) -> Probes {
    Probes {
        parse: forward.probe_wire_parse_us.to_native(),
        plan: forward.probe_plan_us.to_native(),
        h2d: forward.probe_h2d_us.to_native(),
        launch: forward.probe_kernel_launch_us.to_native(),
        sync: forward.probe_sync_us.to_native(),
        respond: forward.probe_response_build_us.to_native(),
    }
}

#[cfg(test)]
mod tests {
    use pie_wire::{ForwardResponse, ResponseFrame, ResponsePayload};

    use super::*;

    fn archive(indptr: &[u32], tokens: &[u32]) -> Vec<u8> {
        let forward = ForwardResponse {
            num_requests: indptr.len() as u32 - 1,
            tokens_indptr: indptr.to_vec(),
            tokens: tokens.to_vec(),
            probe_plan_us: 7,
            probe_sync_us: 9,
            ..ForwardResponse::default()
        };
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

    fn outcome(bytes: &[u8], requests: usize, sampled: usize) -> Result<Vec<u32>, AnswerError> {
        let mut tokens = vec![99];
        match read(bytes, requests, sampled, &mut tokens) {
            Ok(_) => Ok(tokens),
            Err(LoadError::Answer(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn every_request_must_have_its_token() {
        assert_eq!(outcome(&archive(&[0, 1, 2], &[5, 6]), 2, 2), Ok(vec![5, 6]));
        assert_eq!(outcome(&archive(&[0, 1, 1], &[5]), 2, 1), Ok(vec![5]));
        let emptied = outcome(&archive(&[0, 1, 1], &[5]), 2, 2);
        assert_eq!(emptied, Err(wrong_tokens(1, 0, 1)));
        let surplus = outcome(&archive(&[0, 2], &[5, 6]), 1, 1);
        assert_eq!(surplus, Err(wrong_tokens(0, 2, 1)));
        let beyond = outcome(&archive(&[0, 1, 2], &[5]), 2, 2);
        assert_eq!(beyond, Err(AnswerError::Offsets));
        let other = outcome(&archive(&[0, 1], &[5]), 2, 2);
        assert!(matches!(other, Err(AnswerError::Requests { found: 1, .. })));
    }

    #[test]
    fn a_fast_reply_has_a_token_for_each() {
        let mut buffer = [0; 64];
        let length = pie_wire::encode_fast_tokens(0, &[8, 9], &mut buffer).unwrap();
        assert_eq!(outcome(&buffer[..length], 2, 2), Ok(vec![8, 9]));
        let other = outcome(&buffer[..length], 3, 3);
        assert!(matches!(other, Err(AnswerError::Requests { found: 2, .. })));
        let more = outcome(&buffer[..length], 1, 1);
        assert!(matches!(more, Err(AnswerError::Requests { found: 2, .. })));
        let surplus = outcome(&buffer[..length], 2, 1);
        assert_eq!(surplus, Err(wrong_tokens(1, 1, 0)));
    }

    #[test]
    fn refusals_are_told_apart() {
        let status = pie_wire::status_frame(0, 2, false);
        assert_eq!(outcome(&status, 1, 1), Err(AnswerError::Status(2)));
        let abort = pie_wire::abort_frame(0);
        assert_eq!(outcome(&abort, 1, 1), Err(AnswerError::Aborted));
    }

    #[test]
    fn an_archive_brings_the_probes() {
        let expected = Probes {
            plan: 7,
            sync: 9,
            ..Probes::default()
        };
        let bytes = archive(&[0, 1], &[5]);
        let probes = read(&bytes, 1, 1, &mut Vec::new()).unwrap();
        assert_eq!(probes, Some(expected));
    }
}
