//! Grammars as the scheduler's constraints (constrained decoding).

use std::sync::Arc;
use std::time::Duration;

use pie_grammar::{
    AsyncMatcher, CompiledGrammar, Compiler, Grammar, GrammarError, PendingGrammar, Progress,
};
use pie_scheduler::{GrammarHandle, GrammarMatcher, GrammarStatus, Mask};

/// The grammar of a request: [`NewRequest::constraint`](crate::NewRequest::constraint).
///
/// It is compiled while the request waits in the queue. The compiler's threads compute each token mask as soon as the token before it
/// is known.
#[derive(Debug)]
pub struct GrammarConstraint {
    compiler: Compiler,
    pending: PendingGrammar,
    /// The grammar applies after these tokens, as the end of reasoning; empty for the start.
    after: Arc<[u32]>,
}

impl GrammarConstraint {
    /// Starts to compile `grammar`, which applies to what follows the first occurrence of the tokens `after`. Does not block.
    pub fn new(compiler: &Compiler, grammar: &Grammar, after: &[u32]) -> Self {
        Self {
            compiler: compiler.clone(),
            pending: compiler.compile(grammar),
            after: after.into(),
        }
    }
}

fn failed(error: &GrammarError) -> GrammarStatus {
    let reason = error.to_string().into();
    if error.is_temporary() {
        GrammarStatus::Busy(reason)
    } else {
        GrammarStatus::Invalid(reason)
    }
}

impl GrammarHandle for GrammarConstraint {
    fn create_matcher(&self, most: u32, jumps: bool) -> GrammarStatus {
        let ready = match self.pending.progress() {
            Progress::Compiling => return GrammarStatus::Compiling,
            Progress::Failed(error) => return failed(&error),
            Progress::Ready(ready) => ready,
        };
        let grammar = MatcherFactory {
            compiler: self.compiler.clone(),
            ready,
            jumps,
        };
        GrammarStatus::Ready(if self.after.is_empty() {
            Box::new(grammar.matcher(most))
        } else {
            Box::new(AfterReasoning {
                grammar,
                end: Arc::clone(&self.after),
                tail: Vec::new(),
                matcher: None,
            })
        })
    }

    fn is_compiling(&self) -> bool {
        matches!(self.pending.progress(), Progress::Compiling)
    }
}

#[derive(Debug)]
struct MatcherFactory {
    compiler: Compiler,
    ready: Arc<CompiledGrammar>,
    /// Jump-forward: tokens without an alternative are not sampled.
    jumps: bool,
}

impl MatcherFactory {
    fn matcher(&self, most: u32) -> SequenceMatcher {
        SequenceMatcher(AsyncMatcher::new(
            &self.compiler,
            &self.ready,
            self.jumps,
            most as usize,
        ))
    }
}

/// Matches a sequence from its start.
#[derive(Debug)]
struct SequenceMatcher(AsyncMatcher);

impl GrammarMatcher for SequenceMatcher {
    fn accept_token(&mut self, token: u32, most: u32) -> bool {
        self.0.accept_tokens(&[token], most as usize)
    }

    fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        self.0.prepare(budget)
    }

    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        let next = self.0.next_mask().map_err(|error| error.to_string())?;
        forced.extend_from_slice(next.forced);
        Ok(Some(next.mask))
    }
}

/// Matches a sequence from the end of its reasoning, the tokens `end`; before it is free.
#[derive(Debug)]
struct AfterReasoning {
    grammar: MatcherFactory,
    end: Arc<[u32]>,
    /// The last tokens, one fewer than `end` has.
    tail: Vec<u32>,
    matcher: Option<SequenceMatcher>,
}

impl GrammarMatcher for AfterReasoning {
    fn accept_token(&mut self, token: u32, most: u32) -> bool {
        if let Some(matcher) = &mut self.matcher {
            return matcher.accept_token(token, most);
        }
        self.tail.push(token);
        if *self.tail == *self.end {
            self.matcher = Some(self.grammar.matcher(most));
        } else if self.tail.len() == self.end.len() {
            self.tail.remove(0);
        }
        false
    }

    fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        let matcher = self.matcher.as_mut();
        matcher.is_none_or(|matcher| matcher.prepare_mask(budget))
    }

    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        self.matcher
            .as_mut()
            .map_or(Ok(None), |matcher| matcher.next_mask(forced))
    }
}

#[cfg(test)]
mod tests {
    use pie_grammar::{CompilerCommand, Settings, Vocabulary};

    use super::*;

    fn begun(text: &str, settings: Settings) -> GrammarStatus {
        let vocabulary = Vocabulary::new(&[b"a".to_vec(), Vec::new()], &[], &[1]).unwrap();
        let compiler = Compiler::with_settings(vocabulary, settings).unwrap();
        let constraint = GrammarConstraint::new(&compiler, &Grammar::Regex(text.into()), &[]);
        let _ = constraint.pending.wait();
        constraint.create_matcher(9, true)
    }

    #[test]
    fn a_lack_of_compilers_is_no_fault_of_the_grammar() {
        let no_process = Settings {
            process: Some(CompilerCommand {
                program: "/does/not/exist".into(),
                arguments: Vec::new(),
            }),
            ..Settings::default()
        };
        let full = GrammarError::Busy {
            waiting: 1024,
            limit: 1024,
        };
        for begun in [begun("a", no_process), failed(&full)] {
            let GrammarStatus::Busy(reason) = begun else {
                panic!("the grammar is blamed: {begun:?}")
            };
            assert!(reason.ends_with("try again later"), "{reason}");
        }
        let wrong = begun("(", Settings::default());
        assert!(matches!(wrong, GrammarStatus::Invalid(_)), "{wrong:?}");
    }
}
