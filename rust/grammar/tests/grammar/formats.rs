//! Formats of grammars: EBNF, structural tags, white space of JSON.

use super::*;

use pie_grammar::{Compiler, Grammar, JsonSpace, Limits, Settings, Vocabulary};

pub(crate) fn fits(compiler: &Compiler, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compiler.compile(grammar).wait().unwrap();
    text.bytes()
        .all(|byte| matcher.accept_token(byte.into()).is_ok())
        && matcher.is_accepting().unwrap()
}

#[test]
fn ebnf_takes_what_its_rules_say() {
    let compiler = compiler();
    let sums = Grammar::Ebnf(
        "# sums\nroot ::= sum \"=\" num\nsum ::= term (\"+\" term)*\nterm ::= num | \"(\" sum \")\"\nnum ::= [0-9]+ (\".\" [0-9]{1,2})?".into(),
    );
    for text in ["1=2", "1+2=3", "(1+22)+3=4.25"] {
        assert!(fits(&compiler, &sums, text), "{text}");
    }
    for text in ["", "1+=2", "(1=2", "1=2.345", "1=", "a=1"] {
        assert!(!fits(&compiler, &sums, text), "{text}");
    }
    let classes = Grammar::Ebnf("root ::= [^a-c/\\]\\n] \"\\u00e9\\n\" \"x\"{2} | two-words?\ntwo-words ::= \"ab\" | [a-z] \"c\"".into());
    for text in ["dé\nxx", "", "ab", "ac", "zc"] {
        assert!(fits(&compiler, &classes, text), "{text}");
    }
    for text in ["aé\nxx", "/é\nxx", "dé\nx", "abc"] {
        assert!(!fits(&compiler, &classes, text), "{text}");
    }
    assert!(fits(&compiler, &Grammar::Ebnf("start: \"a\"".into()), "a"));
}

#[test]
fn structural_tags_bind_what_follows_their_trigger() {
    let compiler = compiler();
    let tag = Grammar::StructuralTag(
        r#"{"triggers": ["(call"], "structures": [
            {"begin": "(call add)", "schema": {"type": "integer"}, "end": "(end)"},
            {"begin": "(call say)", "schema": {"type": "string", "maxLength": 3}, "end": "(end)"}]}"#
            .into(),
    );
    for text in [
        "",
        "free text",
        "well: (call add)12(end) done",
        "(call say)\"abc\"(end)(call add)1(end)",
    ] {
        assert!(fits(&compiler, &tag, text), "{text}");
    }
    for text in [
        "(call add)true(end)",
        "(call mul)1(end)",
        "(call say)\"abcd\"(end)",
        "(call add)1",
    ] {
        assert!(!fits(&compiler, &tag, text), "{text}");
    }
}

#[test]
fn a_text_that_needs_a_structure_begins_with_one() {
    let compiler = compiler();
    let tag = Grammar::StructuralTag(
        r#"{"triggers": ["(call"], "at_least_one": true, "structures": [
            {"begin": "(call add)", "schema": {"type": "integer"}, "end": "(end)"},
            {"begin": "(call say)", "schema": {"const": "a"}, "end": ""}]}"#
            .into(),
    );
    for text in [
        "(call add)12(end)",
        "(call say)\"a\" and (call add)1(end) so",
    ] {
        assert!(fits(&compiler, &tag, text), "{text}");
    }
    for text in ["", "so (call add)12(end)", "(call add)12"] {
        assert!(!fits(&compiler, &tag, text), "{text}");
    }
}

#[test]
fn special_tokens_of_a_structure_are_written_as_such() {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.extend([vec![], vec![], vec![]]);
    let special = [(257, "<|call|>".to_owned()), (258, "</call>".to_owned())];
    let vocabulary = Vocabulary::new(&tokens, &special, &[256]).unwrap();
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    let tag = Grammar::StructuralTag(
        r#"{"triggers": ["<|call|>"], "at_least_one": true, "structures": [
            {"begin": "<|call|>{", "schema": {"const": 1}, "end": "}\n</call>"}]}"#
            .into(),
    );
    let mut matcher = compiler.compile(&tag).wait().unwrap();
    let mut mask = vec![0; matcher.vocabulary().mask_words()];
    let mut forced = Vec::new();
    matcher
        .jump_forward_tokens(100, &mut mask, &mut forced)
        .unwrap();
    let text = b"{1}\n".iter().map(|&byte| u32::from(byte));
    let expected: Vec<u32> = [257].into_iter().chain(text).chain([258]).collect();
    assert_eq!(forced, expected);
    // Free text may follow, and another call.
    for token in [u32::from(b'x'), 257] {
        matcher.accept_token(token).unwrap();
    }
    assert!(matcher.accept_token(u32::from(b'x')).is_err());
}

#[test]
fn white_space_of_json_is_what_was_chosen() {
    let schema = Grammar::JsonSchema(r#"{"enum": [[1, 2]]}"#.into());
    let own = r#"{"x-guidance": {"whitespace_flexible": true, "whitespace_pattern": null}, "enum": [[1, 2]]}"#;
    let compiler = |fixed, pattern: Option<&str>| {
        let pattern = pattern.map(str::to_owned);
        let space = JsonSpace { fixed, pattern };
        let settings = Settings {
            space,
            ..Settings::default()
        };
        Compiler::with_settings(vocabulary(), settings).unwrap()
    };
    for (fixed, pattern, fitting, others) in [
        (false, None, &["[1,2]", "[ 1,\n2]"][..], &["[1,3]"][..]),
        (true, None, &["[1,2]"], &["[1, 2]"]),
        (
            false,
            Some(" ?"),
            &["[1,2]", "[1, 2]", "[ 1 ,2]"],
            &["[1,\n2]", "[1,  2]"],
        ),
    ] {
        let compiler = compiler(fixed, pattern);
        for text in fitting {
            assert!(fits(&compiler, &schema, text), "{text}");
        }
        for text in others {
            assert!(!fits(&compiler, &schema, text), "{text}");
        }
        // A schema may say it itself.
        assert!(fits(&compiler, &Grammar::JsonSchema(own.into()), "[1,\n2]"));
    }
    let any = Grammar::JsonSchema("$$ANY$$".into());
    assert!(fits(&compiler(false, None), &any, "[{\"a\": null}]"));
}
