//! The extension of a frame beyond the Pie protocol: combined samplers, penalties, logit biases, bit masks, log-probabilities.
//! `docs/wire-extension.md` specifies the bytes.
//!
//! The *parameters* of a context hold for all its steps. They are sent once, under a handle that later frames refer to.
//!
//! An extension lies after the archive that it belongs to, as tables of little-endian 32-bit words, and ends the payload
//! with a magic number. The archive itself is the Pie protocol's, byte for byte. No forward archive of Pie ends so: its last
//! 8 bytes are the offset and length of its last array, which cannot lie after them, as the magic number would say.

mod failures;
mod params;
mod read;
mod response;
mod write;

pub use failures::{FAILURES_MAGIC, Failures, MAX_FAILURE, append_failures, split_failures};
pub use params::{ParamsRow, ParamsRows};
pub use read::{Extension, ExtensionRow, ExtensionRows, WordSlice, split_request};
pub use response::{
    LogprobRow, LogprobRows, LogprobShape, Logprobs, ResponseExtension, split_response,
};
pub use write::{Params, StepRow, append_extension, extension_len, params_len, write_extension};

use thiserror::Error;

/// The last 8 bytes of a request with an extension.
pub const EXTENSION_MAGIC: [u8; 8] = *b"PIEXTRQ4";
/// The last 8 bytes of an answer with log-probabilities.
pub const RESPONSE_EXTENSION_MAGIC: [u8; 8] = *b"PIEXTRP2";

/// Bytes of a word.
const WORD: usize = 4;
/// Words of a record of parameters.
const PARAMS: usize = 19;
/// Words of a request's row.
const ROW: usize = 8;
/// Words at the end of a request: records, rows, words of lists, magic number.
const TRAILER: usize = 5;

/// Exclusive upper bound of handles.
pub const MAX_HANDLES: u32 = 1 << 16;
/// Maximum words of the lists of all parameters that a driver keeps: 512 MiB.
pub const MAX_KEPT_WORDS: usize = 1 << 27;
/// No handle: parameters of this frame only, or a row without parameters.
const NO_HANDLE: u32 = u32::MAX;

/// The parameters have a [`CombinedSampler`].
const HAS_SAMPLER: u32 = 1;
/// The sampler has a seed.
const HAS_SEED: u32 = 2;
/// Of parameters: log-probabilities are requested. Of a row: this step returns them.
const HAS_LOGPROBS: u32 = 4;
/// Log-probabilities after the temperature.
const SCALED: u32 = 8;
const PARAMS_FLAGS: u32 = HAS_SAMPLER | HAS_SEED | HAS_LOGPROBS | SCALED;
/// The mask of the nearest row before that has one.
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
    UnexpectedIds {
        /// The record.
        row: usize,
        /// Its tokens.
        ids: u32,
    },
}

/// Sampling parameters of a token, all applied together. The planner validates their ranges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CombinedSampler {
    /// 0 = greedy.
    pub temperature: f32,
    /// Top-k; 0 = off.
    pub top_k: u32,
    /// Top-p of the full distribution; 1 = off.
    pub top_p: f32,
    /// Min-p; 0 = off.
    pub min_p: f32,
    /// Seed; with the position it determines the sampled token.
    pub seed: Option<u64>,
}

/// Penalties on tokens that were generated before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Subtracted from a token's logit for each occurrence.
    pub frequency: f32,
    /// Subtracted from the logit of a token that occurs.
    pub presence: f32,
    /// Divides the logit of a token that occurs, or multiplies it if it is below 0; 1 for none.
    pub repetition: f32,
    /// KV index of the first token that counts: the length of the prompt.
    pub counted_from: u32,
}

impl Penalties {
    /// No penalties.
    pub const NONE: Self = Self {
        frequency: 0.0,
        presence: 0.0,
        repetition: 1.0,
        counted_from: 0,
    };

    /// Whether there is a penalty.
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

/// Requested log-probabilities at each sampled token: its own, and those of others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogprobOptions {
    /// After the temperature instead of before it.
    pub scaled: bool,
    /// Number of most probable tokens.
    pub top: u32,
    /// Further token ids.
    pub token_ids: Vec<u32>,
    /// Numbers of a row's hidden state, which each position has after its log-probabilities; 0 for none.
    pub hidden: u32,
    /// Prompt log-probabilities.
    pub prompt: Option<PromptLogprobs>,
}

/// Requested prompt log-probabilities, of the tokens with KV indices `from..end`. Those of a token come from the logits row before
/// it, before the temperature. A step returns those whose rows it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptLogprobs {
    /// First token; below 2^32 - 1.
    pub from: u32,
    /// After the last token.
    pub end: u32,
    /// The token after the request's input, if it is in the range.
    pub next: u32,
}

/// The extension of one request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RequestExtension {
    /// Replaces its token samplers.
    pub sampler: Option<CombinedSampler>,
    /// See there.
    pub penalties: Penalties,
    /// Tokens right before the request's input that penalties count and whose KV is cached; empty while inputs follow those of the
    /// frame before.
    pub history: Vec<u32>,
    /// Logit biases: ids and values, each id once.
    pub biases: Vec<(u32, f32)>,
    /// Tokens that may not be sampled before [`suppressed_until`](Self::suppressed_until).
    pub suppressed: Vec<u32>,
    /// KV index from which on they may be sampled.
    pub suppressed_until: u32,
    /// Requested log-probabilities.
    pub logprobs: Option<LogprobOptions>,
    /// A logit processor of the driver's process, which it reads; empty for none. [`history`](Self::history) is then all tokens
    /// before the input.
    pub processor: Vec<u8>,
    /// Allowed tokens: bit `i` of word `w` allows token `32 w + i`; empty = all.
    pub mask: Vec<u32>,
    /// Uses the mask of the nearest row before that has one.
    pub shares_mask: bool,
}

/// Reference to the parameters of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ParamsRef {
    /// No parameters.
    #[default]
    None,
    /// The record with this index in the same frame.
    InFrame(u32),
    /// The parameters last registered under this handle.
    Kept(u32),
}

/// The word at this offset, which the caller has checked to be there.
fn word(words: &[[u8; WORD]], at: usize) -> u32 {
    u32::from_le_bytes(words[at])
}

fn float(words: &[[u8; WORD]], at: usize) -> f32 {
    f32::from_bits(word(words, at))
}
