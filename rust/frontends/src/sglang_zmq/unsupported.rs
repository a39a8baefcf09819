//! What a request may ask for and this scheduler does not serve, each with the reason. A row goes when it is served.

use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::schema::Fields;
use crate::sglang_zmq::value::number;

/// Fields of `TokenizedGenerateReqInput`, and why another value than the neutral one is refused.
pub(crate) const REQUEST: &[(&str, &str)] = &[
    ("return_sampling_mask", "the driver does not return it"),
    ("return_routed_experts", "the driver does not return them"),
    ("return_indexer_topk", "the driver does not return it"),
    (
        "positional_embed_overrides",
        "the driver computes embeddings itself",
    ),
    ("bootstrap_host", "prefill and decode run in one driver"),
    (
        "multi_item_delimiter_indices",
        "scoring of several items in one prompt is not served",
    ),
    (
        "token_indices_to_pool",
        "readout at chosen positions is not served",
    ),
];

/// Fields of `SamplingParams`.
pub(crate) const PARAMS: &[(&str, &str)] = &[
    ("beam_width", "there is no beam search"),
    // SGLang sets it for parsers of tools whose grammar includes the thinking.
    ("ebnf_full_assistant", "grammars begin after the thinking"),
];

/// Fields of `TokenizedEmbeddingReqInput`. Models with causal attention do not look at `token_type_ids`.
pub(crate) const EMBEDDING: &[(&str, &str)] = &[
    (
        "positional_embed_overrides",
        "the driver computes embeddings itself",
    ),
    (
        "return_pooled_hidden_states",
        "hidden states stay in the driver",
    ),
    (
        "multi_item_delimiter_indices",
        "scoring of several items in one prompt is not served",
    ),
    (
        "token_indices_to_pool",
        "readout at chosen positions is not served",
    ),
    ("decision_layout", "joint schema heads are not served"),
];

/// Fields of one class that must be neutral, by index. Those that the installed class does not have cannot be asked for.
#[derive(Debug, Clone)]
pub(crate) struct Refusals(Vec<(usize, &'static str, &'static str)>);

impl Refusals {
    pub(crate) fn new(
        rows: &[(&'static str, &'static str)],
        index: impl Fn(&str) -> Option<usize>,
    ) -> Self {
        let known = |&(name, why): &(&'static str, &'static str)| {
            index(name).map(|index| (index, name, why))
        };
        Self(rows.iter().filter_map(known).collect())
    }

    /// What to tell the client of the first field that asks for something.
    pub(crate) fn find(&self, fields: &Fields<'_>) -> Option<String> {
        let asked = |&&(index, _, _): &&(usize, &str, &str)| !is_neutral(fields.get(index));
        self.0.iter().find(asked).map(|&(index, name, why)| {
            let value = shown(fields.get(index));
            format!(
                "the parameter `{name}`{value} is not served by this server's scheduler: {why}. Remove it, or start the \
                 server with `--scheduler sglang`"
            )
        })
    }
}

fn is_neutral(value: Value<'_>) -> bool {
    match value {
        Value::Nil | Value::Flag(false) => true,
        Value::List(values) | Value::Map(values) => values.count() == 0,
        Value::Text(text) => text.is_empty(),
        value => number(value).is_some_and(|value| value.total_cmp(&0.0).is_eq()),
    }
}

/// A number, as ` = 1.5`; nothing for longer values.
fn shown(value: Value<'_>) -> String {
    match number(value) {
        Some(value) => format!(" = {value}"),
        None => String::new(),
    }
}
