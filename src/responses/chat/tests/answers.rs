use serde_json::{Value, json};

use super::super::answer::ChatAnswer;
use super::super::tools::AnsweredTools;

/// The events that the data of these chunks becomes; what follows without `[DONE]` ends the stream.
pub(super) fn events(request: &Value, chunks: &[Value]) -> Vec<Value> {
    events_with(AnsweredTools::of(request.to_string().as_bytes()), chunks)
}

/// The events that the data of these chunks becomes when the answer is read with these settings.
pub(super) fn events_with(tools: AnsweredTools, chunks: &[Value]) -> Vec<Value> {
    let mut answer = ChatAnswer::new(tools, 1 << 20, false);
    let mut out = Vec::new();
    for chunk in chunks {
        match chunk.as_str() {
            Some(text) => answer.on_data(text, &mut out),
            None => answer.on_data(&chunk.to_string(), &mut out),
        }
    }
    answer.on_end(&mut out);
    let text = String::from_utf8(out).unwrap();
    let events = text.split_terminator("\n\n");
    events
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

/// The kinds of the events, without `response.`, each with its index and what it adds.
fn summary(events: &[Value]) -> Vec<String> {
    let of = |event: &Value| {
        let kind = event["type"]
            .as_str()
            .unwrap()
            .strip_prefix("response.")
            .unwrap();
        let index = event
            .get("output_index")
            .map(|index| format!(" {index}"))
            .unwrap_or_default();
        let delta = event
            .get("delta")
            .map(|delta| format!(" {delta}"))
            .unwrap_or_default();
        format!("{kind}{index}{delta}")
    };
    events.iter().map(of).collect()
}

fn check(request: Value, chunks: &[Value], expected: &[&str]) -> Vec<Value> {
    let events = events(&request, chunks);
    assert_eq!(summary(&events), expected);
    events
}

pub(super) fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}], "usage": null})
}

pub(super) fn finish(reason: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

pub(super) fn fragment(index: u64, id: &str, name: &str, arguments: &str) -> Value {
    let mut call = json!({"index": index, "function": {"arguments": arguments}});
    if !id.is_empty() {
        call["id"] = id.into();
        call["type"] = "function".into();
    }
    if !name.is_empty() {
        call["function"]["name"] = name.into();
    }
    delta(json!({"tool_calls": [call]}))
}

pub(super) fn done() -> Value {
    json!("[DONE]")
}

pub(super) fn item(events: &[Value], index: u64) -> &Value {
    let found = events.iter().find(|event| {
        event["type"] == "response.output_item.done" && event["output_index"] == index
    });
    &found.unwrap()["item"]
}

#[test]
fn reasoning_and_text_are_two_items() {
    for name in ["reasoning", "reasoning_content"] {
        let chunks = [
            delta(json!({"role": "assistant", "content": "", name: null})),
            delta(json!({name: "th"})),
            delta(json!({name: "ink", "content": null})),
            delta(json!({"content": "a\"\n"})),
            delta(json!({"content": "b"})),
            finish("stop"),
            json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2}}}),
            done(),
        ];
        let events = check(
            json!({}),
            &chunks,
            &[
                "created",
                "output_item.added 0",
                "content_part.added 0",
                "reasoning_text.delta 0 \"th\"",
                "reasoning_text.delta 0 \"ink\"",
                "reasoning_text.done 0",
                "content_part.done 0",
                "output_item.done 0",
                "output_item.added 1",
                "content_part.added 1",
                "output_text.delta 1 \"a\\\"\\n\"",
                "output_text.delta 1 \"b\"",
                "output_text.done 1",
                "content_part.done 1",
                "output_item.done 1",
                "completed",
            ],
        );
        assert_eq!(
            item(&events, 0)["content"],
            json!([{"type": "reasoning_text", "text": "think"}])
        );
        assert_eq!(item(&events, 1)["content"][0]["text"], "a\"\nb");
        assert_eq!(
            events.last().unwrap()["response"]["usage"],
            json!({
            "input_tokens": 5, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 8})
        );
    }
    // Both names in one chunk are the same text.
    let both = [
        delta(json!({"reasoning": "x", "reasoning_content": "x"})),
        finish("stop"),
    ];
    let events = events(&json!({}), &both);
    assert_eq!(item(&events, 0)["content"][0]["text"], "x");
}

