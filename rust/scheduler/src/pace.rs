//! What steps cost, and what follows for the next: the share of prompts, and what a copy is worth.

use crate::config::Config;

/// Steps after which it is asked again whether there is room, even if nothing has ended: what running requests are expected to
/// produce becomes less.
pub(crate) const LOOK_AGAIN: u64 = 8;

/// Tokens of prompts that a step with decodes may have at least, so that prompts go on.
pub(crate) const MIN_PROMPT: u32 = 64;

/// The share of prompts before anything is known.
const FIRST_BUDGET: f32 = 512.0;

/// How much of an average the latest value is.
const WEIGHT: f32 = 0.2;

/// How many requests that wait for their first token make the prompts of a step take the time of its decodes once more: one for so
/// many streams.
const STREAMS_PER_WAITING: f32 = 16.0;

/// Steps full of prompts that tell what a token of one costs at best.
const FULL_STEPS: usize = 4;

/// An average that forgets.
#[derive(Debug, Clone, Copy, Default)]
struct Average(Option<f32>);

impl Average {
    fn add(&mut self, value: f32) {
        self.0 = Some(self.0.map_or(value, |old| old + WEIGHT * (value - old)));
    }
}

/// What steps without prompts take, by the tokens whose KV they read: an average for each doubling of these.
#[derive(Debug)]
struct Decodes {
    /// Tokens and µs.
    averages: [(Average, Average); u64::BITS as usize + 1],
    /// Of the last steps, whatever they read.
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

    /// The time of a step that reads so much: on the line through the two that are known next to it.
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
        // More to read never takes less; less than was ever read takes about as long as that.
        let slope = ((most - least) / (to - from)).max(0.0);
        Some(least + slope * (context - from).max(0.0))
    }
}

/// What a token of a prompt took in the last steps that were full of them. One that was slow, as the first of a driver is, says
/// little, so the least counts.
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

/// Learnt costs.
#[derive(Debug)]
pub(crate) struct Pace {
    /// 0: no limit.
    gap_us: f32,
    /// How many times the time of decodes prompts may take while many requests wait.
    growth: f32,
    /// Of a step without streams.
    step_us: f32,
    chunk: f32,
    full: Full,
    decodes: Decodes,
    /// Of a token of a prompt, in µs.
    token: Average,
    /// Of a page that is copied, in µs.
    page: Average,
    /// Tokens of prompts that fit among decodes.
    budget: f32,
    /// Whether a step that had both has shown it.
    is_tried: bool,
}

/// What a step had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) decodes: u32,
    pub(crate) prompt_tokens: u32,
    pub(crate) copied_pages: u32,
    /// Tokens whose KV the decodes read.
    pub(crate) context: u64,
    /// Whether a decode is of a stream.
    pub(crate) streams: bool,
}

impl Pace {
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

    /// Most tokens of prompts for a step with or without decodes of streams.
    pub(crate) fn budget(&self, streams: bool) -> u32 {
        let limited = streams && self.gap_us > 0.0;
        (if limited { self.budget } else { self.chunk }) as u32
    }

