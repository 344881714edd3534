//! Reads the body of a chat completion into the variables of the chat template.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::chat_message::Message;
use super::kwargs::{self, Kwargs};
use super::types::{Options, TokenizeError, refused};
use crate::json_scan::Scan;

/// A chat or Responses request as the variables of a chat template.
pub(super) struct ChatInput<'a> {
    pub(super) messages: Vec<Message<'a>>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) kwargs: Kwargs,
    pub(super) add_special_tokens: bool,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    documents: Option<Value>,
    reasoning_effort: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    chat_template: Option<Value>,
    truncate_prompt_tokens: Option<Value>,
}

pub(super) fn read<'a>(body: &'a [u8], options: &Options) -> Result<ChatInput<'a>, TokenizeError> {
    let body = match scanned(body) {
        Some(body) => body,
        None => serde_json::from_slice(body)?,
    };
    input(body, options)
}

const FIELDS: [&str; 11] = [
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "chat_template",
    "truncate_prompt_tokens",
];

/// Finds the values of a body, and parses those that are read but for texts without escapes. `None` if the body is not as it
/// should be.
fn scanned(body: &[u8]) -> Option<Body<'_>> {
    let mut scan = Scan::of_bytes(body)?;
    let mut seen = [false; FIELDS.len()];
    let mut messages = None;
    let mut body = Body::default();
    scan.each_member(|scan, name| {
        if let Some(at) = FIELDS.iter().position(|field| *field == name) {
            let is_second = std::mem::replace(&mut seen[at], true);
            (!is_second).then_some(())?;
        }
        if name == "messages" {
            messages = Some(scan.elements(Message::scan)?);
            return Some(());
        }
        let value = scan.value()?;
        match &*name {
            "tools" => set(&mut body.tools, value),
            "tool_choice" => set(&mut body.tool_choice, value),
            "documents" => set(&mut body.documents, value),
            "reasoning_effort" => set(&mut body.reasoning_effort, value),
            "add_generation_prompt" => set(&mut body.add_generation_prompt, value),
            "continue_final_message" => set(&mut body.continue_final_message, value),
            "add_special_tokens" => set(&mut body.add_special_tokens, value),
            "chat_template_kwargs" => set(&mut body.chat_template_kwargs, value),
            "chat_template" => set(&mut body.chat_template, value),
            "truncate_prompt_tokens" => set(&mut body.truncate_prompt_tokens, value),
            _ => Some(()),
        }
    })?;
    body.messages = scan.is_over().then_some(messages)??;
    Some(body)
}

fn set<T: DeserializeOwned>(field: &mut Option<T>, json: &str) -> Option<()> {
    *field = serde_json::from_str(json).ok()?;
    Some(())
}

/// Of a body that was made of another API's.
pub(super) fn of_value(
    body: Value,
    options: &Options,
) -> Result<ChatInput<'static>, TokenizeError> {
    input(Body::deserialize(body)?, options)
}

fn input<'a>(mut body: Body<'a>, options: &Options) -> Result<ChatInput<'a>, TokenizeError> {
    if body.chat_template.is_some() {
        return Err(TokenizeError::Field("chat_template"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(TokenizeError::Field("truncate_prompt_tokens"));
    }
    for message in &mut body.messages {
        if let Message::Object(message) = message {
            rename_reasoning_content(message);
            order_call_keys(message);
        }
    }
    let hides_tools = options.exclude_tools_when_tool_choice_none
        && body.tool_choice == Some(Value::String("none".to_owned()));
    let tools = match body.tools {
        Some(tools) if !hides_tools => {
            let tools: Result<_, _> = tools.into_iter().map(tool).collect();
            Some(tools?)
        }
        _ => None,
    };
    let mut kwargs = Kwargs::new(body.chat_template_kwargs);
    kwargs.override_with([
        (
            "add_generation_prompt",
            body.add_generation_prompt.unwrap_or(true).into(),
        ),
        (
            "continue_final_message",
            body.continue_final_message.unwrap_or(false).into(),
        ),
        ("documents", body.documents.unwrap_or(Value::Null)),
    ]);
    kwargs.override_effort(options.effort(body.reasoning_effort));
    Ok(ChatInput {
        messages: body.messages,
        tools,
        kwargs,
        add_special_tokens: body.add_special_tokens.unwrap_or(false),
    })
}

/// Engines accept the older name `reasoning_content` and pass the message on with the newer one.
fn rename_reasoning_content(message: &mut Map<String, Value>) {
    let Some(older) = message.shift_remove("reasoning_content") else {
        return;
    };
    let has_newer = message
        .get("reasoning")
        .is_some_and(|newer| !newer.is_null());
    if !older.is_null() && !has_newer {
        message.insert("reasoning".to_owned(), older);
    }
}

/// Puts the keys of tool calls in the order of the engine's types, for templates that print a call as JSON.
fn order_call_keys(message: &mut Map<String, Value>) {
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
        return;
    };
    for call in calls.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(Value::Object(function)) = call.get_mut("function") {
            *function = with_first_keys(std::mem::take(function), &["arguments", "name"]);
        }
        *call = with_first_keys(std::mem::take(call), &["id", "function", "type"]);
    }
}

