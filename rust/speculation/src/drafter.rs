//! Drafts for batches of requests.

use std::collections::VecDeque;
use std::mem;

use lru::LruCache;
use rustc_hash::FxBuildHasher;

use crate::config::LONGEST_CONTEXT;
use crate::context::Context;
use crate::copy_tracker::RESUMED_BONUS;
use crate::history::History;
use crate::index::suffix::{Speculation, SuffixLimits};
use crate::index::{Draft, Scratch};
use crate::policy::Grades;
use crate::tree::{Sources, Tree, TreeBuilder};
use crate::{Config, ConfigError, SuffixConfig};

/// New tokens of a context from which on they are added to the shared history; or when it is released.
const SHARED: usize = 128;
/// Fewest tokens that one flush may add to the history. Further contexts wait: those that decode together are due in the same
/// step.
const SHARED_AT_ONCE: usize = 256;
/// A match in the history counts as this many tokens shorter: a context repeats its own text more often than another's.
const SHARED_PENALTY: usize = 1;
/// Bytes of a context besides its index.
const CONTEXT_BYTES: usize = size_of::<(u64, Context)>() + 6 * size_of::<usize>();
/// Tokens before new ones that are added to the history again, for the new ones to match by.
const REPEATED: usize = 8;

/// New tokens of a request.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Context id.
    pub context: u64,
    /// Position of `tokens[0]` in the context. Known tokens are compared, and the context is rewound to the first difference.
    /// Past its end, or where the rewind is too long (see [`Drafter::can_rewind`]), the context restarts.
    pub position: u32,
    /// Tokens from `position` on. Token ids from 2^24 - 1 on end a text: no match extends over them.
    pub tokens: &'a [u32],
    /// Most tokens to draft.
    pub drafts: usize,
}

/// Drafts of a batch, for each step.
#[derive(Clone, Debug, Default)]
pub struct Drafts {
    tokens: Vec<u32>,
    steps: Vec<StepDrafts>,
}

/// The drafts of a step.
#[derive(Clone, Copy, Debug)]
struct StepDrafts {
    /// End of its tokens.
    end: usize,
    match_length: usize,
    grades: Grades,
}

impl Drafts {
    /// Number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there was no step.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The draft tokens of a step; empty if it does not exist.
    #[must_use]
    pub fn tokens(&self, step: usize) -> &[u32] {
        let start = step.checked_sub(1).map_or(0, |before| self.end(before));
        &self.tokens[start..self.end(step)]
    }

    /// Length of the match before the first draft, plus two if a copy is resumed; 0 without a draft.
    #[must_use]
    pub fn match_length(&self, step: usize) -> usize {
        self.steps.get(step).map_or(0, |step| step.match_length)
    }

    /// How likely the drafts of a step are; [`Grades::NONE`] for n-gram drafts.
    #[must_use]
    pub fn grades(&self, step: usize) -> Grades {
        self.steps
            .get(step)
            .map_or(Grades::NONE, |step| step.grades)
    }

    fn end(&self, step: usize) -> usize {
        self.steps
            .get(step)
            .map_or(self.tokens.len(), |step| step.end)
    }

    /// Removes all steps.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.steps.clear();
    }

    fn push(&mut self, tokens: &[u32], match_length: usize, grades: Grades) {
        self.tokens.extend_from_slice(tokens);
        self.steps.push(StepDrafts {
            end: self.tokens.len(),
            match_length,
            grades,
        });
    }
}

/// An n-gram drafter over the text of contexts and a shared history.
///
/// The longest match of a context's end decides; a match in the history must be two tokens longer than the context's own. Its
/// most frequent continuation is drafted, the newest of several; in the context's own text the last one, unless another was
/// four times as frequent as all others. The draft continues in the same text. After an edit of a copy, a match of a token or
/// two right after the copied part counts as two tokens longer.
///
/// Appending a token takes some 0.3 µs and at most 64 bytes.
#[derive(Debug)]
pub struct Drafter {
    config: Config,
    depth: usize,
    /// Contexts by id, in LRU order.
    contexts: LruCache<u64, Context, FxBuildHasher>,
    /// Heap bytes of their indices.
    index_bytes: usize,
    history: Option<History>,
    /// Contexts with [`SHARED`] or more tokens for the history.
    queue: VecDeque<u64>,
    /// Tokens appended since the last flush.
    appended: usize,
    suffix: Vec<u32>,
    copied: Vec<u32>,
    scratch: Scratch,
    tree: TreeBuilder,
    /// The draft of suffix decoding.
    best: Speculation,
}

