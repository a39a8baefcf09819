//! Which log-probabilities a request wants, in `SGLang`'s words.

use pie_sched::{Arrival, Logprobs};
use pie_wire::{AnswerRows, LogprobsAsked, PlaceShape, RequestExtension};

use crate::handshake::Capabilities;
use crate::sampling::Draw;

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
    pub const fn shape(&self) -> PlaceShape {
        PlaceShape {
            top: self.top_logprobs_num,
            given: self.token_ids_logprob.len() as u32,
        }
    }

    /// Has a request ask for them.
    pub fn ask(self, arrival: &mut Arrival<Draw>) {
        let words = u32::try_from(self.shape().words()).unwrap_or(u32::MAX);
        arrival.logprobs = Some(Logprobs {
            words,
            prompt_from: self.logprob_start_len.map(|start| start.saturating_add(1)),
        });
        let extension = arrival.sampling.extension.get_or_insert_default();
        let asked = LogprobsAsked {
            scaled: !self.original,
            top: self.top_logprobs_num,
            token_ids: self.token_ids_logprob,
            prompt: None,
        };
        **extension = RequestExtension {
            logprobs: Some(asked),
            ..std::mem::take(&mut **extension)
        };
    }
}

/// Words of log-probabilities that an answer of so many bytes has room for, next to its tokens and drafts.
pub(crate) fn room(caps: &Capabilities, answer_bytes: usize) -> u32 {
    const WORD: usize = size_of::<u32>();
    /// The root of an archive, and the words of a request: offsets, a token, a row of log-probabilities.
    const ROOT: usize = 4096;
    const REQUEST: usize = 8 * WORD + AnswerRows::ROW_BYTES;
    let requests = REQUEST * caps.max_forward_requests as usize;
    // A draft that is verified, and one that is proposed with its position.
    let drafts = 3 * WORD * caps.max_forward_tokens as usize;
    let taken = ROOT + requests + drafts.min(1 << 20);
    (answer_bytes.saturating_sub(taken) / WORD) as u32
}
