//! Messages that `SGLang`'s own classes of each version have made: `tests/support/sglang_scripts/message_vectors.py` writes them.

mod support;

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use pie_engine::{
    FinishReason, Grammar, GrammarHandle, GrammarSetupError, OutputDelta, PromptImage,
    PromptImages, SubmitError, WeightVersionEvent,
};
use pie_frontends::sglang_zmq::{Backend, Media, MessageClass, MessageField, Outgoing};
use pie_frontends::sglang_zmq::{SglangFrontend, SglangFrontendSettings};
use pie_ingress::{RequestLimits, RequestSpec};
use proptest::prelude::*;
use rmpv::Value;
use support::{Kept, delta, settings};

const OF_0517: &[u8] = include_bytes!("vectors/sglang_0.5.17.msgpack");
const OF_0523: &[u8] = include_bytes!("vectors/sglang_0.5.23.msgpack");

/// A file of vectors.
struct Vectors(Value);

impl Vectors {
    fn new(file: &[u8]) -> Self {
        Self(rmpv::decode::read_value(&mut &*file).unwrap())
    }

    fn get(&self, name: &str) -> &Value {
        entry(&self.0, name)
    }

    fn message(&self, name: &str) -> Vec<u8> {
        entry(self.get("messages"), name).as_slice().unwrap().into()
    }

    fn front(&self, changed: impl FnOnce(&mut SglangFrontendSettings)) -> SglangFrontend {
        let mut settings = settings();
        changed(&mut settings);
        SglangFrontend::new(&self.classes(), settings).unwrap()
    }

    fn classes(&self) -> Vec<MessageClass> {
        let field = |field: &Value| MessageField {
            name: field[0].as_str().unwrap().to_owned(),
            default: field[1].as_slice().map(<[u8]>::to_vec),
        };
        let class = |class: &Value| MessageClass {
            name: class[0].as_str().unwrap().to_owned(),
            fields: class[1].as_array().unwrap().iter().map(field).collect(),
        };
        let classes = self.get("classes").as_array().unwrap();
        classes.iter().map(class).collect()
    }

    fn prompt(&self) -> Vec<u32> {
        numbers(self.get("prompt"))
    }

    /// What the messages with images show.
    fn images(&self) -> PromptImages {
        let image = |image: &Value| {
            let number = |name| entry(image, name).as_u64().unwrap() as u32;
            let positions = numbers(entry(image, "mrope_positions"));
            PromptImage::new(
                number("start"),
                number("tokens"),
                numbers(entry(image, "grid")).try_into().unwrap(),
                entry(image, "pixels").as_slice().unwrap().into(),
                positions.into(),
            )
        };
        let images = self.get("images").as_array().unwrap();
        let images = images.iter().map(|found| image(found).unwrap());
        PromptImages::new(images.collect()).unwrap()
    }

    /// A message in which the shared memory has the name of another segment.
    fn message_of(&self, name: &str, segment: &str) -> Vec<u8> {
        let known = self.get("segment").as_str().unwrap();
        assert_eq!(known.len(), segment.len());
        let mut bytes = self.message(name);
        let mut found = bytes.windows(known.len());
        let start = found.position(|window| window == known.as_bytes()).unwrap();
        bytes[start..start + known.len()].copy_from_slice(segment.as_bytes());
        bytes
    }
}

fn entry<'a>(map: &'a Value, name: &str) -> &'a Value {
    let mut entries = map.as_map().unwrap().iter();
    let found = entries.find(|(key, _)| key.as_str() == Some(name));
    &found.unwrap_or_else(|| panic!("no {name}")).1
}

fn numbers(values: &Value) -> Vec<u32> {
    let number = |value: &Value| value.as_u64().unwrap() as u32;
    values.as_array().unwrap().iter().map(number).collect()
}

/// A runtime that keeps the images of messages.
#[derive(Default)]
struct Sees {
    kept: Kept,
    images: RefCell<Vec<PromptImages>>,
    pickles: RefCell<Vec<Box<[u8]>>>,
}

impl Backend for Sees {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        self.kept.submit(spec)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        self.kept.compile_grammar(grammar, after)
    }

    fn abort(&self, request: u64) {
        self.kept.abort(request);
    }

    fn end_session(&self, session: u64) {
        self.kept.end_session(session);
    }

    fn set_weight_version(&self, version: u32) {
        self.kept.set_weight_version(version);
    }

    fn images(&self, media: Media) -> Result<PromptImages, String> {
        match media {
            Media::Pickle(pickle) => {
                self.pickles.borrow_mut().push(pickle);
                Ok(PromptImages::new(Vec::new()).unwrap())
            }
            Media::Message(output) => {
                let images = output.read()?;
                self.images.borrow_mut().push(images.clone());
                Ok(images)
            }
        }
    }
}

/// A field of a message that this frontend writes; `Nil` where its class lacks it.
fn written(vectors: &Vectors, message: &[u8], name: &str) -> Value {
    let value = rmpv::decode::read_value(&mut &*message).unwrap();
    let classes = vectors.classes();
    let tag = value[0].as_str().unwrap();
    let class = classes.iter().find(|class| class.name == tag).unwrap();
    let at = class.fields.iter().position(|field| field.name == name);
    at.map_or(Value::Nil, |at| value[at + 1].clone())
}

