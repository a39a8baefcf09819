//! JSON schemas in the keywords that llguidance compiles.
//!
//! A schema that llguidance refuses is rewritten: to an equivalent one where its keywords allow that, else to one that allows more.
//! The paths of the keywords for which more is allowed are returned: [`Rewritten::relaxed`].
//!
//! | module | keywords |
//! |---|---|
//! | `refs` | `$ref`, `$dynamicRef`, `$anchor`, `$id`: definitions under `#/$defs` |
//! | `keywords` | each keyword by itself |
//! | `logic`, `negate`, `disjoint` | `oneOf`, `not`, `if` |
//! | `objects`, `arrays` | `dependentRequired`, `propertyNames`, `minProperties`, `contains` |
//! | `unevaluated` | `unevaluatedProperties`, `unevaluatedItems` |
//! | `patterns` | regular expressions that llguidance reads |

mod arrays;
mod disjoint;
mod keywords;
mod logic;
mod negate;
mod objects;
mod patterns;
mod refs;
mod unevaluated;

use std::cell::Cell;
use std::collections::HashSet;

use serde_json::{Map, Value, json};

use refs::{At, Definitions, Documents};

/// Why a schema cannot be read, if it cannot.
type Outcome = Result<(), String>;

/// How far a rewritten schema may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Alternatives are spelled out, so that the result is equivalent where possible.
    Exact,
    /// Keywords that need many alternatives are relaxed: for schemas that are too large otherwise.
    Small,
}

/// Reads the JSON schemas of a grammar.
#[derive(Debug)]
pub(crate) struct SchemaReader {
    effort: Option<Effort>,
    /// As in [`Rewritten`], of all schemas.
    pub(crate) relaxed: Vec<String>,
    /// As in [`Rewritten`], of the last schema.
    pub(crate) paths: Vec<String>,
    /// Whether a schema asks that nothing is relaxed.
    pub(crate) is_strict: bool,
}

impl SchemaReader {
    /// Rewrites schemas with an effort; `None` leaves them as they are.
    pub(crate) fn new(effort: Option<Effort>) -> Self {
        Self {
            effort,
            relaxed: Vec::new(),
            paths: Vec::new(),
            is_strict: false,
        }
    }

    /// The schema that is compiled.
    pub(crate) fn read(&mut self, schema: Value) -> Result<Value, String> {
        let lenient = schema.pointer("/x-guidance/lenient");
        self.is_strict |= lenient == Some(&Value::Bool(false));
        let Some(effort) = self.effort else {
            return Ok(schema);
        };
        let rewritten = rewrite(&schema, effort)?;
        self.relaxed.extend(rewritten.relaxed);
        self.paths = rewritten.paths;
        Ok(rewritten.schema)
    }
}

/// A schema that llguidance compiles.
#[derive(Debug)]
pub(crate) struct Rewritten {
    pub(crate) schema: Value,
    /// JSON pointers to the keywords that allow more than they say, in the order of the schema.
    pub(crate) relaxed: Vec<String>,
    /// The path in the original schema of each definition `#/$defs/_0_`, `#/$defs/_1_` …
    pub(crate) paths: Vec<String>,
}

/// Rewrites a schema.
///
/// # Errors
/// The path and reason if it is no JSON schema.
pub(crate) fn rewrite(schema: &Value, effort: Effort) -> Result<Rewritten, String> {
    let documents = Documents::new(schema)?;
    let root = documents.root();
    let mut rewriter = Rewriter {
        effort,
        definitions: Definitions::default(),
        relaxed: Vec::new(),
        comparisons: Cell::default(),
        has_contains: false,
    };
    let mut result = rewriter.schema(root.contents, &root.at)?;
    let (definitions, paths) = rewriter.definitions.finish();
    if !definitions.is_empty() {
        result = merged(result, definitions);
    }
    let mut relaxed = rewriter.relaxed;
    let mut seen = HashSet::new();
    relaxed.retain(|path| seen.insert(path.clone()));
    if let (Some(options), Value::Object(fields)) = (schema.get("x-guidance"), &mut result) {
        fields.insert("x-guidance".to_owned(), options.clone());
    } else if let Some(options) = schema.get("x-guidance") {
        result = json!({"allOf": [result], "x-guidance": options});
    }
    Ok(Rewritten {
        schema: result,
        relaxed,
        paths,
    })
}

/// A schema with its definitions.
fn merged(schema: Value, definitions: Map<String, Value>) -> Value {
    let mut fields = match schema {
        Value::Object(fields) => fields,
        other => Map::from_iter([("allOf".to_owned(), json!([other]))]),
    };
    fields.insert("$defs".to_owned(), Value::Object(definitions));
    Value::Object(fields)
}

/// Rewrites the subschemas of one schema.
struct Rewriter {
    effort: Effort,
    definitions: Definitions,
    relaxed: Vec<String>,
    /// Comparisons that [`are_disjoint`](Self::are_disjoint) may still do.
    comparisons: Cell<usize>,
    /// Whether there is a `contains`, which evaluates items by their values.
    has_contains: bool,
}

impl Rewriter {
    /// Notes that a keyword allows more than it says.
    fn relax(&mut self, at: &At<'_>, keyword: &str) {
        self.relaxed.push(at.keyword(keyword));
    }

    /// A rewritten subschema, and whether it is equivalent.
    fn exact(&mut self, schema: &Value, at: &At<'_>) -> Result<(Value, bool), String> {
        let before = self.relaxed.len();
        let rewritten = self.schema(schema, at)?;
        Ok((rewritten, self.relaxed.len() == before))
    }

    fn is_small(&self) -> bool {
        self.effort == Effort::Small
    }
}
