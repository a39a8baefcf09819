//! Structural tags: free text with structured parts after triggers.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::Value;

use crate::json::json_of;
use crate::schema::SchemaReader;
use crate::vocabulary::Vocabulary;

/// One structured part.
struct Tag<'a> {
    trigger: &'a str,
    begin: &'a str,
    schema: &'a Value,
    end: &'a str,
}

/// Reads `{"triggers": […], "structures": [{"begin", "schema", "end"}, …]}` and makes a grammar of it. Each structure has the first
/// trigger that its `begin` starts with. A schema is an object, or a text: JSON, or a Lark grammar. With `"at_least_one": true` the
/// text begins with a structure.
pub(crate) fn parse(
    text: &str,
    vocabulary: &Vocabulary,
    schemas: &mut SchemaReader,
) -> Result<TopLevelGrammar, String> {
    let value = json_of(text)?;
    if value.get("format").is_some() && value.get("structures").is_none() {
        return Err("`format` is not served: give `structures` and `triggers`".to_owned());
    }
    let triggers: Vec<&str> = list(&value, "triggers")?
        .iter()
        .map(|trigger| trigger.as_str().ok_or("a trigger is not a text"))
        .collect::<Result<_, _>>()?;
    let structures = list(&value, "structures")?;
    if structures.is_empty() {
        return Err("`structures` is empty: give at least one".to_owned());
    }
    let tags = structures
        .iter()
        .map(|structure| tag(structure, &triggers))
        .collect::<Result<Vec<_>, _>>()?;
    let begins = value.get("at_least_one").and_then(Value::as_bool) == Some(true);
    grammar(&tags, begins, vocabulary, schemas)
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>, String> {
    let found = value.get(name).and_then(Value::as_array);
    found.ok_or_else(|| format!("`{name}` is missing, or is not a list"))
}

fn tag<'a>(structure: &'a Value, triggers: &[&'a str]) -> Result<Tag<'a>, String> {
    let text = |name| {
        let found = structure.get(name).and_then(Value::as_str);
        found.ok_or_else(|| format!("`{name}` of a structure is missing, or is not a text"))
    };
    let begin = text("begin")?;
    let mut fitting = triggers.iter().copied();
    let trigger = fitting
        .find(|trigger| !trigger.is_empty() && begin.starts_with(trigger))
        .ok_or_else(|| format!("no trigger is how {begin:?} begins"))?;
    let schema = structure.get("schema");
    Ok(Tag {
        trigger,
        begin,
        schema: schema.ok_or("`schema` of a structure is missing")?,
        end: text("end")?,
    })
}

fn grammar(
    tags: &[Tag<'_>],
    begins: bool,
    vocabulary: &Vocabulary,
    schemas: &mut SchemaReader,
) -> Result<TopLevelGrammar, String> {
    let names: Vec<String> = (0..tags.len()).map(|tag| format!("tag_{tag}")).collect();
    let firsts: Vec<String> = names.iter().map(|name| format!("first_{name}")).collect();
    let mut lark = format!(
        "start: {}({})* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n",
        if begins {
            format!("({}) ", firsts.join(" | "))
        } else {
            String::new()
        },
        names.join(" | ")
    );
    let mut sides = Vec::new();
    for (tag, name) in tags.iter().zip(&names) {
        let body = match tag.schema {
            Value::String(text) if !text.trim_start().starts_with('{') => {
                let side = format!("{name}_body");
                sides.push(GrammarWithLexer {
                    name: Some(side.clone()),
                    lark_grammar: Some(text.clone()),
                    ..GrammarWithLexer::default()
                });
                format!("@{side}")
            }
            Value::String(text) => format!("%json {}", schemas.read(json_of(text)?)?),
            schema => format!("%json {}", schemas.read(schema.clone())?),
        };
        let (begin, end) = (&tag.begin[tag.trigger.len()..], tag.end);
        let body = format!(
            "{} {body} {}",
            spelled(begin, vocabulary),
            spelled(end, vocabulary)
        );
        let trigger = spelled(tag.trigger, vocabulary);
        let mut add = |line: String| writeln!(lark, "{line}").map_err(|error| error.to_string());
        // A special token has no text, so that it cannot be the end of one.
        if vocabulary.has_special(tag.trigger) {
            add(format!("{name}: TEXT {trigger} {name}_rest"))?;
        } else {
            let trigger = quoted(tag.trigger);
            add(format!(
                "{name}_head[lazy]: TEXT {trigger}\n{name}: {name}_head {name}_rest"
            ))?;
        }
        add(format!("{name}_rest: {body}"))?;
        if begins {
            add(format!("first_{name}: {trigger} {name}_rest"))?;
        }
    }
    let mut top = TopLevelGrammar::from_lark(lark);
    top.grammars.extend(sides);
    Ok(top)
}

/// A text as Lark writes it, with the special tokens in it by their names.
fn spelled(text: &str, vocabulary: &Vocabulary) -> String {
    let mut parts = Vec::new();
    let (mut from, mut at) = (0, 0);
    let longest = vocabulary.longest_special();
    while let Some(open) = text[at..].find('<').map(|open| at + open) {
        let mut closes = text[open..]
            .bytes()
            .take(longest)
            .enumerate()
            .filter(|(_, byte)| *byte == b'>')
            .map(|(close, _)| open + close + 1);
        match closes.find(|&close| vocabulary.has_special(&text[open..close])) {
            Some(close) => {
                parts.extend([quoted(&text[from..open]), text[open..close].to_owned()]);
                (from, at) = (close, close);
            }
            None => at = open + 1,
        }
    }
    parts.push(quoted(&text[from..]));
    parts.retain(|part| !part.is_empty());
    parts.join(" ")
}

/// A text as Lark writes it; nothing for an empty one.
fn quoted(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        Value::from(text).to_string()
    }
}
