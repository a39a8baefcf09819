//! Reading the driver's answers.

use std::ops::Range;

use pie_wire::{
    ArchivedForwardResponse, ArchivedResponsePayload, LogprobShape, NativeSlice, PromptLogprobs,
    Reply, RequestExtension, ResponseExtension, WireError,
};
use serde::Serialize;

use crate::error::{AnswerError, RuntimeError};

/// The driver's own times of a batch in µs, which only an archive carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Probes {
    /// Checking the request.
    pub parse: u32,
    /// Planning the batch.
    pub plan: u32,
    /// Copying to the device.
    pub h2d: u32,
    /// Launching the work.
    pub launch: u32,
    /// Waiting for the device.
    pub sync: u32,
    /// Building the answer.
    pub respond: u32,
}

/// What one request of a frame asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Whether it has a sampler.
    pub samples: bool,
    /// To be verified.
    pub drafts: &'a [u32],
    /// Whether drafts for the next frame are welcome.
    pub wants_drafts: bool,
    /// Position after its last token.
    pub end: u32,
    /// Which log-probabilities it wants.
    pub scored: Scored,
}

/// Log-probabilities that a request wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scored {
    /// Of each token; `None`: it wants none.
    shape: Option<LogprobShape>,
    /// Tokens of the prompt.
    prompt: u32,
}

impl Scored {
    /// What is answered to parameters, if they want some, with those of the prompt.
    pub(crate) fn of(asked: &RequestExtension, prompt: Option<PromptLogprobs>) -> Option<Self> {
        let asked = asked.logprobs.as_ref()?;
        let shape = LogprobShape {
            top: asked.top,
            given: asked.token_ids.len() as u32,
        };
        let prompt = prompt.map_or(0, |prompt| prompt.end - prompt.from);
        Some(Self {
            shape: Some(shape),
            prompt,
        })
    }
}

impl Asked<'_> {
    /// By a request without drafts, whose position does not matter: nothing may be drafted after it.
    pub(crate) const fn plainly(samples: bool) -> Self {
        Self {
            samples,
            drafts: &[],
            wants_drafts: false,
            end: 0,
            scored: Scored {
                shape: None,
                prompt: 0,
            },
        }
    }
}

/// What the requests of a frame were answered, in buffers that are used again.
#[derive(Debug, Default)]
pub struct Answer {
    /// Of all requests.
    tokens: Vec<u32>,
    token_ends: Vec<u32>,
    drafts: Vec<u32>,
    /// Empty when no request has drafts.
    draft_ends: Vec<u32>,
    /// Words of log-probabilities.
    logprobs: Vec<u32>,
    /// Empty when no request has some.
    logprob_ends: Vec<u32>,
}

