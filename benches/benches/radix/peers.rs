//! The prefix index and its peers, as a scheduler would use them.

use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use kv_index::{
    ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock, TokenTree,
    chain_prefix_hash, compute_content_hash,
};
use pie_kv_cache::radix::{Config, InsertParams, Key, NodeId, RadixIndex};
use radix_tree::{HolderId, Overlap, OverlapScratch};

/// The worker that holds everything, for peers that ask.
const WORKER: &str = "worker";

/// An index that a request is looked up in, and inserted into with its answer.
pub(crate) trait Index {
    /// What may be done before the clock starts.
    fn prepare(&mut self, _tokens: &[u32]) {}

    /// Tokens that were inserted before, from the start on.
    fn lookup(&mut self, tokens: &[u32]) -> usize;

    /// Inserts tokens that begin with those that were looked up last.
    fn insert(&mut self, tokens: &[u32]);

    /// What is left to do after a mere lookup.
    fn release(&mut self) {}
}

/// Makes an empty index for pages of so many tokens.
pub(crate) type Make = fn(usize) -> Box<dyn Index>;

/// All peers by name. Those that end in `_hashed` are given the hashes of all pages, and do not make them.
pub(crate) const PEERS: [(&str, Make); 7] = [
    ("kv_index_tokens", |page| Box::new(Tokens::new(page))),
    ("kv_index_chain", |page| {
        Box::new(Hashed::<Chain>::new(page, false))
    }),
    ("kv_index_chain_hashed", |page| {
        Box::new(Hashed::<Chain>::new(page, true))
    }),
    ("smg_radix_tree", |page| {
        Box::new(Hashed::<Smg>::new(page, false))
    }),
    ("smg_radix_tree_hashed", |page| {
        Box::new(Hashed::<Smg>::new(page, true))
    }),
    ("dynamo_kv_router", |page| {
        Box::new(Hashed::<Dynamo>::new(page, false))
    }),
    ("dynamo_kv_router_hashed", |page| {
        Box::new(Hashed::<Dynamo>::new(page, true))
    }),
];

/// Ours: page ids out of every match, which is locked until the answer is inserted.
pub(crate) struct Ours {
    pub(crate) index: RadixIndex,
    page: usize,
    pages: Vec<u32>,
    locked: NodeId,
    next: u32,
}

impl Ours {
    pub(crate) fn new(page: usize) -> Self {
        let config = Config {
            page_size: page as u32,
            ..Config::default()
        };
        Self {
            index: RadixIndex::new(config).expect("a valid config"),
            page,
            pages: Vec::new(),
            locked: NodeId::ROOT,
            next: 0,
        }
    }
}

impl Index for Ours {
    fn lookup(&mut self, tokens: &[u32]) -> usize {
        let found = self
            .index
            .match_and_lock(Key::new(tokens), 0, &mut self.pages);
        self.locked = found.node;
        found.device_pages * self.page
    }

    fn insert(&mut self, tokens: &[u32]) {
        let wanted = tokens.len() / self.page;
        let fresh = (wanted - self.pages.len()) as u32;
        self.pages.extend(self.next..self.next + fresh);
        self.next += fresh;
        let (key, how) = (Key::new(tokens), InsertParams::default());
        let inserted = self.index.insert_after(self.locked, key, &self.pages, how);
        inserted.expect("as many pages as needed");
        self.release();
    }

    fn release(&mut self) {
        self.index.unlock(self.locked).expect("it was locked");
        self.locked = NodeId::ROOT;
    }
}

/// `kv_index`'s tree of tokens.
struct Tokens {
    tree: TokenTree,
}

impl Tokens {
    fn new(page: usize) -> Self {
        Self {
            tree: TokenTree::with_config(page, Default::default()),
        }
    }
}

impl Index for Tokens {
    fn lookup(&mut self, tokens: &[u32]) -> usize {
        self.tree
            .match_prefix_with_counts(tokens)
            .matched_token_count
    }

    fn insert(&mut self, tokens: &[u32]) {
        self.tree.insert_tokens(tokens, WORKER);
    }
}

/// An index of page hashes.
trait Core {
    fn new() -> Self;

    /// Pages of a chain of contents that are there.
    fn depth(&mut self, contents: &[u64]) -> usize;

    /// Stores pages, by key and content, after the page with the key `parent`.
    fn store(&mut self, parent: Option<u64>, keys: &[u64], contents: &[u64]);
}

/// A core with the hashes that it needs. They are made once for each token of a turn: of the prompt when it is looked up,
/// and of the answer when it is inserted.
struct Hashed<T> {
    core: T,
    page: usize,
    given: bool,
    contents: Vec<u64>,
    keys: Vec<u64>,
    depth: usize,
}

