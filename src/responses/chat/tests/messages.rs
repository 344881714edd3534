//! What items become: messages.

use serde_json::{Value, json};

use super::super::body::chat_body;
use super::super::settings::{
    ChatSettings, InvalidArguments, OutputLimit, SystemMessages, UnsupportedTools,
};
use crate::relay::ToolLoss;

pub(super) const DEFAULT: ChatSettings = ChatSettings {
    system_messages: SystemMessages::Auto,
    output_limit_name: OutputLimit::MaxCompletionTokens,
    unsupported_tools: UnsupportedTools::Refuse,
    invalid_arguments: InvalidArguments::Keep,
    developer_role: false,
    message_phases: false,
};

/// A template like most.
pub(super) fn accepts(_: &str) -> bool {
    false
}

pub(super) fn convert(native: &Value, settings: &ChatSettings) -> Value {
    let body = chat_body(
        native.to_string().as_bytes(),
        settings,
        ToolLoss::AsConfigured,
        &accepts,
    )
    .unwrap();
    serde_json::from_slice(&body.body).unwrap()
}

/// The messages of these items.
fn check_with(settings: &ChatSettings, instructions: Value, items: Value, expected: Value) {
    let native = json!({"model": "m", "instructions": instructions, "input": items});
    assert_eq!(convert(&native, settings)["messages"], expected, "{items}");
}

fn check(items: Value, expected: Value) {
    check_with(&DEFAULT, Value::Null, items, expected);
}

/// The members of the body that these members become, without those that every body has.
pub(super) fn check_members(members: Value, expected: Value) {
    let mut native = json!({"model": "m", "input": "x", "store": false});
    native
        .as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    let mut found = convert(&native, &DEFAULT);
    let found = found.as_object_mut().unwrap();
    assert_eq!(found.remove("model"), Some(json!("m")));
    assert_eq!(found.remove("stream"), Some(json!(true)));
    assert_eq!(
        found.remove("stream_options"),
        Some(json!({"include_usage": true}))
    );
    assert_eq!(
        found.remove("messages"),
        Some(json!([{"role": "user", "content": "x"}]))
    );
    assert_eq!(Value::from(found.clone()), expected, "{members}");
}

fn check_refused(native: Value, param: &str, message: &str) {
    let refused = chat_body(
        native.to_string().as_bytes(),
        &DEFAULT,
        ToolLoss::AsConfigured,
        &accepts,
    )
    .unwrap_err();
    assert_eq!(refused.param, param, "{native}");
    assert!(refused.message.contains(message), "{}", refused.message);
}

pub(super) fn message(role: &str, text: &str) -> Value {
    json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]})
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
}

fn output(id: &str, output: Value) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": output})
}

fn chat_call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn tool(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

fn reasoning(text: &str) -> Value {
    json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})
}

#[test]
fn everything_systemic_at_the_head_is_one_system_message() {
    let items = json!([
        message("system", "b"),
        message("developer", "c\n"),
        message("user", "d")
    ]);
    check_with(
        &DEFAULT,
        json!("a\u{e9}"),
        items,
        json!([{"role": "system", "content": "aé\n\nb\n\nc\n"}, {"role": "user", "content": "d"}]),
    );
    check_with(
        &DEFAULT,
        json!(""),
        json!([message("user", "d")]),
        json!([{"role": "user", "content": "d"}]),
    );
}

