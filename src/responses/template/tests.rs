use serde_json::{Value, json};

use super::*;
use crate::ids::{ResponseId, Root};
use crate::responses::object::with_member;

const RECORDED: &str = include_str!("../../../tests/fixtures/vllm-0.32/responses.json");

/// The members that Open Responses requires.
const REQUIRED: [&str; 30] = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
];

fn template(body: &Value) -> ResponseTemplate {
    let body = body.to_string();
    let create = CreateRequest::read(body.as_bytes()).unwrap();
    let meta = ResponseMeta {
        id: "resp_1",
        created_at: 7,
        previous: Some("resp_0"),
        conversation: None,
        store: true,
    };
    ResponseTemplate::new(&create, &meta, Ids::of(ResponseId::new(Root(1), 2)))
}

fn parse(json: &[u8]) -> Value {
    serde_json::from_slice(json)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(json)))
}

fn outcome(engine: &Value) -> Option<Outcome> {
    let text = engine.to_string();
    let members = Members::parse(&text).unwrap();
    let mut outcome = Outcome::of_engine(&members)?;
    outcome.read_output(&members, &Ids::of(ResponseId::new(Root(1), 2)), None, None)?;
    Some(outcome)
}

#[test]
fn every_required_member_is_there_and_numbers_are_numbers() {
    let template = template(&json!({"model": "m", "input": "x"}));
    let failed = Outcome::failed("server_error", "no");
    for object in [
        parse(&template.open(Status::InProgress)),
        parse(&with_output(&template.ended(&failed, 9), &failed.output)),
    ] {
        for name in REQUIRED.iter().chain(&["prompt_cache_key", "user"]) {
            assert!(object.get(name).is_some(), "{name} in {object}");
        }
        for name in [
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "top_logprobs",
        ] {
            assert!(object[name].is_number(), "{name}");
        }
        assert_eq!(object["service_tier"], "default");
        assert_eq!(object["text"], json!({"format": {"type": "text"}}));
        assert_eq!(
            object["reasoning"],
            json!({"effort": null, "summary": null})
        );
        assert_eq!(object["tool_choice"], "auto");
        assert_eq!(
            (&object["store"], &object["background"]),
            (&json!(true), &json!(false))
        );
        assert_eq!(object["previous_response_id"], "resp_0");
    }
}

#[test]
fn the_object_repeats_the_parameters_of_the_request() {
    let object = parse(&template(&json!({
        "model": "m", "input": "x", "instructions": "be \"terse\"", "temperature": 0.25, "top_p": 0.5,
        "metadata": {"k": "v"}, "user": "u", "prompt_cache_key": "p", "max_output_tokens": 16, "service_tier": "auto",
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "s", "schema": {}}},
        "tools": [{"type": "function", "name": "f", "parameters": {"a": 1}}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false, "truncation": "auto",
        "temperature_2": 1,
    })).open(Status::Queued));
    assert_eq!(object["status"], "queued");
    assert_eq!(object["instructions"], "be \"terse\"");
    assert_eq!(
        (&object["temperature"], &object["top_p"]),
        (&json!(0.25), &json!(0.5))
    );
    assert_eq!(object["metadata"], json!({"k": "v"}));
    assert_eq!(
        object["reasoning"],
        json!({"effort": "low", "summary": null})
    );
    assert_eq!(
        object["text"]["format"],
        json!({"type": "json_schema", "name": "s", "schema": {}, "description": null, "strict": false})
    );
    assert_eq!(object["text"]["verbosity"], "low");
    assert_eq!(
        object["tools"],
        json!([{"type": "function", "name": "f", "parameters": {"a": 1}, "description": null, "strict": null}, {"type": "web_search"}])
    );
    assert_eq!(object["service_tier"], "default");
    assert_eq!(object.get("temperature_2"), None);
    assert_eq!(
        (&object["output"], &object["usage"]),
        (&json!([]), &Value::Null)
    );
}

