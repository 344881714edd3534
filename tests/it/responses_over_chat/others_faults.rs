//! What engines and other converters get wrong, over a worker that answers with bytes of the test's choosing.

use serde_json::{Value, json};
use warmroute::fleet::ResponsesApi;
use warmroute::secret::Secret;

use super::{PATH, ask, events, with};
use crate::client::{self, Answer};
use crate::cluster::{Router, eventually};
use crate::stub::Stub;

async fn router(stream: &str) -> (Stub, Router) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    answering(&format!("{head}{stream}")).await
}

async fn answering(answer: &str) -> (Stub, Router) {
    answering_as(ResponsesApi::Chat, answer).await
}

async fn answering_as(api: ResponsesApi, answer: &str) -> (Stub, Router) {
    let stub = Stub::start(answer).await;
    let router = stub.router(|config| config.workers[0].responses = Some(api));
    let router = router.await;
    (stub, router)
}

async fn post(router: &Router, body: &Value) -> Answer {
    client::post(router.api, PATH, body.to_string()).await
}

async fn streamed(stream: &str, more: Value) -> Vec<Value> {
    let (_stub, router) = router(stream).await;
    let body = with(with(ask("x"), more), json!({"stream": true}));
    let answer = post(&router, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    events(answer.text())
}

/// A background response of these engines' answers, when it has ended.
async fn in_background(router: &Router) -> Value {
    let created = post(router, &with(ask("x"), json!({"background": true}))).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let path = format!("{PATH}/{}", created.json()["id"].as_str().unwrap());
    let mut last = Value::Null;
    eventually("it has ended", async || {
        last = client::get(router.api, &path).await.json();
        last["status"] != "queued" && last["status"] != "in_progress"
    })
    .await;
    last
}

fn chunk(delta: Value) -> String {
    format!(
        "data: {}\n\n",
        json!({"choices": [{"index": 0, "delta": delta}]})
    )
}

fn finish(reason: &str) -> String {
    let last = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]});
    format!("data: {last}\n\n")
}

const DONE: &str = "data: [DONE]\n\n";

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|event| event["type"] == format!("response.{kind}"))
        .collect()
}

#[tokio::test]
async fn an_answer_that_its_engine_gives_up_is_asked_for_again() {
    let text = || chunk(json!({"content": "t"}));
    for stream in [
        vec![text(), finish("abort"), DONE.to_owned()],
        // An engine that is shut down, and leaves members out that are null.
        vec![text(), DONE.to_owned()],
        vec![text()],
    ] {
        let (stub, router) = router(&stream.concat()).await;
        let answer = post(&router, &ask("x")).await;
        assert!(answer.status >= 500, "{}", answer.text());
        assert_eq!(stub.posts(), 2, "{stream:?}");
        eventually("its worker counts as lost", async || {
            let page = client::get(router.admin, "/metrics").await;
            let lines = page.text().lines();
            let mut ends = lines.filter(|line| line.starts_with("warmroute_requests_total{"));
            ends.any(|line| line.contains("outcome=\"worker_failed\"") && line.ends_with(" 2"))
        })
        .await;
    }
}

