//! `MultimodalProcessorOutput` of `SGLang` 0.5.23: the images of a request, as its processors leave them.
//!
//! An item has the pixels of one image or more in one tensor, the grid of each in `image_grid_thw`, and the range of its tokens in
//! `offsets`. Version 0.5.17 pickles the same.

use pie_engine::{PromptImage, PromptImages};
use pie_ingress::{Refusal, RequestLimits};

use crate::sglang_zmq::error::SglangFrontendError;
use crate::sglang_zmq::extension::{
    DataType, Integers, Storage, Tensor, entry, float32, shared_memory_names,
};
use crate::sglang_zmq::msgpack::{Items, Value};
use crate::sglang_zmq::schema::{Fields, MessageClass, field_indices};
use crate::sglang_zmq::shared_memory::Segment;
use crate::sglang_zmq::value::wrong;

const FIELD: &str = "mm_inputs";
/// `Modality.IMAGE`, and the parameters of requests by which the others come.
const IMAGE: i64 = 1;
const OTHERS: [(i64, &str); 2] = [(2, "video_data"), (3, "audio_data")];
/// Axes of a grid and of a rotary position: time, height and width.
const AXES: usize = 3;

field_indices! {
    OutputFields of "MultimodalProcessorOutput" { mm_items, mrope_positions }
}
field_indices! {
    ItemFields of "MultimodalDataItem" { modality, offsets, feature, precomputed_embeddings, model_specific_data }
}

/// Where the fields stand.
#[derive(Debug, Clone)]
pub(crate) struct ProcessorFields {
    output: OutputFields,
    item: ItemFields,
}

impl ProcessorFields {
    /// `None` where the installed `SGLang` pickles them.
    pub(crate) fn new(classes: &[MessageClass]) -> Result<Option<Self>, SglangFrontendError> {
        let mut names = classes.iter().map(|class| class.name.as_str());
        if !names.any(|name| name == "MultimodalProcessorOutput") {
            return Ok(None);
        }
        Ok(Some(Self {
            output: OutputFields::new(classes)?,
            item: ItemFields::new(classes)?,
        }))
    }
}

/// The images of a request. Their shared memory is freed when this is dropped, read or not.
#[derive(Debug)]
pub struct ProcessorOutput {
    items: Vec<Item>,
    segments: Vec<Segment>,
}

/// A tensor with the pixels of one image or more.
#[derive(Debug)]
struct Item {
    pixels: Pixels,
    data_type: DataType,
    /// Bytes of all pixels, and of those of a patch.
    bytes: usize,
    patch_bytes: usize,
    images: Vec<PlacedImage>,
}

#[derive(Debug)]
enum Pixels {
    Inline(Box<[u8]>),
    /// An index of `segments`.
    Segment(usize),
}

#[derive(Debug)]
struct PlacedImage {
    start: u32,
    tokens: u32,
    grid: [u32; AXES],
    patches: usize,
    mrope_positions: Box<[u32]>,
}

impl ProcessorOutput {
    /// Reads the message, and no shared memory.
    ///
    /// # Errors
    /// What is no image, or more than the limits allow. The shared memory is freed.
    pub(crate) fn of(
        at: &ProcessorFields,
        limits: &RequestLimits,
        value: Value<'_>,
    ) -> Result<Self, Refusal> {
        let Value::List(fields) = value else {
            return Err(wrong(FIELD, value, "a list"));
        };
        let fields = Fields::of_items(fields);
        let Value::List(items) = fields.get(at.output.mm_items) else {
            let items = fields.get(at.output.mm_items);
            return Err(wrong("mm_items", items, "a list"));
        };
        // First, so that they are freed whatever is wrong with the rest.
        let mut named = Named::of(at, items);
        limits.check("images", "images", items.count())?;
        let positions = positions(fields.get(at.output.mrope_positions))?;
        let mut read = Vec::new();
        let (mut images, mut bytes) = (0, 0u64);
        for item in items {
            let Value::List(item) = item else {
                return Err(wrong("mm_items", item, "a list of items"));
            };
            let item = Item::of(&at.item, &Fields::of_items(item), positions, &named)?;
            images += item.images.len() as u64;
            bytes = bytes.saturating_add(item.read_bytes());
            limits.check("images", "images", images)?;
            limits.check("images", "image_bytes", bytes)?;
            read.push(item);
        }
        Ok(Self {
            items: read,
            segments: std::mem::take(&mut named.segments),
        })
    }

