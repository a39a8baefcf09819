//! A context: a sequence of tokens and the pages that hold their KV.

use pie_engine::FrameRow;
use pie_wire::Sampler;

use crate::error::LoadError;
use crate::pages::PagePool;

/// Keeps the place of a token that is not known yet.
const UNKNOWN: u32 = 0;

/// One prompt and what follows it.
pub(crate) struct Context {
    /// From 1, as on the wire.
    id: u64,
    /// The tokens of the next pass: the prompt, then the last token.
    pending: Vec<u32>,
    /// Where the last token comes from, as long as it is not known.
    awaits: Option<usize>,
    /// What the driver drafted after them.
    drafts: Vec<u32>,
    wants_drafts: bool,
    /// Tokens whose KV is stored.
    stored: u32,
    /// Rejected drafts may leave one more than the next pass needs.
    pages: Vec<u32>,
    /// Pages of the next pass.
    in_use: usize,
    sampler: Sampler,
    /// Tokens that it may still produce.
    pub(crate) remaining: u32,
}

impl Context {
    pub(crate) fn new(id: u64, prompt: Vec<u32>, sampler: Sampler, output: u32) -> Self {
        Self {
            id,
            pending: prompt,
            awaits: None,
            drafts: Vec::new(),
            wants_drafts: false,
            stored: 0,
            pages: Vec::new(),
            in_use: 0,
            sampler,
            remaining: output,
        }
    }

    /// The same, with drafts.
    pub(crate) fn drafting(self) -> Self {
        Self {
            wants_drafts: true,
            ..self
        }
    }

    /// Tokens of the next pass, without drafts.
    pub(crate) fn tokens(&self) -> u32 {
        self.pending.len() as u32
    }

    /// Pages that hold everything up to the end of the next pass.
    pub(crate) fn pages_needed(&self, page_size: u32) -> u32 {
        (self.stored + self.tokens() + self.drafts.len() as u32).div_ceil(page_size)
    }

    /// Pages at the end of its life: the last token is not stored.
    pub(crate) fn lifetime_pages(&self, page_size: u32) -> u32 {
        (self.stored + self.tokens() + self.remaining - 1).div_ceil(page_size)
    }

    /// Takes the pages that the next pass lacks.
    pub(crate) fn reserve(&mut self, pool: &mut PagePool, page_size: u32) -> Result<(), LoadError> {
        self.in_use = self.pages_needed(page_size) as usize;
        while self.pages.len() < self.in_use {
            self.pages.push(pool.take()?);
        }
        Ok(())
    }

    /// Its share of the next frame, once pages are reserved; its last row is sampled.
    pub(crate) fn turn(&self) -> FrameRow<'_> {
        FrameRow {
            context_id: self.id,
            tokens: &self.pending,
            awaits: self.awaits,
            start: self.stored,
            drafts: &self.drafts,
            wants_drafts: self.wants_drafts,
            pages: &self.pages[..self.in_use],
            sampler: Some(&self.sampler),
            ..FrameRow::EMPTY
        }
    }

    /// Moves on before the pass is answered, which without drafts brings one token: the answer to that request.
    pub(crate) fn advance(&mut self, request: usize) {
        debug_assert!(!self.wants_drafts, "the answer may bring several tokens");
        self.take(&[UNKNOWN], &[]);
        self.awaits = Some(request);
    }

    /// The pass is done: what was pending is stored, and so are the drafts that were accepted, all of `tokens` but the last.
    /// That one comes next, in the place of the first rejected draft; after it `drafts`, as far as they may be produced.
    pub(crate) fn take(&mut self, tokens: &[u32], drafts: &[u32]) {
        self.stored += self.tokens() + tokens.len() as u32 - 1;
        self.pending.clear();
        self.pending.extend(tokens.last());
        self.awaits = None;
        self.remaining = self.remaining.saturating_sub(tokens.len() as u32);
        let usable = drafts.len().min(self.remaining.saturating_sub(1) as usize);
        self.drafts.clear();
        self.drafts.extend(&drafts[..usable]);
    }

    /// How many drafts the next pass verifies.
    pub(crate) fn drafted(&self) -> usize {
        self.drafts.len()
    }

    pub(crate) fn release(&mut self, pool: &mut PagePool) {
        pool.release(&mut self.pages);
    }
}

