//! What a Responses request makes the pretend model do: say something, think first, or call a function.
//! Pure.

use serde_json::{Value, json};

/// The shape of an answer; the words in it are generated.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    pub(crate) thinks: bool,
    pub(crate) call: Option<Call>,
    /// What a text must look like.
    pub(crate) format: Option<Frame>,
    /// Otherwise its limit ends it.
    pub(crate) ends_itself: bool,
}

/// A function that is called instead of saying something.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: Frame,
}

/// JSON that fits a schema, with the words in its first free text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub(crate) head: String,
    pub(crate) tail: String,
    pub(crate) has_words: bool,
}

impl Frame {
    pub(super) fn of(schema: &Value) -> Self {
        let mut fields = json!({});
        let mut words = None;
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            if words.is_none() && schema["type"] == "string" && schema.get("enum").is_none() {
                words = Some(name);
            } else {
                fields[name] = plain(schema);
            }
        }
        let mut head = fields.to_string();
        head.pop();
        if let Some(name) = words {
            let comma = if head.len() > 1 { "," } else { "" };
            head += &format!("{comma}{}:\"", Value::from(name.as_str()));
        }
        Self {
            head,
            tail: if words.is_some() { "\"}" } else { "}" }.to_owned(),
            has_words: words.is_some(),
        }
    }

    /// The words in their place.
    pub(crate) fn around(&self, words: &str) -> String {
        let words = if self.has_words { words } else { "" };
        format!("{}{words}{}", self.head, self.tail)
    }
}

/// Called as soon as there is a function and the last word is not a function's: a model with tools that
/// needs no persuasion.
pub(super) fn call(tools: Option<&Value>, choice: Option<&Value>, last: &Value) -> Option<Call> {
    let functions = tools?.as_array()?.iter();
    let mut functions = functions.filter(|tool| tool["type"] == "function");
    let choice = choice.unwrap_or(&Value::Null);
    let is_answered = last["type"] == "function_call_output";
    let function = match choice.as_str() {
        Some("none") => None,
        Some("required") => functions.next(),
        _ if choice["type"] == "function" => functions.find(|tool| tool["name"] == choice["name"]),
        _ if is_answered => None,
        _ => functions.next(),
    }?;
    Some(Call {
        name: function["name"].as_str()?.to_owned(),
        arguments: Frame::of(&function["parameters"]),
    })
}

/// The plainest value that a schema allows.
fn plain(schema: &Value) -> Value {
    if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("string") => "x".into(),
        Some("integer" | "number") => 1.into(),
        Some("boolean") => true.into(),
        Some("array") => json!([]),
        Some("object") => json!({}),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_called_until_it_has_answered() {
        let tools = json!([
            {"type": "web_search"},
            {"type": "function", "name": "a", "parameters": {"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C"]}}}},
            {"type": "function", "name": "b"},
        ]);
        let (asked, answered) = (
            json!({"role": "user"}),
            json!({"type": "function_call_output"}),
        );
        let check = |choice: Value, last: &Value, expected: Option<&str>| {
            let call = call(Some(&tools), Some(&choice), last);
            let name = call.as_ref().map(|call| call.name.as_str());
            assert_eq!(name, expected, "{choice} {last}");
            call
        };
        let called = check("auto".into(), &asked, Some("a")).unwrap();
        let arguments = called.arguments.around("ash bay ");
        assert_eq!(arguments, r#"{"days":1,"unit":"C","city":"ash bay "}"#);
        check(Value::Null, &answered, None);
        check("none".into(), &asked, None);
        check("required".into(), &answered, Some("a"));
        let named = json!({"type": "function", "name": "b"});
        let called = check(named, &answered, Some("b")).unwrap();
        assert_eq!(called.arguments.around("ash "), "{}");
        assert_eq!(call(None, None, &asked), None);
    }
}