#[test]
fn a_later_system_message_stays_or_joins_the_first_by_setting() {
    let items = json!([
        message("user", "a"),
        message("developer", "later"),
        message("user", "b")
    ]);
    check(
        items.clone(),
        json!([{"role": "user", "content": "a"}, {"role": "system", "content": "later"}, {"role": "user", "content": "b"}]),
    );
    let merging = ChatSettings {
        system_messages: SystemMessages::MergeIntoFirst,
        ..DEFAULT
    };
    check_with(
        &merging,
        json!("head"),
        items.clone(),
        json!([{"role": "system", "content": "head\n\nlater"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    );
    let developer = ChatSettings {
        developer_role: true,
        ..DEFAULT
    };
    check_with(
        &developer,
        json!("head"),
        items,
        json!([{"role": "system", "content": "head"}, {"role": "user", "content": "a"}, {"role": "developer", "content": "later"}, {"role": "user", "content": "b"}]),
    );
}

#[test]
fn the_parts_of_a_user_message_are_converted_one_by_one() {
    check(
        json!("plain"),
        json!([{"role": "user", "content": "plain"}]),
    );
    check(
        json!([{"type": "message", "role": "user", "content": "plain"}]),
        json!([{"role": "user", "content": "plain"}]),
    );
    let parts = json!([
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:x", "detail": "low"},
        {"type": "input_image", "image_url": "http://x"},
        {"type": "input_image", "image_url": "http://y", "detail": "original"},
        {"type": "input_file", "file_data": "data:f", "filename": "f.pdf"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
    ]);
    check(
        json!([{"type": "message", "role": "user", "content": parts}]),
        json!([{"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
            {"type": "image_url", "image_url": {"url": "http://x", "detail": "auto"}},
            {"type": "image_url", "image_url": {"url": "http://y", "detail": "high"}},
            {"type": "file", "file": {"file_data": "data:f", "filename": "f.pdf"}},
            {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        ]}]),
    );
}

#[test]
fn what_cannot_be_sent_is_refused_by_name_and_never_dropped() {
    let with = |part: Value| json!({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]});
    check_refused(
        with(json!({"type": "input_image", "file_id": "f"})),
        "input[0].content[1]",
        "image_url",
    );
    check_refused(
        with(json!({"type": "input_file", "file_id": "f"})),
        "input[0].content[1]",
        "file_data",
    );
    check_refused(
        with(json!({"type": "input_smell"})),
        "input[0].content[1]",
        "'input_smell'",
    );
    for role in ["system", "developer"] {
        let parts = json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]);
        check_refused(
            json!({"input": [{"type": "message", "role": role, "content": parts}]}),
            "input[0].content",
            "only text",
        );
    }
    check_refused(
        json!({"input": [{"type": "mcp_call"}]}),
        "input[0]",
        "'mcp_call'",
    );
    check_refused(
        json!({"input": "x", "tools": [{"type": "web_search"}]}),
        "tools[0]",
        "'web_search'",
    );
    check_refused(
        json!({"input": "x", "tools": [{"type": "local_shell"}]}),
        "tools[0]",
        "(responses.chat.unsupported_tools)",
    );
    // In the output of a call, whether it follows the call or stands alone.
    let file = json!([{"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "f"}]);
    let image = json!([{"type": "input_image", "image_url": "data:x"}]);
    let items = [
        message("user", "q"),
        call("1", "f", "{}"),
        call("2", "g", "{}"),
        output("1", image),
        message("user", "r"),
        output("2", file.clone()),
    ];
    check_refused(json!({"input": items}), "input[5].output[1]", "file_data");
    let alone = [message("user", "q"), output("3", file)];
    check_refused(json!({"input": alone}), "input[1].output[1]", "file_data");
    let choice = json!({"type": "web_search"});
    let function = json!({"type": "function", "name": "f"});
    check_refused(
        json!({"input": "x", "tools": [function], "tool_choice": choice}),
        "tool_choice",
        "'web_search'",
    );
}

#[test]
fn items_of_one_turn_are_one_assistant_message() {
    let text = json!({"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "t"}, {"type": "refusal", "refusal": "no"}]});
    check(
        json!([
            message("user", "q"),
            reasoning("r1"),
            reasoning("r2"),
            text,
            call("1", "f", "{}"),
            output("1", json!("o"))
        ]),
        json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "reasoning": "r1\nr2", "reasoning_content": "r1\nr2", "content": "tno", "tool_calls": [chat_call("1", "f", "{}")]},
            tool("1", "o"),
        ]),
    );
    // Text after a call belongs to the same message, and so does a second text.
    check(
        json!([
            message("user", "q"),
            call("1", "f", "{}"),
            message("assistant", "a"),
            message("assistant", "b")
        ]),
        json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a\n\nb", "tool_calls": [chat_call("1", "f", "{}")]},
        ]),
    );
    // Only a tool message separates two.
    check(
        json!([
            call("1", "f", "{}"),
            output("1", json!("o")),
            message("assistant", "a")
        ]),
        json!([
            {"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", "{}")]},
            tool("1", "o"),
            {"role": "assistant", "content": "a"},
        ]),
    );
}

