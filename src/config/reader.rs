//! A YAML file -> a typed value, or every problem in it with file, line, column and path.
//!
//! The YAML library gives a tree with positions. The JSON Schema of the settings (derived from their
//! types) says which keys there are and what each takes; `convert` walks both and reports unknown keys
//! and wrong values. What a schema cannot say is added with [`Reader::problem`] by whoever checks the
//! value. Neither environment nor disk is touched here; both come in as functions.

mod convert;
mod node;
mod outside;
mod problems;
mod schema;
mod substitute;
mod value;

use std::collections::HashMap;
use std::fmt::Display;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use self::outside::Outside;
pub use self::problems::{Position, Problem, Problems};

use self::convert::Converter;
use self::problems::Places;
#[cfg(test)]
pub(super) use self::schema::leaves;
pub(super) use self::schema::{alternatives, describe, names, parts, properties};

/// One file that was read, while its value is being checked.
#[derive(Debug)]
pub struct Reader {
    problems: Problems,
    places: Places,
    /// Paths whose values come from the command line, and the flags as they were given.
    flags: HashMap<String, String>,
    may_lack_files: bool,
}

impl Reader {
    /// Reads a text as a `T`. There is no value if the text is no YAML or a required key is missing; a
    /// problem then says so. A value may come with problems: then defaults stand for what is wrong, so
    /// that it can be checked for more problems, and only [`Reader::finish`] gives it free.
    pub fn read<T>(file: &str, text: &[u8], outside: Outside<'_>) -> (Self, Option<T>)
    where
        T: DeserializeOwned + JsonSchema,
    {
        let mut reader = Self {
            problems: Problems::new(file),
            places: Places::default(),
            flags: HashMap::new(),
            may_lack_files: outside.may_lack_files,
        };
        let value = match node::parse(text) {
            Err((at, message)) => {
                reader.problems.push(at, "", message);
                reader.places.fail("");
                return (reader, None);
            }
            Ok(None) => Some(Value::Object(serde_json::Map::new())),
            Ok(Some(node)) => {
                let schema = json_schema::<T>();
                Converter::new(outside, &mut reader.problems, &mut reader.places, &schema)
                    .convert(&node, &schema)
            }
        };
        let value = value.and_then(|value| match serde_json::from_value(value) {
            Ok(value) => Some(value),
            // What a type checks beyond its schema; or it follows from what was reported.
            Err(error) => {
                if reader.problems.is_empty() {
                    reader.problems.push(Position::START, "", error);
                }
                None
            }
        });
        (reader, value)
    }

    /// Adds a problem of the value at `path`, such as `workers[2].url`, at the position of that key or of
    /// the innermost part of the path that the file has. Nothing is added where the file's own value was
    /// refused and a default was checked in its stead.
    pub fn problem(&mut self, path: &str, message: impl Display) {
        let within = |flag: &&String| match path.strip_prefix(flag.as_str()) {
            Some(rest) => rest.is_empty() || rest.starts_with(['.', '[']),
            None => false,
        };
        if let Some(flag) = self.flags.keys().find(within) {
            self.problems.push(None, &self.flags[flag], message);
            return;
        }
        let path = self.places.in_file(path);
        if let Some(at) = self.places.find(&path) {
            self.problems.push(at, &path, message);
        }
    }

    /// Adds what a part finds wrong with its own settings: the ends of paths that begin with `path`, with a message each.
    pub fn part_problems<K: Display, M: Display>(
        &mut self,
        path: &str,
        found: impl IntoIterator<Item = (K, M)>,
    ) {
        for (key, message) in found {
            self.problem(&format!("{path}{key}"), message);
        }
    }

    /// Reports a problem at `path` that follows from the values at `others`, too: not while one of those is refused, which is
    /// reported where it stands.
    pub fn conflict(&mut self, path: &str, others: &[&str], message: impl Display) {
        if !self.is_any_refused(others) {
            self.problem(path, message);
        }
    }

    /// As [`Reader::problem`], of a value that names a file. Where files may be missing, one that `is_missing` is noted.
    pub fn file_problem(&mut self, path: &str, is_missing: bool, message: impl Display) {
        if !(is_missing && self.may_lack_files) {
            return self.problem(path, message);
        }
        let path = self.places.in_file(path);
        if let Some(at) = self.places.find(&path) {
            self.places.absent(at, &path, message);
        }
    }

    /// The missing files that were noted: one line each.
    pub fn missing_files(&self) -> Vec<String> {
        self.places.missing_files(self.problems.file())
    }

    /// What the file has that is read and not used: one line each.
    pub fn warnings(&self) -> Vec<String> {
        self.places.warnings(self.problems.file())
    }

    /// Problems at `path` are reported as problems of this flag: its value is not in the file.
    pub fn set_by_flag(&mut self, path: String, flag: String) {
        self.flags.insert(path, flag);
    }

    /// A path for a message: the flag, if its value comes from one.
    pub fn name<'r>(&'r self, path: &'r str) -> &'r str {
        self.flags.get(path).map_or(path, String::as_str)
    }

    /// Whether the file has a value at `path`, be it refused or a default that is written out.
    pub fn has(&self, path: &str) -> bool {
        self.places.has(path)
    }

    /// Whether the value at `path` or a part of it was refused.
    pub fn is_refused(&self, path: &str) -> bool {
        self.places.find(path).is_none()
    }

    /// As [`Reader::is_refused`], for one of several values.
    pub fn is_any_refused(&self, paths: &[&str]) -> bool {
        paths.iter().any(|path| self.is_refused(path))
    }

    /// Whether nothing wrong was found so far.
    pub fn is_good(&self) -> bool {
        self.problems.is_empty()
    }

    /// What is wrong, in the order of the file.
    pub fn into_problems(mut self) -> Problems {
        self.problems.sort();
        self.problems
    }

    /// The value, if there are no problems.
    pub fn finish<T>(self, value: Option<T>) -> Result<T, Problems> {
        match value {
            Some(value) if self.is_good() => Ok(value),
            _ => Err(self.into_problems()),
        }
    }
}

/// The JSON Schema of a settings type, without references, so that it can be walked.
pub fn json_schema<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_deserialize();
    settings.inline_subschemas = true;
    settings.into_generator().into_root_schema_for::<T>().into()
}

/// A value as YAML that reads back as an equal one.
pub fn to_yaml(value: &impl Serialize) -> Result<String, String> {
    let mut value = serde_json::to_value(value).map_err(|error| error.to_string())?;
    escape_dollars(&mut value);
    serde_saphyr::to_string(&value).map_err(|error| error.to_string())
}

/// Reading substitutes variables, so that a `$` is written `$$`.
fn escape_dollars(value: &mut Value) {
    match value {
        Value::String(text) => *text = text.replace('$', "$$"),
        Value::Array(items) => items.iter_mut().for_each(escape_dollars),
        Value::Object(map) => map.values_mut().for_each(escape_dollars),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests;
