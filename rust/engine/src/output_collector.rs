//! Outputs that no caller has fetched yet, merged by sequence.

use std::borrow::Cow;
use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pie_scheduler::{Finish, KvEvent, Output, ValidationError, WeightVersionEvent};

/// Why a sequence finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It reached its token limit.
    Length,
    /// It generated this stop token.
    StopToken(u32),
    /// It generated a stop string.
    StopString {
        /// Index in the request.
        index: u32,
        /// Bytes of the output text before it.
        text_bytes: u64,
    },
    /// Its text matches a stop regex.
    StopRegex {
        /// Index in the request.
        index: u32,
    },
    /// By [`Service::abort`](crate::Service::abort), or because the service was shut down.
    Aborted,
    /// The same, while its grammar was compiled.
    Unready,
    /// Its deadline passed.
    Deadline,
    /// The scheduler refused it.
    Refused(ValidationError),
    /// The queue was full, and a request of better priority took its place.
    Displaced,
    /// Its grammar is invalid, or its output cannot match any more.
    Grammar(Arc<str>),
    /// Its custom logit processor failed.
    Processor(Arc<str>),
    /// Its grammar cannot be compiled now.
    Busy(Arc<str>),
    /// The driver failed.
    Failed(Arc<str>),
}

impl FinishReason {
    /// Whether the sequence ended at its length or a stop criterion; not where it was aborted, rejected or failed.
    pub const fn is_complete(&self) -> bool {
        match self {
            Self::Length
            | Self::StopToken(_)
            | Self::StopString { .. }
            | Self::StopRegex { .. } => true,
            Self::Aborted
            | Self::Unready
            | Self::Deadline
            | Self::Refused(_)
            | Self::Displaced
            | Self::Grammar(_)
            | Self::Processor(_)
            | Self::Busy(_)
            | Self::Failed(_) => false,
        }
    }

    /// The error message with its hint, where the request failed.
    pub fn message(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Refused(refusal) => Some(refusal.to_string().into()),
            Self::Displaced => Some(
                "the queue was full, and a request of better priority took its place\n\n\
                 hint: raise max_queued_requests"
                    .into(),
            ),
            Self::Failed(reason)
            | Self::Grammar(reason)
            | Self::Processor(reason)
            | Self::Busy(reason) => Some((&**reason).into()),
            _ => None,
        }
    }
}

/// New output of one sequence since the last one was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputDelta {
    /// The id that [`Service::submit`](crate::Service::submit) returned.
    pub request: u64,
    /// The index of the sequence, from 0 to `n - 1`.
    pub sample: u32,
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Log-probabilities of prompt tokens, returned once, for [`LogprobShape`](pie_wire::LogprobShape) to read.
    pub prompt_logprobs: Vec<u32>,
    /// Those of `tokens`; with `max_tokens` 0 those of the token that would come first, or the pooled row of an embedding model.
    pub logprobs: Vec<u32>,
    /// That token.
    pub scored: Option<u32>,
    /// Bytes at the end of the text that may begin a stop string.
    pub held_bytes: u32,
    /// Set in the last output.
    pub finish: Option<FinishReason>,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Those of them that were loaded from host memory.
    pub loaded_tokens: u32,
    /// First admission, in µs since the service started.
    pub admitted: Option<u64>,
    /// End of the step of the first token, in µs since the service started.
    pub first_token: Option<u64>,
    /// How often it was retracted.
    pub retractions: u32,
    /// The weight version of [`Service::set_weight_version`](crate::Service::set_weight_version), as of this output; `None` if its
    /// scheduler did not write it.
    pub weight_version: Option<u32>,
    /// In the last output, the changes of that version since its first token, in order.
    pub weight_events: Vec<WeightVersionEvent>,
}

