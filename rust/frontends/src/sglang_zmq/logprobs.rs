//! Log-probabilities, from what the runtime brings to the columns of a message.

use pie_engine::{LogprobParams, LogprobShape, OutputDelta};
use pie_ingress::LogprobRows;

use crate::sglang_zmq::schema::{array, float, nil, uint};

/// Fields of a message. With a request that wants log-probabilities in it, all of them are lists, and empty for the others.
pub(crate) const COLUMNS: [&str; 12] = [
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
];

/// Those of an open request that were not sent yet.
#[derive(Debug, Clone)]
pub(crate) struct OpenLogprobs {
    /// Their prompt's tokens go once they were sent.
    rows: LogprobRows,
    prompt_words: Vec<u32>,
    words: Vec<u32>,
    /// The token that would come first, of a request that wants none.
    scored: Option<u32>,
    /// Whether its prompt is computed.
    computed: bool,
}

impl OpenLogprobs {
    pub(crate) const fn new(rows: LogprobRows) -> Self {
        Self {
            rows,
            prompt_words: Vec::new(),
            words: Vec::new(),
            scored: None,
            computed: false,
        }
    }

    /// Of a request that is refused.
    pub(crate) fn none() -> Self {
        Self::new(LogprobRows::new(LogprobParams::default(), &[]))
    }

    pub(crate) fn take(&mut self, delta: &OutputDelta) {
        self.prompt_words.extend_from_slice(&delta.prompt_logprobs);
        self.words.extend_from_slice(&delta.logprobs);
        self.scored = delta.scored;
        self.computed |= !delta.tokens.is_empty() || delta.scored.is_some();
    }

    /// Forgets what was sent.
    pub(crate) fn sent(&mut self) {
        self.words.clear();
        if self.computed {
            self.rows.forget_prompt();
            self.prompt_words = Vec::new();
        }
    }

    /// The entry of a column; `tokens` are those of the message.
    pub(crate) fn write(&self, column: &str, tokens: &[u32], bytes: &mut Vec<u8>) {
        let shape = self.rows.params().shape();
        let (of_prompt, rest) = match column.strip_prefix("input_") {
            Some(rest) => (true, rest),
            None => (false, column.trim_start_matches("output_")),
        };
        let (kind, of_ids) = match rest.strip_suffix("_logprobs_idx") {
            Some(kind) => (kind, true),
            None => (rest.trim_end_matches("_logprobs_val"), false),
        };
        let part = Part::of(kind);
        let (words, first) = if of_prompt {
            // What was ended before its prompt was computed has none.
            let tokens = if self.computed {
                self.rows.prompt()
            } else {
                &[]
            };
            (&self.prompt_words, tokens)
        } else {
            (
                &self.words,
                LogprobRows::of_output(tokens, self.scored.as_ref()),
            )
        };
        if first.is_empty() || part.is_empty(shape) {
            return array(bytes, 0);
        }
        // Hidden states may come of more rows of the prompt.
        let expected = (first.len() - usize::from(of_prompt)) * shape.words();
        let more = if shape.hidden > 0 {
            words.len().saturating_sub(expected)
        } else {
            0
        };
        let words = &words[more..];
        // A message that lacks some would confuse one token with another.
        debug_assert_eq!(words.len(), expected, "{column}");
        array(bytes, first.len());
        let mut tokens = first;
        if of_prompt {
            // Nothing comes before the first one.
            match (part, of_ids) {
                (Part::Own, true) => uint(bytes, first[0].into()),
                _ => nil(bytes),
            }
            tokens = &first[1..];
        }
        for (position, &token) in words.chunks_exact(shape.words()).zip(tokens) {
            match (part, of_ids) {
                (Part::Own, true) => uint(bytes, token.into()),
                (Part::Own, false) => float(bytes, f32::from_bits(position[0])),
                (Part::Top, true) => ids(bytes, &position[1..][..shape.top as usize]),
                (Part::Given, true) => ids(bytes, &self.rows.params().token_ids_logprob),
                (Part::Top, false) => floats(
                    bytes,
                    &position[1 + shape.top as usize..][..shape.top as usize],
                ),
                (Part::Given, false) => floats(
                    bytes,
                    &position[1 + 2 * shape.top as usize..shape.logprob_words()],
                ),
            }
        }
    }
}

/// Which log-probabilities of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Own,
    Top,
    Given,
}

impl Part {
    fn of(kind: &str) -> Self {
        match kind {
            "token" => Self::Own,
            "top" => Self::Top,
            _ => Self::Given,
        }
    }

    const fn is_empty(self, shape: LogprobShape) -> bool {
        match self {
            Self::Own => false,
            Self::Top => shape.top == 0,
            Self::Given => shape.given == 0,
        }
    }
}

fn ids(bytes: &mut Vec<u8>, ids: &[u32]) {
    array(bytes, ids.len());
    for &id in ids {
        uint(bytes, id.into());
    }
}

fn floats(bytes: &mut Vec<u8>, words: &[u32]) {
    array(bytes, words.len());
    for &word in words {
        float(bytes, f32::from_bits(word));
    }
}
