//! How busy a replica is, as routers want to know it.

use std::time::{Duration, Instant};

use pie_engine::{Capabilities, ReplicaStats};

/// Of one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Loads {
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    /// Those of them that had run before.
    pub(crate) retracted: u32,
    /// Tokens of pages that a request holds. What only the prefix index holds counts as free: it goes when room is needed.
    pub(crate) used_tokens: u64,
    pub(crate) total_tokens: u64,
    pub(crate) max_running: u32,
    /// Output tokens a second.
    pub(crate) throughput: f64,
    /// The share of prompt tokens that was found in the prefix index.
    pub(crate) hit_rate: f64,
    /// Tokens of prompts without an output yet.
    pub(crate) pending_tokens: u64,
    /// Tokens to a verified step, and the share of drafts that were accepted.
    pub(crate) drafts: Option<(f64, f64)>,
}

impl Loads {
    pub(crate) fn new(
        stats: &ReplicaStats,
        capabilities: &Capabilities,
        max_running: u32,
        throughput: f64,
        pending_tokens: u64,
    ) -> Self {
        let counts = &stats.scheduler;
        let page = u64::from(capabilities.kv_page_size);
        let total = u64::from(stats.total_pages);
        let free = (counts.free_pages + counts.cached_pages) as u64;
        let rate = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let drafts = (counts.drafts > 0).then(|| {
            let length = 1.0 + rate(counts.accepted, counts.total_rows);
            (length, rate(counts.accepted, counts.drafts))
        });
        Self {
            running: counts.running as u32,
            waiting: counts.waiting as u32,
            retracted: counts.retracted as u32,
            used_tokens: total.saturating_sub(free) * page,
            total_tokens: total * page,
            max_running,
            throughput: if counts.running > 0 { throughput } else { 0.0 },
            hit_rate: rate(counts.cached_tokens, counts.prompt_tokens),
            pending_tokens,
            drafts,
        }
    }

    /// The share of the pool that requests hold.
    pub(crate) fn usage(&self) -> f64 {
        self.used_tokens as f64 / self.total_tokens.max(1) as f64
    }

    /// The share of the requests that may run at once.
    pub(crate) fn utilization(&self) -> f64 {
        f64::from(self.running) / f64::from(self.max_running.max(1))
    }
}

/// Tokens a second of each replica, since it was asked the last time, except for times that are too short.
#[derive(Debug)]
pub(crate) struct Throughput {
    at: Instant,
    tokens: Vec<u64>,
    rates: Vec<f64>,
}

impl Default for Throughput {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            tokens: Vec::new(),
            rates: Vec::new(),
        }
    }
}

impl Throughput {
    /// The rates, where so many tokens have come so far.
    pub(crate) fn rates(&mut self, tokens: &[u64]) -> Vec<f64> {
        const SHORTEST: Duration = Duration::from_secs(1);
        let passed = self.at.elapsed();
        if passed >= SHORTEST || self.rates.len() != tokens.len() {
            self.tokens.resize(tokens.len(), 0);
            let pairs = tokens.iter().zip(&self.tokens);
            let rate = |(now, then): (&u64, &u64)| {
                now.saturating_sub(*then) as f64 / passed.as_secs_f64().max(1.0)
            };
            self.rates = pairs.map(rate).collect();
            self.tokens = tokens.to_vec();
            self.at = Instant::now();
        }
        self.rates.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pie_engine::Stats;

    #[test]
    fn evictable_pages_count_as_free() {
        let capabilities = Capabilities {
            total_pages: 100,
            kv_page_size: 16,
            swap_pool_size: 0,
            max_forward_tokens: 1,
            max_forward_requests: 1,
            max_page_refs: 1,
            max_model_len: 1,
            embedding_size: 0,
            hidden_size: 0,
            embed_size: 0,
            embedding_normalized: false,
            vocab_size: 1,
            arch_name: String::new(),
            activation_dtype: String::new(),
            snapshot_dir: String::new(),
            rs_cache_slots: 0,
            system_speculation_supported: false,
            enable_system_speculation: false,
        };
        let stats = ReplicaStats {
            scheduler: Stats {
                running: 2,
                free_pages: 10,
                cached_pages: 65,
                prompt_tokens: 10,
                cached_tokens: 5,
                ..Stats::default()
            },
            total_pages: 100,
            ..ReplicaStats::default()
        };
        let loads = Loads::new(&stats, &capabilities, 8, 7.0, 3);
        assert_eq!((loads.used_tokens, loads.total_tokens), (400, 1600));
        let shares = [loads.usage(), loads.utilization(), loads.hit_rate];
        let percent = shares.map(|share| (share * 100.0).round() as u32);
        assert_eq!(percent, [25, 25, 50]);
        assert_eq!((loads.throughput as u32, loads.pending_tokens), (7, 3));
        assert_eq!(loads.drafts, None);
    }
}
