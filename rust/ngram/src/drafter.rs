//! Drafts for batches of requests.

use crate::config::LONGEST;
use crate::context::{Context, Ledger};
use crate::history::History;
use crate::index::{Draft, Index, Match, Scratch};
use crate::store::Store;
use crate::tree::{Soil, Tree, TreeBuilder};
use crate::{Config, ConfigError};

/// The context of requests that name none; nothing is remembered of it.
const NOBODY: u64 = 0;
/// The history gets a context's tokens when so many are new, or at its end.
const SHARED: usize = 128;
/// Once a batch has given it so many, further contexts wait for the next: those that decode together would all be due in
/// the same step.
const SHARED_AT_ONCE: usize = 256;
/// A match in the texts of others counts as so many tokens shorter: what a context says again is its own more often than
/// another's.
pub(crate) const HANDICAP: usize = 1;
/// Tokens that are repeated before them, so that their contexts are not cut short.
const REPEATED: usize = 8;

/// What a request adds to its context.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The context's id; 0 is nobody's.
    pub context: u64,
    /// Position of the first of `tokens`. Where it lies below what is known of the context, that is compared and
    /// taken back as far as it differs; where it lies above, the context starts anew.
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

    /// Tokens that matched before the first drafted one; 0 without a draft.
    #[must_use]
    pub fn match_length(&self, step: usize) -> usize {
        self.steps.get(step).map_or(0, |step| step.1)
    }

    fn end(&self, step: usize) -> usize {
        self.steps
            .get(step)
            .map_or(self.tokens.len(), |step| step.0)
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.steps.clear();
    }

    fn push(&mut self, tokens: &[u32], match_length: usize) {
        self.tokens.extend_from_slice(tokens);
        self.steps.push((self.tokens.len(), match_length));
    }
}

/// Where a draft comes from.
struct Source<'a> {
    index: &'a Index,
    found: Match,
    /// Whether it is the index that ends as the context does.
    own: bool,
}