/// `length` tokens that differ from context to context, all below `limit`.
pub(crate) fn prompt(id: u64, length: u32, limit: u32) -> Vec<u32> {
    // The multiplier of a known linear congruential generator; what matters is that tokens vary.
    const FACTOR: u64 = 6_364_136_223_846_793_005;
    let mut state = id;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(FACTOR).wrapping_add(1);
            ((state >> 33) % u64::from(limit.max(1))) as u32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: Sampler = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };

    #[test]
    fn a_context_takes_a_page_when_it_needs_one() {
        let mut pool = PagePool::new(9);
        let mut context = Context::new(1, vec![5; 4], GREEDY, 5);
        let mut pages = Vec::new();
        for token in 0..5 {
            assert_eq!(context.lifetime_pages(4), 2);
            context.reserve(&mut pool, 4).unwrap();
            let turn = context.turn();
            pages.push((turn.start, turn.tokens.to_vec(), turn.pages.len()));
            context.take(&[token], &[]);
        }
        let expected = [
            (0, vec![5; 4], 1),
            (4, vec![0], 2),
            (5, vec![1], 2),
            (6, vec![2], 2),
            (7, vec![3], 2),
        ];
        assert_eq!(pages, expected);
        assert_eq!((context.remaining, pool.free()), (0, 7));
        context.release(&mut pool);
        assert_eq!(pool.free(), 9);
    }

    /// The worked example of the protocol, with its pages of 16 tokens, and what may follow it.
    #[test]
    fn rejected_drafts_leave_their_page_for_later() {
        let mut pool = PagePool::new(9);
        let mut context = Context::new(1, vec![5; 13], GREEDY, 9).drafting();
        let mut passes = Vec::new();
        let answers: [(&[u32], &[u32]); 5] = [
            (&[10], &[20, 21, 22, 23]),
            // Two of four accepted, across the border of the page.
            (&[20, 21, 11], &[24, 25]),
            // None accepted.
            (&[12], &[26, 27, 28, 29]),
            (&[26, 27, 13], &[30]),
            (&[14], &[31]),
        ];
        for (tokens, drafts) in answers {
            context.reserve(&mut pool, 16).unwrap();
            let turn = context.turn();
            assert!(turn.wants_drafts);
            passes.push((
                turn.start,
                turn.tokens.len(),
                turn.drafts.len(),
                turn.pages.len(),
            ));
            context.take(tokens, drafts);
        }
        // Of the drafts after 12 only as many are sent as may be produced; after 13 one token is left and no draft.
        let expected = [
            (0, 13, 0, 1),
            (13, 1, 4, 2),
            (16, 1, 2, 2),
            (17, 1, 3, 2),
            (20, 1, 0, 2),
        ];
        assert_eq!(passes, expected);
        assert_eq!(
            (context.remaining, context.drafted(), pool.free()),
            (0, 0, 7)
        );

        let mut context = Context::new(2, vec![5; 13], GREEDY, 9).drafting();
        context.take(&[10], &[20, 21, 22, 23]);
        context.reserve(&mut pool, 16).unwrap();
        let pages = context.turn().pages.to_vec();
        context.take(&[11], &[]);
        context.reserve(&mut pool, 16).unwrap();
        assert_eq!(context.turn().pages, &pages[..1]);
        assert_eq!(
            (context.turn().start, context.turn().tokens),
            (14, &[11][..])
        );
        context.take(&[12], &[24, 25]);
        context.reserve(&mut pool, 16).unwrap();
        assert_eq!((context.turn().pages, pool.free()), (&pages[..], 5));
    }

    #[test]
    fn a_context_moves_on_before_its_token_is_known() {
        let mut pool = PagePool::new(9);
        let mut contexts = [(); 2].map(|()| Context::new(1, vec![5; 4], GREEDY, 5));
        for request in 0..4 {
            let [ahead, behind] = &mut contexts;
            ahead.advance(request);
            behind.take(&[7], &[]);
            for context in [&mut *ahead, &mut *behind] {
                context.reserve(&mut pool, 4).unwrap();
            }
            let (turn, known) = (ahead.turn(), behind.turn());
            assert_eq!((turn.awaits, turn.tokens.len()), (Some(request), 1));
            assert_eq!((known.awaits, known.tokens), (None, &[7][..]));
            assert_eq!(
                (turn.start, ahead.remaining),
                (known.start, behind.remaining)
            );
            assert_eq!(turn.pages.len(), known.pages.len());
        }
        contexts[0].take(&[8], &[]);
        assert_eq!(contexts[0].turn().awaits, None);
    }

    #[test]
    fn prompts_differ_and_keep_to_the_vocabulary() {
        let prompts = [prompt(1, 500, 300), prompt(2, 500, 300)];
        assert_ne!(prompts[0], prompts[1]);
        for tokens in prompts {
            assert!(tokens.iter().all(|&token| token < 300));
            assert!(tokens.iter().any(|&token| token != tokens[0]));
        }
    }
}
