//! Drafts for batches of requests.

use std::collections::VecDeque;
use std::mem;

use lru::LruCache;
use rustc_hash::FxBuildHasher;

use crate::config::LONGEST_CONTEXT;
use crate::context::{Context, Ledger};
use crate::copying::RESUMED;
use crate::history::History;
use crate::index::{Draft, Scratch};
use crate::tree::{Soil, Tree, TreeBuilder};
use crate::{Config, ConfigError};

/// The context of requests that name none; nothing is remembered of it.
const NOBODY: u64 = 0;
/// The history gets a context's tokens when so many are new, or at its end.
const SHARED: usize = 128;
/// Once so many were given to it, further contexts wait: those that decode together would all be due in the same step.
const SHARED_AT_ONCE: usize = 256;
/// A match in the texts of others counts as so many tokens shorter: what a context says again is its own more often than
/// another's.
const HANDICAP: usize = 1;
/// What a context takes beside its text: it is an entry of a list and of a table.
const CONTEXT_BYTES: usize = size_of::<(u64, Context)>() + 6 * size_of::<usize>();
/// Tokens that are repeated before them, so that their contexts are not cut short.
const REPEATED: usize = 8;

/// What a request adds to its context.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The context's id; 0 is nobody's.
    pub context: u64,
    /// Position of the first of `tokens`. Where it lies below what is known of the context, that is compared and
    /// taken back as far as it differs; where it lies above, the context starts anew. So it does where thousands of tokens
    /// would have to be taken back; see [`Drafter::rewinds`].
    pub position: u32,
    /// The context's end, from `position` on. No match extends over tokens from 2^24 - 1 on.
    pub tokens: &'a [u32],
    /// Most tokens to draft.
    pub drafts: usize,
}

/// Drafts of a batch, one for each step.
#[derive(Clone, Debug, Default)]
pub struct Drafts {
    tokens: Vec<u32>,
    /// Where each step's tokens end, and how long its match was.
    steps: Vec<(usize, usize)>,
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

    /// The tokens drafted for a step; none for one that is not there.
    #[must_use]
    pub fn tokens(&self, step: usize) -> &[u32] {
        let start = step.checked_sub(1).map_or(0, |before| self.end(before));
        &self.tokens[start..self.end(step)]
    }

    /// Tokens that matched before the first drafted one, two more if they are where a copy goes on; 0 without a draft.
    #[must_use]
    pub fn match_length(&self, step: usize) -> usize {
        self.steps.get(step).map_or(0, |step| step.1)
    }

    fn end(&self, step: usize) -> usize {
        self.steps
            .get(step)
            .map_or(self.tokens.len(), |step| step.0)
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.steps.clear();
    }

    fn push(&mut self, tokens: &[u32], match_length: usize) {
        self.tokens.extend_from_slice(tokens);
        self.steps.push((self.tokens.len(), match_length));
    }
}

/// Remembers contexts and drafts what they will say next, from what they and others have said.
///
/// The longest match of a context's end decides, where one in the text of others must be two tokens longer than the
/// context's own. Of the continuations that it had, the most frequent is drafted, of several the newest; in the context's
/// own text the last one, unless another came four times as often as all others. The draft goes on in the same text. Where
/// a context copied its own text and then said something else, a token or two that match just behind what it copied count
/// as two more.
#[derive(Debug)]
pub struct Drafter {
    config: Config,
    depth: usize,
    /// By id, in the order of their last use.
    contexts: LruCache<u64, Context, FxBuildHasher>,
    ledger: Ledger,
    history: Option<History>,
    /// Contexts that owe the history [`SHARED`] tokens or more.
    owing: VecDeque<u64>,
    /// Tokens that came since the history was last given some.
    heard: usize,
    suffix: Vec<u32>,
    copied: Vec<u32>,
    scratch: Scratch,
    tree: TreeBuilder,
}

