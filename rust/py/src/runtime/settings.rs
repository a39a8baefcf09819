//! Conversion of Python values to settings.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pie_engine::{DriverSettings, ServiceLog};
use pie_ingress::RequestLimits;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use pyo3::{type_hint_identifier, type_hint_subscript, type_hint_union};
use toml::{Table, Value};

use crate::arrays::{self, Ids};

/// Lines of logs that are kept for `log_lines`.
const LINES: usize = 1000;

/// A prompt: an array of integers, or a list.
pub(super) struct Prompt(pub(super) Vec<u32>);

impl<'a, 'py> FromPyObject<'a, 'py> for Prompt {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        <Ids<'_, '_> as FromPyObject<'_, '_>>::INPUT_TYPE,
        type_hint_subscript!(
            type_hint_identifier!("builtins", "list"),
            type_hint_identifier!("builtins", "int")
        )
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyList>() {
            return Ok(Self(object.extract()?));
        }
        let mut tokens = Vec::new();
        let Ok(ids) = Ids::extract(object);
        arrays::read("token_ids", ids, None, arrays::TOKENS, &mut tokens)?;
        Ok(Self(tokens))
    }
}

/// The settings of each replica, with its devices.
pub(super) fn share(
    driver: &DriverSettings,
    devices: &[String],
    replicas: usize,
    ranks: usize,
) -> PyResult<Vec<DriverSettings>> {
    let needed = replicas.checked_mul(ranks).filter(|&needed| needed > 0);
    if needed != Some(devices.len()) {
        return Err(PyValueError::new_err(format!(
            "{replicas} replicas of {ranks} devices were asked for, and {} devices given: replicas times \
             tensor_parallel_size must be the number of devices, and 1 at least",
            devices.len()
        )));
    }
    let parts = devices.chunks(ranks);
    let settings = parts.map(|devices| DriverSettings {
        devices: devices.to_vec(),
        ..driver.clone()
    });
    Ok(settings.collect())
}

/// Keeps the last lines, and writes all to a file if there is a path.
pub(super) fn log(
    lines: Arc<Mutex<VecDeque<String>>>,
    replicas: usize,
    path: Option<PathBuf>,
) -> PyResult<ServiceLog> {
    let open = |path| OpenOptions::new().create(true).append(true).open(path);
    let file: Option<File> = path.map(open).transpose()?;
    Ok(Arc::new(move |replica, line: &str| {
        let line = if replicas > 1 {
            format!("[{replica}] {line}")
        } else {
            line.to_owned()
        };
        if let Some(mut file) = file.as_ref() {
            // What a full disk loses is still among the last lines.
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
        let mut lines = lock(&lines);
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }))
}

/// The default limits of requests with some changes.
pub(super) fn limits(changed: Option<&BTreeMap<String, u64>>) -> PyResult<RequestLimits> {
    let mut limits = RequestLimits::default();
    for (name, &value) in changed.into_iter().flatten() {
        limits.set(name, value).map_err(value_error)?;
    }
    Ok(limits)
}

/// Checks names of request limits, as in docs/limits.md.
///
/// Raises:
///     ValueError: There is no such limit.
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments from Python are owned"
)]
pub(crate) fn check_request_limits(limits: BTreeMap<String, u64>) -> PyResult<()> {
    self::limits(Some(&limits)).map(drop)
}

pub(super) fn token_bytes(vocabulary: Vec<Vec<u8>>) -> Arc<Vec<Box<[u8]>>> {
    let bytes = vocabulary.into_iter().map(Vec::into_boxed_slice);
    Arc::new(bytes.collect())
}

/// The same with the names of special tokens, in which stop strings and regexes are searched, as SGLang does.
pub(super) fn with_special(bytes: &[Box<[u8]>], special: &[(u32, String)]) -> Arc<Vec<Box<[u8]>>> {
    let mut bytes = bytes.to_vec();
    for (token, name) in special {
        if let Some(entry) = bytes.get_mut(*token as usize) {
            *entry = name.as_bytes().into();
        }
    }
    Arc::new(bytes)
}

pub(super) fn lock(lines: &Mutex<VecDeque<String>>) -> MutexGuard<'_, VecDeque<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} is {value}: {error}")))
}

/// A time in milliseconds, in µs.
pub(super) fn milliseconds(name: &str, value: f64) -> PyResult<u64> {
    Duration::try_from_secs_f64(value / 1e3)
        .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
        .map_err(|error| PyValueError::new_err(format!("{name} is {value}: {error}")))
}

pub(super) fn at_least_one(name: &str, value: Option<u32>) -> PyResult<Option<u32>> {
    match value {
        Some(0) => Err(PyValueError::new_err(format!(
            "{name} is 0, it must be 1 or more, or None"
        ))),
        value => Ok(value),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
pub(crate) fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(super) fn table(options: &Bound<'_, PyDict>) -> PyResult<Table> {
    let mut table = Table::new();
    for (key, value) in options {
        let key: String = key.extract()?;
        let value = toml_value(&key, &value)?;
        table.insert(key, value);
    }
    Ok(table)
}

fn toml_value(key: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let many = |values: Vec<Bound<'_, PyAny>>| -> PyResult<Value> {
        let values = values.iter().map(|value| toml_value(key, value));
        Ok(Value::Array(values.collect::<PyResult<_>>()?))
    };
    // A bool is an int in Python.
    if value.is_instance_of::<PyBool>() {
        Ok(Value::Boolean(value.extract()?))
    } else if value.is_instance_of::<PyInt>() {
        Ok(Value::Integer(value.extract()?))
    } else if value.is_instance_of::<PyFloat>() {
        Ok(Value::Float(value.extract()?))
    } else if value.is_instance_of::<PyString>() {
        Ok(Value::String(value.extract()?))
    } else if let Ok(values) = value.cast::<PyList>() {
        many(values.iter().collect())
    } else if let Ok(values) = value.cast::<PyTuple>() {
        many(values.iter().collect())
    } else if let Ok(values) = value.cast::<PyDict>() {
        Ok(Value::Table(table(values)?))
    } else {
        Err(PyTypeError::new_err(format!(
            "option {key} is a {}, it must be bool, int, float, str, or a list or dict of them; leave it out for its default",
            value.get_type().name()?
        )))
    }
}