impl<T: Core> Hashed<T> {
    fn new(page: usize, given: bool) -> Self {
        Self {
            core: T::new(),
            page,
            given,
            contents: Vec::new(),
            keys: Vec::new(),
            depth: 0,
        }
    }

    fn hash(&mut self, tokens: &[u32]) {
        for page in tokens.chunks_exact(self.page).skip(self.contents.len()) {
            let content = compute_content_hash(page);
            let key = self.keys.last().map_or(content.0, |last| {
                chain_prefix_hash(SequenceHash(*last), content).0
            });
            self.contents.push(content.0);
            self.keys.push(key);
        }
    }
}

impl<T: Core> Index for Hashed<T> {
    fn prepare(&mut self, tokens: &[u32]) {
        if self.given {
            self.contents.clear();
            self.keys.clear();
            self.hash(tokens);
        }
    }

    fn lookup(&mut self, tokens: &[u32]) -> usize {
        if !self.given {
            self.contents.clear();
            self.keys.clear();
            self.hash(tokens);
        }
        self.depth = self.core.depth(&self.contents[..tokens.len() / self.page]);
        self.depth * self.page
    }

    fn insert(&mut self, tokens: &[u32]) {
        if !self.given {
            self.hash(tokens);
        }
        let at = self.depth;
        let parent = at.checked_sub(1).map(|last| self.keys[last]);
        self.core
            .store(parent, &self.keys[at..], &self.contents[at..]);
    }
}

/// `kv_index`'s chains.
struct Chain {
    index: ChainIndex,
    map: ChainBlockMap,
    worker: u32,
}

impl Core for Chain {
    fn new() -> Self {
        let index = ChainIndex::new();
        let worker = index.intern_worker(WORKER).expect("the first one");
        Self {
            index,
            map: ChainBlockMap::default(),
            worker,
        }
    }

    fn depth(&mut self, contents: &[u64]) -> usize {
        let mut depth = 0;
        self.index.score_into(
            contents,
            |content| *content,
            false,
            |_, score| depth = score,
        );
        depth as usize
    }

    fn store(&mut self, parent: Option<u64>, keys: &[u64], contents: &[u64]) {
        let blocks = keys.iter().zip(contents).map(|(key, content)| StoredBlock {
            seq_hash: SequenceHash(*key),
            content_hash: ContentHash(*content),
        });
        let blocks: Vec<_> = blocks.collect();
        let parent = parent.map(SequenceHash);
        self.index
            .apply_stored(self.worker, &blocks, parent, &mut self.map)
            .expect("its parent is there");
    }
}

/// `smg-radix-tree`.
struct Smg {
    tree: radix_tree::RadixTree,
    holder: HolderId,
    scratch: OverlapScratch,
    found: Vec<Overlap>,
}

impl Core for Smg {
    fn new() -> Self {
        let mut tree = radix_tree::RadixTree::new(radix_tree::Config::default());
        Self {
            holder: tree.create_holder(WORKER),
            tree,
            scratch: OverlapScratch::default(),
            found: Vec::new(),
        }
    }

    fn depth(&mut self, contents: &[u64]) -> usize {
        self.tree
            .overlap(contents, &mut self.scratch, &mut self.found);
        self.found.first().map_or(0, |found| found.depth as usize)
    }

    fn store(&mut self, parent: Option<u64>, keys: &[u64], contents: &[u64]) {
        let blocks: Vec<_> = keys.iter().copied().zip(contents.iter().copied()).collect();
        self.tree
            .store(self.holder, parent, &blocks)
            .expect("its parent is there");
    }
}

/// `dynamo-kv-router`'s tree for one thread.
struct Dynamo {
    tree: dynamo_kv_router::RadixTree,
    event_id: u64,
}

impl Core for Dynamo {
    fn new() -> Self {
        Self {
            tree: dynamo_kv_router::RadixTree::new(),
            event_id: 0,
        }
    }

    fn depth(&mut self, contents: &[u64]) -> usize {
        let contents = contents.iter().copied().map(LocalBlockHash).collect();
        let found = self.tree.find_matches(contents, false);
        found
            .scores
            .values()
            .max()
            .map_or(0, |depth| *depth as usize)
    }

    fn store(&mut self, parent: Option<u64>, keys: &[u64], contents: &[u64]) {
        let blocks = keys
            .iter()
            .zip(contents)
            .map(|(key, content)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(*key),
                tokens_hash: LocalBlockHash(*content),
                mm_extra_info: None,
            });
        let data = KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: blocks.collect(),
        });
        self.event_id += 1;
        let event = KvCacheEvent {
            event_id: self.event_id,
            data,
            dp_rank: 0,
        };
        self.tree
            .apply_event(RouterEvent::new(0, event))
            .expect("its parent is there");
    }
}
