//! Keywords of arrays.

use referencing::Draft;
use serde_json::{Map, Value, json};

use super::keywords::{Parts, count, is_any};
use super::refs::At;
use super::{Outcome, Rewriter};

impl Rewriter {
    /// `items`, which was `prefixItems` and `additionalItems` before 2020.
    pub(super) fn items(
        &mut self,
        name: &str,
        value: &Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let is_tuple = fields.get("items").is_some_and(Value::is_array);
        let target = match name {
            "items" if is_tuple => "prefixItems",
            "prefixItems" if is_tuple || at.is_before(Draft::Draft202012) => return Ok(()),
            "additionalItems" if is_tuple => "items",
            "additionalItems" => return Ok(()),
            other => other,
        };
        let schema = if target == "prefixItems" {
            Value::Array(self.list(name, value, at)?)
        } else {
            self.schema(value, &at.child(name))?
        };
        parts.fields.insert(target.to_owned(), schema);
        Ok(())
    }

    /// Exact where every item fits, or none does.
    pub(super) fn contains(
        &mut self,
        value: &Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        self.has_contains = true;
        let before = self.relaxed.len();
        let (wanted, exact) = self.exact(value, &at.child("contains"))?;
        self.relaxed.truncate(before);
        let counts = !at.is_before(Draft::Draft201909);
        let bound = |name| fields.get(name).filter(|_| counts).and_then(count);
        let (least, most) = (bound("minContains").unwrap_or(1), bound("maxContains"));
        if exact && is_any(&wanted) {
            let mut sizes = Map::from_iter([("minItems".to_owned(), least.into())]);
            if let Some(most) = most {
                sizes.insert("maxItems".to_owned(), most.into());
            }
            parts.silently(Value::Object(sizes));
        } else if wanted == Value::Bool(false) {
            if least > 0 {
                let others = ["null", "boolean", "number", "string", "object"];
                parts.silently(json!({"type": others}));
            }
        } else if least > 0 {
            self.relax(at, "contains");
            // As many items have to be there at least.
            parts.silently(json!({"minItems": least}));
        } else if most.is_some() {
            self.relax(at, "maxContains");
        }
        Ok(())
    }

    pub(super) fn unique_items(&mut self, value: &Value, fields: &Map<String, Value>, at: &At<'_>) {
        let most = fields.get("maxItems").and_then(count);
        if *value != Value::Bool(false) && most.is_none_or(|most| most > 1) {
            self.relax(at, "uniqueItems");
        }
    }
}
