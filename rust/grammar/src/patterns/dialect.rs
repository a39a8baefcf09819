//! Refuses what Python's `re` and the `regex` crate read in different ways.

use regex_syntax::ast::{
    self, AssertionKind, Ast, ClassBracketed, ClassSetBinaryOp, ClassSetItem, GroupKind,
};

/// Checks that both read the pattern alike, as far as ASCII names without line breaks can tell.
///
/// # Errors
/// The reason why the pattern is refused.
pub(crate) fn check(pattern: &str, nesting: u32) -> Result<(), String> {
    let mut parser = ast::parse::ParserBuilder::new();
    let parsed = parser.nest_limit(nesting).build().parse(pattern);
    let syntax = parsed.map_err(|error| error.kind().to_string())?;
    ast::visit(&syntax, Dialect { pattern })?;
    // Classes and escapes that no bytes can have.
    let translated = regex_syntax::hir::translate::TranslatorBuilder::new()
        .unicode(false)
        .utf8(false)
        .build()
        .translate(pattern, &syntax);
    translated
        .map(drop)
        .map_err(|error| error.kind().to_string())
}

struct Dialect<'a> {
    pattern: &'a str,
}

impl Dialect<'_> {
    fn text(&self, span: &ast::Span) -> &str {
        &self.pattern[span.start.offset..span.end.offset]
    }

    /// The construct of a node that only one of the two dialects has, or that they read differently.
    fn foreign(&self, node: &Ast) -> Option<&'static str> {
        match node {
            Ast::Flags(_) => Some("flags within a pattern are not taken"),
            Ast::Group(group) => match &group.kind {
                GroupKind::NonCapturing(flags) if !flags.items.is_empty() => {
                    Some("flags within a pattern are not taken")
                }
                _ => None,
            },
            Ast::Repetition(outer) => {
                // Python's `a*+` is possessive, here it repeats twice.
                let twice = matches!(*outer.ast, Ast::Repetition(_));
                let spaced = self.text(&outer.op.span).contains(char::is_whitespace);
                (twice || spaced).then_some("a repetition of a repetition is not taken")
            }
            Ast::Assertion(assertion) => match assertion.kind {
                AssertionKind::StartLine
                | AssertionKind::EndLine
                | AssertionKind::StartText
                | AssertionKind::EndText
                | AssertionKind::WordBoundary
                | AssertionKind::NotWordBoundary => None,
                _ => Some("the word boundary that it names is not Python's"),
            },
            Ast::ClassBracketed(class) => self.foreign_class(class),
            _ => None,
        }
    }

    fn foreign_class(&self, class: &ClassBracketed) -> Option<&'static str> {
        let text = self.text(&class.span);
        let inside = text.trim_start_matches('[').trim_start_matches('^');
        let unclear = inside.starts_with(']') || inside.starts_with("--");
        unclear.then_some("a class that begins with `]` or `--` is not taken")
    }
}

const NESTED: &str = "a class within a class, or an operation on classes, is not taken";

impl ast::Visitor for Dialect<'_> {
    type Output = ();
    type Err = String;

    fn finish(self) -> Result<(), String> {
        Ok(())
    }

    fn visit_pre(&mut self, node: &Ast) -> Result<(), String> {
        match self.foreign(node) {
            Some(reason) => Err(reason.to_owned()),
            None => Ok(()),
        }
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), String> {
        let nested = matches!(item, ClassSetItem::Bracketed(_) | ClassSetItem::Ascii(_));
        if nested {
            return Err(NESTED.to_owned());
        }
        Ok(())
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ClassSetBinaryOp) -> Result<(), String> {
        Err(NESTED.to_owned())
    }
}