impl Drafter {
    /// A drafter that knows nothing.
    ///
    /// # Errors
    /// Limits that contradict each other or are out of range.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        let depth = config.depth();
        Ok(Self {
            config,
            depth,
            contexts: LruCache::unbounded_with_hasher(FxBuildHasher),
            ledger: Ledger::default(),
            history: (config.capacity > 0).then(|| History::new(depth, config.capacity)),
            owing: VecDeque::new(),
            heard: 0,
            suffix: Vec::new(),
            copied: Vec::new(),
            scratch: Scratch::default(),
            tree: TreeBuilder::default(),
        })
    }

    /// Takes what each request adds, one after the other, and drafts what follows; the same as [`Self::settle`] and
    /// [`Self::hear`] for each.
    pub fn step(&mut self, steps: &[Step<'_>], drafts: &mut Drafts) {
        self.settle();
        drafts.clear();
        for step in steps {
            self.hear(step, drafts);
        }
    }

    /// Takes what a request adds, and appends what follows to `drafts`.
    pub fn hear(&mut self, step: &Step<'_>, drafts: &mut Drafts) {
        self.suffix.clear();
        let (mut start, mut match_length) = (0, 0);
        if step.context != NOBODY {
            self.update(step.context, step.position as usize, step.tokens);
            self.heard += step.tokens.len();
            if step.drafts > 0 {
                (start, match_length) = self.draft(step.context, step.drafts);
            }
        }
        drafts.push(&self.suffix[start..], match_length);
    }

    /// Takes what a context said before, as a step would, but not for the shared history, which had it then.
    pub fn recall(&mut self, context: u64, position: u32, tokens: &[u32]) {
        if context != NOBODY {
            self.update(context, position as usize, tokens);
            if let Some(context) = self.contexts.get_mut(&context) {
                context.count_as_shared();
            }
        }
    }

    /// Gives the shared history what contexts have said, about as much as came since the last time, and forgets the
    /// contexts that do not fit the memory. Takes as long as hearing did, and can be done when there is time.
    pub fn settle(&mut self) {
        let mut left = mem::take(&mut self.heard).max(SHARED_AT_ONCE);
        while left > 0
            && let Some(context) = self.owing.pop_front()
        {
            left = left.saturating_sub(self.share(context, SHARED));
        }
        self.keep_to_budget();
    }

    /// Lets `child` start with what `parent` has said. Does nothing if `parent` is not known, or either is nobody.
    pub fn fork(&mut self, parent: u64, child: u64) {
        if child == NOBODY || child == parent {
            return;
        }
        self.share(parent, 1);
        let Some(context) = self.contexts.get_mut(&parent) else {
            return;
        };
        let fork = context.fork(&mut self.ledger);
        self.release(child);
        self.contexts.put(child, fork);
        self.keep_to_budget();
    }

    /// Forgets a context; the shared history keeps what it said.
    pub fn release(&mut self, context: u64) {
        self.share(context, REPEATED);
        if let Some(mut context) = self.contexts.pop(&context) {
            context.release(&mut self.ledger);
        }
    }

    /// Drafts at most `count` tokens for a known context as a tree, of which each path may come true. The most probable
    /// come first.
    pub fn tree(&mut self, context: u64, count: usize, tree: &mut Tree) {
        tree.clear();
        let Some(context) = self.contexts.peek_mut(&context) else {
            return;
        };
        self.suffix.clear();
        self.suffix.extend_from_slice(context.top().tail());
        let own = context.own_match(&self.suffix, &mut self.scratch);
        let resumed = context.follow(own);
        self.copied.clear();
        if let Some(copying) = resumed {
            context.copy(copying.source, count, &mut self.copied);
        }
        let history = self.history.iter().flat_map(History::generations);
        let context = &*context;
        let indices = [context.top()]
            .into_iter()
            .chain(context.frozen())
            .chain(history);
        let soil = Soil {
            indices: &indices.collect::<Vec<_>>(),
            own: 1 + context.frozen().count(),
            copied: &self.copied,
            matched: resumed.map_or(0, |copying| copying.matched),
            shortest: self.config.min_n,
        };
        self.tree.build(&soil, count, &mut self.suffix, tree);
    }

    /// The same without branches: what [`Self::step`] drafts.
    pub fn chain(&mut self, context: u64, count: usize, tree: &mut Tree) {
        self.suffix.clear();
        let (start, _) = self.draft(context, count);
        tree.grow_chain(&self.suffix[start..]);
    }

    /// How many tokens a context is known to have; 0 for one that is not known.
    #[must_use]
    pub fn length(&self, context: u64) -> usize {
        self.contexts.peek(&context).map_or(0, Context::end)
    }

    /// Whether a context is known to have these tokens from `position` on.
    #[must_use]
    pub fn holds(&self, context: u64, position: usize, tokens: &[u32]) -> bool {
        self.contexts
            .peek(&context)
            .is_some_and(|context| context.holds(position, tokens))
    }

    /// Whether a context can go back to `position`, so that it has just so many tokens. If not, because it would take too
    /// long, a step from there on makes it start anew: [release](Self::release) it, and let it [recall](Self::recall) its
    /// tokens in pieces.
    #[must_use]
    pub fn rewinds(&self, context: u64, position: usize) -> bool {
        let context = self.contexts.peek(&context);
        context.is_none_or(|context| position >= context.end() || context.rewinds(position))
    }

    /// Number of contexts that are known.
    #[must_use]
    pub fn contexts(&self) -> usize {
        self.contexts.len()
    }

    /// Heap memory of contexts and history in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let history = self.history.as_ref().map_or(0, History::bytes);
        self.context_bytes() + history
    }

    fn context_bytes(&self) -> usize {
        // The list has two ends that hold nothing.
        self.ledger.bytes + (self.contexts.len() + 2) * CONTEXT_BYTES
    }

    fn update(&mut self, context: u64, position: usize, tokens: &[u32]) {
        let skipped = tokens.len().saturating_sub(LONGEST_CONTEXT);
        let (position, tokens) = (position + skipped, &tokens[skipped..]);
        let depth = self.depth;
        let entry = (self.contexts).get_or_insert_mut(context, || Context::new(depth, position));
        entry.update(position, tokens, &mut self.ledger);
        if entry.falls_due(SHARED) && self.history.is_some() {
            self.owing.push_back(context);
        }
    }

    /// Gives the history what it does not have of a context, if that is at least `fewest` tokens; returns how many it got.
    fn share(&mut self, context: u64, fewest: usize) -> usize {
        let (Some(history), Some(context)) = (&mut self.history, self.contexts.get_mut(&context))
        else {
            return 0;
        };
        let tokens = context.share(fewest, REPEATED);
        history.add(tokens, &mut self.scratch);
        tokens.len()
    }

    fn keep_to_budget(&mut self) {
        while self.context_bytes() > self.config.context_bytes
            && let Some((&oldest, _)) = self.contexts.peek_lru()
        {
            self.release(oldest);
        }
    }

    /// Drafts behind `suffix`; returns where the draft starts there and how long its match was.
    fn draft(&mut self, context: u64, count: usize) -> (usize, usize) {
        let Some(context) = self.contexts.peek_mut(&context) else {
            return (0, 0);
        };
        let (suffix, scratch) = (&mut self.suffix, &mut self.scratch);
        let shortest = self.config.min_n;
        suffix.extend_from_slice(context.top().tail());
        let start = suffix.len();
        let own = context.own_match(suffix, scratch);
        let mut length = own.map_or(0, |own| own.found.length);
        let resumed = context
            .follow(own)
            .filter(|copying| copying.matched >= shortest && copying.matched + RESUMED > length);
        if let Some(copying) = resumed {
            length = copying.matched + RESUMED;
        }
        let longer_than = if length == 0 { 0 } else { length + HANDICAP };
        let shared = self.history.as_ref();
        let shared = shared.and_then(|history| history.find(suffix, longer_than, scratch));
        let newest = shared.is_none();
        let (found, index, open) = match (shared, resumed, own) {
            (Some((found, index)), _, _) => (found, index, false),
            (None, Some(copying), _) => {
                context.copy(copying.source, count, suffix);
                return (start, length);
            }
            (None, None, Some(own)) => (own.found, context.index(own.layer), own.layer == 0),
            (None, None, None) => return (start, 0),
        };
        if found.length < shortest {
            return (start, 0);
        }
        let draft = Draft {
            count,
            shortest,
            open,
            newest,
        };
        index.draft(found, draft, suffix, scratch);
        (start, found.length)
    }
}

#[cfg(test)]
mod tests;
