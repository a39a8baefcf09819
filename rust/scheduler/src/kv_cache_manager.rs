//! The KV cache manager: page pools of both tiers, the prefix index, sessions.

use std::fmt::Display;

use pie_kv_cache::pages::{Order, Pool};
use pie_kv_cache::radix::{
    Config as IndexConfig, Event, EvictResult, InsertParams, Key, NodeId, RadixIndex,
};

use crate::config::{Config, Limits};
use crate::copies::Copies;
use crate::error::SchedulerError;
use crate::sessions::Sessions;

/// Spare host pages that an eviction may use, because it evicts whole leaves.
const SPARE: usize = 512;

/// The KV pages of a sequence.
#[derive(Debug, Default)]
pub(crate) struct SequencePages {
    /// Page ids in the order of its tokens.
    pub(crate) pages: Vec<u32>,
    /// Leading pages that the prefix index owns. The others are owned by the sequence.
    pub(crate) shared: usize,
    /// The locked node at the end of the shared pages.
    pub(crate) node: NodeId,
}

/// Allocation, prefix matching, eviction and swaps of KV pages.
#[derive(Debug)]
pub(crate) struct KvCacheManager {
    index: RadixIndex,
    device: Pool,
    host: Pool,
    pub(crate) sessions: Sessions,
    /// Copies before the step that is being scheduled.
    pub(crate) copies: Copies,
    pub(crate) page_size: usize,
    pub(crate) prefix_cache: bool,
    /// Whether loading a host page is cheaper than recomputing it.
    pub(crate) prefer_host: bool,
    /// The first inconsistency between index and pools: a bug.
    fault: Option<String>,
    evicted: EvictResult,
    scratch: Vec<u32>,
}

impl KvCacheManager {
    pub(crate) fn new(config: &Config, limits: &Limits) -> Result<Self, SchedulerError> {
        let index = RadixIndex::new(IndexConfig {
            page_size: limits.page_size,
            policy: config.eviction,
            events: config.kv_events,
            ..IndexConfig::default()
        });
        let index = index.map_err(|_| SchedulerError::Setting {
            name: "kv_page_size",
            value: limits.page_size.to_string(),
            wanted: "from 1 to 1024",
        })?;
        Ok(Self {
            index,
            device: Pool::new(0..limits.total_pages, Order::LowestFirst),
            host: Pool::new(0..limits.host_pages, Order::LowestFirst),
            sessions: Sessions::default(),
            copies: Copies::default(),
            page_size: limits.page_size as usize,
            prefix_cache: config.prefix_cache,
            prefer_host: true,
            fault: None,
            evicted: EvictResult::default(),
            scratch: Vec::new(),
        })
    }

    /// Drops all pages. Their holders must drop theirs without freeing them.
    pub(crate) fn reset(&mut self) {
        self.index.reset(&mut self.evicted);
        self.device.reset();
        self.host.reset();
        self.sessions.clear();
        self.copies.clear();
        self.fault = None;
    }

    /// Returns the recorded inconsistency.
    pub(crate) fn check_fault(&self) -> Result<(), SchedulerError> {
        let fault = self.fault.clone();
        fault.map_or(Ok(()), |fault| Err(SchedulerError::Inconsistent(fault)))
    }

    /// Free and evictable pages, without those of sessions.
    pub(crate) fn available(&self) -> usize {
        self.device.available() + self.index.evictable_pages()
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.device.available()
    }

    pub(crate) fn cached_pages(&self) -> usize {
        self.index.evictable_pages()
    }

    pub(crate) fn host_pages(&self) -> usize {
        self.host.stats().used
    }

    /// Cached pages of a key: on the device, and after them on the host. Changes nothing.
    pub(crate) fn peek(&self, key: Key<'_>) -> (usize, usize) {
        if !self.prefix_cache {
            return (0, 0);
        }
        let (device, host) = self.index.peek(key);
        (device, if self.prefer_host { host } else { 0 })
    }