#[tokio::test]
async fn ids_are_the_same_in_every_event_and_at_the_end() {
    let stream = [
        chunk(json!({"role": "assistant", "content": ""})),
        chunk(json!({"reasoning_content": "r"})),
        chunk(json!({"content": "t"})),
        chunk(
            json!({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": "{}"}}]}),
        ),
        finish("tool_calls"),
        DONE.to_owned(),
    ];
    let events = streamed(
        &stream.concat(),
        json!({"tools": [{"type": "function", "name": "f"}]}),
    )
    .await;
    let output = events.last().unwrap()["response"]["output"].clone();
    for (index, item) in output.as_array().unwrap().iter().enumerate() {
        for event in events.iter().filter(|event| event["output_index"] == index) {
            let id = event.get("item_id").unwrap_or(&event["item"]["id"]);
            assert_eq!(*id, item["id"], "{event}");
        }
    }
    let kinds: Vec<&Value> = output
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["type"])
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    // Reasoning is an item of its own with its text, no summary and no part of the message.
    assert_eq!(
        output[0]["content"],
        json!([{"type": "reasoning_text", "text": "r"}])
    );
    assert_eq!(output[0]["summary"], json!([]));
    assert!(of_kind(&events, "reasoning_summary_text.delta").is_empty());
    assert_eq!(output[2]["call_id"], "call_1");
}

#[tokio::test]
async fn deltas_are_as_long_as_the_engines() {
    let arguments = "{\"a\":\"0123456789012345678901234567890123456789\"}";
    let stream = [
        chunk(
            json!({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": arguments}}]}),
        ),
        finish("stop"),
        DONE.to_owned(),
    ];
    let events = streamed(
        &stream.concat(),
        json!({"tools": [{"type": "function", "name": "f"}]}),
    )
    .await;
    let deltas = of_kind(&events, "function_call_arguments.delta");
    assert_eq!(deltas.len(), 1);
    assert_eq!(deltas[0]["delta"], arguments);
    // A call with finish reason "stop", as after a named `tool_choice`, is complete.
    assert_eq!(events.last().unwrap()["type"], "response.completed");
}

#[tokio::test]
async fn a_cut_answer_is_incomplete_and_so_is_its_last_item() {
    let text = [
        chunk(json!({"content": "a"})),
        finish("length"),
        DONE.to_owned(),
    ]
    .concat();
    let events = streamed(&text, json!({})).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(
        last["response"]["incomplete_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    assert_eq!(
        of_kind(&events, "output_item.done")[0]["item"]["status"],
        "incomplete"
    );
    let call = |index: u64, id: &str, arguments: &str| {
        chunk(
            json!({"tool_calls": [{"index": index, "id": id, "function": {"name": "f", "arguments": arguments}}]}),
        )
    };
    let calls = [
        call(0, "1", "{}"),
        call(1, "2", "{\"a\":"),
        finish("length"),
        DONE.to_owned(),
    ]
    .concat();
    let events = streamed(
        &calls,
        json!({"tools": [{"type": "function", "name": "f"}]}),
    )
    .await;
    let output = &events.last().unwrap()["response"]["output"];
    assert_eq!(
        (&output[0]["status"], &output[1]["status"]),
        (&json!("completed"), &json!("incomplete"))
    );
    assert_eq!(output[1]["arguments"], "{\"a\":");
}

#[tokio::test]
async fn text_passes_at_once_although_tools_are_declared() {
    let stream = [
        chunk(json!({"content": "a"})),
        chunk(json!({"content": "b"})),
        finish("stop"),
        DONE.to_owned(),
    ];
    let events = streamed(
        &stream.concat(),
        json!({"tools": [{"type": "function", "name": "f"}]}),
    )
    .await;
    assert_eq!(of_kind(&events, "output_text.delta").len(), 2);
}

#[tokio::test]
async fn a_stream_without_done_has_its_end() {
    let without = [chunk(json!({"content": "a"})), finish("stop")].concat();
    let events = streamed(&without, json!({})).await;
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    let cut = chunk(json!({"content": "a"}));
    let events = streamed(&cut, json!({})).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "a");
}

#[tokio::test]
async fn an_error_before_anything_else_is_an_http_error() {
    let error = "data: {\"error\":{\"message\":\"no such adapter\",\"type\":\"BadRequestError\",\"code\":400}}\n\ndata: [DONE]\n\n";
    let (_stub, router) = router(error).await;
    for is_streamed in [false, true] {
        let answer = post(&router, &with(ask("x"), json!({"stream": is_streamed}))).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("no such adapter"));
    }
}

#[tokio::test]
async fn an_answer_that_is_no_stream_is_a_bad_gateway() {
    let (_stub, router) =
        answering("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<html>")
            .await;
    for is_streamed in [false, true] {
        let answer = post(&router, &with(ask("x"), json!({"stream": is_streamed}))).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (502, "invalid_engine_response")
        );
    }
}

#[tokio::test]
async fn flat_errors_are_read_and_named_as_the_client_knows_it() {
    let body = "{\"object\":\"error\",\"message\":\"The input (9 tokens) is longer than the model's context length (8 tokens).\",\"type\":\"BadRequestError\",\"param\":null,\"code\":400}";
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let (_stub, router) = answering(&answer).await;
    let answer = post(&router, &ask("x")).await;
    assert_eq!(
        (
            answer.status,
            answer.code().as_str(),
            answer.param().as_str()
        ),
        (400, "context_length_exceeded", "input")
    );
}

#[tokio::test]
async fn a_background_response_of_what_is_no_stream_fails_at_once() {
    let page = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<html>";
    let nothing = "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n";
    for (answer, api) in [
        (page, ResponsesApi::Chat),
        (nothing, ResponsesApi::Chat),
        (page, ResponsesApi::Native),
    ] {
        let (stub, router) = answering_as(api, answer).await;
        let last = in_background(&router).await;
        assert_eq!(last["status"], "failed");
        assert_eq!(last["error"]["code"], "server_error");
        let message = last["error"]["message"].as_str().unwrap();
        assert!(message.contains("something else than events"), "{message}");
        assert_eq!(stub.posts(), 1);
    }
}

#[tokio::test]
async fn a_background_response_whose_engine_is_lost_each_time_is_tried_a_few_times() {
    let role = chunk(json!({"role": "assistant", "content": ""}));
    for stream in [role + DONE, DONE.to_owned()] {
        let (stub, router) = router(&stream).await;
        let last = in_background(&router).await;
        assert_eq!(last["status"], "failed");
        assert_eq!(last["error"]["code"], "server_error");
        // Three attempts of the run, each asked for twice, of three attempts of a request.
        let posts = stub.posts();
        assert!((3..=18).contains(&posts), "{posts}");
    }
}

#[tokio::test]
async fn only_a_status_that_blames_the_prompt_is_an_invalid_prompt_in_the_background() {
    for (status, code) in [
        ("400 Bad Request", "invalid_prompt"),
        ("422 Unprocessable Entity", "invalid_prompt"),
        ("401 Unauthorized", "server_error"),
        ("403 Forbidden", "server_error"),
        ("408 Request Timeout", "server_error"),
        ("409 Conflict", "server_error"),
        ("425 Too Early", "server_error"),
        ("500 Internal Server Error", "server_error"),
    ] {
        let body = "{\"error\":{\"message\":\"no\",\"code\":1}}";
        let length = body.len();
        let (_stub, router) = answering(&format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        ))
        .await;
        let last = in_background(&router).await;
        assert_eq!(last["status"], "failed", "{status}");
        assert_eq!(last["error"]["code"], code, "{status}");
        assert_eq!(last["error"]["message"], "no", "{status}");
    }
}

