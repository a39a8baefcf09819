//! One sequence of a request: tokens, KV state, grammar, stop criteria.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pie_kv_cache::radix::Key;

use crate::config::RowExtras;
use crate::grammar::GrammarState;
use crate::kv_cache_manager::SequencePages;
use crate::logprobs::LogprobBuffer;
use crate::new_request::{Image, NewRequest};
use crate::output::{Admitted, Finish};
use crate::stop_criteria::{EndRules, StopMatcher, TokenBytes};
use crate::suspects::Suspicion;

/// Placeholder for a token that is still in flight.
const UNKNOWN: u32 = 0;

/// Most output tokens that admission expects; `SGLang`'s `CLIP_MAX_NEW_TOKENS`.
const EXPECTED: u32 = 4096;

/// The request that its sequences share.
#[derive(Debug)]
pub(crate) struct SharedRequest<S> {
    pub(crate) request: NewRequest<S>,
    pub(crate) prompt_len: u32,
    /// `StopCriteria::max_tokens`, cut to what model and pool allow.
    pub(crate) max_tokens: u32,
    /// `StopCriteria::min_tokens`, cut likewise.
    pub(crate) min_tokens: u32,
    /// Priority rank: lower is better.
    pub(crate) rank: i64,
    /// [`Scheduler::registrations`](crate::Scheduler) as of the last row that brought the parameters.
    pub(crate) registered: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Running,
    Ended,
}

/// A running prefill whose pages another sequence waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefixLeader {
    pub(crate) slot: usize,
    pub(crate) order: u64,
    /// Pages of the common prefix.
    pub(crate) pages: usize,
}

#[derive(Debug)]
pub(crate) struct Sequence<S> {
    pub(crate) shared: Arc<SharedRequest<S>>,
    /// Copies of fields of `shared`, for loops over all sequences.
    pub(crate) prompt_len: u32,
    pub(crate) max_tokens: u32,
    pub(crate) min_tokens: u32,
    drafts_wanted: bool,
    /// End of the last image; 0 without images.
    images_end: u32,
    /// Whether each step's tokens are emitted.
    pub(crate) streams: bool,
    /// The session that keeps its pages; `None` once that was ended.
    pub(crate) session: Option<u64>,
    pub(crate) sample: u32,
    pub(crate) context: u64,
    /// Arrival number, unique.
    pub(crate) order: u64,
    pub(crate) state: State,
    /// Prompt and output; the last `pending` are placeholders for tokens in flight.
    pub(crate) tokens: Vec<u32>,
    pub(crate) pending: u32,
    /// The row in flight that samples the last token.
    pub(crate) last_row: u32,
    pub(crate) drafts: Vec<u32>,
    pub(crate) kv: SequencePages,
    /// Tokens whose KV is computed, by processed steps.
    pub(crate) stored: u32,
    /// Start of the row that reports earlier output tokens as history: after the tokens that were cached at the last admission,
    /// or whose pages were taken over since.
    pub(crate) resumed: u32,
    /// Tokens whose KV is computed once the steps in flight are.
    pub(crate) scheduled: u32,
    /// The last plan that has it.
    pub(crate) last_plan: u64,
    /// Number of retractions: output for rows of an earlier epoch does not change its KV state.
    pub(crate) epoch: u32,
    pub(crate) suspicion: Suspicion,
    /// Its rows have no mask, forbidden tokens or log-probabilities.
    plain: bool,
    /// [`SharedRequest::registered`] as of its last row, if it is plain: a copy for the common case.
    plain_since: u64,
    pub(crate) stop_matcher: StopMatcher,
    pub(crate) grammar: GrammarState,
    /// Log-probabilities that are not emitted yet.
    pub(crate) logprobs: Option<Box<LogprobBuffer>>,
    /// The reason of its end, for the client.
    pub(crate) reason: Option<Arc<str>>,
    /// Its first admission.
    pub(crate) admitted: Option<Admitted>,
    pub(crate) overtaken: u32,
    pub(crate) prefix_leader: Option<PrefixLeader>,
}

