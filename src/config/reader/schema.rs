//! What a JSON Schema says of one setting, read from the forms that the derive macro writes.

use serde_json::Value;

use crate::http::client_address::NETWORK;
use crate::units;

/// The schemas of which a value may satisfy any one: those of `anyOf` and `oneOf`, else the schema itself.
pub(crate) fn alternatives(schema: &Value) -> Vec<&Value> {
    let listed = schema.get("anyOf").or_else(|| schema.get("oneOf"));
    match listed.and_then(Value::as_array) {
        Some(list) => list.iter().flat_map(alternatives).collect(),
        None => vec![schema],
    }
}

/// The maps with known keys that a value may be, or whose list it is.
pub(crate) fn parts<'s>(path: &str, schema: &'s Value) -> Vec<(String, &'s Value)> {
    let mut found = Vec::new();
    for schema in alternatives(schema) {
        if schema.get("properties").is_some() {
            found.push((path.to_owned(), schema));
        } else if let Some(items) = schema.get("items") {
            found.extend(parts(&format!("{path}[]"), items));
        }
    }
    found
}

pub(crate) fn properties(schema: &Value) -> Vec<(&String, &Value)> {
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().collect()
}

/// The paths of all keys that take a value, as the reference names them: `workers[].url`.
pub(crate) fn leaves(schema: &Value) -> Vec<String> {
    fn push(path: &str, schema: &Value, found: &mut Vec<String>) {
        let parts = parts(path, schema);
        if parts.is_empty() {
            found.push(path.to_owned());
        }
        for (path, part) in parts {
            for (key, schema) in properties(part) {
                let path = match &*path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                push(&path, schema, found);
            }
        }
    }
    let mut found = Vec::new();
    push("", schema, &mut found);
    found
}

/// Whether a value of this JSON type (`string`, `integer`, ...) satisfies one of the schema's types.
pub(super) fn allows(schema: &Value, name: &str) -> bool {
    match schema.get("type") {
        Some(Value::String(known)) => known == name,
        Some(Value::Array(known)) => known.iter().any(|known| known == name),
        _ => is_any(schema),
    }
}

/// Whether the schema takes every value.
pub(super) fn is_any(schema: &Value) -> bool {
    schema.as_bool() == Some(true)
        || (schema.is_object()
            && ["type", "enum", "const"]
                .iter()
                .all(|key| schema.get(key).is_none()))
}

/// The texts that an enumeration has, in order.
pub(crate) fn names(schema: &Value) -> Vec<&str> {
    let listed = schema.get("enum").and_then(Value::as_array);
    let listed = listed.into_iter().flatten().chain(schema.get("const"));
    listed.filter_map(Value::as_str).collect()
}

pub(super) fn format(schema: &Value) -> &str {
    let format = schema.get("format").and_then(Value::as_str);
    format.unwrap_or_default()
}

/// What a setting takes, for "expected ...".
pub(crate) fn describe(alternatives: &[&Value]) -> String {
    let names: Vec<String> = alternatives
        .iter()
        .flat_map(|schema| names(schema))
        .map(|name| format!("`{name}`"))
        .collect();
    let mut kinds = match &*names {
        [] => Vec::new(),
        [one] => vec![one.clone()],
        many => vec![format!("one of {}", many.join(", "))],
    };
    for schema in alternatives {
        for (name, kind) in [
            ("string", text_kind(schema)),
            ("integer", "a whole number"),
            ("number", "a number"),
            ("boolean", "`true` or `false`"),
            ("array", "a list"),
            ("object", "a map of keys and values"),
        ] {
            let is_new = !kinds.iter().any(|known| known == kind);
            if self::names(schema).is_empty() && allows(schema, name) && is_new {
                kinds.push(kind.to_owned());
            }
        }
    }
    kinds.join(" or ")
}

fn text_kind(schema: &Value) -> &'static str {
    match format(schema) {
        units::DURATION => "a duration such as `30s`",
        units::SIZE => "a size such as `64MiB`",
        NETWORK => "an address or network such as `10.0.0.0/8`",
        _ => "a text",
    }
}
