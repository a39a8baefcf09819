//! The reference of the index, a dictionary of all prefixes, compared with it after every step.

mod compare;

use std::collections::{BTreeMap, HashMap, HashSet};

use pie_kv_cache::pages::{Order, Pool};
use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, NodeId, PageCopy, RadixIndex};

/// First id of the host's pages.
const HOST: u32 = 1 << 20;

/// A namespace and its key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text {
    pub namespace: Option<String>,
    pub tokens: Vec<u32>,
}

impl Text {
    fn key(&self) -> Key<'_> {
        Key {
            namespace: self.namespace.as_deref(),
            tokens: &self.tokens,
        }
    }
}

/// What is done to an index.
#[derive(Debug, Clone)]
pub enum Step {
    Match {
        text: Text,
        locks: bool,
    },
    /// Inserts a text; `after` a match of it, by [`RadixIndex::insert_after`].
    Insert {
        text: Text,
        how: InsertParams,
        after: bool,
    },
    /// Locks the node that a text ends in once more, without a match of its own.
    Lock(Text),
    Unlock(usize),
    Evict(usize),
    EvictToHost {
        pages: usize,
        host_pages: usize,
    },
    EvictHost(usize),
    Backup(Text),
    /// Brings what the host has of a text back; where the device is full, evicts first.
    Load(Text),
    Merge,
    Reset,
}

/// Where a page of a prefix is.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    device: Option<u32>,
    host: Option<u32>,
}

/// An index, its pools, and the dictionary.
pub struct Model {
    config: Config,
    index: RadixIndex,
    device: Pool,
    host: Pool,
    /// By prefixes of whole pages.
    entries: BTreeMap<Text, Entry>,
    /// Locked nodes, and the prefixes that end in them.
    locks: Vec<(NodeId, Text)>,
    /// What a router knows: how often a block is stored on a medium.
    blocks: HashMap<(i64, bool), usize>,
    /// Whole digests of the blocks that were ever stored.
    digests: HashMap<i64, Vec<u8>>,
    namespaces: HashSet<String>,
    pages: Vec<u32>,
    evicted: EvictResult,
    now: u64,
}

impl Model {
    pub fn new(config: Config, device: u32, host: u32) -> Self {
        let mut model = Self {
            config,
            index: RadixIndex::new(config).expect("a valid config"),
            device: Pool::new(0..device, Order::Lifo),
            host: Pool::new(HOST..HOST + host, Order::LowestFirst),
            entries: BTreeMap::new(),
            locks: Vec::new(),
            blocks: HashMap::new(),
            digests: HashMap::new(),
            namespaces: HashSet::new(),
            pages: Vec::new(),
            evicted: EvictResult::default(),
            now: 0,
        };
        model.read_events();
        model
    }

    /// Takes a step and compares everything that can be compared.
    pub fn step(&mut self, step: &Step) {
        self.now += 1;
        match step {
            Step::Match { text, locks } => self.find(text, *locks),
            Step::Insert { text, how, after } => self.insert(text, *how, *after),
            Step::Lock(text) => self.lock(text),
            Step::Unlock(which) => self.unlock(*which),
            Step::Evict(pages) => self.evict(*pages),
            Step::EvictToHost { pages, host_pages } => self.evict_to_host(*pages, *host_pages),
            Step::EvictHost(pages) => self.evict_host(*pages),
            Step::Backup(text) => self.backup(text),
            Step::Load(text) => self.load(text),
            Step::Merge => {
                let nodes = self.index.len();
                assert_eq!(nodes - self.index.merge(), self.index.len());
            }
            Step::Reset => self.reset(),
        }
        self.read_events();
        self.compare();
    }

