//! `Generate` messages of both gRPC contracts: whatever they say, they are read or refused, in memory that their length bounds.

use std::sync::LazyLock;

use arbitrary::{Arbitrary, Unstructured};
use pie_engine::GrammarSetupError;
use pie_frontends::grpc::contract::{sglang, vllm};
use pie_frontends::grpc::{Contract, GatewaySettings, RequestReader, ServedModel, VisionInfo};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};

use crate::memory;

/// Bytes of a refusal. That of a message that is nested too deeply names every level.
const MOST_REFUSAL: usize = 4096;
const VOCABULARY: u32 = 1000;
/// Patches along a side of the square that is a token.
const MERGE: u32 = 2;
/// A message's flags, before its bytes: which contract, whether what follows is a [`Request`], whether the model takes images.
const IS_SGLANG: u8 = 1;
const IS_BUILT: u8 = 2;
const HAS_IMAGES: u8 = 4;
/// Where both contracts have the sampling parameters.
const PARAMS: u32 = 4;

/// A request that is served, and what is changed of it.
#[derive(Debug, Arbitrary)]
struct Request {
    prompt: Vec<u16>,
    images: Vec<Image>,
    /// Numbers of a patch.
    numbers: u8,
    is_half: bool,
    fields: Vec<(u8, Field)>,
    params: Vec<(u8, Field)>,
    inputs: Vec<(u8, Field)>,
}

/// An image by its tokens, behind some of text.
#[derive(Debug, Arbitrary)]
struct Image {
    text: u8,
    rows: u8,
    columns: u8,
}

/// The value of any field.
#[derive(Debug, Arbitrary)]
enum Field {
    Small(u8),
    Varint(u64),
    Float(f32),
    Double(f64),
    Text(String),
    Bytes(Vec<u8>),
    Packed(Vec<u32>),
    Message(Vec<(u8, Field)>),
    /// In itself, so often, by two fields in turn.
    Nested(u16, [u8; 2]),
    /// So many groups, which have no ends.
    Groups(u16),
    /// So many of them.
    Many(u16, Box<Field>),
}

impl Field {
    /// Writes it as the field of a number.
    fn write(&self, number: u32, bytes: &mut Vec<u8>) {
        match self {
            Self::Small(value) => write_varint(number, (*value).into(), bytes),
            Self::Varint(value) => write_varint(number, *value, bytes),
            Self::Float(value) => {
                encode_key(number, WireType::ThirtyTwoBit, bytes);
                bytes.extend(value.to_le_bytes());
            }
            Self::Double(value) => {
                encode_key(number, WireType::SixtyFourBit, bytes);
                bytes.extend(value.to_le_bytes());
            }
            Self::Text(text) => write_bytes(number, text.as_bytes(), bytes),
            Self::Bytes(value) => write_bytes(number, value, bytes),
            Self::Packed(values) => {
                let mut packed = Vec::new();
                for &value in values {
                    encode_varint(value.into(), &mut packed);
                }
                write_bytes(number, &packed, bytes);
            }
            Self::Message(fields) => write_message(number, fields, bytes),
            Self::Nested(depth, numbers) => {
                let numbers = numbers.map(number_of);
                let message = nested(usize::from(*depth % 1024), numbers);
                write_bytes(number, &message, bytes);
            }
            Self::Groups(count) => {
                for _ in 0..*count % 4096 {
                    encode_key(number, WireType::StartGroup, bytes);
                }
            }
            Self::Many(count, field) => {
                let mut one = Vec::new();
                field.write(number, &mut one);
                // Copies of copies have no other end.
                let count = usize::from(*count % 512).min((1 << 13) / one.len().max(1));
                bytes.extend(one.repeat(count));
            }
        }
    }
}

/// All that the contracts have, and some that they do not.
fn number_of(number: u8) -> u32 {
    u32::from(number % 32) + 1
}

fn write_varint(number: u32, value: u64, bytes: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, bytes);
    encode_varint(value, bytes);
}

fn write_bytes(number: u32, value: &[u8], bytes: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, bytes);
    encode_varint(value.len() as u64, bytes);
    bytes.extend_from_slice(value);
}

fn write_message(number: u32, fields: &[(u8, Field)], bytes: &mut Vec<u8>) {
    let mut message = Vec::new();
    write_fields(fields, &mut message);
    write_bytes(number, &message, bytes);
}

fn write_fields(fields: &[(u8, Field)], bytes: &mut Vec<u8>) {
    for (number, field) in fields {
        field.write(number_of(*number), bytes);
    }
}

/// A message in itself, by two fields in turn; the outermost is the first one's.
fn nested(depth: usize, numbers: [u32; 2]) -> Vec<u8> {
    (0..depth).rev().fold(Vec::new(), |inner, level| {
        let mut outer = Vec::with_capacity(inner.len() + 4);
        write_bytes(numbers[level % 2], &inner, &mut outer);
        outer
    })
}

