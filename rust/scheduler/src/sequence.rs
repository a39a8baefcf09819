//! One sequence of a request, from the queue to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pie_kv_cache::radix::Key;

use crate::config::RowExtras;
use crate::constraint::ConstraintState;
use crate::ends::Found;
use crate::logprobs::Kept;
use crate::memory::Held;
use crate::new_request::{Image, NewRequest};
use crate::output::{Admitted, Finish};
use crate::suspects::Suspicion;
use crate::text::TokenBytes;

/// Keeps the place of a token that is not known yet.
const UNKNOWN: u32 = 0;

/// Most tokens that a request is expected to produce; `SGLang`'s `CLIP_MAX_NEW_TOKENS`.
const EXPECTED: u32 = 4096;

/// What all sequences of a request have in common.
#[derive(Debug)]
pub(crate) struct Shared<S> {
    pub(crate) arrival: NewRequest<S>,
    pub(crate) prompt_len: u32,
    /// `StopCriteria::max_tokens`, cut to what there is room for.
    pub(crate) max_tokens: u32,
    /// `StopCriteria::min_tokens`, at most that.
    pub(crate) min_tokens: u32,
    /// The lower the better.
    pub(crate) rank: i64,
    /// [`Scheduler::registrations`](crate::Scheduler) when a row of one of its sequences brought its parameters.
    pub(crate) registered: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Running,
    Ended,
}

/// A sequence that is being computed and that another one waits for, to go on from its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Awaited {
    pub(crate) slot: usize,
    pub(crate) order: u64,
    /// Pages that both begin with.
    pub(crate) pages: usize,
}

#[derive(Debug)]
pub(crate) struct Sequence<S> {
    pub(crate) shared: Arc<Shared<S>>,
    /// Of `shared`, for steps that look at every sequence.
    pub(crate) prompt_len: u32,
    max_tokens: u32,
    min_tokens: u32,
    drafts_wanted: bool,
    /// Whether each step's tokens are given out.
    pub(crate) streams: bool,
    pub(crate) sample: u32,
    pub(crate) context: u64,
    /// Its place in the order of arrival; no two have the same.
    pub(crate) order: u64,
    pub(crate) state: State,
    /// Prompt and output; at the end `pending` places of tokens that steps in flight will give.
    pub(crate) tokens: Vec<u32>,
    pub(crate) pending: u32,
    /// The row that gives the last of them.
    pub(crate) last_row: u32,
    pub(crate) drafts: Vec<u32>,
    pub(crate) held: Held,
    /// Tokens whose KV is stored, by steps that are answered.
    pub(crate) stored: u32,
    /// Where the row begins that reports the tokens produced before it: after those whose KV was there when it was last
    /// admitted, or since it took over pages of them.
    pub(crate) resumed: u32,
    /// Tokens whose KV is stored when the steps that are out are answered.
    pub(crate) scheduled: u32,
    /// The last plan that it was laid out in.
    pub(crate) step: u64,
    /// Counts how often its pages were taken: rows of an earlier time say nothing of what is stored.
    pub(crate) epoch: u32,
    pub(crate) suspicion: Suspicion,
    /// Its rows have no masks and no log-probabilities.
    plain: bool,
    /// [`Shared::registered`] as of its last row if it is plain: what is laid out often has it at hand.
    plain_since: u64,
    pub(crate) found: Found,
    pub(crate) constraint_state: ConstraintState,
    /// Log-probabilities, if it wants some.
    pub(crate) logprobs: Option<Box<Kept>>,
    /// Why it ended: what its constraint says, or what became of its steps.
    pub(crate) reason: Option<Arc<str>>,
    /// How it was first admitted.
    pub(crate) admitted: Option<Admitted>,
    pub(crate) overtaken: u32,
    pub(crate) awaited: Option<Awaited>,
}

impl<S> Sequence<S> {
    pub(crate) fn new(shared: Arc<Shared<S>>, sample: u32, context: u64, order: u64) -> Self {
        // What it will need in the end, so that steps need not ask for memory.
        let longest = shared.prompt_len + shared.max_tokens.min(EXPECTED) + 2;
        let mut tokens = Vec::with_capacity(longest as usize);
        tokens.extend_from_slice(&shared.arrival.prompt);
        let found = Found::new(&shared.arrival.ends);
        let constraint = &shared.arrival.constraint;
        let constraint_state = constraint
            .as_ref()
            .map_or(ConstraintState::Free, |_| ConstraintState::Asked);
        let wanted = shared.arrival.logprobs;
        let plain = shared.min_tokens == 0 && constraint.is_none() && wanted.is_none();
        let logprobs = wanted.map(|wanted| Box::new(Kept::new(wanted, shared.prompt_len)));
        Self {
            prompt_len: shared.prompt_len,
            max_tokens: shared.max_tokens,
            min_tokens: shared.min_tokens,
            drafts_wanted: shared.arrival.drafts,
            streams: shared.arrival.streams,
            shared,
            sample,
            context,
            order,
            state: State::Waiting,
            tokens,
            pending: 0,
            last_row: 0,
            drafts: Vec::new(),
            held: Held::default(),
            stored: 0,
            resumed: 0,
            scheduled: 0,
            step: 0,
            epoch: 0,
            suspicion: Suspicion::default(),
            plain,
            plain_since: 0,
            found,
            constraint_state,
            logprobs,
            reason: None,
            admitted: None,
            overtaken: 0,
            awaited: None,
        }
    }

