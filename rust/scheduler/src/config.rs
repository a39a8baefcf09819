//! Settings of the operator, and limits of the driver.

use std::str::FromStr;

use crate::error::SchedulerError;

/// The scheduling policy: the order in which waiting requests are admitted. Names and semantics are `SGLang`'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The order of request.
    #[default]
    Fcfs,
    /// Longest cached prefix first; with more than 128 waiting requests, first come, first served.
    Lpm,
    /// Depth-first over the prefix index, subtrees with the most waiting requests first.
    DfsWeight,
    /// Longest output first.
    Lof,
    /// A random order, from [`Config::seed`].
    Random,
    /// Requests whose routing key most running requests have first.
    RoutingKey,
}

impl Policy {
    const NAMES: [(&'static str, Self); 6] = [
        ("fcfs", Self::Fcfs),
        ("lpm", Self::Lpm),
        ("dfs-weight", Self::DfsWeight),
        ("lof", Self::Lof),
        ("random", Self::Random),
        ("routing-key", Self::RoutingKey),
    ];
}

impl FromStr for Policy {
    type Err = SchedulerError;

    fn from_str(name: &str) -> Result<Self, SchedulerError> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        let (_, policy) = known.ok_or_else(|| SchedulerError::Policy { name: name.into() })?;
        Ok(*policy)
    }
}

/// Settings of the operator. `SGLang`'s name is given where it has the same setting.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a setting of its own"
)]
pub struct Config {
    /// `schedule_policy`.
    pub policy: Policy,
    /// `schedule_conservativeness`: the share of the remaining output of running requests that admission reserves. Larger is
    /// more cautious.
    pub conservativeness: f32,
    /// `chunked_prefill_size`: most tokens of a step, prefills and decodes together; while no request
    /// [`streams`](crate::NewRequest::streams), see [`step_us`](Self::step_us).
    pub chunk_tokens: u32,
    /// Target time of prefill steps in µs while no request streams, by measured step times; a step may have at least
    /// `chunk_tokens` tokens. 0: no more than these.
    pub step_us: u64,
    /// `max_running_requests`: most sequences that hold pages. With more than [`Limits::max_forward_requests`], they take
    /// turns.
    pub max_running: u32,
    /// `max_queued_requests`: most waiting sequences.
    pub max_queued: Option<u32>,
    /// Inter-token latency limit in µs: the longest time between two tokens of a streaming request that prefills of others may
    /// cause. The prefill budget follows from measured step times. A limit below twice the time of a decode step counts as
    /// twice that time, so that prefills make progress. 0: no limit.
    pub gap_us: u64,
    /// While many requests wait for their first token, prefills may exceed `gap_us`: up to so many times the time of the
    /// decodes. Up to 1: never.
    pub gap_growth: u8,
    /// Not `disable_radix_cache`: whether computed KV is kept in the prefix index.
    pub prefix_cache: bool,
    /// `radix_eviction_policy`.
    pub eviction: pie_kv_cache::radix::Policy,
    /// Whether KV cache events are recorded, for [`Scheduler::take_kv_events`](crate::Scheduler::take_kv_events). They cost a
    /// SHA-256 per page.
    pub kv_events: bool,
    /// `enable_priority_scheduling`: [`NewRequest::priority`](crate::NewRequest::priority) comes before the policy, which must
    /// be `fcfs` or `lof`.
    pub priority: bool,
    /// `schedule_low_priority_values_first`.
    pub low_priority_first: bool,
    /// `priority_scheduling_preemption_threshold`: a waiting request whose priority is better by more than this takes
    /// the pages of running ones. `None`: never.
    pub preemption_threshold: Option<i32>,
    /// How often others that came later may be admitted before a waiting request. Then none is, until it is admitted.
    pub max_overtakes: u32,
    /// How long a sequence may take from its first admission to its end, in µs; then it ends as
    /// [`Finish::Deadline`](crate::Finish::Deadline). 0: no limit.
    pub running_limit_us: u64,
    /// A stop in the last token that `max_tokens` allows ends a sequence as a stop, as in vLLM and in `SGLang` from 0.5.23 on; else as
    /// [`Finish::Length`](crate::Finish::Length), as in 0.5.17.
    pub stop_before_length: bool,
    /// For [`Policy::Random`].
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::Fcfs,
            conservativeness: 1.0,
            chunk_tokens: 8192,
            step_us: 250_000,
            max_running: 256,
            max_queued: None,
            gap_us: 6000,
            gap_growth: 8,
            prefix_cache: true,
            eviction: pie_kv_cache::radix::Policy::Lru,
            kv_events: false,
            priority: false,
            low_priority_first: false,
            preemption_threshold: None,
            max_overtakes: 256,
            running_limit_us: 0,
            stop_before_length: false,
            seed: 0,
        }
    }
}

/// Limits of the driver: its capabilities of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Pages of KV on the device, ids from 0.
    pub total_pages: u32,
    /// Pages of KV on the host, ids from 0; the capability `swap_pool_size`.
    pub host_pages: u32,
    /// Tokens of a page; the capability `kv_page_size`.
    pub page_size: u32,
    /// Most input tokens and drafts of a step.
    pub max_forward_tokens: u32,
    /// Most rows of a step.
    pub max_forward_requests: u32,
    /// Most page references of a step, shared pages counted each time.
    pub max_page_refs: u32,
    /// Most bytes of images of a step.
    pub max_image_bytes: u32,
    /// Most tokens of a sequence.
    pub max_model_len: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Most words of log-probabilities of an output.
    pub max_logprob_words: u32,
    /// The frame size limit.
    pub frame: FrameBytes,
}

