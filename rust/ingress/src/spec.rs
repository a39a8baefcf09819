//! Request validation.

use std::sync::Arc;
use std::time::Duration;

use pie_engine::{
    Grammar, GrammarHandle, GrammarSetupError, LogitProcessor, LogprobParams, LogprobShape,
    MAX_SAMPLES, NewRequest, PromptImages, RowParams, Sampler, SamplingParams, StopCriteria,
    StopRegexes, StopStrings, ValidationError,
};

use crate::embedding::{EmbeddingInfo, PooledRow};
use crate::limits::RequestLimits;
use crate::logprobs::LogprobRows;
use crate::model_info::ModelInfo;
use crate::outcome::{StopTexts, shown};
use crate::raw::{RawLogprobs, RawRequest};
use crate::refusal::{Refusal, within};

/// Lower temperatures are greedy, as in `SGLang`.
const GREEDY_BELOW: f32 = 1e-6;
/// `SGLang`'s `top_k` for no limit.
const ALL_TOKENS: i64 = 1 << 30;
/// Largest `max_new_tokens`: output positions have 32 bits.
const MOST_TOKENS: u32 = u32::MAX >> 1;

/// Validates requests for one model.
#[derive(Clone, Debug)]
pub struct Ingress {
    limits: RequestLimits,
    model: ModelInfo,
}

/// A validated request, made by [`Ingress::validate`] only.
#[derive(Debug)]
pub struct RequestSpec {
    request: NewRequest<RowParams>,
    deadline: Option<Duration>,
    logprobs: Option<LogprobRows>,
    hidden: Option<LogprobShape>,
    stops: StopTexts,
    embedding: Option<PooledRow>,
}

impl RequestSpec {
    /// Prompt tokens.
    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// Number of sequences.
    pub const fn samples(&self) -> u32 {
        self.request.samples
    }

    /// The requested log-probabilities.
    pub const fn logprobs(&self) -> Option<&LogprobRows> {
        self.logprobs.as_ref()
    }

    /// What each position has, if hidden states are requested.
    pub const fn hidden(&self) -> Option<LogprobShape> {
        self.hidden
    }

    /// The stop strings and expressions, for finish reasons.
    pub const fn stops(&self) -> &StopTexts {
        &self.stops
    }

    /// What becomes of its pooled row, if it asks for an embedding.
    pub const fn embedding(&self) -> Option<PooledRow> {
        self.embedding
    }

    /// The request for the service, and its time limit.
    pub fn into_request(self) -> (NewRequest<RowParams>, Option<Duration>) {
        (self.request, self.deadline)
    }
}

impl Ingress {
    /// A validator for a model with these limits.
    pub const fn new(limits: RequestLimits, model: ModelInfo) -> Self {
        Self { limits, model }
    }

    /// The request limits.
    pub const fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// The model.
    pub const fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// Validates a token id, which must be in the vocabulary.
    fn token(&self, field: &'static str, token: i64) -> Result<u32, Refusal> {
        let vocab = self.model.vocab_size;
        let known = u32::try_from(token).ok().filter(|&token| token < vocab);
        known.ok_or_else(|| self.no_token(field, &token))
    }

    /// Validates a token id that need not be in the vocabulary.
    ///
    /// # Errors
    /// [`Refusal::Token`] for a number that is no token of any model.
    pub fn token_id(&self, field: &'static str, token: i64) -> Result<u32, Refusal> {
        u32::try_from(token).map_err(|_| self.no_token(field, &token))
    }

    /// Parses a token id, as in `OpenAI`'s `logit_bias`.
    ///
    /// # Errors
    /// [`Refusal::Token`] for what is no number.
    pub fn token_of_text(&self, field: &'static str, text: &str) -> Result<i64, Refusal> {
        let token = text.parse();
        token.map_err(|_| self.no_token(field, &format_args!("\"{}\"", shown(text))))
    }

    /// A prompt of embeddings: float32 `[tokens, embed_size]`, row by row.
    ///
    /// # Errors
    /// [`Refusal`]: the model takes none, or they are too many, of another size, or not finite.
    pub fn input_embeds(&self, embeds: &[f32]) -> Result<PromptImages, Refusal> {
        self.check_input_embeds(embeds.len() as u64)?;
        PromptImages::of_embeds(embeds, self.model.embed_size)
            .map_err(|error| Refusal::Other(error.to_string()))
    }

    /// Checks that a prompt may have so many numbers in its embeddings. Adapters call it before they collect them.
    ///
    /// # Errors
    /// [`Refusal`]: the model takes none, or they are too many.
    pub fn check_input_embeds(&self, numbers: u64) -> Result<(), Refusal> {
        if self.model.embed_size == 0 {
            return Err(Refusal::Other(
                "`input_embeds` are not taken by this model and driver: send a text or token ids"
                    .to_owned(),
            ));
        }
        let bytes = numbers.saturating_mul(size_of::<f32>() as u64);
        self.limits
            .check("input_embeds", "input_embeds_bytes", bytes)
    }