    /// When it ends, finished or not.
    pub(crate) fn deadline(&self, running_limit_us: u64) -> Option<u64> {
        let arrival = &self.shared.arrival;
        let own = match self.admitted {
            None => arrival.admit_by,
            Some(_) if running_limit_us == 0 => None,
            Some(admitted) => Some(admitted.at.saturating_add(running_limit_us)),
        };
        arrival.deadline.into_iter().chain(own).min()
    }

    pub(crate) fn id(&self) -> u64 {
        self.shared.arrival.id
    }

    /// Tokens, those that are not known yet among them.
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens that are known.
    pub(crate) fn known(&self) -> u32 {
        self.len() - self.pending
    }

    /// Tokens produced, those that are not known yet among them.
    pub(crate) fn produced(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// Tokens that it may still produce.
    pub(crate) fn remaining(&self) -> u32 {
        self.max_tokens.saturating_sub(self.produced())
    }

    /// [`remaining`](Self::remaining), as far as it counts when others are admitted.
    pub(crate) fn expected(&self) -> u32 {
        self.remaining().min(EXPECTED)
    }

    /// Tokens that no step has been given.
    pub(crate) fn uncomputed(&self) -> u32 {
        self.len() - self.scheduled
    }

    /// Whether the next thing to compute is its last token.
    pub(crate) fn decodes(&self) -> bool {
        self.uncomputed() == 1 && (self.remaining() > 0 || self.produced() == 0)
    }

    /// Whether it is bound, and what may come next was not known in time.
    pub(crate) fn is_late(&self) -> bool {
        self.pending == 0 && self.constraint_state.is_late()
    }

    /// Whether there is more than its last token to compute.
    pub(crate) fn prefills(&self) -> bool {
        self.uncomputed() > 1
    }

    /// The image that a step would cut which ends with token `end`.
    pub(crate) fn cut_image(&self, end: u32) -> Option<&Image> {
        let images = &self.shared.arrival.images;
        let next = images.partition_point(|image| image.end() <= end);
        images.get(next).filter(|image| image.start < end)
    }

    /// Where a row ends that begins at `start`, which cuts no image, and should end at `end`: before an image that this would
    /// cut, or after it if the row begins with it. Its images have so many bytes at most; 0 of `taken` means that they may be
    /// as many as one image has.
    pub(crate) fn row_end(&self, start: u32, end: u32, left: u32, taken: u32) -> (u32, u32) {
        let images = &self.shared.arrival.images;
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

    /// Whether a row that ends with token `end` draws one.
    pub(crate) fn draws(&self, end: u32) -> bool {
        end == self.len() && (self.remaining() > 0 || self.only_scores())
    }

    /// Whether it may have no token, but wants the log-probabilities of the one that would come first.
    pub(crate) fn only_scores(&self) -> bool {
        self.max_tokens == 0 && self.logprobs.is_some()
    }

    /// Words of log-probabilities that a row of the tokens `start..end` with so many drafts brings, and the tokens of the
    /// prompt that they are of.
    pub(crate) fn logprob_words(&self, start: u32, end: u32, drafts: u32) -> (u64, (u32, u32)) {
        let Some(kept) = &self.logprobs else {
            return (0, (0, 0));
        };
        let prompt = kept.of_row(start, end);
        let drawn = if self.draws(end) { 1 + drafts } else { 0 };
        let places = prompt.len() as u64 + u64::from(drawn);
        (places * u64::from(kept.words()), (prompt.start, prompt.end))
    }

    /// Tokens produced of which others may have stored KV, for the first row that begins after them.
    pub(crate) fn skipped(&self, start: u32) -> &[u32] {
        if start == self.resumed && start > self.prompt_len {
            &self.tokens[self.prompt_len as usize..start as usize]
        } else {
            &[]
        }
    }

    /// Whether stop tokens are forbidden for the token after `end`.
    pub(crate) fn forbids(&self, end: u32) -> bool {
        end < self.prompt_len.saturating_add(self.min_tokens)
    }

    /// Whether a row that begins at `start` has nothing besides tokens, drafts and pages.
    pub(crate) fn is_plain(&self, start: u32, registrations: u64) -> bool {
        self.plain_since == registrations && start != self.resumed
    }

    /// A row was laid out, which brought its parameters.
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
            self.shared.arrival.params_bytes
        }
    }

    /// Whether it may be laid out in plan `plans`, of sequences of this group of suspects.
    pub(crate) fn is_due(&self, group: u64, plans: u64) -> bool {
        self.suspicion.group == group && self.step != plans && !self.is_late()
    }

