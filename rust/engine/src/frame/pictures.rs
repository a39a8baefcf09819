//! The images of a frame.

use std::ops::Range;

use pie_wire::ForwardRequest;

use crate::picture::{Picture, Pictures};

/// Leaves no image, and no room for pixels: few frames have some.
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

/// Adds the positions of the rows at these places of a prompt, whose tokens are the frame's last, and the images that begin there.
pub(super) fn append(body: &mut ForwardRequest, pictures: &Pictures, places: Range<u32>) {
    let mut next = places.start;
    for picture in pictures.within(&places) {
        append_text(body, pictures, next..picture.start());
        append_image(body, picture, pictures.lag(picture.start()));
        next = picture.end();
    }
    append_text(body, pictures, next..places.end);
}

/// Text between two images.
fn append_text(body: &mut ForwardRequest, pictures: &Pictures, places: Range<u32>) {
    let lag = pictures.lag(places.start);
    body.position_ids.extend(places.map(|place| place - lag));
}

fn append_image(body: &mut ForwardRequest, picture: &Picture, lag: u32) {
    let (row, anchor) = (body.position_ids.len(), picture.start() - lag);
    let rows = picture.tokens() as usize;
    // Its embeddings come from the pixels. The name is for the scheduler alone.
    body.token_ids[row..row + rows].fill(0);
    body.position_ids.extend(anchor..anchor + picture.tokens());
    body.image_grids.extend(picture.grid());
    body.image_anchor_positions.push(anchor);
    body.image_anchor_rows.push(row as u32);
    body.image_pixels.extend(picture.pixels());
    body.image_pixel_indptr.push(body.image_pixels.len() as u32);
    body.image_mrope_positions.extend(picture.axes());
    body.image_mrope_indptr
        .push(body.image_mrope_positions.len() as u32);
}
