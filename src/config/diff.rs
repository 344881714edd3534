//! What differs between two configurations: keys, old and new values, and when a change takes effect. Pure. Values of
//! secrets never appear in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use super::effect::{Effect, effect_of};
use super::settings::Config;
use crate::secret::{HIDDEN, with_digests};

/// A longer value is cut in messages.
const MAX_VALUE_CHARS: usize = 120;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Such as `routing.policy`. An item of a list has its name in brackets: `workers[http://10.0.0.11:8000].role`.
    pub path: String,
    /// Absent for an item that is new. `***` stands for a secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old: Option<Value>,
    /// Absent for an item that is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new: Option<Value>,
    pub effect: Effect,
    /// The path in a file, where items of a list have numbers.
    #[serde(skip)]
    pub file_path: String,
}

/// A configuration with all its defaults, to be compared with others. Secrets are in it as digests.
#[derive(Clone, PartialEq)]
pub struct Comparable(Value);

impl fmt::Debug for Comparable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comparable({})", shown(&self.0))
    }
}

impl Comparable {
    pub fn of(config: &Config) -> Self {
        // Settings always serialize.
        Self(with_digests(|| serde_json::to_value(config)).unwrap_or_default())
    }

    /// A configuration as [`Comparable::shown`] gave it, in this process or another: with secrets that differ from no other.
    pub fn from_shown(value: Value) -> Self {
        Self(value)
    }

    /// With `***` for secrets.
    pub fn shown(&self) -> Value {
        shown(&self.0)
    }

    /// Without the digests of secrets, to be compared with one [`Comparable::from_shown`].
    #[must_use]
    pub fn without_digests(&self) -> Self {
        Self(self.shown())
    }

    /// What `new` changes.
    pub fn changes(&self, new: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        compare(&Place::default(), &self.0, &new.0, &mut changes);
        changes
    }
}

impl Change {
    /// The values before and after, without secrets.
    pub fn values(&self) -> String {
        match (&self.old, &self.new) {
            (None, _) => "added".to_owned(),
            (_, None) => "removed".to_owned(),
            (Some(old), Some(new)) if is_secret(old) || is_secret(new) => {
                match (is_empty(old), is_empty(new)) {
                    (true, false) => "set".to_owned(),
                    (false, true) => "removed".to_owned(),
                    _ => "changed".to_owned(),
                }
            }
            (Some(old), Some(new)) => format!("{} -> {}", text(old), text(new)),
        }
    }
}

impl fmt::Display for Change {
    /// One line, as `config diff` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.old, &self.new) {
            (None, _) => write!(f, "+ {}", self.path)?,
            (_, None) => write!(f, "- {}", self.path)?,
            _ => write!(f, "~ {}: {}", self.path, self.values())?,
        }
        match self.effect {
            Effect::Reload => Ok(()),
            Effect::Restart => f.write_str(" (needs a restart)"),
        }
    }
}

/// A path in its three forms: for people, in the file, in the reference.
#[derive(Clone, Default)]
struct Place {
    path: String,
    file_path: String,
    key: String,
}

impl Place {
    fn key(&self, name: &str) -> Self {
        let join = |path: &str| match path {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        };
        Self {
            path: join(&self.path),
            file_path: join(&self.file_path),
            key: join(&self.key),
        }
    }

    /// An item of a list; `index` is absent if the new file does not have it.
    fn item(&self, name: &str, index: Option<usize>) -> Self {
        Self {
            path: format!("{}[{name}]", self.path),
            file_path: match index {
                Some(index) => format!("{}[{index}]", self.file_path),
                None => self.file_path.clone(),
            },
            key: format!("{}[]", self.key),
        }
    }

    fn change(&self, old: Option<&Value>, new: Option<&Value>) -> Change {
        Change {
            path: self.path.clone(),
            file_path: self.file_path.clone(),
            old: old.map(shown),
            new: new.map(shown),
            effect: effect_of(&self.key),
        }
    }
}