impl OutputDelta {
    /// A sequence that finishes without a new token.
    pub const fn finished(request: u64, sample: u32, finish: FinishReason) -> Self {
        Self {
            request,
            sample,
            tokens: Vec::new(),
            prompt_logprobs: Vec::new(),
            logprobs: Vec::new(),
            scored: None,
            held_bytes: 0,
            finish: Some(finish),
            cached_tokens: 0,
            loaded_tokens: 0,
            admitted: None,
            first_token: None,
            retractions: 0,
            weight_version: None,
            weight_events: Vec::new(),
        }
    }
}

/// Outputs and prefix index events since the last batch. Reuse one to reuse its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputBatch {
    /// New outputs, one for each sequence.
    pub deltas: Vec<OutputDelta>,
    /// Replicas and changes of their prefix indices, in order; empty unless [`Config::kv_events`](crate::Config::kv_events).
    pub events: Vec<(usize, KvEvent)>,
}

/// A queue of outputs; a new output is merged into one of its sequence that was not fetched yet (as vLLM's `RequestOutputCollector`).
#[derive(Debug, Default)]
pub(crate) struct OutputCollector {
    queue: Mutex<Queue>,
    available: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    deltas: Vec<OutputDelta>,
    events: Vec<(usize, KvEvent)>,
    /// Indices of `deltas` by request and sample.
    indices: HashMap<(u64, u32), usize>,
    /// Threads that wait in `take`.
    waiting: usize,
    /// The task that waits in `poll`.
    waker: Option<Waker>,
    closed: bool,
}

