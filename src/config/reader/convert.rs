//! The walk over a file's tree and the schema of the settings: variables are substituted, texts become what
//! their settings take, and what does not fit is reported with its position.

use std::io::ErrorKind;

use serde_json::{Map, Value};

use super::node::{self, Entry, Node, Scalar};
use super::outside::Outside;
use super::problems::{Places, Position, Problems};
use super::schema::{allows, alternatives, describe, format, is_any, leaves, names};
use super::substitute;
use super::value::value;
use crate::config::{misplaced, retired};
use crate::secret::{self, SECRET};

/// A shorter start of a name may mean anything.
const MIN_START_CHARS: usize = 3;

/// The start of a wrong value is enough to recognise it.
const MAX_FOUND_CHARS: usize = 60;

pub(super) struct Converter<'a> {
    outside: Outside<'a>,
    problems: &'a mut Problems,
    places: &'a mut Places,
    /// The schema of the whole file.
    root: &'a Value,
    path: String,
}

impl<'a> Converter<'a> {
    pub(super) fn new(
        outside: Outside<'a>,
        problems: &'a mut Problems,
        places: &'a mut Places,
        root: &'a Value,
    ) -> Self {
        Self {
            outside,
            problems,
            places,
            root,
            path: String::new(),
        }
    }

    /// The value as JSON that deserialises into the settings; `None` if it was refused and reported.
    pub(super) fn convert(&mut self, node: &Node, schema: &Value) -> Option<Value> {
        let schemas = alternatives(schema);
        self.places.add(&self.path, node.at);
        match &node.value {
            node::Value::Map(entries) => self.map(node.at, entries, &schemas),
            node::Value::List(items) => self.list(node.at, items, &schemas),
            node::Value::Scalar(scalar) => self.scalar(node.at, scalar, &schemas),
        }
    }

    fn refuse(&mut self, at: Position, message: impl std::fmt::Display) -> Option<Value> {
        self.problems.push(at, &self.path, message);
        self.places.fail(&self.path);
        None
    }

    /// Does something with a part of the current value.
    fn within<T>(&mut self, step: &str, then: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        if !step.starts_with('[') && !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(step);
        let done = then(self);
        self.path.truncate(length);
        done
    }

    fn map(&mut self, at: Position, entries: &[Entry], schemas: &[&Value]) -> Option<Value> {
        let maps: Vec<&Value> = schemas
            .iter()
            .copied()
            .filter(|schema| allows(schema, "object"))
            .collect();
        if maps.is_empty() {
            return self.refuse(at, format!("expected {}, found a map", describe(schemas)));
        }
        let mut known = Vec::new();
        let mut map = Map::new();
        for schema in &maps {
            let properties = schema.get("properties").and_then(Value::as_object);
            known.extend(properties.into_iter().flatten());
        }
        // Only without named keys: a derived schema allows others too, which are then mistakes.
        let other = maps
            .iter()
            .find_map(|schema| schema.get("additionalProperties"));
        let takes_any = maps.iter().any(|schema| is_any(schema));
        for entry in entries {
            let own = known.iter().find(|(name, _)| **name == entry.key);
            let schema = match (own, other) {
                (Some((_, schema)), _) => *schema,
                (None, Some(schema)) if schema.as_bool() != Some(false) => schema,
                (None, _) if takes_any || known.is_empty() => &Value::Bool(true),
                (None, _) => {
                    let retired = self.within(&step(&entry.key), |this| {
                        let reason = retired::reason(&this.path)?;
                        let message = format!("is not used any more: {reason}");
                        this.places.warn(entry.key_at, &this.path, message);
                        Some(())
                    });
                    if retired.is_some() {
                        continue;
                    }
                    let place = self.within(&step(&entry.key), |this| {
                        let place = misplaced::place(&this.path)?;
                        this.places.fail(&this.path);
                        Some(place)
                    });
                    let names = known.iter().map(|(name, _)| name.as_str());
                    let hint = match (place, nearest(&entry.key, names)) {
                        (Some(place), _) => format!("; {place}"),
                        (None, Some(near)) => {
                            // Its value is under the wrong name, so its default is not to be checked.
                            if !entries.iter().any(|entry| entry.key == near) {
                                self.within(&step(near), |this| this.places.fail(&this.path));
                            }
                            format!("; did you mean `{near}`?")
                        }
                        (None, None) => {
                            match self.within(&step(&entry.key), |this| this.elsewhere()) {
                                Some(paths) => format!("; did you mean {paths}?"),
                                // One of several kinds, whose names are few.
                                None if maps.len() > 1 => format!("; expected {}", one_of(&maps)),
                                None => String::new(),
                            }
                        }
                    };
                    let message = format!("unknown key `{}`{hint}", entry.key);
                    self.within(&step(&entry.key), |this| {
                        this.problems.push(entry.key_at, &this.path, message);
                    });
                    continue;
                }
            };
            let value = self.within(&step(&entry.key), |this| this.convert(&entry.value, schema));
            if let Some(value) = value {
                map.insert(entry.key.clone(), value);
            }
        }
        self.required(at, entries, &maps)?;
        let is_refused_choice = maps.len() > 1 && map.is_empty();
        (!is_refused_choice).then_some(Value::Object(map))
    }