#[test]
fn an_engines_object_gives_outcome_and_sampling_parameters() {
    let outcome = outcome(&serde_json::from_str(RECORDED).unwrap()).unwrap();
    assert_eq!(outcome.status, Status::Incomplete);
    assert_eq!(
        outcome.incomplete_reason.as_deref(),
        Some("max_output_tokens")
    );
    let output = parse(&outcome.output);
    assert_eq!(output[0]["status"], "incomplete");
    assert_eq!(output[0]["content"][0]["logprobs"], json!([]));
    assert!(output[0].get("phase").is_none());
    let mut template = template(&json!({"model": "tiny", "input": "x"}));
    template.learn(&Members::parse(RECORDED).unwrap());
    let object = parse(&with_output(&template.ended(&outcome, 9), &outcome.output));
    assert_eq!(
        (&object["temperature"], &object["completed_at"]),
        (&json!(0.0), &Value::Null)
    );
    assert_eq!(object["usage"]["total_tokens"], 29);
    assert_eq!(
        object["usage"]["input_tokens_details"],
        json!({"cached_tokens": 0, "cache_write_tokens": 0})
    );
    assert_eq!(object["output"], output);
}

#[test]
fn an_object_that_has_not_ended_has_no_outcome() {
    for engine in [
        json!({}),
        json!({"status": "in_progress"}),
        json!({"status": "odd"}),
        json!({"status": "completed", "output": [7]}),
    ] {
        assert_eq!(outcome(&engine), None, "{engine}");
    }
}

#[test]
fn a_completed_response_has_its_time_of_completion() {
    let template = template(&json!({"model": "m", "input": "x"}));
    let outcome = outcome(&json!({"status": "completed", "output": []})).unwrap();
    assert_eq!(parse(&template.ended(&outcome, 9))["completed_at"], 9);
    assert_eq!(
        parse(&template.ended(&outcome, 3))["completed_at"],
        7,
        "clocks may run backwards"
    );
}

#[test]
fn the_status_of_a_stored_object_can_be_replaced() {
    let stored = template(&json!({"model": "m", "input": "x"})).open(Status::Queued);
    let changed = parse(&with_member(&stored, "status", "\"in_progress\""));
    assert_eq!(changed["status"], "in_progress");
    assert_eq!(changed["id"], "resp_1");
}

#[test]
fn multi_line_values_of_a_client_become_one_line() {
    for end in ["\n", "\r\n", "\r"] {
        let body = [
            r#"{"model": "m", "input": "x", "instructions": "a\nb","#,
            r#" "metadata": {"#,
            r#"  "k": "v\n""#,
            r#" }, "tools": ["#,
            r#"  {"type": "function", "name": "f", "parameters": {"#,
            r#"   "type": "object"}},"#,
            r#"  {"type": "web_search","#,
            r#"   "x": 1}], "tool_choice": {"#,
            r#"  "type": "auto"}, "text": {"format": {"#,
            r#"   "type": "text"}}, "reasoning": {"effort":"#,
            r#"  "low"}, "prompt_cache_options": {"#,
            r#"   "a": [1,"#,
            r#"   2]}}"#,
        ]
        .join(end);
        let create = CreateRequest::read(body.as_bytes()).unwrap();
        let meta = ResponseMeta {
            id: "resp_1",
            created_at: 7,
            previous: None,
            conversation: None,
            store: true,
        };
        let template = ResponseTemplate::new(&create, &meta, Ids::of(ResponseId::new(Root(1), 2)));
        let object = template.open(Status::InProgress);
        assert!(!object.contains(&b'\n') && !object.contains(&b'\r'));
        let object = parse(&object);
        assert_eq!(object["instructions"], "a\nb");
        assert_eq!(object["metadata"], json!({"k": "v\n"}));
        assert_eq!(object["tools"][1], json!({"type": "web_search", "x": 1}));
        assert_eq!(object["prompt_cache_options"], json!({"a": [1, 2]}));
    }
}
