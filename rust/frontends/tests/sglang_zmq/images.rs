//! Images of requests.

use std::cell::RefCell;
use std::sync::Arc;

use pie_engine::{
    FinishReason, Grammar, GrammarHandle, GrammarSetupError, PromptImage, PromptImages, SubmitError,
};
use pie_frontends::sglang_zmq::{Backend, Media};
use pie_ingress::RequestSpec;
use rmpv::Value;

use crate::refusals::refusal;
use crate::support::{Kept, delta, encoded, field, front, generate, ids};

/// A runtime that takes the images of one pickle, and counts those that it reads.
#[derive(Default)]
struct Sees(Kept, RefCell<usize>);

impl Backend for Sees {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        self.0.submit(spec)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        self.0.compile_grammar(grammar, after)
    }

    fn abort(&self, request: u64) {
        self.0.abort(request);
    }

    fn end_session(&self, session: u64) {
        self.0.end_session(session);
    }

    fn set_weight_version(&self, version: u32) {
        self.0.set_weight_version(version);
    }

    fn images(&self, media: Media) -> Result<PromptImages, String> {
        *self.1.borrow_mut() += 1;
        let pickle = match media {
            Media::Pickle(pickle) => pickle,
            Media::Message(output) => return output.read(),
        };
        match &pickle[..] {
            b"image" => {
                let pixels = vec![1; 16].into();
                let image = PromptImage::new(1, 3, [1, 2, 6], pixels, Box::default());
                Ok(PromptImages::new(vec![image.unwrap()]).unwrap())
            }
            b"nothing" => Ok(PromptImages::new(Vec::new()).unwrap()),
            _ => Err("`video_data` is not served".to_owned()),
        }
    }
}

fn media(pickle: &[u8]) -> (&'static str, Value) {
    let wrapper = ["PickleWrapper".into(), Value::Binary(pickle.into())];
    ("mm_inputs", Value::Array(wrapper.into()))
}

#[test]
fn images_reach_the_runtime_by_other_names_than_tokens() {
    let (front, sees) = (front(), Sees::default());
    let request = generate("a", &[10, 296, 296, 296, 11], &[media(b"image")], &[]);
    let sent = front.receive(&sees, [&encoded(&request)[..]]);
    assert_eq!(sent, pie_frontends::sglang_zmq::Outgoing::default());
    let arrival = sees.0.arrivals.borrow()[0].clone();
    assert_eq!((arrival.prompt[0], arrival.prompt[4]), (10, 11));
    assert!(arrival.prompt[1..4].iter().all(|&name| name >= 1 << 31));
    assert_eq!((arrival.images[0].start, arrival.images[0].tokens), (1, 3));
    assert!(arrival.sampling.images.is_some());
    let first = front.outputs(&[delta(0, &[40], Some(FinishReason::Length))]);
    let bytes = &first.to_detokenizer[0];
    // The text around is the client's.
    assert_eq!(
        field(bytes, "decode_ids"),
        [ids(&[10, 296, 296, 296, 11, 40])]
    );
    assert_eq!(field(bytes, "image_tokens"), [3.into()]);

    let plain = generate("b", &[10, 11], &[media(b"nothing")], &[]);
    front.receive(&sees, [&encoded(&plain)[..]]);
    let arrival = sees.0.arrivals.borrow()[1].clone();
    assert!(arrival.images.is_empty() && arrival.sampling.images.is_none());
}

#[test]
fn what_is_no_image_is_refused_and_let_go() {
    let session = ("session_params", Value::Array(vec!["s".into()]));
    for (more, words) in [
        (vec![media(b"video")], "`video_data` is not served"),
        (vec![media(b"image"), session], "session"),
        // It is read all the same, for it lies in memory that others see.
        (
            vec![media(b"image"), ("return_routed_experts", true.into())],
            "return_routed_experts",
        ),
    ] {
        let (front, sees) = (front(), Sees::default());
        front.open_session("s", false, None);
        let request = generate("a", &[10, 296, 296, 296, 11], &more, &[]);
        let sent = front.receive(&sees, [&encoded(&request)[..]]);
        let reason = field(&sent.to_detokenizer[0], "finished_reasons")[0].to_string();
        assert!(reason.contains(words), "{reason}");
        assert!(reason.contains("400"), "{reason}");
        assert_eq!(*sees.1.borrow(), 1);
        assert!(sees.0.arrivals.borrow().is_empty());
    }
    let reason = refusal(&generate("a", &[1], &[media(b"image")], &[]));
    assert!(reason.contains("`mm_inputs` is not served"), "{reason}");
}

fn matrix(rows: usize, width: usize) -> (&'static str, Value) {
    let row = Value::Array((0..width).map(|number| (number as f64).into()).collect());
    ("input_embeds", Value::Array(vec![row; rows]))
}

#[test]
fn embeddings_take_the_place_of_tokens() {
    let (front, sees) = (front(), Sees::default());
    let request = generate("a", &[], &[matrix(18, 4)], &[]);
    let sent = front.receive(&sees, [&encoded(&request)[..]]);
    assert_eq!(sent, pie_frontends::sglang_zmq::Outgoing::default());
    let arrival = sees.0.arrivals.borrow()[0].clone();
    let blocks: Vec<_> = (arrival.images.iter())
        .map(|block| (block.start, block.tokens, block.bytes))
        .collect();
    assert_eq!(blocks, [(0, 16, 256), (16, 2, 32)]);
    assert_eq!(arrival.prompt.len(), 18);
    let first = front.outputs(&[delta(0, &[40], Some(FinishReason::Length))]);
    assert_eq!(
        field(&first.to_detokenizer[0], "prompt_tokens"),
        [18.into()]
    );
}

#[test]
fn embeddings_that_are_none_are_refused() {
    let session = ("session_params", Value::Array(vec!["s".into()]));
    let text = (
        "input_embeds",
        Value::Array(vec![Value::Array(vec!["x".into(); 4])]),
    );
    let flat = ("input_embeds", Value::Array(vec![0.5.into(); 4]));
    let large = Value::Array(vec![f64::MAX.into(); 4]);
    for (more, words) in [
        (
            vec![matrix(2, 3)],
            "embedding 0 of `input_embeds` has 3 numbers, and this model's have 4",
        ),
        (vec![matrix(0, 4)], "`input_embeds` has no embeddings"),
        (vec![text], "`input_embeds`"),
        (vec![flat], "`input_embeds`"),
        (
            vec![("input_embeds", Value::Array(vec![large]))],
            "number 0 of embedding 0",
        ),
        (vec![matrix(2, 4), session], "`input_embeds` in a session"),
        (
            vec![matrix(5, 4), media(b"image")],
            "`input_embeds` or images, not both",
        ),
    ] {
        let (front, sees) = (front(), Sees::default());
        front.open_session("s", false, None);
        let sent = front.receive(&sees, [&encoded(&generate("a", &[], &more, &[]))[..]]);
        let reason = field(&sent.to_detokenizer[0], "finished_reasons")[0].to_string();
        assert!(reason.contains(words), "{reason}");
        assert!(sees.0.arrivals.borrow().is_empty());
    }
}
