//! References: each target becomes one definition under `#/$defs`.

use std::collections::HashMap;

use referencing::{Draft, Registry, Resolver, ResourceRef, Retrieve, Uri, uri};
use serde_json::{Map, Value, json};

use super::Rewriter;

/// The identifier of a schema without one.
const ROOT: &str = "json-schema:///";
/// What stands for a schema that is not part of the given one.
const REMOTE: &str = "x-remote";

/// Nothing is downloaded.
struct Nowhere;

impl Retrieve for Nowhere {
    fn retrieve(&self, _: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Ok(json!({REMOTE: true}))
    }
}

/// A schema and the meta-schemas it may refer to.
pub(super) struct Documents {
    registry: Registry<'static>,
    base: Uri<String>,
    draft: Draft,
}

/// A subschema with its place.
pub(super) struct Found<'r> {
    pub(super) contents: &'r Value,
    pub(super) at: At<'r>,
}

impl Documents {
    pub(super) fn new(schema: &Value) -> Result<Self, String> {
        let mut schema = schema.clone();
        let mut draft = Draft::Draft202012.detect(&schema);
        if draft == Draft::Unknown {
            draft = Draft::Draft202012;
            if let Value::Object(fields) = &mut schema {
                fields.remove("$schema");
            }
        }
        let with_id = Self::with_base(schema.clone(), draft);
        with_id.or_else(|reason| {
            // Identifiers are optional for references within the schema.
            let Value::Object(fields) = &mut schema else {
                return Err(reason);
            };
            fields.remove("$id");
            fields.remove("id");
            Self::with_base(schema, draft)
        })
    }

    fn with_base(schema: Value, draft: Draft) -> Result<Self, String> {
        let given = ResourceRef::new(&schema, draft);
        let id = given.id().unwrap_or(ROOT).to_owned();
        let resource = draft.create_resource(schema);
        let root = uri::from_str(ROOT).map_err(|error| error.to_string())?;
        let base = uri::resolve_against(&root.borrow(), id.trim_end_matches('#'));
        let base = base.map_err(|error| error.to_string())?;
        let registry = Registry::new()
            .draft(draft)
            .retrieve_known_draft_meta_schemas(false)
            .retriever(Nowhere)
            .add(base.as_str(), resource)
            .and_then(referencing::RegistryBuilder::prepare)
            .map_err(|error| format!("its references cannot be read: {error}"))?;
        Ok(Self {
            registry,
            base,
            draft,
        })
    }

    pub(super) fn root(&self) -> Found<'_> {
        let resolver = self.registry.resolver(self.base.clone());
        let found = resolver.lookup(self.base.as_str());
        let contents = found.map_or(&Value::Bool(true), |found| found.contents());
        Found {
            contents,
            at: At {
                resolver,
                draft: self.draft,
                path: "#".to_owned(),
            },
        }
    }
}

/// The place of a subschema.
#[derive(Clone)]
pub(super) struct At<'r> {
    resolver: Resolver<'r>,
    pub(super) draft: Draft,
    path: String,
}

impl<'r> At<'r> {
    /// The JSON pointer of a keyword.
    pub(super) fn keyword(&self, name: &str) -> String {
        format!(
            "{}/{}",
            self.path,
            name.replace('~', "~0").replace('/', "~1")
        )
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// The place of a keyword's value.
    pub(super) fn child(&self, name: &str) -> Self {
        Self {
            path: self.keyword(name),
            ..self.clone()
        }
    }

    /// The place of an item of a keyword's value.
    pub(super) fn item(&self, keyword: &str, name: &str) -> Self {
        self.child(keyword).child(name)
    }

    /// The same with the identifier and draft of the subschema.
    pub(super) fn enter(&self, schema: &Value) -> Self {
        let detected = self.draft.detect(schema);
        let draft = if detected == Draft::Unknown {
            self.draft
        } else {
            detected
        };
        let resource = ResourceRef::new(schema, draft);
        let resolver = self.resolver.in_subresource(resource);
        Self {
            resolver: resolver.unwrap_or_else(|_| self.resolver.clone()),
            draft,
            path: self.path.clone(),
        }
    }

    pub(super) fn is_before(&self, draft: Draft) -> bool {
        self.draft != Draft::Unknown && self.draft < draft
    }

    fn lookup(&self, keyword: &str, reference: &str) -> Option<Found<'r>> {
        let found = if keyword == "$recursiveRef" {
            self.resolver.lookup_recursive_ref()
        } else {
            self.resolver.lookup(reference)
        };
        let (contents, resolver, draft) = found.ok()?.into_inner();
        if contents.get(REMOTE).is_some() {
            return None;
        }
        let path = reference.split_once('#').map_or("", |(_, pointer)| pointer);
        let at = Self {
            resolver,
            draft,
            path: if reference.starts_with("#/") {
                format!("#{path}")
            } else {
                reference.to_owned()
            },
        };
        Some(Found { contents, at })
    }
}

