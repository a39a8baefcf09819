//! Requests for embeddings, and their answers.

use pie_engine::{FinishReason, OutputDelta, Sampler};
use pie_frontends::sglang_zmq::{SglangFrontend, SglangFrontendSettings};
use pie_ingress::EmbeddingInfo;
use rmpv::Value;

use super::support::{
    EMBEDDING, EMBEDDING_OUTPUT, Kept, classes, delta, encoded, generate, ids, message, settings,
};

fn front() -> SglangFrontend {
    let info = EmbeddingInfo {
        size: 4,
        normalized: true,
    };
    let settings = SglangFrontendSettings {
        embeddings: Some(info),
        ..settings()
    };
    SglangFrontend::new(&classes(), settings).unwrap()
}

fn embed(rid: &str, prompt: &[i64], more: &[(&str, Value)]) -> Value {
    let mut set = vec![("rid", Value::from(rid)), ("input_ids", ids(prompt))];
    set.extend_from_slice(more);
    message("TokenizedEmbeddingReqInput", EMBEDDING, &set)
}

fn field(bytes: &[u8], name: &str) -> Vec<Value> {
    let value = rmpv::decode::read_value(&mut &*bytes).unwrap();
    let values = value.as_array().unwrap();
    assert_eq!(values[0].as_str(), Some("BatchEmbeddingOutput"));
    let at = EMBEDDING_OUTPUT.iter().position(|&known| known == name);
    values[at.unwrap() + 1].as_array().unwrap().clone()
}

fn message_of(reason: &Value) -> String {
    let entries = reason.as_map().unwrap();
    let found = entries
        .iter()
        .find(|(key, _)| key.as_str() == Some("message"));
    found.unwrap().1.as_str().unwrap().to_owned()
}

fn pooled(request: u64, row: &[f32]) -> OutputDelta {
    OutputDelta {
        logprobs: row.iter().map(|value| value.to_bits()).collect(),
        ..delta(request, &[], Some(FinishReason::Length))
    }
}

#[test]
fn a_batch_goes_in_and_its_rows_come_out() {
    let (front, kept) = (front(), Kept::default());
    let requests = vec![
        embed("a", &[10, 11, 12], &[]),
        embed("b", &[13], &[("dimensions", 2.into())]),
    ];
    let names = Value::Array(vec!["a".into(), "b".into()]);
    let batch = [("rids", names), ("batch", Value::Array(requests))];
    let batch = message(
        "BatchTokenizedEmbeddingReqInput",
        &["rids", "batch"],
        &batch,
    );
    let sent = front.receive(&kept, [&encoded(&batch)[..]]);
    assert_eq!(sent, pie_frontends::sglang_zmq::Outgoing::default());
    let arrivals = kept.arrivals.borrow();
    assert_eq!(arrivals[0].prompt, [10, 11, 12]);
    assert_eq!(arrivals[1].sampling.sampler, Sampler::Embedding);
    assert_eq!(arrivals[1].stop.max_tokens, 0);

    let rows = [pooled(0, &[0.5; 4]), pooled(1, &[0.3, 0.4, 0.5, 0.7])];
    let [bytes] = &front.outputs(&rows).to_detokenizer[..] else {
        panic!("one message")
    };
    assert_eq!(field(bytes, "rids"), ["a".into(), "b".into()]);
    assert_eq!(field(bytes, "prompt_tokens"), [3.into(), 1.into()]);
    let rows = field(bytes, "embeddings");
    assert_eq!(rows[0], Value::Array(vec![Value::F32(0.5); 4]));
    assert_eq!(
        rows[1],
        Value::Array(vec![Value::F32(0.6), Value::F32(0.8)])
    );
    assert_eq!(front.open_requests(), 0);
}

#[test]
fn what_cannot_be_served_is_answered_in_its_class() {
    let (front, kept) = (front(), Kept::default());
    for (request, line) in [
        (
            embed("a", &[1; 21], &[]),
            "the prompt has 21 tokens, 20 is the most",
        ),
        (
            embed("a", &[1000], &[]),
            "token 1000 of `input_ids` is not in the vocabulary",
        ),
        (embed("a", &[], &[]), "the prompt is empty"),
        (
            embed("a", &[1], &[("dimensions", 5.into())]),
            "dimensions is 5, it must be from 1 to 4",
        ),
        (
            embed("a", &[1], &[("dimensions", "x".into())]),
            "`dimensions` is",
        ),
        (
            embed("a", &[1], &[("return_pooled_hidden_states", true.into())]),
            "the parameter `return_pooled_hidden_states` is not served",
        ),
    ] {
        let sent = front.receive(&kept, [&encoded(&request)[..]]);
        let [bytes] = &sent.to_detokenizer[..] else {
            panic!("one message")
        };
        let reason = message_of(&field(bytes, "finished_reasons")[0]);
        assert!(reason.starts_with(line), "{reason}");
        assert_eq!(field(bytes, "embeddings"), [Value::Array(Vec::new())]);
    }
    // A request for text is answered as one, in a message of its own.
    let both = [generate("t", &[1], &[], &[]), embed("e", &[], &[])].map(|value| encoded(&value));
    let sent = front.receive(&kept, both.iter().map(|message| &message[..]));
    let [text, embedding] = &sent.to_detokenizer[..] else {
        panic!("two messages")
    };
    let reason = message_of(&super::support::field(text, "finished_reasons")[0]);
    assert!(reason.contains("use /v1/embeddings"), "{reason}");
    assert_eq!(field(embedding, "rids"), ["e".into()]);
    assert!(kept.arrivals.borrow().is_empty());
}

#[test]
fn an_aborted_request_is_given_up() {
    let (front, kept) = (front(), Kept::default());
    front.receive(&kept, [&encoded(&embed("a", &[1, 2], &[]))[..]]);
    let abort = message("AbortReq", super::support::ABORT, &[("rid", "a".into())]);
    front.receive(&kept, [&encoded(&abort)[..]]);
    assert_eq!(*kept.aborted.borrow(), [0]);
    let sent = front.outputs(&[delta(0, &[], Some(FinishReason::Aborted))]);
    assert_eq!((sent.to_detokenizer.len(), sent.to_tokenizer.len()), (0, 1));
}