    fn no_token(&self, field: &'static str, token: &dyn std::fmt::Display) -> Refusal {
        Refusal::Token {
            field,
            token: token.to_string(),
            vocab: self.model.vocab_size,
        }
    }

    /// Validates a request. `bind` starts the compilation of its grammar, if all else is valid.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn validate(
        &self,
        raw: RawRequest,
        bind: impl FnOnce(&Grammar, &[u32]) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError>,
    ) -> Result<RequestSpec, Refusal> {
        self.check_names(&raw)?;
        self.check_prompt(&raw.prompt, raw.images.as_ref())?;
        match (self.model.embeddings, raw.embedding) {
            (None, None) => {}
            (Some(info), Some(_)) => return Self::validate_embedding(info, raw),
            (Some(_), None) => return Err(Refusal::Embeds),
            (None, Some(_)) => return Err(Refusal::Generates),
        }
        let samples = self.samples(raw.n)?;
        let priority = within("priority", raw.priority, i32::MIN, i32::MAX)?;
        let (min_tokens, max_tokens) = self.tokens(&raw)?;
        let processor = self.processor(&raw)?;
        let hidden_size = self.hidden_size(&raw, samples, max_tokens)?;
        let stop_strings = self.stop_strings(raw.stop)?;
        let stop_regexes = self.stop_regexes(&raw.stop_regex)?;
        let stop_tokens = self.stop_tokens(&raw.stop_token_ids, raw.ignore_eos)?;
        let sampling = self.sampling(raw.sampling, raw.logit_bias)?;
        let row_params = sampling.row_params()?;
        // Of the prompt before image tokens get their placeholders.
        let wanted = raw.logprobs.as_ref();
        let wanted = wanted.map(|wanted| self.logprobs(wanted, raw.prompt.len()));
        let mut wanted = wanted.transpose()?;
        if let Some(params) = &mut wanted {
            params.hidden = hidden_size;
        }
        let positions = wanted.clone().or_else(|| {
            (hidden_size > 0).then(|| LogprobParams {
                hidden: hidden_size,
                ..LogprobParams::default()
            })
        });
        let hidden = positions.as_ref().filter(|_| hidden_size > 0);
        let hidden = hidden.map(LogprobParams::shape);
        let logprobs = wanted.map(|wanted| LogprobRows::new(wanted, &raw.prompt));
        let grammar = match &raw.grammar {
            Some(grammar) => Some(self.grammar(grammar, &raw.grammar_after, bind)?),
            None => None,
        };
        let stops = StopTexts::new(stop_strings.clone(), stop_regexes.clone());
        let mut request = NewRequest {
            stop: StopCriteria {
                max_tokens,
                min_tokens,
                stop_tokens,
                stop_strings,
                stop_regexes,
            },
            samples,
            namespace: raw.extra_key.map(String::into_boxed_str),
            adapter: raw.adapter,
            priority,
            routing_key: raw.routing_key.map(String::into_boxed_str),
            session: raw.session,
            drafts: raw.speculates,
            grammar,
            streams: raw.streams,
            ..NewRequest::new(0, raw.prompt, row_params, max_tokens)
        };
        if let Some(positions) = positions {
            positions.apply(&mut request);
        }
        if let Some(images) = raw.images {
            RowParams::attach(images, &mut request);
        }
        if let Some(processor) = processor {
            processor.apply(self.model.vocab_size, &mut request);
        }
        Ok(RequestSpec {
            request,
            deadline: raw.deadline,
            logprobs,
            hidden,
            stops,
            embedding: None,
        })
    }

    /// A request that ends with its pooled row.
    fn validate_embedding(info: EmbeddingInfo, raw: RawRequest) -> Result<RequestSpec, Refusal> {
        let row = info.row(raw.embedding.unwrap_or_default())?;
        let sampling = RowParams::from(Sampler::Embedding);
        let mut request = NewRequest {
            namespace: raw.extra_key.map(String::into_boxed_str),
            adapter: raw.adapter,
            priority: within("priority", raw.priority, i32::MIN, i32::MAX)?,
            routing_key: raw.routing_key.map(String::into_boxed_str),
            streams: false,
            ..NewRequest::new(0, raw.prompt, sampling, 0)
        };
        RowParams::embed(info.size, &mut request);
        Ok(RequestSpec {
            request,
            deadline: raw.deadline,
            logprobs: None,
            hidden: None,
            stops: StopTexts::default(),
            embedding: Some(row),
        })
    }

    /// Numbers of a hidden state, if these are requested; 0 if not.
    fn hidden_size(&self, raw: &RawRequest, samples: u32, max_tokens: u32) -> Result<u32, Refusal> {
        if !raw.hidden_states {
            return Ok(0);
        }
        let size = self.model.hidden_size;
        if size == 0 {
            return Err(Refusal::Other(
                "`return_hidden_states` is off: start with `--enable-return-hidden-states` to have them returned, or remove it"
                    .to_owned(),
            ));
        }
        // The last token has none.
        let states = raw.prompt.len() as u64 + u64::from(max_tokens.saturating_sub(1));
        let bytes = states.saturating_mul(4 * u64::from(size) * u64::from(samples));
        self.limits
            .check("return_hidden_states", "hidden_state_bytes", bytes)?;
        Ok(size)
    }

    /// The custom logit processor, if requests may have one.
    fn processor(&self, raw: &RawRequest) -> Result<Option<LogitProcessor>, Refusal> {
        let (text, params) = (raw.logit_processor.as_deref(), raw.custom_params.as_deref());
        let Some(text) = text else {
            if params.is_none_or(|params| params == "{}") {
                return Ok(None);
            }
            return Err(Refusal::Other(
                "`custom_params` is for a custom logit processor, and there is none: send `custom_logit_processor` as well, or \
                 remove it"
                    .to_owned(),
            ));
        };
        if !self.model.logit_processors {
            return Err(Refusal::Other(
                "`custom_logit_processor` is off: start with `--enable-custom-logit-processor` to let requests bring one, or \
                 remove it"
                    .to_owned(),
            ));
        }
        for (name, text) in [
            ("custom_logit_processor", Some(text)),
            ("custom_params", params),
        ] {
            let bytes = text.map_or(0, str::len) as u64;
            self.limits.check(name, "logit_processor_bytes", bytes)?;
        }
        let processor = LogitProcessor::new(text, params, self.model.vocab_size);
        processor.map(Some).map_err(Refusal::Other)
    }

    fn grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
        bind: impl FnOnce(&Grammar, &[u32]) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError>,
    ) -> Result<Arc<dyn GrammarHandle>, Refusal> {
        let kind = grammar.kind();
        let bytes = grammar.bytes() as u64;
        self.limits.check(kind, "grammar_bytes", bytes)?;
        bind(grammar, after).map_err(|error| Refusal::Grammar { kind, error })
    }

    fn check_names(&self, raw: &RawRequest) -> Result<(), Refusal> {
        self.check_name("rid", &raw.name)?;
        self.check_name(
            "routing_key",
            raw.routing_key.as_deref().unwrap_or_default(),
        )?;
        self.check_name("extra_key", raw.extra_key.as_deref().unwrap_or_default())
    }

    /// Checks the length of a name.
    ///
    /// # Errors
    /// [`Refusal::Limit`].
    pub fn check_name(&self, field: &'static str, name: &str) -> Result<(), Refusal> {
        self.limits.check(field, "name_bytes", name.len() as u64)
    }

    fn check_prompt(&self, prompt: &[u32], images: Option<&PromptImages>) -> Result<(), Refusal> {
        let (tokens, vocab) = (prompt.len(), self.model.vocab_size);
        if prompt.is_empty() {
            return Err(ValidationError::Empty.into());
        }
        let longest = self.model.max_prompt_tokens.unwrap_or(u32::MAX);
        if tokens > longest as usize {
            return Err(ValidationError::TooLong {
                tokens,
                limit: longest,
                reason: "the context length, or the KV cache",
            }
            .into());
        }
        if let Some(images) = images {
            if images.are_embeds() {
                // Their bytes were checked before they were hashed.
                return Ok(());
            }
            self.limits.check("images", "images", images.len() as u64)?;
            return self.limits.check("images", "image_bytes", images.bytes());
        }
        match prompt.iter().find(|&&token| token >= vocab) {
            None => Ok(()),
            Some(&token) => Err(self.no_token("input_ids", &token)),
        }
    }

    fn samples(&self, n: i64) -> Result<u32, Refusal> {
        let n = within("n", Some(n), 1, i64::from(MAX_SAMPLES))?;
        let n: u32 = n.unwrap_or(1);
        self.limits.check("n", "n", n.into())?;
        Ok(n)
    }

    /// `min_new_tokens` and `max_new_tokens`, cut to the context length.
    fn tokens(&self, raw: &RawRequest) -> Result<(u32, u32), Refusal> {
        let many = i64::from(MOST_TOKENS);
        let count = |field, value: i64| {
            let count = within(field, Some(value.min(many)), 0, many);
            count.map(|count: Option<u32>| count.unwrap_or(0))
        };
        let max = count("max_new_tokens", raw.max_new_tokens.unwrap_or(many))?;
        let min = count("min_new_tokens", raw.min_new_tokens)?;
        if min > max {
            return Err(ValidationError::MinTokens { min, max }.into());
        }
        let remaining = self.model.context_length.map_or(MOST_TOKENS, |length| {
            length.saturating_sub(raw.prompt.len() as u32)
        });
        Ok((min.min(remaining), max.min(remaining)))
    }

    fn stop_strings(&self, stop: Vec<String>) -> Result<StopStrings, Refusal> {
        let sizes = || stop.iter().map(|text| text.len() as u64);
        self.limits
            .check("stop", "stop_strings", stop.len() as u64)?;
        self.limits
            .check("stop", "stop_string_bytes", sizes().max().unwrap_or(0))?;
        self.limits
            .check("stop", "stop_total_bytes", sizes().sum())?;
        // Empty ones are ignored.
        let texts = stop.into_iter().filter(|text| !text.is_empty());
        Ok(StopStrings::new(texts.map(String::into_bytes))?)
    }

    fn stop_regexes(&self, patterns: &[String]) -> Result<Option<Arc<StopRegexes>>, Refusal> {
        let bytes = patterns.iter().map(|pattern| pattern.len() as u64).sum();
        self.limits
            .check("stop_regex", "stop_regexes", patterns.len() as u64)?;
        self.limits.check("stop_regex", "stop_regex_bytes", bytes)?;
        // Empty ones are ignored.
        let patterns: Vec<&String> = patterns.iter().filter(|text| !text.is_empty()).collect();
        if patterns.is_empty() {
            return Ok(None);
        }
        Ok(Some(Arc::new(StopRegexes::new(&patterns)?)))
    }

    /// Stop tokens in the vocabulary: others are never sampled.
    fn stop_tokens(&self, tokens: &[i64], ignore_eos: bool) -> Result<Vec<u32>, Refusal> {
        self.limits
            .check("stop_token_ids", "stop_token_ids", tokens.len() as u64)?;
        let mut stops = Vec::with_capacity(tokens.len() + self.model.eos_token_ids.len());
        for &token in tokens {
            stops.push(self.token_id("stop_token_ids", token)?);
        }
        if !ignore_eos {
            stops.extend_from_slice(&self.model.eos_token_ids);
        }
        stops.retain(|&token| token < self.model.vocab_size);
        Ok(stops)
    }

    fn sampling(
        &self,
        mut sampling: SamplingParams,
        logit_bias: Vec<(i64, f32)>,
    ) -> Result<SamplingParams, Refusal> {
        let entries = logit_bias.len() as u64;
        self.limits.check("logit_bias", "logit_bias", entries)?;
        let bias = |(token, bias)| Ok((self.token("logit_bias", token)?, bias));
        let biases = logit_bias.into_iter().map(bias);
        let mut biases = biases.collect::<Result<Vec<_>, Refusal>>()?;
        biases.sort_by_key(|&(token, _)| token);
        if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let token = pair[0].0;
            return Err(Refusal::Other(format!(
                "`logit_bias` has token {token} twice: send each token once"
            )));
        }
        sampling.logit_bias = biases;
        if (0.0..GREEDY_BELOW).contains(&sampling.temperature) {
            sampling.temperature = 0.0;
        }
        if sampling.top_k >= ALL_TOKENS {
            sampling.top_k = -1;
        }
        Ok(sampling)
    }

    fn logprobs(&self, wanted: &RawLogprobs, prompt: usize) -> Result<LogprobParams, Refusal> {
        let (tokens, top) = (&wanted.token_ids_logprob, wanted.top_logprobs_num);
        self.limits.check(
            "token_ids_logprob",
            "token_ids_logprob",
            tokens.len() as u64,
        )?;
        let start = wanted.logprob_start_len;
        let start = within("logprob_start_len", Some(start), -1, prompt as i64)?;
        let start: i64 = start.unwrap_or(-1);
        let top = within(
            "top_logprobs_num",
            Some(top),
            0,
            i64::from(self.model.vocab_size),
        )?;
        let top: u32 = top.unwrap_or(0);
        self.limits
            .check("top_logprobs_num", "top_logprobs_num", top.into())?;
        let tokens = tokens
            .iter()
            .map(|&token| self.token("token_ids_logprob", token));
        Ok(LogprobParams {
            top_logprobs_num: top,
            token_ids_logprob: tokens.collect::<Result<_, _>>()?,
            logprob_start_len: u32::try_from(start).ok(),
            hidden: 0,
            original: wanted.original,
        })
    }
}
