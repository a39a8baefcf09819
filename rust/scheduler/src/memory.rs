//! Pages and prefixes: the pools of both tiers, the index, and what sessions keep.

use std::fmt::Display;

use pie_kv_cache::pages::{Order, Pool};
use pie_kv_cache::radix::{
    Config as IndexConfig, Event, Evicted, Insertion, Key, NodeId, RadixIndex,
};

use crate::config::{Config, Limits};
use crate::copies::Copies;
use crate::error::SchedError;
use crate::sessions::Sessions;

/// Host pages that are offered to an eviction beyond what it must have: whole leaves go.
const SPARE: usize = 512;

/// The pages of a sequence.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// In the order of its tokens.
    pub(crate) pages: Vec<u32>,
    /// So many of them, from the start, are the prefix index's. The others are the sequence's own.
    pub(crate) shared: usize,
    /// Where the shared ones end in the index, locked.
    pub(crate) node: NodeId,
}

/// Everything that has pages.
#[derive(Debug)]
pub(crate) struct Memory {
    index: RadixIndex,
    device: Pool,
    host: Pool,
    pub(crate) sessions: Sessions,
    /// Copies for the step that is being laid out.
    pub(crate) copies: Copies,
    pub(crate) page_size: usize,
    pub(crate) prefix_cache: bool,
    /// Whether to bring a page back from the host is cheaper than to compute it again.
    pub(crate) host_pays: bool,
    /// The first disagreement between index and pools: a bug.
    fault: Option<String>,
    evicted: Evicted,
    scratch: Vec<u32>,
}

impl Memory {
    pub(crate) fn new(config: &Config, limits: &Limits) -> Result<Self, SchedError> {
        let index = RadixIndex::new(IndexConfig {
            page_size: limits.page_size,
            policy: config.eviction,
            events: config.kv_events,
            ..IndexConfig::default()
        });
        let index = index.map_err(|_| SchedError::Setting {
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
            host_pays: true,
            fault: None,
            evicted: Evicted::default(),
            scratch: Vec::new(),
        })
    }

    /// Forgets all pages: what holds some must drop it without giving it back.
    pub(crate) fn reset(&mut self) {
        self.index.reset(&mut self.evicted);
        self.device.reset();
        self.host.reset();
        self.sessions.clear();
        self.copies.clear();
        self.fault = None;
    }

    /// The disagreement that was found, if one was.
    pub(crate) fn check_fault(&self) -> Result<(), SchedError> {
        let fault = self.fault.clone();
        fault.map_or(Ok(()), |fault| Err(SchedError::Books(fault)))
    }

    /// Pages that are free, or would be after evictions. Those that sessions keep are not among them.
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

    /// Pages of a key on the device, and after them on the host. Changes nothing.
    pub(crate) fn peek(&self, key: Key<'_>) -> (usize, usize) {
        if !self.prefix_cache {
            return (0, 0);
        }
        let (device, host) = self.index.peek(key);
        (device, if self.host_pays { host } else { 0 })
    }

    /// The index's node that a key's cached prefix ends in, and those above it, from below.
    pub(crate) fn path(&mut self, key: Key<'_>, now: u64, path: &mut Vec<NodeId>) {
        path.clear();
        let mut pages = std::mem::take(&mut self.scratch);
        let mut at = self.index.match_prefix(key, now, &mut pages).node;
        self.scratch = pages;
        while at != NodeId::ROOT {
            path.push(at);
            let Some(info) = note(&mut self.fault, self.index.info(at)) else {
                return;
            };
            at = info.parent;
        }
    }

    /// Takes the cached prefix of a key that is on the device. Returns how many pages of it come after that, on the host;
    /// [`load`](Self::load) brings them.
    pub(crate) fn claim(&mut self, held: &mut Held, key: Key<'_>, now: u64) -> usize {
        if !self.prefix_cache {
            return 0;
        }
        let found = self.index.match_and_lock(key, now, &mut held.pages);
        held.shared = found.device_pages;
        held.node = found.node;
        if found.host_pages > 0 && !self.host_pays {
            self.move_lock(held, found.device_node);
            return 0;
        }
        found.host_pages
    }

    /// Brings the pages that [`claim`](Self::claim) found on the host to the device, if there is room.
    pub(crate) fn load(&mut self, held: &mut Held, key: Key<'_>, host_pages: usize, now: u64) {
        let first = held.pages.len();
        if !self.make_room(host_pages) {
            let mut pages = std::mem::take(&mut self.scratch);
            let found = self.index.match_prefix(key, now, &mut pages);
            self.scratch = pages;
            return self.move_lock(held, found.device_node);
        }
        let taken = self.device.allocate_many(host_pages, &mut held.pages);
        note(&mut self.fault, taken);
        let new = &held.pages[first..];
        let moves = &mut self.copies.to_device;
        note(&mut self.fault, self.index.load(held.node, new, moves));
        note(&mut self.fault, self.device.cache(new));
        held.shared = held.pages.len();
    }

    fn move_lock(&mut self, held: &mut Held, node: NodeId) {
        note(&mut self.fault, self.index.lock(node));
        self.unlock(std::mem::replace(&mut held.node, node));
    }

    fn unlock(&mut self, node: NodeId) {
        note(&mut self.fault, self.index.unlock(node));
    }