fn with_first_keys(mut map: Map<String, Value>, keys: &[&str]) -> Map<String, Value> {
    let mut ordered = Map::with_capacity(map.len());
    for key in keys {
        if let Some((key, value)) = map.shift_remove_entry(*key) {
            ordered.insert(key, value);
        }
    }
    ordered.extend(map);
    ordered
}

fn tool(tool: Value) -> Result<Value, TokenizeError> {
    let wrong = || refused("a tool without a named function");
    let Value::Object(mut tool) = tool else {
        return Err(wrong());
    };
    let defer = tool
        .shift_remove("defer_loading")
        .filter(|defer| !defer.is_null());
    match tool.shift_remove("function") {
        Some(Value::Object(mut function)) => {
            if let Some(defer) = &defer
                && function.get("defer_loading").is_none_or(Value::is_null)
            {
                function.insert("defer_loading".to_owned(), defer.clone());
            }
            let mut shown = kwargs::function_tool(function).ok_or_else(wrong)?;
            if let Some(defer) = defer {
                shown.insert("defer_loading".to_owned(), defer);
            }
            Ok(Value::Object(shown))
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_common_body_is_not_parsed_as_a_whole() {
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": "a \n b"}], "tools": [], "stream": true}"#;
        assert_eq!(
            scanned(body.as_bytes()),
            Some(serde_json::from_str(body).unwrap())
        );
        let odd = r#"{"m\u0065ssages": [{"\u0072ole": "user", "content": null}], "tools": null, "\u0061": 1}"#;
        assert_eq!(
            scanned(odd.as_bytes()),
            Some(serde_json::from_str(odd).unwrap())
        );
        assert_eq!(scanned(br#"{"messages": [], "messages": []}"#), None);
        assert_eq!(scanned(br#"{"tools": []}"#), None);
        let twice = br#"{"messages": [], "tools": null, "tools": []}"#;
        assert_eq!(scanned(twice), None);
    }

    fn content() -> impl Strategy<Value = Value> {
        let part = Just(serde_json::json!({"type": "text", "text": "a"}));
        prop_oneof![
            "[\\PC\n\"\\\\]{0,50}".prop_map(Value::from),
            proptest::collection::vec(part, 0..3).prop_map(Value::from),
            Just(Value::Null),
            any::<i32>().prop_map(Value::from),
        ]
    }

    fn message() -> impl Strategy<Value = Value> {
        let role = prop_oneof![Just("user"), Just("assistant"), Just("\"é")];
        let name = proptest::option::of(content());
        (role, content(), name).prop_map(|(role, content, name)| {
            let mut message = serde_json::json!({"role": role, "content": content});
            if let Some(name) = name {
                message["name"] = name;
            }
            message
        })
    }

    fn body() -> impl Strategy<Value = String> {
        let other = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            Just(serde_json::json!([{"a": {"b": []}}])),
            Just(serde_json::json!({"auto": 1.5})),
            content(),
        ];
        let names: Vec<&str> = FIELDS[1..].iter().copied().chain(["model"]).collect();
        let names = proptest::sample::subsequence(names, 0..4);
        let messages = proptest::collection::vec(message(), 0..4);
        let others = proptest::collection::vec(other, 4);
        (messages, names, others, any::<bool>()).prop_map(|(messages, names, others, is_pretty)| {
            let mut body = serde_json::json!({"messages": messages});
            for (name, value) in names.into_iter().zip(others) {
                body[name] = value;
            }
            if is_pretty {
                format!("{body:#}")
            } else {
                body.to_string()
            }
        })
    }

    fn check(body: &[u8]) -> Result<(), TestCaseError> {
        let parsed: Result<Body<'_>, _> = serde_json::from_slice(body);
        match scanned(body) {
            Some(scanned) => prop_assert_eq!(Some(scanned), parsed.ok()),
            // A parser takes bytes that are no text where it does not look.
            None => prop_assert!(parsed.is_err() || str::from_utf8(body).is_err()),
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn the_scanner_finds_what_the_parser_finds(body in body()) {
            check(body.as_bytes())?;
        }

        #[test]
        fn of_a_changed_body_too(body in body(), at: proptest::sample::Index, byte: u8, is_inserted: bool) {
            let mut body = body.into_bytes();
            let at = at.index(body.len());
            if is_inserted {
                body.insert(at, byte);
            } else {
                body[at] = byte;
            }
            check(&body)?;
        }
    }
}