impl Answer {
    /// The tokens of all requests. Without drafts each one that samples has one.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The same, as a scheduler takes it.
    pub fn as_sched(&self) -> pie_scheduler::StepOutput<'_> {
        let part = |ends: &[u32]| ends.last().map_or(0, |&end| end as usize);
        pie_scheduler::StepOutput {
            tokens: &self.tokens[..part(&self.token_ends)],
            token_ends: &self.token_ends,
            drafts: &self.drafts[..part(&self.draft_ends)],
            draft_ends: &self.draft_ends,
            logprobs: &self.logprobs,
            logprob_ends: &self.logprob_ends,
            copies_us: 0,
        }
    }

    /// The last token of a request, if it has one.
    pub(crate) fn last_of(&self, request: usize) -> Option<u32> {
        let end = *self.token_ends.get(request + 1)? as usize;
        let start = self.token_ends[request] as usize;
        self.tokens[start..end].last().copied()
    }

    /// A request's tokens: the drafts that were accepted, and one more.
    ///
    /// # Panics
    /// If the frame had no such request.
    pub fn tokens_of(&self, request: usize) -> &[u32] {
        &self.tokens[range(&self.token_ends, request)]
    }

    /// What is drafted after a request's tokens.
    ///
    /// # Panics
    /// If the frame had no such request.
    pub fn drafts_of(&self, request: usize) -> &[u32] {
        if self.draft_ends.is_empty() {
            return &[];
        }
        &self.drafts[range(&self.draft_ends, request)]
    }

    /// Reads and checks what was answered to a frame of requests that `asked` so; those that sample come first. A request
    /// without any token is one that the driver could not serve. `None` for the fast reply, which has no probes.
    ///
    /// # Errors
    /// [`RuntimeError::Wire`], [`RuntimeError::Answer`].
    pub fn read<'a>(
        &mut self,
        bytes: &[u8],
        asked: impl Iterator<Item = Asked<'a>> + Clone,
    ) -> Result<Option<Probes>, RuntimeError> {
        for array in [
            &mut self.tokens,
            &mut self.token_ends,
            &mut self.drafts,
            &mut self.draft_ends,
            &mut self.logprobs,
            &mut self.logprob_ends,
        ] {
            array.clear();
        }
        let (bytes, extension) = pie_wire::split_response(bytes).map_err(WireError::from)?;
        let requests = asked.clone().count();
        match pie_wire::decode_reply(bytes)? {
            Reply::Tokens(reply) => {
                check_requests(reply.len(), requests)?;
                self.tokens.extend(reply.iter());
                self.token_ends.extend(0..=requests as u32);
                self.check_tokens(asked.clone())?;
                self.read_logprobs(&extension, asked)?;
                Ok(None)
            }
            Reply::Frame(frame) if frame.aborted => Err(AnswerError::Aborted.into()),
            Reply::Frame(frame) => match &frame.payload {
                ArchivedResponsePayload::Status(status) => {
                    Err(AnswerError::Status(status.status.to_native()).into())
                }
                ArchivedResponsePayload::Forward(forward) => {
                    check_requests(forward.num_requests.to_native() as usize, requests)?;
                    self.read_tokens(forward, requests)?;
                    self.check_tokens(asked.clone())?;
                    self.read_logprobs(&extension, asked.clone())?;
                    self.read_drafts(forward, asked)?;
                    Ok(Some(probes(forward)))
                }
            },
        }
    }

    fn read_tokens(
        &mut self,
        forward: &ArchivedForwardResponse,
        requests: usize,
    ) -> Result<(), AnswerError> {
        self.token_ends.extend(forward.tokens_indptr.native());
        self.tokens.extend(forward.tokens.native());
        check_ends(&self.token_ends, requests, self.tokens.len())
    }

    /// Checks that no request was answered with nothing that asked for a token.
    ///
    /// # Errors
    /// [`AnswerError::Tokens`].
    pub fn check_served<'a>(
        &self,
        asked: impl Iterator<Item = Asked<'a>>,
    ) -> Result<(), AnswerError> {
        let mut asked = asked.enumerate();
        let emptied =
            asked.find(|&(request, asked)| asked.samples && self.tokens_of(request).is_empty());
        emptied.map_or(Ok(()), |(request, _)| Err(wrong_tokens(request, 0, 1)))
    }

    /// One token for each request that samples; with drafts, those that were accepted before it.
    fn check_tokens<'a>(&self, asked: impl Iterator<Item = Asked<'a>>) -> Result<(), AnswerError> {
        for (request, asked) in asked.enumerate() {
            let found = self.tokens_of(request);
            let expected = usize::from(asked.samples);
            if found.is_empty() {
                continue;
            }
            if !(expected..=expected + asked.drafts.len()).contains(&found.len()) {
                return Err(wrong_tokens(request, found.len(), expected));
            }
            let accepted = found.len() - expected;
            if found[..accepted] != asked.drafts[..accepted] {
                return Err(AnswerError::Accepted(request));
            }
        }
        Ok(())
    }

    /// Those of each request are as many as it wants, or none if it could not be served.
    fn read_logprobs<'a>(
        &mut self,
        extension: &ResponseExtension<'_>,
        asked: impl Iterator<Item = Asked<'a>>,
    ) -> Result<(), AnswerError> {
        let mut rows = extension.rows().peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        self.logprob_ends.push(0);
        for (request, asked) in asked.enumerate() {
            if let Some(row) = rows.next_if(|row| row.request() as usize == request) {
                let places = (asked.scored.prompt, self.tokens_of(request).len() as u32);
                if Some(row.shape()) != asked.scored.shape || row.position_counts() != places {
                    return Err(AnswerError::Logprobs(request));
                }
                self.logprobs.extend(row.words());
            }
            self.logprob_ends.push(self.logprobs.len() as u32);
        }
        match rows.next() {
            Some(row) => Err(AnswerError::Logprobs(row.request() as usize)),
            None => Ok(()),
        }
    }

    fn read_drafts<'a>(
        &mut self,
        forward: &ArchivedForwardResponse,
        asked: impl Iterator<Item = Asked<'a>>,
    ) -> Result<(), AnswerError> {
        let positions = forward.spec_positions.native();
        self.drafts.extend(forward.spec_tokens.native());
        if self.drafts.is_empty() {
            return Ok(());
        }
        let requests = self.token_ends.len() - 1;
        self.draft_ends.extend(forward.spec_indptr.native());
        check_ends(
            &self.draft_ends,
            requests,
            self.drafts.len().min(positions.len()),
        )?;
        for (request, asked) in asked.enumerate() {
            let range = range(&self.draft_ends, request);
            // The last token of the answer stands between.
            let first = asked.end + self.tokens_of(request).len() as u32;
            let follow = (first..).zip(&positions[range.clone()]);
            if !follow
                .into_iter()
                .all(|(expected, &found)| expected == found)
                || !(asked.wants_drafts || range.is_empty())
            {
                return Err(AnswerError::Drafts {
                    request,
                    drafts: range.len(),
                });
            }
        }
        Ok(())
    }
}

