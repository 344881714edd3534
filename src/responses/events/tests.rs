use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::ids::{ResponseId, Root};
use crate::responses::item::Ids;
use crate::responses::request::CreateRequest;
use crate::responses::template::ResponseMeta;

const RECORDED: &[u8] = include_bytes!("../../../tests/fixtures/vllm-0.32/responses_stream.sse");
const RECORDED_DECODE: &[u8] =
    include_bytes!("../../../tests/fixtures/vllm-0.32/responses_stream_decode.sse");
const RECORDED_CUT: &[u8] =
    include_bytes!("../../../tests/fixtures/vllm-0.32/responses_stream_cut.sse");

fn response() -> ResponseId {
    ResponseId::new(Root(1), 2)
}

fn rewriter(reasoning: ReasoningEvents) -> EventRewriter {
    let body = r#"{"model":"tiny","input":"x","tools":[{"type":"function","name":"f"}]}"#;
    let create = CreateRequest::read(body.as_bytes()).unwrap();
    let id = response().to_string();
    let header = ResponseMeta {
        id: &id,
        created_at: 7,
        previous: None,
        conversation: None,
        store: true,
    };
    let template = ResponseTemplate::new(&create, &header, Ids::of(response()));
    let limits = EventOptions {
        bytes_max: 1 << 20,
        reasoning,
    };
    EventRewriter::new(template, limits, None)
}

/// All output for the client, and the outcome.
fn run(pieces: &[&[u8]], reasoning: ReasoningEvents) -> (Vec<u8>, Outcome) {
    let mut events = rewriter(reasoning);
    let mut out = Vec::new();
    let mut outcome = None;
    for piece in pieces {
        outcome = outcome.or(events.push(piece, &mut out));
    }
    let outcome = outcome.or_else(|| events.finish(&mut out)).unwrap();
    let response = events.template().ended(&outcome, 9);
    events.end(&response, &outcome, &mut out);
    let length = out.len();
    assert_eq!(events.push(b"data: {}\n\n", &mut out), None);
    assert_eq!(events.finish(&mut out), None);
    assert_eq!(out.len(), length, "nothing follows the end");
    (out, outcome)
}

/// Parses a stream and checks what every client relies on.
fn check_stream(out: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(out).unwrap();
    let body = text
        .strip_suffix("data: [DONE]\n\n")
        .expect("the mark at the end");
    let mut events = Vec::new();
    for block in body.split_terminator("\n\n") {
        let (name, data) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["sequence_number"], events.len(), "{block}");
        events.push((name.to_owned(), data));
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["response.created", "response.in_progress"]);
    let is_end = |name: &str| {
        matches!(
            name,
            "response.completed" | "response.incomplete" | "response.failed"
        )
    };
    assert!(is_end(names[names.len() - 1]));
    assert_eq!(names.iter().filter(|name| is_end(name)).count(), 1);
    events
}

fn sse(events: &[Value]) -> Vec<u8> {
    let write = |event: &Value| {
        format!(
            "event: {}\ndata: {event}\n\n",
            event["type"].as_str().unwrap()
        )
    };
    events.iter().map(write).collect::<String>().into_bytes()
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events
        .iter()
        .map(|(name, _)| name.trim_start_matches("response."))
        .collect()
}

