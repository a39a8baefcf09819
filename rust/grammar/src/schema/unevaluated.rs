//! `unevaluatedProperties` and `unevaluatedItems`, which are `additionalProperties` and `items` of each case of a schema.

use serde_json::{Map, Value, json};

use super::keywords::{Parts, SILENT, all_of, any_of, is_any};
use super::refs::At;
use super::{Outcome, Rewriter};

/// Cases of one schema.
const CASES: usize = 32;
const DEPTH: usize = 16;
/// Keywords that no longer evaluate anything once they are relaxed.
const LOST: [&str; 5] = ["Ref", "/$ref", "/if", "/dependen", "/patternProperties/"];

/// A case of a schema: what holds, and what that evaluates.
#[derive(Clone, Default)]
struct Case {
    schemas: Vec<Value>,
    properties: Vec<String>,
    patterns: Vec<String>,
    items: usize,
    all_properties: bool,
    all_items: bool,
}

impl Case {
    fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.schemas.extend_from_slice(&other.schemas);
        both.properties.extend_from_slice(&other.properties);
        both.patterns.extend_from_slice(&other.patterns);
        both.items = both.items.max(other.items);
        both.all_properties |= other.all_properties;
        both.all_items |= other.all_items;
        both
    }

    fn with_properties(&self, others: &Value) -> Value {
        let mut schemas = self.schemas.clone();
        if !self.all_properties {
            let any = |names: &[String]| -> Map<String, Value> {
                names
                    .iter()
                    .map(|name| (name.clone(), Value::Bool(true)))
                    .collect()
            };
            let (named, patterns) = (any(&self.properties), any(&self.patterns));
            schemas.push(json!({"properties": named, "patternProperties": patterns, "additionalProperties": others}));
        }
        all_of(schemas)
    }

    fn with_items(&self, others: &Value) -> Value {
        let mut schemas = self.schemas.clone();
        if !self.all_items {
            let first = vec![Value::Bool(true); self.items];
            schemas.push(json!({"prefixItems": first, "items": others}));
        }
        all_of(schemas)
    }
}

impl Rewriter {
    /// Replaces the schema by its cases. `before` are the relaxed keywords outside of it.
    pub(super) fn unevaluated(
        &mut self,
        fields: &Map<String, Value>,
        at: &At<'_>,
        parts: &mut Parts,
        before: usize,
    ) -> Outcome {
        // What these evaluate is not known.
        let lost = self.relaxed[before..]
            .iter()
            .any(|path| LOST.iter().any(|name| path.contains(name)));
        for (name, of_items) in [("unevaluatedProperties", false), ("unevaluatedItems", true)] {
            let Some(value) = fields
                .get(name)
                .filter(|_| !at.is_before(referencing::Draft::Draft201909))
            else {
                continue;
            };
            let others = self.schema(value, &at.child(name))?;
            // What `contains` evaluates depends on the items.
            let unclear = lost || (of_items && !is_any(&others) && self.has_contains);
            let whole = std::mem::take(parts).into_schema();
            let cases = match self.cases(&whole, DEPTH) {
                Some(cases) if !unclear && !self.is_small() => cases,
                _ => {
                    if !is_any(&others) {
                        self.relax(at, name);
                    }
                    parts.also.push(whole);
                    continue;
                }
            };
            let with = |case: &Case| {
                if of_items {
                    case.with_items(&others)
                } else {
                    case.with_properties(&others)
                }
            };
            parts.also.push(any_of(cases.iter().map(with).collect()));
        }
        Ok(())
    }

    /// Cases of which at least one holds where the schema does, with all that it evaluates; `None` if they are too many.
    fn cases(&self, schema: &Value, depth: usize) -> Option<Vec<Case>> {
        let depth = depth.checked_sub(1)?;
        let fields = match schema {
            Value::Object(fields) if !fields.contains_key(SILENT) => fields,
            _ => {
                let schemas = vec![schema.clone()];
                return Some(vec![Case {
                    schemas,
                    ..Case::default()
                }]);
            }
        };
        let mut own = Case::default();
        let mut rest = Map::new();
        let mut cases = vec![Case::default()];
        for (name, value) in fields {
            let listed = || value.as_array().into_iter().flatten();
            let keys = || {
                value
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(key, _)| key.clone())
            };
            match name.as_str() {
                "allOf" => {
                    for schema in listed() {
                        cases = product(&cases, &self.cases(schema, depth)?)?;
                    }
                    continue;
                }
                "anyOf" => {
                    let options = listed().map(|schema| self.cases(schema, depth));
                    let options = unions(&options.collect::<Option<Vec<_>>>()?)?;
                    cases = product(&cases, &options)?;
                    continue;
                }
                "$ref" => {
                    let target = self.cases(self.definitions.get(value)?, depth)?;
                    cases = product(&cases, &target)?;
                    continue;
                }
                "properties" => own.properties.extend(keys()),
                "patternProperties" => own.patterns.extend(keys()),
                "additionalProperties" => own.all_properties = true,
                "items" => own.all_items = true,
                "prefixItems" => own.items = listed().count(),
                _ => {}
            }
            rest.insert(name.clone(), value.clone());
        }
        if !rest.is_empty() {
            own.schemas.push(Value::Object(rest));
        }
        product(&[own], &cases)
    }
}

fn product(first: &[Case], second: &[Case]) -> Option<Vec<Case>> {
    let pairs = first.iter().flat_map(|a| second.iter().map(|b| a.and(b)));
    let pairs: Vec<Case> = pairs.collect();
    (pairs.len() <= CASES).then_some(pairs)
}

/// The cases in which one or more of several schemas hold.
fn unions(options: &[Vec<Case>]) -> Option<Vec<Case>> {
    let mut unions: Vec<Case> = Vec::new();
    for option in options {
        let more = product(&unions, option)?;
        unions.extend(more);
        unions.extend_from_slice(option);
        if unions.len() > CASES {
            return None;
        }
    }
    Some(unions)
}
