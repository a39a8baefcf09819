//! Reads and checks the driver's reply to a forward frame.

use std::ops::Range;
use std::sync::Arc;

use pie_wire::{
    ArchivedForwardResponse, ArchivedResponsePayload, LogprobShape, NativeSlice, PromptLogprobs,
    Reply, RequestExtension, ResponseExtension, WireError,
};
use serde::Serialize;

use crate::error::{EngineError, ReplyError};

/// The driver's own times of a batch in µs; only an archive reply has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Probes {
    /// Validating the request.
    pub parse: u32,
    /// Planning the batch.
    pub plan: u32,
    /// Copying to the device.
    pub h2d: u32,
    /// Launching kernels or the graph.
    pub launch: u32,
    /// Waiting for the device.
    pub sync: u32,
    /// Building the reply.
    pub respond: u32,
}

/// What the reply to one request of a frame must hold.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedReply<'a> {
    /// Whether the request has a sampler.
    pub samples: bool,
    /// Draft tokens to verify.
    pub drafts: &'a [u32],
    /// Whether the reply may bring drafts for the next frame.
    pub wants_drafts: bool,
    /// Position after the request's last token.
    pub end: u32,
    /// Its log-probabilities.
    pub logprobs: ExpectedLogprobs,
}

/// Log-probabilities that a reply must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpectedLogprobs {
    /// Of each token; `None` for no log-probabilities.
    shape: Option<LogprobShape>,
    /// Prompt tokens.
    prompt: u32,
}

impl ExpectedLogprobs {
    pub(crate) fn of(params: &RequestExtension, prompt: Option<PromptLogprobs>) -> Option<Self> {
        let params = params.logprobs.as_ref()?;
        let shape = LogprobShape {
            top: params.top,
            given: params.token_ids.len() as u32,
            hidden: params.hidden,
        };
        Some(Self {
            shape: Some(shape),
            prompt: prompt.map_or(0, |prompt| prompt.end - prompt.from),
        })
    }
}

impl ExpectedReply<'_> {
    /// Of a request without drafts, whose position does not matter.
    pub(crate) const fn without_drafts(samples: bool) -> Self {
        Self {
            samples,
            drafts: &[],
            wants_drafts: false,
            end: 0,
            logprobs: ExpectedLogprobs {
                shape: None,
                prompt: 0,
            },
        }
    }
}

/// The reply to one frame, in reused buffers. Each `_ends` array has the offsets of all requests, from 0.
#[derive(Debug, Default)]
pub struct StepReply {
    tokens: Vec<u32>,
    token_ends: Vec<u32>,
    drafts: Vec<u32>,
    /// Empty when no request has drafts.
    draft_ends: Vec<u32>,
    /// Log-probabilities, or the pooled rows of an embedding model.
    logprobs: Vec<u32>,
    /// Empty when no request has log-probabilities.
    logprob_ends: Vec<u32>,
    /// Why requests failed.
    failures: Vec<(u32, Arc<str>)>,
}

