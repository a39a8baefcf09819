//! Compiles many schemas, and follows documents that fit them and that do not. Run by `benches/grammar_suite/grammar_coverage.py`.
//!
//! Usage: `grammar_coverage CASES RESULT [COMPILER]`, files of one JSON object a line. A case has a `schema`, and texts in `valid` and
//! `invalid`. Tokens are the 256 bytes. `COMPILER` is `pie-grammar-compiler`: without it schemas are compiled in this process.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher as LlgMatcher, ParserFactory};
use pie_grammar::{
    Compiler, CompilerCommand, Grammar, Limits, Matcher, Progress, Settings, Vocabulary,
};
use serde::{Deserialize, Serialize};

/// Token that ends a document.
const END: u32 = 256;

#[derive(Deserialize)]
struct Case {
    name: String,
    group: String,
    schema: String,
    valid: Vec<String>,
    invalid: Vec<String>,
}

#[derive(Serialize)]
struct Outcome {
    name: String,
    group: String,
    /// Whether llguidance compiles the schema as it is.
    alone: bool,
    error: Option<String>,
    relaxed: Vec<String>,
    compile_ms: f64,
    /// Whether each document is allowed.
    valid: Vec<bool>,
    invalid: Vec<bool>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cases, result, process @ ..] = &arguments[..] else {
        panic!("usage: grammar_coverage CASES RESULT [COMPILER]");
    };
    let tokens: Vec<Vec<u8>> = (0..=u8::MAX)
        .map(|byte| vec![byte])
        .chain([vec![]])
        .collect();
    let vocabulary = Vocabulary::new(&tokens, &[], &[END]).expect("a vocabulary");
    let bytes = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new_simple(&bytes).expect("a factory");
    factory.quiet();
    let settings = Settings {
        limits: Limits {
            threads: NonZeroUsize::MIN,
            kept: NonZeroUsize::MIN,
            ..Limits::default()
        },
        process: process.first().map(|program| CompilerCommand {
            program: program.into(),
            arguments: Vec::new(),
        }),
        ..Settings::default()
    };
    let compiler = Compiler::with_settings(vocabulary, settings).expect("threads");
    let mut output = BufWriter::new(File::create(result).expect("the result's file"));
    for line in fs::read_to_string(cases).expect("the cases").lines() {
        let case: Case = serde_json::from_str(line).expect("a case");
        let outcome = run(&factory, &compiler, case);
        serde_json::to_writer(&mut output, &outcome).expect("a file");
        output.write_all(b"\n").expect("a file");
    }
    output.flush().expect("a file");
}

fn run(factory: &ParserFactory, compiler: &Compiler, case: Case) -> Outcome {
    let schema = serde_json::from_str(&case.schema).expect("a schema");
    let parser = factory.create_parser(TopLevelGrammar::from_json_schema(schema));
    let alone = !LlgMatcher::new(parser).is_error();
    let begin = Instant::now();
    let pending = compiler.compile(&Grammar::JsonSchema(case.schema.into()));
    let start = pending.wait();
    let mut outcome = Outcome {
        name: case.name,
        group: case.group,
        alone,
        error: None,
        relaxed: Vec::new(),
        compile_ms: begin.elapsed().max(Duration::from_micros(1)).as_secs_f64() * 1e3,
        valid: Vec::new(),
        invalid: Vec::new(),
    };
    if let Progress::Ready(ready) = pending.progress() {
        outcome.relaxed = ready.relaxed().to_vec();
    }
    match start {
        Ok(start) => {
            let allowed =
                |texts: &[String]| texts.iter().map(|text| allows(&start, text)).collect();
            outcome.valid = allowed(&case.valid);
            outcome.invalid = allowed(&case.invalid);
        }
        Err(error) => outcome.error = Some(error.to_string()),
    }
    outcome
}

fn allows(start: &Matcher, text: &str) -> bool {
    let mut matcher = start.clone();
    let tokens = text.bytes().map(u32::from).chain([END]);
    tokens
        .into_iter()
        .all(|token| matcher.accept_token(token).is_ok())
}
