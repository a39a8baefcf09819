//! What requests have brought forth and no caller has fetched yet.

use std::borrow::Cow;
use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pie_scheduler::{Finish, KvEvent, Output, ValidationError};

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It has as many tokens as it may.
    Length,
    /// Its last token is this stop token.
    StopToken(u32),
    /// Its text has a stop string.
    StopString {
        /// Which of the request's.
        index: u32,
        /// Bytes of the output's text before it begins.
        text_bytes: u64,
    },
    /// Its text has a match of a stop expression.
    StopRegex {
        /// Which of the request's.
        index: u32,
    },
    /// By [`Service::abort`](crate::Service::abort), or because the service was shut down.
    Aborted,
    /// The same, while its grammar was being compiled.
    Unready,
    /// Its deadline passed.
    Deadline,
    /// It cannot be served as it is, or not now.
    Refused(ValidationError),
    /// The queue was full, and a request of better priority took its place.
    Displaced,
    /// Its grammar cannot be used, or cannot be followed any further.
    Grammar(Arc<str>),
    /// Nothing is wrong with its grammar, and it cannot be compiled now.
    Busy(Arc<str>),
    /// It can be served no longer.
    Failed(Arc<str>),
}

impl End {
    /// What happened, with the remedy, where the request did not come to its end by itself.
    pub fn reason(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Refused(refusal) => Some(refusal.to_string().into()),
            Self::Displaced => Some(
                "the queue was full, and a request of better priority took its place\n\n\
                 hint: raise max_queued_requests"
                    .into(),
            ),
            Self::Failed(reason) | Self::Grammar(reason) | Self::Busy(reason) => {
                Some((&**reason).into())
            }
            _ => None,
        }
    }
}

/// What is new of one sequence since it was fetched last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// What [`Service::submit`](crate::Service::submit) returned.
    pub request: u64,
    /// Which of its sequences, from 0.
    pub sample: u32,
    /// Tokens that follow those of earlier outputs.
    pub tokens: Vec<u32>,
    /// Log-probabilities of tokens of the prompt, which come once, as [`LogprobShape`](pie_wire::LogprobShape) reads them.
    pub prompt_logprobs: Vec<u32>,
    /// Those of `tokens`; of a request for no token those of the one that would come first.
    pub logprobs: Vec<u32>,
    /// That token, which is not among `tokens`.
    pub scored: Option<u32>,
    /// Bytes at the end of its text that may be the start of a stop string.
    pub held_bytes: u32,
    /// Set in its last output.
    pub end: Option<End>,
    /// Tokens of the prompt whose KV was there.
    pub cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub loaded_tokens: u32,
    /// When it was first admitted, in µs since the service began.
    pub admitted: Option<u64>,
    /// When the step was answered that gave its first token, in µs since the service began.
    pub first_token: Option<u64>,
    /// How often its pages were taken from it.
    pub retractions: u32,
}

impl Delta {
    /// A sequence that ends without any token.
    pub const fn ended(request: u64, sample: u32, end: End) -> Self {
        Self {
            request,
            sample,
            tokens: Vec::new(),
            prompt_logprobs: Vec::new(),
            logprobs: Vec::new(),
            scored: None,
            held_bytes: 0,
            end: Some(end),
            cached_tokens: 0,
            loaded_tokens: 0,
            admitted: None,
            first_token: None,
            retractions: 0,
        }
    }
}

/// What came of the requests, and of the prefix indices, since the last one. Reuse one, so that its room is used again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// What is new of sequences, each once.
    pub deltas: Vec<Delta>,
    /// The number of a replica, and what changed in its prefix index; in their order. None unless
    /// [`Config::kv_events`](crate::Config::kv_events).
    pub events: Vec<(usize, KvEvent)>,
}

/// A queue in which outputs of one sequence become one: it is never longer than there are sequences.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    deltas: Vec<Delta>,
    events: Vec<(usize, KvEvent)>,
    places: HashMap<(u64, u32), usize>,
    /// Threads that wait for outputs.
    waiting: usize,
    /// A task that waits for them.
    waker: Option<Waker>,
    closed: bool,
}