    /// Writes the nodes from the end of a key's cached prefix up to the root to `path`.
    pub(crate) fn path(&mut self, key: Key<'_>, now: u64, path: &mut Vec<NodeId>) {
        path.clear();
        let mut pages = std::mem::take(&mut self.scratch);
        let mut at = self.index.match_prefix(key, now, &mut pages).node;
        self.scratch = pages;
        while at != NodeId::ROOT {
            path.push(at);
            let Some(info) = record_fault(&mut self.fault, self.index.info(at)) else {
                return;
            };
            at = info.parent;
        }
    }

    /// Matches and locks the cached prefix of a key. Returns how many host pages follow the device pages;
    /// [`load_from_host`](Self::load_from_host) loads them.
    pub(crate) fn match_and_lock(
        &mut self,
        kv: &mut SequencePages,
        key: Key<'_>,
        now: u64,
    ) -> usize {
        if !self.prefix_cache {
            return 0;
        }
        let found = self.index.match_and_lock(key, now, &mut kv.pages);
        kv.shared = found.device_pages;
        kv.node = found.node;
        if found.host_pages > 0 && !self.prefer_host {
            self.move_lock(kv, found.device_node);
            return 0;
        }
        found.host_pages
    }

    /// Loads the host pages of a match, if there are free device pages.
    pub(crate) fn load_from_host(
        &mut self,
        kv: &mut SequencePages,
        key: Key<'_>,
        host_pages: usize,
        now: u64,
    ) {
        let first = kv.pages.len();
        if !self.evict_until_free(host_pages) {
            let mut pages = std::mem::take(&mut self.scratch);
            let found = self.index.match_prefix(key, now, &mut pages);
            self.scratch = pages;
            return self.move_lock(kv, found.device_node);
        }
        let taken = self.device.allocate_many(host_pages, &mut kv.pages);
        record_fault(&mut self.fault, taken);
        let new = &kv.pages[first..];
        let moves = &mut self.copies.to_device;
        record_fault(&mut self.fault, self.index.load(kv.node, new, moves));
        record_fault(&mut self.fault, self.device.cache(new));
        kv.shared = kv.pages.len();
    }

    fn move_lock(&mut self, kv: &mut SequencePages, node: NodeId) {
        record_fault(&mut self.fault, self.index.lock(node));
        self.unlock(std::mem::replace(&mut kv.node, node));
    }

    fn unlock(&mut self, node: NodeId) {
        record_fault(&mut self.fault, self.index.unlock(node));
    }

    /// Allocates pages until a sequence has so many. Allocates none if there are not enough.
    pub(crate) fn allocate_to(&mut self, kv: &mut SequencePages, pages: usize) -> bool {
        let missing = pages.saturating_sub(kv.pages.len());
        if missing == 0 {
            return true;
        }
        let evicted = self.evict_until_free(missing);
        if evicted {
            let taken = self.device.allocate_many(missing, &mut kv.pages);
            record_fault(&mut self.fault, taken);
        }
        evicted
    }

    /// Inserts the full pages of a key into the index. Pages that the index has already replace those of the sequence; returns
    /// the tokens up to the last of these, 0 if there are none.
    pub(crate) fn cache(
        &mut self,
        kv: &mut SequencePages,
        key: Key<'_>,
        how: InsertParams,
    ) -> usize {
        let full = key.tokens.len() / self.page_size;
        if !self.prefix_cache || full <= kv.shared {
            return 0;
        }
        let pages = &kv.pages[..full];
        let inserted = self.index.insert_after(kv.node, key, pages, how);
        let Some(inserted) = record_fault(&mut self.fault, inserted) else {
            return 0;
        };
        let existing = inserted.existing.max(kv.shared);
        record_fault(&mut self.fault, self.device.cache(&pages[existing..]));
        let adopts = existing > kv.shared;
        if adopts {
            self.replace_duplicates(kv, inserted.node, existing);
        }
        kv.shared = full;
        self.move_lock(kv, inserted.node);
        if adopts { existing * self.page_size } else { 0 }
    }

    /// Frees a sequence's duplicates of cached pages and uses the cached ones.
    fn replace_duplicates(&mut self, kv: &mut SequencePages, node: NodeId, existing: usize) {
        let duplicates = kv.shared..existing;
        record_fault(
            &mut self.fault,
            self.device.free(&kv.pages[duplicates.clone()]),
        );
        let mut pages = std::mem::take(&mut self.scratch);
        record_fault(&mut self.fault, self.index.path_pages(node, &mut pages));
        if let Some(pages) = pages.get(duplicates.clone()) {
            kv.pages[duplicates].copy_from_slice(pages);
        }
        self.scratch = pages;
    }

