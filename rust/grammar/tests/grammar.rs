//! What may come next, held against validators and against a matcher that starts anew.

#[path = "grammar/formats.rs"]
mod formats;

use std::num::NonZeroUsize;
use std::time::Duration;

use pie_grammar::{
    AsyncMatcher, Compiler, Grammar, GrammarError, Limits, Matcher, NextMask, Progress, Vocabulary,
};
use proptest::prelude::*;

/// Bytes, and some longer words.
fn words() -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for word in [
        "{\"", "\":", "\": ", "\", \"", "\"}", "true", "false", "null", "name", "age", "12", "0.5",
        "é", "  ", "a,", "]}", "<tool>", "ab", "abc", "==",
    ] {
        tokens.push(word.as_bytes().to_vec());
    }
    tokens
}

/// With two tokens that end a text.
fn vocabulary() -> Vocabulary {
    let mut tokens = words();
    tokens.extend([Vec::new(), Vec::new()]);
    let end = tokens.len() as u32 - 1;
    Vocabulary::new(&tokens, &[], &[end, end - 1]).unwrap()
}

fn compiler() -> Compiler {
    let limits = Limits {
        threads: NonZeroUsize::MIN,
        ..Limits::default()
    };
    Compiler::new(vocabulary(), limits).unwrap()
}

fn mask(matcher: &mut Matcher) -> Vec<u32> {
    let mut mask = vec![0; matcher.vocabulary().mask_words()];
    matcher.fill_bitmask(&mut mask).unwrap();
    mask
}

fn allowed(mask: &[u32]) -> Vec<u32> {
    let bits = 0..mask.len() as u32 * 32;
    bits.filter(|bit| mask[*bit as usize / 32] >> (bit % 32) & 1 == 1)
        .collect()
}

/// Samples allowed tokens, ends where it may once it is long, and returns the text; `None` where it has become too long.
fn walk(matcher: &mut Matcher, random: &mut fastrand::Rng) -> Option<Vec<u8>> {
    let words = words();
    let ends = matcher.vocabulary().ends().to_vec();
    let mut text = Vec::new();
    for step in 0..600 {
        let tokens = allowed(&mask(matcher));
        assert!(
            !tokens.is_empty(),
            "no way on after {:?}",
            String::from_utf8_lossy(&text)
        );
        let end = tokens.iter().find(|token| ends.contains(token));
        // What closes a text is preferred, or it grows for ever.
        let closing = |token: &&u32| {
            matches!(
                words.get(**token as usize).map(Vec::as_slice),
                Some(b"\"" | b"}" | b"]" | b"\"}" | b"]}")
            )
        };
        let closing: Vec<u32> = tokens.iter().filter(closing).copied().collect();
        let token = match end {
            Some(&end) if step > 10 || random.bool() => end,
            _ if !closing.is_empty() && random.u32(0..10) < 6 => {
                closing[random.usize(..closing.len())]
            }
            _ => tokens[random.usize(..tokens.len())],
        };
        matcher.accept_token(token).unwrap();
        if ends.contains(&token) {
            assert!(matcher.has_ended() && matcher.is_accepting().unwrap());
            return Some(text);
        }
        text.extend_from_slice(&words[token as usize]);
    }
    None
}

const SCHEMAS: [&str; 10] = [
    r#"{"type": "object"}"#,
    r#"{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": false}"#,
    r#"{"type": "array", "items": {"type": "number", "minimum": -2, "maximum": 7.5}, "minItems": 1, "maxItems": 4}"#,
    r#"{"enum": ["red", "green", {"blue": [1, 2]}, null]}"#,
    r#"{"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]}"#,
    r#"{"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$"}"#,
    r##"{"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "integer"}}, "required": ["value"], "additionalProperties": false}}, "$ref": "#/$defs/tree"}"##,
    r#"{"type": "object", "properties": {"kind": {"const": "point"}, "at": {"type": "array", "prefixItems": [{"type": "integer", "maximum": 99}, {"type": "boolean"}], "items": false, "minItems": 2}}, "required": ["kind", "at"], "additionalProperties": false}"#,
    r#"{"type": "string", "format": "date"}"#,
    r#"{"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}"#,
];

#[test]
fn texts_by_masks_fit_their_schema() {
    let compiler = compiler();
    let mut random = fastrand::Rng::with_seed(1);
    for schema in SCHEMAS {
        let validator = jsonschema::validator_for(&serde_json::from_str(schema).unwrap()).unwrap();
        let matcher = compiler
            .compile(&Grammar::JsonSchema(schema.into()))
            .wait()
            .unwrap();
        let mut whole = 0;
        for _ in 0..30 {
            let Some(text) = walk(&mut matcher.clone(), &mut random) else {
                continue;
            };
            let value = serde_json::from_slice(&text);
            let value: serde_json::Value = value.unwrap_or_else(|error| {
                panic!("{schema}: {error}: {}", String::from_utf8_lossy(&text))
            });
            assert!(validator.is_valid(&value), "{schema}: {value}");
            whole += 1;
        }
        assert!(whole >= 15, "{schema}: {whole} of 30 walks came to an end");
    }
}

