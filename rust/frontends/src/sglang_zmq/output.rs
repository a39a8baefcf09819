//! `BatchTokenIDOutput` and `BatchEmbeddingOutput`: what is new of all requests that are due, as one message each.

use crate::sglang_zmq::error::SglangFrontendError;
use crate::sglang_zmq::logprobs::COLUMNS;
use crate::sglang_zmq::open_request::OpenRequest;
use crate::sglang_zmq::schema::{
    MessageClass, Template, array, binary, boolean, find, float, map, nil, optional_text, text,
    tokens, uint,
};
use crate::sglang_zmq::times::TimeStats;
use crate::sglang_zmq::weight_versions::write_spans;

/// Why a request ended, in `SGLang`'s words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SglangFinish {
    /// It has as many tokens.
    Length(u32),
    /// This token ended it.
    StopToken(u32),
    /// This text ended it.
    StopText(String),
    /// It was ended; with an HTTP status where it failed.
    Abort(String, Option<u16>),
}

/// A request in a message.
#[derive(Debug)]
pub(crate) struct OutputEntry<'a> {
    pub(crate) open: &'a OpenRequest,
    pub(crate) finish: Option<SglangFinish>,
}

/// Writes the messages.
#[derive(Debug, Clone)]
pub(crate) struct OutputEncoder {
    template: Template,
    embeddings: Template,
    dp_rank: Option<u32>,
    /// With drafts the front end wants lists in their fields.
    speculates: bool,
    /// Writes the times of requests, where the front end makes metrics of them.
    times: Option<TimeStats>,
}

/// Fields that the front end cannot do without.
const LISTS: [&str; 15] = [
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
    "retraction_counts",
];
/// Fields without a default that are nothing, for they say what is not served. A class need not have them.
const NOTHING: [&str; 7] = [
    "output_token_entropy_val",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "routed_experts",
    "indexer_topk",
    "placeholder_tokens_idx",
    "placeholder_tokens_val",
];
/// Those of a message of embeddings.
const EMBEDDING_LISTS: [&str; 9] = [
    "rids",
    "http_worker_ipcs",
    "finished_reasons",
    "embeddings",
    "prompt_tokens",
    "cached_tokens",
    "retraction_counts",
    "placeholder_tokens_idx",
    "placeholder_tokens_val",
];
/// Fields that must be lists where drafts are on. Which drafts of a request came true is not counted per request.
const SPECULATION: [&str; 6] = [
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_block_accept_tokens",
    "spec_num_cap_tokens",
    "spec_correct_drafts_histogram",
    "spec_cap_lens_histogram",
];

/// The field of hidden states.
const HIDDEN_STATES: &str = "output_hidden_states";

impl OutputEncoder {
    pub(crate) fn new(
        classes: &[MessageClass],
        dp_rank: Option<u32>,
        speculates: bool,
        times: Option<TimeStats>,
    ) -> Result<Self, SglangFrontendError> {
        let (name, class) = ("BatchTokenIDOutput", find(classes, "BatchTokenIDOutput")?);
        let nothing = NOTHING
            .iter()
            .filter(|&&field| class.index_of(name, field).is_ok());
        let set: Vec<&'static str> = LISTS
            .iter()
            .chain(&COLUMNS)
            .chain(nothing)
            .chain(&[HIDDEN_STATES])
            .copied()
            .collect();
        Ok(Self {
            template: Template::new(classes, name, &set)?,
            embeddings: Template::new(classes, "BatchEmbeddingOutput", &EMBEDDING_LISTS)?,
            dp_rank,
            speculates,
            times,
        })
    }

    /// One message for all entries of a class.
    pub(crate) fn encode(&self, entries: Vec<OutputEntry<'_>>) -> Vec<Vec<u8>> {
        let embeds = |entry: &OutputEntry<'_>| entry.open.embedding.is_some();
        let (embeddings, others): (Vec<_>, Vec<_>) = entries.into_iter().partition(embeds);
        let messages = [(&self.template, others), (&self.embeddings, embeddings)];
        let messages = messages.iter().filter(|(_, entries)| !entries.is_empty());
        messages
            .map(|(template, entries)| {
                template.encode(|field, bytes| self.write(field, entries, bytes))
            })
            .collect()
    }