fn compare(place: &Place, old: &Value, new: &Value, changes: &mut Vec<Change>) {
    if old == new {
        return;
    }
    match (old, new) {
        (Value::Object(old), Value::Object(new)) if !is_variant_changed(old, new) => {
            let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in names {
                let place = place.key(name);
                match (old.get(name), new.get(name)) {
                    (Some(old), Some(new)) => compare(&place, old, new, changes),
                    (old, new) => changes.push(place.change(old, new)),
                }
            }
        }
        (Value::Array(old), Value::Array(new)) => match (named(old), named(new)) {
            (Some(old), Some(new)) => compare_items(place, &old, &new, changes),
            _ => changes.push(place.change(Some(&old.clone().into()), Some(&new.clone().into()))),
        },
        (old, new) => changes.push(place.change(Some(old), Some(new))),
    }
}

/// Items by their names, wherever they stand: a worker that is taken out of a list changes none of the others.
fn compare_items(place: &Place, old: &Items<'_>, new: &Items<'_>, changes: &mut Vec<Change>) {
    let names = old.keys().chain(new.keys()).collect::<BTreeSet<_>>();
    let before = changes.len();
    for name in names {
        match (old.get(name), new.get(name)) {
            (Some((_, old)), Some((index, new))) => {
                compare(&place.item(name, Some(*index)), old, new, changes);
            }
            (old, new) => {
                let place = place.item(name, new.map(|(index, _)| *index));
                changes.push(place.change(old.map(|(_, old)| *old), new.map(|(_, new)| *new)));
            }
        }
    }
    if changes.len() == before {
        // Only the order differs.
        let order = |items: &Items<'_>| {
            let mut names: Vec<(usize, &String)> =
                items.iter().map(|(name, (at, _))| (*at, name)).collect();
            names.sort_unstable();
            names.into_iter().map(|(_, name)| name.clone()).collect()
        };
        changes.push(place.change(Some(&order(old)), Some(&order(new))));
    }
}

/// A list's items by name, each with its index.
type Items<'a> = BTreeMap<String, (usize, &'a Value)>;

/// `None` for a list of plain values, which is compared as a whole.
fn named(list: &[Value]) -> Option<Items<'_>> {
    let mut items = Items::new();
    for (index, item) in list.iter().enumerate() {
        let name = name_of(item.as_object()?);
        let mut free = name.clone();
        for number in 2.. {
            if !items.contains_key(&free) {
                break;
            }
            free = format!("{name} #{number}");
        }
        items.insert(free, (index, item));
    }
    Some(items)
}

/// What distinguishes an item from others: its URL, name or path, the model of a target, the issuer of tokens; of a kind of
/// discovery, the kind with it.
fn name_of(item: &Map<String, Value>) -> String {
    for key in ["url", "name", "path", "model", "issuer"] {
        if let Some(Value::String(text)) = item.get(key)
            && !text.is_empty()
        {
            return text.clone();
        }
    }
    let mut entries = item.iter();
    match (entries.next(), entries.next()) {
        (Some((kind, Value::Object(inner))), None) => match name_of(inner) {
            name if name.is_empty() => kind.clone(),
            name => format!("{kind} {name}"),
        },
        (Some((kind, _)), None) => kind.clone(),
        _ => String::new(),
    }
}

/// Values of an enumeration are maps with one key, the variant's name.
fn is_variant_changed(old: &Map<String, Value>, new: &Map<String, Value>) -> bool {
    old.len() == 1 && new.len() == 1 && old.keys().ne(new.keys())
}

fn shown(value: &Value) -> Value {
    match value {
        Value::String(text) if text.starts_with(HIDDEN) => HIDDEN.into(),
        Value::Array(items) => items.iter().map(shown).collect(),
        Value::Object(map) => {
            let shown = map.iter().map(|(key, value)| (key.clone(), shown(value)));
            Value::Object(shown.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

fn is_secret(value: &Value) -> bool {
    match value {
        Value::String(text) => text == HIDDEN,
        Value::Array(items) => items.iter().any(is_secret),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Null => true,
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
    }
}

fn text(value: &Value) -> String {
    let text = match value {
        Value::String(text) if !text.is_empty() => text.clone(),
        Value::Null => "none".to_owned(),
        value => value.to_string(),
    };
    match text.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests;
