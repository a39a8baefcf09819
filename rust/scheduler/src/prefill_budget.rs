//! The prefill budget: prefill tokens of a step, and whether a swap is cheaper than recomputation, from measured step times.

use crate::config::Config;

/// Steps after which admission is tried again although nothing has ended: the expected output of running requests shrinks.
pub(crate) const ADMISSION_RETRY_STEPS: u64 = 8;

/// Fewest prefill tokens of a step with decodes, so that prefills make progress.
pub(crate) const MIN_PREFILL_TOKENS: u32 = 64;

/// Prefill tokens before anything was measured.
const FIRST_BUDGET: f32 = 512.0;

/// Weight of the newest value in an average.
const WEIGHT: f32 = 0.2;

/// For each waiting request per so many streams, prefills may take the time of the decodes once more.
const STREAMS_PER_WAITING: f32 = 16.0;

/// Prefill-bound steps of which the cheapest token counts.
const FULL_STEPS: usize = 4;

/// An exponential moving average.
#[derive(Debug, Clone, Copy, Default)]
struct Average(Option<f32>);

impl Average {
    fn add(&mut self, value: f32) {
        self.0 = Some(self.0.map_or(value, |old| old + WEIGHT * (value - old)));
    }
}

/// The time of decode-only steps by the KV tokens that they read: an average for each power of two.
#[derive(Debug)]
struct Decodes {
    /// Tokens, µs.
    averages: [(Average, Average); u64::BITS as usize + 1],
    /// Over all steps.
    latest: Average,
}

impl Decodes {
    fn new() -> Self {
        Self {
            averages: [<(Average, Average)>::default(); u64::BITS as usize + 1],
            latest: Average::default(),
        }
    }

    fn add(&mut self, context: u64, took: f32) {
        let (tokens, times) = &mut self.averages[(u64::BITS - context.leading_zeros()) as usize];
        tokens.add(context as f32);
        times.add(took);
        self.latest.add(took);
    }

    /// The time of a step that reads `context` KV tokens: linear interpolation between the two nearest averages.
    fn at(&self, context: u64) -> Option<f32> {
        let context = context as f32;
        let (mut first, mut second) = (None, None);
        for (tokens, times) in &self.averages {
            let Some(known) = tokens.0.zip(times.0) else {
                continue;
            };
            (first, second) = (second, Some(known));
            if known.0 > context && first.is_some() {
                break;
            }
        }
        let (Some((from, least)), Some((to, most))) = (first, second) else {
            return second.map(|(_, time)| time);
        };
        // The slope is not negative, and there is no extrapolation below the first average.
        let slope = ((most - least) / (to - from)).max(0.0);
        Some(least + slope * (context - from).max(0.0))
    }
}

/// The time of a prefill token in the last prefill-bound steps. The least counts, since the first steps of a driver are slow.
#[derive(Debug, Clone, Copy, Default)]
struct Full {
    token_us: [Option<f32>; FULL_STEPS],
    next: usize,
}

impl Full {
    fn add(&mut self, token_us: f32) {
        self.token_us[self.next] = Some(token_us);
        self.next = (self.next + 1) % FULL_STEPS;
    }

    fn least(&self) -> Option<f32> {
        self.token_us.into_iter().flatten().min_by(f32::total_cmp)
    }
}

/// The measured cost model, and the budget that follows.
#[derive(Debug)]
pub(crate) struct PrefillBudget {
    /// [`Config::gap_us`]; 0: no limit.
    gap_us: f32,
    /// [`Config::gap_growth`].
    growth: f32,
    /// [`Config::step_us`].
    step_us: f32,
    chunk: f32,
    full: Full,
    decodes: Decodes,
    /// Time of a prefill token in µs.
    token: Average,
    /// Time of a page copy in µs.
    page: Average,
    /// Prefill tokens next to decodes of streams.
    budget: f32,
    /// Whether a step with both was measured.
    is_tried: bool,
}

/// The work of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StepLoad {
    pub(crate) decodes: u32,
    pub(crate) prompt_tokens: u32,
    pub(crate) copied_pages: u32,
    /// KV tokens that the decodes read.
    pub(crate) context: u64,
    /// Whether a decode belongs to a streaming request.
    pub(crate) streams: bool,
}

