//! Errors of a whole frame, and of single requests.

use std::fmt;

use thiserror::Error;

use crate::image::error::ImageError;

/// The frame's arrays are inconsistent; the response is status 2.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FrameError {
    /// An offset array has the wrong number of entries.
    #[error("{array} has {found} entries, expected {expected} (one per request and one more)")]
    IndptrLength {
        /// Name of the array.
        array: &'static str,
        /// Entries found.
        found: usize,
        /// Entries expected.
        expected: usize,
    },
    /// An offset array does not start at 0, falls, or does not end at the length of its data.
    #[error("{array} must rise from 0 to {end} (the length of its data); entry {index} is {value}")]
    IndptrOrder {
        /// Name of the array.
        array: &'static str,
        /// Length of the data that it partitions.
        end: usize,
        /// First offending entry.
        index: usize,
        /// Its value.
        value: u32,
    },
    /// A per-request or per-token array has the wrong length.
    #[error("{array} has {found} entries, expected {expected}")]
    Length {
        /// Name of the array.
        array: &'static str,
        /// Entries found.
        found: usize,
        /// Entries expected.
        expected: usize,
    },
    /// The extension has a row for a request that the frame does not have.
    #[error("the extension has a row for request {request}, but the frame has {requests} requests")]
    Extension {
        /// The request.
        request: u32,
        /// Requests of the frame.
        requests: usize,
    },
    /// `sampling_indptr` and `sampler_indptr` differ.
    #[error("sampling_indptr and sampler_indptr differ at entry {index}")]
    SamplerPartition {
        /// First differing entry.
        index: usize,
    },
}

/// One request of a frame is rejected: its ranges in the response are empty, other requests are unaffected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No page is listed for a request with tokens.
    #[error("no KV page listed for {tokens} tokens")]
    NoPages {
        /// Input and draft tokens of the request.
        tokens: u64,
    },
    /// A page id lies outside the pool.
    #[error("page id {page} is outside the pool of {total_pages} pages")]
    PageId {
        /// The id.
        page: u32,
        /// Pages of the pool.
        total_pages: u32,
    },
    /// `kv_last_page_lens` is not in `1..=page_size`.
    #[error("kv_last_page_lens is {length}, must be 1..={page_size}")]
    LastPageLength {
        /// The length.
        length: u32,
        /// Tokens of a page.
        page_size: u32,
    },
    /// The listed pages hold fewer tokens than the request brings.
    #[error("{tokens} tokens do not fit the {capacity} that the listed pages hold")]
    Geometry {
        /// Input and draft tokens of the request.
        tokens: u64,
        /// KV length that the pages and the last page's length give.
        capacity: u64,
    },
    /// The KV sequence is longer than a block-table row.
    #[error("KV length {length} exceeds the limit of {limit} tokens; raise `context_length`")]
    KvLength {
        /// KV length after the pass.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// A token id lies outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab_size}")]
    TokenId {
        /// The id.
        token: u32,
        /// Rows of the embedding table.
        vocab_size: u32,
    },
    /// A position lies outside the model's position table.
    #[error(
        "position {position} is outside the model's limit of {limit}; raise `context_length` if the model allows"
    )]
    Position {
        /// The position.
        position: u32,
        /// The limit.
        limit: u32,
    },
    /// A sampling index points past the request's own rows.
    #[error("sampling index {index} is outside the request's {rows} rows")]
    SamplingIndex {
        /// The index.
        index: u32,
        /// Input tokens of the request.
        rows: u32,
    },
    /// A sampler of tokens or probabilities, drafts, or an extension for an embedding model.
    #[error(
        "the model returns embeddings: requests have the sampler `Embedding`, no drafts and no extension"
    )]
    Embeds,
    /// Samplers or drafts without an input token.
    #[error("samplers or drafts need at least one input token")]
    NoTokens,
    /// The number of mask rows differs from the number of input tokens.
    #[error("{rows} attention mask rows for {tokens} input tokens")]
    MaskRows {
        /// Rows found.
        rows: usize,
        /// Input tokens.
        tokens: usize,
    },
    /// A custom attention mask, for an engine that supports none.
    #[error("the attention mask is not causal, and this model's attention takes no other masks")]
    NonCausalMask,
    /// A mask that lets rows attend to later tokens, of a request that one pass cannot hold.
    #[error(
        "the attention mask lets a row see later tokens, so its {tokens} tokens need one pass, which holds {limit}; raise `chunked_prefill_size`"
    )]
    MaskAhead {
        /// Input and draft tokens of the request.
        tokens: u32,
        /// Tokens of a pass.
        limit: u32,
    },
    /// A mask that lets rows attend to later tokens, of a request whose mask is too large for one pass.
    #[error(
        "the attention mask lets a row see later tokens, so its {tokens} tokens need one pass; with {kv_len} tokens of context their mask has {bytes} bytes, and a pass holds {limit}; send fewer tokens at once, or set `chunked_prefill_size = {chunk}`"
    )]
    MaskWords {
        /// Input and draft tokens of the request.
        tokens: u32,
        /// KV length after them.
        kv_len: usize,
        /// Size of the mask.
        bytes: usize,
        /// Largest size of the masks of a pass.
        limit: usize,
        /// Tokens of a pass that would do.
        chunk: usize,
    },
    /// No slot for the recurrent state of a model that has some.
    #[error("the model has recurrent state, and the request names no slot for it")]
    NoStateSlot,
    /// A slot outside the pool of recurrent state.
    #[error("state slot {slot} is outside the pool of {slots} slots")]
    StateSlot {
        /// The slot.
        slot: u32,
        /// Slots of the pool.
        slots: u32,
    },
    /// Drafts for a model with recurrent state.
    #[error(
        "the model has recurrent state, which cannot be taken back when some of the {drafts} drafts are rejected; send none"
    )]
    StateDrafts {
        /// Drafts of the request.
        drafts: u32,
    },
    /// An invalid parameter in the extension.
    #[error("{parameter} is {value}, it must be {wanted}")]
    Extension {
        /// Its name, as requests have it.
        parameter: &'static str,
        /// Its value.
        value: Box<str>,
        /// What it must be.
        wanted: &'static str,
    },
    /// More logit masks than one.
    #[error("{masks} logit masks, a request may have one")]
    LogitMasks {
        /// Masks of the request.
        masks: usize,
    },
    /// The outputs of the batch do not fit a response, and this request's are among the largest.
    #[error(
        "its outputs of {bytes} bytes do not fit the response of {limit}; ask for fewer in one batch"
    )]
    Oversize {
        /// Bytes of the request's outputs.
        bytes: usize,
        /// Bytes of a response.
        limit: usize,
    },
    /// A row of logits with NaN.
    #[error("the model's logits are NaN; look for overflow in this precision")]
    Logits,
    /// Hidden states of another size than the model's.
    #[error(
        "`return_hidden_states`: states of {requested} numbers are requested, and this model's have {found}; correct `hidden_size` in \
         the model's config.json"
    )]
    HiddenSize {
        /// Numbers of a requested state.
        requested: u32,
        /// Numbers of a state of the model.
        found: u32,
    },
    /// The request's logit processor failed.
    #[error("its custom logit processor failed: {reason}")]
    Processor {
        /// What happened.
        reason: Box<str>,
    },
    /// An invalid adapter id.
    #[error("adapter id {id} names nothing: ids start at 1, and -1 stands for no adapter")]
    AdapterId {
        /// The id.
        id: i64,
    },
    /// An adapter, for an engine without `LoRA`.
    #[error("adapters are off, so {id} cannot be bound; set `enable_lora = true` in the options")]
    AdaptersOff {
        /// Adapter id.
        id: i64,
    },
    /// An adapter that was never loaded.
    #[error("adapter {id} is not loaded; load it before it is bound")]
    UnknownAdapter {
        /// Adapter id.
        id: i64,
    },
    /// A loaded adapter that cannot be fetched any more.
    #[error("adapter {id} is lost: {reason}")]
    AdapterLost {
        /// Adapter id.
        id: i64,
        /// What happened, and what to do.
        reason: Box<str>,
    },
    /// Spans of a modality that the model does not support.
    #[error("{spans} {medium} spans were sent, but this model is served without {medium} input")]
    Media {
        /// What they carry.
        medium: Modality,
        /// Spans of the request.
        spans: usize,
    },
    /// An image that cannot be served.
    #[error("image {number} of the request: {problem}")]
    Image {
        /// Which of the request's images, from 0 on.
        number: usize,
        /// What is wrong with it.
        problem: ImageError,
    },
}

