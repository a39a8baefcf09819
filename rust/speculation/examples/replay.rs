//! Plays a text as the output of a model that verifies drafts: `replay [FILE]`, or this crate's README.
//!
//! The words of the text are the tokens. The first tenth is the prompt; the rest comes in steps of one token and those
//! drafts that are right.

use std::collections::HashMap;
use std::error::Error;
use std::io::{Write, stdout};
use std::{env, fs};

use pie_speculation::{Config, Drafter, Drafts, Step};

const DRAFTS: usize = 4;

/// Numbers the words of a text, and the gaps between them, by their first occurrence.
fn tokens(text: &str) -> Vec<u32> {
    let mut ids = HashMap::new();
    let words = text.split_inclusive(|letter: char| !letter.is_alphanumeric());
    words
        .map(|word| {
            let next = ids.len() as u32;
            *ids.entry(word).or_insert(next)
        })
        .collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let text = match env::args().nth(1) {
        Some(path) => fs::read_to_string(path)?,
        None => include_str!("../README.md").to_owned(),
    };
    let tokens = tokens(&text);
    let mut drafter = Drafter::new(Config::default())?;
    let mut drafts = Drafts::default();
    let (mut known, mut end) = (0, (tokens.len() / 10).max(1).min(tokens.len()));
    let (mut steps, mut drafted, mut accepted) = (0, 0, 0);
    while end < tokens.len() {
        let step = Step {
            context: 1,
            position: known as u32,
            tokens: &tokens[known..end],
            drafts: DRAFTS,
        };
        drafter.step(&[step], &mut drafts);
        let found = drafts.tokens(0);
        let right = found.iter().zip(&tokens[end..]);
        let right = right.take_while(|(draft, token)| draft == token).count();
        // The model's own token follows the drafts that it accepted.
        (known, end) = (end, (end + right + 1).min(tokens.len()));
        (steps, drafted, accepted) = (steps + 1, drafted + found.len(), accepted + right);
    }
    let mut out = stdout().lock();
    writeln!(out, "{} tokens in {steps} steps", tokens.len())?;
    writeln!(out, "{accepted} of {drafted} drafts accepted")?;
    writeln!(out, "{} bytes in the drafter", drafter.bytes())?;
    Ok(())
}