    /// Compares what every prefix holds, and what a router knows.
    pub fn finish(&mut self) {
        let texts: Vec<Text> = self.entries.keys().cloned().collect();
        for text in &texts {
            self.find(text, false);
        }
        if self.config.events {
            let mut known = HashMap::new();
            for (text, entry) in &self.entries {
                let number = self.hash(text);
                for (medium, page) in [(false, entry.device), (true, entry.host)] {
                    if page.is_some() {
                        *known.entry((number, medium)).or_insert(0) += 1;
                    }
                }
            }
            self.blocks.retain(|_, count| *count > 0);
            assert_eq!(self.blocks, known, "what a router knows");
        }
        self.reset();
        self.compare();
    }

    /// Units of so many pages, in tokens.
    fn tokens(&self, pages: usize) -> usize {
        if pages == 0 {
            return 0;
        }
        pages * self.config.page_size as usize + usize::from(self.config.bigram)
    }

    fn page_count(&self, text: &Text) -> usize {
        let units = text.tokens.len().saturating_sub(self.config.bigram.into());
        units / self.config.page_size as usize
    }

    fn prefix(&self, text: &Text, pages: usize) -> Text {
        Text {
            namespace: text.namespace.clone(),
            tokens: text.tokens[..self.tokens(pages)].to_vec(),
        }
    }

    fn prefixes(&self, text: &Text) -> Vec<Text> {
        (1..=self.page_count(text))
            .map(|pages| self.prefix(text, pages))
            .collect()
    }

    /// Entries of the prefixes of a text that are there.
    fn found(&self, text: &Text) -> Vec<Entry> {
        let prefixes = self.prefixes(text);
        prefixes
            .iter()
            .map_while(|prefix| self.entries.get(prefix).copied())
            .collect()
    }

    fn is_locked(&self, prefix: &Text) -> bool {
        self.locks.iter().any(|(_, lock)| {
            lock.namespace == prefix.namespace && lock.tokens.starts_with(&prefix.tokens)
        })
    }

