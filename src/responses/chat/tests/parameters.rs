//! What the other members of a request become: parameters and tools.

use serde_json::{Value, json};

use super::super::body::chat_body;
use super::super::settings::{ChatSettings, UnsupportedTools};
use super::super::tools::AnsweredTools;
use super::messages::{DEFAULT, accepts, check_members, convert};
use crate::relay::ToolLoss;

#[test]
fn parameters_have_the_names_of_chat_completions() {
    check_members(
        json!({"max_output_tokens": 7, "max_tokens": 9, "temperature": 0.1, "top_p": 1, "seed": 3, "stop": ["x"], "top_k": 5}),
        json!({"max_completion_tokens": 7, "temperature": 0.1, "top_p": 1, "seed": 3, "stop": ["x"], "top_k": 5}),
    );
    check_members(
        json!({"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto", "metadata": {"a": "b"},
            "truncation": "auto", "n": 2, "messages": [], "logprobs": true, "stream": false, "max_tool_calls": 1}),
        json!({}),
    );
    check_members(
        json!({"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low", "format": {"type": "text"}}}),
        json!({"reasoning_effort": "low"}),
    );
    check_members(
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        json!({"logprobs": true, "top_logprobs": 2}),
    );
    check_members(json!({"top_logprobs": 2}), json!({}));
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    check_members(
        json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": true, "description": "d"}}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true, "description": "d"}}}),
    );
    check_members(
        json!({"text": {"format": {"type": "json_object"}}}),
        json!({"response_format": {"type": "json_object"}}),
    );
}

#[test]
fn tools_are_functions_in_the_same_order() {
    let tools = json!([
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": true},
        {"type": "custom", "name": "c", "description": "e"},
        {"type": "namespace", "name": "ns", "tools": [
            {"type": "function", "name": "g", "parameters": null}, {"type": "custom", "name": "h"}]},
    ]);
    let custom = json!({"type": "object", "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
        "required": ["input"], "additionalProperties": false});
    let expected = json!([
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": true}},
        {"type": "function", "function": {"name": "c", "description": "e", "parameters": custom}},
        {"type": "function", "function": {"name": "ns__g", "parameters": {"type": "object", "properties": {}}}},
        {"type": "function", "function": {"name": "ns__h", "parameters": custom}},
    ]);
    let choices = [
        (json!("auto"), json!("auto")),
        (json!("none"), json!("none")),
        (json!("required"), json!("required")),
        (
            json!({"type": "function", "name": "f"}),
            json!({"type": "function", "function": {"name": "f"}}),
        ),
        (
            json!({"type": "custom", "name": "c"}),
            json!({"type": "function", "function": {"name": "c"}}),
        ),
    ];
    for (choice, chat_choice) in choices {
        check_members(
            json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false}),
            json!({"tools": expected, "tool_choice": chat_choice, "parallel_tool_calls": false}),
        );
    }
    let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]});
    check_members(
        json!({"tools": tools, "tool_choice": "required", "allowed_tools": allowed}),
        json!({"tools": expected, "tool_choice": "required"}),
    );
    // Without tools there is nothing to choose from.
    check_members(
        json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true}),
        json!({}),
    );
}

#[test]
fn only_the_first_types_of_many_that_are_left_out_are_named() {
    let left_out = |types: usize| {
        let tools: Vec<Value> = (0..2 * types)
            .map(|number| json!({"type": format!("t{}", number / 2)}))
            .collect();
        AnsweredTools::of(json!({"tools": tools}).to_string().as_bytes()).left_out
    };
    assert_eq!(left_out(3), ["t0", "t1", "t2"]);
    assert_eq!(left_out(32).len(), 32);
    assert_eq!(left_out(1_000), left_out(32));
}

#[test]
fn of_a_long_type_that_is_left_out_the_beginning_is_named() {
    let tools =
        ["\u{e9}".repeat(1_000), "x".repeat(63) + "\u{e9}"].map(|kind| json!({"type": kind}));
    let answered = AnsweredTools::of(json!({"tools": tools}).to_string().as_bytes());
    assert_eq!(answered.left_out, ["\u{e9}".repeat(32), "x".repeat(63)]);
}

#[test]
fn unsupported_tools_are_left_out_by_setting() {
    let ignoring = ChatSettings {
        unsupported_tools: UnsupportedTools::Ignore,
        ..DEFAULT
    };
    let native = json!({"input": "x", "tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}],
        "tool_choice": {"type": "web_search"}});
    let found = convert(&native, &ignoring);
    assert_eq!(found["tools"].as_array().unwrap().len(), 1);
    assert_eq!(found["tools"][0]["function"]["name"], "c");
    assert_eq!(found["tool_choice"], "auto");
    let none = convert(
        &json!({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "auto"}),
        &ignoring,
    );
    assert_eq!((none.get("tools"), none.get("tool_choice")), (None, None));
    // While another worker can have them, they are not.
    let native = json!({"input": "x", "tools": [{"type": "web_search"}]}).to_string();
    let loss = |loss| chat_body(native.as_bytes(), &ignoring, loss, &accepts).is_ok();
    assert!(loss(ToolLoss::AsConfigured) && !loss(ToolLoss::Refused));
}