impl<S> Sequence<S> {
    pub(crate) fn new(
        shared: Arc<SharedRequest<S>>,
        sample: u32,
        context: u64,
        order: u64,
    ) -> Self {
        // Reserved in advance, so that steps do not allocate.
        let longest = shared.prompt_len + shared.max_tokens.min(EXPECTED) + 2;
        let mut tokens = Vec::with_capacity(longest as usize);
        tokens.extend_from_slice(&shared.request.prompt);
        let stop_matcher = StopMatcher::new(&shared.request.stop);
        let constraint = &shared.request.grammar;
        let grammar = constraint
            .as_ref()
            .map_or(GrammarState::None, |_| GrammarState::Compiling);
        let wanted = shared.request.logprobs;
        let plain = shared.min_tokens == 0 && constraint.is_none() && wanted.is_none();
        let logprobs = wanted.map(|wanted| Box::new(LogprobBuffer::new(wanted, shared.prompt_len)));
        Self {
            prompt_len: shared.prompt_len,
            max_tokens: shared.max_tokens,
            min_tokens: shared.min_tokens,
            drafts_wanted: shared.request.drafts,
            images_end: shared.request.images.last().map_or(0, Image::end),
            streams: shared.request.streams,
            session: shared.request.session,
            shared,
            sample,
            context,
            order,
            state: State::Waiting,
            tokens,
            pending: 0,
            last_row: 0,
            drafts: Vec::new(),
            kv: SequencePages::default(),
            stored: 0,
            resumed: 0,
            scheduled: 0,
            last_plan: 0,
            epoch: 0,
            suspicion: Suspicion::default(),
            plain,
            plain_since: 0,
            stop_matcher,
            grammar,
            logprobs,
            reason: None,
            admitted: None,
            overtaken: 0,
            prefix_leader: None,
        }
    }

    /// The time at which it is ended.
    pub(crate) fn deadline(&self, running_limit_us: u64) -> Option<u64> {
        let request = &self.shared.request;
        let own = match self.admitted {
            None => request.admit_by,
            Some(_) if running_limit_us == 0 => None,
            Some(admitted) => Some(admitted.at.saturating_add(running_limit_us)),
        };
        request.deadline.into_iter().chain(own).min()
    }

    pub(crate) fn id(&self) -> u64 {
        self.shared.request.id
    }

    /// Tokens, those in flight included.
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens without those in flight.
    pub(crate) fn known(&self) -> u32 {
        self.len() - self.pending
    }

