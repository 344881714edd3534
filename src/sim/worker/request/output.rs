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
    /// What a request's format asks for; `schema`: where its API has the schema. `None` for text.
    pub(super) fn of_format(format: &Value, schema: &Value) -> Option<Self> {
        match format["type"].as_str()? {
            "json_schema" => Some(Self::of(schema)),
            "json_object" => Some(Self::of(
                &json!({"properties": {"answer": {"type": "string"}}}),
            )),
            _ => None,
        }
    }

    pub(super) fn of(root: &Value) -> Self {
        let mut fields = json!({});
        let mut words_property = None;
        for (name, schema) in root["properties"].as_object().into_iter().flatten() {
            if words_property.is_none()
                && schema["type"] == "string"
                && schema.get("enum").is_none()
            {
                words_property = Some(name);
            } else {
                fields[name] = example_value(root, schema, LEVELS_MAX);
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
    let kind = if last["role"] == "tool" {
        "function_call_output"
    } else {
        "message"
    };
    call(Some(&tools), choice.as_ref(), &json!({"type": kind}))
}

/// A schema that contains itself ends here.
const LEVELS_MAX: usize = 8;

/// A fixed value that matches a schema. `root`: where references are looked up.
fn example_value(root: &Value, schema: &Value, levels: usize) -> Value {
    if levels == 0 {
        return Value::Null;
    }
    let example = |schema: &Value| example_value(root, schema, levels - 1);
    if let Some(reference) = schema["$ref"].as_str() {
        let place = reference.trim_start_matches('#');
        return root.pointer(place).map_or(Value::Null, example);
    }
    let parts = ["allOf", "anyOf", "oneOf"];
    let first = parts.iter().find_map(|name| schema[name].get(0));
    if let Some(first) = first {
        return example(first);
    }
    if let Some(fixed) = schema.get("const") {
        return fixed.clone();
    }
    if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("string") => "x".into(),
        Some("integer" | "number") => 1.into(),
        Some("boolean") => true.into(),
        Some("array") => json!([]),
        Some("object") => {
            let properties = schema["properties"].as_object().into_iter().flatten();
            let properties = properties.map(|(name, schema)| (name.clone(), example(schema)));
            Value::Object(properties.collect())
        }
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_objects_and_references_have_their_members() {
        let schema = json!({
            "properties": {
                "inner": {"$ref": "#/$defs/Inner"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "outer": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"const": 7}}},
                "say": {"type": "string"},
                "self": {"$ref": "#/$defs/Loop"},
            },
            "$defs": {
                "Inner": {"type": "object", "properties": {"c": {"type": "boolean"}}},
                "Loop": {"type": "object", "properties": {"loop": {"$ref": "#/$defs/Loop"}}},
            },
        });
        let text = JsonFrame::of(&schema).around("ash ");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["inner"], json!({"c": true}));
        assert_eq!(value["maybe"], 1);
        assert_eq!(value["outer"], json!({"a": "x", "b": 7}));
        assert_eq!(value["say"], "ash ");
        assert!(value["self"]["loop"].is_object());
        let any = JsonFrame::of_format(&json!({"type": "json_object"}), &Value::Null).unwrap();
        assert_eq!(any.around("ash "), r#"{"answer":"ash "}"#);
        let text = json!({"type": "text"});
        assert_eq!(JsonFrame::of_format(&text, &Value::Null), None);
    }

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
