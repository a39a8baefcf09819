//! Messages as the server's front end sends them, and a runtime that computes nothing.
#![allow(dead_code, reason = "each test takes a part of it")]

use std::cell::RefCell;
use std::sync::Arc;

use pie_engine::{
    FinishReason, Grammar, GrammarHandle, GrammarSetupError, NewRequest, OutputDelta, RowParams,
    SubmitError,
};
use pie_frontends::sglang_zmq::{
    Backend, MessageClass, MessageField, SglangFrontend, SglangFrontendSettings,
};
use pie_ingress::{RequestLimits, RequestSpec};
use rmpv::Value;

/// A runtime that keeps what it is given.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) arrivals: RefCell<Vec<NewRequest<RowParams>>>,
    pub(crate) aborted: RefCell<Vec<u64>>,
    pub(crate) bound: RefCell<Vec<(Grammar, Vec<u32>)>>,
    pub(crate) ended_sessions: RefCell<Vec<u64>>,
    pub(crate) weight_versions: RefCell<Vec<u32>>,
}

impl Backend for Kept {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        let mut arrivals = self.arrivals.borrow_mut();
        arrivals.push(spec.into_request().0);
        Ok(arrivals.len() as u64 - 1)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        let mut bound = self.bound.borrow_mut();
        bound.push((grammar.clone(), after.to_vec()));
        Err(GrammarSetupError::NoTokenizer)
    }

    fn abort(&self, request: u64) {
        self.aborted.borrow_mut().push(request);
    }

    fn end_session(&self, session: u64) {
        self.ended_sessions.borrow_mut().push(session);
    }

    fn set_weight_version(&self, version: u32) {
        self.weight_versions.borrow_mut().push(version);
    }
}

pub(crate) const REQUEST: &[&str] = &[
    "rid",
    "http_worker_ipc",
    "input_text",
    "input_ids",
    "mm_inputs",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "stream",
    "lora_id",
    "session_params",
    "routing_key",
    "require_reasoning",
    "priority",
    "extra_key",
    "time_stats",
    "return_hidden_states",
    "return_routed_experts",
    "custom_logit_processor",
    "input_embeds",
];
pub(crate) const PARAMS: &[&str] = &[
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex_strs",
    "min_new_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "stop_strs",
    "custom_params",
    "beam_width",
];
pub(crate) const EMBEDDING: &[&str] = &[
    "rid",
    "http_worker_ipc",
    "input_text",
    "input_ids",
    "mm_inputs",
    "token_type_ids",
    "sampling_params",
    "lora_id",
    "priority",
    "dimensions",
    "return_pooled_hidden_states",
    "time_stats",
];
pub(crate) const EMBEDDING_OUTPUT: &[&str] = &[
    "rids",
    "http_worker_ipcs",
    "finished_reasons",
    "embeddings",
    "prompt_tokens",
    "cached_tokens",
    "placeholder_tokens_idx",
    "placeholder_tokens_val",
    "retraction_counts",
];
pub(crate) const SESSION: &[&str] = &["id", "rid", "offset", "replace", "drop_previous_output"];
pub(crate) const OUTPUT: &[&str] = &[
    "rids",
    "http_worker_ipcs",
    "finished_reasons",
    "decoded_texts",
    "decode_ids",
    "read_offsets",
    "output_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "prompt_tokens",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
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
    "output_token_entropy_val",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "output_hidden_states",
    "routed_experts",
    "indexer_topk",
    "placeholder_tokens_idx",
    "placeholder_tokens_val",
    "retraction_counts",
    "image_tokens",
];

pub(crate) const ABORT: &[&str] = &["rid", "http_worker_ipc", "abort_all"];

pub(crate) fn class(name: &str, fields: &[&str], optional: &[&str]) -> MessageClass {
    let field = |&name: &&str| MessageField {
        name: name.to_owned(),
        default: optional.contains(&name).then(|| vec![0xc0]),
    };
    MessageClass {
        name: name.to_owned(),
        fields: fields.iter().map(field).collect(),
    }
}

