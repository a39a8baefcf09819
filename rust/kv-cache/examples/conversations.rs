//! Conversations that share a system prompt, in a cache that is too small for all of them, with a host tier.
//!
//! Prints what came from where, and the tree for Graphviz: `... | sed -n '/^digraph/,$p' | dot -Tsvg > tree.svg`.

use std::error::Error;
use std::io::{Write, stdout};

use pie_kv_cache::pages::{Order, Pool};
use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, RadixIndex};

const PAGE_SIZE: usize = 16;
const CONVERSATIONS: u32 = 6;
const TURNS: u32 = 4;

/// A cache: the index, and the pools of both tiers.
struct Cache {
    index: RadixIndex,
    device: Pool,
    host: Pool,
    evicted: EvictResult,
    now: u64,
}

impl Cache {
    /// Takes pages of the device, and makes room by moving what was used least recently to the host.
    fn allocate(&mut self, count: usize) -> Result<Vec<u32>, Box<dyn Error>> {
        let missing = count.saturating_sub(self.device.available());
        if missing > 0 {
            let mut host_pages = Vec::new();
            self.host
                .allocate_many(missing.min(self.host.available()), &mut host_pages)?;
            self.host.cache(&host_pages)?;
            self.index
                .evict_to_host(missing, &host_pages, &mut self.evicted);
            // Here the KV of `self.evicted.moves` would be copied.
            self.device.uncache(&self.evicted.device)?;
            self.host.uncache(&self.evicted.host)?;
        }
        let mut pages = Vec::new();
        self.device.allocate_many(count, &mut pages)?;
        Ok(pages)
    }

    /// Serves a request. Returns the pages that were on the device, on the host, and computed.
    fn serve(&mut self, text: &[u32]) -> Result<(usize, usize, usize), Box<dyn Error>> {
        self.now += 1;
        let mut pages = Vec::new();
        let key = Key::new(text);
        let found = self.index.match_and_lock(key, self.now, &mut pages);
        let loaded = self.allocate(found.host_pages)?;
        // Here the KV of these moves would be copied.
        self.index.load(found.node, &loaded, &mut Vec::new())?;
        self.device.cache(&loaded)?;
        pages.extend(loaded);
        let computed = self.allocate(text.len() / PAGE_SIZE - pages.len())?;
        pages.extend(&computed);
        let how = InsertParams {
            now: self.now,
            ..InsertParams::default()
        };
        self.index.insert_after(found.node, key, &pages, how)?;
        self.device.cache(&computed)?;
        self.index.unlock(found.node)?;
        Ok((found.device_pages, found.host_pages, computed.len()))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = stdout().lock();
    let mut cache = Cache {
        index: RadixIndex::new(Config {
            page_size: PAGE_SIZE as u32,
            ..Config::default()
        })?,
        device: Pool::new(0..60, Order::LowestFirst),
        host: Pool::new(60..120, Order::LowestFirst),
        evicted: EvictResult::default(),
        now: 0,
    };
    let mut texts: Vec<Vec<u32>> = vec![(0..160).collect(); CONVERSATIONS as usize];
    for turn in 0..TURNS {
        for (number, text) in (0..).zip(&mut texts) {
            text.extend((0..64).map(|at| 1000 * (number + 1) + 100 * turn + at));
            let (device, host, computed) = cache.serve(text)?;
            writeln!(
                out,
                "turn {turn} of conversation {number}: {device:2} pages on the device, {host:2} on the host, {computed:2} computed"
            )?;
        }
    }
    writeln!(out, "{}", cache.index.to_dot())?;
    Ok(())
}
