//! The reference of the configuration, made from the settings' types: their keys, types, defaults and doc comments.

use std::fmt::Write;

use serde_json::Value;

use super::Config;
use super::effect::{Effect, effect_of};
use super::reader::{alternatives, describe, json_schema, names, parts, properties};

/// The JSON Schema of a configuration file.
pub fn schema() -> String {
    let mut text = serde_json::to_string_pretty(&json_schema::<Config>()).unwrap_or_default();
    text.push('\n');
    text
}

/// `docs/configuration.md`.
pub fn markdown() -> String {
    page(MIN_SHARED_KEYS)
}

/// The rows of the keys whose paths contain a text, as one table; `None` if there are none.
pub fn rows(text: &str) -> Option<String> {
    let page = page(usize::MAX);
    let is_row = |line: &&str| {
        let rest = line.strip_prefix("| `");
        let path = rest.and_then(|rest| rest.split('`').next());
        path.is_some_and(|path| path.contains(text))
    };
    let rows: Vec<&str> = page.lines().filter(is_row).collect();
    (!rows.is_empty()).then(|| format!("{TABLE_HEAD}{}\n", rows.join("\n")))
}

fn page(min_shared_keys: usize) -> String {
    let schema = json_schema::<Config>();
    let mut page = Page {
        text: String::from(INTRODUCTION),
        parts: Vec::new(),
        min_shared_keys,
    };
    for (key, schema) in properties(&schema) {
        page.push_part("##", key, schema);
    }
    page.text
}

/// A part with fewer keys is printed wherever it stands.
const MIN_SHARED_KEYS: usize = 4;

const TABLE_HEAD: &str = "| key | type | default | change | |\n|---|---|---|---|---|\n";

/// The reference so far, with the keys of each part: several parts have the same, such as the TLS of all listeners.
struct Page<'s> {
    text: String,
    parts: Vec<(String, Vec<(&'s String, &'s Value)>)>,
    /// A part with as many keys refers to the one before that has the same.
    min_shared_keys: usize,
}

const INTRODUCTION: &str = "\
# Configuration reference

Every key, made by `warmroute config reference`; with a key or a part of one, such as `batches.s3`, it prints those \
rows. Start from [config.yaml](../config.yaml), which has what a fleet \
usually needs; everything else has a default. `warmroute check --config FILE` prints a configuration with all its \
defaults, or everything that is wrong with it; `warmroute config schema` prints a JSON Schema for editors.

