//! Errors.

use thiserror::Error;

/// An invalid setting, or a wrong call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SchedulerError {
    /// An unknown policy.
    #[error(
        "`{name}` is not a scheduling policy; take fcfs, lpm, dfs-weight, lof, random or routing-key"
    )]
    Policy {
        /// Its name.
        name: String,
    },
    /// A setting or a limit out of range.
    #[error("{name} is {value}, it must be {wanted}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// The valid range.
        wanted: &'static str,
    },
    /// Output without a step in flight.
    #[error("an answer came, but no step is out: answer each step once")]
    NoStep,
    /// Output of another number of rows than the step.
    #[error("the answer has {answered} rows, its step has {rows}: answer the steps in their order")]
    Rows {
        /// Rows of the output.
        answered: usize,
        /// Rows of the step.
        rows: usize,
    },
    /// Output whose offsets are invalid.
    #[error(
        "the answer's ends of {name} do not rise from 0 to their number, or are not one more than its rows"
    )]
    StepOutput {
        /// Which list.
        name: &'static str,
    },
    /// Reference counts and holders of pages disagree: a bug of this crate.
    #[error("the reference counts of pages are inconsistent: {0}")]
    Inconsistent(String),
}

/// Why a request was rejected. Nothing of it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ValidationError {
    /// The id of an unfinished request.
    #[error("request {id} is there already: an id is free again when its last sample has ended")]
    Known {
        /// The id.
        id: u64,
    },
    /// An empty prompt.
    #[error("the prompt is empty: give at least one token")]
    Empty,
    /// A token outside of the vocabulary.
    #[error("token {token} at {at} is not below the vocabulary's {vocab}: check the tokenizer")]
    Token {
        /// The token.
        token: u32,
        /// Its index in the prompt.
        at: usize,
        /// Tokens of the model.
        vocab: u32,
    },
    /// A prompt that is too long.
    #[error("the prompt has {tokens} tokens, {limit} is the most ({reason}): shorten it")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most that could be served.
        limit: u32,
        /// Which limit that is.
        reason: &'static str,
    },
    /// The queue is full.
    #[error("{waiting} sequences wait, {limit} may: try again later, or raise max_queued_requests")]
    QueueFull {
        /// Sequences that wait.
        waiting: usize,
        /// Most that may.
        limit: u32,
    },
    /// An image that does not fit a step.
    #[error(
        "image {index} has {tokens} tokens and {bytes} bytes; a step takes images of {most_tokens} tokens and {most_bytes} \
         bytes: make it smaller, or raise the driver's option max_image_tokens, or max_input_embeds_bytes for `input_embeds`"
    )]
    Image {
        /// Which one.
        index: usize,
        /// Its tokens.
        tokens: u32,
        /// Its bytes.
        bytes: u32,
        /// Most tokens.
        most_tokens: u32,
        /// Most bytes.
        most_bytes: u32,
    },
    /// Images that overlap, or lie outside of the prompt.
    #[error("image {index} is not in the prompt after the one before it, or has no tokens")]
    ImageRange {
        /// Which one.
        index: usize,
    },
    /// Prompt log-probabilities inside of an image.
    #[error(
        "log-probabilities of the prompt are asked for from token {from} on: with images or `input_embeds` they begin after \
         the last of them, at token {first} or later"
    )]
    ImageLogprobs {
        /// From which token on.
        from: u32,
        /// The first that may be.
        first: u32,
    },
    /// A number of samples out of range.
    #[error("{samples} samples are asked for: it must be from 1 to {limit}")]
    Samples {
        /// Samples asked for.
        samples: u32,
        /// Most that may be.
        limit: u32,
    },
    /// Stop strings or expressions without token bytes.
    #[error("stop strings need the bytes of tokens: this scheduler was made without them")]
    StopString,
    /// The log-probabilities of one token exceed an output.
    #[error(
        "the log-probabilities of one token take {words} words, and an answer has room for {limit}: ask for fewer tokens of each"
    )]
    Logprobs {
        /// Words of one token.
        words: u32,
        /// Most words of an output.
        limit: u32,
    },
    /// A row of one token exceeds a frame.
    #[error(
        "a row of the request takes {bytes} bytes of a frame, and a frame has {limit}: name fewer tokens in logit_bias, \
         token_ids_logprob or stop_token_ids"
    )]
    RowBytes {
        /// Bytes of a row with one token.
        bytes: u64,
        /// Most of a frame.
        limit: u32,
    },
    /// `min_tokens` above `max_tokens`.
    #[error(
        "at least {min} tokens and at most {max} are asked for: min_new_tokens must not exceed max_new_tokens"
    )]
    MinTokens {
        /// At least.
        min: u32,
        /// At most.
        max: u32,
    },
}
