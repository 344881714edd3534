use std::fmt::Write as _;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// The prompt's tokens, those cached, those of the output.
type Numbers = (u64, u64, u64);

fn numbers(usage: Option<Usage>) -> Option<Numbers> {
    let usage = usage?;
    Some((
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.output_tokens,
    ))
}

/// Reads a whole answer in pieces of any size.
fn whole(api: Api, answer: &str, expected: Option<Numbers>) {
    for length in [1, 2, 3, 7, 64, answer.len().max(1)] {
        let mut reader = UsageReader::new(api);
        for piece in answer.as_bytes().chunks(length) {
            reader.on_whole(&Bytes::copy_from_slice(piece));
        }
        let found = numbers(reader.usage());
        assert_eq!(found, expected, "{answer} in pieces of {length}");
    }
    assert_eq!(numbers(of_whole(api, answer.as_bytes())), expected);
}

/// Reads a stream's events in one piece and one by one.
fn events(api: Api, events: &[&str], expected: Option<Numbers>) {
    let mut in_one = UsageReader::new(api);
    let mut one_by_one = UsageReader::new(api);
    in_one.on_events(events.concat().as_bytes());
    for event in events {
        one_by_one.on_events(event.as_bytes());
    }
    assert_eq!(numbers(in_one.usage()), expected, "{events:?}");
    assert_eq!(numbers(one_by_one.usage()), expected, "{events:?}");
}

const CHAT: &str = r#""usage":{"prompt_tokens":33,"total_tokens":37,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":32}}"#;

#[test]
fn usage_is_read_with_the_field_names_of_any_api() {
    for answer in [
        format!("{{{CHAT}}}"),
        r#"{"usage" : {"input_tokens":33, "input_tokens_details":{"cached_tokens":32,"cache_write_tokens":0},"output_tokens":4}}"#.to_owned(),
        // The same number under two names.
        r#"{"usage":{"prompt_tokens":33,"input_tokens":0,"output_tokens":4,"cached_tokens":32,"total_tokens":null}}"#.to_owned(),
    ] {
        whole(Api::Chat, &answer, Some((33, 32, 4)));
    }
    let rerank = r#"{"usage":{"total_tokens":56},"results":[]}"#;
    whole(Api::Rerank, rerank, Some((56, 0, 0)));
    let none =
        r#"{"usage":{"prompt_tokens":33,"completion_tokens":4,"prompt_tokens_details":null}}"#;
    whole(Api::Chat, none, Some((33, 0, 4)));
    for bad in [
        "",
        "no JSON",
        "\"usage\":{\"prompt_tokens\":1}",
        r#"{"usage":null}"#,
        r#"{"usage":"usage"}"#,
        r#"{"usage":{"prompt_tokens":-1}}"#,
        r#"{"usage":{"type":"duration","seconds":3}}"#,
    ] {
        whole(Api::Chat, bad, None);
    }
}

#[test]
fn usage_counts_wherever_it_stands_in_a_whole_answer() {
    let long = "x".repeat(20_000);
    let logprobs: Vec<Value> = (0..2_000)
        .map(|id| json!({(id.to_string()): {"rank": id}}))
        .collect();
    let behind = [
        json!({"prompt_logprobs": logprobs}),
        json!({"prompt_token_ids": (0..30_000).collect::<Vec<_>>()}),
        json!({"prompt_text": long, "kv_transfer_params": null}),
        json!({"results": [{"index": 0, "document": {"text": long}}]}),
    ];
    for behind in behind {
        let behind = behind.to_string();
        let answer = format!(
            r#"{{"id":"a","choices":[{{"x":"{long}"}}],{CHAT},{}"#,
            &behind[1..]
        );
        whole(Api::Chat, &answer, Some((33, 32, 4)));
    }
    let pretty = format!("\u{feff}\r\n {{\n  \"id\": \"a\",\n  {CHAT}\n}}\n");
    whole(Api::Chat, &pretty, Some((33, 32, 4)));
}