impl Drafter {
    /// A drafter without contexts.
    ///
    /// # Errors
    /// [`ConfigError`] for limits that contradict each other or are out of range.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        let depth = config.depth();
        Ok(Self {
            config,
            depth,
            contexts: LruCache::unbounded_with_hasher(FxBuildHasher),
            index_bytes: 0,
            history: (config.capacity > 0).then(|| History::new(depth, config.capacity)),
            queue: VecDeque::new(),
            appended: 0,
            suffix: Vec::new(),
            copied: Vec::new(),
            scratch: Scratch::default(),
            tree: TreeBuilder::default(),
            best: Speculation::default(),
        })
    }

    /// [`Self::flush_shared`], then [`Self::append`] for each step.
    pub fn step(&mut self, steps: &[Step<'_>], drafts: &mut Drafts) {
        self.flush_shared();
        drafts.clear();
        for step in steps {
            self.append(step, drafts);
        }
    }

    /// Appends a step's tokens to its context, and its drafts to `drafts`.
    pub fn append(&mut self, step: &Step<'_>, drafts: &mut Drafts) {
        self.suffix.clear();
        self.update(step.context, step.position as usize, step.tokens);
        self.appended += step.tokens.len();
        if step.drafts == 0 {
            return drafts.push(&[], 0, Grades::NONE);
        }
        if let Some(config) = self.config.suffix {
            self.speculate(step.context, step.drafts, config);
            let best = &self.best;
            let grades = Grades::new(best.probabilities());
            return drafts.push(best.tokens(), best.match_length(), grades);
        }
        let (start, match_length) = self.draft(step.context, step.drafts);
        drafts.push(&self.suffix[start..], match_length, Grades::NONE);
    }

    /// [`Self::append`] without drafts, of tokens that the shared history has already.
    pub fn append_known(&mut self, context: u64, position: u32, tokens: &[u32]) {
        self.update(context, position as usize, tokens);
        if let Some(context) = self.contexts.get_mut(&context) {
            context.count_as_shared();
        }
    }

    /// Adds context tokens to the shared history, about as many as were appended since the last call, and releases contexts
    /// beyond [`Config::context_bytes`]. Takes about as long as appending did; call it when there is time.
    pub fn flush_shared(&mut self) {
        let mut left = mem::take(&mut self.appended).max(SHARED_AT_ONCE);
        while left > 0
            && let Some(context) = self.queue.pop_front()
        {
            left = left.saturating_sub(self.share(context, SHARED));
        }
        self.evict_contexts();
    }

    /// Releases a context; the shared history keeps its text.
    pub fn release(&mut self, context: u64) {
        self.share(context, REPEATED);
        if let Some(context) = self.contexts.pop(&context) {
            self.index_bytes -= context.bytes();
        }
    }

    /// Drafts a tree of up to `count` tokens, the most probable first. Empty for an unknown context.
    pub fn tree(&mut self, context: u64, count: usize, tree: &mut Tree) {
        tree.clear();
        let Some(context) = self.contexts.peek_mut(&context) else {
            return;
        };
        self.suffix.clear();
        self.suffix.extend_from_slice(context.index().tail());
        let resumed = context.follow(context.index().own_match());
        self.copied.clear();
        if let Some(copying) = resumed {
            context.copy(copying.source, count, &mut self.copied);
        }
        let sources = Sources {
            own: context.index(),
            history: self.history.as_ref(),
            copied: &self.copied,
            matched: resumed.map_or(0, |copying| copying.matched),
            shortest: self.config.min_n,
        };
        self.tree.build(&sources, count, &mut self.suffix, tree);
    }

    /// Drafts what [`Self::step`] would, as a tree without branches.
    pub fn chain(&mut self, context: u64, count: usize, tree: &mut Tree) {
        if let Some(config) = self.config.suffix {
            self.speculate(context, count, config);
            return tree.grow_chain(self.best.tokens());
        }
        self.suffix.clear();
        let (start, _) = self.draft(context, count);
        tree.grow_chain(&self.suffix[start..]);
    }

    /// The length of a context; 0 if it is unknown.
    #[must_use]
    pub fn length(&self, context: u64) -> usize {
        self.contexts.peek(&context).map_or(0, Context::end)
    }

    /// Whether a context is known to have these tokens from `position` on.
    #[must_use]
    pub fn holds(&self, context: u64, position: usize, tokens: &[u32]) -> bool {
        let context = self.contexts.peek(&context);
        context.is_some_and(|context| context.holds(position, tokens))
    }

    /// Whether a context can go back to `position`, so that its text ends there. If not, because it would take too long, a
    /// step from there makes it start anew. To keep its text, [release](Self::release) it and
    /// [append its tokens again](Self::append_known) in pieces.
    #[must_use]
    pub fn can_rewind(&self, context: u64, position: usize) -> bool {
        let context = self.contexts.peek(&context);
        context.is_none_or(|context| position >= context.end() || context.can_rewind(position))
    }

    /// Number of known contexts.
    #[must_use]
    pub fn contexts(&self) -> usize {
        self.contexts.len()
    }

    /// Heap bytes of their indices.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let history = self.history.as_ref().map_or(0, History::bytes);
        self.context_bytes() + history
    }

    fn context_bytes(&self) -> usize {
        // The list has two ends that hold nothing.
        self.index_bytes + (self.contexts.len() + 2) * CONTEXT_BYTES
    }

    fn update(&mut self, id: u64, position: usize, tokens: &[u32]) {
        let skipped = tokens.len().saturating_sub(LONGEST_CONTEXT);
        let (position, tokens) = (position + skipped, &tokens[skipped..]);
        let (depth, index_bytes) = (self.depth, &mut self.index_bytes);
        let context = self.contexts.get_or_insert_mut(id, || {
            let context = Context::new(depth, position);
            *index_bytes += context.bytes();
            context
        });
        self.index_bytes -= context.bytes();
        context.update(position, tokens);
        self.index_bytes += context.bytes();
        if self.history.is_some() && context.enqueue(SHARED) {
            self.queue.push_back(id);
        }
    }

    /// Gives the history the tokens of a context that it does not have, if they are at least `fewest`; returns how many
    /// tokens it got.
    fn share(&mut self, context: u64, fewest: usize) -> usize {
        let (Some(history), Some(context)) = (&mut self.history, self.contexts.get_mut(&context))
        else {
            return 0;
        };
        let tokens = context.share(fewest, REPEATED);
        history.add(tokens, &mut self.scratch);
        tokens.len()
    }

    fn evict_contexts(&mut self) {
        while self.context_bytes() > self.config.context_bytes
            && let Some((&oldest, _)) = self.contexts.peek_lru()
        {
            self.release(oldest);
        }
    }

    /// Finds the draft of which most tokens are expected to be accepted: of all matches in the context's own text, of a resumed
    /// copy, and of all matches in the history.
    fn speculate(&mut self, context: u64, count: usize, config: SuffixConfig) {
        let (suffix, best) = (&mut self.suffix, &mut self.best);
        best.clear();
        let Some(context) = self.contexts.peek_mut(&context) else {
            return;
        };
        suffix.clear();
        suffix.extend_from_slice(context.index().tail());
        let limits = SuffixLimits {
            count,
            shortest: self.config.min_n,
            factor: config.max_spec_factor,
            min_probability: config.min_token_prob,
            own: true,
        };
        let resumed = context.follow(context.index().own_match());
        if let Some(copying) = resumed.filter(|copying| copying.matched >= limits.shortest) {
            self.copied.clear();
            context.copy(copying.source, count, &mut self.copied);
            best.offer_copy(&self.copied, copying.matched + RESUMED_BONUS, limits);
        }
        context.index().speculate(limits, suffix, best);
        let foreign = SuffixLimits {
            own: false,
            ..limits
        };
        for index in self.history.iter().flat_map(History::generations) {
            index.speculate(foreign, suffix, best);
        }
    }

    /// Drafts after the context's end, in `suffix`; returns where the draft starts there and how long its match was.
    fn draft(&mut self, context: u64, count: usize) -> (usize, usize) {
        let Some(context) = self.contexts.peek_mut(&context) else {
            return (0, 0);
        };
        let (suffix, scratch) = (&mut self.suffix, &mut self.scratch);
        let shortest = self.config.min_n;
        suffix.extend_from_slice(context.index().tail());
        let start = suffix.len();
        let own = context.index().own_match();
        let mut length = own.map_or(0, |found| found.length);
        let resumed = context.follow(own).filter(|copying| {
            copying.matched >= shortest && copying.matched + RESUMED_BONUS > length
        });
        if let Some(copying) = resumed {
            length = copying.matched + RESUMED_BONUS;
        }
        let longer_than = if length == 0 {
            0
        } else {
            length + SHARED_PENALTY
        };
        let shared = self.history.as_ref();
        let shared = shared.and_then(|history| history.find(suffix, longer_than, scratch));
        let own_text = shared.is_none();
        let (found, index) = match (shared, resumed, own) {
            (Some(shared), _, _) => shared,
            (None, Some(copying), _) => {
                context.copy(copying.source, count, suffix);
                return (start, length);
            }
            (None, None, Some(found)) => (found, context.index()),
            (None, None, None) => return (start, 0),
        };
        if found.length < shortest {
            return (start, 0);
        }
        let draft = Draft {
            count,
            shortest,
            own: own_text,
        };
        index.draft(found, draft, suffix, scratch);
        (start, found.length)
    }
}

#[cfg(test)]
mod tests;
