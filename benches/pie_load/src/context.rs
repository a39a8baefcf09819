//! A context: a sequence of tokens and the pages that hold their KV.

use pie_wire::Sampler;

use crate::error::LoadError;
use crate::frame::Turn;
use crate::pages::PagePool;

/// One prompt and what follows it.
pub(crate) struct Context {
    /// From 1, as on the wire.
    id: u64,
    /// The tokens of the next pass: the prompt, then the last token.
    pending: Vec<u32>,
    /// Tokens whose KV is stored.
    stored: u32,
    pages: Vec<u32>,
    sampler: Sampler,
    /// Tokens that it may still produce.
    pub(crate) remaining: u32,
}

impl Context {
    pub(crate) fn new(id: u64, prompt: Vec<u32>, sampler: Sampler, output: u32) -> Self {
        Self {
            id,
            pending: prompt,
            stored: 0,
            pages: Vec::new(),
            sampler,
            remaining: output,
        }
    }

    /// Tokens of the next pass.
    pub(crate) fn tokens(&self) -> u32 {
        self.pending.len() as u32
    }

    /// Pages that hold everything up to the end of the next pass.
    pub(crate) fn pages_needed(&self, page_size: u32) -> u32 {
        (self.stored + self.tokens()).div_ceil(page_size)
    }

    /// Pages at the end of its life: the last token is not stored.
    pub(crate) fn lifetime_pages(&self, page_size: u32) -> u32 {
        (self.stored + self.tokens() + self.remaining - 1).div_ceil(page_size)
    }

    /// Takes the pages that the next pass lacks.
    pub(crate) fn reserve(&mut self, pool: &mut PagePool, page_size: u32) -> Result<(), LoadError> {
        while self.pages.len() < self.pages_needed(page_size) as usize {
            self.pages.push(pool.take()?);
        }
        Ok(())
    }

    /// Its share of the next frame; its last row is sampled.
    pub(crate) fn turn(&self) -> Turn<'_> {
        Turn {
            context_id: self.id,
            tokens: &self.pending,
            start: self.stored,
            pages: &self.pages,
            sampler: Some(&self.sampler),
        }
    }

    /// The pass is done: what was pending is stored, and `token` comes next.
    pub(crate) fn advance(&mut self, token: u32) {
        self.stored += self.tokens();
        self.pending.clear();
        self.pending.push(token);
        self.remaining = self.remaining.saturating_sub(1);
    }

    pub(crate) fn release(&mut self, pool: &mut PagePool) {
        pool.give_back(&mut self.pages);
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
            context.advance(token);
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