    /// Device pages with and without a lock.
    fn locked_pages(&self) -> (usize, usize) {
        let on_device = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.device.is_some());
        let (locked, free): (Vec<_>, Vec<_>) =
            on_device.partition(|(prefix, _)| self.is_locked(prefix));
        (locked.len(), free.len())
    }

    fn find(&mut self, text: &Text, locks: bool) {
        let expected = self.found(text);
        let device: Vec<u32> = expected.iter().map_while(|entry| entry.device).collect();
        let host = expected.len() - device.len();
        assert_eq!(self.index.peek(text.key()), (device.len(), host));
        let before = self.locked_pages();
        let found = if locks {
            self.index
                .match_and_lock(text.key(), self.now, &mut self.pages)
        } else {
            self.index
                .match_prefix(text.key(), self.now, &mut self.pages)
        };
        assert_eq!(self.pages, device);
        assert_eq!((found.device_pages, found.host_pages), (device.len(), host));
        for (node, depth) in [
            (found.node, expected.len()),
            (found.device_node, device.len()),
        ] {
            let info = self.index.info(node).expect("it was found");
            assert_eq!(info.depth, depth);
            assert_eq!(
                self.index.path_pages(node, &mut self.pages).ok(),
                Some(depth - device.len())
            );
            assert_eq!(self.pages, device);
        }
        self.compare_partial(text, &found, expected.len());
        if locks && !expected.is_empty() {
            self.locks
                .push((found.node, self.prefix(text, expected.len())));
            let after = self.locked_pages();
            assert_eq!(before.0 + before.1, after.0 + after.1);
        }
    }

    fn insert(&mut self, text: &Text, how: InsertParams, after: bool) {
        let how = InsertParams {
            now: self.now,
            ..how
        };
        let mut node = NodeId::ROOT;
        if after {
            node = self
                .index
                .match_and_lock(text.key(), self.now, &mut self.pages)
                .node;
            let depth = self.index.info(node).expect("it was found").depth;
            self.locks.push((node, self.prefix(text, depth)));
        }
        let wanted = self.page_count(text);
        let mut pages = Vec::new();
        self.evict(wanted.saturating_sub(self.device.available()));
        if self.device.allocate_many(wanted, &mut pages).is_ok() {
            let existing = self
                .found(text)
                .iter()
                .take_while(|entry| entry.device.is_some())
                .count();
            self.namespaces.extend(text.namespace.clone());
            let inserted = self.index.insert_after(node, text.key(), &pages, how);
            let inserted = inserted.expect("as many pages as needed");
            assert_eq!((inserted.existing, inserted.pages), (existing, wanted));
            assert_eq!(
                self.index.info(inserted.node).expect("it is there").depth,
                wanted
            );
            self.device
                .free(&pages[..existing])
                .expect("duplicates are the caller's");
            self.device
                .cache(&pages[existing..])
                .expect("the others are not cached");
            for (prefix, page) in self.prefixes(text).into_iter().zip(pages).skip(existing) {
                self.entries.entry(prefix).or_default().device = Some(page);
            }
        }
        if after {
            self.locks.pop();
            self.index.unlock(node).expect("it is locked");
        }
    }

    fn lock(&mut self, text: &Text) {
        let found = self
            .index
            .match_prefix(text.key(), self.now, &mut self.pages);
        let before = self.locked_pages();
        let locked = self.index.lock(found.device_node).expect("it was found");
        if found.device_pages > 0 {
            self.locks
                .push((found.device_node, self.prefix(text, found.device_pages)));
        }
        assert_eq!(self.locked_pages(), (before.0 + locked, before.1 - locked));
    }

    fn unlock(&mut self, which: usize) {
        if self.locks.is_empty() {
            return;
        }
        let before = self.locked_pages();
        let (node, _) = self.locks.swap_remove(which % self.locks.len());
        let freed = self.index.unlock(node).expect("it is locked");
        assert_eq!(self.locked_pages(), (before.0 - freed, before.1 + freed));
    }

    fn evict(&mut self, pages: usize) {
        let before = self.locked_pages().1;
        let mut evicted = std::mem::take(&mut self.evicted);
        let count = self.index.evict(pages, &mut evicted);
        assert!(evicted.moves.is_empty());
        self.leave(pages, count, before, &evicted);
        self.host
            .uncache(&evicted.host)
            .expect("they were on the host");
        self.evicted = evicted;
    }

    fn evict_to_host(&mut self, pages: usize, host_pages: usize) {
        let before = self.locked_pages().1;
        let mut free = Vec::new();
        let host_pages = host_pages.min(self.host.available());
        self.host
            .allocate_many(host_pages, &mut free)
            .expect("there is room");
        self.host.cache(&free).expect("they are new");
        let mut evicted = std::mem::take(&mut self.evicted);
        let count = self.index.evict_to_host(pages, &free, &mut evicted);
        self.leave(pages, count, before, &evicted);
        self.host.uncache(&evicted.host).expect("given or evicted");
        self.evicted = evicted;
    }

    /// What an eviction says becomes true of the dictionary.
    fn leave(&mut self, pages: usize, count: usize, evictable: usize, evicted: &EvictResult) {
        assert_eq!(count, evicted.device.len());
        assert!(
            count >= pages || count == evictable,
            "{count} of {pages} pages, {evictable} evictable"
        );
        self.device
            .uncache(&evicted.device)
            .expect("they were on the device");
        let gone: HashSet<u32> = evicted.device.iter().copied().collect();
        let freed: HashSet<u32> = evicted.host.iter().copied().collect();
        let moved: HashMap<u32, u32> = evicted
            .moves
            .iter()
            .map(|&PageCopy { from, to }| (from, to))
            .collect();
        let reused: HashSet<u32> = moved.values().copied().collect();
        assert!(moved.keys().all(|page| gone.contains(page)));
        let prefixes: Vec<Text> = self.entries.keys().cloned().collect();
        for prefix in prefixes {
            let locked = self.is_locked(&prefix);
            let entry = self.entries.get_mut(&prefix).expect("it was there");
            let before = *entry;
            // What left the host made room: for others, or for the caller.
            entry.host = entry
                .host
                .filter(|page| !freed.contains(page) && !reused.contains(page));
            if let Some(page) = entry.device.filter(|page| gone.contains(page)) {
                assert!(!locked, "a locked page was evicted");
                entry.device = None;
                let target = moved.get(&page).filter(|page| !freed.contains(page));
                assert!(
                    target.is_none() || before.host.is_none(),
                    "moved to the host twice"
                );
                entry.host = target.copied().or(entry.host);
            } else if before.host != entry.host {
                assert!(
                    !locked && entry.device.is_none(),
                    "it should have stayed on the host"
                );
            }
            if entry.device.is_none() && entry.host.is_none() {
                self.entries.remove(&prefix);
            }
        }
    }

    fn evict_host(&mut self, pages: usize) {
        let mut evicted = std::mem::take(&mut self.evicted);
        let count = self.index.evict_host(pages, &mut evicted);
        assert_eq!((count, evicted.device.len()), (evicted.host.len(), 0));
        self.leave(0, 0, 0, &evicted);
        self.host
            .uncache(&evicted.host)
            .expect("they were on the host");
        let left = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.device.is_none());
        assert!(count >= pages || left.clone().all(|(prefix, _)| self.is_locked(prefix)));
        self.evicted = evicted;
    }

    fn backup(&mut self, text: &Text) {
        let found = self
            .index
            .match_prefix(text.key(), self.now, &mut self.pages);
        let info = self.index.info(found.node).expect("it was found");
        let mut host = Vec::new();
        if self.host.allocate_many(info.pages, &mut host).is_err() {
            return;
        }
        self.host.cache(&host).expect("they are new");
        let mut moves = Vec::new();
        let result = self.index.backup(found.node, &host, &mut moves);
        assert_eq!(
            result.is_ok(),
            info.pages > 0 && info.on_device && !info.on_host,
            "{result:?}"
        );
        if result.is_err() {
            self.host.uncache(&host).expect("they were cached");
            return;
        }
        let prefixes = self.prefixes(&self.prefix(text, info.depth));
        let prefixes = prefixes[info.depth - info.pages..].iter();
        for (prefix, (page, made)) in prefixes.zip(host.iter().zip(moves)) {
            let entry = self.entries.get_mut(prefix).expect("it is there");
            assert_eq!((entry.device, *page), (Some(made.from), made.to));
            entry.host = Some(*page);
        }
    }

    fn load(&mut self, text: &Text) {
        let found = self
            .index
            .match_and_lock(text.key(), self.now, &mut self.pages);
        let wanted = found.host_pages;
        let prefix = self.prefix(text, found.device_pages + wanted);
        self.locks.push((found.node, prefix.clone()));
        self.evict(wanted.saturating_sub(self.device.available()));
        let mut pages = Vec::new();
        if self.device.allocate_many(wanted, &mut pages).is_ok() {
            let mut moves = Vec::new();
            self.index
                .load(found.node, &pages, &mut moves)
                .expect("as many pages as needed");
            self.device.cache(&pages).expect("they are new");
            let prefixes = self.prefixes(&prefix);
            let loaded = prefixes[found.device_pages..].iter();
            for (prefix, (page, made)) in loaded.zip(pages.iter().zip(moves)) {
                let entry = self.entries.get_mut(prefix).expect("it is locked");
                assert_eq!((entry.host, *page), (Some(made.from), made.to));
                entry.device = Some(*page);
            }
        }
        self.locks.pop();
        self.index.unlock(found.node).expect("it is locked");
    }

    fn reset(&mut self) {
        let mut evicted = std::mem::take(&mut self.evicted);
        self.index.reset(&mut evicted);
        self.device
            .uncache(&evicted.device)
            .expect("they were on the device");
        self.host
            .uncache(&evicted.host)
            .expect("they were on the host");
        self.entries.clear();
        for (node, _) in self.locks.drain(..) {
            assert!(
                node == NodeId::ROOT || self.index.unlock(node).is_err(),
                "an old node"
            );
        }
        self.evicted = evicted;
    }
}
