//! GBNF, the EBNF of llama.cpp and xgrammar, as a Lark grammar.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Most rules of a chain in which each refers to the next, and none leads back.
const CHAIN: usize = 200;
/// Most groups in each other.
const DEPTH: usize = 100;

/// One piece of a rule, already in Lark's spelling except for names.
#[derive(Debug)]
enum Piece {
    Text(String),
    /// A rule, and how often it comes.
    Name(String, String),
}

type Rules = Vec<(String, Vec<Piece>)>;

/// Translates a grammar whose first text is the rule `root`.
///
/// A rule that refers to no rule that leads back to it is one lexeme, as Lark's terminals are: so its characters may be split over
/// tokens, and are matched as one regular expression.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let rules = Reader::new(text).rules()?;
    check(&rules)?;
    let recursive = recursive(&rules)?;
    let mut lark = String::new();
    let name = |name: &str| {
        let plain = name.replace('-', "_");
        if recursive.contains(name) {
            format!("r_{}", plain.to_lowercase())
        } else {
            format!("T_{}", plain.to_uppercase())
        }
    };
    let mut add = |line: String| writeln!(lark, "{line}").map_err(|error| error.to_string());
    add(format!("start: {}", name("root")))?;
    let mut seen = BTreeMap::new();
    for (rule, pieces) in &rules {
        let own = name(rule);
        if let Some(other) = seen.insert(own.clone(), rule) {
            return Err(format!(
                "`{other}` and `{rule}` differ only in letters' case: rename one"
            ));
        }
        let body: Vec<String> = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Text(text) => text.clone(),
                Piece::Name(other, mark) => name(other) + mark,
            })
            .collect();
        add(format!("{own}: {}", body.join(" ")))?;
    }
    Ok(lark)
}

fn check(rules: &Rules) -> Result<(), String> {
    let known: BTreeSet<&str> = rules.iter().map(|(name, _)| name.as_str()).collect();
    if known.len() < rules.len() {
        return Err("a rule is there twice".to_owned());
    }
    if !known.contains("root") {
        return Err("there is no rule `root`, with which a text begins".to_owned());
    }
    for (rule, pieces) in rules {
        for piece in pieces {
            if let Piece::Name(name, _) = piece
                && !known.contains(name.as_str())
            {
                return Err(format!("`{rule}` has `{name}`, which is not a rule"));
            }
        }
    }
    Ok(())
}