impl StepReply {
    /// The tokens of all requests: without drafts one for each that samples.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The same, as the scheduler's type.
    pub fn to_scheduler(&self) -> pie_scheduler::StepOutput<'_> {
        let part = |ends: &[u32]| ends.last().map_or(0, |&end| end as usize);
        pie_scheduler::StepOutput {
            tokens: &self.tokens[..part(&self.token_ends)],
            token_ends: &self.token_ends,
            drafts: &self.drafts[..part(&self.draft_ends)],
            draft_ends: &self.draft_ends,
            logprobs: &self.logprobs,
            logprob_ends: &self.logprob_ends,
            failures: &self.failures,
            copies_us: 0,
        }
    }

    /// The last token of a request, if it has one.
    pub(crate) fn last_of(&self, request: usize) -> Option<u32> {
        let end = *self.token_ends.get(request + 1)? as usize;
        let start = self.token_ends[request] as usize;
        self.tokens[start..end].last().copied()
    }

    /// A request's tokens: the accepted drafts and one more.
    ///
    /// # Panics
    /// If the frame had no such request.
    pub fn tokens_of(&self, request: usize) -> &[u32] {
        &self.tokens[range(&self.token_ends, request)]
    }

    /// Drafts that follow a request's tokens.
    ///
    /// # Panics
    /// If the frame had no such request.
    pub fn drafts_of(&self, request: usize) -> &[u32] {
        if self.draft_ends.is_empty() {
            return &[];
        }
        &self.drafts[range(&self.draft_ends, request)]
    }

    /// Reads a reply and checks it against `expected`, in which requests that sample come first. A request that samples and has
    /// no token was rejected by the driver. Returns `None` for the fast reply, which has no probes.
    ///
    /// # Errors
    /// [`EngineError::Wire`], [`EngineError::Reply`].
    pub fn read<'a>(
        &mut self,
        bytes: &[u8],
        expected: impl Iterator<Item = ExpectedReply<'a>> + Clone,
    ) -> Result<Option<Probes>, EngineError> {
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
        let (bytes, failures) = pie_wire::split_failures(bytes).map_err(WireError::from)?;
        let failures = failures.map(|(request, text)| (request, text.into()));
        self.failures.clear();
        self.failures.extend(failures);
        let (bytes, extension) = pie_wire::split_response(bytes).map_err(WireError::from)?;
        let requests = expected.clone().count();
        match pie_wire::decode_reply(bytes)? {
            Reply::Tokens(reply) => {
                check_requests(reply.len(), requests)?;
                self.tokens.extend(reply.iter());
                self.token_ends.extend(0..=requests as u32);
                self.check_tokens(expected.clone())?;
                self.read_logprobs(&extension, expected)?;
                Ok(None)
            }
            Reply::Frame(frame) if frame.aborted => Err(ReplyError::Aborted.into()),
            Reply::Frame(frame) => match &frame.payload {
                ArchivedResponsePayload::Status(status) => {
                    Err(ReplyError::Status(status.status.to_native()).into())
                }
                ArchivedResponsePayload::Forward(forward) => {
                    check_requests(forward.num_requests.to_native() as usize, requests)?;
                    self.read_tokens(forward, requests)?;
                    self.read_embeddings(forward, requests)?;
                    self.check_tokens(expected.clone())?;
                    self.read_logprobs(&extension, expected.clone())?;
                    self.read_drafts(forward, expected)?;
                    Ok(Some(probes(forward)))
                }
            },
        }
    }

    fn read_tokens(
        &mut self,
        forward: &ArchivedForwardResponse,
        requests: usize,
    ) -> Result<(), ReplyError> {
        self.token_ends.extend(forward.tokens_indptr.native());
        self.tokens.extend(forward.tokens.native());
        check_ends(&self.token_ends, requests, self.tokens.len())
    }

    /// The pooled rows of an embedding model, as words in the place of log-probabilities. The scheduler knows their length, and
    /// takes a token with each: 0.
    fn read_embeddings(
        &mut self,
        forward: &ArchivedForwardResponse,
        requests: usize,
    ) -> Result<(), ReplyError> {
        let row_ends = forward.logits_req_indptr.native();
        if row_ends.is_empty() {
            return Ok(());
        }
        let byte_ends = forward.logits_byte_indptr.native();
        let rows = byte_ends.len().saturating_sub(1);
        check_ends(row_ends, requests, rows)?;
        check_ends(byte_ends, rows, forward.logits_bytes.len())?;
        self.token_ends.clear();
        self.tokens.clear();
        self.token_ends.push(0);
        self.logprob_ends.push(0);
        for request in 0..requests {
            for row in range(row_ends, request) {
                let bytes = &forward.logits_bytes[range(byte_ends, row)];
                let (words, _) = bytes.as_chunks();
                self.logprobs
                    .extend(words.iter().copied().map(u32::from_le_bytes));
                self.tokens.push(0);
            }
            self.token_ends.push(self.tokens.len() as u32);
            self.logprob_ends.push(self.logprobs.len() as u32);
        }
        Ok(())
    }

    /// Checks that the driver rejected no request that samples.
    ///
    /// # Errors
    /// [`ReplyError::Tokens`].
    pub fn check_none_rejected<'a>(
        &self,
        expected: impl Iterator<Item = ExpectedReply<'a>>,
    ) -> Result<(), ReplyError> {
        let rejected = expected
            .enumerate()
            .find(|&(request, expected)| expected.samples && self.tokens_of(request).is_empty());
        rejected.map_or(Ok(()), |(request, _)| Err(token_count(request, 0, 1)))
    }

    /// One token for each request that samples, after its accepted drafts.
    fn check_tokens<'a>(
        &self,
        expected: impl Iterator<Item = ExpectedReply<'a>>,
    ) -> Result<(), ReplyError> {
        for (request, expected) in expected.enumerate() {
            let found = self.tokens_of(request);
            let sampled = usize::from(expected.samples);
            if found.is_empty() {
                continue;
            }
            if !(sampled..=sampled + expected.drafts.len()).contains(&found.len()) {
                return Err(token_count(request, found.len(), sampled));
            }
            let accepted = found.len() - sampled;
            if found[..accepted] != expected.drafts[..accepted] {
                return Err(ReplyError::Accepted(request));
            }
        }
        Ok(())
    }

    /// Each request has as many as it wants, or none if it was rejected.
    fn read_logprobs<'a>(
        &mut self,
        extension: &ResponseExtension<'_>,
        expected: impl Iterator<Item = ExpectedReply<'a>>,
    ) -> Result<(), ReplyError> {
        let mut rows = extension.rows().peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        self.logprob_ends.push(0);
        for (request, expected) in expected.enumerate() {
            if let Some(row) = rows.next_if(|row| row.request() as usize == request) {
                let tokens = self.tokens_of(request).len() as u32;
                let expected = expected.logprobs;
                if Some(row.shape()) != expected.shape
                    || row.position_counts() != (expected.prompt, tokens)
                {
                    return Err(ReplyError::Logprobs(request));
                }
                self.logprobs.extend(row.words());
            }
            self.logprob_ends.push(self.logprobs.len() as u32);
        }
        match rows.next() {
            Some(row) => Err(ReplyError::Logprobs(row.request() as usize)),
            None => Ok(()),
        }
    }

    fn read_drafts<'a>(
        &mut self,
        forward: &ArchivedForwardResponse,
        expected: impl Iterator<Item = ExpectedReply<'a>>,
    ) -> Result<(), ReplyError> {
        let positions = forward.spec_positions.native();
        self.drafts.extend(forward.spec_tokens.native());
        if self.drafts.is_empty() {
            return Ok(());
        }
        let requests = self.token_ends.len() - 1;
        self.draft_ends.extend(forward.spec_indptr.native());
        let drafts = self.drafts.len().min(positions.len());
        check_ends(&self.draft_ends, requests, drafts)?;
        for (request, expected) in expected.enumerate() {
            let range = range(&self.draft_ends, request);
            // Drafts follow the last token of the reply.
            let first = expected.end + self.tokens_of(request).len() as u32;
            let follow = (first..)
                .zip(&positions[range.clone()])
                .all(|(a, &b)| a == b);
            if !follow || !(expected.wants_drafts || range.is_empty()) {
                return Err(ReplyError::Drafts {
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

/// Checks the offsets of `requests` ranges within `length` entries.
fn check_ends(ends: &[u32], requests: usize, length: usize) -> Result<(), ReplyError> {
    let within = ends.last().is_some_and(|&end| end as usize <= length);
    if ends.len() != requests + 1 || !ends.is_sorted() || !within {
        return Err(ReplyError::Offsets);
    }
    Ok(())
}

fn check_requests(found: usize, expected: usize) -> Result<(), ReplyError> {
    if found != expected {
        return Err(ReplyError::Requests { found, expected });
    }
    Ok(())
}

const fn token_count(request: usize, found: usize, expected: usize) -> ReplyError {
    ReplyError::Tokens {
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
mod tests;
