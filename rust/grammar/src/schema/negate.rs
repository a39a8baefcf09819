//! Complements of rewritten schemas.

use serde_json::{Map, Value, json};

use super::Rewriter;
use super::keywords::{SILENT, all_of, any_of, is_any};
use super::patterns;

/// Schemas in each other that are negated.
const DEPTH: usize = 16;
/// Schemas of one complement: beyond it the grammar gets too large.
const SIZE: usize = 64;
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

impl Rewriter {
    /// A schema of exactly what `schema` does not allow; `None` where llguidance has no keywords for it.
    pub(super) fn negate(&self, schema: &Value) -> Option<Value> {
        let mut size = SIZE;
        self.complement(schema, DEPTH, &mut size)
    }

    fn complement(&self, schema: &Value, depth: usize, size: &mut usize) -> Option<Value> {
        *size = size.checked_sub(1)?;
        let depth = depth.checked_sub(1)?;
        let fields = match schema {
            Value::Bool(any) => return Some(Value::Bool(!any)),
            Value::Object(fields) => fields,
            _ => return None,
        };
        if is_any(schema) {
            return Some(Value::Bool(false));
        }
        let mut options = Vec::new();
        for (name, value) in fields {
            if name != SILENT {
                options.push(self.failed(name, value, fields, depth, size)?);
            }
        }
        Some(any_of(options))
    }

    /// Where one keyword does not hold.
    fn failed(
        &self,
        name: &str,
        value: &Value,
        fields: &Map<String, Value>,
        depth: usize,
        size: &mut usize,
    ) -> Option<Value> {
        let less = |count: &Value| count.as_u64()?.checked_sub(1);
        let more = |count: &Value| count.as_u64().map(|count| count + 1);
        Some(match name {
            "type" => other_types(value)?,
            "const" => other_values(&[value])?,
            "enum" => other_values(&value.as_array()?.iter().collect::<Vec<_>>())?,
            "minimum" => json!({"type": "number", "exclusiveMaximum": value}),
            "maximum" => json!({"type": "number", "exclusiveMinimum": value}),
            "exclusiveMinimum" if value.is_number() => json!({"type": "number", "maximum": value}),
            "exclusiveMaximum" if value.is_number() => json!({"type": "number", "minimum": value}),
            "minLength" => below("string", "maxLength", less(value)),
            "maxLength" => json!({"type": "string", "minLength": more(value)?}),
            "minItems" => below("array", "maxItems", less(value)),
            "maxItems" => json!({"type": "array", "minItems": more(value)?}),
            "minProperties" => below("object", "maxProperties", less(value)),
            "maxProperties" => json!({"type": "object", "minProperties": more(value)?}),
            "required" => any_of(
                value
                    .as_array()?
                    .iter()
                    .filter_map(Value::as_str)
                    .map(absent)
                    .collect(),
            ),
            "properties" => {
                let named = value.as_object()?.iter();
                let failed = named.map(|(key, schema)| {
                    let other = self.complement(schema, depth, size)?;
                    Some(with_property(key, other))
                });
                any_of(failed.collect::<Option<_>>()?)
            }
            "prefixItems" => {
                let items = value.as_array()?.iter().enumerate();
                let failed = items
                    .map(|(at, schema)| Some(with_item(at, self.complement(schema, depth, size)?)));
                any_of(failed.collect::<Option<_>>()?)
            }
            "items" | "additionalProperties" if is_any(value) => Value::Bool(false),
            "items" if *value == Value::Bool(false) => {
                let before = fields.get("prefixItems").and_then(Value::as_array);
                json!({"type": "array", "minItems": before.map_or(0, Vec::len) + 1})
            }
            "allOf" => any_of(self.complements(value, depth, size)?),
            "anyOf" => all_of(self.complements(value, depth, size)?),
            "$ref" => self.complement(self.definitions.get(value)?, depth, size)?,
            _ => return None,
        })
    }

    fn complements(&self, schemas: &Value, depth: usize, size: &mut usize) -> Option<Vec<Value>> {
        let schemas = schemas.as_array()?.iter();
        schemas
            .map(|schema| self.complement(schema, depth, size))
            .collect()
    }
}

/// An object with a property that has a schema.
fn with_property(key: &str, schema: Value) -> Value {
    if schema == Value::Bool(false) {
        return schema;
    }
    json!({"type": "object", "required": [key], "properties": {key: schema}})
}

/// An object without a property.
fn absent(key: &str) -> Value {
    json!({"type": "object", "properties": {key: false}})
}

/// An array with an item that has a schema.
fn with_item(at: usize, schema: Value) -> Value {
    if schema == Value::Bool(false) {
        return schema;
    }
    let mut items = vec![Value::Bool(true); at];
    items.push(schema);
    json!({"type": "array", "minItems": at + 1, "prefixItems": items})
}

/// Values of a type with at most `most`; none if there is no such count.
fn below(kind: &str, name: &str, most: Option<u64>) -> Value {
    most.map_or(Value::Bool(false), |most| json!({"type": kind, name: most}))
}

fn other_types(value: &Value) -> Option<Value> {
    let names: Vec<&str> = match value {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    if names.contains(&"integer") && !names.contains(&"number") {
        // A number that is no integer has no keyword.
        return None;
    }
    let others: Vec<&str> = TYPES
        .into_iter()
        .filter(|name| !names.contains(name))
        .collect();
    Some(if others.is_empty() {
        Value::Bool(false)
    } else {
        json!({"type": others})
    })
}

/// All values but a few that are no arrays or objects.
fn other_values(values: &[&Value]) -> Option<Value> {
    let mut others: Vec<&str> = vec!["array", "object"];
    let mut options = Vec::new();
    if !values.iter().any(|value| value.is_null()) {
        others.push("null");
    }
    let booleans = values.iter().filter_map(|value| value.as_bool());
    let booleans: Vec<bool> = booleans.collect();
    match (booleans.contains(&true), booleans.contains(&false)) {
        (false, false) => others.push("boolean"),
        (true, false) => options.push(json!({"const": false})),
        (false, true) => options.push(json!({"const": true})),
        (true, true) => {}
    }
    let texts: Vec<&str> = values.iter().filter_map(|value| value.as_str()).collect();
    if texts.is_empty() {
        others.push("string");
    } else {
        options.push(json!({"type": "string", "pattern": patterns::other_than(&texts)}));
    }
    let mut numbers: Vec<f64> = values.iter().filter_map(|value| value.as_f64()).collect();
    if numbers.is_empty() {
        others.push("number");
    } else {
        numbers.sort_unstable_by(f64::total_cmp);
        numbers.dedup();
        options.extend(gaps(&numbers));
    }
    if values
        .iter()
        .any(|value| value.is_array() || value.is_object())
    {
        return None;
    }
    options.push(json!({"type": others}));
    Some(any_of(options))
}

/// The numbers between those given.
fn gaps(numbers: &[f64]) -> Vec<Value> {
    let below = json!({"type": "number", "exclusiveMaximum": numbers[0]});
    let above = json!({"type": "number", "exclusiveMinimum": numbers[numbers.len() - 1]});
    let between = numbers.windows(2).map(
        |pair| json!({"type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1]}),
    );
    between.chain([below, above]).collect()
}