    /// What a row of it has that ends with token `end`, besides tokens, pages and a mask of its own.
    pub(crate) fn row_extras(&self, start: u32, end: u32, registrations: u64) -> RowExtras {
        let arrival = &self.shared.arrival;
        let draws = self.draws(end);
        let forbids = draws && self.forbids(end) && self.constraint_state.mask().is_none();
        RowExtras {
            own: self.new_bytes(registrations),
            listed: self.skipped(start).len() as u32,
            forbidden: if forbids {
                arrival.ends.stop_tokens.len() as u32
            } else {
                0
            },
            masked: false,
        }
    }

    /// Whether the driver may draft for the token after the next one.
    pub(crate) fn wants_drafts(&self, end: u32) -> bool {
        self.drafts_wanted
            && self.constraint_state.is_free()
            && !self.forbids(end)
            && self.remaining() > 1
    }

    /// The first tokens, in its namespace.
    pub(crate) fn key(&self, tokens: u32) -> Key<'_> {
        Key {
            namespace: self.shared.arrival.namespace.as_deref(),
            tokens: &self.tokens[..tokens as usize],
        }
    }

    /// Tokens that end it, in rising order.
    pub(crate) fn stop_tokens(&self) -> &[u32] {
        &self.shared.arrival.ends.stop_tokens
    }

    /// What may be taken from the cache.
    pub(crate) fn cacheable(&self) -> Key<'_> {
        self.key(self.cacheable_len())
    }

    /// How many tokens may be taken from the cache: all that is known but the last one, which must be computed, and what is
    /// needed for log-probabilities of the prompt.
    pub(crate) fn cacheable_len(&self) -> u32 {
        let needed = self
            .logprobs
            .as_ref()
            .map_or(u32::MAX, |kept| kept.cacheable());
        (self.known() - 1).min(needed)
    }

    /// A row of it was laid out that ends with token `end` and draws one.
    pub(crate) fn expect_token(&mut self, row: u32) {
        self.tokens.push(UNKNOWN);
        self.pending += 1;
        self.last_row = row;
    }

    /// Goes back to what is known: the steps that are out are void.
    pub(crate) fn forget_steps(&mut self) {
        let known = self.known();
        self.tokens.truncate(known as usize);
        self.pending = 0;
        self.drafts.clear();
        self.scheduled = self.stored;
    }

    /// Starts to run, with so many tokens stored.
    pub(crate) fn start(&mut self, cached: u32) {
        self.state = State::Running;
        self.scheduled = cached;
        self.stored = cached;
        self.resumed = cached;
    }

    /// Waits again.
    pub(crate) fn stop(&mut self) {
        self.state = State::Waiting;
        self.scheduled = 0;
        self.stored = 0;
    }

    /// Its pages were taken: it waits again.
    pub(crate) fn forget_pages(&mut self) {
        self.stop();
        self.epoch += 1;
        self.drafts.clear();
        self.overtaken = 0;
        self.awaited = None;
    }

    /// Takes the tokens of a row that ended with token `end`: as many of them as it may have. Returns its end, if it ends by
    /// them.
    pub(crate) fn take(
        &mut self,
        end: u32,
        tokens: &[u32],
        text: Option<&dyn TokenBytes>,
        vocab: u32,
    ) -> Option<Finish> {
        // With drafts there is one place and several tokens, else one token; those of later steps stay after it.
        let later = self.pending.saturating_sub(1);
        self.pending = 0;
        self.tokens.truncate(end as usize);
        for &token in tokens {
            let finish = if token < vocab {
                self.tokens.push(token);
                let is_over = !self.constraint_state.is_free() && {
                    let most = self.max_tokens.saturating_sub(self.produced());
                    self.constraint_state.take(token, most)
                };
                self.end_by(token, text)
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

    /// Adds tokens of its constraint that were not drawn. Returns its end, if it ends by them.
    pub(crate) fn append_forced(
        &mut self,
        forced: &[u32],
        text: Option<&dyn TokenBytes>,
        vocab: u32,
    ) -> Option<Finish> {
        forced.iter().find_map(|&token| {
            if token >= vocab {
                return Some(Finish::Failed);
            }
            self.tokens.push(token);
            self.end_by(token, text)
        })
    }

    /// Whether the last token ends it, in `SGLang`'s order: by length, by text, by itself.
    fn end_by(&mut self, token: u32, text: Option<&dyn TokenBytes>) -> Option<Finish> {
        let shared = &self.shared;
        let ends = &shared.arrival.ends;
        let hit = match text {
            Some(text) if !self.found.is_idle() => self.found.advance(ends, text.bytes(token)),
            _ => None,
        };
        let produced = self.len() - self.prompt_len;
        if produced >= self.max_tokens {
            return Some(Finish::Length);
        }
        if hit.is_some() {
            return hit;
        }
        let stops = produced > self.min_tokens && ends.stop_tokens.binary_search(&token).is_ok();
        stops.then_some(Finish::StopToken(token))
    }
}
