//! The client's stream against the plainest model: an engine that always gives the same answer, and dies.

mod engine;
mod replicas;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use self::engine::Engine;
use super::{End, Reader, Refusal, Request, Settings};
use crate::http::sse::{self, Aligner};
use crate::prompt::Api;

fn settings(max_per_request: u32) -> Settings {
    Settings {
        max_per_request,
        max_tokens: 10_000,
    }
}

fn body(api: Api, max_tokens: usize) -> Value {
    let mut body = json!({"model": "m", "stream": true, "max_tokens": max_tokens});
    match api {
        Api::Completions => body["prompt"] = "tell me".into(),
        _ => body["messages"] = json!([{"role": "user", "content": "tell me"}]),
    }
    body
}

/// What the client gets in place of the unbroken stream, if each engine dies after so many bytes of its stream.
struct Run {
    text: String,
    refusal: Option<Refusal>,
    reader: Reader,
}

/// Plays a request. Each death is a share of the engine's stream, in 1000; the last engine lives.
fn play(api: Api, body: &Value, engine: Engine, deaths: &[usize], piece: usize) -> Run {
    let request = Request::read(api, &body.to_string().into()).unwrap();
    let mut sent = request.body.clone();
    let mut reader = Reader::new(settings(100), request, 3);
    let mut text = Vec::new();
    let mut deaths = deaths.iter();
    loop {
        let stream = engine.stream(api, &sent);
        let death = deaths.next().map(|death| death * stream.len() / 1000);
        let stream = &stream.as_bytes()[..death.unwrap_or(stream.len())];
        let mut aligner = Aligner::new(1 << 20);
        for piece in stream.chunks(piece.max(1)) {
            let (passed, end) = reader.on_events(aligner.push(Bytes::copy_from_slice(piece)));
            assert!(end.is_none(), "{end:?}");
            text.extend_from_slice(&passed);
        }
        let text_now = || String::from_utf8(text.clone()).unwrap();
        if text.ends_with(b"data: [DONE]\n\n") {
            let text = text_now();
            return Run {
                text,
                refusal: None,
                reader,
            };
        }
        match reader.next_body() {
            Ok(body) => sent = body,
            Err(refusal) => {
                let text = text_now();
                return Run {
                    text,
                    refusal: Some(refusal),
                    reader,
                };
            }
        }
    }
}

/// What a client makes of a stream.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    id: String,
    roles: usize,
    reasoning: String,
    text: String,
    finish: Vec<String>,
    usage: Vec<Value>,
    ends: usize,
}

fn read(stream: &str) -> Answer {
    let mut events = Vec::new();
    sse::Decoder::default().push(stream.as_bytes(), &mut events);
    let mut answer = Answer::default();
    for event in events {
        if event.data == "[DONE]" {
            answer.ends += 1;
            continue;
        }
        let chunk: Value = serde_json::from_str(&event.data).unwrap();
        assert!(chunk.get("prompt_token_ids").is_none_or(Value::is_null));
        let id = format!("{}{}{}", chunk["id"], chunk["created"], chunk["model"]);
        assert!(answer.id.is_empty() || answer.id == id, "{id}");
        answer.id = id;
        if chunk["usage"].is_object() {
            answer.usage.push(chunk["usage"].clone());
        }
        let Some(choice) = chunk["choices"].get(0) else {
            continue;
        };
        assert!(choice.get("token_ids").is_none_or(Value::is_null));
        assert!(choice.get("prompt_token_ids").is_none_or(Value::is_null));
        let delta = &choice["delta"];
        answer.roles += usize::from(delta["role"].is_string());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        answer.reasoning += &text(&delta["reasoning"]);
        answer.text += &(text(&delta["content"]) + &text(&choice["text"]));
        if let Some(finish) = choice["finish_reason"].as_str() {
            answer.finish.push(finish.to_owned());
        }
    }
    answer
}

#[test]
fn a_stream_that_does_not_break_has_the_bytes_of_one_without_ids() {
    for api in [Api::Chat, Api::Completions] {
        let mut body = body(api, 40);
        body["stream_options"] = json!({"include_usage": true});
        let engine = Engine::default();
        let plain = engine.stream(api, body.to_string().as_bytes());
        let run = play(api, &body, engine, &[], 50);
        assert_eq!(run.text, plain);
        assert_eq!(run.reader.times, 0);
    }
}

