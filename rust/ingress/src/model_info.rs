//! What requests are validated against.

use crate::embedding::EmbeddingInfo;

/// The properties of a model that requests are validated against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Its pooled rows; `None` for a model that generates.
    pub embeddings: Option<EmbeddingInfo>,
    /// EOS tokens.
    pub eos_token_ids: Vec<u32>,
    /// Most prompt tokens; `None` leaves the check to the scheduler, which knows its pool.
    pub max_prompt_tokens: Option<u32>,
    /// Most tokens of prompt and output; `None` leaves the check to the scheduler.
    pub context_length: Option<u32>,
    /// Whether requests may bring a custom logit processor.
    pub logit_processors: bool,
    /// Numbers of a hidden state; 0 where none are returned.
    pub hidden_size: u32,
    /// Numbers of an embedding of `input_embeds`; 0 where none are taken.
    pub embed_size: u32,
}
