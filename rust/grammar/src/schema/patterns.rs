//! Regular expressions that llguidance reads.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;

/// Cost of a comparison of two expressions, as llguidance has it.
const FUEL: u64 = 10_000;

fn searched(pattern: &str) -> RegexAst {
    RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))
}

/// Whether llguidance reads it.
pub(super) fn is_read(pattern: &str) -> bool {
    RegexBuilder::new().mk(&searched(pattern)).is_ok()
}

/// Whether no text is matched by both; `false` where that is too costly to find out.
pub(super) fn are_disjoint(first: &str, second: &str) -> bool {
    let both = RegexAst::And(vec![searched(first), searched(second)]);
    let mut builder = RegexBuilder::new();
    let regex = builder
        .mk(&both)
        .and_then(|both| builder.to_regex_limited(both, FUEL));
    regex.is_ok_and(|mut regex| regex.always_empty())
}

/// Whether the text is matched.
pub(super) fn is_match(pattern: &str, text: &str) -> bool {
    let mut builder = RegexBuilder::new();
    let regex = builder
        .mk(&searched(pattern))
        .and_then(|it| builder.to_regex_limited(it, FUEL));
    regex.is_ok_and(|mut regex| regex.is_match(text))
}

/// An expression that matches texts of `least` to `most` characters.
pub(super) fn of_length(least: u64, most: Option<u64>) -> String {
    let most = most.map_or(String::new(), |most| most.to_string());
    format!("^(?s:.{{{least},{most}}})$")
}

/// An expression that matches all texts but those given.
pub(super) fn other_than(texts: &[&str]) -> String {
    let texts: Vec<Vec<char>> = texts.iter().map(|text| text.chars().collect()).collect();
    let texts: Vec<&[char]> = texts.iter().map(Vec::as_slice).collect();
    format!("^(?s:{})$", rest_other_than(&texts))
}

fn rest_other_than(texts: &[&[char]]) -> String {
    let mut firsts: Vec<char> = texts
        .iter()
        .filter_map(|text| text.first().copied())
        .collect();
    firsts.sort_unstable();
    firsts.dedup();
    let mut options = Vec::new();
    if !texts.iter().any(|text| text.is_empty()) {
        options.push(String::new());
    }
    let escaped = |first: char| format!("\\x{{{:x}}}", u32::from(first));
    for &first in &firsts {
        let rests: Vec<&[char]> = texts
            .iter()
            .filter(|text| text.first() == Some(&first))
            .map(|text| &text[1..])
            .collect();
        options.push(format!("{}(?:{})", escaped(first), rest_other_than(&rests)));
    }
    let others: String = firsts.into_iter().map(escaped).collect();
    options.push(if others.is_empty() {
        "..*".to_owned()
    } else {
        format!("[^{others}].*")
    });
    options.join("|")
}