/// The frame size limit, and the most bytes that each part of a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameBytes {
    /// Most bytes of all rows of a step.
    pub max: u32,
    /// A row, besides the parts below.
    pub row: u32,
    /// An input token.
    pub token: u32,
    /// A draft.
    pub draft: u32,
    /// A page of a row.
    pub page: u32,
    /// A token of [`Row::history`](crate::Row::history), or of [`Row::forbidden`](crate::Row::forbidden).
    pub listed: u32,
    /// A token bitmask. Consecutive rows with the same share one.
    pub mask: u32,
    /// Not part of a frame: most [`NewRequest::params_bytes`](crate::NewRequest::params_bytes) of all admitted sequences, which
    /// the driver keeps. A larger sequence is admitted alone.
    pub params: u64,
}

/// Parts of a row besides tokens, drafts and pages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowExtras {
    /// [`NewRequest::params_bytes`](crate::NewRequest::params_bytes), if the row brings them.
    pub(crate) own: u32,
    /// History tokens.
    pub(crate) listed: u32,
    /// Forbidden tokens, sent as a list or, if smaller, as a mask.
    pub(crate) forbidden: u32,
    /// It has a mask.
    pub(crate) masked: bool,
}

impl FrameBytes {
    /// No limit.
    pub const UNLIMITED: Self = Self {
        max: u32::MAX,
        row: 0,
        token: 0,
        draft: 0,
        page: 0,
        listed: 0,
        mask: 0,
        params: u64::MAX,
    };

    /// Most bytes of so many rows with these tokens, drafts and pages.
    pub(crate) fn of_rows(&self, rows: u32, (tokens, drafts, pages): (u32, u32, u32)) -> u64 {
        let bytes = |each: u32, count: u32| u64::from(each) * u64::from(count);
        bytes(self.row, rows)
            + bytes(self.token, tokens)
            + bytes(self.draft, drafts)
            + bytes(self.page, pages)
    }

    /// Most bytes of the other parts of a row.
    pub(crate) fn of_extras(&self, more: RowExtras) -> u64 {
        let bytes = |each: u32, count: u32| u64::from(each) * u64::from(count);
        u64::from(more.own)
            + bytes(self.listed, more.listed)
            + (2 * bytes(self.listed, more.forbidden)).min(self.mask.into())
            + bytes(self.mask, more.masked.into())
    }

    /// Most bytes of a row.
    pub(crate) fn of_row(&self, sizes: (u32, u32, u32), more: RowExtras) -> u64 {
        self.of_rows(1, sizes) + self.of_extras(more)
    }

    /// The last possible end of a row from `start` on within `bytes`, of which `fixed` are taken.
    pub(crate) fn end_of_row(&self, start: u32, page_size: u32, (bytes, fixed): (u64, u64)) -> u32 {
        let [start, size, token, page] = [start, page_size, self.token, self.page].map(u64::from);
        // A token and its share of a page; the last page may be partial.
        let each = size * token + page;
        if each == 0 {
            return u32::MAX;
        }
        let left = (bytes + start * token).saturating_sub(fixed + page);
        u32::try_from(left * size / each).unwrap_or(u32::MAX)
    }
}

impl Config {
    /// Checks the settings.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), SchedulerError> {
        let wrong = |name, value: &dyn std::fmt::Display, wanted| SchedulerError::Setting {
            name,
            value: value.to_string(),
            wanted,
        };
        for (name, value) in [
            ("chunked_prefill_size", self.chunk_tokens),
            ("max_running_requests", self.max_running),
            ("total_pages", limits.total_pages),
            ("kv_page_size", limits.page_size),
            ("max_forward_tokens", limits.max_forward_tokens),
            ("max_forward_requests", limits.max_forward_requests),
            ("max_page_refs", limits.max_page_refs),
            ("max_model_len", limits.max_model_len),
            ("vocab_size", limits.vocab_size),
        ] {
            if value == 0 {
                return Err(wrong(name, &value, "at least 1"));
            }
        }
        if !(self.conservativeness >= 0.0 && self.conservativeness.is_finite()) {
            let value = &self.conservativeness;
            return Err(wrong("schedule_conservativeness", value, "0 or more"));
        }
        let plain = matches!(self.policy, Policy::Fcfs | Policy::Lof);
        if self.priority && !plain {
            let value = &format_args!("{:?}", self.policy);
            let wanted = "fcfs or lof with priorities";
            return Err(wrong("schedule_policy", value, wanted));
        }
        Ok(())
    }
}

impl Limits {
    /// Whether every step within the other limits fits a frame, if its rows have only tokens, drafts and pages.
    pub(crate) fn frame_is_ample(&self) -> bool {
        let (frame, tokens) = (&self.frame, self.max_forward_tokens);
        let [all_tokens, all_drafts] =
            [(tokens, 0), (0, tokens)].map(|(tokens, drafts)| (tokens, drafts, self.max_page_refs));
        let most = |sizes| frame.of_rows(self.max_forward_requests, sizes);
        most(all_tokens).max(most(all_drafts)) <= frame.max.into()
    }

    /// Most tokens of an image: the other rows of its step have one each.
    pub(crate) fn image_tokens(&self) -> u32 {
        self.max_forward_tokens
            .saturating_sub(self.max_forward_requests - 1)
    }

    /// Most tokens of a sequence, and the limit that determines it.
    pub(crate) fn longest(&self) -> (u32, &'static str) {
        let pages = |pages: u32| pages.saturating_mul(self.page_size);
        let limits = [
            (self.max_model_len, "the model's length"),
            (pages(self.total_pages), "the pages of the pool"),
            (pages(self.max_page_refs), "the pages of a step"),
        ];
        let [first, rest @ ..] = limits;
        rest.into_iter().fold(
            first,
            |least, next| if next.0 < least.0 { next } else { least },
        )
    }
}