/// The modality of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Modality {
    /// Pixels.
    Image,
    /// Log-mel features.
    Audio,
}

impl fmt::Display for Modality {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Image => "image",
            Self::Audio => "audio",
        })
    }
}

impl RequestError {
    /// Short stable name: the metric label, and the key of the log's rate limit.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NoPages { .. } => "no-pages",
            Self::PageId { .. } => "page-id",
            Self::LastPageLength { .. } => "last-page-length",
            Self::Geometry { .. } => "geometry",
            Self::KvLength { .. } => "kv-length",
            Self::TokenId { .. } => "token-id",
            Self::Position { .. } => "position",
            Self::SamplingIndex { .. } => "sampling-index",
            Self::Embeds => "embeds",
            Self::NoTokens => "no-tokens",
            Self::MaskRows { .. } => "mask-rows",
            Self::NonCausalMask => "non-causal-mask",
            Self::MaskAhead { .. } | Self::MaskWords { .. } => "mask-ahead",
            Self::NoStateSlot | Self::StateSlot { .. } => "state-slot",
            Self::StateDrafts { .. } => "state-drafts",
            Self::Extension { parameter, .. } => parameter,
            Self::LogitMasks { .. } => "logit-masks",
            Self::Oversize { .. } => "oversize",
            Self::Logits => "logits",
            Self::HiddenSize { .. } => "hidden-size",
            Self::Processor { .. } => "custom-logit-processor",
            Self::AdapterId { .. } | Self::AdaptersOff { .. } | Self::UnknownAdapter { .. } => {
                "adapter"
            }
            Self::AdapterLost { .. } => "adapter-lost",
            Self::Media { .. } => "media",
            Self::Image { problem, .. } => problem.kind(),
        }
    }

    /// Whether the response has the text of it, for the request's client.
    #[must_use]
    pub const fn is_for_client(&self) -> bool {
        matches!(self, Self::Processor { .. } | Self::HiddenSize { .. })
    }

    /// Whether the request's KV is still computed and stored: the runtime counts its tokens as stored.
    #[must_use]
    pub const fn keeps_kv(&self) -> bool {
        matches!(
            self,
            Self::Embeds
                | Self::SamplingIndex { .. }
                | Self::LogitMasks { .. }
                | Self::Extension { .. }
                | Self::Oversize { .. }
                | Self::Logits
                | Self::HiddenSize { .. }
                | Self::Processor { .. }
        )
    }
}
