//! What a frame carries beyond the Pie protocol: samplers that are combined, penalties, biases, masks as bits,
//! log-probabilities. `docs/wire-extension.md` has the bytes.
//!
//! What a context asks for in all its steps are its *parameters*. They are sent once, under a handle that later frames name.
//!
//! An extension lies after the archive that it belongs to, as tables of little-endian 32-bit words, and ends the payload
//! with a magic number. The archive itself is the Pie protocol's, byte for byte. No forward archive of Pie ends so: its last
//! 8 bytes are the place and length of its last array, which cannot lie after them, as the magic number would say.

mod answer;
mod params;
mod read;
mod write;

pub use answer::{AnswerExtension, AnswerRows, LogprobRow, Logprobs, PlaceShape, split_answer};
pub use params::{ParamsRow, ParamsRows};
pub use read::{Extension, ExtensionRow, ExtensionRows, Words, split_request};
pub use write::{Params, StepRow, append_extension, extension_len, params_len, write_extension};

use thiserror::Error;

/// The last 8 bytes of a request with an extension.
pub const EXTENSION_MAGIC: [u8; 8] = *b"PIEXTRQ2";
/// The last 8 bytes of an answer with log-probabilities.
pub const ANSWER_MAGIC: [u8; 8] = *b"PIEXTRP1";

/// Bytes of a word.
const WORD: usize = 4;
/// Words of a record of parameters.
const PARAMS: usize = 17;
/// Words of a request's row.
const ROW: usize = 8;
/// Words at the end of a request: records, rows, words of lists, magic number.
const TRAILER: usize = 5;

/// Handles are below it.
pub const MAX_HANDLES: u32 = 1 << 16;
/// Words of the lists of all parameters that a driver keeps, at most: 512 MiB.
pub const MAX_KEPT_WORDS: usize = 1 << 27;
/// In place of a handle: the parameters are of this frame alone, or the row has none.
const NO_HANDLE: u32 = u32::MAX;

/// Parameters with these flags draw by their own [`CombinedSampler`].
const HAS_SAMPLER: u32 = 1;
/// The sampler has a seed.
const HAS_SEED: u32 = 2;
/// Of parameters: log-probabilities are asked for. Of a row: they are wanted of this step.
const HAS_LOGPROBS: u32 = 4;
/// They are those of the distribution that temperature has changed.
const SCALED: u32 = 8;
const PARAMS_FLAGS: u32 = HAS_SAMPLER | HAS_SEED | HAS_LOGPROBS | SCALED;
/// The mask is that of the nearest row before that has one.
const SHARES_MASK: u32 = 16;
/// The row names a record of this frame, not a handle.
const IN_FRAME: u32 = 32;
const ROW_FLAGS: u32 = HAS_LOGPROBS | SHARES_MASK | IN_FRAME;

/// In place of [`PromptLogprobs::from`]: none of the prompt.
const NO_PROMPT: u32 = u32::MAX;

/// Why an extension cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ExtensionError {
    /// The payload is shorter than what its last words announce.
    #[error(
        "the extension announces {rows} records and rows and {words} words, which with their end take {needed} bytes, but the payload has {len}"
    )]
    Length {
        /// Records and rows announced.
        rows: u64,
        /// Words announced.
        words: u32,
        /// Bytes that these take.
        needed: u64,
        /// Bytes of the payload.
        len: usize,
    },
    /// The lists do not take the words that there are.
    #[error("the lists of the extension take {claimed} words, but there are {words}")]
    Words {
        /// Words that records and rows name.
        claimed: u64,
        /// Words that there are.
        words: usize,
    },
    /// A row that is not of a later request than the one before.
    #[error(
        "row {row} of the extension is of request {request}, not of a later one than the row before"
    )]
    Order {
        /// The row.
        row: usize,
        /// Its request.
        request: u32,
    },
    /// A record or row with flags that mean nothing.
    #[error(
        "{table} {row} of the extension has the flags {flags:#x}, of which only {known:#x} mean something"
    )]
    Flags {
        /// `record` or `row`.
        table: &'static str,
        /// Its number.
        row: usize,
        /// Its flags.
        flags: u32,
        /// Those that mean something.
        known: u32,
    },
    /// Parameters that are not there: a handle that no client may give, or a record beyond the frame's.
    #[error(
        "{table} {row} of the extension names parameters {params}; they are below {limit}, or {NO_HANDLE} for none"
    )]
    Params {
        /// `record` or `row`.
        table: &'static str,
        /// Its number.
        row: usize,
        /// What it names.
        params: u32,
        /// How many there may be.
        limit: u32,
    },
    /// A row that shares the mask of one before, but has words of its own, or there is none.
    #[error(
        "row {row} of the extension has the flag {SHARES_MASK} for the mask of a row before it, and {words} words of its own, \
         after {before} rows with a mask: it takes 0 words and at least 1 row"
    )]
    SharedMask {
        /// The row.
        row: usize,
        /// Words of its own mask.
        words: u32,
        /// Rows before it that have a mask of their own.
        before: usize,
    },
    /// A record that names tokens for log-probabilities, but does not want these.
    #[error(
        "record {row} of the extension has {ids} tokens for log-probabilities, but not the flag {HAS_LOGPROBS}, which asks for these"
    )]
    UnaskedIds {
        /// The record.
        row: usize,
        /// Its tokens.
        ids: u32,
    },
}

