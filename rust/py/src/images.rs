//! The images of a pass.

use std::sync::Arc;

use pie_driver::Media;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyMemoryView};

/// The images of a pass. Their rows are staged with the token `vocab_size`, which no text has.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct PassImages {
    /// In the order of their rows.
    spans: Vec<Py<ImageSpan>>,
    /// `[3, tokens]` int64: rotary position of each row of the pass on the axes time, height and width.
    positions: Py<PyByteArray>,
}

impl PassImages {
    pub(crate) fn new(
        py: Python<'_>,
        images: pie_planner::PassImages,
        media: &Arc<Media>,
    ) -> PyResult<Py<Self>> {
        let spans = images.spans.into_iter().map(|inner| {
            let media = Arc::clone(media);
            Py::new(py, ImageSpan { inner, media })
        });
        let positions = bytemuck::cast_slice(&images.positions);
        let images = Self {
            spans: spans.collect::<PyResult<_>>()?,
            positions: PyByteArray::new(py, positions).unbind(),
        };
        Py::new(py, images)
    }
}

/// An image with rows in a pass. Its buffer is the pixels: float32 `[patches, values of a patch]`, little-endian, at any
/// address.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct ImageSpan {
    inner: pie_planner::ImageSpan,
    media: Arc<Media>,
}

#[pymethods]
impl ImageSpan {
    /// Distinguishes it from every other image that the planner has seen.
    #[getter]
    const fn number(&self) -> u64 {
        self.inner.number
    }

    /// Its request within the pass.
    #[getter]
    const fn request(&self) -> usize {
        self.inner.request
    }

    /// KV indices of its first row and after its last one, also of rows in other passes.
    #[getter]
    const fn kv(&self) -> (usize, usize) {
        (self.inner.kv.start, self.inner.kv.end)
    }

    /// Whether a later pass has rows of it.
    #[getter]
    const fn continues(&self) -> bool {
        self.inner.continues
    }

    /// Patches in time, height and width.
    #[getter]
    const fn grid(&self) -> (u32, u32, u32) {
        let [time, height, width] = self.inner.grid;
        (time, height, width)
    }

    /// The pixels, as bytes.
    #[getter]
    fn pixels<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    #[expect(unsafe_code, reason = "the buffer protocol is a C interface")]
    // SAFETY: only the interpreter calls it, with a view that its buffer protocol lets it fill.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        let span = slf.get();
        let pixels = &span.media.pixels()[span.inner.pixels.clone()];
        let (start, len) = (pixels.as_ptr().cast_mut().cast(), pixels.len() as isize);
        // SAFETY: the interpreter hands in a `Py_buffer` to fill. The bytes live as long as `slf`, to which the view
        // holds a reference; nothing writes to them, and the view is read-only.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        match status {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}