    /// Reads the pixels, in milliseconds for large images, and frees the shared memory.
    ///
    /// # Errors
    /// Which image is wrong, and why, for the client.
    pub fn read(self) -> Result<PromptImages, String> {
        let Self { items, segments } = self;
        let mut images = Vec::new();
        for item in items {
            let bytes = match item.pixels {
                Pixels::Inline(bytes) => bytes.into(),
                Pixels::Segment(index) => {
                    let read = segments[index].read(item.bytes);
                    read.map_err(|error| {
                        format!("the shared memory of an image cannot be read: {error}")
                    })?
                }
            };
            let pixels = float32(bytes, item.data_type).unwrap_or_default();
            let mut rest = &pixels[..];
            for placed in item.images {
                let (own, others) = rest.split_at(placed.patches * item.patch_bytes);
                rest = others;
                let PlacedImage {
                    start,
                    tokens,
                    grid,
                    mrope_positions,
                    ..
                } = placed;
                images.push(PromptImage::new(
                    start,
                    tokens,
                    grid,
                    own.into(),
                    mrope_positions,
                ));
            }
        }
        let number = |(number, image): (usize, Result<_, _>)| {
            image.map_err(|problem| format!("image {number}: {problem}"))
        };
        let mut images: Vec<PromptImage> = (images.into_iter().enumerate())
            .map(number)
            .collect::<Result<_, _>>()?;
        images.sort_by_key(PromptImage::start);
        PromptImages::new(images).map_err(|(number, problem)| format!("image {number}: {problem}"))
    }
}

/// Shared memory by its names.
struct Named<'a> {
    names: Vec<&'a [u8]>,
    segments: Vec<Segment>,
}

impl<'a> Named<'a> {
    /// All that the items of a message name.
    fn of(at: &ProcessorFields, items: Items<'a>) -> Self {
        let (mut names, mut segments) = (Vec::new(), Vec::new());
        for item in items {
            let Value::List(fields) = item else { continue };
            let fields = Fields::of_items(fields);
            for field in [at.item.feature, at.item.precomputed_embeddings] {
                for name in shared_memory_names(fields.get(field)) {
                    if let Some(segment) = Segment::new(name) {
                        names.push(name);
                        segments.push(segment);
                    }
                }
            }
        }
        Self { names, segments }
    }
}

impl Item {
    /// Bytes of the pixels as float32, which they become, and of positions.
    fn read_bytes(&self) -> u64 {
        let values = self.bytes / self.data_type.size();
        let positions = self.images.iter().map(|image| image.mrope_positions.len());
        let numbers = (values as u64).saturating_add(positions.sum::<usize>() as u64);
        numbers.saturating_mul(size_of::<f32>() as u64)
    }

    fn of(
        at: &ItemFields,
        fields: &Fields<'_>,
        positions: Option<Integers<'_>>,
        named: &Named<'_>,
    ) -> Result<Self, Refusal> {
        check_modality(fields.get(at.modality))?;
        let feature = Tensor::of(fields.get(at.feature)).ok_or_else(no_pixels)?;
        let images = placed_images(at, fields, positions)?;
        let mut patches = images.iter().map(|image| image.patches);
        let patches = patches.try_fold(0usize, usize::checked_add);
        let rows = feature.shape.first().copied();
        let is_float = !matches!(feature.data_type, DataType::Int32 | DataType::Int64);
        let rows = rows.filter(|_| rows == patches && is_float);
        let rows = rows.ok_or_else(no_grid)?;
        let values = feature.bytes() / feature.data_type.size();
        let patch_values = values.checked_div(rows).unwrap_or(0);
        Ok(Self {
            pixels: match feature.storage {
                Storage::Inline(bytes) => Pixels::Inline(bytes.into()),
                Storage::SharedMemory(name) => {
                    let known = named.names.iter().position(|known| *known == name);
                    Pixels::Segment(known.ok_or_else(no_pixels)?)
                }
            },
            data_type: feature.data_type,
            bytes: feature.bytes(),
            patch_bytes: patch_values.saturating_mul(size_of::<f32>()),
            images,
        })
    }
}

fn check_modality(modality: Value<'_>) -> Result<(), Refusal> {
    if modality == Value::Integer(IMAGE) {
        return Ok(());
    }
    let mut others = OTHERS.iter();
    let other = others.find(|(number, _)| modality == Value::Integer(*number));
    let name = other.map_or(FIELD, |(_, name)| name);
    let why = "the driver takes images, no audio or video";
    Err(unserved(&format!("`{name}`"), why))
}

