//! Grammars of requests, by Python's names, and the process that compiles them.

use std::path::Path;

use pie_engine::{CompilerCommand, Grammar};
use pyo3::prelude::*;

use super::settings::value_error;

/// A grammar by the name of its kind.
pub(super) fn grammar_of(kind: &str, text: String) -> PyResult<Grammar> {
    let text = text.into_boxed_str();
    Ok(match kind {
        "json_schema" => Grammar::JsonSchema(text),
        "regex" => Grammar::Regex(text),
        "ebnf" => Grammar::Ebnf(text),
        "lark" => Grammar::Lark(text),
        "structural_tag" => Grammar::StructuralTag(text),
        _ => {
            return Err(value_error(format!(
                "the grammar is a {kind:?}: take json_schema, regex, ebnf, lark or structural_tag"
            )));
        }
    })
}

/// Loads this module by its file, and nothing else: no site packages, nothing of the environment, no descriptor but the standard ones.
const COMPILER: &str = "\
import os, sys
os.closerange(3, 1 << 20)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location('_core', sys.argv[1])
core = module_from_spec(spec)
spec.loader.exec_module(core)
core.run_grammar_compiler()
";

/// How an interpreter is started as a compiler process.
pub(super) fn compiler_command(py: Python<'_>, python: &Path) -> PyResult<CompilerCommand> {
    let file: String = py
        .import("pie_driver_sglang._core")?
        .getattr("__file__")?
        .extract()?;
    let arguments = ["-I", "-S", "-c", COMPILER, &file];
    Ok(CompilerCommand {
        program: python.to_owned(),
        arguments: arguments.map(Into::into).to_vec(),
    })
}

/// Compiles grammars for the process that has started this one and shares its standard input, until that closes it.
///
/// Raises:
///     OSError: The standard input is no socket of such a process.
#[pyfunction]
pub(crate) fn run_grammar_compiler(py: Python<'_>) -> PyResult<()> {
    Ok(py.detach(pie_engine::compiler_process)?)
}
