//! Grammars as the scheduler's constraints.

use std::sync::Arc;
use std::time::Duration;

use pie_grammar::{
    AsyncMatcher, CompiledGrammar, Compiler, Grammar, GrammarError, PendingGrammar, Progress,
};
use pie_scheduler::{GrammarHandle, GrammarMatcher, GrammarStatus, Mask};

/// A grammar for the sequences of requests: [`NewRequest::constraint`](crate::NewRequest::constraint).
///
/// It is compiled while the request waits in the queue, and masks are computed by the compiler's threads from the moment on at which a
/// token is known.
#[derive(Debug)]
pub struct GrammarConstraint {
    compiler: Compiler,
    pending: PendingGrammar,
    /// The tokens after which it binds; none for the start.
    after: Arc<[u32]>,
}

impl GrammarConstraint {
    /// Asks for the grammar, which binds what follows the first place that has the tokens `after`, and returns at once.
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
        let follow = Follow {
            compiler: self.compiler.clone(),
            ready,
            jumps,
        };
        GrammarStatus::Ready(if self.after.is_empty() {
            Box::new(follow.from(most))
        } else {
            Box::new(Thinking {
                follow,
                end: Arc::clone(&self.after),
                last: Vec::new(),
                binds: None,
            })
        })
    }

    fn is_compiling(&self) -> bool {
        matches!(self.pending.progress(), Progress::Compiling)
    }
}

/// Begins to follow.
#[derive(Debug)]
struct Follow {
    compiler: Compiler,
    ready: Arc<CompiledGrammar>,
    /// Whether tokens without alternative are not drawn.
    jumps: bool,
}

impl Follow {
    fn from(&self, most: u32) -> Following {
        Following(AsyncMatcher::new(
            &self.compiler,
            &self.ready,
            self.jumps,
            most as usize,
        ))
    }
}

/// A sequence that the grammar binds.
#[derive(Debug)]
struct Following(AsyncMatcher);

impl GrammarMatcher for Following {
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

/// A sequence that says what it likes until it has said the tokens of `end`, as models do that think before they answer.
#[derive(Debug)]
struct Thinking {
    follow: Follow,
    end: Arc<[u32]>,
    /// The last tokens, one fewer than `end` has.
    last: Vec<u32>,
    binds: Option<Following>,
}

impl GrammarMatcher for Thinking {
    fn accept_token(&mut self, token: u32, most: u32) -> bool {
        if let Some(binds) = &mut self.binds {
            return binds.accept_token(token, most);
        }
        self.last.push(token);
        if *self.last == *self.end {
            self.binds = Some(self.follow.from(most));
        } else if self.last.len() == self.end.len() {
            self.last.remove(0);
        }
        false
    }

    fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        let binds = self.binds.as_mut();
        binds.is_none_or(|binds| binds.prepare_mask(budget))
    }

    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        self.binds
            .as_mut()
            .map_or(Ok(None), |binds| binds.next_mask(forced))
    }
}

#[cfg(test)]
mod tests {
    use pie_grammar::{CompilerCommand, Settings, Vocabulary};

    use super::*;

    /// What comes of a grammar that is compiled so.
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