/// Images one after the other, as a gateway makes tensors of them.
#[derive(Default)]
struct Media {
    placeholders: Vec<(u32, u32)>,
    grids: Vec<u8>,
    patches: u32,
    pixels: Vec<u8>,
    numbers: u32,
    dtype: &'static str,
}

impl Media {
    fn new(request: &Request) -> Self {
        let mut media = Self {
            numbers: u32::from(request.numbers % 4),
            dtype: if request.is_half {
                "bfloat16"
            } else {
                "float32"
            },
            ..Self::default()
        };
        let mut end = 0;
        for image in &request.images {
            let [rows, columns] = [image.rows, image.columns].map(|side| u32::from(side % 6));
            let start = end + u32::from(image.text % 8);
            end = start + rows * columns;
            media.placeholders.push((start, rows * columns));
            media.patches += rows * columns * MERGE * MERGE;
            let grid = [1, rows * MERGE, columns * MERGE];
            let sides = grid.map(|side| i64::from(side).to_le_bytes());
            media.grids.extend(sides.as_flattened());
        }
        let size = if request.is_half { 2 } else { 4 };
        media.pixels = vec![1; (media.patches * media.numbers * size) as usize];
        media
    }
}

const GRIDS: &str = "image_grid_thw";

fn vllm_inputs(media: &Media) -> vllm::MultimodalInputs {
    use vllm::tensor_data::Payload;
    let tensor = |shape: &[u32], dtype: &str, bytes: &[u8]| vllm::TensorData {
        shape: shape.to_vec(),
        dtype: dtype.to_owned(),
        payload: Some(Payload::Inline(bytes.to_vec())),
    };
    let count = media.placeholders.len() as u32;
    let grids = tensor(&[count, 3], "int64", &media.grids);
    let shape = [media.patches, media.numbers];
    let range = |&(offset, length): &(u32, u32)| vllm::PlaceholderRange { offset, length };
    vllm::MultimodalInputs {
        pixel_values: Some(tensor(&shape, media.dtype, &media.pixels)),
        model_specific_tensors: [(GRIDS.to_owned(), grids)].into(),
        mm_placeholders: media.placeholders.iter().map(range).collect(),
        ..vllm::MultimodalInputs::default()
    }
}

fn sglang_inputs(media: &Media) -> sglang::MultimodalInputs {
    let tensor = |shape: &[u32], dtype: &str, bytes: &[u8]| sglang::TensorData {
        shape: shape.to_vec(),
        dtype: dtype.to_owned(),
        data: bytes.to_vec(),
    };
    let count = media.placeholders.len() as u32;
    let grids = tensor(&[count, 3], "int64", &media.grids);
    let shape = [media.patches, media.numbers];
    let range = |&(offset, length): &(u32, u32)| sglang::PlaceholderRange { offset, length };
    sglang::MultimodalInputs {
        pixel_values: Some(tensor(&shape, media.dtype, &media.pixels)),
        model_specific_tensors: [(GRIDS.to_owned(), grids)].into(),
        mm_placeholders: media.placeholders.iter().map(range).collect(),
        ..sglang::MultimodalInputs::default()
    }
}

/// The bytes of a request that is served, and what is changed of it: later fields change those before them.
fn built(contract: Contract, request: &Request) -> Vec<u8> {
    let input_ids = request.prompt.iter().map(|&token| u32::from(token));
    let input_ids = std::iter::once(1).chain(input_ids).collect();
    let media = (!request.images.is_empty()).then(|| Media::new(request));
    let (mut bytes, inputs) = match contract {
        Contract::Vllm => (served_by_vllm(input_ids, media.as_ref()).encode_to_vec(), 7),
        Contract::Sglang => (
            served_by_sglang(input_ids, media.as_ref()).encode_to_vec(),
            3,
        ),
    };
    write_message(PARAMS, &request.params, &mut bytes);
    if !request.inputs.is_empty() {
        write_message(inputs, &request.inputs, &mut bytes);
    }
    write_fields(&request.fields, &mut bytes);
    bytes
}

fn served_by_vllm(input_ids: Vec<u32>, media: Option<&Media>) -> vllm::GenerateRequest {
    let tokenized = vllm::TokenizedInput {
        input_ids,
        ..vllm::TokenizedInput::default()
    };
    vllm::GenerateRequest {
        request_id: "a".to_owned(),
        input: Some(vllm::generate_request::Input::Tokenized(tokenized)),
        mm_inputs: media.map(vllm_inputs),
        ..vllm::GenerateRequest::default()
    }
}

