//! Grammars, stop expressions and stop strings as clients write them: read or refused with one short line, in little memory.

use std::sync::LazyLock;

use arbitrary::{Arbitrary, Unstructured};
use pie_grammar::{Grammar, Vocabulary};
use pie_scheduler::{StopRegexes, StopStrings};

use crate::memory;

/// Bytes of a refusal.
const MOST_REFUSAL: usize = 1024;

#[derive(Debug, Arbitrary)]
enum Case {
    Schema(String),
    Regex(String),
    Lark(String),
    Ebnf(String),
    Rules(Vec<(u8, Vec<Item>)>),
    Tag(String),
    Tags(Vec<Tag>, Vec<String>, bool),
    StopRegexes(Vec<String>),
    StopStrings(Vec<String>),
}

/// What a GBNF rule is made of.
#[derive(Debug, Arbitrary)]
enum Item {
    Rule(u8, Mark),
    Text(String, Mark),
    Class(String, Mark),
    Group(Vec<Item>, Mark),
    Open(u8),
    Close(u8),
    Or,
    Any,
    Raw(String),
}

#[derive(Debug, Arbitrary)]
enum Mark {
    Once,
    Star,
    Plus,
    Maybe,
    Counted(u32, Option<u32>),
}

#[derive(Debug, Arbitrary)]
struct Tag {
    begin: String,
    end: String,
    lark: Option<String>,
    depth: u8,
}

impl Mark {
    fn write(&self, text: &mut String) {
        match self {
            Self::Once => {}
            Self::Star => text.push('*'),
            Self::Plus => text.push('+'),
            Self::Maybe => text.push('?'),
            Self::Counted(least, None) => text.extend(["{", &least.to_string(), ",}"]),
            Self::Counted(least, Some(most)) => {
                text.extend(["{", &least.to_string(), ",", &most.to_string(), "}"]);
            }
        }
    }
}

impl Item {
    fn write(&self, text: &mut String) {
        let mark = match self {
            Self::Rule(number, mark) => {
                text.extend(["r", &(number % 8).to_string(), " "]);
                mark
            }
            Self::Text(literal, mark) => {
                text.extend(["\"", &literal.escape_debug().to_string(), "\""]);
                mark
            }
            Self::Class(class, mark) => {
                text.extend(["[", class, "]"]);
                mark
            }
            Self::Group(items, mark) => {
                text.push('(');
                for item in items {
                    item.write(text);
                }
                text.push(')');
                mark
            }
            Self::Open(count) => return text.push_str(&"(".repeat(usize::from(*count) * 4)),
            Self::Close(count) => return text.push_str(&")".repeat(usize::from(*count) * 4)),
            Self::Or => return text.push_str(" | "),
            Self::Any => return text.push('.'),
            Self::Raw(raw) => return text.push_str(raw),
        };
        mark.write(text);
        text.push(' ');
    }
}

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    let tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let special = [(1, "<tool>".to_owned()), (2, "<|end|>".to_owned())];
    Vocabulary::new(&tokens, &special, &[0]).expect("the tokens are right")
});

/// Bytes of a [`Case`].
pub(crate) fn check(data: &[u8]) {
    let Ok(case) = Case::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    match case {
        Case::Schema(text) => grammar(&Grammar::JsonSchema(text.into())),
        Case::Regex(text) => grammar(&Grammar::Regex(text.into())),
        Case::Lark(text) => grammar(&Grammar::Lark(text.into())),
        Case::Ebnf(text) => grammar(&Grammar::Ebnf(text.into())),
        Case::Tag(text) => grammar(&Grammar::StructuralTag(text.into())),
        Case::Rules(rules) => grammar(&Grammar::Ebnf(gbnf(&rules).into())),
        Case::Tags(tags, triggers, first) => {
            let text = structural_tag(&tags, &triggers, first);
            grammar(&Grammar::StructuralTag(text.into()));
        }
        Case::StopRegexes(patterns) => {
            if let Err(error) = StopRegexes::new(&patterns) {
                check_refusal(&error.to_string());
            }
        }
        Case::StopStrings(texts) => {
            let bytes: usize = texts.iter().map(String::len).sum();
            let texts = texts.into_iter().map(String::into_bytes);
            let (made, peak) = memory::peak(|| StopStrings::new(texts));
            assert!(peak <= (1 << 16) + 256 * bytes, "{peak} bytes for {bytes}");
            if let Err(error) = made {
                check_refusal(&error.to_string());
            }
        }
    }
}

fn grammar(grammar: &Grammar) {
    // It is made once.
    LazyLock::force(&VOCABULARY);
    let (read, peak) = memory::peak(|| grammar.check(&VOCABULARY));
    let bytes = grammar.bytes();
    assert!(peak <= (1 << 16) + 512 * bytes, "{peak} bytes for {bytes}");
    if let Err(error) = read {
        check_refusal(&error.to_string());
    }
}

fn check_refusal(text: &str) {
    let line = text.split("\n\nhint: ").collect::<Vec<_>>().join(". ");
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
    assert!(line.len() <= MOST_REFUSAL, "{} bytes: {line:?}", line.len());
}

fn gbnf(rules: &[(u8, Vec<Item>)]) -> String {
    let mut text = String::from("root ::= r0\n");
    for (number, items) in rules {
        text.extend(["r", &(number % 8).to_string(), " ::= "]);
        for item in items {
            item.write(&mut text);
        }
        text.push('\n');
    }
    text
}

fn structural_tag(tags: &[Tag], triggers: &[String], first: bool) -> String {
    let tag = |tag: &Tag| {
        let schema = tag.lark.as_ref().map_or_else(
            || {
                let depth = usize::from(tag.depth);
                format!("{}{{}}{}", r#"{"items":"#.repeat(depth), "}".repeat(depth))
            },
            |lark| quoted(lark),
        );
        let (begin, end) = (quoted(&tag.begin), quoted(&tag.end));
        format!(r#"{{"begin":{begin},"schema":{schema},"end":{end}}}"#)
    };
    let tags: Vec<_> = tags.iter().map(tag).collect();
    let triggers: Vec<_> = triggers.iter().map(|text| quoted(text)).collect();
    format!(
        r#"{{"type":"structural_tag","structures":[{}],"triggers":[{}],"at_least_one":{first}}}"#,
        tags.join(","),
        triggers.join(","),
    )
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
