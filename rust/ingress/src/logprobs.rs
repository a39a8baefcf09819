//! The tokens that log-probabilities belong to.

use pie_engine::LogprobParams;

/// The requested log-probabilities of an open request, and the prompt tokens that they belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogprobRows {
    params: LogprobParams,
    /// Prompt tokens with log-probabilities, after one without.
    prompt: Vec<u32>,
}

impl LogprobRows {
    /// For a request with this prompt.
    pub fn new(params: LogprobParams, prompt: &[u32]) -> Self {
        let start = params.logprob_start_len;
        let start = start.map_or(prompt.len(), |start| start as usize);
        Self {
            prompt: prompt[start.min(prompt.len())..].to_vec(),
            params,
        }
    }

    /// The parameters.
    pub const fn params(&self) -> &LogprobParams {
        &self.params
    }

    /// The prompt tokens; the first has no log-probability.
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Drops the prompt tokens, whose log-probabilities were sent.
    pub fn forget_prompt(&mut self) {
        self.prompt.clear();
    }

    /// The tokens of an output's log-probabilities: its own, or the one that would come first of a request without output
    /// tokens.
    pub fn of_output<'t>(tokens: &'t [u32], scored: Option<&'t u32>) -> &'t [u32] {
        match scored {
            Some(scored) if tokens.is_empty() => std::slice::from_ref(scored),
            _ => tokens,
        }
    }
}
