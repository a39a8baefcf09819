//! Patterns as PEFT writes them, as Python reads them, and as an attacker would.

use std::time::{Duration, Instant};

use pie_grammar::patterns::{
    LayerPatterns, MOST_BYTES, MOST_NAME_BYTES, MOST_PATTERNS, PatternError,
};

const Q3: &str = "model.layers.3.self_attn.q_proj";

fn first(patterns: &[&str], name: &str) -> Option<usize> {
    LayerPatterns::new(patterns).unwrap().first(name).unwrap()
}

#[test]
fn patterns_match_ends_of_names_at_a_dot() {
    for (pattern, matches) in [
        ("q_proj", true),
        ("self_attn.q_proj", true),
        (Q3, true),
        ("^model.layers.3.self_attn.q_proj", true),
        (".*q_proj", true),
        ("q_proj|v_proj", true),
        ("layers.[0-5].*", true),
        (r"layers\.\d+\..*_proj", true),
        ("proj", false),
        ("q_pro", false),
        ("^layers.3.self_attn.q_proj", false),
        ("layers.3", false),
        ("", false),
    ] {
        assert_eq!(first(&[pattern], Q3).is_some(), matches, "{pattern}");
    }
}

#[test]
fn the_first_pattern_that_matches_counts() {
    let patterns = ["v_proj", "layers.3.*", "q_proj", ".*"];
    assert_eq!(first(&patterns, Q3), Some(1));
    assert_eq!(first(&patterns, "model.layers.4.self_attn.q_proj"), Some(2));
    assert_eq!(first(&patterns, "lm_head"), Some(3));
    assert_eq!(first(&[], Q3), None);
}

/// Python reads them in another way, or they have no automaton.
#[test]
fn what_is_not_taken_says_why() {
    for (pattern, reason) in [
        ("(", "unclosed group"),
        ("a)|(b", "unopened group"),
        ("(?=q)q_proj", "look-around"),
        ("(?!q)v_proj", "look-around"),
        (r"(q)\1", "backreferences"),
        ("(?i)Q_PROJ", "flags"),
        ("(?i:Q_PROJ)", "flags"),
        ("(?>q)_proj", "unrecognized flag"),
        ("q*+_proj", "repetition of a repetition"),
        ("[[a]b]", "class within a class"),
        ("[[:alpha:]]+", "class within a class"),
        ("[a-z&&[^q]]", "class within a class"),
        ("[a-z--q]", "operation on classes"),
        ("[]a]", "begins with `]`"),
        ("[--a]", "begins with `]` or `--`"),
        (r"\<q_proj", "word boundary"),
        (r"q_proj\Z", "unrecognized escape"),
        ("[\u{e9}]", "Unicode"),
    ] {
        let error = LayerPatterns::new(&[pattern]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, PatternError::Syntax { .. }), "{text}");
        assert!(text.contains(reason), "{pattern}: {text}");
    }
}

#[test]
fn everything_is_bounded() {
    let count = MOST_PATTERNS + 1;
    let error = LayerPatterns::new(&vec!["a"; count]).unwrap_err();
    assert_eq!(error, PatternError::Count { count });
    let long = "a".repeat(MOST_BYTES + 1);
    let error = LayerPatterns::new(&[&long]).unwrap_err();
    assert!(matches!(error, PatternError::Length { bytes, .. } if bytes == long.len()));
    let error = LayerPatterns::new(&["((a{1000}){1000}){1000}"]).unwrap_err();
    assert_eq!(error, PatternError::Size);
    let deep = "(".repeat(100) + &")".repeat(100);
    let error = LayerPatterns::new(&[&deep]).unwrap_err();
    assert!(matches!(error, PatternError::Syntax { .. }));
    let bytes = MOST_NAME_BYTES + 1;
    let error = LayerPatterns::new(&["a"]).unwrap();
    let error = error.first(&"a".repeat(bytes)).unwrap_err();
    assert_eq!(error, PatternError::Name { bytes });
}

/// EVA writes a rank for every layer; the largest open model has 126 blocks of seven.
#[test]
fn every_layer_of_a_large_model_may_have_its_own() {
    let kinds = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];
    let names: Vec<String> = (0..126)
        .flat_map(|block| {
            kinds.map(|kind| format!("model.language_model.layers.{block}.self_attention.{kind}"))
        })
        .collect();
    let patterns = LayerPatterns::new(&names).unwrap();
    for (number, name) in names.iter().enumerate() {
        assert_eq!(patterns.first(name).unwrap(), Some(number));
    }
}

/// A backtracking engine needs longer than the universe has.
#[test]
fn no_pattern_takes_for_ever() {
    let started = Instant::now();
    let name = "model.".repeat(MOST_NAME_BYTES / 6 - 2) + "q_proj";
    for pattern in [
        "(?:.|.)*!",
        "(.*)*!",
        "(a|a?)+!",
        "(?:(?:.*.*)*.*)*!",
        "(.*.*){20}!",
    ] {
        assert_eq!(first(&[pattern], &name), None);
    }
    assert!(started.elapsed() < Duration::from_mins(1));
}
