//! Template variables that several fields of a body can set, and the form in which templates see a tool.

use serde_json::{Map, Value};

/// Sets each field that the body has. Null and "auto" mean "not set".
pub(super) fn override_with<const N: usize>(
    kwargs: &mut Map<String, Value>,
    fields: [(&str, Value); N],
) {
    for (key, value) in fields {
        if !value.is_null() && value != "auto" {
            kwargs.insert(key.to_owned(), value);
        }
    }
}

/// Sets the reasoning effort. Some templates have a separate switch for thinking, so the effort
/// sets that switch as well: off for `none`.
pub(super) fn override_effort(kwargs: &mut Map<String, Value>, effort: Option<Value>) {
    let Some(effort) = effort.filter(|effort| !effort.is_null()) else {
        return;
    };
    let thinks = effort != "none";
    let has_switch = kwargs.contains_key("enable_thinking");
    override_with(kwargs, [("reasoning_effort", effort)]);
    if !has_switch {
        kwargs.insert("enable_thinking".to_owned(), thinks.into());
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
        if let Some(value) = function.shift_remove(key).filter(|it| !it.is_null()) {
            shown.insert(key.to_owned(), value);
        }
    }
    let mut tool = Map::with_capacity(2);
    tool.insert("type".to_owned(), "function".into());
    tool.insert("function".to_owned(), Value::Object(shown));
    Some(tool)
}