    /// Where the file takes a key like the unknown one at the current path. A problem that is not listed needs no hint.
    fn elsewhere(&self) -> Option<String> {
        if self.problems.is_full() {
            return None;
        }
        misplaced::elsewhere(&self.path, &leaves(self.root))
    }

    /// Whether the map has the keys that it must have: those of its schema, or of one of several schemas.
    fn required(&mut self, at: Position, entries: &[Entry], maps: &[&Value]) -> Option<()> {
        let has = |key: &str| entries.iter().any(|entry| entry.key == key);
        if let [schema] = maps {
            let missing: Vec<&str> = required(schema).filter(|key| !has(key)).collect();
            for key in &missing {
                self.refuse(at, format!("the key `{key}` is missing"));
            }
            return missing.is_empty().then_some(());
        }
        let keys = maps.iter().flat_map(|schema| required(schema));
        let given: Vec<String> = keys
            .filter(|key| has(key))
            .map(|key| format!("`{key}`"))
            .collect();
        match &*given {
            [_] => return Some(()),
            // The unknown key was reported with the known ones.
            [] if !entries.is_empty() => self.places.fail(&self.path),
            [] => {
                self.refuse(at, format!("expected {}", one_of(maps)));
            }
            several => {
                let list = self
                    .path
                    .rsplit_once('[')
                    .map_or(&*self.path, |(list, _)| list);
                let number = match several.len() {
                    2 => "two".to_owned(),
                    number => number.to_string(),
                };
                let message = format!("{} are {number} entries of `{list}`", several.join(" and "));
                self.refuse(at, message);
            }
        }
        None
    }

    fn list(&mut self, at: Position, items: &[Node], schemas: &[&Value]) -> Option<Value> {
        let Some(list) = schemas.iter().find(|schema| allows(schema, "array")) else {
            return self.refuse(at, format!("expected {}, found a list", describe(schemas)));
        };
        let item_schema = list.get("items").unwrap_or(&Value::Bool(true));
        let (mut values, mut kept) = (Vec::new(), Vec::new());
        for (index, item) in items.iter().enumerate() {
            let step = format!("[{index}]");
            if let Some(value) = self.within(&step, |this| this.convert(item, item_schema)) {
                values.push(value);
                kept.push(index);
            }
        }
        self.places.keep(&self.path, kept);
        Some(Value::Array(values))
    }

    fn scalar(&mut self, at: Position, scalar: &Scalar, schemas: &[&Value]) -> Option<Value> {
        let done = match substitute::substitute(&scalar.text, self.outside.env) {
            Ok(done) => done,
            Err(problems) => {
                for problem in problems {
                    self.refuse(at, problem);
                }
                return None;
            }
        };
        if schemas.iter().any(|schema| format(schema) == SECRET) {
            return self.secret(at, &done.text, scalar);
        }
        // Part of a text stays text: `port-${N}` is no number, whatever N is.
        let may_be_typed = !scalar.is_quoted && (done.is_whole || !done.changed);
        let shown = match done.changed {
            // One secret where a list of them is expected.
            _ if schemas.iter().any(|schema| is_list_of_secrets(schema)) => "a text".to_owned(),
            true => format!("the value of `{}`", scalar.text),
            false if done.text.is_empty() && !scalar.is_quoted => "nothing".to_owned(),
            false => format!("`{}`", shorten(&done.text)),
        };
        match value(&done.text, may_be_typed, schemas) {
            Ok(value) => Some(value),
            Err(None) => {
                let expected = describe(schemas);
                let near = nearest(&done.text, schemas.iter().flat_map(|schema| names(schema)));
                let hint = match (near, map_form(&done.text, schemas)) {
                    _ if done.changed => String::new(),
                    (_, Some(form)) => format!("; write `{form}`"),
                    (Some(near), None) => format!("; did you mean `{near}`?"),
                    (None, None) => String::new(),
                };
                self.refuse(at, format!("expected {expected}, found {shown}{hint}"))
            }
            Err(Some(bound)) => self.refuse(at, format!("must be {bound}, not {shown}")),
        }
    }