#[test]
fn a_field_of_that_name_deeper_in_an_answer_is_no_usage() {
    let own =
        r#""usage":{"prompt_tokens":0,"completion_tokens":0,"input_tokens":0,"output_tokens":0}"#;
    for other in [
        format!(r#""tools":[{{"parameters":{{{own}}}}}]"#),
        format!(r#""tools":{{{own}}}"#),
        format!(r#""text":{:?}"#, format!("{{{own}}}")),
        format!(r#""text":{:?}"#, format!("\\\"{{{own}}}\\")),
        format!(r#""response":{{"x":{{{own}}}}}"#),
        r#""a":"usage","b":["usage",{"input_tokens":7}],"c":{"usage":[{"input_tokens":7}]}"#.to_owned(),
        r#""\"usage":{"prompt_tokens":7},"my_usage":{"prompt_tokens":7},"usages":{"prompt_tokens":7}"#.to_owned(),
        r#""meta_info":{"prompt_tokens":7}"#.to_owned(),
    ] {
        whole(Api::Chat, &format!("{{{CHAT},{other}}}"), Some((33, 32, 4)));
        whole(Api::Responses, &format!("{{{other},{CHAT}}}"), Some((33, 32, 4)));
        whole(Api::Chat, &format!("{{{other}}}"), None);
        let event = format!("data: {{\"type\":\"response.completed\",\"response\":{{{other},{CHAT},{other}}}}}\n\n");
        events(Api::Responses, &[&event], Some((33, 32, 4)));
    }
    // An answer that is no object.
    whole(Api::Other, &format!("say {{{own}}}"), None);
}

#[test]
fn the_usage_of_a_list_of_answers_is_their_sum() {
    let one = r#"{"text":"a","meta_info":{"id":"x","prompt_tokens":10,"completion_tokens":3,"cached_tokens":8}}"#;
    whole(Api::Other, one, Some((10, 8, 3)));
    whole(Api::Other, &format!("[{one},{one}]"), Some((20, 16, 6)));
    // Each event has all so far.
    let event = format!("data: {one}\n\n");
    events(
        Api::Other,
        &[&event, &event, "data: [DONE]\n\n"],
        Some((10, 8, 3)),
    );
}

#[test]
fn the_last_usage_of_a_stream_counts() {
    let token = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":{\\\"prompt_tokens\\\":7}\"}}],\"usage\":null}\n\n";
    let first =
        "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":33,\"completion_tokens\":1}}\n\n";
    let last = format!("data:{{\"choices\":[],{CHAT}}}\n\n");
    events(Api::Chat, &[token, first, token], Some((33, 0, 1)));
    events(
        Api::Chat,
        &[token, first, &last, token, "data: [DONE]\n\n"],
        Some((33, 32, 4)),
    );
    events(
        Api::Chat,
        &[": usage\n\n", token, "event: \"usage\":{}\n\n"],
        None,
    );
    let lines = last.replace('\n', "\r\n");
    events(Api::Chat, &[&lines], Some((33, 32, 4)));
}

#[test]
fn what_stands_behind_the_last_usage_is_not_in_it() {
    let usage = "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1}}\n\n";
    let token = "data: {\"choices\":[{}]}\n\n";
    let check = |events: &str, rest: Option<&str>| {
        let behind = UsageReader::new(Api::Chat).on_events(events.as_bytes());
        assert_eq!(behind.map(|at| &events[at..]), rest);
    };
    check(token, None);
    check(usage, Some("}\n\n"));
    check(
        &[token, usage, usage, token].concat(),
        Some(&*["}\n\n", token].concat()),
    );
}

#[test]
fn usage_of_messages_counts_cached_tokens_besides_the_input_tokens() {
    let answer = r#"{"content":[],"usage":{"input_tokens":10,"output_tokens":4,"cache_creation_input_tokens":3,"cache_read_input_tokens":20}}"#;
    whole(Api::Messages, answer, Some((33, 20, 4)));
    let start = "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":33,\"output_tokens\":0}}}\n\n";
    let end = "event: message_delta\ndata: {\"usage\":{\"output_tokens\":4}}\n\n";
    let full = "data: {\"usage\":{\"input_tokens\":1,\"cache_read_input_tokens\":32,\"output_tokens\":4}}\n\n";
    events(Api::Messages, &[start, end], Some((33, 0, 4)));
    events(Api::Messages, &[start, full], Some((33, 32, 4)));
    // A stream that broke off after its start.
    events(Api::Messages, &[start], Some((33, 0, 0)));
    events(Api::Messages, &[end], None);
    whole(Api::Messages, r#"{"usage":null}"#, None);
}

#[test]
fn an_event_that_passes_in_pieces_is_read_whole() {
    let text = "x".repeat(2_000);
    let event = format!(
        "event: response.completed\ndata: {{\"response\":{{\"output\":\"{text}\",{CHAT}}},\"n\":1}}\n\n"
    );
    for length in [1, 5, 100, 1_999] {
        let mut reader = UsageReader::new(Api::Responses);
        for piece in event.as_bytes().chunks(length) {
            reader.on_events(piece);
        }
        assert_eq!(numbers(reader.usage()), Some((33, 32, 4)), "{length}");
    }
}

#[test]
fn reasoning_is_counted_where_the_engine_counts_it() {
    let check = |usage: &str, expected| {
        let found = of_whole(Api::Chat, format!("{{\"usage\":{usage}}}").as_bytes());
        assert_eq!(found.unwrap().reasoning_tokens, expected, "{usage}");
    };
    check(
        r#"{"prompt_tokens":1,"completion_tokens":9,"completion_tokens_details":{"reasoning_tokens":5}}"#,
        Some(5),
    );
    check(
        r#"{"input_tokens":1,"output_tokens_details":{"reasoning_tokens":0}}"#,
        Some(0),
    );
    check(
        r#"{"prompt_tokens":9,"completion_tokens_details":null}"#,
        None,
    );
}

#[test]
fn usage_that_is_too_long_is_none() {
    let mut long = String::from("{\"usage\":{\"prompt_tokens\":1");
    for member in 0..1_000 {
        let _ = write!(long, ",\"m{member}\":{member}");
    }
    long += "}}";
    let mut reader = UsageReader::new(Api::Chat);
    for piece in long.as_bytes().chunks(100) {
        reader.on_whole(&Bytes::copy_from_slice(piece));
    }
    assert_eq!(reader.usage(), None);
}

#[test]
fn usage_with_a_number_that_no_answer_has_is_none() {
    for odd in [
        r#"{"prompt_tokens":33,"completion_tokens":18446744073709551615}"#,
        r#"{"prompt_tokens":4294967297,"completion_tokens":4}"#,
        r#"{"prompt_tokens":33,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":18446744073709551584}}"#,
    ] {
        let answer = format!("{{\"usage\":{odd}}}");
        whole(Api::Chat, &answer, None);
        let event = format!("data: {answer}\n\n");
        events(Api::Chat, &[&event], None);
        // What was reported before it stays.
        let before = format!("data: {{{CHAT}}}\n\n");
        events(Api::Chat, &[&before, &event], Some((33, 32, 4)));
    }
    let most = r#"{"usage":{"prompt_tokens":4294967296,"completion_tokens":4}}"#;
    whole(Api::Chat, most, Some((1 << 32, 0, 4)));
}

fn any_json() -> impl Strategy<Value = Value> {
    let name = prop_oneof!["usage", "response", "message", "[a\"\\\\{}:]{0,6}"];
    let leaf = prop_oneof![
        Just(Value::Null),
        (0_u64..99).prop_map(Value::from),
        "[a\"\\\\{}:,\n]{0,12}".prop_map(Value::from),
        (0_u64..99).prop_map(|count| json!({"prompt_tokens": count})),
    ];
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name.clone(), inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_the_answer_its_own_usage_is_found(value in any_json(), cuts in prop::collection::vec(1_usize..9, 1..60)) {
        // An event's answer is looked into too, after its own usage in the order of names.
        let prompt = |value: &Value| value.get("usage").and_then(|usage| usage.get("prompt_tokens")?.as_u64());
        let own = value.as_object().and_then(|_| {
            let held = ["response", "message"].map(|name| value.get(name).filter(|held| held.is_object()).and_then(prompt));
            prompt(&value).or(held[0]).or(held[1])
        });
        let text = value.to_string();
        let mut reader = UsageReader::new(Api::Chat);
        let (mut rest, mut cuts) = (text.as_bytes(), cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            reader.on_whole(&Bytes::copy_from_slice(piece));
            rest = after;
        }
        if value.is_object() {
            let at_once = of_whole(Api::Chat, text.as_bytes());
            prop_assert_eq!(at_once.map(|usage| usage.prompt_tokens), own, "{}", text);
            prop_assert_eq!(reader.usage().map(|usage| usage.prompt_tokens), own, "{}", text);
        }
    }
}