/// What a definition is known by: the target, its base, and the resources on the way to it, which `$dynamicRef` depends on.
type Key = (usize, String, Vec<String>);

/// A definition, and the paths of what is relaxed in it.
type Definition = (Value, Vec<String>);

/// Targets of references.
#[derive(Default)]
pub(super) struct Definitions {
    names: HashMap<Key, usize>,
    /// `None` while it is rewritten.
    schemas: Vec<Option<Definition>>,
    paths: Vec<String>,
}

impl Definitions {
    /// A rewritten definition by its reference, once it is complete.
    pub(super) fn get(&self, reference: &Value) -> Option<&Value> {
        let number = reference.as_str()?.strip_prefix("#/$defs/_")?;
        let number = number.strip_suffix('_')?.parse::<usize>().ok()?;
        let definition = self.schemas.get(number)?;
        definition.as_ref().map(|(schema, _)| schema)
    }

    /// The definitions by name, and the path of each in the original schema.
    pub(super) fn finish(self) -> (Map<String, Value>, Vec<String>) {
        let schemas = self.schemas.into_iter().enumerate();
        let named = schemas.map(|(number, schema)| {
            let schema = schema.map_or(Value::Bool(true), |(schema, _)| schema);
            (format!("_{number}_"), schema)
        });
        (named.collect(), self.paths)
    }
}

fn key(found: &Found<'_>) -> Key {
    let mut scopes: Vec<String> = Vec::new();
    let scope = found.at.resolver.dynamic_scope();
    // The outermost resource is the last one, and counts first.
    let all: Vec<&str> = scope.iter().map(Uri::as_str).collect();
    for uri in all.into_iter().rev() {
        if !scopes.iter().any(|seen| seen == uri) {
            scopes.push(uri.to_owned());
        }
    }
    let target = std::ptr::from_ref(found.contents) as usize;
    let base = found.at.resolver.base_uri().as_str().to_owned();
    (target, base, scopes)
}

impl Rewriter {
    /// A reference to the definition of its target; anything where the target is not part of the schema.
    pub(super) fn reference(
        &mut self,
        keyword: &str,
        value: &Value,
        at: &At<'_>,
    ) -> Result<Value, String> {
        let Some(reference) = value.as_str() else {
            return Err(format!("{} is not a string", at.keyword(keyword)));
        };
        let Some(found) = at.lookup(keyword, reference) else {
            self.relax(at, keyword);
            return Ok(Value::Bool(true));
        };
        let key = key(&found);
        let known = self.definitions.names.get(&key).copied();
        let number = if let Some(number) = known {
            if let Some(Some((_, relaxed))) = self.definitions.schemas.get(number) {
                self.relaxed.extend_from_slice(relaxed);
            }
            number
        } else {
            let number = self.definitions.schemas.len();
            self.definitions.names.insert(key, number);
            self.definitions.schemas.push(None);
            self.definitions.paths.push(found.at.path.clone());
            let before = self.relaxed.len();
            let schema = self.schema(found.contents, &found.at)?;
            let relaxed = self.relaxed[before..].to_vec();
            self.definitions.schemas[number] = Some((schema, relaxed));
            number
        };
        Ok(json!({"$ref": format!("#/$defs/_{number}_")}))
    }
}
