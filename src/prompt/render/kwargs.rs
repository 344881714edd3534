//! Template variables that several fields of a body can set, and the form in which templates see a tool.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// The template arguments that a request sets.
#[derive(Debug)]
pub(super) struct Kwargs {
    /// Its `chat_template_kwargs`.
    given: Map<String, Value>,
    /// Fields of the body, which override them. They are few, so that a list is searched sooner than a map is built.
    fields: Vec<(&'static str, Value)>,
}

impl Kwargs {
    pub(super) fn new(given: Option<Map<String, Value>>) -> Self {
        Self {
            given: given.unwrap_or_default(),
            fields: Vec::with_capacity(4),
        }
    }

    /// Sets each field that the body has.
    pub(super) fn override_with<const N: usize>(&mut self, fields: [(&'static str, Value); N]) {
        let set = fields.into_iter().filter(|(_, value)| is_set(value));
        self.fields.extend(set);
    }

    /// Sets the reasoning effort. Some templates have a separate switch for thinking, so the effort
    /// sets that switch as well: off for `none`.
    pub(super) fn override_effort(&mut self, effort: Option<Value>) {
        let Some(effort) = effort.filter(|effort| !effort.is_null()) else {
            return;
        };
        let thinks = effort != "none";
        let has_switch = self.given.contains_key("enable_thinking");
        self.override_with([("reasoning_effort", effort)]);
        if !has_switch {
            self.override_with([("enable_thinking", thinks.into())]);
        }
    }
}

/// Null and "auto" mean "not set".
fn is_set(value: &Value) -> bool {
    !value.is_null() && value != "auto"
}

/// All template arguments of a rendering.
#[derive(Debug)]
pub(super) struct Arguments<'a> {
    /// The template arguments that the engines were started with.
    pub(super) engine: &'a Map<String, Value>,
    /// The tools of the body, which override those of `engine`.
    pub(super) tools: Option<Value>,
    /// The other arguments of the request, which override those of the engines and the tools.
    pub(super) request: Kwargs,
}

impl Arguments<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let Kwargs { given, fields } = &self.request;
        let mut fields = fields.iter().rev();
        if let Some((_, value)) = fields.find(|(name, _)| *name == key) {
            return Some(value);
        }
        let given = given.get(key).filter(|value| is_set(value));
        let tools = || self.tools.as_ref().filter(|_| key == "tools");
        given.or_else(tools).or_else(|| self.engine.get(key))
    }

    /// Each argument; of several under one name the last counts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Cow<'static, str>, &Value)> {
        let Kwargs { given, fields } = &self.request;
        let owned = |(name, value): (&String, _)| (Cow::Owned(name.clone()), value);
        let engine = self.engine.iter().map(owned);
        let tools = self.tools.iter().map(|tools| ("tools".into(), tools));
        let given = given.iter().filter(|(_, value)| is_set(value)).map(owned);
        let fields = fields.iter().map(|(name, value)| ((*name).into(), value));
        engine.chain(tools).chain(given).chain(fields)
    }
}

/// A function tool as templates see it: only these keys, in this order.
pub(super) fn function_tool(mut function: Map<String, Value>) -> Option<Map<String, Value>> {
    let mut shown = Map::with_capacity(4);
    let name = function.shift_remove("name").filter(Value::is_string)?;
    shown.insert("name".to_owned(), name);
    for key in ["description", "parameters"] {
        let value = function.shift_remove(key).unwrap_or(Value::Null);
        shown.insert(key.to_owned(), value);
    }
    for key in ["strict", "defer_loading"] {
        if let Some(value) = function.shift_remove(key).filter(|value| !value.is_null()) {
            shown.insert(key.to_owned(), value);
        }
    }
    let mut tool = Map::with_capacity(2);
    tool.insert("type".to_owned(), "function".into());
    tool.insert("function".to_owned(), Value::Object(shown));
    Some(tool)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_argument_that_is_set_under_a_name_counts() {
        let object = |json: Value| json.as_object().unwrap().clone();
        let engine = object(json!({"a": "engine", "b": "engine", "tools": "engine", "n": null}));
        let given = object(json!({"a": "auto", "b": "given", "c": "given", "d": null}));
        let mut request = Kwargs::new(Some(given));
        request.override_with([("c", "field".into()), ("b", Value::Null)]);
        request.override_effort(Some("none".into()));
        let arguments = Arguments {
            engine: &engine,
            tools: Some("body".into()),
            request,
        };
        let expected = [
            ("a", Some(json!("engine"))),
            ("b", Some(json!("given"))),
            ("c", Some(json!("field"))),
            ("d", None),
            ("n", Some(Value::Null)),
            ("tools", Some(json!("body"))),
            ("reasoning_effort", Some(json!("none"))),
            ("enable_thinking", Some(json!(false))),
        ];
        for (key, value) in expected {
            assert_eq!(arguments.get(key), value.as_ref(), "{key}");
            let last = arguments.iter().filter(|(name, _)| *name == key).last();
            assert_eq!(last.map(|(_, value)| value), value.as_ref(), "{key}");
        }
    }
}
