//! `oneOf`, `not` and `if`.

use serde_json::{Map, Value, json};

use super::keywords::{Parts, SILENT, all_of, any_of, is_any};
use super::refs::At;
use super::{Outcome, Rewriter};

/// Schemas of a `oneOf` that are kept apart by negation.
const NEGATED: usize = 8;

/// A schema that evaluates nothing.
fn silent(schema: Value) -> Value {
    match schema {
        Value::Object(mut fields) => {
            fields.insert(SILENT.to_owned(), Value::Bool(true));
            Value::Object(fields)
        }
        other => other,
    }
}

impl Rewriter {
    /// The complement of a schema that was rewritten exactly, unless the result is to be small.
    fn negate_exact(&self, schema: &Value, exact: bool) -> Option<Value> {
        if exact && !self.is_small() {
            self.negate(schema)
        } else {
            None
        }
    }

    /// Of each pair that may both hold, one excludes the other.
    pub(super) fn one_of(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) -> Outcome {
        let schemas = value.as_array();
        let schemas = schemas.ok_or_else(|| format!("{} is not a list", at.keyword("oneOf")))?;
        let mut options = Vec::new();
        for (number, schema) in schemas.iter().enumerate() {
            let at = at.item("oneOf", &number.to_string());
            let (option, exact) = self.exact(schema, &at)?;
            // What excludes it from the others.
            let negated = self.negate_exact(&option, exact && schemas.len() <= NEGATED);
            options.push((option, negated));
        }
        options.retain(|(option, _)| *option != Value::Bool(false));
        let mut separate = Vec::new();
        let (mut apart, mut excluded) = (true, false);
        for (number, (option, _)) in options.iter().enumerate() {
            let mut all = vec![option.clone()];
            for (other, (schema, negated)) in options.iter().enumerate() {
                if other == number || self.are_disjoint(option, schema) {
                    continue;
                }
                match negated {
                    Some(negated) => {
                        excluded = true;
                        all.push(silent(negated.clone()));
                    }
                    None => apart = false,
                }
            }
            separate.push(all_of(all));
        }
        if !apart {
            self.relax(at, "oneOf");
        }
        let one = any_of(separate);
        if excluded {
            // What is excluded has no say in the order of properties.
            parts.also.push(one);
        } else {
            parts.add(one);
        }
        Ok(())
    }

    pub(super) fn negated(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) -> Outcome {
        let before = self.relaxed.len();
        let (schema, exact) = self.exact(value, &at.child("not"))?;
        if let Some(negated) = self.negate_exact(&schema, exact) {
            parts.silently(negated);
        } else {
            self.relaxed.truncate(before);
            self.relax(at, "not");
        }
        Ok(())
    }

    /// Either `if` and `then`, or not `if`, and `else`.
    pub(super) fn conditional(
        &mut self,
        value: &Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let before = self.relaxed.len();
        let (condition, exact) = self.exact(value, &at.child("if"))?;
        let conditions = self.relaxed.split_off(before);
        let mut branch = |name: &str| match fields.get(name) {
            Some(schema) => self.schema(schema, &at.child(name)),
            None => Ok(Value::Bool(true)),
        };
        let (then, otherwise) = (branch("then")?, branch("else")?);
        let evaluates = fields.keys().any(|name| name.starts_with("unevaluated"));
        if is_any(&then) && is_any(&otherwise) && !evaluates {
            return Ok(());
        }
        let negated = self.negate_exact(&condition, exact);
        if negated.is_none() {
            // Where `if` holds, `else` is allowed as well.
            drop(conditions);
            self.relax(at, "if");
        }
        let not = silent(negated.unwrap_or(Value::Bool(true)));
        let first = all_of(vec![condition, then]);
        let second = all_of(vec![not, otherwise]);
        if is_any(&first) || is_any(&second) {
            return Ok(());
        }
        parts.also.push(json!({"anyOf": [first, second]}));
        Ok(())
    }
}