/// The images of an item, in their order.
fn placed_images(
    at: &ItemFields,
    fields: &Fields<'_>,
    positions: Option<Integers<'_>>,
) -> Result<Vec<PlacedImage>, Refusal> {
    let Value::List(offsets) = fields.get(at.offsets) else {
        return Err(no_pixels());
    };
    let data = fields.get(at.model_specific_data);
    let grids = entry(data, b"image_grid_thw").and_then(Tensor::of);
    let grids = grids.as_ref().and_then(Tensor::integers);
    let grids = grids.ok_or_else(no_grid)?;
    if grids.len() as u64 != (AXES as u64).saturating_mul(offsets.count()) {
        return Err(no_grid());
    }
    let (mut images, mut free) = (Vec::new(), 0);
    for (number, offset) in offsets.enumerate() {
        let image = placed(offset, grids, number, positions, free)?;
        free = image.start + image.tokens;
        images.push(image);
    }
    Ok(images)
}

/// An image by the index of its first and its last token, none of them before `free`, and by the number of its grid.
fn placed(
    offset: Value<'_>,
    grids: Integers<'_>,
    number: usize,
    positions: Option<Integers<'_>>,
    free: u32,
) -> Result<PlacedImage, Refusal> {
    let bounds = bounds(offset).filter(|&(start, end)| free <= start && start < end);
    let (start, end) =
        bounds.ok_or_else(|| wrong("offsets", offset, "a first and a last token, in order"))?;
    let side = |axis| grids.get(number * AXES + axis);
    let grid = side(0).zip(side(1)).zip(side(2));
    let grid = grid.map(|((time, height), width)| [time, height, width]);
    let patches = grid.and_then(|grid| {
        let mut sides = grid.iter().map(|&side| side as usize);
        let patches = sides.try_fold(1, usize::checked_mul)?;
        (patches > 0).then_some((grid, patches))
    });
    let (grid, patches) =
        patches.ok_or_else(|| unserved("an image of this model", "its grid has no size"))?;
    let mrope_positions = match positions {
        Some(positions) => axes(positions, start as usize, end as usize)?,
        None => Box::default(),
    };
    Ok(PlacedImage {
        start,
        tokens: end - start,
        grid,
        patches,
        mrope_positions,
    })
}

/// The first token of an image, and the one after its last.
fn bounds(offset: Value<'_>) -> Option<(u32, u32)> {
    let Value::List(mut ends) = offset else {
        return None;
    };
    match (ends.next(), ends.next(), ends.next()) {
        (Some(Value::Integer(first)), Some(Value::Integer(last)), None) => {
            let end = u32::try_from(last).ok()?.checked_add(1)?;
            Some((u32::try_from(first).ok()?, end))
        }
        _ => None,
    }
}

/// The rotary positions of all tokens, `[3, tokens]`; `None` for a model with one axis.
fn positions(value: Value<'_>) -> Result<Option<Integers<'_>>, Refusal> {
    if value == Value::Nil {
        return Ok(None);
    }
    let tensor = Tensor::of(value).filter(|tensor| tensor.shape.first() == Some(&AXES));
    let integers = tensor.as_ref().and_then(Tensor::integers);
    integers
        .map(Some)
        .ok_or_else(|| wrong("mrope_positions", value, "a tensor of three axes"))
}

/// The positions of an image's tokens, three for each.
fn axes(positions: Integers<'_>, start: usize, end: usize) -> Result<Box<[u32]>, Refusal> {
    let tokens = positions.len() / AXES;
    let other = || {
        unserved(
            "an image of this model",
            "its positions are of another kind",
        )
    };
    if end > tokens {
        return Err(other());
    }
    let at = |token: usize, axis: usize| positions.get(axis * tokens + token);
    let own = (start..end).flat_map(|token| (0..AXES).map(move |axis| at(token, axis)));
    let own: Box<[u32]> = own.collect::<Option<_>>().ok_or_else(other)?;
    // The text continues after the largest one.
    let next = own.iter().max().and_then(|last| last.checked_add(1));
    let continues = end == tokens || (0..AXES).all(|axis| at(end, axis) == next);
    continues.then_some(own).ok_or_else(other)
}

fn no_pixels() -> Refusal {
    unserved(
        "an image without pixels",
        "the driver computes embeddings itself",
    )
}

fn no_grid() -> Refusal {
    unserved("an image of this model", "it has no grid of patches")
}

fn unserved(what: &str, why: &str) -> Refusal {
    Refusal::Other(format!(
        "{what} is not served by this server's scheduler: {why}; remove it, or start the server with `--scheduler sglang`"
    ))
}
