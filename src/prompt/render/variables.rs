//! What a template sees: its variables, and the messages among them, as values of the template engine.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object};
use serde_json::Value;

use super::chat_message::{Message, PlainContent, PlainMessage};
use super::exact_integers;
use crate::prompt::template;

/// More variables than requests have that send no template arguments of their own, but for a few.
const LISTED_MAX: usize = 32;

type Variable = (Cow<'static, str>, minijinja::Value);

/// Variables that are the same for all renderings of a model.
pub(super) type Fixed = Arc<[Variable]>;

/// The variables of one rendering. They are few in most requests; then a list is searched sooner than a map is built.
#[derive(Debug)]
pub(super) struct Variables {
    fixed: Fixed,
    own: Vec<Variable>,
}

impl Variables {
    pub(super) fn new(fixed: Fixed) -> Self {
        Self {
            fixed,
            own: Vec::with_capacity(8),
        }
    }

    /// The last value that is put under a name counts, and overrides a fixed one.
    pub(super) fn put(&mut self, name: impl Into<Cow<'static, str>>, value: minijinja::Value) {
        self.own.push((name.into(), value));
    }

    pub(super) fn into_value(self) -> minijinja::Value {
        if self.own.len() <= LISTED_MAX {
            return minijinja::Value::from_object(self);
        }
        let all = self.fixed.iter().chain(&self.own);
        minijinja::Value::from_pairs(all.map(|(name, value)| {
            let name = minijinja::Value::from(&**name);
            (name, value.clone())
        }))
    }
}

impl Object for Variables {
    fn get_value(self: &Arc<Self>, key: &minijinja::Value) -> Option<minijinja::Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<minijinja::Value> {
        let mut variables = self.fixed.iter().chain(&self.own).rev();
        variables
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.clone())
    }

    /// Templates look variables up by name only.
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }
}

/// A message as a template sees it.
pub(super) fn message_value(message: Message<'_>) -> minijinja::Value {
    let text = |text: &str| minijinja::Value::from(text);
    match message {
        Message::Plain(PlainMessage { role, content }) => {
            let content = match content {
                PlainContent::Text(content) => text(&content),
                PlainContent::List(part) => {
                    let part = part.map(|part| Pair::value(&PART, [text("text"), text(&part)]));
                    minijinja::Value::from(part.into_iter().collect::<Vec<_>>())
                }
            };
            Pair::value(&MESSAGE, [text(&role), content])
        }
        Message::Object(message) => to_jinja(&Value::Object(message)),
    }
}

/// The keys of a plain message and of its part.
const MESSAGE: [&str; 2] = ["role", "content"];
const PART: [&str; 2] = ["type", "text"];

/// A map of two known keys, which are not hashed.
#[derive(Debug)]
struct Pair {
    keys: &'static [&'static str; 2],
    values: [minijinja::Value; 2],
}

impl Pair {
    fn value(keys: &'static [&'static str; 2], values: [minijinja::Value; 2]) -> minijinja::Value {
        minijinja::Value::from_object(Self { keys, values })
    }
}

impl Object for Pair {
    fn get_value(self: &Arc<Self>, key: &minijinja::Value) -> Option<minijinja::Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<minijinja::Value> {
        let mut members = self.keys.iter().zip(&self.values);
        members
            .find(|(name, _)| **name == key)
            .map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(self.keys)
    }
}

pub(super) fn to_jinja(value: &Value) -> minijinja::Value {
    match value {
        Value::String(text) => match exact_integers::digits(text) {
            Some(digits) => template::of_digits(digits),
            None => minijinja::Value::from(text.as_str()),
        },
        Value::Array(items) => {
            minijinja::Value::from(items.iter().map(to_jinja).collect::<Vec<_>>())
        }
        Value::Object(map) => minijinja::Value::from_pairs(
            map.iter()
                .map(|(key, value)| (minijinja::Value::from(key.as_str()), to_jinja(value))),
        ),
        Value::Null => minijinja::Value::from(()),
        Value::Bool(is) => minijinja::Value::from(*is),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => minijinja::Value::from(number),
            (None, Some(number), _) => minijinja::Value::from(number),
            (None, None, number) => minijinja::Value::from(number.unwrap_or(f64::NAN)),
        },
    }
}