#[test]
fn parallel_calls_stay_open_until_the_end() {
    let request =
        json!({"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]});
    let chunks = [
        delta(json!({"content": "so"})),
        fragment(0, "call_a", "f", ""),
        fragment(0, "", "", "{\"a\":"),
        fragment(1, "call_b", "g", "{}"),
        fragment(0, "", "", "1}"),
        finish("tool_calls"),
        done(),
    ];
    let events = check(
        request,
        &chunks,
        &[
            "created",
            "output_item.added 0",
            "content_part.added 0",
            "output_text.delta 0 \"so\"",
            "output_text.done 0",
            "content_part.done 0",
            "output_item.done 0",
            "output_item.added 1",
            "function_call_arguments.delta 1 \"{\\\"a\\\":\"",
            "output_item.added 2",
            "function_call_arguments.delta 2 \"{}\"",
            "function_call_arguments.delta 1 \"1}\"",
            "function_call_arguments.done 1",
            "output_item.done 1",
            "function_call_arguments.done 2",
            "output_item.done 2",
            "completed",
        ],
    );
    assert_eq!(
        *item(&events, 1),
        json!({"type": "function_call", "call_id": "call_a", "name": "f", "arguments": "{\"a\":1}"})
    );
}

#[test]
fn text_after_a_call_is_a_new_message() {
    let chunks = [
        delta(json!({"content": "a"})),
        fragment(0, "1", "f", "{}"),
        delta(json!({"content": "b"})),
        delta(json!({"reasoning": "c"})),
        finish("stop"),
    ];
    let events = events(&json!({}), &chunks);
    let kinds: Vec<&str> = (0..4)
        .map(|index| item(&events, index)["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["message", "function_call", "message", "reasoning"]);
}

#[test]
fn finish_reasons_decide_how_the_response_ends() {
    let text = delta(json!({"content": "a"}));
    let check = |last: Option<Value>, status: &str, reason: Value| {
        let chunks: Vec<Value> = [text.clone()]
            .into_iter()
            .chain(last)
            .chain([done()])
            .collect();
        let events = events(&json!({}), &chunks);
        let ended = &events.last().unwrap()["response"];
        assert_eq!(ended["status"], status, "{chunks:?}");
        assert_eq!(ended["incomplete_details"]["reason"], reason);
        assert_eq!(ended["error"].is_null(), status != "failed");
        let ends = events.iter().filter(|event| {
            event["response"]["status"] != "in_progress" && !event["response"].is_null()
        });
        assert_eq!(ends.count(), 1);
    };
    for reason in ["stop", "tool_calls", "function_call"] {
        check(Some(finish(reason)), "completed", Value::Null);
    }
    check(
        Some(finish("length")),
        "incomplete",
        json!("max_output_tokens"),
    );
    check(
        Some(finish("content_filter")),
        "incomplete",
        json!("content_filter"),
    );
    for reason in ["abort", "error", "repetition", "whatever"] {
        check(Some(finish(reason)), "failed", Value::Null);
    }
    check(None, "failed", Value::Null);
}

#[test]
fn a_stream_always_ends() {
    let text = delta(json!({"content": "a"}));
    let check = |chunks: &[Value], status: &str, message: &str| {
        let events = events(&json!({}), chunks);
        let ended = &events.last().unwrap()["response"];
        assert_eq!(ended["status"], status, "{chunks:?}");
        let found = ended["error"]["message"].as_str().unwrap_or_default();
        assert!(found.contains(message), "{found}");
    };
    check(&[], "failed", "ended the stream before");
    check(
        std::slice::from_ref(&text),
        "failed",
        "ended the stream before",
    );
    // Without `[DONE]`, but after the finish reason.
    check(&[text.clone(), finish("stop")], "completed", "");
    check(
        &[
            text.clone(),
            finish("stop"),
            json!({"error": {"message": "late"}}),
        ],
        "completed",
        "",
    );
    check(
        &[
            text.clone(),
            json!({"error": {"message": "out of memory", "code": 500}}),
        ],
        "failed",
        "out of memory",
    );
    check(
        &[text.clone(), json!({"error": "plain"})],
        "failed",
        "plain",
    );
    check(&[text.clone(), json!("no json")], "failed", "cannot read");
    check(
        &[
            text.clone(),
            json!({"choices": [{"index": 1, "delta": {"content": "b"}}]}),
        ],
        "failed",
        "second answer",
    );
}

#[test]
fn a_refusal_is_a_part_of_its_own() {
    let chunks = [
        delta(json!({"content": "a"})),
        delta(json!({"refusal": "no"})),
        finish("stop"),
    ];
    let events = events(&json!({}), &chunks);
    assert_eq!(
        item(&events, 0)["content"],
        json!([
            {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "no"},
        ])
    );
}

#[test]
fn log_probabilities_belong_to_the_text_of_their_chunk() {
    let entry = json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []});
    let with = |delta: Value| json!({"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [entry]}}]});
    let chunks = [
        with(json!({"reasoning": "r"})),
        with(json!({"content": "a"})),
        // Some engines write an empty list of calls in every chunk.
        with(json!({"content": "b", "reasoning": null, "tool_calls": []})),
        finish("stop"),
    ];
    let asked = json!({"include": ["message.output_text.logprobs"]});
    let found = events(&asked, &chunks);
    assert_eq!(
        item(&found, 1)["content"][0]["logprobs"],
        json!([entry, entry])
    );
    let deltas: Vec<usize> = found
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["logprobs"].as_array().unwrap().len())
        .collect();
    assert_eq!(deltas, [1, 1]);
    // Not asked for, they are not there.
    let found = events(&json!({}), &chunks);
    assert_eq!(item(&found, 1)["content"][0]["logprobs"], json!([]));
}

#[test]
fn a_call_that_tool_choice_does_not_allow_fails_the_response() {
    let request = json!({"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}],
        "tool_choice": "auto",
        "allowed_tools": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}});
    let ended = |name: &str| {
        let events = events(
            &request,
            &[fragment(0, "1", name, "{}"), finish("tool_calls")],
        );
        events.last().unwrap()["response"]["status"].clone()
    };
    assert_eq!(
        (ended("f"), ended("g")),
        (json!("completed"), json!("failed"))
    );
}

#[test]
fn the_limit_counts_the_content_and_not_its_chunks() {
    let run = |pieces: usize, bytes_max: usize| {
        let mut answer = ChatAnswer::new(AnsweredTools::default(), bytes_max, false);
        let mut out = Vec::new();
        for _ in 0..pieces {
            answer.on_data(
                &delta(json!({"content": "x".repeat(100 / pieces)})).to_string(),
                &mut out,
            );
        }
        answer.error.clone()
    };
    for pieces in [1, 10, 100] {
        assert_eq!(run(pieces, 100), None);
        assert!(
            run(pieces, 99)
                .unwrap()
                .contains("longer than the router allows")
        );
    }
}
