//! Keywords of objects.

use serde_json::{Map, Value, json};

use super::keywords::{Parts, all_of, any_of, is_any};
use super::patterns;
use super::refs::At;
use super::{Outcome, Rewriter};

/// Dependencies of one schema that are spelled out: each doubles the alternatives.
const DEPENDENCIES: usize = 5;
/// References that are followed.
const DEPTH: usize = 16;
/// Sets of properties that are spelled out for `minProperties` and `maxProperties`.
const SETS: usize = 32;

impl Rewriter {
    /// A property needs others, or a schema of the whole object.
    pub(super) fn dependencies(
        &mut self,
        name: &str,
        value: &Value,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let needs = value.as_object();
        let needs = needs.ok_or_else(|| format!("{} is not an object", at.keyword(name)))?;
        let mut spelled = 0;
        for (key, needed) in needs {
            let before = self.relaxed.len();
            let needed = match needed {
                Value::Array(_) => json!({"required": needed}),
                Value::String(_) => json!({"required": [needed]}),
                schema => self.schema(schema, &at.item(name, key))?,
            };
            if is_any(&needed) || needed == json!({"required": []}) {
                continue;
            }
            if spelled == DEPENDENCIES || self.is_small() {
                self.relaxed.truncate(before);
                self.relax(&at.child(name), key);
                continue;
            }
            spelled += 1;
            let absent = json!({"properties": {key: false}});
            let present = all_of(vec![needed, json!({"required": [key]})]);
            parts.also.push(any_of(vec![absent, present]));
        }
        Ok(())
    }

    /// Exact for names that are listed, or have a pattern or a length.
    pub(super) fn property_names(
        &mut self,
        value: &Value,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let before = self.relaxed.len();
        let names = self.schema(value, &at.child("propertyNames"))?;
        if is_any(&names) {
            return Ok(());
        }
        if let (Some(only), false) = (self.only_names(&names, DEPTH), self.is_small()) {
            parts.silently(only);
        } else {
            self.relaxed.truncate(before);
            self.relax(at, "propertyNames");
        }
        Ok(())
    }

    /// The schema of objects whose names have a schema.
    fn only_names(&self, names: &Value, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        let Value::Object(fields) = names else {
            return Some(json!({"maxProperties": 0}));
        };
        if let Some(reference) = fields.get("$ref").filter(|_| fields.len() == 1) {
            return self.only_names(self.definitions.get(reference)?, depth);
        }
        if fields.get("type").is_some_and(|name| name != "string") {
            return None;
        }
        let others: Vec<(&str, &Value)> = fields
            .iter()
            .map(|(name, value)| (name.as_str(), value))
            .filter(|(name, _)| *name != "type")
            .collect();
        let listed = |names: &[Value]| {
            let names = names.iter().filter_map(Value::as_str);
            let any: Map<String, Value> = names
                .map(|name| (name.to_owned(), Value::Bool(true)))
                .collect();
            json!({"properties": any, "additionalProperties": false})
        };
        let bound = |name| fields.get(name).and_then(Value::as_u64);
        let pattern = match others.as_slice() {
            [] => return Some(Value::Bool(true)),
            [("enum", Value::Array(names))] => return Some(listed(names)),
            [("const", name)] => return Some(listed(&[(*name).clone()])),
            [("pattern", Value::String(pattern))] => pattern.clone(),
            [("minLength" | "maxLength", _)]
            | [("minLength", _), ("maxLength", _)]
            | [("maxLength", _), ("minLength", _)] => {
                patterns::of_length(bound("minLength").unwrap_or(0), bound("maxLength"))
            }
            _ => return None,
        };
        Some(json!({"patternProperties": {pattern: true}, "additionalProperties": false}))
    }