/// Why a message is refused.
fn refusal(vectors: &Vectors, sent: &Outgoing) -> String {
    let reasons = written(vectors, &sent.to_detokenizer[0], "finished_reasons");
    entry(&reasons[0], "message").as_str().unwrap().to_owned()
}

#[test]
fn requests_of_both_versions_are_read() {
    for file in [OF_0517, OF_0523] {
        let vectors = Vectors::new(file);
        let (front, sees) = (vectors.front(|_| ()), Sees::default());
        for name in ["text", "batch"] {
            let sent = front.receive(&sees, [&vectors.message(name)[..]]);
            assert_eq!(sent, Outgoing::default(), "{name}");
        }
        let arrivals = sees.kept.arrivals.borrow();
        assert_eq!(arrivals.len(), 3);
        for arrival in &*arrivals {
            assert_eq!(arrival.prompt, vectors.prompt());
        }
        // The model of this frontend makes none.
        let sent = front.receive(&sees, [&vectors.message("embedding")[..]]);
        assert_eq!(sent.to_detokenizer.len(), 1);
    }
}

/// The versions of a message's requests: name, first token, and the one after the last.
fn weight_versions(vectors: &Vectors, message: &[u8]) -> Value {
    written(vectors, message, "weight_versions")
}

fn spans(of: &[(&str, u32, u32)]) -> Value {
    let span = |&(name, start, end): &(&str, u32, u32)| {
        Value::Array(vec![name.into(), start.into(), end.into()])
    };
    Value::Array(of.iter().map(span).collect())
}

#[test]
fn ends_name_the_versions_of_the_weights_since_0_5_23() {
    let vectors = Vectors::new(OF_0523);
    let (front, kept) = (vectors.front(|_| ()), Kept::default());
    for name in ["text", "batch"] {
        front.receive(&kept, [&vectors.message(name)[..]]);
    }
    // The same name is no change.
    front.set_weight_version(&kept, "default");
    for name in ["second", "second", "third", "second"] {
        front.set_weight_version(&kept, name);
    }
    assert_eq!(*kept.weight_versions.borrow(), [1, 2, 3]);
    let event = |old_version, num_output_tokens| WeightVersionEvent {
        old_version,
        num_output_tokens,
    };
    let changed = OutputDelta {
        // Versions without a token of the request leave no trace.
        weight_events: vec![event(0, 2), event(1, 3), event(2, 3)],
        weight_version: Some(3),
        admitted: Some(1),
        ..delta(0, &[4, 5, 6, 7], Some(FinishReason::Length))
    };
    let plain = OutputDelta {
        weight_version: Some(1),
        ..delta(1, &[4], Some(FinishReason::Length))
    };
    let runs = delta(2, &[4], None);
    let sent = front.outputs(&[runs, changed, plain]);
    let first = [("default", 0, 2), ("second", 2, 4)];
    // The running one comes first.
    let expected = [Value::Nil, spans(&first), spans(&[("second", 0, 1)])];
    let found = weight_versions(&vectors, &sent.to_detokenizer[0]);
    assert_eq!(found.as_array().unwrap()[..], expected);
    let found = written(&vectors, &sent.to_detokenizer[0], "finished_reasons");
    assert_eq!(found.as_array().unwrap().len(), 3);
}

#[test]
fn requests_without_a_token_name_the_current_weights() {
    let vectors = Vectors::new(OF_0523);
    let (front, kept) = (
        vectors.front(|settings| settings.max_prompt_tokens = 1),
        Kept::default(),
    );
    front.set_weight_version(&kept, "new");
    let refused = front.receive(&kept, [&vectors.message("text")[..]]);
    let found = weight_versions(&vectors, &refused.to_detokenizer[0]);
    assert_eq!(found, Value::Array(vec![spans(&[("new", 0, 0)])]));
    // One that is aborted while it waits.
    let front = vectors.front(|_| ());
    front.receive(&kept, [&vectors.message("text")[..]]);
    let sent = front.outputs(&[delta(0, &[], Some(FinishReason::Aborted))]);
    let found = weight_versions(&vectors, &sent.to_tokenizer[0]);
    assert_eq!(found, spans(&[("default", 0, 0)]));
    // A message of requests that all run has none.
    let (front, kept) = (vectors.front(|_| ()), Kept::default());
    front.receive(&kept, [&vectors.message("text")[..]]);
    let sent = front.outputs(&[delta(0, &[4], None)]);
    for message in &sent.to_detokenizer {
        assert_eq!(weight_versions(&vectors, message), Value::Nil);
    }
}

#[test]
fn messages_of_0_5_17_have_no_versions() {
    let vectors = Vectors::new(OF_0517);
    let (front, kept) = (vectors.front(|_| ()), Kept::default());
    front.receive(&kept, [&vectors.message("text")[..]]);
    let sent = front.outputs(&[delta(0, &[4], Some(FinishReason::Length))]);
    let message = &sent.to_detokenizer[0];
    assert_eq!(weight_versions(&vectors, message), Value::Nil);
    assert!(written(&vectors, message, "finished_reasons").is_array());
}

