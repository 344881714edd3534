//! What a simulated Responses answer consists of, decided from the request: reasoning, text, JSON or a function call.

use serde_json::{Value, json};

/// The structure of an answer. The words in it are the generated tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    /// The answer starts with a reasoning item.
    pub(crate) has_reasoning: bool,
    /// The answer is this function call instead of a message.
    pub(crate) call: Option<Call>,
    /// The message is JSON, because the request has a JSON schema.
    pub(crate) format: Option<JsonFrame>,
    /// The request has no `max_output_tokens`, so the answer ends as if the model had ended it.
    pub(crate) has_no_token_limit: bool,
}

/// A function call instead of a message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: JsonFrame,
}

/// JSON text that matches a schema, cut in two: the generated words go between `head` and `tail`, as the value of the
/// first string property.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JsonFrame {
    pub(crate) head: String,
    pub(crate) tail: String,
    /// False if the schema has no string property; the words are then left out.
    pub(crate) has_words: bool,
}

impl JsonFrame {
    pub(super) fn of(schema: &Value) -> Self {
        let mut fields = json!({});
        let mut words_property = None;
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            if words_property.is_none()
                && schema["type"] == "string"
                && schema.get("enum").is_none()
            {
                words_property = Some(name);
            } else {
                fields[name] = example_value(schema);
            }
        }
        let mut head = fields.to_string();
        // Without the closing brace, which is in `tail`.
        head.pop();
        if let Some(name) = words_property {
            let comma = if head.len() > 1 { "," } else { "" };
            head += &format!("{comma}{}:\"", Value::from(name.as_str()));
        }
        Self {
            head,
            tail: if words_property.is_some() { "\"}" } else { "}" }.to_owned(),
            has_words: words_property.is_some(),
        }
    }

    /// The complete JSON text.
    pub(crate) fn around(&self, words: &str) -> String {
        let words = if self.has_words { words } else { "" };
        format!("{}{words}{}", self.head, self.tail)
    }
}

/// The function to call: the one that `tool_choice` names, otherwise the first one. Unless `tool_choice` demands a
/// call, there is none if the last input item is a function's output, so that a conversation comes to an end.
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
        arguments: JsonFrame::of(&function["parameters"]),
    })
}

/// As [`call`], of a chat completion.
pub(super) fn chat_call(
    tools: Option<&Value>,
    choice: Option<&Value>,
    last: &Value,
) -> Option<Call> {
    let flat = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = "function".into();
        function
    };
    let tools: Value = tools?.as_array()?.iter().map(flat).collect();
    let choice = choice.map(|choice| match choice {
        Value::Object(_) => flat(choice),
        _ => choice.clone(),
    });
    let kind = match last["role"] == "tool" {
        true => "function_call_output",
        false => "message",
    };
    call(Some(&tools), choice.as_ref(), &json!({"type": kind}))
}

/// A fixed value that matches a schema.
fn example_value(schema: &Value) -> Value {
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
    fn a_function_is_called_until_its_output_is_there() {
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
