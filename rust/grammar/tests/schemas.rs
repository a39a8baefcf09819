//! Schemas that llguidance refuses: what they allow once they are rewritten, by the `jsonschema` crate.

use std::sync::{Arc, Mutex};

use jsonschema::validator_for;
use pie_grammar::{Compiler, Grammar, Limits, Matcher, Notice, Progress, Settings, Vocabulary};
use serde_json::{Value, json};

const END: u32 = 256;

fn vocabulary() -> Vocabulary {
    let tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([vec![]]).collect();
    Vocabulary::new(&tokens, &[], &[END]).unwrap()
}

fn compiler(strict_schemas: bool) -> Compiler {
    let settings = Settings {
        strict_schemas,
        ..Settings::default()
    };
    Compiler::with_settings(vocabulary(), settings).unwrap()
}

/// A matcher, and the paths of what is relaxed.
fn compile(compiler: &Compiler, schema: &Value) -> Result<(Matcher, Vec<String>), String> {
    let pending = compiler.compile(&Grammar::JsonSchema(schema.to_string().into()));
    let matcher = pending.wait().map_err(|error| error.to_string())?;
    let Progress::Ready(ready) = pending.progress() else {
        unreachable!("it is compiled");
    };
    Ok((matcher, ready.relaxed().to_vec()))
}

fn allows(start: &Matcher, text: &str) -> bool {
    let mut matcher = start.clone();
    let mut tokens = text.bytes().map(u32::from).chain([END]);
    tokens.all(|token| matcher.accept_token(token).is_ok())
}

/// The texts of a document: a grammar has properties in one order.
fn texts(document: &Value) -> Vec<String> {
    let Value::Object(fields) = document else {
        return vec![document.to_string()];
    };
    let fields: Vec<(&String, &Value)> = fields.iter().collect();
    let mut orders: Vec<Vec<(&String, &Value)>> = vec![Vec::new()];
    for field in fields {
        orders = orders
            .iter()
            .flat_map(|order| {
                (0..=order.len()).map(|at| {
                    let mut longer = order.clone();
                    longer.insert(at, field);
                    longer
                })
            })
            .collect();
    }
    let text = |order: &Vec<(&String, &Value)>| {
        let fields = order
            .iter()
            .map(|(key, value)| format!("{}:{value}", json!(key)));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    };
    orders.iter().map(text).collect()
}

/// Documents of every kind, with the keys and values that the schemas below speak of.
fn documents() -> Vec<Value> {
    let scalars = [
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(2),
        json!(7),
        json!(2.5),
        json!("a"),
        json!("ab"),
        json!("b"),
        json!("card"),
        json!(""),
        json!("long text"),
    ];
    let mut documents = scalars.to_vec();
    documents.extend([
        json!([]),
        json!({}),
        json!([[]]),
        json!([1, 1]),
        json!([1, "a"]),
        json!(["a", 1, 2]),
    ]);
    for first in &scalars {
        documents.push(json!([first]));
        for key in ["a", "b", "kind"] {
            documents.push(json!({key: first}));
        }
        for second in &scalars[..10] {
            documents.push(json!([first, second]));
            documents.push(json!({"a": first, "b": second}));
            documents.push(json!({"kind": first, "a": second}));
            documents.push(json!({"a": first, "b": second, "c": 1}));
            documents.push(json!({"a": first, "x": second}));
        }
    }
    documents
}

