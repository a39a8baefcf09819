//! Schemas keyword by keyword.

use referencing::Draft;
use serde_json::{Map, Value, json};

use super::patterns;
use super::refs::At;
use super::{Outcome, Rewriter};

/// Formats that llguidance compiles. Others are annotations, as are all by default in JSON Schema.
const FORMATS: [&str; 11] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "unknown",
];

/// Keywords whose value stays as it is.
const KEPT: [&str; 6] = [
    "const",
    "enum",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
];
/// Keywords whose value is a count.
const COUNTS: [&str; 6] = [
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
];
const TYPES: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

/// In schemas that constrain a value without evaluating its properties and items, as `not` does: known to `unevaluated` only.
pub(super) const SILENT: &str = "x-silent";

/// A schema that is being rewritten.
#[derive(Default)]
pub(super) struct Parts {
    /// Keywords, in the order of the original, which is that of an object's properties.
    pub(super) fields: Map<String, Value>,
    /// Schemas that hold as well.
    pub(super) also: Vec<Value>,
    /// What other properties may be, too, because the patterns of their names cannot be told apart.
    pub(super) widened: Vec<Value>,
}

impl Parts {
    /// A schema that holds as well, and evaluates nothing.
    pub(super) fn silently(&mut self, mut schema: Value) {
        if let Value::Object(fields) = &mut schema {
            fields.insert(SILENT.to_owned(), Value::Bool(true));
        }
        self.also.push(schema);
    }

    /// Adds a keyword; as a schema of its own where there is one of this name.
    pub(super) fn put(&mut self, name: &str, value: Value) {
        if self.fields.contains_key(name) {
            self.also.push(json!({name: value}));
        } else {
            self.fields.insert(name.to_owned(), value);
        }
    }

    /// Adds a schema in the place of a keyword.
    pub(super) fn add(&mut self, schema: Value) {
        match schema {
            Value::Object(fields) if fields.len() == 1 => {
                for (name, value) in fields {
                    self.put(&name, value);
                }
            }
            other => self.also.push(other),
        }
    }

    pub(super) fn into_schema(self) -> Value {
        let Self {
            mut fields,
            mut also,
            widened,
        } = self;
        if let Some(others) = fields.remove("additionalProperties") {
            let others = any_of([others].into_iter().chain(widened).collect());
            fields.insert("additionalProperties".to_owned(), others);
        }
        also.retain(|schema| !is_any(schema));
        if also.is_empty() {
            return Value::Object(fields);
        }
        if !fields.is_empty() {
            also.insert(0, Value::Object(fields));
        }
        if also.len() == 1 {
            return also.swap_remove(0);
        }
        json!({"allOf": also})
    }
}

/// Whether a rewritten schema allows everything.
pub(super) fn is_any(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(fields) => fields.keys().all(|key| key == SILENT),
        _ => false,
    }
}

pub(super) fn any_of(mut schemas: Vec<Value>) -> Value {
    if schemas.iter().any(is_any) {
        return Value::Bool(true);
    }
    schemas.retain(|schema| *schema != Value::Bool(false));
    match schemas.len() {
        0 => Value::Bool(false),
        1 => schemas.swap_remove(0),
        _ => json!({"anyOf": schemas}),
    }
}

pub(super) fn all_of(mut schemas: Vec<Value>) -> Value {
    if schemas.contains(&Value::Bool(false)) {
        return Value::Bool(false);
    }
    schemas.retain(|schema| !is_any(schema));
    match schemas.len() {
        0 => Value::Bool(true),
        1 => schemas.swap_remove(0),
        _ => json!({"allOf": schemas}),
    }
}

