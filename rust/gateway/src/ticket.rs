//! A request on its way to its client.

use std::future;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use tonic::Status;

use crate::core::Core;
use crate::mailbox::{Counts, Mailbox, Part};
use crate::status::{self, Asked, Matched, Outcome, shut_down};

/// What one message of an answer says.
#[derive(Debug)]
pub(crate) enum Answer {
    /// New tokens of a sequence.
    Tokens {
        sample: u32,
        tokens: Vec<u32>,
        counts: Counts,
    },
    /// The end of a sequence.
    End {
        sample: u32,
        /// All of them.
        tokens: Vec<u32>,
        counts: Counts,
        reason: &'static str,
        matched: Matched,
    },
}

/// A request that has not ended for its client. Dropped before that, as where the client has gone, it ends.
#[derive(Debug)]
pub(crate) struct Ticket {
    core: Arc<Core>,
    id: u64,
    name: String,
    mailbox: Arc<Mailbox>,
    pub(crate) prompt_tokens: u32,
    stops: Vec<Box<[u8]>>,
    is_bound: bool,
    /// Whether something has come of it.
    has_begun: bool,
    /// Whether nothing more comes of it.
    has_ended: bool,
}

impl Ticket {
    pub(crate) fn new(
        core: Arc<Core>,
        id: u64,
        name: String,
        mailbox: Arc<Mailbox>,
        prompt_tokens: u32,
        stops: Vec<Box<[u8]>>,
        is_bound: bool,
    ) -> Self {
        Self {
            core,
            id,
            name,
            mailbox,
            prompt_tokens,
            stops,
            is_bound,
            has_begun: false,
            has_ended: false,
        }
    }

    /// The next message; `None` after the last one. After an error there is no other.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Answer, Status>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let part = match self.mailbox.take(context) {
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
            }) => Some(Ok(Answer::Tokens {
                sample,
                tokens,
                counts,
            })),
            Some(Part::End {
                sample,
                tokens,
                counts,
                end,
            }) => {
                let asked = Asked {
                    stops: &self.stops,
                    is_bound: self.is_bound,
                    is_over: &|| self.core.trouble().is_some(),
                };
                match status::outcome(&end, counts.tokens > 0, asked) {
                    Outcome::Finished { reason, matched } => Some(Ok(Answer::End {
                        sample,
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

    /// An answer cannot be had in parts: the other sequences end, too.
    fn fail(&mut self, status: Status) -> Status {
        self.core.close(self.id, &self.name, false);
        self.has_ended = true;
        status
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.core.begun(self.prompt_tokens);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.begin();
        self.core.close(self.id, &self.name, self.has_ended);
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
    ticket: Ticket,
    /// The first message, once it was waited for.
    first: Option<Answer>,
    wording: std::marker::PhantomData<fn() -> W>,
}

impl<W: Wording> Answers<W> {
    /// Waits for the first message. What is refused has none: the call fails, before anything was answered.
    pub(crate) async fn begin(mut ticket: Ticket) -> Result<Self, Status> {
        let first = future::poll_fn(|context| ticket.poll(context)).await;
        Ok(Self {
            ticket,
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
        let tokens = this.ticket.prompt_tokens;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(W::say(first, tokens))));
        }
        let next = this.ticket.poll(context);
        next.map(|next| next.map(|answer| answer.map(|answer| W::say(answer, tokens))))
    }
}