#[tokio::test]
async fn a_refusal_within_a_stream_is_an_invalid_prompt_however_it_is_asked_for() {
    let refusal =
        "data: {\"error\":{\"message\":\"bad\",\"type\":\"BadRequestError\",\"code\":400}}\n\n";
    let stream = [
        chunk(json!({"content": "t"})),
        refusal.to_owned(),
        DONE.to_owned(),
    ]
    .concat();
    let events = streamed(&stream, json!({})).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "invalid_prompt");
    let (_stub, router) = router(&stream).await;
    let whole = post(&router, &ask("x")).await;
    assert_eq!(whole.status, 400, "{}", whole.text());
    let last = in_background(&router).await;
    assert_eq!(last["error"]["code"], "invalid_prompt", "{last}");
    assert_eq!(last["error"]["message"], "bad");
}

#[tokio::test]
async fn what_no_engine_can_do_is_not_asked_for_again_and_what_another_may_is() {
    for (status, is_permanent) in [
        ("500 Internal Server Error", false),
        ("501 Not Implemented", true),
        ("502 Bad Gateway", false),
        ("504 Gateway Timeout", false),
    ] {
        let (_stub, router) = answering(&format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        ))
        .await;
        let body =
            json!({"model": "sim", "input": "x", "messages": [{"role": "user", "content": "x"}]});
        for path in [PATH, "/v1/chat/completions"] {
            let answer = client::post(router.api, path, body.to_string()).await;
            assert!(status.starts_with(&answer.status.to_string()), "{status}");
            let expected = if is_permanent { "false" } else { "" };
            assert_eq!(answer.header("x-should-retry"), expected, "{path} {status}");
        }
    }
}

#[tokio::test]
async fn the_routers_own_key_that_an_engine_refuses_is_not_the_clients() {
    let refusal = "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let stub = Stub::start(refusal).await;
    for has_own_key in [true, false] {
        let router = stub.router(|config| {
            config.workers[0].responses = Some(ResponsesApi::Chat);
            if has_own_key {
                config.workers[0].api_key = Secret::new("engine-key");
            }
        });
        let router = router.await;
        let body =
            json!({"model": "sim", "input": "x", "messages": [{"role": "user", "content": "x"}]});
        for path in [PATH, "/v1/chat/completions"] {
            let answer = client::post(router.api, path, body.to_string()).await;
            if has_own_key {
                assert_eq!(
                    (answer.status, &*answer.code()),
                    (502, "engine_key_refused")
                );
                assert_eq!(answer.header("x-should-retry"), "false");
            } else {
                assert_eq!(answer.status, 401, "{path}");
            }
        }
    }
}