impl Outbox {
    /// Adds what a scheduler gave out; `end` says what its ends mean.
    pub(crate) fn extend<'a>(
        &self,
        outputs: impl Iterator<Item = Output<'a>>,
        end: impl Fn(Finish, Option<&str>) -> End,
    ) {
        let mut queue = self.lock();
        for output in outputs {
            let delta = queue.at(output.id, output.sample);
            delta.tokens.extend_from_slice(output.tokens);
            let words = output.prompt_logprobs;
            delta.prompt_logprobs.extend_from_slice(words);
            delta.logprobs.extend_from_slice(output.logprobs);
            delta.scored = output.scored;
            delta.held_bytes = output.held_bytes;
            delta.end = output.finish.map(|finish| end(finish, output.reason));
            delta.cached_tokens = output.cached_tokens;
            delta.loaded_tokens = output.loaded_tokens;
            delta.admitted = output.admitted;
            delta.first_token = output.first_token;
            delta.retractions = output.retractions;
        }
        self.wake(queue);
    }

    /// Adds changes of a replica's prefix index.
    pub(crate) fn record(&self, replica: usize, events: Vec<KvEvent>) {
        let mut queue = self.lock();
        let events = events.into_iter().map(|event| (replica, event));
        queue.events.extend(events);
        self.wake(queue);
    }

    /// Adds the end of a sequence that no scheduler has.
    pub(crate) fn push(&self, ended: Delta) {
        let mut queue = self.lock();
        let end = ended.end;
        queue.at(ended.request, ended.sample).end = end;
        self.wake(queue);
    }

    /// Everything there is, once there is something; nothing after `limit`, or when the outbox is closed.
    pub(crate) fn take(&self, limit: Duration) -> Vec<Delta> {
        let until = Instant::now().checked_add(limit);
        let mut queue = self.lock();
        while queue.deltas.is_empty() && !queue.closed {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                break;
            }
            queue.waiting += 1;
            let (woken, _) = self
                .filled
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.waiting -= 1;
        }
        queue.places.clear();
        queue.events.clear();
        mem::take(&mut queue.deltas)
    }

    /// Moves everything there is into `batch`, whose content is dropped, once there is something. False when the outbox is
    /// closed and nothing is left.
    pub(crate) fn poll(&self, context: &mut Context<'_>, batch: &mut Batch) -> Poll<bool> {
        let mut queue = self.lock();
        if queue.deltas.is_empty() && queue.events.is_empty() {
            if queue.closed {
                return Poll::Ready(false);
            }
            match &mut queue.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        queue.places.clear();
        batch.deltas.clear();
        batch.events.clear();
        mem::swap(&mut queue.deltas, &mut batch.deltas);
        mem::swap(&mut queue.events, &mut batch.events);
        Poll::Ready(true)
    }

    /// Ends every wait, from now on.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        let waker = queue.waker.take();
        drop(queue);
        self.filled.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Wakes who waits, without the lock, which they take first.
    fn wake(&self, mut queue: MutexGuard<'_, Queue>) {
        let filled = !queue.deltas.is_empty();
        // To notify takes a system call, even if no thread waits.
        let has_waiting = queue.waiting > 0 && filled;
        let is_new = filled || !queue.events.is_empty();
        let waker = is_new.then(|| queue.waker.take()).flatten();
        drop(queue);
        if has_waiting {
            self.filled.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn at(&mut self, request: u64, sample: u32) -> &mut Delta {
        let next = self.deltas.len();
        let place = *self.places.entry((request, sample)).or_insert(next);
        if place == next {
            self.deltas.push(Delta {
                end: None,
                ..Delta::ended(request, sample, End::Aborted)
            });
        }
        &mut self.deltas[place]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;

    use super::*;

    fn failed(request: u64) -> Delta {
        Delta::ended(request, 0, End::Failed("why".into()))
    }

    #[test]
    fn outputs_of_one_sequence_become_one() {
        let outbox = Outbox::default();
        let output = |id, sample, tokens, finish| Output {
            id,
            sample,
            tokens,
            prompt_logprobs: &[],
            logprobs: &[],
            scored: None,
            held_bytes: 2,
            finish,
            reason: None,
            cached_tokens: 3,
            loaded_tokens: 1,
            admitted: Some(9),
            first_token: Some(11),
            retractions: 0,
        };
        let end = |finish, _: Option<&str>| match finish {
            Finish::Length => End::Length,
            other => panic!("{other:?}"),
        };
        let first: [Output<'_>; 2] = [output(1, 0, &[5], None), output(1, 1, &[6], None)];
        outbox.extend(first.into_iter(), end);
        let second = [output(1, 0, &[7, 8], Some(Finish::Length))];
        outbox.extend(second.into_iter(), end);
        let taken = outbox.take(Duration::ZERO);
        assert_eq!(taken.len(), 2);
        assert_eq!(
            (&taken[0].tokens[..], &taken[0].end),
            (&[5, 7, 8][..], &Some(End::Length))
        );
        assert_eq!((&taken[1].tokens[..], &taken[1].end), (&[6][..], &None));
        assert_eq!((taken[1].held_bytes, taken[1].cached_tokens), (2, 3));
        assert!(outbox.take(Duration::ZERO).is_empty());
        outbox.extend([output(1, 1, &[9], None)].into_iter(), end);
        assert_eq!(outbox.take(Duration::ZERO)[0].tokens, [9]);
    }

    #[test]
    fn a_waiting_thread_is_woken_by_outputs_and_by_the_end() {
        let outbox = Outbox::default();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let first = outbox.take(Duration::MAX);
                (first, outbox.take(Duration::MAX))
            });
            while outbox.lock().waiting == 0 {
                thread::yield_now();
            }
            outbox.push(failed(4));
            while outbox.lock().waiting == 0 {
                thread::yield_now();
            }
            outbox.close();
            assert_eq!(waiter.join().unwrap(), (vec![failed(4)], vec![]));
        });
        // What comes after the end is still there on request.
        outbox.push(failed(5));
        assert_eq!(outbox.take(Duration::MAX), [failed(5)]);
    }

    /// Counts how often it was woken.
    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_waiting_task_is_woken_once_by_whatever_comes() {
        let outbox = Outbox::default();
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(Arc::clone(&bell));
        let mut context = Context::from_waker(&waker);
        let mut batch = Batch::default();
        let rings = || bell.0.load(Ordering::Relaxed);
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Pending);
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Pending);
        outbox.push(failed(1));
        outbox.push(failed(2));
        assert_eq!(rings(), 1);
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Ready(true));
        assert_eq!(batch.deltas, [failed(1), failed(2)]);
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Pending);
        outbox.record(3, vec![KvEvent::Cleared]);
        assert_eq!(rings(), 2);
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Ready(true));
        let events = vec![(3, KvEvent::Cleared)];
        let deltas = Vec::new();
        assert_eq!(batch, Batch { deltas, events });
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Pending);
        outbox.close();
        assert_eq!(rings(), 3);
        // What comes after the end is still there on request.
        outbox.push(failed(4));
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Ready(true));
        assert_eq!(outbox.poll(&mut context, &mut batch), Poll::Ready(false));
    }
}
