//! Compiles many schemas, follows documents by each, and writes how long compiling and each mask took. Run by `benches/grammar_suite/run.py`.
//!
//! Usage: `grammar_suite VOCABULARY CASES RESULT`. A vocabulary is JSON with `tokens`, each in hexadecimal, and `ends`; a case has a
//! `name`, a `schema` and `documents`, each a list of tokens. Where it has none, tokens are sampled.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use pie_grammar::{Compiler, Grammar, GrammarError, Limits, Matcher, Vocabulary};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Tokens that are sampled where there is no document.
const SAMPLED: usize = 64;

#[derive(Deserialize)]
struct Words {
    tokens: Vec<String>,
    ends: Vec<u32>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    schema: String,
    documents: Vec<Vec<u32>>,
}

#[derive(Serialize)]
struct Outcome {
    name: String,
    error: Option<String>,
    compile_us: f64,
    mask_ns: Vec<u64>,
    /// The same by a matcher that has followed the documents before.
    warm_ns: Vec<u64>,
    commit_ns: Vec<u64>,
    /// Documents with a token that the mask does not have.
    refused: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [words, cases, result] = &arguments[..] else {
        panic!("usage: grammar_suite VOCABULARY CASES RESULT");
    };
    let words: Words = read(words);
    let cases: Vec<Case> = read(cases);
    let tokens: Vec<Vec<u8>> = words.tokens.iter().map(|word| bytes(word)).collect();
    let vocabulary = Vocabulary::new(&tokens, &[], &words.ends).expect("a vocabulary");
    let limits = Limits {
        threads: NonZeroUsize::MIN,
        kept: NonZeroUsize::MIN,
        time: Duration::from_mins(2),
        ..Limits::default()
    };
    let compiler = Compiler::new(vocabulary, limits).expect("a thread");
    // The first grammar of a compiler looks at every token.
    compiler
        .compile(&Grammar::JsonObject)
        .wait()
        .expect("any object");
    let outcomes: Vec<Outcome> = cases.into_iter().map(|case| run(&compiler, case)).collect();
    let text = serde_json::to_vec(&outcomes).expect("JSON");
    fs::write(result, text).expect("the result's file");
}

fn read<T: serde::de::DeserializeOwned>(path: &str) -> T {
    let text = fs::read(Path::new(path)).expect("a file");
    serde_json::from_slice(&text).expect("its JSON")
}

fn bytes(word: &str) -> Vec<u8> {
    let pairs = word.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.map(|pair| byte(pair).expect("hexadecimal")).collect()
}

fn run(compiler: &Compiler, case: Case) -> Outcome {
    // The thread that compiles is the only one that works.
    let begin = cpu_ns(ClockId::ProcessCPUTime);
    let grammar = compiler
        .compile(&Grammar::JsonSchema(case.schema.into()))
        .wait();
    let mut outcome = Outcome {
        name: case.name,
        error: None,
        compile_us: (cpu_ns(ClockId::ProcessCPUTime) - begin) as f64 / 1e3,
        mask_ns: Vec::new(),
        warm_ns: Vec::new(),
        commit_ns: Vec::new(),
        refused: 0,
    };
    let start = match grammar {
        Ok(start) => start,
        Err(error) => {
            outcome.error = Some(error.to_string());
            return outcome;
        }
    };
    for document in &case.documents {
        if let Err(error) = follow(&mut start.clone(), document, &mut outcome) {
            outcome.error = Some(error.to_string());
        }
    }
    let mut warm = start.clone();
    let (cold, refused) = (outcome.mask_ns.clone(), outcome.refused);
    for _ in 0..2 {
        outcome.mask_ns.clear();
        for document in &case.documents {
            let from = outcome.commit_ns.len();
            if let Err(error) = follow(&mut warm, document, &mut outcome) {
                outcome.error = Some(error.to_string());
                warm = start.clone();
                continue;
            }
            warm.rollback(outcome.commit_ns.len() - from)
                .expect("what was committed");
        }
    }
    outcome.warm_ns = std::mem::replace(&mut outcome.mask_ns, cold);
    outcome.refused = refused;
    if case.documents.is_empty()
        && let Err(error) = draw(start, &mut outcome)
    {
        outcome.error = Some(error.to_string());
    }
    outcome
}

/// Of the CPU, so that what else runs on the machine does not count.
fn cpu_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// One mask and its time.
fn mask(
    matcher: &mut Matcher,
    mask: &mut [u32],
    outcome: &mut Outcome,
) -> Result<(), GrammarError> {
    let begin = cpu_ns(ClockId::ThreadCPUTime);
    matcher.fill_bitmask(mask)?;
    outcome.mask_ns.push(cpu_ns(ClockId::ThreadCPUTime) - begin);
    Ok(())
}

fn commit(matcher: &mut Matcher, token: u32, outcome: &mut Outcome) -> Result<(), GrammarError> {
    let begin = cpu_ns(ClockId::ThreadCPUTime);
    matcher.accept_token(token)?;
    outcome
        .commit_ns
        .push(cpu_ns(ClockId::ThreadCPUTime) - begin);
    Ok(())
}

fn follow(
    matcher: &mut Matcher,
    document: &[u32],
    outcome: &mut Outcome,
) -> Result<(), GrammarError> {
    let mut words = vec![0; matcher.vocabulary().mask_words()];
    for &token in document {
        mask(matcher, &mut words, outcome)?;
        if words[token as usize / 32] >> (token % 32) & 1 == 0 {
            outcome.refused += 1;
            return Ok(());
        }
        commit(matcher, token, outcome)?;
    }
    mask(matcher, &mut words, outcome)
}

/// Follows tokens that are sampled, each of those that the mask has.
fn draw(mut matcher: Matcher, outcome: &mut Outcome) -> Result<(), GrammarError> {
    let mut words = vec![0; matcher.vocabulary().mask_words()];
    let mut state = 7_u64;
    for _ in 0..SAMPLED {
        mask(&mut matcher, &mut words, outcome)?;
        // Knuth's constants.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let bits: u32 = words.iter().map(|word| word.count_ones()).sum();
        let mut left = (state >> 33) as u32 % bits.max(1);
        let found = (0..).zip(&words).find_map(|(at, &word)| {
            let count = word.count_ones();
            if left >= count {
                left -= count;
                return None;
            }
            let bit = (0..32)
                .filter(|bit| word >> bit & 1 == 1)
                .nth(left as usize);
            bit.map(|bit| 32 * at + bit)
        });
        let Some(token) = found else { return Ok(()) };
        if matcher.vocabulary().ends().contains(&token) {
            return Ok(());
        }
        commit(&mut matcher, token, outcome)?;
    }
    Ok(())
}
