//! Rewritten schemas that no value has both of.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::Rewriter;
use super::patterns;

/// References and schemas in each other that are looked into.
const DEPTH: usize = 12;
/// Schemas that are looked at for one pair.
const COMPARISONS: usize = 10_000;

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

impl Rewriter {
    /// Whether no value has both schemas; `false` where that is not clear.
    pub(super) fn are_disjoint(&self, first: &Value, second: &Value) -> bool {
        self.comparisons.set(COMPARISONS);
        self.excludes(first, second, DEPTH)
    }

    /// How much deeper it may be looked; `None` at the end.
    fn deeper(&self, depth: usize) -> Option<usize> {
        self.comparisons.set(self.comparisons.get().checked_sub(1)?);
        depth.checked_sub(1)
    }

    fn excludes(&self, first: &Value, second: &Value, depth: usize) -> bool {
        let Some(depth) = self.deeper(depth) else {
            return false;
        };
        let (Value::Object(a), Value::Object(b)) = (first, second) else {
            return [first, second].contains(&&Value::Bool(false));
        };
        let types = |schema| self.types_of(schema, depth);
        if types(first).is_disjoint(&types(second)) {
            return true;
        }
        for (schema, other) in [(a, second), (b, first)] {
            let all = |name: &str| schema.get(name).and_then(Value::as_array);
            if all("allOf").is_some_and(|all| all.iter().any(|it| self.excludes(it, other, depth)))
                || all("anyOf")
                    .is_some_and(|any| any.iter().all(|it| self.excludes(it, other, depth)))
            {
                return true;
            }
            if let Some(target) = schema.get("$ref").and_then(|it| self.definitions.get(it))
                && self.excludes(target, other, depth)
            {
                return true;
            }
        }
        are_other_values(a, b) || self.has_other_property(a, b, depth)
    }

    /// Whether both are of objects only, and a property that one requires has schemas that exclude each other.
    fn has_other_property(
        &self,
        a: &Map<String, Value>,
        b: &Map<String, Value>,
        depth: usize,
    ) -> bool {
        let is_object =
            |schema: &Map<String, Value>| schema.get("type").is_some_and(|name| name == "object");
        if !is_object(a) && !is_object(b) {
            return false;
        }
        let required = |schema: &Map<String, Value>| -> Vec<String> {
            let names = schema.get("required").and_then(Value::as_array);
            let names = names.into_iter().flatten().filter_map(Value::as_str);
            names.map(str::to_owned).collect()
        };
        let keys: BTreeSet<String> = required(a).into_iter().chain(required(b)).collect();
        keys.iter().any(|key| {
            let (first, second) = (property(a, key), property(b, key));
            self.excludes(&first, &second, depth)
        })
    }

    /// The types that values of a schema may have.
    fn types_of(&self, schema: &Value, depth: usize) -> BTreeSet<&'static str> {
        let all = BTreeSet::from(TYPES);
        let (Some(depth), Value::Object(fields)) = (self.deeper(depth), schema) else {
            return if *schema == Value::Bool(false) {
                BTreeSet::new()
            } else {
                all
            };
        };
        let mut types = all;
        let mut only = |found: BTreeSet<&'static str>| types.retain(|name| found.contains(name));
        for (name, value) in fields {
            let listed = value.as_array().into_iter().flatten();
            match name.as_str() {
                "type" if value.is_string() => only(type_named(value).into_iter().collect()),
                "type" => only(listed.filter_map(type_named).collect()),
                "const" => only(BTreeSet::from([type_of(value)])),
                "enum" => only(listed.map(type_of).collect()),
                "anyOf" => only(listed.flat_map(|it| self.types_of(it, depth)).collect()),
                "allOf" => listed.for_each(|it| only(self.types_of(it, depth))),
                "$ref" => {
                    if let Some(target) = self.definitions.get(value) {
                        only(self.types_of(target, depth));
                    }
                }
                _ => {}
            }
        }
        types
    }
}

/// The schema of a property, as far as it is one schema.
fn property(schema: &Map<String, Value>, key: &str) -> Value {
    if let Some(found) = schema.get("properties").and_then(|named| named.get(key)) {
        return found.clone();
    }
    let by_pattern = schema.get("patternProperties").and_then(Value::as_object);
    let mut patterns = by_pattern.into_iter().flatten();
    if patterns.any(|(pattern, _)| patterns::is_match(pattern, key)) {
        return Value::Bool(true);
    }
    let others = schema.get("additionalProperties").cloned();
    others.unwrap_or(Value::Bool(true))
}

fn type_named(name: &Value) -> Option<&'static str> {
    let name = name.as_str()?;
    let name = if name == "integer" { "number" } else { name };
    TYPES.into_iter().find(|known| *known == name)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether both list values, of which none is in both.
fn are_other_values(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let values = |schema: &Map<String, Value>| -> Option<Vec<Value>> {
        let listed = schema.get("enum").and_then(Value::as_array).cloned();
        listed.or_else(|| Some(vec![schema.get("const")?.clone()]))
    };
    let is_same = |x: &Value, y: &Value| match (x.as_f64(), y.as_f64()) {
        (Some(x), Some(y)) => (x - y).abs() <= f64::EPSILON * x.abs(),
        // Numbers within are compared as they are written: what is not the same is not clear.
        _ => x == y || (type_of(x) == type_of(y) && (x.is_array() || x.is_object())),
    };
    let (Some(a), Some(b)) = (values(a), values(b)) else {
        return false;
    };
    !a.iter().any(|x| b.iter().any(|y| is_same(x, y)))
}
