//! The images of a frame.

use std::ops::Range;

use pie_wire::ForwardRequest;

use crate::prompt_images::{PromptImage, PromptImages};

/// Removes all images and frees their pixels: few frames have some.
pub(super) fn clear(body: &mut ForwardRequest) {
    if body.image_anchor_rows.is_empty() {
        return;
    }
    body.image_pixels = Vec::new();
    body.image_mrope_positions = Vec::new();
    for array in [
        &mut body.image_grids,
        &mut body.image_anchor_positions,
        &mut body.image_anchor_rows,
    ] {
        array.clear();
    }
    body.image_pixel_indptr.truncate(1);
    body.image_mrope_indptr.truncate(1);
}

/// Appends the positions of these prompt tokens, which are the frame's last, and the images that begin among them.
pub(super) fn append(body: &mut ForwardRequest, images: &PromptImages, indices: Range<u32>) {
    let mut next = indices.start;
    for image in images.within(&indices) {
        append_text(body, images, next..image.start());
        append_image(body, image, images.mrope_delta(image.start()));
        next = image.end();
    }
    append_text(body, images, next..indices.end);
}

/// Text between two images.
fn append_text(body: &mut ForwardRequest, images: &PromptImages, indices: Range<u32>) {
    let delta = images.mrope_delta(indices.start);
    body.position_ids.extend(indices.map(|index| index - delta));
}

fn append_image(body: &mut ForwardRequest, image: &PromptImage, mrope_delta: u32) {
    let (row, anchor) = (body.position_ids.len(), image.start() - mrope_delta);
    let rows = image.tokens() as usize;
    // The embeddings come from the pixels; pad values are only for the prefix index.
    body.token_ids[row..row + rows].fill(0);
    body.position_ids.extend(anchor..anchor + image.tokens());
    body.image_grids.extend(image.grid());
    body.image_anchor_positions.push(anchor);
    body.image_anchor_rows.push(row as u32);
    body.image_pixels.extend(image.pixels());
    body.image_pixel_indptr.push(body.image_pixels.len() as u32);
    body.image_mrope_positions.extend(image.mrope_positions());
    body.image_mrope_indptr
        .push(body.image_mrope_positions.len() as u32);
}