    /// Writes the value of a field; false for one that keeps its default.
    fn write(&self, field: &str, entries: &[OutputEntry<'_>], bytes: &mut Vec<u8>) -> bool {
        if let Some(write) = entry_value(field) {
            list(bytes, entries, write);
            return true;
        }
        match field {
            "dp_ranks" => list(bytes, entries, |_, bytes| match self.dp_rank {
                Some(rank) => uint(bytes, rank.into()),
                None => nil(bytes),
            }),
            "image_tokens" if entries.iter().any(|entry| entry.open.image_tokens > 0) => {
                list(bytes, entries, |entry, bytes| {
                    uint(bytes, entry.open.image_tokens.into());
                });
            }
            "weight_versions" if entries.iter().any(|entry| entry.finish.is_some()) => {
                list(bytes, entries, |entry, bytes| match entry.finish {
                    Some(_) => write_spans(bytes, &entry.open.weight_versions),
                    None => nil(bytes),
                });
            }
            "time_stats" => match &self.times {
                Some(times) => {
                    array(bytes, 2);
                    text(bytes, "PickleWrapper");
                    binary(bytes, &times.encode(entries.iter().map(|entry| entry.open)));
                }
                None => return false,
            },
            field if self.speculates && SPECULATION.contains(&field) => {
                let histogram = field.ends_with("histogram");
                list(bytes, entries, |_, bytes| {
                    if histogram {
                        array(bytes, 0);
                    } else {
                        uint(bytes, 0);
                    }
                });
            }
            field if COLUMNS.contains(&field) => write_logprobs(field, entries, bytes),
            HIDDEN_STATES => write_hidden_states(entries, bytes),
            field if NOTHING.contains(&field) => nil(bytes),
            _ => return false,
        }
        true
    }
}

/// A list with a value of each entry.
fn list(
    bytes: &mut Vec<u8>,
    entries: &[OutputEntry<'_>],
    write: impl Fn(&OutputEntry<'_>, &mut Vec<u8>),
) {
    array(bytes, entries.len());
    for entry in entries {
        write(entry, bytes);
    }
}

/// How the value of an entry is written in a field that depends on nothing but its request; `None` for other fields.
fn entry_value(field: &str) -> Option<fn(&OutputEntry<'_>, &mut Vec<u8>)> {
    Some(match field {
        "rids" => |entry, bytes| text(bytes, &entry.open.rid),
        "http_worker_ipcs" => |entry, bytes| optional_text(bytes, entry.open.worker.as_deref()),
        "finished_reasons" => |entry, bytes| finish(bytes, entry.finish.as_ref()),
        "embeddings" => |entry, bytes| {
            let embedding = entry.open.embedding.as_ref();
            floats(bytes, embedding.map_or(&[], |embedding| &embedding.values));
        },
        "decoded_texts" => |_, bytes| text(bytes, ""),
        "decode_ids" => |entry, bytes| {
            let open = entry.open;
            let all: Vec<u32> = [&open.window[..], &open.pending[..]].concat();
            tokens(bytes, all.iter());
        },
        "read_offsets" => |entry, bytes| uint(bytes, entry.open.surrounding.into()),
        "output_ids" => |entry, bytes| tokens(bytes, entry.open.pending.iter()),
        "skip_special_tokens" => |entry, bytes| boolean(bytes, entry.open.text.skip_special_tokens),
        "spaces_between_special_tokens" => {
            |entry, bytes| boolean(bytes, entry.open.text.spaces_between_special_tokens)
        }
        "no_stop_trim" => |entry, bytes| boolean(bytes, entry.open.text.no_stop_trim),
        "prompt_tokens" => |entry, bytes| uint(bytes, entry.open.prompt_tokens.into()),
        "reasoning_tokens" => |entry, bytes| uint(bytes, entry.open.reasoning_tokens().into()),
        "completion_tokens" => |entry, bytes| uint(bytes, entry.open.tokens.into()),
        "cached_tokens" => |entry, bytes| uint(bytes, entry.open.cached_tokens.into()),
        "retraction_counts" => |entry, bytes| uint(bytes, entry.open.retractions.into()),
        "cached_tokens_details" => |entry, bytes| {
            // For the first and the last answer: the others would say the same.
            let told = entry.finish.is_none() && entry.open.window.is_empty();
            if told {
                nil(bytes);
            } else {
                tiers(bytes, entry.open);
            }
        },
        _ => return None,
    })
}

/// Writes a column of log-probabilities, which is nothing where no request wants them.
fn write_logprobs(field: &str, entries: &[OutputEntry<'_>], bytes: &mut Vec<u8>) {
    if entries.iter().all(|entry| entry.open.logprobs.is_none()) {
        return nil(bytes);
    }
    list(bytes, entries, |entry, bytes| match &entry.open.logprobs {
        Some(logprobs) => logprobs.write(field, &entry.open.pending, bytes),
        None => array(bytes, 0),
    });
}

/// Writes the hidden states, which are nothing where no request wants them.
fn write_hidden_states(entries: &[OutputEntry<'_>], bytes: &mut Vec<u8>) {
    if entries
        .iter()
        .all(|entry| entry.open.hidden_states.is_none())
    {
        return nil(bytes);
    }
    list(bytes, entries, |entry, bytes| {
        match &entry.open.hidden_states {
            Some(states) => states.write(bytes),
            None => nil(bytes),
        }
    });
}

/// Writes the ends of requests that were given up while they waited: to the tokenizer manager, because the detokenizer never knew
/// them. It takes these for late where it has forgotten the request, and outputs for an error.
#[derive(Debug, Clone)]
pub(crate) struct AbortEncoder(Template);

impl AbortEncoder {
    pub(crate) fn new(classes: &[MessageClass]) -> Result<Self, SglangFrontendError> {
        Template::new(classes, "AbortReq", &["rid", "http_worker_ipc"]).map(Self)
    }

    pub(crate) fn encode(&self, open: &OpenRequest) -> Vec<u8> {
        self.0.encode(|field, bytes| {
            match field {
                "rid" => text(bytes, &open.rid),
                "http_worker_ipc" => optional_text(bytes, open.worker.as_deref()),
                "weight_versions" => write_spans(bytes, &open.weight_versions),
                _ => return false,
            }
            true
        })
    }
}

fn finish(bytes: &mut Vec<u8>, finish: Option<&SglangFinish>) {
    match finish {
        None => nil(bytes),
        Some(SglangFinish::Length(length)) => {
            map(bytes, 2);
            entry(bytes, "type", "length");
            text(bytes, "length");
            uint(bytes, (*length).into());
        }
        Some(SglangFinish::StopToken(token)) => {
            map(bytes, 2);
            entry(bytes, "type", "stop");
            text(bytes, "matched");
            uint(bytes, (*token).into());
        }
        Some(SglangFinish::StopText(matched)) => {
            map(bytes, 2);
            entry(bytes, "type", "stop");
            entry(bytes, "matched", matched);
        }
        Some(SglangFinish::Abort(message, status)) => {
            map(bytes, 4);
            entry(bytes, "type", "abort");
            entry(bytes, "message", message);
            text(bytes, "status_code");
            match status {
                Some(status) => uint(bytes, (*status).into()),
                None => nil(bytes),
            }
            text(bytes, "err_type");
            optional_text(bytes, status.map(error_type));
        }
    }
}

/// Where the cached tokens of a prompt were; nothing where there were none.
fn tiers(bytes: &mut Vec<u8>, open: &OpenRequest) {
    if open.cached_tokens == 0 {
        return nil(bytes);
    }
    map(bytes, 2);
    for (tier, tokens) in [
        (
            "device",
            open.cached_tokens.saturating_sub(open.loaded_tokens),
        ),
        ("host", open.loaded_tokens),
    ] {
        text(bytes, tier);
        uint(bytes, tokens.into());
    }
}

fn floats(bytes: &mut Vec<u8>, values: &[f32]) {
    array(bytes, values.len());
    for &value in values {
        float(bytes, value);
    }
}

fn entry(bytes: &mut Vec<u8>, key: &str, value: &str) {
    text(bytes, key);
    text(bytes, value);
}

const fn error_type(status: u16) -> &'static str {
    match status {
        400 => "BadRequestError",
        503 => "ServiceUnavailable",
        _ => "InternalServerError",
    }
}
