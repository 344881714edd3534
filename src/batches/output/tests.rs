use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn result_of(flavor: Flavor) -> ResultOf<'static> {
    ResultOf {
        flavor,
        batch: "batch_1",
        line: 3,
        custom_id: "a\"b",
    }
}

/// The line as JSON, without its id.
fn parsed(line: &str) -> Value {
    assert!(!line.contains(['\n', '\r']), "{line}");
    let mut value: Value = serde_json::from_str(line).unwrap();
    if let Some(id) = value.as_object_mut().unwrap().remove("id") {
        assert!(id.as_str().unwrap().starts_with("batch_req_"));
    }
    value
}

#[test]
fn an_answer_of_openais_api_keeps_its_status_and_its_body() {
    let of = result_of(Flavor::OpenAi);
    let check = |status: u16, body: &str, expected: Value| {
        let line = of.answer(status, "req_1", body.as_bytes());
        let expected = json!({
            "custom_id": "a\"b",
            "response": {"status_code": status, "request_id": "req_1", "body": expected},
            "error": null,
        });
        assert_eq!(parsed(&line), expected);
    };
    check(200, "{\"x\": 1.50}", json!({"x": 1.50}));
    check(200, "{\r\n  \"x\": \"\\n\"\n}\n", json!({"x": "\n"}));
    check(400, r#"{"error":{}}"#, json!({"error": {}}));
    check(502, "no\nJSON", json!("no\nJSON"));
    check(502, "", json!(""));
    let line = of.answer(200, "r", b"{\"x\": 1.50}");
    assert!(line.contains(r#""body":{"x": 1.50}"#), "bytes stay: {line}");
}

#[test]
fn the_id_of_a_request_is_its_lines() {
    let id = |batch, line| {
        let of = ResultOf {
            batch,
            line,
            ..result_of(Flavor::OpenAi)
        };
        of.request_id()
    };
    assert_eq!(id("batch_1", 3), id("batch_1", 3));
    assert_ne!(id("batch_1", 3), id("batch_1", 4));
    assert_ne!(id("batch_1", 3), id("batch_2", 3));
}

#[test]
fn an_answer_of_messages_succeeds_or_has_anthropics_error() {
    let of = result_of(Flavor::Messages);
    let check = |line: String, expected: Value| {
        let expected = json!({"custom_id": "a\"b", "result": expected});
        assert_eq!(parsed(&line), expected);
    };
    check(
        of.answer(200, "r", b"{\"type\":\n\"message\"}"),
        json!({"type": "succeeded", "message": {"type": "message"}}),
    );
    let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "later"}});
    check(
        of.answer(529, "r", error.to_string().as_bytes()),
        json!({"type": "errored", "error": error}),
    );
    let other =
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}});
    check(
        of.answer(
            400,
            "r",
            br#"{"error":{"message":"too long","type":"BadRequestError"}}"#,
        ),
        json!({"type": "errored", "error": other}),
    );
    let message = "the engine answered 502 Bad Gateway";
    let no_message = json!({"type": "error", "error": {"type": "api_error", "message": message}});
    check(
        of.answer(200, "r", b"ok"),
        json!({"type": "errored", "error": no_message}),
    );
    let invalid =
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}});
    check(
        of.invalid(&LineError::new("invalid_type", "no", None)),
        json!({"type": "errored", "error": invalid}),
    );
    check(of.not_run(Ending::Expired), json!({"type": "expired"}));
    check(of.not_run(Ending::Cancelled), json!({"type": "canceled"}));
    let too_large = LineError::new("results_too_large", "large", None);
    for again in [of.not_run(Ending::Completed), of.batch_failed(&too_large)] {
        let value = parsed(&again);
        let kind = &value["result"]["error"]["error"]["type"];
        assert_eq!(kind, "api_error", "{again}");
    }
}

#[test]
fn a_line_that_did_not_run_says_why() {
    let of = result_of(Flavor::OpenAi);
    let check = |line: String, code: &str| {
        let value = parsed(&line);
        assert_eq!(value["custom_id"], "a\"b");
        assert_eq!(value["response"], Value::Null);
        assert_eq!(value["error"]["code"], code);
        assert!(value["error"]["message"].is_string());
    };
    check(of.not_run(Ending::Expired), "batch_expired");
    check(of.not_run(Ending::Cancelled), "batch_cancelled");
    check(of.not_run(Ending::Completed), "result_lost");
    check(
        of.invalid(&LineError::new("invalid_type", "no", None)),
        "invalid_type",
    );
    check(of.input_gone(), "input_file_gone");
    assert!(of.input_gone().contains("line 4 of the file"));
}