impl PrefillBudget {
    pub(crate) fn new(config: &Config, chunk_tokens: u32) -> Self {
        let chunk = chunk_tokens as f32;
        Self {
            gap_us: config.gap_us as f32,
            growth: f32::from(config.gap_growth),
            step_us: config.step_us as f32,
            chunk,
            full: Full::default(),
            decodes: Decodes::new(),
            token: Average::default(),
            page: Average::default(),
            budget: FIRST_BUDGET.min(chunk),
            is_tried: false,
        }
    }

    /// Most prefill tokens of a step with or without decodes of streams.
    pub(crate) fn tokens(&self, streams: bool) -> u32 {
        let limited = streams && self.gap_us > 0.0;
        (if limited { self.budget } else { self.chunk }) as u32
    }

    /// [`tokens`](Self::tokens) next to these decodes, while so many requests wait for their first token.
    ///
    /// The total time that prefills add to streams does not depend on the chunk size, but with smaller chunks a waiting request
    /// waits for more decodes. So the more requests wait, the larger the chunks.
    pub(crate) fn tokens_with_waiting(&self, load: StepLoad, waiting: usize) -> u32 {
        let usual = self.tokens(true);
        let Some((decode, token)) = self.decodes.at(load.context).zip(self.token.0) else {
            return usual;
        };
        let share = STREAMS_PER_WAITING * waiting as f32 / load.decodes.max(1) as f32;
        let times = share.min(self.growth);
        if times <= 1.0 {
            return usual;
        }
        usual.max((decode * times / token).min(self.chunk) as u32)
    }

    /// Most tokens of a step, prefills and decodes, while no request streams. Large steps amortize fixed costs; a new request
    /// waits for the whole step.
    pub(crate) fn max_step_tokens(&self) -> u32 {
        let fits = self.full.least().map_or(0.0, |token| self.step_us / token);
        fits.max(self.chunk) as u32
    }

    /// The expected time of a step in µs, a low estimate; `None` before anything was measured.
    pub(crate) fn expected_us(&self, load: StepLoad) -> Option<f32> {
        let decode = match load.decodes {
            0 => 0.0,
            _ => self.decodes.at(load.context)?,
        };
        match load.prompt_tokens {
            0 => Some(decode),
            // Long prompts have the cheapest tokens.
            tokens => Some(decode + tokens as f32 * self.full.least().or(self.token.0)?),
        }
    }

    /// The smallest value of [`tokens`](Self::tokens).
    pub(crate) fn min_tokens(&self) -> u32 {
        MIN_PREFILL_TOKENS.min(self.chunk as u32)
    }

    /// Whether loading a page from the host takes less time than recomputing it. True until both were measured.
    pub(crate) fn prefer_host(&self, page_size: usize) -> bool {
        match (self.page.0, self.token.0) {
            (Some(page), Some(token)) => page < token * page_size as f32,
            _ => true,
        }
    }

    /// Records the time of a step and of the copies before it.
    pub(crate) fn record(&mut self, load: StepLoad, step_us: u64, copies_us: u64) {
        if load.copied_pages > 0 && copies_us > 0 {
            self.page.add(copies_us as f32 / load.copied_pages as f32);
        }
        let took = step_us.saturating_sub(copies_us) as f32;
        if load.prompt_tokens == 0 {
            return self.decodes.add(load.context, took);
        }
        let decode = if load.decodes > 0 {
            self.decodes.at(load.context)
        } else {
            Some(0.0)
        };
        let Some(decode) = decode else {
            return;
        };
        let tokens = load.prompt_tokens as f32;
        // At least 1 µs, whatever the clock measures.
        let prompts = (took - decode).max(1.0);
        if load.prompt_tokens >= MIN_PREFILL_TOKENS {
            self.token.add(prompts / tokens);
        }
        if tokens >= self.chunk / 2.0 {
            self.full.add(prompts / tokens);
        }
        let alone = if load.decodes > 0 {
            decode
        } else {
            self.decodes.latest.0.unwrap_or(0.0)
        };
        let budget_us = self.gap_us.max(2.0 * alone) - decode;
        // Larger chunks for waiting requests say little about the usual ones.
        if load.streams && tokens > 1.5 * self.budget {
            return;
        }
        if load.streams {
            self.is_tried = true;
            self.adapt(tokens, (budget_us / prompts).clamp(0.5, 1.25));
        } else if !self.is_tried && load.prompt_tokens >= MIN_PREFILL_TOKENS {
            // An estimate from prefills alone.
            let budget = budget_us * tokens / prompts;
            self.budget = budget.clamp(self.min_tokens() as f32, self.chunk);
        }
    }