    /// Output tokens, those in flight included.
    pub(crate) fn produced(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// Output tokens that it may still generate.
    pub(crate) fn remaining(&self) -> u32 {
        self.max_tokens.saturating_sub(self.produced())
    }

    /// [`remaining`](Self::remaining), clipped for admission.
    pub(crate) fn expected(&self) -> u32 {
        self.remaining().min(EXPECTED)
    }

    /// Tokens that no step was scheduled for.
    pub(crate) fn uncomputed(&self) -> u32 {
        self.len() - self.scheduled
    }

    /// Whether its next row is a decode.
    pub(crate) fn decodes(&self) -> bool {
        self.uncomputed() == 1
            && (self.remaining() > 0 || self.produced() == 0)
            && !self.next_is_image()
    }

    /// Whether it is constrained and its next mask is missing.
    pub(crate) fn is_late(&self) -> bool {
        self.pending == 0 && self.grammar.is_late()
    }

    /// Whether its next row is a prefill chunk.
    pub(crate) fn prefills(&self) -> bool {
        self.uncomputed() > 1 || (self.uncomputed() == 1 && self.next_is_image())
    }

    /// Whether its next token is an image's, whose bytes a step has a budget for.
    fn next_is_image(&self) -> bool {
        self.scheduled < self.images_end && {
            let images = &self.shared.request.images;
            let next = images.partition_point(|image| image.end() <= self.scheduled);
            images[next].start <= self.scheduled
        }
    }

    /// The image that a row that ends at `end` would split.
    pub(crate) fn cut_image(&self, end: u32) -> Option<&Image> {
        let images = &self.shared.request.images;
        let next = images.partition_point(|image| image.end() <= end);
        images.get(next).filter(|image| image.start < end)
    }

    /// Adjusts the end of a row from `start` to `end` so that it splits no image: before the image, or after it if the row
    /// starts with it. Returns the end and the bytes of the images, at most `left`, unless `taken` is 0 and it is a single
    /// image.
    pub(crate) fn row_end(&self, start: u32, end: u32, left: u32, taken: u32) -> (u32, u32) {
        let images = &self.shared.request.images;
        if images.is_empty() {
            return (end, 0);
        }
        let mut end = match self.cut_image(end) {
            Some(image) if image.start > start => image.start,
            Some(image) => image.end(),
            None => end,
        };
        let first = images.partition_point(|image| image.start < start);
        let mut bytes = 0_u32;
        for image in images[first..].iter().take_while(|image| image.start < end) {
            let fits = bytes.saturating_add(image.bytes) <= left || (bytes == 0 && taken == 0);
            if !fits {
                end = image.start;
                break;
            }
            bytes += image.bytes;
        }
        (end, bytes)
    }

    /// Whether a row that ends at `end` samples a token.
    pub(crate) fn samples_token(&self, end: u32) -> bool {
        end == self.len() && (self.remaining() > 0 || self.only_scores())
    }

    /// Whether it has no output tokens, but wants the log-probabilities of the first.
    pub(crate) fn only_scores(&self) -> bool {
        self.max_tokens == 0 && self.logprobs.is_some()
    }

    /// Words of log-probabilities that a row of `start..end` returns, and their prompt tokens.
    pub(crate) fn logprob_words(&self, start: u32, end: u32, drafts: u32) -> (u64, (u32, u32)) {
        let Some(kept) = &self.logprobs else {
            return (0, (0, 0));
        };
        let prompt = kept.of_row(start, end);
        let sampled = if self.samples_token(end) {
            1 + drafts
        } else {
            0
        };
        let positions = prompt.len() as u64 + u64::from(sampled);
        (
            positions * u64::from(kept.words()),
            (prompt.start, prompt.end),
        )
    }

    /// Output tokens with cached KV, reported by the first row after them.
    pub(crate) fn skipped(&self, start: u32) -> &[u32] {
        if self.shared.request.whole_history {
            return &self.tokens[..start as usize];
        }
        if start == self.resumed && start > self.prompt_len {
            &self.tokens[self.prompt_len as usize..start as usize]
        } else {
            &[]
        }
    }

    /// Whether stop tokens (EOS) are suppressed after token `end`, because of `min_new_tokens`.
    pub(crate) fn forbids(&self, end: u32) -> bool {
        end < self.prompt_len.saturating_add(self.min_tokens)
    }

    /// Whether a row from `start` on has nothing besides tokens, drafts and pages.
    pub(crate) fn is_plain(&self, start: u32, registrations: u64) -> bool {
        self.plain_since == registrations
            && start != self.resumed
            && !self.shared.request.whole_history
    }

    /// Records that a scheduled row brought the parameters.
    pub(crate) fn register(&mut self, registrations: u64) {
        self.shared
            .registered
            .store(registrations, Ordering::Relaxed);
        if self.plain {
            self.plain_since = registrations;
        }
    }

    /// Bytes of parameters that its next row brings.
    fn new_bytes(&self, registrations: u64) -> u32 {
        if self.shared.registered.load(Ordering::Relaxed) == registrations {
            0
        } else {
            self.shared.request.params_bytes
        }
    }

    /// Whether plan `plans` may have it, for this bisection group.
    pub(crate) fn is_due(&self, group: u64, plans: u64) -> bool {
        self.suspicion.group == group && self.last_plan != plans && !self.is_late()
    }

    /// What a row of it has that ends with token `end`, besides tokens, pages and a mask of its own.
    pub(crate) fn row_extras(&self, start: u32, end: u32, registrations: u64) -> RowExtras {
        let request = &self.shared.request;
        let samples = self.samples_token(end);
        let forbids = samples && self.forbids(end) && self.grammar.mask().is_none();
        RowExtras {
            own: self.new_bytes(registrations),
            listed: self.skipped(start).len() as u32,
            forbidden: if forbids {
                request.stop.stop_tokens.len() as u32
            } else {
                0
            },
            masked: false,
        }
    }

    /// Whether the driver may draft after the next token.
    pub(crate) fn wants_drafts(&self, end: u32) -> bool {
        self.drafts_wanted && self.grammar.is_none() && !self.forbids(end) && self.remaining() > 1
    }

    /// The prefix cache key of its first tokens.
    pub(crate) fn key(&self, tokens: u32) -> Key<'_> {
        Key {
            namespace: self.shared.request.namespace.as_deref(),
            tokens: &self.tokens[..tokens as usize],
        }
    }