    /// Follows `file:`; what the secret is appears in no message.
    fn secret(&mut self, at: Position, text: &str, scalar: &Scalar) -> Option<Value> {
        if !scalar.is_quoted && matches!(text, "" | "~" | "null") {
            return self.refuse(at, "expected a text, found nothing");
        }
        let Some(path) = text.strip_prefix("file:") else {
            return Some(Value::String(text.to_owned()));
        };
        match (self.outside.read_file)(path) {
            Err(error) => {
                let message = format!("cannot read `{path}`: {error}");
                if error.kind() != ErrorKind::NotFound || !self.outside.may_lack_files {
                    return self.refuse(at, message);
                }
                self.places.absent(at, &self.path, message);
                // The path stands in for the secret: it is not empty, and another one than that of another file.
                Some(Value::String(secret::with_file(path, path)))
            }
            Ok(content) => {
                let secret = secret::of_file(&content);
                if secret.is_empty() {
                    self.refuse(at, format!("`{path}` is empty"))
                } else {
                    Some(Value::String(secret::with_file(path, secret)))
                }
            }
        }
    }
}

/// The keys that a map must have.
fn required(schema: &Value) -> impl Iterator<Item = &str> {
    let keys = schema.get("required").and_then(Value::as_array);
    keys.into_iter().flatten().filter_map(Value::as_str)
}

/// The keys that tell several maps from each other, for "expected ...".
fn one_of(maps: &[&Value]) -> String {
    let keys = maps.iter().flat_map(|schema| required(schema));
    let keys: Vec<String> = keys.map(|key| format!("`{key}`")).collect();
    format!("one of the keys {}", keys.join(", "))
}

/// How a text is written where a map is asked for: `{from: auto}` for one of the names that a key takes, and
/// `{redis: "redis://HOST:6379"}` for a key that has an example, or a URL whose scheme is that key.
fn map_form(text: &str, schemas: &[&Value]) -> Option<String> {
    let maps = schemas.iter().filter_map(|schema| schema.get("properties"));
    let mut properties = maps.filter_map(Value::as_object).flatten();
    // `redis` is the scheme of a URL, too, and `rediss`.
    let name = text.split_once("://").map_or(text, |(scheme, _)| scheme);
    properties.find_map(|(key, schema)| {
        let example = schema.get("examples").and_then(|list| list.get(0));
        let is_key = key == name || name.strip_suffix('s') == Some(key.as_str());
        if let (true, Some(example)) = (is_key, example) {
            return Some(format!("{{{key}: {example}}}"));
        }
        let takes_it = |schema: &&Value| names(schema).contains(&text);
        let is_named = alternatives(schema).iter().any(takes_it);
        is_named.then(|| format!("{{{key}: {text}}}"))
    })
}

fn is_list_of_secrets(schema: &Value) -> bool {
    let items = schema.get("items");
    items.is_some_and(|items| format(items) == SECRET)
}

/// A key as a part of a path; one with other characters is written `labels["a.b"]`.
fn step(key: &str) -> String {
    let is_simple = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '-' | '/');
    if !key.is_empty() && key.chars().all(is_simple) {
        key.to_owned()
    } else {
        format!("[{key:?}]")
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_FOUND_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The known name that a misspelt one probably means: a third of it may differ, or an end be missing (`alias` for
/// `aliases`).
fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    // The distance costs the product of the lengths, and no real key is this long.
    if name.len() > MAX_FOUND_CHARS {
        return None;
    }
    let max_slips = (name.chars().count() / 3).max(1);
    let fold = |name: &str| name.to_lowercase().replace('-', "_");
    let distance = |known: &str| strsim::damerau_levenshtein(&fold(name), &fold(known));
    let is_short = name.chars().count() < MIN_START_CHARS;
    let is_start = |known: &str| !is_short && fold(known).starts_with(&fold(name));
    known
        .map(|known| (distance(known), known))
        .filter(|(slips, known)| *slips <= max_slips || is_start(known))
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, near)| near)
}