- A duration is written with its unit: `250ms`, `30s`, `10m`, `1h`, `30d`. A size is too: `4KiB`, `64MiB`, `1GiB`. Of bare \
numbers only `0` is accepted.
- `${NAME}` and `${NAME:-default}` in a value are replaced from the environment; `$$` is a dollar sign. Between braces or \
brackets they need quotes.
- A secret may also be `file:/path`, which reads it from that file. Secrets never appear in messages or output.
- A running router takes a change of a key marked `reload` over by itself, on SIGHUP and on `POST /reload` \
([Change the configuration without a restart](operations.md#change-the-configuration-without-a-restart)); one marked \
`restart` needs a restart.
- A part that has the keys of another one names it, and is written in the same way.
- Keys under `advanced` are for experts: their defaults are measured, and the reasons stand here.
";

impl<'s> Page<'s> {
    /// The heading of a part and what it is; then its keys, or the name of the part that has the same.
    fn push_part(&mut self, level: &str, path: &str, schema: &'s Value) {
        let _ = write!(self.text, "\n{level} `{path}`\n\n");
        if let Some(description) = description(schema) {
            let _ = write!(self.text, "{description}\n\n");
        }
        let maps = parts(path, schema);
        let keys = maps.iter().flat_map(|(_, part)| properties(part));
        let keys: Vec<_> = keys.collect();
        let same = |(_, of_part): &&(String, Vec<_>)| *of_part == keys;
        match (self.parts.iter().find(same), one_effect(path, &keys)) {
            (Some((first, _)), Some(effect)) if keys.len() >= self.min_shared_keys => {
                let anchor = first.replace(['[', ']', '.'], "");
                let change = effect.as_str();
                let _ = writeln!(
                    self.text,
                    "The keys of [`{first}`](#{anchor}). Change: {change}."
                );
            }
            _ => {
                self.parts.push((path.to_owned(), keys));
                self.push_keys(path, schema, maps);
            }
        }
    }

    /// The keys below a part: a table of those that take a value, then its own parts.
    fn push_keys(&mut self, path: &str, schema: &'s Value, maps: Vec<(String, &'s Value)>) {
        if maps.is_empty() {
            push_table(&mut self.text, [(path.to_owned(), schema)].into_iter());
        }
        for (path, part) in maps {
            let keys = properties(part).into_iter();
            let keys = keys.map(|(key, schema)| (format!("{path}.{key}"), schema));
            let (inner, leaves): (Vec<_>, Vec<_>) =
                keys.partition(|(path, schema)| !parts(path, schema).is_empty());
            push_table(&mut self.text, leaves.into_iter());
            for (path, schema) in inner {
                self.push_part("###", &path, schema);
            }
        }
    }
}

/// When changes of a part's keys take effect, if it is the same for all.
fn one_effect(path: &str, keys: &[(&String, &Value)]) -> Option<Effect> {
    let mut effects = keys
        .iter()
        .map(|(key, _)| effect_of(&format!("{path}.{key}")));
    let first = effects.next()?;
    effects.all(|effect| effect == first).then_some(first)
}

fn push_table<'s>(out: &mut String, keys: impl Iterator<Item = (String, &'s Value)>) {
    let mut is_first = true;
    for (path, schema) in keys {
        if std::mem::take(&mut is_first) {
            out.push_str(TABLE_HEAD);
        }
        let (kind, default) = (kind(schema), default(schema));
        let effect = effect_of(&path).as_str();
        let text = description(schema).unwrap_or_default();
        let choices = choices(schema);
        let _ = writeln!(
            out,
            "| `{path}` | {kind} | {default} | {effect} | {text}{choices} |"
        );
    }
}

/// What the value is, with its bounds.
fn kind(schema: &Value) -> String {
    let schemas = alternatives(schema);
    let is_enum = schemas.iter().any(|schema| !names(schema).is_empty());
    let mut kind = if is_enum {
        "name".to_owned()
    } else {
        describe(&schemas)
    };
    for (phrase, word) in [
        ("a duration such as `30s`", "duration"),
        ("a size such as `64MiB`", "size"),
        ("a whole number", "whole number"),
        ("a map of keys and values", "map"),
        ("a text", "text"),
        ("a number", "number"),
        ("a list", "list"),
    ] {
        kind = kind.replace(phrase, word);
    }
    let bound = |key: &str| {
        schemas.iter().find_map(|schema| match schema.get(key) {
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Number(number)) => Some(number.to_string()),
            _ => None,
        })
    };
    // What every number of a type has is no bound worth a word.
    let min = bound("min").or_else(|| bound("minimum").filter(|min| min != "0"));
    let is_typed = |max: &String| ["255", "65535", "4294967295"].contains(&max.as_str());
    let max = bound("max").or_else(|| bound("maximum").filter(|max| !is_typed(max)));
    match (min.filter(|min| min != "0s"), max) {
        (Some(min), Some(max)) => kind + &format!(", {min} to {max}"),
        (Some(min), None) => kind + &format!(", at least {min}"),
        (None, Some(max)) => kind + &format!(", at most {max}"),
        (None, None) => kind,
    }
}

fn default(schema: &Value) -> String {
    match schema.get("default") {
        None | Some(Value::Null) => "none".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "empty".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
    }
}

/// What each name of an enumeration means.
fn choices(schema: &Value) -> String {
    let mut out = String::new();
    for schema in alternatives(schema) {
        for name in names(schema) {
            // The description of several names together is the key's own.
            let own = description(schema).filter(|_| schema.get("const").is_some());
            let _ = match own {
                Some(text) => write!(out, "<br>`{name}`: {text}"),
                None => write!(out, "<br>`{name}`"),
            };
        }
    }
    out
}

fn description(schema: &Value) -> Option<String> {
    let text = schema.get("description")?.as_str()?;
    Some(text.replace('\n', " ").replace('|', "\\|"))
}
