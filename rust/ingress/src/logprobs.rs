//! What the log-probabilities of a request are of.

use pie_engine::LogprobParams;

/// The log-probabilities that an open request wants: what is asked at each place, and the tokens of its prompt that have places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogprobRows {
    params: LogprobParams,
    /// The tokens of the prompt that have log-probabilities, after one that has none.
    prompt: Vec<u32>,
}

impl LogprobRows {
    /// Of a request with this prompt.
    pub fn new(params: LogprobParams, prompt: &[u32]) -> Self {
        let start = params.logprob_start_len;
        let start = start.map_or(prompt.len(), |start| start as usize);
        Self {
            prompt: prompt[start.min(prompt.len())..].to_vec(),
            params,
        }
    }

    /// What is asked.
    pub const fn params(&self) -> &LogprobParams {
        &self.params
    }

    /// The tokens of the prompt: the first has no log-probability.
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Forgets the tokens of the prompt, whose log-probabilities were sent.
    pub fn forget_prompt(&mut self) {
        self.prompt.clear();
    }

    /// The tokens that the words of an output are of: those that came with it, or the one that would come first of a request that
    /// wants none.
    pub fn of_output<'t>(tokens: &'t [u32], scored: Option<&'t u32>) -> &'t [u32] {
        match scored {
            Some(scored) if tokens.is_empty() => std::slice::from_ref(scored),
            _ => tokens,
        }
    }
}
