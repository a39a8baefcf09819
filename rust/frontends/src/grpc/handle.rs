//! A request on its way to its client.

use std::future;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::grpc::core::{Core, SubmittedRequest};
use crate::grpc::generate_params::GenerateParams;
use crate::grpc::logprobs::{OutputLogprobs, Reader, Words};
use crate::grpc::queue::{Counts, Part};
use crate::grpc::status::{self, Matched, Outcome, shut_down};

/// What one message of an answer says.
#[derive(Debug)]
pub(crate) enum Answer {
    /// New tokens of a sequence.
    Tokens {
        sample: u32,
        tokens: Vec<u32>,
        counts: Counts,
        scores: OutputLogprobs,
    },
    /// The end of a sequence.
    End {
        sample: u32,
        /// All of them.
        tokens: Vec<u32>,
        counts: Counts,
        scores: OutputLogprobs,
        reason: &'static str,
        matched: Matched,
    },
}

/// A request that has not ended for its client. Dropped before that, as on a client disconnect, it is aborted.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    core: Arc<Core>,
    request: SubmittedRequest,
    /// Whether something has come of it.
    has_begun: bool,
    /// Whether nothing more comes of it.
    has_ended: bool,
}

impl StreamHandle {
    /// Reads a request, whose call has this metadata, and hands it in. What takes its time, such as images and the names of what
    /// they show, is done on another thread than the one that sends tokens.
    pub(crate) async fn open(
        core: &Arc<Core>,
        is_slow: bool,
        read: impl FnOnce(&Core) -> Result<GenerateParams, Status> + Send + 'static,
        metadata: MetadataMap,
    ) -> Result<Self, Status> {
        let core = Arc::clone(core);
        let open = move || Self::new(&core, read(&core)?, &metadata);
        if !is_slow {
            return open();
        }
        // A client that goes away drops the handle, which ends its request.
        let opened = tokio::task::spawn_blocking(open).await;
        opened.map_err(|error| Status::internal(error.to_string()))?
    }

    /// Hands a request in, whose call has this metadata.
    fn new(
        core: &Arc<Core>,
        params: GenerateParams,
        metadata: &MetadataMap,
    ) -> Result<Self, Status> {
        Ok(Self {
            request: core.submit(params, metadata)?,
            core: Arc::clone(core),
            has_begun: false,
            has_ended: false,
        })
    }

    /// The next message; `None` after the last one. After an error there is no other.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Answer, Status>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let part = match self.request.queue.take(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(part) => part,
        };
        self.begin();
        Poll::Ready(match part {
            None => {
                self.has_ended = true;
                None
            }
            Some(Part::Tokens {
                sample,
                tokens,
                counts,
                words,
            }) => Some(Ok(Answer::Tokens {
                sample,
                scores: self.scores(&tokens, &words),
                tokens,
                counts,
            })),
            Some(Part::End {
                sample,
                tokens,
                counts,
                words,
                end,
            }) => {
                let is_over = || self.core.trouble().is_some();
                match status::outcome(&end, &self.request.stops, is_over) {
                    Outcome::Finished { reason, matched } => Some(Ok(Answer::End {
                        sample,
                        scores: self.scores(&tokens, &words),
                        tokens,
                        counts,
                        reason,
                        matched,
                    })),
                    Outcome::Failed(status) => Some(Err(self.fail(status))),
                }
            }
        })
    }

    fn scores(&self, tokens: &[u32], words: &Words) -> OutputLogprobs {
        let reader: Option<&Reader> = self.request.logprobs.as_ref();
        reader.map_or_else(OutputLogprobs::default, |reader| reader.read(tokens, words))
    }

    /// An answer cannot be had in parts: the other sequences end, too.
    fn fail(&mut self, status: Status) -> Status {
        self.core.close(self.request.id, &self.request.name, false);
        self.has_ended = true;
        status
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.core.begun(self.request.prompt_tokens);
        }
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.begin();
        self.core
            .close(self.request.id, &self.request.name, self.has_ended);
    }
}

/// Messages of one contract.
pub(crate) trait Wording: Send + 'static {
    /// The contract's message.
    type Message: Send + 'static;
    /// Says it.
    fn say(answer: Answer, prompt_tokens: u32) -> Self::Message;
}

/// The messages of an answer, as a contract has them.
#[derive(Debug)]
pub(crate) struct Answers<W> {
    handle: StreamHandle,
    /// The first message, once it was waited for.
    first: Option<Answer>,
    wording: std::marker::PhantomData<fn() -> W>,
}

impl<W: Wording> Answers<W> {
    /// Waits for the first message. What is refused has none: the call fails, before anything was answered.
    pub(crate) async fn begin(mut handle: StreamHandle) -> Result<Self, Status> {
        let first = future::poll_fn(|context| handle.poll(context)).await;
        Ok(Self {
            handle,
            first: Some(first.unwrap_or_else(|| Err(shut_down()))?),
            wording: std::marker::PhantomData,
        })
    }
}

impl<W: Wording> Stream for Answers<W> {
    type Item = Result<W::Message, Status>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let tokens = this.handle.request.prompt_tokens;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(W::say(first, tokens))));
        }
        let next = this.handle.poll(context);
        next.map(|next| next.map(|answer| answer.map(|answer| W::say(answer, tokens))))
    }
}