    /// Gives a sequence pages of its own until it has so many. Does nothing when there are not enough.
    pub(crate) fn extend(&mut self, held: &mut Held, pages: usize) -> bool {
        let missing = pages.saturating_sub(held.pages.len());
        if missing == 0 {
            return true;
        }
        let room = self.make_room(missing);
        if room {
            let taken = self.device.allocate_many(missing, &mut held.pages);
            note(&mut self.fault, taken);
        }
        room
    }

    /// Gives the full pages of a key, whose KV is stored, to the index. Where the index has them already, the sequence
    /// goes on with those: returns the tokens before the end of the last page that it took over, 0 where it keeps its own.
    pub(crate) fn share(&mut self, held: &mut Held, key: Key<'_>, how: Insertion) -> usize {
        let full = key.tokens.len() / self.page_size;
        if !self.prefix_cache || full <= held.shared {
            return 0;
        }
        let pages = &held.pages[..full];
        let inserted = self.index.insert_after(held.node, key, pages, how);
        let Some(inserted) = note(&mut self.fault, inserted) else {
            return 0;
        };
        let existing = inserted.existing.max(held.shared);
        note(&mut self.fault, self.device.cache(&pages[existing..]));
        let adopts = existing > held.shared;
        if adopts {
            self.adopt(held, inserted.node, existing);
        }
        held.shared = full;
        self.move_lock(held, inserted.node);
        if adopts { existing * self.page_size } else { 0 }
    }

    /// Frees a sequence's duplicates of pages that the index has, and puts the index's in their places.
    fn adopt(&mut self, held: &mut Held, node: NodeId, existing: usize) {
        let duplicates = held.shared..existing;
        note(
            &mut self.fault,
            self.device.free(&held.pages[duplicates.clone()]),
        );
        let mut pages = std::mem::take(&mut self.scratch);
        note(&mut self.fault, self.index.path_pages(node, &mut pages));
        if let Some(pages) = pages.get(duplicates.clone()) {
            held.pages[duplicates].copy_from_slice(pages);
        }
        self.scratch = pages;
    }

    /// Takes a sequence's pages back.
    pub(crate) fn release(&mut self, held: &mut Held) {
        self.free_own(held);
        self.unlock(std::mem::take(&mut held.node));
    }

    /// Takes a sequence's own pages back, and leaves the shared ones to a session.
    pub(crate) fn keep(&mut self, held: &mut Held, session: u64, context: u64) {
        self.free_own(held);
        let node = std::mem::take(&mut held.node);
        let former = self.sessions.keep(session, node, context);
        for node in former.into_iter().chain(self.sessions.release_surplus()) {
            self.unlock(node);
        }
    }

    fn free_own(&mut self, held: &mut Held) {
        note(
            &mut self.fault,
            self.device.free(&held.pages[held.shared..]),
        );
        held.pages.clear();
        held.shared = 0;
    }

    /// Lets a session's pages go. Whether there was one.
    pub(crate) fn end_session(&mut self, session: u64) -> bool {
        let node = self.sessions.end(session);
        node.is_some_and(|node| {
            self.unlock(node);
            true
        })
    }

    /// Forgets what no sequence uses, on both tiers. Returns how many device pages became free.
    pub(crate) fn flush(&mut self) -> usize {
        while let Some(node) = self.sessions.release_oldest() {
            self.unlock(node);
        }
        let free = self.device.available();
        self.index.evict(usize::MAX, &mut self.evicted);
        self.settle_eviction();
        self.index.evict_host(usize::MAX, &mut self.evicted);
        self.settle_eviction();
        self.device.available() - free
    }

    /// Changes of what is cached since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.index.take_events()
    }

    /// Makes so many pages free by evictions, and lets sessions go when these do not suffice.
    pub(crate) fn make_room(&mut self, wanted: usize) -> bool {
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
        if !self.host_pays || self.host.stats().capacity == 0 {
            self.index.evict(pages, &mut self.evicted);
            return self.settle_eviction();
        }
        self.scratch.clear();
        let offered = (2 * pages + SPARE).min(self.host.available());
        let taken = self.host.allocate_many(offered, &mut self.scratch);
        note(&mut self.fault, taken);
        note(&mut self.fault, self.host.cache(&self.scratch));
        self.index
            .evict_to_host(pages, &self.scratch, &mut self.evicted);
        self.settle_eviction();
    }

    /// Books what an eviction let go of.
    fn settle_eviction(&mut self) {
        let Evicted {
            device,
            moves,
            host,
        } = &self.evicted;
        self.copies.to_host.extend_from_slice(moves);
        note(&mut self.fault, self.device.uncache(device));
        note(&mut self.fault, self.host.uncache(host));
    }

    /// Compares the pools with all that hold pages: `own` lists the sequences' own.
    pub(crate) fn audit(&self, own: impl Iterator<Item = u32>) -> Result<(), SchedError> {
        self.check_fault()?;
        let books = |error: &dyn Display| SchedError::Books(error.to_string());
        let mut indexed = Evicted::default();
        self.index.clone().reset(&mut indexed);
        self.device
            .audit(own.chain(indexed.device))
            .map_err(|error| books(&error))?;
        self.host.audit(indexed.host).map_err(|error| books(&error))
    }
}

/// Notes a failure of what cannot fail unless there is a bug.
fn note<T, E: Display>(fault: &mut Option<String>, result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            fault.get_or_insert_with(|| error.to_string());
            None
        }
    }
}