#[test]
fn a_recorded_stream_is_rewritten() {
    let (out, outcome) = run(&[RECORDED], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    assert_eq!(
        names(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete",
        ]
    );
    let id = Ids::of(response()).output("msg", 0);
    for (_, event) in &events[3..8] {
        assert_eq!(event["item_id"], *id);
    }
    assert_eq!(events[0].1["response"]["id"], response().to_string());
    assert_eq!(events[0].1["response"]["temperature"], 0.0);
    assert_eq!(events[0].1["response"]["tools"][0]["strict"], Value::Null);
    assert_eq!(events[4].1["delta"], "toff");
    assert_eq!(events[4].1["logprobs"], json!([]));
    let done = &events[8].1["item"];
    assert_eq!(
        (&done["status"], &done["id"]),
        (&json!("incomplete"), &json!(id))
    );
    assert_eq!(done["content"][0]["logprobs"], json!([]));
    let last = &events[9].1["response"];
    assert_eq!(last["status"], "incomplete");
    assert_eq!(
        last["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(last["completed_at"], Value::Null);
    assert_eq!(last["output"], json!([done]));
    assert_eq!(
        last["usage"],
        json!({"input_tokens": 15, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 20})
    );
    assert_eq!(outcome.status, Status::Incomplete);
    assert!(
        !String::from_utf8(out)
            .unwrap()
            .contains("kv_transfer_params")
    );
}

#[test]
fn a_stream_that_an_engine_breaks_off_ends_as_failed() {
    let (out, outcome) = run(&[RECORDED_CUT], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    let last = &events.last().unwrap().1["response"];
    assert_eq!(
        (outcome.status, &last["status"]),
        (Status::Failed, &json!("failed"))
    );
    assert_eq!(last["error"]["code"], "server_error");
    assert_eq!(last["output"], json!([]));
}

#[test]
fn an_empty_stream_is_a_failed_response() {
    let (out, _) = run(&[], ReasoningEvents::OpenAi);
    assert_eq!(check_stream(&out).len(), 3);
}

#[test]
fn output_before_a_break_is_kept_and_completed() {
    let at = memchr::memmem::find(RECORDED, b"event: response.output_text.done").unwrap();
    let (out, outcome) = run(&[&RECORDED[..at]], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    assert_eq!(
        names(&events)[4..],
        [
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "failed"
        ]
    );
    let text = "toff ':NTP ':NTP";
    assert_eq!(events[6].1["text"], text);
    assert_eq!(events[7].1["part"]["text"], text);
    let item = &events[8].1["item"];
    assert_eq!(
        (&item["status"], &item["content"][0]["text"]),
        (&json!("incomplete"), &json!(text))
    );
    assert_eq!(events[9].1["response"]["output"], json!([item]));
    let output: Value = serde_json::from_slice(&outcome.output).unwrap();
    assert_eq!(output, json!([item]));
}

/// A reasoning model that calls a function, as vLLM streams it.
fn reasoning_and_a_call() -> Vec<Value> {
    let call = |arguments: &str| {
        json!({"id": "fc_x", "type": "function_call", "call_id": "call_1", "name": "f",
        "arguments": arguments, "status": "completed", "namespace": null})
    };
    vec![
        json!({"type": "response.created", "response": {"id": "r", "temperature": 0.5}, "sequence_number": 0}),
        json!({"type": "response.in_progress", "response": {"id": "r"}, "sequence_number": 1}),
        json!({"type": "response.output_item.added", "output_index": 0, "sequence_number": 2,
            "item": {"id": "rs_x", "summary": [], "type": "reasoning", "content": null, "encrypted_content": null, "status": "in_progress"}}),
        json!({"type": "response.content_part.added", "item_id": "rs_x", "output_index": 0, "content_index": 0, "sequence_number": 3,
            "part": {"type": "reasoning_text", "text": ""}}),
        json!({"type": "response.reasoning_text.delta", "item_id": "rs_x", "output_index": 0, "content_index": 0, "delta": "hm \"x\"", "sequence_number": 4}),
        json!({"type": "response.reasoning_text.delta", "item_id": "rs_x", "output_index": 0, "content_index": 0, "delta": " yes\n", "sequence_number": 5}),
        json!({"type": "response.reasoning_text.done", "item_id": "rs_x", "output_index": 0, "content_index": 0, "text": "hm \"x\" yes\n", "sequence_number": 6}),
        json!({"type": "response.content_part.done", "item_id": "rs_x", "output_index": 0, "content_index": 0, "sequence_number": 7,
            "part": {"type": "reasoning_text", "text": "hm \"x\" yes\n"}}),
        json!({"type": "response.output_item.done", "output_index": 0, "sequence_number": 8,
            "item": {"id": "rs_x", "summary": [], "type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm \"x\" yes\n"}], "status": null}}),
        json!({"type": "response.output_item.added", "output_index": 1, "sequence_number": 9, "item": call("")}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_x", "output_index": 1, "delta": "{\"a\":", "sequence_number": 10}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_x", "output_index": 1, "delta": " 1.0}", "sequence_number": 11}),
        json!({"type": "response.function_call_arguments.done", "item_id": "fc_x", "output_index": 1, "name": "f", "arguments": "{\"a\": 1.0}", "sequence_number": 12}),
        json!({"type": "response.output_item.done", "output_index": 1, "sequence_number": 13, "item": call("{\"a\": 1.0}")}),
        json!({"type": "response.completed", "sequence_number": 14, "response": {"id": "r", "status": "completed", "temperature": 0.5,
            "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1, "tool_output_tokens": 0}},
            "output": [
                {"id": "rs_x", "summary": [], "type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm \"x\" yes\n"}], "status": null},
                call("{\"a\": 1.0}")]}}),
    ]
}

#[test]
fn reasoning_and_calls_pass_unchanged() {
    let (out, outcome) = run(&[&sse(&reasoning_and_a_call())], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    let received: Vec<String> = reasoning_and_a_call()
        .iter()
        .map(|event| event["type"].as_str().unwrap().to_owned())
        .collect();
    let names: Vec<&String> = events.iter().map(|(name, _)| name).collect();
    assert_eq!(names, received.iter().collect::<Vec<_>>());
    let ids = Ids::of(response());
    assert_eq!(events[4].1["item_id"], ids.output("rs", 0));
    assert_eq!(events[4].1["delta"], "hm \"x\"");
    let call = &events[13].1["item"];
    assert_eq!(call["id"], ids.output("fc", 1));
    assert_eq!(
        (&call["call_id"], &call["arguments"], &call["status"]),
        (
            &json!("call_1"),
            &json!("{\"a\": 1.0}"),
            &json!("completed")
        )
    );
    assert_eq!(call.get("namespace"), None);
    let last = &events[14].1["response"];
    assert_eq!(last["output"], json!([events[8].1["item"], call]));
    assert_eq!(last["output"][0]["status"], "completed");
    assert_eq!(
        (outcome.status, &last["completed_at"]),
        (Status::Completed, &json!(9))
    );
    assert_eq!(last["temperature"], 0.5);
}

/// The first delta is written after an event that waited for it: that one is no part of the next delta.
#[test]
fn deltas_after_the_end_of_another_item_do_not_end_it_again() {
    let recorded = reasoning_and_a_call();
    for order in [
        [0, 1, 2, 9, 8, 11, 11, 13, 14].as_slice(),
        // The engine does not say that the response has begun.
        &[2, 11, 11],
        &[11, 11, 14],
    ] {
        let events: Vec<Value> = order.iter().map(|at| recorded[*at].clone()).collect();
        let (out, _) = run(&[&sse(&events)], ReasoningEvents::OpenAi);
        let events = check_stream(&out);
        let deltas = events.iter().filter(|(name, _)| name.ends_with(".delta"));
        assert_eq!(deltas.count(), 2, "{order:?}");
        let done = events
            .iter()
            .filter(|(name, event)| {
                name == "response.output_item.done" && event["output_index"] == 0
            })
            .count();
        assert_eq!(done, usize::from(order.contains(&2)), "{order:?}");
    }
}

#[test]
fn reasoning_events_can_have_open_responses_names() {
    let (out, _) = run(
        &[&sse(&reasoning_and_a_call())],
        ReasoningEvents::OpenResponses,
    );
    let events = check_stream(&out);
    for (place, name) in [
        (4, "response.reasoning.delta"),
        (6, "response.reasoning.done"),
    ] {
        assert_eq!(events[place].0, name);
        assert_eq!(events[place].1["type"], name);
    }
}

#[test]
fn a_completed_call_without_arguments_has_an_empty_object() {
    let arguments = |status: &str| {
        let mut sent = reasoning_and_a_call();
        sent.drain(10..12);
        sent[10]["arguments"] = json!("");
        sent[11]["item"]["arguments"] = json!("");
        sent[12]["response"]["status"] = json!(status);
        let (out, outcome) = run(&[&sse(&sent)], ReasoningEvents::OpenAi);
        let item = check_stream(&out)[11].1["item"].clone();
        let output: Value = serde_json::from_slice(&outcome.output).unwrap();
        assert_eq!(output[1], item);
        item["arguments"].clone()
    };
    assert_eq!(arguments("completed"), "{}");
    // It was cut off before them.
    assert_eq!(arguments("incomplete"), "");
}

#[test]
fn an_interrupted_call_keeps_its_arguments_so_far() {
    let (out, outcome) = run(
        &[&sse(&reasoning_and_a_call()[..11])],
        ReasoningEvents::OpenAi,
    );
    let events = check_stream(&out);
    assert_eq!(
        names(&events)[11..],
        ["function_call_arguments.done", "output_item.done", "failed"]
    );
    assert_eq!(events[11].1["arguments"], "{\"a\":");
    assert_eq!(events[12].1["item"]["arguments"], "{\"a\":");
    assert_eq!(events[12].1["item"]["status"], "incomplete");
    let output: Value = serde_json::from_slice(&outcome.output).unwrap();
    assert_eq!(output[0]["status"], "completed");
    assert_eq!(output[1]["status"], "incomplete");
}

#[test]
fn engine_error_events_become_a_failed_response() {
    let started = &reasoning_and_a_call()[..5];
    for error in [
        "data: {\"error\":{\"message\":\"oom\",\"code\":500}}\n\n",
        "event: error\ndata: {\"type\":\"error\",\"message\":\"oom\"}\n\n",
        "data: [DONE]\n\n",
        "data: {\"type\":\n\n",
        "data: 7\n\n",
        "event: response.completed\ndata: {}\n\n",
        "event: response.completed\ndata: {\"response\":{\"status\":\"in_progress\"}}\n\n",
    ] {
        let (out, outcome) = run(&[&sse(started), error.as_bytes()], ReasoningEvents::OpenAi);
        let events = check_stream(&out);
        assert_eq!(outcome.status, Status::Failed, "{error}");
        assert!(
            events
                .iter()
                .all(|(name, data)| name != "error" && data.get("error").is_none())
        );
        let message = events.last().unwrap().1["response"]["error"]["message"].clone();
        assert_eq!(error.contains("oom"), message == "oom", "{message}");
    }
}

#[test]
fn event_names_may_be_only_in_the_data() {
    let plain: String = reasoning_and_a_call()
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    let (named, _) = run(&[&sse(&reasoning_and_a_call())], ReasoningEvents::OpenAi);
    let (plain, _) = run(&[plain.as_bytes()], ReasoningEvents::OpenAi);
    assert_eq!(plain, named);
}

#[test]
fn parts_and_items_are_counted_by_the_router() {
    let events = [
        json!({"type": "response.output_item.added", "output_index": 5, "item": {"type": "message", "id": "m", "content": []}}),
        json!({"type": "response.content_part.added", "item_id": "m", "output_index": 5, "content_index": 3, "part": {"type": "output_text", "text": ""}}),
        json!({"type": "response.output_text.delta", "item_id": "m", "output_index": 5, "content_index": 9, "delta": "a", "logprobs": null}),
    ];
    let (out, _) = run(&[&sse(&events)], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    assert_eq!(events[2].1["output_index"], 0);
    for (_, event) in &events[3..5] {
        assert_eq!(
            (&event["output_index"], &event["content_index"]),
            (&json!(0), &json!(0))
        );
    }
    assert_eq!(events[3].1["part"]["annotations"], json!([]));
    assert_eq!(events[4].1["logprobs"], json!([]));
}

#[test]
fn unknown_events_pass_with_a_new_number() {
    let events = [
        json!({"type": "response.shiny.new", "sequence_number": 77, "x": {"sequence_number": 5}}),
        json!({"type": "response.bare"}),
    ];
    let (out, _) = run(&[&sse(&events)], ReasoningEvents::OpenAi);
    let events = check_stream(&out);
    assert_eq!(
        (events[2].0.as_str(), &events[2].1["x"]),
        ("response.shiny.new", &json!({"sequence_number": 5}))
    );
    assert_eq!(events[3].0, "response.bare");
}

#[test]
fn an_answer_beyond_the_limit_fails() {
    let mut events = rewriter(ReasoningEvents::OpenAi);
    events.stream.bytes_max = 10;
    let mut out = Vec::new();
    let outcome = events
        .push(&sse(&reasoning_and_a_call()), &mut out)
        .unwrap();
    assert_eq!(outcome.error.unwrap().message, TOO_LONG);
}

fn cut(text: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    places.push(text.len());
    places.sort_unstable();
    let mut begin = 0;
    let piece = |end| {
        let piece = text[begin..end].to_vec();
        begin = end;
        piece
    };
    places.into_iter().map(piece).collect()
}

fn source() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(RECORDED.to_vec()),
        Just(RECORDED_DECODE.to_vec()),
        Just(RECORDED_CUT.to_vec()),
        (0..=15_usize).prop_map(|length| sse(&reasoning_and_a_call()[..length])),
        proptest::sample::subsequence(reasoning_and_a_call(), 0..=15)
            .prop_map(|events| sse(&events)),
        proptest::sample::subsequence(reasoning_and_a_call(), 15)
            .prop_shuffle()
            .prop_map(|events| sse(&events)),
    ]
}

proptest! {
    #[test]
    fn any_cut_gives_the_same_stream_with_one_end(text in source(), cuts in proptest::collection::vec(any::<usize>(), 0..20), crlf: bool) {
        let text = if crlf {
            String::from_utf8(text).unwrap().replace('\n', "\r\n").into_bytes()
        } else {
            text
        };
        let pieces = cut(&text, &cuts);
        let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        let (out, outcome) = run(&pieces, ReasoningEvents::OpenAi);
        check_stream(&out);
        let (whole, ended) = run(&[&text], ReasoningEvents::OpenAi);
        prop_assert_eq!(out, whole);
        prop_assert_eq!(outcome, ended);
    }

    #[test]
    fn no_bytes_make_it_panic_or_end_twice(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        text in source(),
        at in any::<prop::sample::Index>(),
        remove in 0..40_usize,
    ) {
        run(&[&bytes], ReasoningEvents::OpenResponses);
        let mut text = text;
        let at = at.index(text.len().max(1)).min(text.len());
        text.splice(at..(at + remove).min(text.len()), bytes);
        let (out, _) = run(&[&text], ReasoningEvents::OpenAi);
        prop_assert!(out.ends_with(b"data: [DONE]\n\n"));
    }
}

proptest! {
    /// Events whose lines end in CR are always parsed.
    #[test]
    fn a_delta_is_written_the_same_whether_it_is_parsed_or_spliced(
        deltas in proptest::collection::vec(
            (prop_oneof![4 => "[ a-z]{0,6}", 1 => "[\u{0}-\u{ff}\"]{0,4}"], 0..9_u8, any::<bool>()),
            1..30,
        ),
        number_first: bool,
        cut in 1..400_usize,
    ) {
        let mut text = String::from(
            "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\",\"sequence_number\":2,\"output_index\":0,\"item\":{\"type\":\"message\",\"id\":\"m\",\"role\":\"assistant\",\"content\":[]}}\n\n\
             event: response.content_part.added\ndata: {\"type\":\"response.content_part.added\",\"sequence_number\":3,\"item_id\":\"m\",\"output_index\":0,\"content_index\":0,\"part\":{\"type\":\"output_text\",\"text\":\"\"}}\n\n",
        );
        for (index, (delta, kind, null)) in deltas.iter().enumerate() {
            let (delta, logprobs) = (json!(delta), if *null { "null" } else { "[]" });
            let name = if *kind == 0 { "response.reasoning_text.delta" } else { "response.output_text.delta" };
            let number = format!("\"sequence_number\":{},", 4 + index);
            let (before, after) = if number_first { (&*number, "") } else { ("", &*number) };
            let item = if *kind == 1 { 7 } else { 0 };
            text += &format!(
                "event: {name}\ndata: {{\"content_index\":0,{before}\"delta\":{delta},\"item_id\":\"m\",\"logprobs\":{logprobs},{after}\"output_index\":{item},\"type\":\"{name}\"}}\n\n",
            );
        }
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(cut).collect();
        let parsed = text.replace('\n', "\r\n");
        for reasoning in [ReasoningEvents::OpenAi, ReasoningEvents::OpenResponses] {
            let spliced = run(&pieces, reasoning);
            check_stream(&spliced.0);
            prop_assert_eq!(&spliced, &run(&[parsed.as_bytes()], reasoning));
        }
    }
}
