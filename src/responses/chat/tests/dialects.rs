//! What differs between engines and templates: names of members, where system messages may stand, phases.

use serde_json::{Value, json};

use super::super::body::chat_body;
use super::super::settings::{ChatSettings, OutputLimit, SystemMessages};
use super::super::tools::AnsweredTools;
use super::answers::{delta, done, events_with, finish, fragment};
use super::messages::{DEFAULT, message};
use crate::relay::ToolLoss;

fn convert(native: Value, settings: &ChatSettings, refuses: bool) -> Value {
    let text = native.to_string();
    let asked = |model: &str| {
        assert_eq!(model, "m");
        refuses
    };
    let body = chat_body(text.as_bytes(), settings, ToolLoss::AsConfigured, &asked).unwrap();
    serde_json::from_slice(&body.body).unwrap()
}

#[test]
fn the_limit_of_an_answer_has_one_name_never_both() {
    let native = || json!({"model": "m", "input": "x", "max_output_tokens": 7});
    let found = convert(native(), &DEFAULT, false);
    assert_eq!(found["max_completion_tokens"], 7);
    assert_eq!(found.get("max_tokens"), None);
    let older = ChatSettings {
        output_limit_name: OutputLimit::MaxTokens,
        ..DEFAULT
    };
    let found = convert(native(), &older, false);
    assert_eq!(found["max_tokens"], 7);
    assert_eq!(found.get("max_completion_tokens"), None);
}

#[test]
fn effort_none_turns_thinking_off_unless_the_client_decided() {
    let check = |effort: &str, kwargs: Value, expected: Value| {
        let mut native = json!({"model": "m", "input": "x", "reasoning": {"effort": effort}});
        if !kwargs.is_null() {
            native["chat_template_kwargs"] = kwargs.clone();
        }
        let found = convert(native, &DEFAULT, false);
        assert_eq!(found["reasoning_effort"], effort);
        assert_eq!(found["chat_template_kwargs"], expected, "{effort} {kwargs}");
    };
    check("none", Value::Null, json!({"enable_thinking": false}));
    check(
        "none",
        json!({"a": 1}),
        json!({"enable_thinking": false, "a": 1}),
    );
    check("none", json!({}), json!({"enable_thinking": false}));
    let decided = json!({"enable_thinking": true});
    check("none", decided.clone(), decided.clone());
    check("none", json!("no object"), json!("no object"));
    check("low", Value::Null, Value::Null);
    check("low", json!({"a": 1}), json!({"a": 1}));
    let null = json!({"model": "m", "input": "x", "reasoning": {"effort": "none"}, "chat_template_kwargs": null});
    let body = chat_body(
        null.to_string().as_bytes(),
        &DEFAULT,
        ToolLoss::AsConfigured,
        &|_| false,
    )
    .unwrap();
    let text = String::from_utf8(body.body.to_vec()).unwrap();
    assert_eq!(text.matches("chat_template_kwargs").count(), 1, "{text}");
}

#[test]
fn a_template_that_fails_on_a_later_system_message_gets_it_at_the_head() {
    let items = [
        message("user", "a"),
        message("system", "later"),
        message("user", "b"),
    ];
    let native = || json!({"model": "m", "instructions": "head", "input": items});
    let roles = |settings: &ChatSettings, refuses| {
        let found = convert(native(), settings, refuses);
        let messages = found["messages"].as_array().unwrap().iter();
        let roles: Vec<String> = messages
            .map(|message| message["role"].as_str().unwrap().to_owned())
            .collect();
        (
            roles.join(" "),
            found["messages"][0]["content"].as_str().unwrap().to_owned(),
        )
    };
    let merged = ("system user user".to_owned(), "head\n\nlater".to_owned());
    let in_place = ("system user system user".to_owned(), "head".to_owned());
    let with = |system_messages| ChatSettings {
        system_messages,
        ..DEFAULT
    };
    assert_eq!(roles(&with(SystemMessages::Auto), true), merged);
    assert_eq!(roles(&with(SystemMessages::Auto), false), in_place);
    assert_eq!(roles(&with(SystemMessages::InPlace), true), in_place);
    assert_eq!(roles(&with(SystemMessages::MergeIntoFirst), false), merged);
}

/// The phases of the messages of an answer, in the order of their ends.
fn phases(chunks: &[Value], marks_phases: bool) -> Vec<Value> {
    let request = json!({"tools": [{"type": "function", "name": "f"}]});
    let mut tools = AnsweredTools::of(request.to_string().as_bytes());
    tools.marks_phases = marks_phases;
    events_with(tools, chunks)
        .into_iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| event["item"].clone())
        .inspect(|item| {
            let is_message = item["type"] == "message";
            assert!(is_message || item.get("phase").is_none(), "{item}");
        })
        .filter(|item| item["type"] == "message")
        .map(|item| item["phase"].clone())
        .collect()
}

#[test]
fn a_message_before_a_call_is_commentary_and_the_last_the_final_answer() {
    let thought = delta(json!({"reasoning": "hm"}));
    let text = delta(json!({"content": "so"}));
    let call = fragment(0, "call_1", "f", "{}");
    let calls = [
        thought.clone(),
        text.clone(),
        call,
        finish("tool_calls"),
        done(),
    ];
    assert_eq!(phases(&calls, true), [json!("commentary")]);
    assert_eq!(phases(&calls, false), [Value::Null]);
    let answer = |reason: &str| [thought.clone(), text.clone(), finish(reason), done()];
    assert_eq!(phases(&answer("stop"), true), [json!("final_answer")]);
    assert_eq!(phases(&answer("length"), true), [Value::Null]);
}