#[test]
fn texts_by_masks_match_their_regex() {
    let compiler = compiler();
    let mut random = fastrand::Rng::with_seed(2);
    for regex in [
        "(ab|abc)*==",
        "[a-f]{3}-(12|0\\.5)+",
        "é+ (true|false)?",
        "a.c",
    ] {
        let whole = regex::bytes::Regex::new(&format!("(?s-u:^)(?:{regex})$")).unwrap();
        let matcher = compiler
            .compile(&Grammar::Regex(regex.into()))
            .wait()
            .unwrap();
        for _ in 0..20 {
            if let Some(text) = walk(&mut matcher.clone(), &mut random) {
                assert!(
                    whole.is_match(&text),
                    "{regex}: {:?}",
                    String::from_utf8_lossy(&text)
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A matcher that goes back and on is where one is that starts anew with the same tokens; a clone does not move.
    #[test]
    fn rollback_is_as_starting_anew(
        schema in 0..SCHEMAS.len(),
        seed: u64,
        steps in prop::collection::vec((1_usize..6, 0_usize..5), 1..8),
    ) {
        let compiler = compiler();
        let start = compiler.compile(&Grammar::JsonSchema(SCHEMAS[schema].into())).wait().unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut matcher, mut tokens) = (start.clone(), Vec::new());
        for (forward, back) in steps {
            for _ in 0..forward {
                if matcher.has_ended() {
                    break;
                }
                let tokens_now = allowed(&mask(&mut matcher));
                let token = tokens_now[random.usize(..tokens_now.len())];
                matcher.accept_token(token).unwrap();
                tokens.push(token);
            }
            let kept = matcher.clone();
            let back = back.min(tokens.len());
            matcher.rollback(back).unwrap();
            let before = tokens.clone();
            tokens.truncate(tokens.len() - back);
            for (mut matcher, tokens) in [(matcher.clone(), &tokens), (kept, &before)] {
                let mut anew = start.clone();
                for &token in tokens {
                    anew.accept_token(token).unwrap();
                }
                prop_assert_eq!(mask(&mut matcher), mask(&mut anew));
                prop_assert_eq!(matcher.is_accepting(), anew.is_accepting());
                prop_assert_eq!(matcher.is_stopped(), anew.is_stopped());
            }
        }
        let beyond = tokens.len() + 1;
        let refused = matches!(matcher.rollback(beyond), Err(GrammarError::Rollback { .. }));
        prop_assert!(refused);
    }

    /// A follower gives the masks of a matcher, whether its threads were faster or not, and jumps where one token is left.
    #[test]
    fn a_follower_is_a_matcher_that_works_ahead(schema in 0..SCHEMAS.len(), seed: u64, jumps: bool) {
        let compiler = compiler();
        let pending = compiler.compile(&Grammar::JsonSchema(SCHEMAS[schema].into()));
        pending.wait().unwrap();
        let Progress::Ready(ready) = pending.progress() else { panic!("it was waited for") };
        let mut random = fastrand::Rng::with_seed(seed);
        // The later ones may get matchers of those before.
        for _ in 0..3 {
            let mut matcher = ready.matcher();
            let mut follower = AsyncMatcher::new(&compiler, &ready, jumps, 100);
            for _ in 0..40 {
                match random.u8(..3) {
                    0 => std::thread::sleep(Duration::from_micros(random.u64(..300))),
                    1 => while !follower.prepare(&mut Duration::from_micros(50)) { std::thread::yield_now() },
                    _ => {}
                }
                let NextMask { forced, mask: found } = follower.next_mask().unwrap();
                for &token in forced {
                    prop_assert_eq!(allowed(&mask(&mut matcher)), vec![token]);
                    matcher.accept_token(token).unwrap();
                }
                prop_assert_eq!(&*found, &mask(&mut matcher));
                let tokens = allowed(&found);
                let token = tokens[random.usize(..tokens.len())];
                matcher.accept_token(token).unwrap();
                if follower.accept_tokens(&[token], 100) {
                    prop_assert!(matcher.has_ended());
                    break;
                }
            }
        }
    }
}

#[test]
fn a_wrong_grammar_fails_by_itself_and_says_why() {
    let compiler = compiler();
    for (grammar, reason) in [
        (Grammar::JsonSchema("{".into()), "it is not JSON"),
        (Grammar::JsonSchema(r#"{"type": "strange"}"#.into()), "strange"),
        (Grammar::Regex("(".into()), "regular expression is wrong"),
        (Grammar::Lark("start: missing".into()), "missing"),
        (Grammar::Ebnf("root ::= other".into()), "`other`, which is not a rule"),
        (Grammar::Ebnf("rot ::= \"a\"".into()), "no rule `root`"),
        (Grammar::Ebnf("root ::= \"a".into()), "line 1: `\"` is missing"),
        (Grammar::StructuralTag("[]".into()), "`triggers` is missing"),
        (
            Grammar::StructuralTag(r#"{"triggers": ["<a"], "structures": [{"begin": "<b>", "schema": {}, "end": ""}]}"#.into()),
            "no trigger is how \"<b>\" begins",
        ),
    ] {
        let error = compiler.compile(&grammar).wait().unwrap_err();
        assert!(matches!(*error, GrammarError::Wrong { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.to_string().len() < 600, "{error}");
        // The next one is not the worse for it.
        compiler.compile(&Grammar::JsonObject).wait().unwrap();
    }
}

/// A grammar that takes a while to compile.
fn large(number: usize) -> Grammar {
    let property = |at: usize| format!("\"p{number}_{at}\": {{\"enum\": [{at}, \"x{at}\"]}}");
    let properties: Vec<String> = (0..400).map(property).collect();
    Grammar::JsonSchema(format!("{{\"properties\": {{{}}}}}", properties.join(",")).into())
}

#[test]
fn what_nothing_waits_for_is_not_compiled() {
    let limits = Limits {
        threads: NonZeroUsize::MIN,
        ..Limits::default()
    };
    let compiler = Compiler::new(vocabulary(), limits).unwrap();
    let first = std::time::Instant::now();
    compiler.compile(&large(0)).wait().unwrap();
    let one = first.elapsed();
    let kept: Vec<_> = (1..60)
        .map(|number| compiler.compile(&large(number)))
        .collect();
    drop(kept);
    let then = std::time::Instant::now();
    compiler
        .compile(&Grammar::Regex("a".into()))
        .wait()
        .unwrap();
    // At most the one that had begun comes first, and not all of them.
    assert!(
        then.elapsed() < 30 * one,
        "{:?} after {one:?}",
        then.elapsed()
    );
    compiler.compile(&large(30)).wait().unwrap();
}

#[test]
fn limits_are_errors_that_name_them() {
    let limits = Limits {
        threads: NonZeroUsize::MIN,
        bytes: 10,
        time: Duration::ZERO,
        ..Limits::default()
    };
    let compiler = Compiler::new(vocabulary(), limits).unwrap();
    let long = compiler
        .compile(&Grammar::Regex("abcdefghijk".into()))
        .wait()
        .unwrap_err();
    assert_eq!(
        long.to_string(),
        "the regular expression has 11 bytes, 10 is the most: shorten it"
    );
    let slow = compiler
        .compile(&Grammar::Regex("abc".into()))
        .wait()
        .unwrap_err();
    assert_eq!(
        slow.to_string(),
        "the regular expression was not compiled within 0 s: simplify it"
    );
    assert!(matches!(
        Vocabulary::new(&[b"a"], &[], &[]),
        Err(GrammarError::NoEnd)
    ));
    assert!(matches!(
        Vocabulary::new(&[b"a"], &[], &[1]),
        Err(GrammarError::Token { token: 1, size: 1 })
    ));
}

#[test]
fn grammars_are_compiled_once_and_the_oldest_gives_way() {
    let limits = Limits {
        threads: NonZeroUsize::MIN,
        kept: NonZeroUsize::MIN.saturating_add(1),
        ..Limits::default()
    };
    let compiler = Compiler::new(vocabulary(), limits).unwrap();
    let ready = |text: &str| {
        let pending = compiler.compile(&Grammar::Regex(text.into()));
        pending.wait().unwrap();
        match pending.progress() {
            Progress::Ready(ready) => std::sync::Arc::as_ptr(&ready) as usize,
            other => panic!("{other:?}"),
        }
    };
    let first = compiler.compile(&Grammar::Regex("a".into()));
    first.wait().unwrap();
    let kept = ready("a");
    assert_eq!(kept, ready("a"));
    ready("b");
    ready("c");
    assert_ne!(kept, ready("a"));
    drop(first);
}

#[test]
fn an_end_is_taken_back_like_any_token() {
    let mut matcher = compiler()
        .compile(&Grammar::Regex("ab?".into()))
        .wait()
        .unwrap();
    let end = matcher.vocabulary().ends()[1];
    assert!(matches!(
        matcher.accept_token(end),
        Err(GrammarError::Forbidden { .. })
    ));
    matcher.accept_token(b'a'.into()).unwrap();
    let before = mask(&mut matcher);
    matcher.accept_token(end).unwrap();
    assert!(matcher.has_ended() && matcher.is_stopped());
    assert_eq!(allowed(&mask(&mut matcher)).len(), 2);
    assert!(matches!(
        matcher.accept_token(b'b'.into()),
        Err(GrammarError::Forbidden { .. })
    ));
    matcher.rollback(1).unwrap();
    assert_eq!(mask(&mut matcher), before);
    matcher.accept_token(b'b'.into()).unwrap();
    assert!(matcher.is_stopped() && !matcher.has_ended());
    let mut ends = matcher.vocabulary().ends().to_vec();
    ends.sort_unstable();
    assert_eq!(allowed(&mask(&mut matcher)), ends);
}
