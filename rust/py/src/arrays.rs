//! Ids from Python: any buffer of integers in, NumPy arrays out, and single ids.

use std::convert::Infallible;

use pie_kv_cache::radix::NodeId;
use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyType};
use pyo3::{type_hint_identifier, type_hint_union};

use crate::error::{PagesError, RadixError};

/// Largest id of a page: pages leave as int32, which torch can index with.
pub(crate) const PAGES: u32 = i32::MAX as u32;
/// Largest id of a token.
pub(crate) const TOKENS: u32 = u32::MAX;

/// An argument that should be an array of ids: [`read`] checks.
#[derive(Clone, Copy)]
pub(crate) struct Ids<'a, 'py>(Borrowed<'a, 'py, PyAny>);

impl<'a, 'py> FromPyObject<'a, 'py> for Ids<'a, 'py> {
    type Error = Infallible;
    // To type checkers NumPy's arrays are buffers from Python 3.12 on.
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("typing_extensions", "Buffer"),
        type_hint_identifier!("numpy", "ndarray")
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self(object))
    }
}

/// The memory of an argument: one look at it, however often it is read.
pub(crate) struct View<'a, 'py> {
    what: &'static str,
    array: Ids<'a, 'py>,
    buffer: PyUntypedBuffer,
}

impl<'a, 'py> View<'a, 'py> {
    /// `what` names the argument in errors.
    pub(crate) fn of(what: &'static str, array: Ids<'a, 'py>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(&array.0).map_err(|_| wrong_type(what, &array.0))?;
        Ok(Self {
            what,
            array,
            buffer,
        })
    }

    /// Reads the first `limit` ids of a one-dimensional, contiguous array of int32, uint32, int64 or uint64 into `ids`, whose
    /// content is dropped.
    pub(crate) fn read(&self, limit: Option<usize>, most: u32, ids: &mut Vec<u32>) -> PyResult<()> {
        let (what, array, buffer) = (self.what, &*self.array.0, &self.buffer);
        ids.clear();
        if buffer.item_count() == 0 {
            // An empty array('q') is nowhere: its address is not aligned.
            return Ok(());
        }
        let copied = copy::<i64>(buffer, array.py(), limit, most, ids)
            .or_else(|| copy::<i32>(buffer, array.py(), limit, most, ids))
            .or_else(|| copy::<u32>(buffer, array.py(), limit, most, ids))
            .or_else(|| copy::<u64>(buffer, array.py(), limit, most, ids))
            .ok_or_else(|| wrong_type(what, array))?;
        copied.map_err(|(index, id)| {
            PyOverflowError::new_err(format!(
                "{what}[{index}] is {id}; its ids are from 0 to {most}"
            ))
        })
    }
}

/// Reads an argument once; see [`View::read`].
pub(crate) fn read(
    what: &'static str,
    array: Ids<'_, '_>,
    limit: Option<usize>,
    most: u32,
    ids: &mut Vec<u32>,
) -> PyResult<()> {
    View::of(what, array)?.read(limit, most, ids)
}

/// Appends the ids of a buffer of this type, or None if it has another type or shape. The error is the first id that is out of
/// range, with its index. `most` is one less than a power of two.
#[expect(unsafe_code, reason = "a view over the caller's array")]
fn copy<T>(
    buffer: &PyUntypedBuffer,
    _attached: Python<'_>,
    limit: Option<usize>,
    most: u32,
    ids: &mut Vec<u32>,
) -> Option<Result<(), (usize, i128)>>
where
    T: Element + Id,
{
    let buffer = buffer.as_typed::<T>().ok()?;
    if buffer.dimensions() != 1 {
        return None;
    }
    let values = buffer.as_slice_ptr()?;
    // SAFETY: contiguous, of this type and aligned for it, as `as_typed` has found; the buffer keeps its memory alive. No
    // Python code runs while this thread is attached and reads.
    let values = unsafe { values.as_ref() };
    let values = &values[..limit.unwrap_or(usize::MAX).min(values.len())];
    // One comparison for all, so that the loop is vectorized.
    let mut bits = 0;
    ids.extend(values.iter().map(|value| {
        let id = value.widen();
        bits |= id;
        id as u32
    }));
    let is_wrong = |value: &&T| value.widen() > u64::from(most);
    let wrong = || values.iter().enumerate().find(|(_, value)| is_wrong(value));
    Some(match (bits > u64::from(most)).then(wrong).flatten() {
        Some((index, value)) => Err((index, (*value).into())),
        None => Ok(()),
    })
}