impl OutputCollector {
    /// Adds outputs of a scheduler.
    pub(crate) fn extend<'a>(
        &self,
        outputs: impl Iterator<Item = Output<'a>>,
        finish: impl Fn(Finish, Option<&str>) -> FinishReason,
    ) {
        let mut queue = self.lock();
        for output in outputs {
            let delta = queue.delta_of(output.id, output.sample);
            delta.tokens.extend_from_slice(output.tokens);
            let words = output.prompt_logprobs;
            delta.prompt_logprobs.extend_from_slice(words);
            delta.logprobs.extend_from_slice(output.logprobs);
            delta.scored = output.scored;
            delta.held_bytes = output.held_bytes;
            delta.finish = output.finish.map(|kind| finish(kind, output.reason));
            delta.cached_tokens = output.cached_tokens;
            delta.loaded_tokens = output.loaded_tokens;
            delta.admitted = output.admitted;
            delta.first_token = output.first_token;
            delta.retractions = output.retractions;
            delta.weight_version = Some(output.weight_version);
            delta.weight_events.extend_from_slice(output.weight_events);
        }
        self.wake(queue);
    }

    /// Adds events of a replica's prefix index.
    pub(crate) fn push_events(&self, replica: usize, events: Vec<KvEvent>) {
        let mut queue = self.lock();
        let events = events.into_iter().map(|event| (replica, event));
        queue.events.extend(events);
        self.wake(queue);
    }

    /// Adds the end of a sequence that the scheduler does not have.
    pub(crate) fn push(&self, last: OutputDelta) {
        let mut queue = self.lock();
        queue.delta_of(last.request, last.sample).finish = last.finish;
        self.wake(queue);
    }

    /// Waits for outputs and returns all; none after `limit`, or once closed.
    pub(crate) fn take(&self, limit: Duration) -> Vec<OutputDelta> {
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
                .available
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.waiting -= 1;
        }
        queue.indices.clear();
        queue.events.clear();
        mem::take(&mut queue.deltas)
    }

    /// Moves all outputs and events into `batch`, whose content is dropped, once there are some. False once closed and empty.
    pub(crate) fn poll(&self, context: &mut Context<'_>, batch: &mut OutputBatch) -> Poll<bool> {
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
        queue.indices.clear();
        batch.deltas.clear();
        batch.events.clear();
        mem::swap(&mut queue.deltas, &mut batch.deltas);
        mem::swap(&mut queue.events, &mut batch.events);
        Poll::Ready(true)
    }

    /// Wakes all waiters; from now on nothing waits.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        let waker = queue.waker.take();
        drop(queue);
        self.available.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Wakes the waiters after releasing the lock, which they take first.
    fn wake(&self, mut queue: MutexGuard<'_, Queue>) {
        let filled = !queue.deltas.is_empty();
        // A notification takes a system call, even if no thread waits.
        let has_waiting = queue.waiting > 0 && filled;
        let is_new = filled || !queue.events.is_empty();
        let waker = is_new.then(|| queue.waker.take()).flatten();
        drop(queue);
        if has_waiting {
            self.available.notify_all();
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
    fn delta_of(&mut self, request: u64, sample: u32) -> &mut OutputDelta {
        let next = self.deltas.len();
        let index = *self.indices.entry((request, sample)).or_insert(next);
        if index == next {
            self.deltas.push(OutputDelta {
                finish: None,
                ..OutputDelta::finished(request, sample, FinishReason::Aborted)
            });
        }
        &mut self.deltas[index]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;

    use super::*;

    fn failed(request: u64) -> OutputDelta {
        OutputDelta::finished(request, 0, FinishReason::Failed("why".into()))
    }

    #[test]
    fn outputs_of_one_sequence_are_merged() {
        let collector = OutputCollector::default();
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
            weight_version: 1,
            weight_events: &[],
        };
        let end = |finish, _: Option<&str>| match finish {
            Finish::Length => FinishReason::Length,
            other => panic!("{other:?}"),
        };
        let first: [Output<'_>; 2] = [output(1, 0, &[5], None), output(1, 1, &[6], None)];
        collector.extend(first.into_iter(), end);
        let second = [output(1, 0, &[7, 8], Some(Finish::Length))];
        collector.extend(second.into_iter(), end);
        let taken = collector.take(Duration::ZERO);
        assert_eq!(taken.len(), 2);
        assert_eq!(
            (&taken[0].tokens[..], &taken[0].finish),
            (&[5, 7, 8][..], &Some(FinishReason::Length))
        );
        assert_eq!((&taken[1].tokens[..], &taken[1].finish), (&[6][..], &None));
        assert_eq!((taken[1].held_bytes, taken[1].cached_tokens), (2, 3));
        assert!(collector.take(Duration::ZERO).is_empty());
        collector.extend([output(1, 1, &[9], None)].into_iter(), end);
        assert_eq!(collector.take(Duration::ZERO)[0].tokens, [9]);
    }

    #[test]
    fn a_waiting_thread_is_woken_by_outputs_and_by_the_end() {
        let collector = OutputCollector::default();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let first = collector.take(Duration::MAX);
                (first, collector.take(Duration::MAX))
            });
            while collector.lock().waiting == 0 {
                thread::yield_now();
            }
            collector.push(failed(4));
            while collector.lock().waiting == 0 {
                thread::yield_now();
            }
            collector.close();
            assert_eq!(waiter.join().unwrap(), (vec![failed(4)], vec![]));
        });
        // What comes after the end is still there on request.
        collector.push(failed(5));
        assert_eq!(collector.take(Duration::MAX), [failed(5)]);
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
        let collector = OutputCollector::default();
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(Arc::clone(&bell));
        let mut context = Context::from_waker(&waker);
        let mut batch = OutputBatch::default();
        let rings = || bell.0.load(Ordering::Relaxed);
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Pending);
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Pending);
        collector.push(failed(1));
        collector.push(failed(2));
        assert_eq!(rings(), 1);
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Ready(true));
        assert_eq!(batch.deltas, [failed(1), failed(2)]);
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Pending);
        collector.push_events(3, vec![KvEvent::Cleared]);
        assert_eq!(rings(), 2);
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Ready(true));
        let events = vec![(3, KvEvent::Cleared)];
        let deltas = Vec::new();
        assert_eq!(batch, OutputBatch { deltas, events });
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Pending);
        collector.close();
        assert_eq!(rings(), 3);
        // What comes after the end is still there on request.
        collector.push(failed(4));
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Ready(true));
        assert_eq!(collector.poll(&mut context, &mut batch), Poll::Ready(false));
    }
}