    /// Stop tokens in rising order.
    pub(crate) fn stop_tokens(&self) -> &[u32] {
        &self.shared.request.stop.stop_tokens
    }

    /// The key of the tokens that may be cached.
    pub(crate) fn cacheable(&self) -> Key<'_> {
        self.key(self.cacheable_len())
    }

    /// Tokens that may come from the cache: all but the last, and none that prompt log-probabilities need.
    pub(crate) fn cacheable_len(&self) -> u32 {
        let needed = self
            .logprobs
            .as_ref()
            .map_or(u32::MAX, |kept| kept.cacheable());
        (self.known() - 1).min(needed)
    }

    /// Appends a placeholder for the token that a scheduled row samples.
    pub(crate) fn expect_token(&mut self, row: u32) {
        self.tokens.push(UNKNOWN);
        self.pending += 1;
        self.last_row = row;
    }

    /// Drops tokens in flight: the steps in flight are void.
    pub(crate) fn discard_in_flight(&mut self) {
        let known = self.known();
        self.tokens.truncate(known as usize);
        self.pending = 0;
        self.drafts.clear();
        self.scheduled = self.stored;
    }

    /// Starts to run with `cached` tokens.
    pub(crate) fn start(&mut self, cached: u32) {
        self.state = State::Running;
        self.scheduled = cached;
        self.stored = cached;
        self.resumed = cached;
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.start(cached);
        }
    }

    /// Moves it back to the queue.
    pub(crate) fn reset_progress(&mut self) {
        self.state = State::Waiting;
        self.scheduled = 0;
        self.stored = 0;
    }

    /// Its pages were taken: it is recomputed, or loaded.
    pub(crate) fn retract(&mut self) {
        self.reset_progress();
        self.epoch += 1;
        self.drafts.clear();
        self.overtaken = 0;
        self.prefix_leader = None;
    }

    /// Appends the tokens of a row that ended at `end`, as many as it may have. Returns its finish reason, if it ends.
    pub(crate) fn append_tokens(
        &mut self,
        end: u32,
        tokens: &[u32],
        text: Option<&dyn TokenBytes>,
        rules: EndRules,
    ) -> Option<Finish> {
        // With drafts there is one placeholder for all tokens, else one for each; those of later steps stay.
        let later = self.pending.saturating_sub(1);
        self.pending = 0;
        self.tokens.truncate(end as usize);
        for &token in tokens {
            let finish = if token < rules.vocab_size {
                self.tokens.push(token);
                let is_over = !self.grammar.is_none() && {
                    let most = self.max_tokens.saturating_sub(self.produced());
                    self.grammar.accept_token(token, most)
                };
                self.check_stop(token, text, rules)
                    .or(is_over.then_some(Finish::StopToken(token)))
            } else {
                Some(Finish::Failed)
            };
            if finish.is_some() {
                return finish;
            }
        }
        for _ in 0..later {
            self.tokens.push(UNKNOWN);
        }
        self.pending = later;
        None
    }

    /// Appends jump-forward tokens. Returns its finish reason, if it ends.
    pub(crate) fn append_forced(
        &mut self,
        forced: &[u32],
        text: Option<&dyn TokenBytes>,
        rules: EndRules,
    ) -> Option<Finish> {
        forced.iter().find_map(|&token| {
            if token >= rules.vocab_size {
                return Some(Finish::Failed);
            }
            self.tokens.push(token);
            self.check_stop(token, text, rules)
        })
    }
}