/// An integer that may be an id; negative ones become too large for one.
trait Id: Copy + Into<i128> {
    fn widen(self) -> u64;
}

impl Id for i64 {
    fn widen(self) -> u64 {
        self as u64
    }
}

impl Id for i32 {
    fn widen(self) -> u64 {
        i64::from(self) as u64
    }
}

impl Id for u32 {
    fn widen(self) -> u64 {
        self.into()
    }
}

impl Id for u64 {
    fn widen(self) -> u64 {
        self
    }
}

/// The number of a node. A number that no node can have is one that the index does not know.
#[derive(Clone, Copy)]
pub(crate) struct NodeNumber(pub(crate) NodeId);

impl<'a, 'py> FromPyObject<'a, 'py> for NodeNumber {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = <u64 as FromPyObject<'a, 'py>>::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let number = integer::<u64>(object, |number| {
            RadixError::new_err(format!(
                "node {number} is not in the index: take the number from a match or an insertion"
            ))
        })?;
        Ok(Self(NodeId::from_bits(number)))
    }
}

/// The id of a page. An id that no page can have is one that the pool does not know.
#[derive(Clone, Copy)]
pub(crate) struct PageId(pub(crate) u32);

impl<'a, 'py> FromPyObject<'a, 'py> for PageId {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = <u32 as FromPyObject<'a, 'py>>::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        integer(object, |id| {
            PagesError::new_err(format!(
                "page {id} is of no pool: ids are from 0 to {PAGES}"
            ))
        })
        .map(Self)
    }
}

/// An integer argument, or `out_of_range` of one that its type does not hold.
fn integer<'a, 'py, T>(
    object: Borrowed<'a, 'py, PyAny>,
    out_of_range: impl FnOnce(&Bound<'py, PyAny>) -> PyErr,
) -> PyResult<T>
where
    T: FromPyObject<'a, 'py, Error = PyErr>,
{
    object.extract::<T>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(object.py()) {
            out_of_range(&object)
        } else {
            error
        }
    })
}

fn wrong_type(what: &str, array: &Bound<'_, PyAny>) -> PyErr {
    let given = array
        .get_type()
        .name()
        .map_or_else(|_| String::from("it"), |name| name.to_string());
    PyTypeError::new_err(format!(
        "{what} must be a one-dimensional, contiguous array of 32-bit or 64-bit integers, such as array('q') or NumPy's \
         int32; {given} is not, numpy.ascontiguousarray({what}, \"int64\") may make one of it"
    ))
}

/// A NumPy array of int32.
pub(crate) struct Array(Py<PyAny>);

impl Array {
    /// Ids, one-dimensional.
    pub(crate) fn new(py: Python<'_>, ids: &[u32]) -> PyResult<Self> {
        static EMPTY: PyOnceLock<Array> = PyOnceLock::new();
        if ids.is_empty() {
            let empty = EMPTY.get_or_try_init(py, || Self::filled(py, &[]))?;
            return Ok(empty.clone_ref(py));
        }
        Self::filled(py, ids)
    }

    fn filled(py: Python<'_>, ids: &[u32]) -> PyResult<Self> {
        static FROM_BUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        static INT32: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let from_buffer = FROM_BUFFER.import(py, "numpy", "frombuffer")?;
        let dtype = INT32.import(py, "numpy", "int32")?;
        let bytes = PyByteArray::new(py, bytemuck::cast_slice(ids));
        Ok(Self(from_buffer.call1((bytes, dtype))?.unbind()))
    }

    /// Pairs of ids, `(n, 2)`.
    pub(crate) fn pairs(py: Python<'_>, ids: &[[u32; 2]]) -> PyResult<Self> {
        let flat = Self::new(py, ids.as_flattened())?;
        let pairs = flat.0.bind(py).call_method1("reshape", (-1, 2))?;
        Ok(Self(pairs.unbind()))
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self(self.0.clone_ref(py))
    }

    pub(crate) fn len(&self, py: Python<'_>) -> PyResult<usize> {
        self.0.bind(py).len()
    }
}

impl<'py> IntoPyObject<'py> for Array {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("numpy", "ndarray");

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.0.into_bound(py))
    }
}