    /// The same for a step with these decodes of streams, while so many requests wait for their first token.
    ///
    /// How long prompts hold streams up in all does not depend on the size of their parts; but the smaller these are, the more often
    /// a waiting request waits for a step's decodes. So the more of them wait, the larger the parts.
    pub(crate) fn crowded_budget(&self, load: Load, waiting: usize) -> u32 {
        let usual = self.budget(true);
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

    /// Most tokens of a step, prompts and decodes together, while no request streams. What a step costs besides its tokens is
    /// paid once, so larger ones are cheaper; a request that comes meanwhile waits for the whole step.
    pub(crate) fn without_streams(&self) -> u32 {
        let fits = self.full.least().map_or(0.0, |token| self.step_us / token);
        fits.max(self.chunk) as u32
    }

    /// What a step takes in µs, rather less than more; `None` before anything is known.
    pub(crate) fn expect(&self, load: Load) -> Option<f32> {
        let decode = match load.decodes {
            0 => 0.0,
            _ => self.decodes.at(load.context)?,
        };
        match load.prompt_tokens {
            0 => Some(decode),
            // What a token costs is least in long prompts.
            tokens => Some(decode + tokens as f32 * self.full.least().or(self.token.0)?),
        }
    }

    /// The least that [`budget`](Self::budget) may be.
    pub(crate) fn least(&self) -> u32 {
        MIN_PROMPT.min(self.chunk as u32)
    }

    /// Whether a page of so many tokens is brought from the host sooner than computed. True until both are known.
    pub(crate) fn host_pays(&self, page_size: usize) -> bool {
        match (self.page.0, self.token.0) {
            (Some(page), Some(token)) => page < token * page_size as f32,
            _ => true,
        }
    }

    /// A step took so long, and the copies before it.
    pub(crate) fn learn(&mut self, load: Load, step_us: u64, copies_us: u64) {
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
        // Never 0: a step takes its time, whatever clock measures it.
        let prompts = (took - decode).max(1.0);
        if load.prompt_tokens >= MIN_PROMPT {
            self.token.add(prompts / tokens);
        }
        // Next to decodes a step of this size has fewer tokens of prompts.
        if tokens >= self.chunk / 2.0 {
            self.full.add(prompts / tokens);
        }
        let alone = if load.decodes > 0 {
            decode
        } else {
            self.decodes.latest.0.unwrap_or(0.0)
        };
        let room = self.gap_us.max(2.0 * alone) - decode;
        // Larger parts, for those who wait, say little of the usual ones.
        if load.streams && tokens > 1.5 * self.budget {
            return;
        }
        if load.streams {
            self.is_tried = true;
            self.adapt(tokens, (room / prompts).clamp(0.5, 1.25));
        } else if !self.is_tried && load.prompt_tokens >= MIN_PROMPT {
            // As far as steps can tell that were not limited.
            let budget = room * tokens / prompts;
            self.budget = budget.clamp(self.least() as f32, self.chunk);
        }
    }

    /// So many tokens of prompts should have been more or fewer by a factor, to fill the gap. It is near 1, since times
    /// are noisy.
    fn adapt(&mut self, tokens: f32, factor: f32) {
        let wanted = tokens * factor;
        let least = self.least() as f32;
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
    use super::{Load, Pace};
    use crate::config::Config;

    /// With parts of prompts that do not grow.
    fn pace(gap_us: u64, step_us: u64, chunk_tokens: u32) -> Pace {
        let config = Config {
            gap_us,
            step_us,
            gap_growth: 0,
            ..Config::default()
        };
        Pace::new(&config, chunk_tokens)
    }

    fn load(decodes: u32, prompt_tokens: u32) -> Load {
        Load {
            decodes,
            prompt_tokens,
            copied_pages: 0,
            context: u64::from(decodes) * 100,
            streams: decodes > 0,
        }
    }

    /// What steps take: a base, and so much for each token of a prompt.
    fn settle(pace: &mut Pace, decode_us: u64, token_us: f64) -> u32 {
        for _ in 0..60 {
            pace.learn(load(64, 0), decode_us, 0);
            let tokens = pace.budget(true);
            let prompts = 200.0 + f64::from(tokens) * token_us;
            pace.learn(load(64, tokens), decode_us + prompts as u64, 0);
        }
        pace.budget(true)
    }

    #[test]
    fn the_share_of_prompts_fills_the_gap() {
        for (gap_us, decode_us, token_us, expected) in [
            (6000, 2000, 2.0, 1900),
            (6000, 2000, 10.0, 380),
            // What is faster than the limit needs is not slowed down.
            (6000, 2000, 0.1, 8192),
            // A limit that decodes alone exceed: as much time again for prompts.
            (6000, 9000, 20.0, 440),
            (6000, 9000, 900.0, 64),
        ] {
            let mut pace = self::pace(gap_us, 0, 8192);
            let found = settle(&mut pace, decode_us, token_us);
            assert!(
                found.abs_diff(expected) <= expected / 5,
                "{found}, not {expected}"
            );
            assert_eq!(pace.budget(false), 8192);
        }
        // Prompts alone tell something already: 2 µs a token.
        let mut pace = self::pace(6000, 0, 8192);
        pace.learn(load(0, 8000), 16_000, 0);
        assert_eq!(pace.budget(true), 3000);
        let mut free = self::pace(0, 0, 8192);
        assert_eq!(settle(&mut free, 2000, 50.0), 8192);
    }

    /// Steps of few requests end a burst; the next one begins with many, and has no step without prompts for long.
    #[test]
    fn what_decodes_take_follows_from_what_they_read() {
        let step = |context: u64| 900 + context / 40;
        let mut pace = self::pace(6000, 0, 8192);
        for requests in (1..=256).rev() {
            let context = requests * 1000;
            let load = Load {
                context,
                ..load(requests as u32, 0)
            };
            pace.learn(load, step(context), 0);
        }
        let busy = 200_000;
        for _ in 0..60 {
            let tokens = pace.budget(true);
            let load = Load {
                context: busy,
                ..load(200, tokens)
            };
            pace.learn(load, step(busy) + u64::from(tokens) * 3, 0);
        }
        // As much time for prompts as decodes take, 5,900 µs.
        let found = pace.budget(true);
        assert!(found.abs_diff(1966) <= 400, "{found}");
    }

    /// Without streams there is no limit, and what was found for streams stays.
    #[test]
    fn steps_without_streams_do_not_change_what_streams_need() {
        let mut pace = self::pace(6000, 0, 8192);
        let found = settle(&mut pace, 2000, 10.0);
        for _ in 0..20 {
            let load = Load {
                streams: false,
                ..load(64, 8000)
            };
            pace.learn(load, 82_000, 0);
        }
        assert_eq!(pace.budget(true), found);
        assert_eq!(pace.budget(false), 8192);
    }

    /// Without streams as much as fits into the time of a step, but never less than a chunk. A slow first step is forgotten soon.
    #[test]
    fn a_step_without_streams_may_be_larger_than_a_chunk() {
        let step = |tokens: u32| 20_000 + u64::from(tokens) * 3;
        let play = |step_us| {
            let mut pace = self::pace(6000, step_us, 16_384);
            assert_eq!(pace.without_streams(), 16_384);
            pace.learn(load(0, 16_384), 5_000_000, 0);
            let sizes = (0..4).map(|_| {
                let tokens = pace.without_streams().min(120_000);
                pace.learn(load(0, tokens), step(tokens), 0);
                tokens
            });
            let sizes: Vec<u32> = sizes.collect();
            (sizes, pace)
        };
        let (sizes, mut pace) = play(500_000);
        assert_eq!(sizes[0], 16_384);
        assert!(sizes[1] > 100_000, "{sizes:?}");
        assert_eq!(sizes[2..], [120_000, 120_000]);
        // What streams need is not found from these.
        assert!(pace.budget(true) < 2000);
        // Short prompts say nothing of long ones.
        for _ in 0..8 {
            pace.learn(load(0, 100), 20_300, 0);
        }
        assert!(pace.without_streams() > 120_000);
        assert_eq!(play(20_000).0, [16_384; 4]);
        assert_eq!(play(0).0, [16_384; 4]);
    }

    /// A decode takes 9 ms, a token of a prompt 25 µs: usually prompts have as much time as decodes.
    #[test]
    fn parts_of_prompts_grow_while_many_wait() {
        let mut pace = Pace::new(&Config::default(), 8192);
        let usual = settle(&mut pace, 9000, 25.0);
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
            let found = pace.crowded_budget(step, waiting);
            assert!(
                (least..=most).contains(&found) && found >= last,
                "{waiting}: {found}"
            );
            last = found;
        }
        // Such steps do not change what few requests find.
        for _ in 0..30 {
            pace.learn(load(64, 2500), 9000 + 200 + 2500 * 25, 0);
        }
        assert_eq!(pace.budget(true), usual);
        let mut fixed = self::pace(6000, 0, 8192);
        let usual = settle(&mut fixed, 9000, 25.0);
        assert_eq!(fixed.crowded_budget(step, 1000), usual);
        // Nothing is known yet.
        let pace = Pace::new(&Config::default(), 8192);
        assert_eq!(pace.crowded_budget(step, 1000), pace.budget(true));
    }

    #[test]
    fn the_host_pays_as_long_as_copies_are_cheaper() {
        let mut pace = self::pace(0, 0, 8192);
        assert!(pace.host_pays(16));
        pace.learn(load(0, 1000), 10_000, 0);
        let copies = |copied_pages| Load {
            copied_pages,
            ..load(1, 0)
        };
        // A token takes 10 µs, a page of 16 thus 160.
        pace.learn(copies(10), 3000, 1500);
        assert!(pace.host_pays(16));
        assert!(!pace.host_pays(8));
        for _ in 0..20 {
            pace.learn(copies(10), 3000, 2000);
        }
        assert!(!pace.host_pays(16));
    }
}
