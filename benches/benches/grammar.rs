//! Masks of grammars: one token is followed, and what may come next is computed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::report::Unit;
use pie_benches::timing::{self, Race, Samples};
use pie_grammar::{Compiler, Grammar, Limits, Matcher, Vocabulary};
use serde_json::Value;

/// Schemas, each with documents that fit it: their tokens are followed one after the other.
const SCHEMAS: [(&str, &str, &str); 4] = [
    (
        "object",
        r#"{"type": "object"}"#,
        r#"{"name": "a text with words in it", "values": [1, 2.5, null, true], "inner": {"deep": "end"}}"#,
    ),
    (
        "person",
        r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "mail": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"enum": ["new", "old", "gone"]}}}, "required": ["name", "age", "mail"], "additionalProperties": false}"#,
        r#"{"name": "Grace Brewster Hopper", "age": 85, "mail": "grace@example.org", "tags": ["old", "gone"]}"#,
    ),
    (
        "tree",
        r##"{"$defs": {"node": {"type": "object", "properties": {"value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["value"], "additionalProperties": false}}, "$ref": "#/$defs/node"}"##,
        r#"{"value": 1, "children": [{"value": 2.25}, {"value": -3, "children": [{"value": 4e3}]}]}"#,
    ),
    (
        "pattern",
        r#"{"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"}, "when": {"type": "string", "format": "date-time"}}, "required": ["id", "when"]}"#,
        r#"{"id": "ABC-20260131", "when": "2026-01-31T12:30:00Z", "more": {"any": "thing"}}"#,
    ),
];

/// Tokens of a byte-level `tokenizer.json`, by the letters that stand for bytes.
fn tokens(path: &Path) -> Vec<Vec<u8>> {
    let text = std::fs::read(path).expect("a tokenizer");
    let file: Value = serde_json::from_slice(&text).expect("a tokenizer in JSON");
    let vocab = file["model"]["vocab"].as_object().expect("a vocabulary");
    let largest = vocab.values().filter_map(Value::as_u64).max();
    // One more, which ends a text.
    let mut tokens = vec![Vec::new(); largest.expect("tokens") as usize + 2];
    for (word, number) in vocab {
        let bytes = word.chars().filter_map(byte);
        tokens[number.as_u64().expect("a number") as usize] = bytes.collect();
    }
    tokens
}

/// GPT-2's letters: printable bytes stand for themselves, others are numbered from 256.
fn byte(letter: char) -> Option<u8> {
    let is_plain = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = letter as u32;
    if code < 256 {
        return u8::try_from(code).ok().filter(is_plain);
    }
    let mut others = (0..=255).filter(|byte| !is_plain(byte));
    others.nth(code as usize - 256)
}

/// The longest token first: how a model would write it.
fn greedy(tokens: &[Vec<u8>], text: &str) -> Vec<u32> {
    let mut rest = text.as_bytes();
    let mut found = Vec::new();
    while !rest.is_empty() {
        let fits = (0..)
            .zip(tokens)
            .filter(|(_, token)| !token.is_empty() && rest.starts_with(token));
        let (number, token) = fits
            .max_by_key(|(_, token)| token.len())
            .expect("every byte is a token");
        found.push(number);
        rest = &rest[token.len()..];
    }
    found
}

struct Walk {
    start: Matcher,
    now: Matcher,
    tokens: Vec<u32>,
    at: usize,
    mask: Vec<u32>,
}

impl Walk {
    fn next(&mut self) -> Duration {
        if self.at == self.tokens.len() {
            self.now = self.start.clone();
            self.at = 0;
        }
        let begin = Instant::now();
        self.now
            .accept_token(self.tokens[self.at])
            .expect("it fits the schema");
        self.now.fill_bitmask(&mut self.mask).expect("a mask");
        let elapsed = begin.elapsed();
        self.at += 1;
        elapsed
    }
}

fn grammar(criterion: &mut Criterion) {
    let pocket = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/pocket/tokenizer.json");
    let path = std::env::var_os("PIE_TOKENIZER").map_or(pocket, PathBuf::from);
    let tokens = tokens(&path);
    let end = tokens.len() as u32 - 1;
    let vocabulary = Vocabulary::new(&tokens, &[], &[end]).expect("a vocabulary");
    let compiler = Compiler::new(vocabulary, Limits::default()).expect("threads");
    for (name, schema, document) in SCHEMAS {
        let compiled = compiler.compile(&Grammar::JsonSchema(schema.into())).wait();
        let start = compiled.expect("a schema");
        let mut walk = Walk {
            now: start.clone(),
            tokens: greedy(&tokens, document),
            at: 0,
            mask: vec![0; start.vocabulary().mask_words()],
            start,
        };
        let turn = move |operations, samples: &mut Samples| {
            let mut total = Duration::ZERO;
            for _ in 0..operations {
                let elapsed = walk.next();
                samples.record(elapsed);
                total += elapsed;
            }
            total
        };
        let row = format!("grammar/mask/{name}");
        Race::new_turns(row, Unit::Us, turn).run(criterion);
    }
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = grammar
}
criterion_main!(benches);