fn range(ends: &[u32], request: usize) -> Range<usize> {
    ends[request] as usize..ends[request + 1] as usize
}

/// Offsets of `requests` ranges within `length` entries.
fn check_ends(ends: &[u32], requests: usize, length: usize) -> Result<(), AnswerError> {
    let within = ends.last().is_some_and(|&end| end as usize <= length);
    if ends.len() != requests + 1 || !ends.is_sorted() || !within {
        return Err(AnswerError::Offsets);
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

    /// By a decode at position 9.
    const TOKEN: Asked<'_> = Asked {
        samples: true,
        drafts: &[],
        wants_drafts: false,
        end: 10,
        scored: Scored {
            shape: None,
            prompt: 0,
        },
    };

    fn asked(requests: usize, sampled: usize) -> impl Iterator<Item = Asked<'static>> + Clone {
        (0..requests).map(move |request| Asked {
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

    fn outcome(bytes: &[u8], requests: usize, sampled: usize) -> Result<Vec<u32>, AnswerError> {
        let mut answer = Answer::default();
        answer.tokens.push(99);
        match answer.read(bytes, asked(requests, sampled)) {
            Ok(_) => {
                answer.check_served(asked(requests, sampled))?;
                Ok(answer.tokens)
            }
            Err(RuntimeError::Answer(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn every_request_must_have_its_token() {
        assert_eq!(outcome(&archive(&[0, 1, 2], &[5, 6]), 2, 2), Ok(vec![5, 6]));
        assert_eq!(outcome(&archive(&[0, 1, 1], &[5]), 2, 1), Ok(vec![5]));
        let emptied = outcome(&archive(&[0, 1, 1], &[5]), 2, 2);
        assert_eq!(emptied, Err(wrong_tokens(1, 0, 1)));
        let mut answer = Answer::default();
        answer
            .read(&archive(&[0, 1, 1], &[5]), asked(2, 2))
            .unwrap();
        assert_eq!(
            [0, 1].map(|request| answer.last_of(request)),
            [Some(5), None]
        );
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
        let probes = Answer::default().read(&bytes, asked(1, 1)).unwrap();
        assert_eq!(probes, Some(expected));
    }

    /// Two requests of the worked example of the protocol: both ask, the first had four drafts.
    fn drafted(response: ForwardResponse) -> Result<Answer, AnswerError> {
        let asks = Asked {
            wants_drafts: true,
            ..TOKEN
        };
        let verifies = Asked {
            drafts: &[40, 41, 42, 43],
            ..asks
        };
        let mut answer = Answer::default();
        match answer.read(&encoded(response), [verifies, asks, TOKEN].into_iter()) {
            Ok(_) => Ok(answer),
            Err(RuntimeError::Answer(error)) => Err(error),
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
        let answer = drafted(right.clone()).unwrap();
        assert_eq!(
            [0, 1, 2].map(|request| answer.tokens_of(request)),
            [&[40, 41, 5][..], &[6], &[7]]
        );
        assert_eq!(
            [0, 1, 2].map(|request| answer.drafts_of(request)),
            [&[50, 51][..], &[60], &[]]
        );

        let none = drafted(response(&[0, 1, 2, 3], &[5, 6, 7])).unwrap();
        assert_eq!(
            [0, 1, 2].map(|request| none.drafts_of(request).len()),
            [0; 3]
        );

        let wrong = |change: fn(&mut ForwardResponse)| {
            let mut response = right.clone();
            change(&mut response);
            drafted(response).unwrap_err()
        };
        assert_eq!(wrong(|of| of.tokens[1] = 42), AnswerError::Accepted(0));
        let misplaced = |request, drafts| AnswerError::Drafts { request, drafts };
        assert_eq!(wrong(|of| of.spec_positions[1] = 15), misplaced(0, 2));
        assert_eq!(wrong(|of| of.spec_positions[2] = 10), misplaced(1, 1));
        assert_eq!(
            wrong(|of| of.spec_indptr = vec![0, 2, 2, 3]),
            misplaced(2, 1)
        );
        assert_eq!(
            wrong(|of| of.spec_indptr = vec![0, 2, 3]),
            AnswerError::Offsets
        );
        assert_eq!(
            wrong(|of| of.spec_indptr = vec![0, 3, 2, 3]),
            AnswerError::Offsets
        );
        assert_eq!(
            wrong(|of| of.spec_positions.truncate(2)),
            AnswerError::Offsets
        );
        // Six tokens for four drafts.
        let surplus = response(&[0, 6, 7, 8], &[40, 41, 42, 43, 44, 45, 6, 7]);
        assert_eq!(drafted(surplus).unwrap_err(), wrong_tokens(0, 6, 1));
    }
}