pub(crate) fn classes() -> Vec<MessageClass> {
    vec![
        class("TokenizedGenerateReqInput", REQUEST, REQUEST),
        class("SamplingParams", PARAMS, PARAMS),
        class(
            "BatchTokenizedGenerateReqInput",
            &["rids", "http_worker_ipcs", "batch"],
            &[],
        ),
        class("AbortReq", ABORT, ABORT),
        class(
            "BatchTokenIDOutput",
            OUTPUT,
            &["http_worker_ipcs", "retraction_counts", "image_tokens"],
        ),
        class(
            "HealthCheckOutput",
            &["rid", "http_worker_ipc"],
            &["rid", "http_worker_ipc"],
        ),
        class("SessionParams", SESSION, SESSION),
        class("TokenizedEmbeddingReqInput", EMBEDDING, EMBEDDING),
        class(
            "BatchTokenizedEmbeddingReqInput",
            &["rids", "batch"],
            &["rids", "batch"],
        ),
        class(
            "BatchEmbeddingOutput",
            EMBEDDING_OUTPUT,
            &["http_worker_ipcs"],
        ),
    ]
}

pub(crate) fn settings() -> SglangFrontendSettings {
    SglangFrontendSettings {
        eos_tokens: vec![2],
        think_end: Vec::new(),
        stream_interval: 1,
        other_interval: 50,
        max_prompt_tokens: 20,
        context_length: 26,
        truncates: false,
        embeddings: None,
        vocab_size: 1000,
        limits: RequestLimits::default(),
        bos_token: Some(1),
        speculates: false,
        refuses_priority: false,
        original_logprobs: false,
        logit_processors: false,
        hidden_size: 0,
        embed_size: 4,
        probe_prefix: "HEALTH_CHECK".to_owned(),
        dp_rank: None,
        times: None,
        traces: None,
        weight_version: "default".to_owned(),
    }
}

pub(crate) fn front() -> SglangFrontend {
    SglangFrontend::new(&classes(), settings()).unwrap()
}

pub(crate) fn encoded(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

pub(crate) fn message(tag: &str, fields: &[&str], set: &[(&str, Value)]) -> Value {
    let mut values = vec![Value::from(tag)];
    values.extend(fields.iter().map(|name| {
        let found = set.iter().find(|(known, _)| known == name);
        found.map_or(Value::Nil, |(_, value)| value.clone())
    }));
    Value::Array(values)
}

pub(crate) fn ids(tokens: &[i64]) -> Value {
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    Value::Array(vec![Value::from("q"), Value::Binary(bytes)])
}

pub(crate) fn generate(
    rid: &str,
    prompt: &[i64],
    more: &[(&str, Value)],
    params: &[(&str, Value)],
) -> Value {
    let Value::Array(mut params) = message("", PARAMS, params) else {
        unreachable!()
    };
    // It has no tag.
    params.remove(0);
    let mut set = vec![("rid", Value::from(rid)), ("input_ids", ids(prompt))];
    set.push(("sampling_params", Value::Array(params)));
    set.extend_from_slice(more);
    message("TokenizedGenerateReqInput", REQUEST, &set)
}

/// Field of a message for the detokenizer, as it reads it.
pub(crate) fn field(bytes: &[u8], name: &str) -> Vec<Value> {
    let value = rmpv::decode::read_value(&mut &*bytes).unwrap();
    let values = value.as_array().unwrap();
    assert_eq!(values[0].as_str(), Some("BatchTokenIDOutput"));
    assert_eq!(values.len(), OUTPUT.len() + 1);
    let at = OUTPUT.iter().position(|&known| known == name).unwrap();
    values[at + 1].as_array().unwrap().clone()
}

pub(crate) fn delta(request: u64, tokens: &[u32], end: Option<FinishReason>) -> OutputDelta {
    OutputDelta {
        request,
        sample: 0,
        tokens: tokens.to_vec(),
        prompt_logprobs: Vec::new(),
        logprobs: Vec::new(),
        scored: None,
        held_bytes: 0,
        finish: end,
        cached_tokens: 1,
        loaded_tokens: 0,
        admitted: None,
        first_token: None,
        retractions: 0,
        weight_version: None,
        weight_events: Vec::new(),
    }
}