/// Schemas that llguidance refuses and that have an equivalent.
fn equivalent() -> Vec<Value> {
    vec![
        json!({"not": {"type": ["string", "object"]}}),
        json!({"not": {"enum": ["a", "ab", "", 1, 2, null, true]}}),
        json!({"not": {"const": false}, "type": "boolean"}),
        json!({"not": {"required": ["a", "b"]}}),
        json!({"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "type": "object"}),
        json!({"not": {"type": "number", "minimum": 1, "exclusiveMaximum": 5}}),
        json!({"not": {"properties": {"a": {"type": "number"}}}}),
        json!({"not": {"minLength": 2, "maxLength": 3, "type": "string"}}),
        json!({"type": "string", "minLength": 1, "not": {"maxLength": 1}}),
        json!({"type": "array", "not": {"prefixItems": [{"type": "number"}]}}),
        json!({"not": {"minItems": 1, "maxItems": 1}}),
        json!({"not": {"maxProperties": 1}}),
        json!({"not": {"not": {"type": "string"}}}),
        json!({"not": {"$ref": "#/$defs/text"}, "$defs": {"text": {"type": "string"}}}),
        json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}),
        json!({"oneOf": [{"type": "number", "maximum": 2}, {"type": "number", "minimum": 1}]}),
        json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            "a": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            "b": {"type": "object", "properties": {"kind": {"enum": ["b", "card"]}}, "required": ["kind"]}}}),
        json!({"dependentRequired": {"a": ["b"], "b": ["a"]}}),
        json!({"type": "object", "dependentRequired": {"a": ["b"]}, "required": ["a"]}),
        json!({"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}}),
        json!({"dependentSchemas": {"a": false}}),
        json!({"type": "object", "properties": {"kind": {"type": "string"}, "a": {}},
            "if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]},
            "then": {"required": ["a"]}, "else": {"properties": {"a": {"type": "number"}}}}),
        json!({"if": {"type": "number"}, "then": {"minimum": 2}}),
        json!({"if": {"type": "number"}, "else": {"type": "string"}}),
        json!({"then": {"type": "string"}}),
        json!({"propertyNames": {"enum": ["a", "b"]}}),
        json!({"propertyNames": {"pattern": "^[ab]$"}, "minProperties": 1}),
        json!({"propertyNames": {"maxLength": 1}}),
        json!({"propertyNames": false}),
        json!({"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"const": "a"}}}),
        json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
        json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "maxProperties": 2}),
        json!({"properties": {"a": {}, "b": {"type": "number"}}, "maxProperties": 1}),
        json!({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1,
            "additionalProperties": false}),
        json!({"contains": true, "minContains": 2}),
        json!({"contains": false}),
        json!({"minContains": 2}),
        json!({"uniqueItems": false, "maxItems": 1.0, "type": "array"}),
        json!({"uniqueItems": true, "maxItems": 1, "type": "array"}),
        json!({"properties": {"a": {}}, "unevaluatedProperties": false}),
        json!({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": {"type": "number"}}),
        json!({"anyOf": [{"properties": {"a": {"type": "number"}}, "required": ["a"]},
            {"properties": {"b": {"type": "number"}}, "required": ["b"]}], "unevaluatedProperties": false}),
        json!({"if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"properties": {"b": {}}}, "unevaluatedProperties": false}),
        json!({"prefixItems": [{"type": "number"}], "unevaluatedItems": false}),
        json!({"anyOf": [{"prefixItems": [true, {"type": "number"}], "minItems": 2}, {"prefixItems": [true]}],
            "unevaluatedItems": false}),
        json!({"$id": "http://example.com/tree", "$dynamicAnchor": "node", "type": ["number", "array"],
            "items": {"$dynamicRef": "#node"}}),
        json!({"$ref": "#text", "$defs": {"x": {"$anchor": "text", "type": "string"}}}),
        json!({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "string"}}}),
        json!({"$ref": "other", "$id": "http://example.com/root",
            "$defs": {"x": {"$id": "other", "type": "number"}}}),
        json!({"patternProperties": {"a": {"type": "number"}, "^a$": {"type": "number"}}}),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]},
            "items": [{"type": "number"}], "additionalItems": false}),
        json!({"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 1,
            "exclusiveMinimum": true, "not": {"enum": [2]}}),
    ]
}

