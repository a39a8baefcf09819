//! The `llguidance` parser of one sequence, which fails permanently after an error or panic.

use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use llguidance::{TokenParser, panic_utils};

use crate::budget::{MemoryBudget, MemoryCharge};
use crate::error::one_line;

/// A parser of one sequence. After an error or a panic every call fails with the same reason.
pub(crate) struct Parser {
    inner: TokenParser,
    error: Option<String>,
    charge: MemoryCharge,
}

impl Clone for Parser {
    fn clone(&self) -> Self {
        Self {
            // With a lexer of its own: clones are used by different threads.
            inner: self.inner.deep_clone(),
            error: self.error.clone(),
            charge: self.charge.clone(),
        }
    }
}

impl Parser {
    pub(crate) fn new(mut inner: TokenParser, budget: Arc<MemoryBudget>) -> Self {
        inner.start_without_prompt();
        Self {
            inner,
            error: None,
            charge: MemoryCharge::new(budget),
        }
    }

    fn attempt<T, E: Display>(
        &mut self,
        work: impl FnOnce(&mut TokenParser) -> Result<T, E>,
    ) -> Result<T, String> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let inner = &mut self.inner;
        let result = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(work(inner))));
        let error = match result {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic.to_string(),
        };
        let error = one_line(&error);
        self.error = Some(error.clone());
        Err(error)
    }

    /// The mask of allowed tokens; EOS tokens where nothing else is allowed.
    pub(crate) fn mask(&mut self) -> Result<SimpleVob, String> {
        let mask = self.attempt(|inner| {
            if inner.stop_reason() == StopReason::NotStopped {
                inner.compute_mask()
            } else {
                Ok(inner.token_env.tok_trie().eos_token_set())
            }
        })?;
        let bytes = self.inner.parser.lexer_stats().num_bytes;
        if self.charge.set(bytes) {
            return Ok(mask);
        }
        let (own, all) = (bytes >> 20, self.charge.budget().limit() >> 20);
        let error = format!(
            "its states take {own} MiB, and those of all grammars more than {all} MiB: simplify it"
        );
        self.error = Some(error.clone());
        Err(error)
    }

    /// Accepts a token.
    pub(crate) fn consume(&mut self, token: u32) -> Result<(), String> {
        let backtracks = self.attempt(|inner| {
            let tokens = inner.consume_token(token)?;
            inner.check_stop().map(|_| tokens)
        })?;
        if backtracks > 0 {
            self.error = Some("it goes back over tokens".to_owned());
        }
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Whether a token may come next.
    pub(crate) fn allows(&mut self, token: u32) -> Result<bool, String> {
        self.attempt(|inner| inner.validate_tokens_raw(&[token]))
            .map(|tokens| tokens == 1)
    }

    /// The tokens of text that is forced.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        let forced = self.attempt(|inner| Ok::<_, String>(inner.compute_ff_tokens()));
        forced.unwrap_or_default()
    }

    pub(crate) fn is_accepting(&mut self) -> Result<bool, String> {
        self.attempt(|inner| Ok::<_, String>(inner.is_accepting()))
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.error.is_some() || self.inner.stop_reason() != StopReason::NotStopped
    }

    pub(crate) fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        self.attempt(|inner| inner.rollback(tokens))
    }

    /// Resets to the start.
    pub(crate) fn reset(&mut self) -> Result<(), String> {
        self.attempt(TokenParser::reset)
    }

    /// Whether there is memory to keep it for another text.
    pub(crate) fn may_be_kept(&self) -> bool {
        self.charge.budget().has_space()
    }
}