    /// Patterns of which each name has at most one.
    pub(super) fn pattern_properties(
        &mut self,
        value: &Value,
        at: &At<'_>,
        parts: &mut Parts,
    ) -> Outcome {
        let mut kept: Vec<(String, Value)> = Vec::new();
        for (pattern, schema) in self.map("patternProperties", value, at)? {
            if !patterns::is_read(&pattern) {
                self.relax(&at.child("patternProperties"), &pattern);
                parts.widened.push(schema);
                continue;
            }
            // All that it overlaps with becomes one.
            let (mut joined, mut joint) = (pattern.clone(), schema);
            for (other, its) in std::mem::take(&mut kept) {
                if patterns::are_disjoint(&other, &joined) {
                    kept.push((other, its));
                    continue;
                }
                joined = format!("(?:{other})|(?:{joined})");
                if joint != its {
                    self.relax(&at.child("patternProperties"), &pattern);
                    joint = any_of(vec![its, joint]);
                }
            }
            kept.push((joined, joint));
        }
        if !kept.is_empty() {
            parts.put("patternProperties", kept.into_iter().collect());
        }
        Ok(())
    }

    /// llguidance counts properties only where all that are named are required: the sets of the others are spelled out.
    pub(super) fn bounded_properties(&mut self, parts: &mut Parts, at: &At<'_>) {
        let count = |name| parts.fields.get(name).and_then(Value::as_u64);
        let (least, most) = (count("minProperties").unwrap_or(0), count("maxProperties"));
        let required: Vec<&str> = match parts.fields.get("required") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let optional: Vec<String> = match parts.fields.get("properties") {
            Some(Value::Object(named)) => named
                .iter()
                .filter(|(name, schema)| {
                    **schema != Value::Bool(false) && !required.contains(&name.as_str())
                })
                .map(|(name, _)| name.clone())
                .collect(),
            _ => Vec::new(),
        };
        let needed = least.saturating_sub(required.len() as u64) as usize;
        let spare = most.map(|most| most.saturating_sub(required.len() as u64) as usize);
        if optional.is_empty() || (needed == 0 && spare.is_none()) {
            return;
        }
        let sets = if self.is_small() {
            None
        } else {
            sets(&optional, needed, spare)
        };
        let taken: Vec<(&str, Value)> = ["minProperties", "maxProperties"]
            .into_iter()
            .filter_map(|name| Some((name, parts.fields.shift_remove(name)?)))
            .collect();
        let Some(mut sets) = sets else {
            for (name, _) in taken {
                self.relax(at, name);
            }
            return;
        };
        for set in &mut sets {
            for (name, value) in &taken {
                set.insert((*name).to_owned(), value.clone());
            }
            set.insert("type".to_owned(), "object".into());
        }
        let mut options: Vec<Value> = sets.into_iter().map(Value::Object).collect();
        if parts.fields.get("type").is_none_or(|name| name != "object") {
            options.push(json!({"type": ["null", "boolean", "number", "string", "array"]}));
        }
        parts.silently(any_of(options));
    }
}

/// Schemas of the sets of properties that may be there; `None` if they are too many.
fn sets(
    optional: &[String],
    needed: usize,
    spare: Option<usize>,
) -> Option<Vec<Map<String, Value>>> {
    let absent = |present: &[&String]| -> Value {
        let absent = optional.iter().filter(|name| !present.contains(name));
        absent
            .map(|name| (name.clone(), Value::Bool(false)))
            .collect()
    };
    let Some(spare) = spare else {
        // One of them, or none of them and another one.
        if needed != 1 || optional.len() >= SETS {
            return None;
        }
        let one = |name| Map::from_iter([("required".to_owned(), json!([name]))]);
        let none = Map::from_iter([("properties".to_owned(), absent(&[]))]);
        return Some(optional.iter().map(one).chain([none]).collect());
    };
    let mut sets: Vec<Vec<&String>> = vec![Vec::new()];
    for name in optional {
        let more: Vec<Vec<&String>> = sets
            .iter()
            .filter(|set| set.len() < spare)
            .map(|set| set.iter().copied().chain([name]).collect())
            .collect();
        sets.extend(more);
        if sets.len() > SETS {
            return None;
        }
    }
    let exactly = |set: &Vec<&String>| {
        let fields = [
            ("required".to_owned(), json!(set)),
            ("properties".to_owned(), absent(set)),
        ];
        Map::from_iter(fields)
    };
    Some(sets.iter().map(exactly).collect())
}
