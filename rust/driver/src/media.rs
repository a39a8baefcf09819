//! The pixels of the images of a batch.

use std::ops::Range;

use pie_wire::ArchivedForwardRequest;

/// The copy of a request with images; reference-counted, since Python may read it after the batch.
#[derive(Debug)]
pub struct Media {
    request: Vec<u64>,
    /// Its bytes of `image_pixels`.
    pixels: Range<usize>,
}

impl Media {
    pub(crate) const fn new(request: Vec<u64>, pixels: Range<usize>) -> Self {
        Self { request, pixels }
    }

    /// Where the pixels lie in the bytes that hold the request.
    pub(crate) fn pixel_range(bytes: &[u8], request: &ArchivedForwardRequest) -> Range<usize> {
        let pixels = request.image_pixels.as_slice();
        // An empty array may point anywhere.
        if pixels.is_empty() {
            return 0..0;
        }
        let start = pixels.as_ptr().addr() - bytes.as_ptr().addr();
        start..start + pixels.len()
    }

    /// The frame's `image_pixels`.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.request)[self.pixels.clone()]
    }
}
