//! A backend whose pickled images Python reads.

use std::sync::Arc;

use pie_engine::{
    Grammar, GrammarHandle, GrammarSetupError, PromptImage, PromptImages, Service, SubmitError,
};
use pie_frontends::sglang_zmq::{Backend, Media};
use pie_ingress::{Ingress, Refusal, RequestSpec};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Requests go to the service; pickled images are read by a callable of Python first.
pub(crate) struct ServiceWithImages<'a, 'py> {
    pub(crate) service: &'a Service,
    pub(crate) py: Python<'py>,
    pub(crate) takes_images: bool,
    pub(crate) read_images: Option<&'a Py<PyAny>>,
}

/// First token, tokens, grid, pixels, rotary positions.
pub(crate) type ReadImage<'py> = (
    u32,
    u32,
    (u32, u32, u32),
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
);

impl Backend for ServiceWithImages<'_, '_> {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        Backend::submit(self.service, spec)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        self.service.compile_grammar(grammar, after)
    }

    fn abort(&self, request: u64) {
        self.service.abort(request);
    }

    fn end_session(&self, session: u64) {
        self.service.end_session(session);
    }

    fn set_weight_version(&self, version: u32) {
        Backend::set_weight_version(self.service, version);
    }

    fn images(&self, media: Media) -> Result<PromptImages, String> {
        let (pickle, read_images) = match (media, self.read_images) {
            (Media::Message(output), _) if self.takes_images => {
                return self.py.detach(|| output.read());
            }
            (Media::Pickle(pickle), Some(reader)) if self.takes_images => (pickle, reader),
            (media, _) => return Backend::images(self.service, media),
        };
        let read = read_images.call1(self.py, (PyBytes::new(self.py, &pickle),));
        let read = read.and_then(|read| read.extract::<Vec<ReadImage<'_>>>(self.py));
        let read = read.map_err(|error| error.value(self.py).to_string())?;
        prompt_images(self.py, read)
    }
}

/// A prompt of embeddings, from their bytes: float32, little-endian.
///
/// # Errors
/// See [`Ingress::input_embeds`].
pub(crate) fn read_embeds(
    py: Python<'_>,
    ingress: &Ingress,
    bytes: &[u8],
) -> Result<PromptImages, Refusal> {
    let (numbers, _) = bytes.as_chunks::<4>();
    // It takes milliseconds to hash them, in which another thread may send tokens.
    py.detach(|| {
        let embeds: Vec<f32> = numbers.iter().copied().map(f32::from_le_bytes).collect();
        ingress.input_embeds(&embeds)
    })
}

/// The images of a prompt, from what Python has read.
///
/// # Errors
/// Which image is wrong, and why.
pub(crate) fn prompt_images(
    py: Python<'_>,
    read: Vec<ReadImage<'_>>,
) -> Result<PromptImages, String> {
    let mut images = Vec::with_capacity(read.len());
    for (number, (start, tokens, (time, height, width), pixels, axes)) in
        read.into_iter().enumerate()
    {
        let (axes, _) = axes.as_bytes().as_chunks::<4>();
        let axes = axes.iter().map(|axis| u32::from_le_bytes(*axis)).collect();
        let pixels = pixels.as_bytes();
        // It takes milliseconds to name a large image, in which another thread may send tokens.
        let image = py.detach(|| {
            let grid = [time, height, width];
            PromptImage::new(start, tokens, grid, pixels.into(), axes)
        });
        images.push(image.map_err(|problem| format!("image {number}: {problem}"))?);
    }
    PromptImages::new(images).map_err(|(number, problem)| format!("image {number}: {problem}"))
}