#[test]
fn a_stream_goes_on_after_a_death_at_every_place() {
    for api in [Api::Chat, Api::Completions] {
        let mut body = body(api, 30);
        body["stream_options"] = json!({"include_usage": true});
        let engine = Engine::default();
        let whole = read(&play(api, &body, engine, &[], 1_000).text);
        assert_eq!((whole.ends, whole.finish.len()), (1, 1));
        for death in 0..1_000 {
            let run = play(api, &body, engine, &[death], 100);
            match run.refusal {
                None => {
                    let mut found = read(&run.text);
                    let marked = run
                        .text
                        .contains("\n\n: x-warmroute-continued: 1\n\ndata: [DONE]");
                    assert!(marked, "{}", run.text);
                    // The first worker's id stays, and its cached tokens are those that the router expected.
                    found.id.clone_from(&whole.id);
                    for usage in &mut found.usage {
                        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
                        usage["prompt_tokens_details"]["cached_tokens"] = json!(0);
                    }
                    assert_eq!(found, whole, "{death}: {}", run.text);
                }
                Some(refusal) => {
                    assert_eq!(refusal, Refusal::Finished, "{death}");
                    assert_eq!(read(&run.text).text, whole.text);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn many_deaths_change_nothing_that_the_client_reads(
        is_chat in any::<bool>(),
        max_tokens in 1usize..60,
        deaths in proptest::collection::vec(0usize..1_000, 0..6),
        piece in 1usize..400,
        usage in 0usize..3,
        reasons in any::<bool>(),
    ) {
        let api = if is_chat { Api::Chat } else { Api::Completions };
        let mut body = body(api, max_tokens);
        body["min_tokens"] = json!(1);
        body["stream_options"] = [
            Value::Null,
            json!({"include_usage": true}),
            json!({"include_usage": true, "continuous_usage_stats": true}),
        ][usage].clone();
        let engine = Engine { reasons };
        let whole = read(&play(api, &body, engine, &[], 1_000).text);
        let run = play(api, &body, engine, &deaths, piece);
        let found = read(&run.text);
        prop_assert_eq!(&found.reasoning, &whole.reasoning);
        prop_assert_eq!(&found.text, &whole.text);
        prop_assert_eq!(&found.finish, &whole.finish);
        if run.refusal.is_none() {
            prop_assert_eq!((found.roles, found.ends), (whole.roles, 1));
            let counts = |usage: &Value| {
                ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| usage[name].as_u64())
            };
            prop_assert_eq!(found.usage.last().map(counts), whole.usage.last().map(counts));
            // Running counts fall by no more than the tokens of a character whose end was not sent.
            let running = found.usage.iter().map(|usage| usage["completion_tokens"].as_u64().unwrap());
            let running: Vec<u64> = running.collect();
            let falls = running.windows(2).map(|two| two[0].saturating_sub(two[1]));
            prop_assert!(falls.max().unwrap_or(0) <= 3, "{running:?}");
        }
    }

    #[test]
    fn no_bytes_make_it_panic(pieces in proptest::collection::vec(
        "(data: |\\{\"choices\":\\[|\\{\"token_ids\":\\[1,|2\\]|\"usage\":|\\{\"error\":1\\}|\n|\n\n|\r\n|é|\\}|\\]){0,8}", 0..8)) {
        let request = Request::read(Api::Chat, &Bytes::from(r#"{"stream":true}"#)).unwrap();
        let mut reader = Reader::new(settings(1), request, 0);
        for piece in pieces {
            let _ = reader.on_events(Bytes::from(piece));
        }
        let _ = reader.next_body();
    }
}

fn refusal(api: Api, member: &str) -> Option<Refusal> {
    let prompt = match api {
        Api::Completions => r#""prompt":"x","#,
        _ => "",
    };
    let body = format!("{{{prompt}{member}}}");
    Request::read(api, &body.into()).err()
}

#[test]
fn what_would_not_be_exact_is_refused() {
    for (member, expected) in [
        (r#""temperature":0.5,"tools":[],"logprobs":true"#, None),
        (
            r#""seed":null,"stop":[],"n":1,"presence_penalty":0.0"#,
            None,
        ),
        (
            r#""tool_choice":"auto","response_format":{"type":"text"}"#,
            None,
        ),
        (
            r#""messages":[{"content":[{"type":"text","text":"image_url"}]}]"#,
            None,
        ),
        (r#""kv_transfer_params":null"#, None),
        (r#""seed":7"#, Some(Refusal::Seed)),
        (r#""stop":["x"]"#, Some(Refusal::StopStrings)),
        (r#""n":2"#, Some(Refusal::Several)),
        (r#""frequency_penalty":0.1"#, Some(Refusal::Penalty)),
        (r#""tool_choice":"required""#, Some(Refusal::ToolChoice)),
        (
            r#""tool_choice":{"type":"function"}"#,
            Some(Refusal::ToolChoice),
        ),
        (
            r#""response_format":{"type":"json_object"}"#,
            Some(Refusal::Grammar),
        ),
        (
            r#""structured_outputs":{"regex":"a"}"#,
            Some(Refusal::Grammar),
        ),
        (r#""guided_json":{}"#, Some(Refusal::Grammar)),
        (r#""echo":true"#, Some(Refusal::PromptOutput)),
        (r#""prompt_logprobs":1"#, Some(Refusal::PromptOutput)),
        (r#""truncate_prompt_tokens":10"#, Some(Refusal::Truncated)),
        (r#""return_token_ids":false"#, Some(Refusal::TokenIds)),
        (r#""include_reasoning":false"#, Some(Refusal::HiddenTokens)),
        (r#""max_tokens":"7""#, Some(Refusal::Body)),
        (
            r#""kv_transfer_params":{"do_remote_decode":true}"#,
            Some(Refusal::Body),
        ),
        (
            r#""messages":[{"content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#,
            Some(Refusal::Media),
        ),
    ] {
        assert_eq!(refusal(Api::Chat, member), expected, "{member}");
    }
    assert_eq!(
        refusal(Api::Completions, r#""logprobs":1"#),
        Some(Refusal::Logprobs)
    );
    assert_eq!(
        refusal(Api::Completions, r#""prompt":["a","b"]"#),
        Some(Refusal::Several)
    );
    assert_eq!(refusal(Api::Completions, r#""prompt":[1,2]"#), None);
    assert_eq!(
        refusal(Api::Responses, r#""input":"x""#),
        Some(Refusal::Api)
    );
}

#[test]
fn the_next_body_has_the_tokens_and_what_is_left_of_the_limits() {
    let check = |api, body: &str, expected: &str| {
        let request = Request::read(api, &Bytes::copy_from_slice(body.as_bytes())).unwrap();
        let next = request.after(&[7, 8], &[9]).unwrap();
        assert_eq!(str::from_utf8(&next).unwrap(), expected);
    };
    check(
        Api::Chat,
        r#"{"max_tokens":5, "min_tokens":1,"messages":[], "max_completion_tokens": 4 }"#,
        r#"{"max_tokens":4, "min_tokens":0,"messages":[], "max_completion_tokens": 3,"return_token_ids":true,"kv_transfer_params":{"prompt_token_ids":[7,8,9]} }"#,
    );
    check(
        Api::Chat,
        r#"{"kv_transfer_params":null,"n":1,"kv_transfer_params":{"prompt_token_ids":[7,8]}}"#,
        r#"{"kv_transfer_params":null,"n":1,"kv_transfer_params":{"prompt_token_ids":[7,8,9]},"return_token_ids":true}"#,
    );
    check(
        Api::Completions,
        r#"{"prompt":"hello","max_tokens":2}"#,
        r#"{"prompt":[7,8,9],"max_tokens":1,"return_token_ids":true}"#,
    );
}

fn chunk(delta: Value, ids: Value) -> Bytes {
    chunk_after(&json!([1]), delta, ids)
}

/// A chunk of an engine whose prompt has these ids.
fn chunk_after(prompt: &Value, delta: Value, ids: Value) -> Bytes {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": null, "token_ids": ids});
    let chunk = json!({"id": "a", "created": 1, "model": "m", "choices": [choice], "prompt_token_ids": prompt});
    Bytes::from(format!("data: {chunk}\n\n"))
}

fn reader() -> Reader {
    let request = Request::read(Api::Chat, &Bytes::from(r#"{"stream":true}"#)).unwrap();
    Reader::new(settings(1), request, 0)
}

#[test]
fn a_stream_is_refused_for_what_was_seen_of_it() {
    let after = |chunks: &[Bytes]| {
        let mut reader = reader();
        for chunk in chunks {
            let _ = reader.on_events(chunk.clone());
        }
        reader.next_body().err()
    };
    let text = chunk(json!({"content": "a"}), json!([2]));
    assert_eq!(after(std::slice::from_ref(&text)), None);
    assert_eq!(
        after(&[chunk(json!({"content": "a"}), Value::Null)]),
        Some(Refusal::NoTokenIds)
    );
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f"}}]});
    assert_eq!(
        after(&[text, chunk(call, json!([2]))]),
        Some(Refusal::ToolCall)
    );
    let long: Vec<u32> = (0..20_000).collect();
    assert_eq!(
        after(&[chunk(json!({"content": "a"}), json!(long))]),
        Some(Refusal::TooLong)
    );
}

#[test]
fn a_stream_goes_on_as_often_as_the_setting_says() {
    let mut reader = reader();
    reader.next_body().unwrap();
    assert_eq!(reader.next_body(), Err(Refusal::Limit));
}

#[test]
fn an_engine_error_is_held_back_and_a_client_error_is_not() {
    let error = |code: u32| {
        let error = json!({"error": {"message": "x", "code": code}});
        Bytes::from(format!("data: {error}\n\ndata: [DONE]\n\n"))
    };
    let text = chunk(json!({"content": "a"}), json!([2]));
    let both = Bytes::from([&text[..], &error(500)].concat());
    let (passed, end) = reader().on_events(both);
    assert!(passed.ends_with(b"\"prompt_token_ids\":null}\n\n"));
    let Some(End::EngineError(held)) = end else {
        panic!("{end:?}")
    };
    assert_eq!(held, error(500));
    let named = json!({"error": {"message": "x", "type": "BadRequestError", "code": null}});
    let named = Bytes::from(format!("data: {named}\n\ndata: [DONE]\n\n"));
    for refusal in [error(400), named] {
        let (passed, end) = reader().on_events(refusal.clone());
        assert_eq!((passed, end.is_some()), (refusal.clone(), false));
        // Nor does another worker write more behind it.
        let mut reader = reader();
        let _ = reader.on_events(text.clone());
        let (passed, end) = reader.on_events(refusal.clone());
        assert_eq!((passed, end.is_some()), (refusal, false));
        assert_eq!(reader.next_body(), Err(Refusal::Finished));
    }
}

#[test]
fn a_text_that_does_not_join_ends_the_stream() {
    let torn = |ids: Value, next: &str| {
        let mut reader = reader();
        let given = [vec![json!(1)], ids.as_array().unwrap().clone()].concat();
        let _ = reader.on_events(chunk(json!({"content": "a"}), ids));
        reader.next_body().unwrap();
        let next = chunk_after(&json!(given), json!({"content": next}), json!([4]));
        let (_, end) = reader.on_events(next);
        matches!(end, Some(End::Torn))
    };
    let whole_prompt = "the whole prompt ".repeat(100);
    assert!(torn(json!([2, 3]), "\u{fffd}b"));
    assert!(torn(json!([2, 3]), &whole_prompt));
    assert!(!torn(json!([2, 3]), "b"));
    // The id of a text of its own is complete.
    assert!(!torn(json!([2]), "\u{fffd}b"));
}

#[test]
fn a_worker_that_does_not_go_on_from_the_tokens_it_was_given_ends_the_stream() {
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f"}}]});
    for (given, next, is_torn) in [
        (json!([1, 2]), json!({"content": "b"}), false),
        // It has read the messages, and begins again.
        (json!([1]), json!({"content": "a"}), true),
        (json!([1]), call.clone(), true),
        (json!([1, 3]), json!({"content": "b"}), true),
        (json!([1, 2, 2]), json!({"content": "b"}), true),
        // It does not say from what it goes on.
        (Value::Null, json!({"content": "a"}), true),
        (Value::Null, call, true),
    ] {
        let mut reader = reader();
        let _ = reader.on_events(chunk(json!({"content": "a"}), json!([2])));
        reader.next_body().unwrap();
        let (passed, end) = reader.on_events(chunk_after(&given, next, json!([4])));
        assert_eq!(matches!(end, Some(End::Torn)), is_torn, "{given}");
        assert_eq!(passed.is_empty(), is_torn, "{given}");
    }
}

#[test]
fn the_first_text_of_a_worker_that_goes_on_joins_whatever_came_before_it() {
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f"}}]});
    let too_long: Vec<u32> = (0..20_000).collect();
    for (delta, ids) in [
        (json!({}), json!([3])),
        (json!({}), json!(too_long)),
        (call, json!([3])),
    ] {
        let mut reader = reader();
        let _ = reader.on_events(chunk(json!({"content": "a"}), json!([2])));
        reader.next_body().unwrap();
        // An engine may say its prompt in each chunk.
        let given = json!([1, 2]);
        let (_, end) = reader.on_events(chunk_after(&given, delta, ids));
        assert!(end.is_none(), "{end:?}");
        let text = chunk_after(&given, json!({"content": "b"}), json!([4]));
        let (passed, end) = reader.on_events(text);
        assert!(end.is_none() && !passed.is_empty(), "{end:?}");
    }
}

#[test]
fn what_is_held_back_is_generated_anew() {
    let mut reader = reader();
    let _ = reader.on_events(chunk(json!({"content": "a"}), json!([2])));
    let (passed, _) = reader.on_events(chunk(json!({"content": ""}), json!([3])));
    assert!(!passed.is_empty());
    // Sent by the engine only because of the ids.
    let (passed, _) = reader.on_events(chunk(json!({}), json!([4])));
    assert_eq!(passed, "");
    let body = reader.next_body().unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        body["kv_transfer_params"]["prompt_token_ids"],
        json!([1, 2])
    );
    assert_eq!(reader.answer_tokens(), 1);
}
