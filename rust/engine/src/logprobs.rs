//! Log-probability parameters of a request, as `SGLang` names them.

use std::sync::Arc;

use pie_scheduler::{Logprobs, NewRequest};
use pie_wire::{LogprobOptions, LogprobRows, LogprobShape};

use crate::handshake::Capabilities;
use crate::sampling::{RowParams, SamplingError};

/// Log-probabilities that a request wants; names and meanings are `SGLang`'s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogprobParams {
    /// Top-k log-probabilities of each position.
    pub top_logprobs_num: u32,
    /// Tokens whose log-probabilities are returned for each position.
    pub token_ids_logprob: Vec<u32>,
    /// Also return those of the prompt tokens after this index. `None`: only of generated tokens.
    pub logprob_start_len: Option<u32>,
    /// Numbers of a hidden state; each position has one. 0 for none.
    pub hidden: u32,
    /// Before temperature scaling, as with `SGLANG_RETURN_ORIGINAL_LOGPROB`; penalties, biases and masks are applied.
    pub original: bool,
}

impl LogprobParams {
    /// What each position has.
    #[must_use]
    pub const fn shape(&self) -> LogprobShape {
        LogprobShape {
            top: self.top_logprobs_num,
            given: self.token_ids_logprob.len() as u32,
            hidden: self.hidden,
        }
    }

    /// Checks the values against the length of the prompt and the vocabulary.
    ///
    /// # Errors
    /// [`SamplingError`].
    pub fn check(&self, prompt: usize, vocab_size: u32) -> Result<(), SamplingError> {
        let out_of_range = |name, value: u32, wanted| {
            let value = value.to_string();
            Err(SamplingError::Range {
                name,
                value,
                wanted,
            })
        };
        let top = self.top_logprobs_num;
        if top > vocab_size {
            return out_of_range(
                "top_logprobs_num",
                top,
                "at most the number of tokens of the model",
            );
        }
        let mut ids = self.token_ids_logprob.iter();
        if let Some(&id) = ids.find(|&&id| id >= vocab_size) {
            return out_of_range(
                "a token of token_ids_logprob",
                id,
                "one of the model's tokens",
            );
        }
        match self.logprob_start_len {
            Some(start) if start as usize > prompt => out_of_range(
                "logprob_start_len",
                start,
                "at most the number of tokens of the prompt",
            ),
            _ => Ok(()),
        }
    }

    /// Sets them in a request.
    pub fn apply(self, request: &mut NewRequest<RowParams>) {
        let words = u32::try_from(self.shape().words()).unwrap_or(u32::MAX);
        request.logprobs = Some(Logprobs {
            words,
            prompt_from: self.logprob_start_len.map(|start| start.saturating_add(1)),
            uncached: self.hidden > 0,
        });
        let extension = Arc::make_mut(request.sampling.extension.get_or_insert_default());
        extension.logprobs = Some(LogprobOptions {
            scaled: !self.original,
            top: self.top_logprobs_num,
            token_ids: self.token_ids_logprob,
            hidden: self.hidden,
            prompt: None,
        });
    }
}

/// 32-bit words of log-probabilities that fit into a reply of so many bytes, next to its tokens and drafts.
pub(crate) fn max_logprob_words(caps: &Capabilities, reply_bytes: usize) -> u32 {
    const WORD: usize = size_of::<u32>();
    /// Bytes of an archive's root, and of each request: offsets, a token, the header of its log-probabilities.
    const ROOT: usize = 4096;
    const REQUEST: usize = 8 * WORD + LogprobRows::ROW_BYTES;
    let requests = REQUEST * caps.max_forward_requests as usize;
    // A verified draft, and a proposed one with its position.
    let drafts = 3 * WORD * caps.max_forward_tokens as usize;
    let taken = ROOT + requests + drafts.min(1 << 20);
    (reply_bytes.saturating_sub(taken) / WORD) as u32
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
    fn invalid_values_are_refused_by_name() {
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
    fn logprobs_are_set_beside_the_other_parameters() {
        let raw = RowParams::from(Sampler::RawLogits);
        let mut request = NewRequest::new(0, vec![1; 8], raw, 4);
        let params = asked(|of| {
            of.top_logprobs_num = 2;
            of.token_ids_logprob = vec![5];
            of.logprob_start_len = Some(0);
        });
        params.apply(&mut request);
        let expected = Logprobs {
            words: 6,
            prompt_from: Some(1),
            uncached: false,
        };
        assert_eq!(request.logprobs, Some(expected));
        let extension = request.sampling.extension.unwrap();
        let asked = extension.logprobs.clone().unwrap();
        assert!(asked.scaled && asked.prompt.is_none());
        assert_eq!((asked.top, &asked.token_ids[..]), (2, &[5][..]));
        assert!(extension.sampler.is_none() && !extension.penalties.any());
    }
}