#[test]
fn an_equivalent_schema_allows_what_the_original_allows() {
    let compiler = compiler(true);
    let documents = documents();
    for schema in equivalent() {
        let (matcher, relaxed) =
            compile(&compiler, &schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert!(relaxed.is_empty(), "{schema}: {relaxed:?}");
        let validator = validator_for(&schema).unwrap();
        let mut allowed = [0, 0];
        for document in &documents {
            let valid = validator.is_valid(document);
            let is_allowed = texts(document).iter().any(|text| allows(&matcher, text));
            assert_eq!(is_allowed, valid, "{schema}: {document}");
            allowed[usize::from(valid)] += 1;
        }
        assert!(
            allowed[0] > 0 || schema.get("minContains").is_some() || schema.get("then").is_some(),
            "{schema}"
        );
    }
}

#[test]
fn a_relaxed_schema_allows_more_and_says_where() {
    let compiler = compiler(false);
    let documents = documents();
    for (schema, expected) in [
        (
            json!({"properties": {"a": {"type": "array", "uniqueItems": true}}}),
            "#/properties/a/uniqueItems",
        ),
        (json!({"contains": {"type": "number"}}), "#/contains"),
        (
            json!({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
            "#/oneOf",
        ),
        (json!({"not": {"pattern": "^a"}}), "#/not"),
        (json!({"not": {"type": "integer"}}), "#/not"),
        (
            json!({"not": {"type": "array", "uniqueItems": true}}),
            "#/not",
        ),
        (
            json!({"if": {"pattern": "^a"}, "then": {"maxLength": 1}, "else": {"type": "string"}}),
            "#/if",
        ),
        (
            json!({"anyOf": [{"pattern": "(?=a)b"}]}),
            "#/anyOf/0/pattern",
        ),
        (
            json!({"patternProperties": {"a": {"type": "number"}, "b|a": {"type": "string"}},
            "additionalProperties": false}),
            "#/patternProperties/b|a",
        ),
        (
            json!({"patternProperties": {"^(?!x)": {"type": "number"}}, "additionalProperties": false}),
            "#/patternProperties/^(?!x)",
        ),
        (json!({"format": "path"}), "#/format"),
        (
            json!({"propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "b"}]}}),
            "#/propertyNames",
        ),
    ] {
        let (matcher, relaxed) =
            compile(&compiler, &schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert_eq!(relaxed, [expected], "{schema}");
        let validator = validator_for(&schema).unwrap();
        for document in &documents {
            let is_allowed = texts(document).iter().any(|text| allows(&matcher, text));
            assert!(
                is_allowed || !validator.is_valid(document),
                "{schema}: {document}"
            );
        }
    }
}

#[test]
fn what_is_not_in_the_schema_is_relaxed() {
    let schema = json!({"properties": {"a": {"$ref": "http://example.com/other#/$defs/a"}}});
    let (matcher, relaxed) = compile(&compiler(false), &schema).unwrap();
    assert_eq!(relaxed, ["#/properties/a/$ref"]);
    assert!(allows(&matcher, r#"{"a": [1]}"#));
}

#[test]
fn a_strict_compiler_refuses_with_the_path() {
    let schema = json!({"properties": {"a/b": {"type": "array", "uniqueItems": true}}});
    let error = compile(&compiler(true), &schema).unwrap_err();
    assert!(
        error.contains("\"#/properties/a~1b/uniqueItems\" cannot be enforced"),
        "{error}"
    );
    // So does a schema that asks for it.
    let mut schema = schema;
    schema["x-guidance"] = json!({"lenient": false});
    let error = compile(&compiler(false), &schema).unwrap_err();
    assert!(error.contains("cannot be enforced"), "{error}");
}

#[test]
fn relaxed_schemas_are_reported_once() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let settings = Settings {
        notice: Some(Notice(Arc::new(move |line: &str| {
            sink.lock().unwrap().push(line.to_owned());
        }))),
        limits: Limits::default(),
        ..Settings::default()
    };
    let compiler = Compiler::with_settings(vocabulary(), settings).unwrap();
    for schema in [
        json!({"type": "object"}),
        json!({"uniqueItems": true, "contains": {"type": "string"}}),
        json!({"uniqueItems": true}),
        json!({"uniqueItems": true}),
    ] {
        compile(&compiler, &schema).unwrap();
    }
    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("\"#/uniqueItems\" and 1 other keywords cannot be enforced"),
        "{lines:?}"
    );
}

#[test]
fn schemas_of_structural_tags_are_rewritten_too() {
    let compiler = compiler(true);
    let tag = json!({"triggers": ["<f"], "structures": [{"begin": "<f>", "end": "</f>",
        "schema": {"type": "object", "dependentRequired": {"a": ["b"]}}}]});
    let matcher = compiler
        .compile(&Grammar::StructuralTag(tag.to_string().into()))
        .wait()
        .unwrap();
    assert!(allows(&matcher, r#"so <f>{"b": 1, "a": 2}</f>"#));
    assert!(!allows(&matcher, r#"so <f>{"a": 1}</f>"#));
}

#[test]
fn large_schemas_are_relaxed_rather_than_refused() {
    let names: Vec<String> = (0..60).map(|number| format!("p{number}")).collect();
    let properties: serde_json::Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({}))).collect();
    let needs: serde_json::Map<String, Value> = names
        .iter()
        .map(|name| (name.clone(), json!(["p0"])))
        .collect();
    let schema = json!({"type": "object", "properties": properties, "dependentRequired": needs,
        "minProperties": 2, "maxProperties": 59});
    let (matcher, relaxed) = compile(&compiler(false), &schema).unwrap();
    assert!(
        relaxed.contains(&"#/minProperties".to_owned()),
        "{relaxed:?}"
    );
    assert!(allows(&matcher, r#"{"p0": 1, "p5": 2}"#));
}

#[test]
fn a_refused_schema_names_its_own_paths() {
    let schema = json!({"$ref": "#/definitions/no~1thing", "uniqueItems": true,
        "definitions": {"no/thing": {"allOf": [{"type": "string"}, {"type": "number"}]}}});
    let error = compile(&compiler(false), &schema).unwrap_err();
    assert!(error.contains("Unsatisfiable schema"), "{error}");
    assert!(!error.contains("$defs"), "{error}");
    for (schema, reason) in [
        (
            json!({"items": {"type": "strange"}}),
            "#/items/type cannot be \"strange\"",
        ),
        (
            json!({"not": {"minLength": -1}}),
            "#/not/minLength cannot be -1",
        ),
        (
            json!({"uniqueItems": true, "pattern": 1}),
            "#/pattern cannot be 1",
        ),
        (json!({"not": 3}), "#/not is no schema"),
        (json!({"oneOf": {}}), "#/oneOf is not a list"),
    ] {
        let error = compile(&compiler(false), &schema).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