/// The rules that lead back to themselves, or refer to such a rule. All others are counted from the ones without references on
/// (Kahn's algorithm), so that the length of their chains is known, too.
fn recursive(rules: &Rules) -> Result<BTreeSet<String>, String> {
    let numbers: BTreeMap<&str, usize> = (0..)
        .zip(rules)
        .map(|(at, (name, _))| (name.as_str(), at))
        .collect();
    let mut users = vec![Vec::new(); rules.len()];
    let mut open = vec![0_usize; rules.len()];
    for (at, (_, pieces)) in rules.iter().enumerate() {
        for piece in pieces {
            if let Piece::Name(name, _) = piece {
                users[numbers[name.as_str()]].push(at);
                open[at] += 1;
            }
        }
    }
    let mut lengths = vec![1_usize; rules.len()];
    let mut done: Vec<usize> = (0..rules.len()).filter(|&at| open[at] == 0).collect();
    while let Some(at) = done.pop() {
        for &user in &users[at] {
            lengths[user] = lengths[user].max(lengths[at] + 1);
            open[user] -= 1;
            if open[user] == 0 {
                done.push(user);
            }
        }
    }
    let longest = lengths.iter().max().copied().unwrap_or(0);
    if longest > CHAIN {
        return Err(format!(
            "{longest} rules refer to each other in a chain, {CHAIN} is the most: write some of them in place"
        ));
    }
    let names = rules.iter().zip(open).filter(|(_, open)| *open > 0);
    Ok(names.map(|((name, _), _)| name.clone()).collect())
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let found = self.peek()?;
        self.at += found.len_utf8();
        Some(found)
    }

    fn wrong<T>(&self, what: &str) -> Result<T, String> {
        let line = 1 + self.text[..self.at].matches('\n').count();
        let near: String = self.rest().chars().take(20).collect();
        Err(format!("line {line}: {what} at {near:?}"))
    }

    /// Over blanks and comments.
    fn skip(&mut self) {
        while let Some(found) = self.peek() {
            if found == '#' {
                let rest = self.rest();
                self.at += rest.find('\n').unwrap_or(rest.len());
            } else if found.is_whitespace() {
                self.at += found.len_utf8();
            } else {
                return;
            }
        }
    }

    fn rules(mut self) -> Result<Rules, String> {
        let mut rules = Vec::new();
        self.skip();
        while self.peek().is_some() {
            let Some(name) = self.head() else {
                return self.wrong("a rule `name ::= …` should be here");
            };
            let mut pieces = Vec::new();
            self.alternatives(&mut pieces, 0)?;
            rules.push((name, pieces));
            self.skip();
        }
        Ok(rules)
    }

    /// The name and `::=` of a rule; nothing is read where there is none.
    fn head(&mut self) -> Option<String> {
        let start = self.at;
        let name = self.name();
        self.skip();
        if name.is_empty() || !self.rest().starts_with("::=") {
            self.at = start;
            return None;
        }
        self.at += 3;
        Some(name)
    }

    fn name(&mut self) -> String {
        let start = self.at;
        while self.peek().is_some_and(is_word) {
            self.next();
        }
        self.text[start..self.at].to_owned()
    }

    /// Reads up to the next rule, or the end of a group.
    fn alternatives(&mut self, pieces: &mut Vec<Piece>, depth: usize) -> Result<(), String> {
        if depth > DEPTH {
            return self.wrong(&format!(
                "groups are nested deeper than {DEPTH}: write some of them as rules"
            ));
        }
        let mut empty = true;
        loop {
            self.skip();
            match self.peek() {
                None | Some(')') => break,
                Some('|') => {
                    self.next();
                    if empty {
                        pieces.push(Piece::Text("\"\"".to_owned()));
                    }
                    pieces.push(Piece::Text("|".to_owned()));
                    empty = true;
                    continue;
                }
                Some(_) if depth == 0 && self.at_head() => break,
                Some(_) => {}
            }
            self.item(pieces, depth)?;
            empty = false;
        }
        if empty {
            pieces.push(Piece::Text("\"\"".to_owned()));
        }
        if depth == 0 && self.peek() == Some(')') {
            return self.wrong("a group ends that did not begin");
        }
        Ok(())
    }

    fn at_head(&mut self) -> bool {
        let start = self.at;
        let found = self.head().is_some();
        self.at = start;
        found
    }

    fn item(&mut self, pieces: &mut Vec<Piece>, depth: usize) -> Result<(), String> {
        match self.peek() {
            Some('"') => pieces.push(Piece::Text(self.literal()?)),
            Some('[') => pieces.push(Piece::Text(self.class()?)),
            Some('.') => {
                self.next();
                pieces.push(Piece::Text("/(.|\\n)/".to_owned()));
            }
            Some('(') => {
                self.next();
                pieces.push(Piece::Text("(".to_owned()));
                self.alternatives(pieces, depth + 1)?;
                if self.next() != Some(')') {
                    return self.wrong("`)` is missing");
                }
                pieces.push(Piece::Text(")".to_owned()));
            }
            Some(found) if is_word(found) => pieces.push(Piece::Name(self.name(), String::new())),
            _ => return self.wrong("a text, a class, a group or a name should be here"),
        }
        self.repetition(pieces)
    }

    fn repetition(&mut self, pieces: &mut [Piece]) -> Result<(), String> {
        let mark = match self.peek() {
            Some(mark @ ('*' | '+' | '?')) => {
                self.next();
                mark.to_string()
            }
            Some('{') => {
                let Some(end) = self.rest().find('}') else {
                    return self.wrong("`}` is missing");
                };
                let inside: String = self.rest()[1..end].split_whitespace().collect();
                let numbers = inside.split(',');
                let digits = |part: &str| part.chars().all(|digit| digit.is_ascii_digit());
                if inside.is_empty() || inside == "," || !numbers.clone().all(digits) {
                    return self.wrong("repetitions are `{n}`, `{n,}`, `{,m}` or `{n,m}`");
                }
                self.at += end + 1;
                format!("{{{inside}}}")
            }
            _ => return Ok(()),
        };
        if let Some(Piece::Text(last) | Piece::Name(_, last)) = pieces.last_mut() {
            last.push_str(&mark);
        }
        Ok(())
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => break,
                Some('\\') => text.push(self.escape()?),
                Some('\n') | None => return self.wrong("`\"` is missing"),
                Some(other) => text.push(other),
            }
        }
        Ok(serde_json::Value::from(text).to_string())
    }

    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut class = String::from("/[");
        if self.peek() == Some('^') {
            self.next();
            class.push('^');
        }
        loop {
            match self.next() {
                Some(']') => break,
                Some('-') => class.push('-'),
                Some('\\') => {
                    let found = self.escape()?;
                    push_escaped(&mut class, found);
                }
                Some('\n') | None => return self.wrong("`]` is missing"),
                Some(other) => push_escaped(&mut class, other),
            }
        }
        class.push_str("]/");
        Ok(class)
    }

    /// The character after a backslash.
    fn escape(&mut self) -> Result<char, String> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(same @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/')) => return Ok(same),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return self.wrong("an unknown escape ends"),
        };
        let code = self.rest().get(..digits).unwrap_or_default();
        let number = u32::from_str_radix(code, 16).ok();
        match number.and_then(char::from_u32) {
            Some(found) if code.len() == digits => {
                self.at += digits;
                Ok(found)
            }
            _ => self.wrong("an escape without its hexadecimal digits"),
        }
    }
}

/// A character of a class, by its number where it could mean something.
fn push_escaped(class: &mut String, found: char) {
    if found.is_alphanumeric() {
        class.push(found);
    } else {
        // Writing to a text cannot fail.
        let _ = write!(class, "\\x{{{:x}}}", found as u32);
    }
}

fn is_word(found: char) -> bool {
    found.is_ascii_alphanumeric() || found == '-' || found == '_'
}