#[test]
fn each_apis_usage_is_read() {
    let check = |body: &str, expected: [u64; 3]| {
        let found = usage_of(body.as_bytes());
        let found = [found.input_tokens, found.output_tokens, found.cached_tokens];
        assert_eq!(found, expected, "{body}");
    };
    let chat = r#"{"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}"#;
    check(chat, [9, 3, 8]);
    let plain = r#"{"id":"x","usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}}"#;
    check(plain, [9, 3, 0]);
    let embeddings = r#"{"data":[],"usage":{"prompt_tokens":9,"total_tokens":9}}"#;
    check(embeddings, [9, 0, 0]);
    let response = r#"{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":3}}"#;
    check(response, [9, 3, 4]);
    let message = json!({"usage": {
        "input_tokens": 9,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 2,
        "output_tokens": 3,
    }});
    check(&message.to_string(), [15, 3, 4]);
    for none in ["{}", r#"{"usage":null}"#, r#"{"usage":[1]}"#, "x", ""] {
        check(none, [0, 0, 0]);
    }
}

#[test]
fn tries_are_read_back_and_are_no_result() {
    let tries = LineTries { tries: 3, line: 7 };
    let mut part = Vec::new();
    tries.write(&mut part);
    let written = part.strip_suffix(b"\n").unwrap();
    assert_eq!(LineTries::read(written), Some(tries));
    assert_eq!(PartLine::read(written), None);
    for other in [&b""[..], b"{}", br#"{"tries":3,"li"#, br#"{"line":7}"#] {
        assert_eq!(LineTries::read(other), None);
    }
}

#[test]
fn a_part_line_is_read_back() {
    let line = PartLine {
        line: 7,
        is_ok: true,
        usage: Usage {
            input_tokens: 1,
            output_tokens: 2,
            cached_tokens: 3,
        },
    };
    let mut part = Vec::new();
    line.write(r#"{"custom_id":"a"}"#, &mut part);
    let written = part.strip_suffix(b"\n").unwrap();
    let text: &[u8] = br#"{"custom_id":"a"}"#;
    assert_eq!(PartLine::read(written), Some((line, text)));
    // Half of it, and one of a newer release.
    assert_eq!(PartLine::read(&written[..written.len() - 1]), None);
    let newer = br#"{"line":7,"ok":false,"text":{},"try":2}"#;
    assert_eq!(PartLine::read(newer).unwrap().0.usage, Usage::default());
}

proptest! {
    /// Several replicas write results of the same lines; the plainest model is a map that keeps the first.
    #[test]
    fn each_number_has_one_result_in_any_order(
        total in 0..200_u32,
        writes in proptest::collection::vec((0..220_u32, any::<bool>(), 0..9_u64), 0..300),
    ) {
        let mut assembler = Assembler::new(total);
        let mut model: BTreeMap<u32, (bool, u64)> = BTreeMap::new();
        for (index, (line, is_ok, tokens)) in writes.iter().enumerate() {
            let text = format!(r#"{{"n":{index}}}"#);
            let part_line = PartLine {
                line: *line,
                is_ok: *is_ok,
                usage: Usage { input_tokens: *tokens, ..Usage::default() },
            };
            let mut part = Vec::new();
            part_line.write(&text, &mut part);
            let is_first = *line < total && !model.contains_key(line);
            let (found, found_text) = PartLine::read(&part).unwrap();
            prop_assert_eq!((found, found_text), (part_line, text.as_bytes()));
            prop_assert_eq!(assembler.push(found), is_first);
            if is_first {
                model.insert(*line, (*is_ok, *tokens));
            }
        }
        for line in 0..220 {
            prop_assert_eq!(assembler.has(line), model.contains_key(&line));
        }
        let completed = model.values().filter(|(is_ok, _)| *is_ok).count() as u32;
        let failed = model.len() as u32 - completed;
        prop_assert_eq!(assembler.counts, LineCounts { completed, failed });
        let tokens: u64 = model.values().map(|(_, tokens)| tokens).sum();
        prop_assert_eq!(assembler.usage.input_tokens, tokens);
        let missing: Vec<_> = (0..total).filter(|line| !model.contains_key(line)).collect();
        prop_assert_eq!(assembler.missing().collect::<Vec<_>>(), missing);
    }
}