/// How a token is drawn: all of these together. Numbers out of range are the reader's to refuse.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CombinedSampler {
    /// 0 for the arg-max.
    pub temperature: f32,
    /// Tokens kept; 0 for all.
    pub top_k: u32,
    /// Mass kept, of the whole distribution; 1 for all.
    pub top_p: f32,
    /// Share of the largest probability that a token must have; 0 for none.
    pub min_p: f32,
    /// With the position, and nothing else, it fixes what is drawn.
    pub seed: Option<u64>,
}

/// What makes tokens that were produced before less, or more, likely.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Taken from a token's logit for each time that it occurs.
    pub frequency: f32,
    /// Taken from the logit of a token that occurs.
    pub presence: f32,
    /// Divides the logit of a token that occurs, or multiplies it if it is below 0; 1 for none.
    pub repetition: f32,
    /// KV index of the first token that counts: the length of the prompt.
    pub counted_from: u32,
}

impl Penalties {
    /// They change nothing.
    pub const NONE: Self = Self {
        frequency: 0.0,
        presence: 0.0,
        repetition: 1.0,
        counted_from: 0,
    };

    /// Whether they change something.
    pub fn any(&self) -> bool {
        let none = Self {
            counted_from: self.counted_from,
            ..Self::NONE
        };
        *self != none
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Self::NONE
    }
}

/// Which log-probabilities are wanted of each token that is drawn: its own, and those of others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogprobsAsked {
    /// Of the distribution after the temperature; otherwise before it.
    pub scaled: bool,
    /// The most probable tokens, so many.
    pub top: u32,
    /// Tokens by their ids.
    pub token_ids: Vec<u32>,
    /// Of tokens of the prompt, too.
    pub prompt: Option<PromptLogprobs>,
}

/// Tokens of a prompt whose log-probabilities are wanted, by the KV indices `from..end`. Those of a token come from the row
/// before it, and never from after the temperature. A request answers as many of them as it computes the rows of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptLogprobs {
    /// The first one; below 2^32 - 1.
    pub from: u32,
    /// After the last one.
    pub end: u32,
    /// The token after the request's input, which is not among its tokens, if it is one of them.
    pub next: u32,
}

/// What one request asks for beyond the Pie protocol.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RequestExtension {
    /// In place of the parameters of its samplers of tokens.
    pub sampler: Option<CombinedSampler>,
    /// See there.
    pub penalties: Penalties,
    /// Tokens that count and lie right before the request's input, whose KV comes from a cache: none while each of the
    /// request's inputs follows the one of a frame before.
    pub history: Vec<u32>,
    /// Added to logits: ids and values, each id once.
    pub biases: Vec<(u32, f32)>,
    /// Tokens that must not be drawn for a place before [`suppressed_until`](Self::suppressed_until).
    pub suppressed: Vec<u32>,
    /// KV index of the first place for which they may.
    pub suppressed_until: u32,
    /// Which log-probabilities are wanted.
    pub logprobs: Option<LogprobsAsked>,
    /// Tokens that may be drawn: bit `i` of word `w` allows token `32 w + i`; empty for all.
    pub mask: Vec<u32>,
    /// In place of a mask of its own: that of the nearest row before in the frame that has one.
    pub shares_mask: bool,
}

/// Where a row's parameters are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ParamsRef {
    /// It has none.
    #[default]
    None,
    /// The record of this number in the row's own frame.
    InFrame(u32),
    /// What was kept under this handle last, by the row's own frame or one before.
    Kept(u32),
}

/// The word at this place, which the caller has checked to be there.
fn word(words: &[[u8; WORD]], at: usize) -> u32 {
    u32::from_le_bytes(words[at])
}

fn float(words: &[[u8; WORD]], at: usize) -> f32 {
    f32::from_bits(word(words, at))
}