#[test]
fn pickled_images_are_handed_on() {
    let vectors = Vectors::new(OF_0517);
    let (front, sees) = (vectors.front(|_| ()), Sees::default());
    front.receive(&sees, [&vectors.message("pickled")[..]]);
    assert_eq!(*sees.pickles.borrow(), [Box::from(&b"a pickle"[..])]);
    assert_eq!(sees.kept.arrivals.borrow().len(), 1);
}

#[test]
fn images_in_messages_are_read() {
    let vectors = Vectors::new(OF_0523);
    let (front, sees) = (vectors.front(|_| ()), Sees::default());
    for name in ["in_one_item", "in_two_items"] {
        let sent = front.receive(&sees, [&vectors.message(name)[..]]);
        assert_eq!(sent, Outgoing::default(), "{name}");
    }
    let expected = vectors.images();
    assert_eq!(*sees.images.borrow(), [expected.clone(), expected]);
    assert_eq!(sees.kept.arrivals.borrow()[0].images.len(), 2);
}

/// Shared memory with the pixels of all images, by a name that no other process has.
fn segment(vectors: &Vectors, number: u32) -> (String, PathBuf) {
    let name = format!("sgl_shm_mm_{:010}_vec{number:03}", std::process::id());
    let path = PathBuf::from("/dev/shm").join(&name);
    let images = vectors.get("images").as_array().unwrap();
    let pixels = images
        .iter()
        .flat_map(|image| entry(image, "pixels").as_slice().unwrap());
    fs::write(&path, pixels.copied().collect::<Vec<u8>>()).unwrap();
    (name, path)
}

#[test]
fn shared_memory_is_read_and_freed() {
    let vectors = Vectors::new(OF_0523);
    let (front, sees) = (vectors.front(|_| ()), Sees::default());
    let (name, path) = segment(&vectors, 0);
    let message = vectors.message_of("in_shared_memory", &name);
    assert_eq!(front.receive(&sees, [&message[..]]), Outgoing::default());
    assert_eq!(*sees.images.borrow(), [vectors.images()]);
    assert!(!path.exists());
    // A second time it is gone.
    let sent = front.receive(&sees, [&message[..]]);
    let reason = refusal(&vectors, &sent);
    assert!(
        reason.starts_with("the shared memory of an image cannot be read:"),
        "{reason}"
    );
    // It is freed without a reader, and where something else is wrong.
    let (name, path) = segment(&vectors, 1);
    let message = vectors.message_of("in_shared_memory", &name);
    let sent = front.receive(&sees.kept, [&message[..]]);
    let reason = refusal(&vectors, &sent);
    assert!(reason.contains("`mm_inputs` is not served"), "{reason}");
    assert!(!path.exists());
    let (name, path) = segment(&vectors, 2);
    let message = vectors.message_of("a_list", &name);
    let sent = front.receive(&sees, [&message[..]]);
    let reason = refusal(&vectors, &sent);
    assert!(
        reason.starts_with("an image without pixels is not served"),
        "{reason}"
    );
    assert!(!path.exists());
}

#[test]
fn what_is_no_image_is_refused_by_name() {
    let vectors = Vectors::new(OF_0523);
    for (name, words) in [
        (
            "video",
            "`video_data` is not served by this server's scheduler: the driver takes images",
        ),
        ("no_pixels", "an image without pixels is not served"),
        ("another_grid", "an image of this model is not served"),
    ] {
        let (front, sees) = (vectors.front(|_| ()), Sees::default());
        let sent = front.receive(&sees, [&vectors.message(name)[..]]);
        let reason = refusal(&vectors, &sent);
        assert!(reason.starts_with(words), "{reason}");
        assert!(sees.kept.arrivals.borrow().is_empty());
    }
}

#[test]
fn images_above_a_limit_are_not_read() {
    let vectors = Vectors::new(OF_0523);
    for (limit, value) in [("images", 1), ("image_bytes", 100)] {
        let mut limits = RequestLimits::default();
        limits.set(limit, value).unwrap();
        let front = vectors.front(|settings| settings.limits = limits);
        let sees = Sees::default();
        let (name, path) = segment(&vectors, 3);
        let message = vectors.message_of("in_shared_memory", &name);
        let sent = front.receive(&sees, [&message[..]]);
        let reason = refusal(&vectors, &sent);
        assert!(
            reason.contains(&format!("the request limit `{limit}`")),
            "{reason}"
        );
        assert!(sees.images.borrow().is_empty());
        assert!(!path.exists());
    }
}

proptest! {
    #[test]
    fn damaged_images_are_survived(
        which in 0..4usize,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let vectors = Vectors::new(OF_0523);
        let names = ["in_one_item", "in_two_items", "in_shared_memory", "a_list"];
        let mut bytes = vectors.message(names[which]);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let (front, sees) = (vectors.front(|_| ()), Sees::default());
        front.receive(&sees, [&bytes[..]]);
    }
}