/// A count, also one that is written as `2.0`.
pub(super) fn count(value: &Value) -> Option<u64> {
    let whole =
        |value: f64| (value >= 0.0 && value.fract() == 0.0 && value < 1e15).then_some(value as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

/// Why a keyword has no meaning.
fn invalid(at: &At<'_>, name: &str, value: &Value) -> String {
    format!("{} cannot be {value}", at.keyword(name))
}

fn types(value: &Value, at: &At<'_>, parts: &mut Parts) -> Outcome {
    let is_type = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
    let known = match value {
        Value::Array(names) => !names.is_empty() && names.iter().all(is_type),
        name => is_type(name),
    };
    if known {
        parts.fields.insert("type".to_owned(), value.clone());
    } else if value != "any" {
        // Draft 3 has a type of everything.
        return Err(invalid(at, "type", value));
    }
    Ok(())
}

impl Rewriter {
    /// A schema in llguidance's keywords.
    pub(super) fn schema(&mut self, schema: &Value, at: &At<'_>) -> Result<Value, String> {
        let fields = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(fields) => fields,
            _ => return Err(format!("{} is no schema", at.path())),
        };
        let at = &at.enter(schema);
        let before = self.relaxed.len();
        let mut parts = Parts::default();
        if at.is_before(Draft::Draft201909)
            && let Some(reference) = fields.get("$ref")
        {
            // Before 2019, what is next to it does not count.
            return self.reference("$ref", reference, at);
        }
        for (name, value) in fields {
            self.keyword(name, value, fields, at, &mut parts)?;
        }
        self.bounded_properties(&mut parts, at);
        self.unevaluated(fields, at, &mut parts, before)?;
        Ok(parts.into_schema())
    }

    fn keyword(
        &mut self,
        name: &str,
        value: &Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        match name {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let target = self.reference(name, value, at)?;
                self.refer(target, fields, at, name, parts);
            }
            "type" => types(value, at, parts)?,
            "pattern" => self.pattern(value, at, parts)?,
            "format" => self.format(value, at, parts),
            "multipleOf" => self.multiple_of(value, at, parts),
            "required" => self.required(value, at, parts)?,
            "allOf" | "anyOf" => {
                let schemas = self.list(name, value, at)?;
                parts.put(name, Value::Array(schemas));
            }
            "oneOf" => self.one_of(value, at, parts)?,
            "not" => self.negated(value, at, parts)?,
            "if" if !at.is_before(Draft::Draft7) => self.conditional(value, fields, at, parts)?,
            "items" | "prefixItems" | "additionalItems" => {
                self.items(name, value, fields, at, parts)?;
            }
            "contains" if !at.is_before(Draft::Draft6) => {
                self.contains(value, fields, at, parts)?;
            }
            "uniqueItems" => self.unique_items(value, fields, at),
            "properties" => {
                let schemas = self.map(name, value, at)?;
                parts.fields.insert(name.to_owned(), Value::Object(schemas));
            }
            "patternProperties" => self.pattern_properties(value, at, parts)?,
            "additionalProperties" => {
                let schema = self.schema(value, &at.child(name))?;
                parts.fields.insert(name.to_owned(), schema);
            }
            "dependencies" | "dependentRequired" | "dependentSchemas" => {
                self.dependencies(name, value, at, parts)?;
            }
            "propertyNames" if !at.is_before(Draft::Draft6) => {
                self.property_names(value, at, parts)?;
            }
            _ if KEPT.contains(&name) => {
                parts.fields.insert(name.to_owned(), value.clone());
            }
            _ if COUNTS.contains(&name) => self.counted(name, value, fields, at, parts)?,
            _ => {}
        }
        Ok(())
    }

    /// A reference next to other keywords. llguidance refuses those within a cycle of references.
    fn refer(
        &mut self,
        target: Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        name: &str,
        parts: &mut Parts,
    ) {
        let Some(reference) = target.get("$ref") else {
            parts.also.push(target);
            return;
        };
        let cyclic = self.definitions.get(reference).is_none();
        if cyclic && self.is_small() {
            let alone = fields.len() == 1;
            if !alone {
                self.relax(at, name);
                return;
            }
        }
        parts.put("$ref", reference.clone());
    }

    fn pattern(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) -> Outcome {
        let pattern = value
            .as_str()
            .ok_or_else(|| invalid(at, "pattern", value))?;
        if patterns::is_read(pattern) {
            parts.fields.insert("pattern".to_owned(), value.clone());
        } else {
            self.relax(at, "pattern");
        }
        Ok(())
    }

    fn format(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) {
        if value.as_str().is_some_and(|name| FORMATS.contains(&name)) {
            parts.fields.insert("format".to_owned(), value.clone());
        } else {
            self.relax(at, "format");
        }
    }

    fn multiple_of(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) {
        // Further digits are more than llguidance computes with.
        let factor = value.as_f64().unwrap_or(0.0).abs();
        if (1e-6..1e9).contains(&factor) {
            parts.fields.insert("multipleOf".to_owned(), value.clone());
        } else {
            self.relax(at, "multipleOf");
        }
    }

    fn required(&mut self, value: &Value, at: &At<'_>, parts: &mut Parts) -> Outcome {
        let names = value.as_array();
        if names.is_some_and(|names| names.iter().all(Value::is_string)) {
            parts.fields.insert("required".to_owned(), value.clone());
        } else if value.is_boolean() {
            // Draft 3 has it in the schema of a property.
            self.relax(at, "required");
        } else {
            return Err(invalid(at, "required", value));
        }
        Ok(())
    }

    fn counted(
        &mut self,
        name: &str,
        value: &Value,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let is_length = name.ends_with("Length");
        let has_expression = ["pattern", "format"]
            .iter()
            .any(|name| fields.contains_key(*name));
        match count(value) {
            // The two together may be too large an automaton.
            Some(_) if self.is_small() && is_length && has_expression => self.relax(at, name),
            Some(count) => {
                parts.fields.insert(name.to_owned(), count.into());
            }
            None => return Err(invalid(at, name, value)),
        }
        Ok(())
    }

    /// The schemas of a list.
    pub(super) fn list(
        &mut self,
        name: &str,
        value: &Value,
        at: &At<'_>,
    ) -> Result<Vec<Value>, String> {
        let schemas = value.as_array();
        let schemas = schemas.ok_or_else(|| format!("{} is not a list", at.keyword(name)))?;
        let numbered = schemas.iter().enumerate();
        numbered
            .map(|(number, schema)| self.schema(schema, &at.item(name, &number.to_string())))
            .collect()
    }

    /// The schemas of an object.
    pub(super) fn map(
        &mut self,
        name: &str,
        value: &Value,
        at: &At<'_>,
    ) -> Result<Map<String, Value>, String> {
        let schemas = value.as_object();
        let schemas = schemas.ok_or_else(|| format!("{} is not an object", at.keyword(name)))?;
        schemas
            .iter()
            .map(|(key, schema)| Ok((key.clone(), self.schema(schema, &at.item(name, key))?)))
            .collect()
    }
}