    /// Frees a sequence's own pages and unlocks the shared ones.
    pub(crate) fn free(&mut self, kv: &mut SequencePages) {
        self.free_own(kv);
        self.unlock(std::mem::take(&mut kv.node));
    }

    /// Frees a sequence's own pages and keeps the shared ones locked for a session.
    pub(crate) fn keep_for_session(&mut self, kv: &mut SequencePages, session: u64, context: u64) {
        self.free_own(kv);
        let node = std::mem::take(&mut kv.node);
        let former = self.sessions.keep(session, node, context);
        for node in former.into_iter().chain(self.sessions.release_surplus()) {
            self.unlock(node);
        }
    }

    fn free_own(&mut self, kv: &mut SequencePages) {
        record_fault(&mut self.fault, self.device.free(&kv.pages[kv.shared..]));
        kv.pages.clear();
        kv.shared = 0;
    }

    /// Unlocks the pages of a session. Returns whether there was one.
    pub(crate) fn end_session(&mut self, session: u64) -> bool {
        let node = self.sessions.end(session);
        node.is_some_and(|node| {
            self.unlock(node);
            true
        })
    }

    /// Evicts everything that no sequence uses from both tiers. Returns how many device pages were freed.
    pub(crate) fn flush(&mut self) -> usize {
        while let Some(node) = self.sessions.release_oldest() {
            self.unlock(node);
        }
        let free = self.device.available();
        self.index.evict(usize::MAX, &mut self.evicted);
        self.apply_eviction();
        self.index.evict_host(usize::MAX, &mut self.evicted);
        self.apply_eviction();
        self.device.available() - free
    }

    /// KV cache events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.index.take_events()
    }

    /// Evicts until so many pages are free; ends sessions if that does not suffice.
    pub(crate) fn evict_until_free(&mut self, wanted: usize) -> bool {
        loop {
            let missing = wanted.saturating_sub(self.device.available());
            if missing == 0 {
                return true;
            }
            if self.index.evictable_pages() >= missing {
                self.evict(missing);
                return self.device.available() >= wanted;
            }
            let Some(node) = self.sessions.release_oldest() else {
                return false;
            };
            self.unlock(node);
        }
    }

    fn evict(&mut self, pages: usize) {
        if !self.prefer_host || self.host.stats().capacity == 0 {
            self.index.evict(pages, &mut self.evicted);
            return self.apply_eviction();
        }
        self.scratch.clear();
        let offered = (2 * pages + SPARE).min(self.host.available());
        let taken = self.host.allocate_many(offered, &mut self.scratch);
        record_fault(&mut self.fault, taken);
        record_fault(&mut self.fault, self.host.cache(&self.scratch));
        self.index
            .evict_to_host(pages, &self.scratch, &mut self.evicted);
        self.apply_eviction();
    }

    /// Applies an eviction to the pools and the copies.
    fn apply_eviction(&mut self) {
        let EvictResult {
            device,
            moves,
            host,
        } = &self.evicted;
        self.copies.to_host.extend_from_slice(moves);
        record_fault(&mut self.fault, self.device.uncache(device));
        record_fault(&mut self.fault, self.host.uncache(host));
    }

    /// Checks the pools' reference counts against the index and `own`, the sequences' own pages.
    pub(crate) fn check_invariants(
        &self,
        own: impl Iterator<Item = u32>,
    ) -> Result<(), SchedulerError> {
        self.check_fault()?;
        let inconsistent = |error: &dyn Display| SchedulerError::Inconsistent(error.to_string());
        let mut indexed = EvictResult::default();
        self.index.clone().reset(&mut indexed);
        self.device
            .check_invariants(own.chain(indexed.device))
            .map_err(|error| inconsistent(&error))?;
        self.host
            .check_invariants(indexed.host)
            .map_err(|error| inconsistent(&error))
    }
}

/// Records an error that only a bug can cause.
fn record_fault<T, E: Display>(fault: &mut Option<String>, result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            fault.get_or_insert_with(|| error.to_string());
            None
        }
    }
}
