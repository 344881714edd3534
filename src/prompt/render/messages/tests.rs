use super::*;

fn converted(body: &Value) -> Value {
    to_chat(body.to_string().as_bytes(), TemplateFacts::ANY).unwrap()
}

/// The messages of a conversation that is `turns`.
fn check(turns: Value, expected: Value) {
    let found = converted(&json!({"model": "m", "max_tokens": 9, "messages": turns}));
    assert_eq!(found["messages"], expected, "{turns}");
}

fn check_system(system: Value, merges: bool, turns: Value, expected: Value) {
    let body = json!({"system": system, "messages": turns}).to_string();
    let facts = TemplateFacts {
        has_system_first: merges,
        ..TemplateFacts::ANY
    };
    let found = to_chat(body.as_bytes(), facts).unwrap();
    assert_eq!(found["messages"], expected, "{body}");
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[test]
fn a_system_prompt_is_one_leading_message_without_billing_headers() {
    let user = json!({"role": "user", "content": "hi"});
    let expected = |system: &str| json!([{"role": "system", "content": system}, user]);
    check_system("a".into(), false, json!([user]), expected("a"));
    let blocks = json!([
        text("x-anthropic-billing-header: cch=1;"),
        text("a"),
        text("b")
    ]);
    check_system(blocks, false, json!([user]), expected("ab"));
    for empty in [json!(""), json!([]), json!([text("")]), Value::Null] {
        check_system(empty, false, json!([user]), json!([user]));
    }
}

#[test]
fn a_system_message_within_the_conversation_stays_or_moves_to_the_start() {
    let turns = json!([
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [text("x-anthropic-billing-header: 1"), text("b"), text("c")]},
        {"role": "system", "content": ""},
        {"role": "user", "content": "you"},
    ]);
    let kept = json!([
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "bc"},
        {"role": "user", "content": "you"},
    ]);
    check_system("a".into(), false, turns.clone(), kept);
    let merged = json!([
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "you"},
    ]);
    check_system("a".into(), true, turns, merged);
}

#[test]
fn texts_and_images_are_parts_and_one_text_is_a_string() {
    check(
        json!([{"role": "user", "content": "hi"}]),
        json!([{"role": "user", "content": "hi"}]),
    );
    check(
        json!([{"role": "user", "content": [text("hi"), text("")]}]),
        json!([{"role": "user", "content": "hi"}]),
    );
    let base64 = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let url = json!({"type": "url", "url": "https://x/y.png"});
    for source in [base64, url] {
        check(
            json!([{"role": "user", "content": [text("a"), {"type": "image", "source": source}]}]),
            json!([{"role": "user", "content": [text("a"), image()]}]),
        );
    }
}

#[test]
fn thinking_is_reasoning_and_redacted_thinking_is_dropped() {
    check(
        json!([{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "b", "signature": "s"},
            text("c"),
        ]}]),
        json!([{"role": "assistant", "reasoning": "ab", "content": "c"}]),
    );
}

#[test]
fn a_use_of_a_tool_is_a_call_of_the_assistants_message() {
    check(
        json!([{"role": "assistant", "content": [
            text("a"),
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": "ü", "a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g"},
        ]}]),
        json!([{"role": "assistant", "content": "a", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"b": "ü", "a": 1}}},
            {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]}]),
    );
}

#[test]
fn results_of_tools_stand_before_the_rest_of_the_users_message() {
    check(
        json!([{"role": "user", "content": [
            text("next"),
            {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [
                text("a"),
                {"type": "image", "source": {"type": "url", "url": "https://x"}},
                text("b"),
            ]},
            {"type": "tool_result", "tool_use_id": "t3"},
        ]}]),
        json!([
            {"role": "tool", "tool_call_id": "t1", "content": "one"},
            {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
            {"role": "user", "content": [image()]},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
            {"role": "user", "content": "next"},
        ]),
    );
    // A message with nothing else is no message.
    check(
        json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]),
        json!([{"role": "tool", "tool_call_id": "t", "content": "x"}]),
    );
    check(
        json!([{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]),
        json!([{"role": "assistant", "content": "Tool result: x"}]),
    );
}

#[test]
fn tools_are_functions_and_only_the_choice_of_none_matters() {
    let tools = json!([{"name": "f", "description": "d", "input_schema": {"properties": {}}}]);
    let chat = converted(&json!({"messages": [], "tools": tools, "tool_choice": {"type": "none"}}));
    let function = &chat["tools"][0]["function"];
    assert_eq!(function["name"], "f");
    assert_eq!(function["description"], "d");
    let schema = json!({"properties": {}, "type": "object"});
    assert_eq!(function["parameters"].to_string(), schema.to_string());
    assert_eq!(chat["tool_choice"], "none");
    let any = converted(&json!({"messages": [], "tool_choice": {"type": "any"}}));
    assert_eq!(any.get("tool_choice"), None);
}

#[test]
fn thinking_and_effort_set_the_reasoning_effort() {
    let check = |thinking: Value, effort: Value, expected: Value| {
        let chat = converted(
            &json!({"messages": [], "thinking": thinking, "output_config": {"effort": effort}}),
        );
        let found = chat.get("reasoning_effort").cloned();
        assert_eq!(found.unwrap_or_default(), expected, "{thinking} {effort}");
    };
    check(json!({"type": "disabled"}), "high".into(), "none".into());
    check(Value::Null, "high".into(), "high".into());
    check(
        json!({"type": "enabled", "budget_tokens": 2048}),
        Value::Null,
        Value::Null,
    );
    check(json!({"type": "adaptive"}), "low".into(), "low".into());
}

#[test]
fn what_only_the_engine_knows_is_not_guessed() {
    let result = |turns: Value| {
        let body = json!({ "messages": turns }).to_string();
        to_chat(body.as_bytes(), TemplateFacts::ANY)
    };
    let kind = |kind: &str| json!([{"role": "user", "content": [{"type": kind}]}]);
    assert!(result(kind("document")).is_err());
    assert!(result(kind("tool_addition")).is_err());
    assert!(result(json!([{"role": "tool", "content": "x"}])).is_err());
    assert!(result(json!([{"role": "user"}])).is_err());
}

#[test]
fn only_some_bodies_need_to_know_the_template() {
    let check = |body: Value, expected| {
        assert_eq!(needs_facts(body.to_string().as_bytes()), expected, "{body}");
    };
    let user = json!({"role": "user", "content": "hi"});
    check(json!({"messages": [user], "system": "a"}), false);
    check(
        json!({"messages": [user, {"role": "system", "content": "b"}]}),
        true,
    );
    check(
        json!({"messages": [user], "thinking": {"type": "disabled"}}),
        true,
    );
}