    /// Moves the budget towards `tokens * factor`, by which prefills would fill the gap. The factor is near 1, since times are
    /// noisy.
    fn adapt(&mut self, tokens: f32, factor: f32) {
        let wanted = tokens * factor;
        let least = self.min_tokens() as f32;
        let budget = if factor < 1.0 {
            wanted
        } else {
            wanted.max(self.budget)
        };
        self.budget = budget.clamp(least, self.chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::{PrefillBudget, StepLoad};
    use crate::config::Config;

    /// Without larger chunks for waiting requests.
    fn with_limits(gap_us: u64, step_us: u64, chunk_tokens: u32) -> PrefillBudget {
        let config = Config {
            gap_us,
            step_us,
            gap_growth: 0,
            ..Config::default()
        };
        PrefillBudget::new(&config, chunk_tokens)
    }

    fn load(decodes: u32, prompt_tokens: u32) -> StepLoad {
        StepLoad {
            decodes,
            prompt_tokens,
            copied_pages: 0,
            context: u64::from(decodes) * 100,
            streams: decodes > 0,
        }
    }

    /// Step times: a base, and so much for each prefill token.
    fn converge(budget: &mut PrefillBudget, decode_us: u64, token_us: f64) -> u32 {
        for _ in 0..60 {
            budget.record(load(64, 0), decode_us, 0);
            let tokens = budget.tokens(true);
            let prompts = 200.0 + f64::from(tokens) * token_us;
            budget.record(load(64, tokens), decode_us + prompts as u64, 0);
        }
        budget.tokens(true)
    }

    #[test]
    fn prefills_fill_the_latency_limit() {
        for (gap_us, decode_us, token_us, expected) in [
            (6000, 2000, 2.0, 1900),
            (6000, 2000, 10.0, 380),
            // A device that is faster than the limit requires is not slowed down.
            (6000, 2000, 0.1, 8192),
            // Decodes alone exceed the limit: prefills get as much time again.
            (6000, 9000, 20.0, 440),
            (6000, 9000, 900.0, 64),
        ] {
            let mut budget = with_limits(gap_us, 0, 8192);
            let found = converge(&mut budget, decode_us, token_us);
            assert!(
                found.abs_diff(expected) <= expected / 5,
                "{found}, not {expected}"
            );
            assert_eq!(budget.tokens(false), 8192);
        }
        // Prefills alone are an estimate: 2 µs a token.
        let mut budget = with_limits(6000, 0, 8192);
        budget.record(load(0, 8000), 16_000, 0);
        assert_eq!(budget.tokens(true), 3000);
        let mut free = with_limits(0, 0, 8192);
        assert_eq!(converge(&mut free, 2000, 50.0), 8192);
    }

    /// Steps of few requests end a burst; the next one starts with many and has no decode-only step for long.
    #[test]
    fn decode_time_follows_from_kv_tokens() {
        let step = |context: u64| 900 + context / 40;
        let mut budget = with_limits(6000, 0, 8192);
        for requests in (1..=256).rev() {
            let context = requests * 1000;
            let load = StepLoad {
                context,
                ..load(requests as u32, 0)
            };
            budget.record(load, step(context), 0);
        }
        let busy = 200_000;
        for _ in 0..60 {
            let tokens = budget.tokens(true);
            let load = StepLoad {
                context: busy,
                ..load(200, tokens)
            };
            budget.record(load, step(busy) + u64::from(tokens) * 3, 0);
        }
        // Prefills get as much time as decodes, 5,900 µs.
        let found = budget.tokens(true);
        assert!(found.abs_diff(1966) <= 400, "{found}");
    }

    /// Without streams there is no limit, and the budget for streams stays.
    #[test]
    fn steps_without_streams_do_not_change_the_budget_of_streams() {
        let mut budget = with_limits(6000, 0, 8192);
        let found = converge(&mut budget, 2000, 10.0);
        for _ in 0..20 {
            let load = StepLoad {
                streams: false,
                ..load(64, 8000)
            };
            budget.record(load, 82_000, 0);
        }
        assert_eq!(budget.tokens(true), found);
        assert_eq!(budget.tokens(false), 8192);
    }

    /// Without streams as much as fits into `step_us`, at least a chunk. A slow first step is soon forgotten.
    #[test]
    fn a_step_without_streams_may_be_larger_than_a_chunk() {
        let step = |tokens: u32| 20_000 + u64::from(tokens) * 3;
        let play = |step_us| {
            let mut budget = with_limits(6000, step_us, 16_384);
            assert_eq!(budget.max_step_tokens(), 16_384);
            budget.record(load(0, 16_384), 5_000_000, 0);
            let sizes = (0..4).map(|_| {
                let tokens = budget.max_step_tokens().min(120_000);
                budget.record(load(0, tokens), step(tokens), 0);
                tokens
            });
            let sizes: Vec<u32> = sizes.collect();
            (sizes, budget)
        };
        let (sizes, mut budget) = play(500_000);
        assert_eq!(sizes[0], 16_384);
        assert!(sizes[1] > 100_000, "{sizes:?}");
        assert_eq!(sizes[2..], [120_000, 120_000]);
        // The budget for streams is not derived from these.
        assert!(budget.tokens(true) < 2000);
        // Short prompts say nothing about long ones.
        for _ in 0..8 {
            budget.record(load(0, 100), 20_300, 0);
        }
        assert!(budget.max_step_tokens() > 120_000);
        assert_eq!(play(20_000).0, [16_384; 4]);
        assert_eq!(play(0).0, [16_384; 4]);
    }

    /// Decodes take 9 ms, a prefill token 25 µs: usually prefills get as much time as decodes.
    #[test]
    fn chunks_grow_while_many_requests_wait() {
        let mut budget = PrefillBudget::new(&Config::default(), 8192);
        let usual = converge(&mut budget, 9000, 25.0);
        assert!(usual.abs_diff(352) <= 70, "{usual}");
        let step = load(48, 0);
        let mut last = usual;
        for (waiting, least, most) in [
            (0, usual, usual),
            (3, usual, usual),
            (6, 600, 720),
            (12, 1200, 1440),
            (48, 2400, 2880),
            (1000, 2400, 2880),
        ] {
            let found = budget.tokens_with_waiting(step, waiting);
            assert!(
                (least..=most).contains(&found) && found >= last,
                "{waiting}: {found}"
            );
            last = found;
        }
        // Such steps do not change the usual budget.
        for _ in 0..30 {
            budget.record(load(64, 2500), 9000 + 200 + 2500 * 25, 0);
        }
        assert_eq!(budget.tokens(true), usual);
        let mut fixed = with_limits(6000, 0, 8192);
        let usual = converge(&mut fixed, 9000, 25.0);
        assert_eq!(fixed.tokens_with_waiting(step, 1000), usual);
        // Nothing was measured.
        let budget = PrefillBudget::new(&Config::default(), 8192);
        assert_eq!(budget.tokens_with_waiting(step, 1000), budget.tokens(true));
    }

    #[test]
    fn the_host_is_preferred_while_copies_are_cheaper() {
        let mut budget = with_limits(0, 0, 8192);
        assert!(budget.prefer_host(16));
        budget.record(load(0, 1000), 10_000, 0);
        let copies = |copied_pages| StepLoad {
            copied_pages,
            ..load(1, 0)
        };
        // A token takes 10 µs, a page of 16 thus 160.
        budget.record(copies(10), 3000, 1500);
        assert!(budget.prefer_host(16));
        assert!(!budget.prefer_host(8));
        for _ in 0..20 {
            budget.record(copies(10), 3000, 2000);
        }
        assert!(!budget.prefer_host(16));
    }
}