fn served_by_sglang(input_ids: Vec<u32>, media: Option<&Media>) -> sglang::GenerateRequest {
    sglang::GenerateRequest {
        request_id: "a".to_owned(),
        tokenized: Some(sglang::TokenizedInput {
            input_ids,
            ..sglang::TokenizedInput::default()
        }),
        sampling_params: Some(sglang::SamplingParams {
            repetition_penalty: 1.0,
            ..sglang::SamplingParams::default()
        }),
        mm_inputs: media.map(sglang_inputs),
        ..sglang::GenerateRequest::default()
    }
}

/// For a model of text alone, and for one with images and `input_embeds`.
static READERS: LazyLock<[RequestReader; 2]> = LazyLock::new(|| {
    let model = ServedModel {
        eos_tokens: vec![2],
        ..ServedModel::default()
    };
    // A server reads both alike.
    let mut settings = GatewaySettings::new(Contract::Vllm, model);
    let text = RequestReader::new(&settings, VOCABULARY, 0);
    settings.images = Some(VisionInfo { merge: MERGE });
    [text, RequestReader::new(&settings, VOCABULARY, 4)]
});

/// Flags, then the bytes of a message or of a [`Request`].
pub(crate) fn check(data: &[u8]) {
    let Some((&flags, rest)) = data.split_first() else {
        return;
    };
    let contract = if flags & IS_SGLANG == 0 {
        Contract::Vllm
    } else {
        Contract::Sglang
    };
    let has_images = flags & HAS_IMAGES != 0;
    if flags & IS_BUILT == 0 {
        read(contract, has_images, rest);
    } else if let Ok(request) = Request::arbitrary(&mut Unstructured::new(rest)) {
        read(contract, has_images, &built(contract, &request));
    }
}

fn read(contract: Contract, has_images: bool, message: &[u8]) {
    let reader = &READERS[usize::from(has_images)];
    // The target `grammar` reads them.
    let bind = |_: &_, _: &_| Err(GrammarSetupError::NoTokenizer);
    let (read, peak) = memory::peak(|| reader.read(contract, message, bind));
    let bytes = message.len();
    assert!(peak <= (1 << 16) + 256 * bytes, "{peak} bytes for {bytes}");
    let spec = match read {
        Ok(spec) => spec,
        Err(status) => {
            let text = status.message();
            assert!(
                text.len() <= MOST_REFUSAL,
                "{} bytes: {text:.200}",
                text.len()
            );
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            return;
        }
    };
    assert!((1..=1024).contains(&spec.samples()), "{}", spec.samples());
    assert!(!spec.prompt().is_empty());
    let (arrival, _) = spec.into_request();
    assert!(arrival.stop.min_tokens <= arrival.stop.max_tokens);
    let mut stops = arrival.stop.stop_tokens.iter();
    assert!(stops.all(|&token| token < VOCABULARY));
}

/// Messages of both contracts, some of them nested deeper than they may be, and descriptions of others.
pub(crate) fn seeds(noise: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let images = [(2, 2, 3), (0, 1, 1)].map(|(text, rows, columns)| Image {
        text,
        rows,
        columns,
    });
    let media = Media::new(&Request {
        prompt: Vec::new(),
        images: images.into(),
        numbers: 3,
        is_half: false,
        fields: Vec::new(),
        params: Vec::new(),
        inputs: Vec::new(),
    });
    let mut found = Vec::new();
    for media in [None, Some(&media)] {
        let prompt: Vec<u32> = (1..12).collect();
        let vllm = served_by_vllm(prompt.clone(), media).encode_to_vec();
        let sglang = served_by_sglang(prompt, media).encode_to_vec();
        found.extend([
            joined(HAS_IMAGES, &vllm),
            joined(HAS_IMAGES | IS_SGLANG, &sglang),
        ]);
    }
    // `custom_params`: a map's entry, its value, lists in lists.
    let lists = |depth| {
        let mut bytes = Vec::new();
        write_bytes(2, &nested(depth, [6, 1]), &mut bytes);
        for number in [1, 23, PARAMS] {
            let inner = std::mem::take(&mut bytes);
            write_bytes(number, &inner, &mut bytes);
        }
        bytes
    };
    found.extend([60, 1000].map(|depth| joined(IS_SGLANG, &lists(depth))));
    found.push(joined(0, &[0xfb; 1000]));
    let flags = [0, IS_SGLANG, HAS_IMAGES, HAS_IMAGES | IS_SGLANG]
        .into_iter()
        .cycle();
    let noise = flags
        .zip(noise)
        .map(|(flags, bytes)| joined(flags | IS_BUILT, &bytes));
    found.extend(noise);
    found
}

fn joined(flags: u8, message: &[u8]) -> Vec<u8> {
    [&[flags], message].concat()
}