#[test]
fn outputs_follow_their_calls_in_the_order_of_the_calls() {
    let calls = json!({"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", "{}"), chat_call("2", "g", "{}")]});
    check(
        json!([
            call("1", "f", "{}"),
            call("2", "g", "{}"),
            output("2", json!("b")),
            message("user", "u"),
            output("1", json!("a"))
        ]),
        json!([calls, tool("1", "a"), tool("2", "b"), {"role": "user", "content": "u"}]),
    );
    // Two messages that are equal are two, and a call that was answered in a turn before is no error.
    check(
        json!([
            message("user", "u"),
            message("user", "u"),
            call("1", "f", "{}"),
            output("1", json!("a")),
            output("1", json!("again"))
        ]),
        json!([
            {"role": "user", "content": "u"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", "{}")]},
            tool("1", "a"), tool("1", "again"),
        ]),
    );
}

#[test]
fn calls_with_the_same_id_get_their_outputs_in_order() {
    let calls = |calls: Value| json!({"role": "assistant", "content": null, "tool_calls": calls});
    // In two turns.
    check(
        json!([
            message("user", "q"),
            call("0", "f", "{}"),
            output("0", json!("first")),
            message("assistant", "ok"),
            message("user", "again"),
            call("0", "f", "{}"),
            output("0", json!("second"))
        ]),
        json!([
            {"role": "user", "content": "q"},
            calls(json!([chat_call("0", "f", "{}")])),
            tool("0", "first"),
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "again"},
            calls(json!([chat_call("0", "f", "{}")])),
            tool("0", "second"),
        ]),
    );
    // In one.
    check(
        json!([
            call("0", "f", "{}"),
            call("0", "g", "{}"),
            output("0", json!("a")),
            output("0", json!("b"))
        ]),
        json!([
            calls(json!([
                chat_call("0", "f", "{}"),
                chat_call("0", "g", "{}")
            ])),
            tool("0", "a"),
            tool("0", "b"),
        ]),
    );
}

#[test]
fn the_images_of_outputs_follow_all_tool_messages() {
    let parts = json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}, {"type": "input_text", "text": "b"}]);
    check(
        json!([
            call("1", "f", "{}"),
            call("2", "g", "{}"),
            output("1", parts),
            output("2", json!("c"))
        ]),
        json!([
            {"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", "{}"), chat_call("2", "g", "{}")]},
            tool("1", "a\nb"),
            tool("2", "c"),
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}]},
        ]),
    );
    // The images of several outputs are one message.
    let image = |url: &str| json!([{"type": "input_image", "image_url": url, "detail": "low"}]);
    let sent = |url: &str| json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
    check(
        json!([
            call("1", "f", "{}"),
            call("2", "g", "{}"),
            output("1", image("data:x")),
            output("2", image("data:y"))
        ]),
        json!([
            {"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", "{}"), chat_call("2", "g", "{}")]},
            tool("1", ""),
            tool("2", ""),
            {"role": "user", "content": [sent("data:x"), sent("data:y")]},
        ]),
    );
}