/// Remembers contexts and drafts what they will say next, from what they and others have said.
///
/// The longest match of a context's end decides, where one in the text of others must be two tokens longer than the
/// context's own. Of the continuations that it had, the most frequent is drafted, of several the newest. The draft goes on in the same text.
#[derive(Debug)]
pub struct Drafter {
    config: Config,
    depth: usize,
    contexts: Store,
    ledger: Ledger,
    history: Option<History>,
    suffix: Vec<u32>,
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
            contexts: Store::default(),
            ledger: Ledger::default(),
            history: (config.capacity > 0).then(|| History::new(depth, config.capacity)),
            suffix: Vec::new(),
            scratch: Scratch::default(),
            tree: TreeBuilder::default(),
        })
    }

    /// Takes what each request adds, one after the other, and drafts what follows.
    pub fn step(&mut self, steps: &[Step<'_>], drafts: &mut Drafts) {
        drafts.clear();
        let mut shared = 0;
        for step in steps {
            let mut match_length = 0;
            self.suffix.clear();
            let mut start = 0;
            if step.context != NOBODY {
                self.update(step);
                // A prompt takes long enough for this not to matter.
                if shared < SHARED_AT_ONCE || step.tokens.len() >= SHARED {
                    shared += self.share(step.context, SHARED);
                }
                self.keep_to_budget();
                if step.drafts > 0 {
                    (start, match_length) = self.draft(step.context, step.drafts);
                }
            }
            drafts.push(&self.suffix[start..], match_length);
        }
    }

    /// Lets `child` start with what `parent` has said. Does nothing if `parent` is not known, or either is nobody.
    pub fn fork(&mut self, parent: u64, child: u64) {
        if child == NOBODY || child == parent {
            return;
        }
        self.share(parent, 1);
        let Some(context) = self.contexts.touch(parent) else {
            return;
        };
        let fork = context.fork(&mut self.ledger);
        self.release(child);
        self.contexts.insert(child, fork);
        self.keep_to_budget();
    }

    /// Forgets a context; the shared history keeps what it said.
    pub fn release(&mut self, context: u64) {
        self.share(context, REPEATED);
        if let Some(mut context) = self.contexts.remove(context) {
            context.release(&mut self.ledger);
        }
    }

    /// Drafts at most `count` tokens for a known context as a tree, of which each path may come true. The most probable
    /// come first.
    pub fn tree(&mut self, context: u64, count: usize, tree: &mut Tree) {
        tree.clear();
        let Some(context) = self.contexts.get(context) else {
            return;
        };
        self.suffix.clear();
        self.suffix.extend_from_slice(context.top().tail());
        let history = self.history.iter().flat_map(History::generations);
        let indices = [context.top()]
            .into_iter()
            .chain(context.frozen())
            .chain(history);
        let soil = Soil {
            indices: &indices.collect::<Vec<_>>(),
            own: 1 + context.frozen().count(),
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
        self.contexts.get(context).map_or(0, Context::end)
    }

    /// Whether a context is known to have these tokens from `position` on.
    #[must_use]
    pub fn holds(&self, context: u64, position: usize, tokens: &[u32]) -> bool {
        self.contexts
            .get(context)
            .is_some_and(|context| context.holds(position, tokens))
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
        self.ledger.bytes + self.contexts.bytes() + history
    }

    fn update(&mut self, step: &Step<'_>) {
        let skipped = step.tokens.len().saturating_sub(LONGEST / 2);
        let (position, tokens) = (step.position as usize + skipped, &step.tokens[skipped..]);
        if self.contexts.touch(step.context).is_none() {
            let context = Context::new(self.depth, position);
            self.contexts.insert(step.context, context);
        }
        if let Some(context) = self.contexts.touch(step.context) {
            context.update(position, tokens, &mut self.ledger);
        }
    }

    /// Gives the history what it does not have of a context, if that is at least `fewest` tokens; returns how many it got.
    fn share(&mut self, context: u64, fewest: usize) -> usize {
        if let Some(history) = &mut self.history
            && let Some(context) = self.contexts.touch(context)
            && context.unshared() >= fewest
        {
            let tokens = context.share(REPEATED);
            history.add(tokens);
            return tokens.len();
        }
        0
    }

    fn keep_to_budget(&mut self) {
        while self.ledger.bytes > self.config.context_bytes {
            let Some(oldest) = self.contexts.oldest() else {
                return;
            };
            self.release(oldest);
        }
    }

    /// Drafts behind `suffix`; returns where the draft starts there and how long its match was.
    fn draft(&mut self, context: u64, count: usize) -> (usize, usize) {
        let Some(context) = self.contexts.get(context) else {
            return (0, 0);
        };
        self.suffix.extend_from_slice(context.top().tail());
        let start = self.suffix.len();
        let history = self.history.as_ref();
        let source = source(
            context,
            history,
            &self.suffix,
            self.depth,
            &mut self.scratch,
        );
        let shortest = self.config.min_n;
        let Some(source) = source.filter(|source| source.found.length >= shortest) else {
            return (start, 0);
        };
        let draft = Draft {
            count,
            shortest,
            open: source.own,
        };
        source
            .index
            .draft(source.found, draft, &mut self.suffix, &mut self.scratch);
        (start, source.found.length)
    }
}

/// The best match of a context's end: its own text before that of others, newer before older.
fn source<'a>(
    context: &'a Context,
    history: Option<&'a History>,
    suffix: &[u32],
    depth: usize,
    scratch: &mut Scratch,
) -> Option<Source<'a>> {
    let index = context.top();
    let found = index.own_match();
    let mut best = found.map(|found| Source {
        index,
        found,
        own: true,
    });
    let mut length = found.map_or(0, |found| found.length);
    for index in context.frozen() {
        if length < depth
            && let Some(found) = index.find(suffix, depth, scratch)
            && found.length > length
        {
            length = found.length;
            best = Some(Source {
                index,
                found,
                own: false,
            });
        }
    }
    let own = if length == 0 { 0 } else { length + HANDICAP };
    let shared = history.and_then(|history| history.find(suffix, own, scratch));
    let shared = shared.map(|(found, index)| Source {
        index,
        found,
        own: false,
    });
    shared.or(best)
}

#[cfg(test)]
mod tests;
