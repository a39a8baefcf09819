//! Which log-probabilities a request wants, in `SGLang`'s words.

use std::sync::Arc;

use pie_scheduler::{Logprobs, NewRequest};
use pie_wire::{LogprobOptions, LogprobRows, LogprobShape};

use crate::handshake::Capabilities;
use crate::sampling::{Draw, SamplingError};

/// Log-probabilities of each token of a request; names and meanings are `SGLang`'s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogprobParams {
    /// The most probable tokens of each place, so many.
    pub top_logprobs_num: u32,
    /// Tokens whose log-probabilities are wanted at each place.
    pub token_ids_logprob: Vec<u32>,
    /// Of the prompt's tokens after the one at this index, too. `None`: only of produced ones.
    pub logprob_start_len: Option<u32>,
    /// Before the temperature, as with `SGLANG_RETURN_ORIGINAL_LOGPROB`. Penalties, biases and masks have been applied all the same.
    pub original: bool,
}

impl LogprobParams {
    /// What each place has.
    #[must_use]
    pub const fn shape(&self) -> LogprobShape {
        LogprobShape {
            top: self.top_logprobs_num,
            given: self.token_ids_logprob.len() as u32,
        }
    }

    /// Whether a request with a prompt of so many tokens can ask a model of so many tokens for them.
    ///
    /// # Errors
    /// [`SamplingError`].
    pub fn check(&self, prompt: usize, vocab_size: u32) -> Result<(), SamplingError> {
        let wrong = |name, value: u32, wanted| {
            let value = value.to_string();
            Err(SamplingError::Range {
                name,
                value,
                wanted,
            })
        };
        let top = self.top_logprobs_num;
        if top > vocab_size {
            return wrong(
                "top_logprobs_num",
                top,
                "at most the number of tokens of the model",
            );
        }
        let mut ids = self.token_ids_logprob.iter();
        if let Some(&id) = ids.find(|&&id| id >= vocab_size) {
            return wrong(
                "a token of token_ids_logprob",
                id,
                "one of the model's tokens",
            );
        }
        match self.logprob_start_len {
            Some(start) if start as usize > prompt => wrong(
                "logprob_start_len",
                start,
                "at most the number of tokens of the prompt",
            ),
            _ => Ok(()),
        }
    }

    /// Has a request ask for them.
    pub fn ask(self, arrival: &mut NewRequest<Draw>) {
        let words = u32::try_from(self.shape().words()).unwrap_or(u32::MAX);
        arrival.logprobs = Some(Logprobs {
            words,
            prompt_from: self.logprob_start_len.map(|start| start.saturating_add(1)),
        });
        let extension = Arc::make_mut(arrival.sampling.extension.get_or_insert_default());
        extension.logprobs = Some(LogprobOptions {
            scaled: !self.original,
            top: self.top_logprobs_num,
            token_ids: self.token_ids_logprob,
            prompt: None,
        });
    }
}

/// Words of log-probabilities that an answer of so many bytes has room for, next to its tokens and drafts.
pub(crate) fn room(caps: &Capabilities, answer_bytes: usize) -> u32 {
    const WORD: usize = size_of::<u32>();
    /// The root of an archive, and the words of a request: offsets, a token, a row of log-probabilities.
    const ROOT: usize = 4096;
    const REQUEST: usize = 8 * WORD + LogprobRows::ROW_BYTES;
    let requests = REQUEST * caps.max_forward_requests as usize;
    // A draft that is verified, and one that is proposed with its position.
    let drafts = 3 * WORD * caps.max_forward_tokens as usize;
    let taken = ROOT + requests + drafts.min(1 << 20);
    (answer_bytes.saturating_sub(taken) / WORD) as u32
}

#[cfg(test)]
mod tests {
    use pie_wire::Sampler;

    use super::*;

    fn asked(change: fn(&mut LogprobParams)) -> LogprobParams {
        let mut params = LogprobParams::default();
        change(&mut params);
        params
    }

    #[test]
    fn what_has_no_meaning_is_refused_by_name() {
        let refused = |change| asked(change).check(8, 100).unwrap_err().to_string();
        for (error, text) in [
            (
                refused(|of| of.top_logprobs_num = 101),
                "top_logprobs_num is 101",
            ),
            (
                refused(|of| of.token_ids_logprob = vec![5, 100]),
                "token_ids_logprob is 100",
            ),
            (
                refused(|of| of.logprob_start_len = Some(9)),
                "logprob_start_len is 9",
            ),
        ] {
            assert!(error.contains(text), "{error}");
        }
        let most = |of: &mut LogprobParams| {
            of.top_logprobs_num = 100;
            of.logprob_start_len = Some(8);
        };
        assert_eq!(asked(most).check(8, 100), Ok(()));
    }

    #[test]
    fn a_request_asks_for_them_beside_the_rest() {
        let draw = Draw::from(Sampler::RawLogits);
        let mut arrival = NewRequest::new(0, vec![1; 8], draw, 4);
        let params = asked(|of| {
            of.top_logprobs_num = 2;
            of.token_ids_logprob = vec![5];
            of.logprob_start_len = Some(0);
        });
        params.ask(&mut arrival);
        let expected = Logprobs {
            words: 6,
            prompt_from: Some(1),
        };
        assert_eq!(arrival.logprobs, Some(expected));
        let extension = arrival.sampling.extension.unwrap();
        let asked = extension.logprobs.clone().unwrap();
        assert!(asked.scaled && asked.prompt.is_none());
        assert_eq!((asked.top, &asked.token_ids[..]), (2, &[5][..]));
        assert!(extension.sampler.is_none() && !extension.penalties.any());
    }
}
