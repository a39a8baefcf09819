//! Changes of the prefix index, numbered, for gateways that send requests where their prefixes are.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_core::Stream;
use pie_engine::{KvEvent, KvMedium};
use prost::Message;
use tonic::Status;

use crate::grpc::contract::common::kv_cache_event::Data;
use crate::grpc::contract::common::{
    KvBlock, KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvCacheEvent, KvCacheLocality,
    KvCacheTier, KvEventBatch,
};

/// Most bytes of the batches that are kept.
const HISTORY_BYTES: usize = 64 << 20;

/// The batches of one replica, of which the last ones are kept.
#[derive(Debug)]
pub(crate) struct KvEventLog {
    /// Batches that are kept; 0 if none are published.
    limit: usize,
    page_size: usize,
    history: Mutex<History>,
}

#[derive(Debug)]
struct History {
    batches: VecDeque<Arc<KvEventBatch>>,
    bytes: usize,
    /// The number of the next batch; the first one has 1.
    next: u64,
    events: u64,
    /// Subscribers that have all batches.
    waiting: Vec<Waker>,
    closed: bool,
}

impl KvEventLog {
    pub(crate) fn new(limit: usize, page_size: u32) -> Self {
        Self {
            limit,
            page_size: page_size as usize,
            history: Mutex::new(History {
                batches: VecDeque::new(),
                bytes: 0,
                next: 1,
                events: 0,
                waiting: Vec::new(),
                closed: false,
            }),
        }
    }

    /// Publishes what changed, as one batch.
    pub(crate) fn append(&self, events: impl Iterator<Item = (usize, KvEvent)>) {
        if self.limit == 0 {
            return;
        }
        let mut history = self.lock();
        let events: Vec<KvCacheEvent> = events
            .map(|(_, event)| {
                history.events += 1;
                KvCacheEvent {
                    event_id: history.events,
                    data: Some(self.data(event)),
                }
            })
            .collect();
        if events.is_empty() {
            return;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let batch = KvEventBatch {
            sequence_number: history.next,
            timestamp: since.unwrap_or_default().as_secs_f64(),
            events,
            ..KvEventBatch::default()
        };
        history.next += 1;
        history.bytes += batch.encoded_len();
        history.batches.push_back(Arc::new(batch));
        while history.batches.len() > self.limit
            || history.bytes > HISTORY_BYTES && history.batches.len() > 1
        {
            let oldest = history.batches.pop_front();
            history.bytes -= oldest.map_or(0, |batch| batch.encoded_len());
        }
        history.waiting.drain(..).for_each(Waker::wake);
    }

    /// The batches after number `cursor`, and then those that come. 0: all, if all are there, or else those that come.
    ///
    /// # Errors
    /// `OUT_OF_RANGE` where those after the cursor are no longer there, or it is of another server.
    pub(crate) fn subscribe(self: &Arc<Self>, cursor: u64) -> Result<Subscription, Status> {
        if self.limit == 0 {
            return Err(Status::unimplemented(
                "events of the prefix index are not published by this server",
            ));
        }
        let history = self.lock();
        let (first, last) = (history.first(), history.next - 1);
        let next = match cursor {
            0 if first == 1 => 1,
            0 => history.next,
            cursor if cursor.saturating_add(1) >= first && cursor <= last => cursor + 1,
            cursor => {
                return Err(Status::out_of_range(format!(
                    "batches {first} to {last} are kept, and those after {cursor} were asked for: subscribe from 0"
                )));
            }
        };
        drop(history);
        Ok(Subscription {
            event_log: Arc::clone(self),
            next,
        })
    }

    /// Ends all subscriptions.
    pub(crate) fn close(&self) {
        let mut history = self.lock();
        history.closed = true;
        history.waiting.drain(..).for_each(Waker::wake);
    }

    fn data(&self, event: KvEvent) -> Data {
        match event {
            KvEvent::Cleared => Data::Cleared(KvCacheCleared::default()),
            KvEvent::Removed { hashes, medium } => Data::Removed(KvBlocksRemoved {
                block_hashes: hashes,
                cache_level: Some(level(medium)),
                tier: Some(tier(medium).into()),
                medium: Some(medium.name().to_owned()),
                locality: Some(KvCacheLocality::Local.into()),
                ..KvBlocksRemoved::default()
            }),
            KvEvent::Stored {
                hashes,
                parent,
                tokens,
                namespace,
                medium,
                ..
            } => {
                let blocks = hashes.into_iter().zip(tokens.chunks(self.page_size));
                let block = |(hash, tokens): (i64, &[u32])| KvBlock {
                    block_hash: hash,
                    token_ids: tokens.to_vec(),
                    block_size: self.page_size as i32,
                    cache_level: Some(level(medium)),
                    ..KvBlock::default()
                };
                Data::Stored(KvBlocksStored {
                    blocks: blocks.map(block).collect(),
                    parent_block_hash: parent,
                    tier: Some(tier(medium).into()),
                    medium: Some(medium.name().to_owned()),
                    locality: Some(KvCacheLocality::Local.into()),
                    cache_salt: namespace.as_deref().map(str::to_owned),
                    ..KvBlocksStored::default()
                })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl History {
    /// The number of the oldest batch that is kept.
    fn first(&self) -> u64 {
        self.next - self.batches.len() as u64
    }
}

const fn level(medium: KvMedium) -> i32 {
    match medium {
        KvMedium::Device => 0,
        KvMedium::Host => 1,
    }
}

const fn tier(medium: KvMedium) -> KvCacheTier {
    match medium {
        KvMedium::Device => KvCacheTier::Device,
        KvMedium::Host => KvCacheTier::Host,
    }
}

/// The batches for one gateway.
#[derive(Debug)]
pub(crate) struct Subscription {
    event_log: Arc<KvEventLog>,
    next: u64,
}

impl Stream for Subscription {
    type Item = Result<KvEventBatch, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let mut history = this.event_log.lock();
        let first = history.first();
        if this.next < first {
            return Poll::Ready(Some(Err(Status::data_loss(format!(
                "batch {} is no longer kept, the oldest is {first}: subscribe from 0",
                this.next
            )))));
        }
        if let Some(batch) = history.batches.get((this.next - first) as usize) {
            let batch = KvEventBatch::clone(batch);
            this.next += 1;
            return Poll::Ready(Some(Ok(batch)));
        }
        if history.closed {
            return Poll::Ready(None);
        }
        let waker = context.waker();
        if !history.waiting.iter().any(|other| other.will_wake(waker)) {
            history.waiting.push(waker.clone());
        }
        Poll::Pending
    }
}