#[test]
fn custom_calls_and_names_in_namespaces_are_functions() {
    let custom =
        json!({"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "a \"b\"\n"});
    let spaced = json!({"type": "function_call", "call_id": "2", "namespace": "ns", "name": "f", "arguments": "{}"});
    let both = json!({"type": "custom_tool_call", "call_id": "3", "namespace": "ns", "name": "c", "input": "x"});
    let answer = json!({"type": "custom_tool_call_output", "call_id": "1", "output": "o"});
    check(
        json!([custom, spaced, both, answer]),
        json!([
            {"role": "assistant", "content": null, "tool_calls": [
                chat_call("1", "c", "{\"input\":\"a \\\"b\\\"\\n\"}"), chat_call("2", "ns__f", "{}"),
                chat_call("3", "ns__c", "{\"input\":\"x\"}")]},
            tool("1", "o"),
        ]),
    );
}

#[test]
fn reasoning_alone_is_kept_only_at_the_end() {
    check(
        json!([
            message("user", "a"),
            reasoning("lost"),
            message("user", "b")
        ]),
        json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    );
    check(
        json!([message("user", "a"), reasoning("kept")]),
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "reasoning": "kept", "reasoning_content": "kept", "content": ""}]),
    );
    let empty = json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": ""}]});
    check(
        json!([message("user", "a"), empty]),
        json!([{"role": "user", "content": "a"}]),
    );
}

#[test]
fn invalid_arguments_pass_unless_the_setting_replaces_them() {
    let expected = |arguments: &str| json!([{"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", arguments)]}]);
    check(json!([call("1", "f", "{\"a\":")]), expected("{\"a\":"));
    let replacing = ChatSettings {
        invalid_arguments: InvalidArguments::EmptyObject,
        ..DEFAULT
    };
    check_with(
        &replacing,
        Value::Null,
        json!([call("1", "f", "[1]")]),
        expected("{}"),
    );
    check_with(
        &replacing,
        Value::Null,
        json!([call("1", "f", "{\"a\":1}")]),
        expected("{\"a\":1}"),
    );
}

#[test]
fn a_call_without_arguments_has_an_empty_object_whatever_the_setting_is() {
    let expected = |arguments: &str| json!([{"role": "assistant", "content": null, "tool_calls": [chat_call("1", "f", arguments)]}]);
    let replacing = ChatSettings {
        invalid_arguments: InvalidArguments::EmptyObject,
        ..DEFAULT
    };
    let missing = json!({"type": "function_call", "call_id": "1", "name": "f"});
    let custom = json!({"type": "custom_tool_call", "call_id": "1", "name": "f", "input": ""});
    for settings in [DEFAULT, replacing] {
        for (item, arguments) in [
            (call("1", "f", ""), "{}"),
            (missing.clone(), "{}"),
            (custom.clone(), "{\"input\":\"\"}"),
        ] {
            check_with(&settings, Value::Null, json!([item]), expected(arguments));
        }
    }
}

#[test]
fn an_unfinished_message_of_the_assistant_is_continued() {
    let last = json!({"type": "message", "role": "assistant", "status": "in_progress", "content": [{"type": "output_text", "text": "so"}]});
    let found = convert(&json!({"input": [message("user", "a"), last]}), &DEFAULT);
    assert_eq!(found["continue_final_message"], true);
    assert_eq!(found["add_generation_prompt"], false);
}

#[test]
fn an_equal_conversation_is_written_in_the_same_bytes() {
    let turn = json!({"model": "m", "instructions": "s", "input": [message("user", "a"), reasoning("r"), message("assistant", "b")]});
    let mut next = turn.clone();
    next["input"]
        .as_array_mut()
        .unwrap()
        .push(message("user", "c"));
    let text = |native: &Value| {
        String::from_utf8(
            chat_body(
                native.to_string().as_bytes(),
                &DEFAULT,
                ToolLoss::AsConfigured,
                &accepts,
            )
            .unwrap()
            .body
            .to_vec(),
        )
        .unwrap()
    };
    let (turn, next) = (text(&turn), text(&next));
    let start = turn.strip_suffix("]}").unwrap();
    assert!(next.starts_with(start), "{next}");
}
