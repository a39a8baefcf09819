//! Hidden states, from what the runtime brings to the field of a message.

use pie_engine::{LogprobShape, OutputDelta};
use pie_ingress::Refusal;

use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::schema::{array, float, nil};
use crate::sglang_zmq::value::wrong;

/// The hidden states that a request wants: `SGLang`'s `return_hidden_states`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HiddenStates {
    /// None.
    #[default]
    None,
    /// That of the last row.
    Last,
    /// Those of all rows.
    All,
}

impl HiddenStates {
    /// Reads the field.
    pub(crate) fn of(value: Value<'_>) -> Result<Self, Refusal> {
        match value {
            Value::Nil | Value::Flag(false) => Ok(Self::None),
            Value::Flag(true) => Ok(Self::All),
            Value::Text(b"last") => Ok(Self::Last),
            other => Err(wrong(
                "return_hidden_states",
                other,
                "true, false or \"last\"",
            )),
        }
    }
}

/// Those of an open request so far.
#[derive(Debug, Clone)]
pub(crate) struct OpenHiddenStates {
    shape: LogprobShape,
    wanted: HiddenStates,
    /// Rows of the prompt, of which the first token comes, one after the other.
    prompt: Vec<u32>,
    /// Those of later tokens; of [`HiddenStates::Last`] the last one.
    tokens: Vec<u32>,
    /// Whether the first token came.
    computed: bool,
}

impl OpenHiddenStates {
    pub(crate) const fn new(shape: LogprobShape, wanted: HiddenStates) -> Self {
        Self {
            shape,
            wanted,
            prompt: Vec::new(),
            tokens: Vec::new(),
            computed: false,
        }
    }

    pub(crate) fn take(&mut self, delta: &OutputDelta) {
        let shape = self.shape;
        for state in shape.hidden_states(&delta.prompt_logprobs) {
            self.push(state, true);
        }
        for state in shape.hidden_states(&delta.logprobs) {
            let of_prompt = !self.computed;
            self.computed = true;
            self.push(state, of_prompt);
        }
    }

    fn push(&mut self, state: &[u32], of_prompt: bool) {
        if self.wanted == HiddenStates::Last {
            self.tokens.clear();
            self.tokens.extend_from_slice(state);
        } else if of_prompt {
            self.prompt.extend_from_slice(state);
        } else {
            self.tokens.extend_from_slice(state);
        }
    }

    /// All so far: a list with the rows of the prompt, then those of tokens; or the last one.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        if !self.computed {
            return nil(bytes);
        }
        let size = self.shape.hidden.max(1) as usize;
        if self.wanted == HiddenStates::Last {
            // `SGLang`'s class of the message takes no row without a list around it.
            array(bytes, 1);
            return state(bytes, &self.tokens);
        }
        array(bytes, 1 + self.tokens.len() / size);
        array(bytes, self.prompt.len() / size);
        for row in self
            .prompt
            .chunks_exact(size)
            .chain(self.tokens.chunks_exact(size))
        {
            state(bytes, row);
        }
    }
}

fn state(bytes: &mut Vec<u8>, words: &[u32]) {
    array(bytes, words.len());
    for &word in words {
        float(bytes, f32::from_bits(word));
    }
}
