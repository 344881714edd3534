//! What the Responses API refuses before it promises or computes anything, and what it fills in.

use serde_json::{Value, json};

use crate::client::{self, Answer};
use crate::cluster::Cluster;
use crate::stub::Stub;

const PATH: &str = "/v1/responses";

async fn one() -> Cluster {
    Cluster::fast(1).await
}

fn with(more: Value) -> Value {
    let mut body = json!({"model": "sim", "input": "x", "max_output_tokens": 4});
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body
}

fn refused(answer: &Answer, status: u16, code: &str, param: &str) {
    let text = answer.text();
    assert_eq!(answer.status, status, "{text}");
    let found = (answer.code(), answer.param());
    assert_eq!(
        (found.0.as_str(), found.1.as_str()),
        (code, param),
        "{text}"
    );
}

#[tokio::test]
async fn a_background_response_is_checked_before_it_is_promised() {
    let cluster = one().await;
    for (more, status, code, param) in [
        (json!({"model": "nope"}), 404, "model_not_found", "model"),
        (
            json!({"temperature": -1}),
            400,
            "invalid_value",
            "temperature",
        ),
        (
            json!({"temperature": "hot"}),
            400,
            "invalid_type",
            "temperature",
        ),
        (json!({"top_p": 2}), 400, "invalid_value", "top_p"),
        (
            json!({"max_output_tokens": 0}),
            400,
            "invalid_value",
            "max_output_tokens",
        ),
        (
            json!({"top_logprobs": 21}),
            400,
            "invalid_value",
            "top_logprobs",
        ),
        (
            json!({"tools": [{}]}),
            400,
            "missing_required_parameter",
            "tools[0].type",
        ),
        (
            json!({"tool_choice": "some"}),
            400,
            "invalid_value",
            "tool_choice",
        ),
        (
            json!({"text": {"format": {"type": "x"}}}),
            400,
            "invalid_value",
            "text.format.type",
        ),
        (
            json!({"reasoning": {"effort": "x"}}),
            400,
            "invalid_value",
            "reasoning.effort",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
            400,
            "missing_required_parameter",
            "input[0].content[0].text",
        ),
    ] {
        let body = with(with_background(more));
        let answer = cluster.post(PATH, body.to_string()).await;
        refused(&answer, status, code, param);
    }
    assert_eq!(cluster.engines[0].generated().await, 0);
    let fine = with(with_background(json!({"temperature": 0.5})));
    let answer = cluster.post(PATH, fine.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["status"], "queued");
}

fn with_background(mut more: Value) -> Value {
    more["background"] = json!(true);
    more
}

#[tokio::test]
async fn usage_has_the_tokens_that_were_written_to_a_cache() {
    let cluster = one().await;
    let response = cluster.post(PATH, with(json!({})).to_string()).await.json();
    let details = &response["usage"]["input_tokens_details"];
    assert_eq!(details["cache_write_tokens"], 0);
    assert!(details["cached_tokens"].is_u64());
}

#[tokio::test]
async fn reasoning_is_encrypted_for_a_retrieve_that_includes_it() {
    let cluster = one().await;
    let body = with(json!({"reasoning": {"effort": "low"}, "max_output_tokens": 64}));
    let created = cluster.post(PATH, body.to_string()).await.json();
    let path = format!("{PATH}/{}", created["id"].as_str().unwrap());
    let plain = cluster.get(&path).await.json();
    assert_eq!(plain["output"][0]["type"], "reasoning");
    assert!(plain["output"][0].get("encrypted_content").is_none());
    let including = format!("{path}?include[]=reasoning.encrypted_content");
    let including = cluster.get(&including).await.json();
    let token = including["output"][0]["encrypted_content"]
        .as_str()
        .unwrap();
    // What the client carries can be sent as input again.
    let carried = json!([
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": token},
        {"role": "user", "content": "y"},
    ]);
    let next = with(json!({"input": carried, "store": false}));
    let answer = cluster.post(PATH, next.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let sent = cluster.engines[0].last_post().await;
    let sent: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(
        sent["input"][1]["content"][0]["text"],
        created["output"][0]["content"][0]["text"]
    );
    let wrong = cluster.get(&format!("{path}?include[]=everything")).await;
    refused(&wrong, 400, "invalid_value", "include[0]");
}

#[tokio::test]
async fn a_screenshot_reaches_the_engine_as_an_image() {
    let cluster = one().await;
    let image = "data:image/png;base64,AA==";
    let input = json!([
        {"role": "user", "content": "click"},
        {"type": "computer_call", "call_id": "c1", "action": {"type": "click", "x": 1}},
        {"type": "computer_call_output", "call_id": "c1",
         "output": {"type": "computer_screenshot", "image_url": image}},
        {"type": "program", "call_id": "c2", "code": "1+1"},
        {"type": "program_output", "call_id": "c2", "result": "2"},
    ]);
    let body = with(json!({"input": input}));
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let sent = cluster.engines[0].last_post().await;
    let sent: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(
        sent["input"].as_array().unwrap()[1..],
        [
            json!({"type": "function_call", "call_id": "c1", "name": "computer_call",
                "arguments": r#"{"type":"click","x":1}"#}),
            json!({"type": "function_call_output", "call_id": "c1",
                "output": [{"type": "input_image", "image_url": image, "detail": "auto"}]}),
            json!({"type": "function_call", "call_id": "c2", "name": "program",
                "arguments": r#"{"code":"1+1"}"#}),
            json!({"type": "function_call_output", "call_id": "c2", "output": "2"}),
        ]
    );
}

#[tokio::test]
async fn compact_is_an_endpoint_and_no_id() {
    let cluster = one().await;
    let path = format!("{PATH}/compact");
    refused(&cluster.get(&path).await, 405, "method_not_allowed", "");
    let answer = cluster.post(&path, r#"{"input":"x"}"#).await;
    refused(&answer, 400, "missing_required_parameter", "model");
    let answer = cluster.post(&path, r#"{"model":"sim"}"#).await;
    refused(&answer, 400, "missing_required_parameter", "input");
}

#[tokio::test]
async fn an_engine_that_forbids_counting_is_no_error_of_the_client() {
    for status in ["403 Forbidden", "404 Not Found", "405 Method Not Allowed"] {
        let answer = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{{\"error\":{{\"message\":\"off\",\"code\":403}}}}"
        );
        let stub = Stub::start(answer).await;
        let router = stub.router(|_| {}).await;
        let path = format!("{PATH}/input_tokens");
        let answer = client::post(router.api, &path, with(json!({})).to_string()).await;
        refused(&answer, 501, "cannot_count_tokens", "");
        assert!(
            answer.text().contains("models[].tokenizer"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn an_answer_that_was_lost_is_not_computed_again_by_the_client() {
    // The engine takes the request and closes the connection without an answer.
    let stub = Stub::start("").await;
    let router = stub.router(|_| {}).await;
    for path in [PATH, "/v1/chat/completions"] {
        let body =
            json!({"model": "sim", "input": path, "messages": [{"role": "user", "content": path}]});
        let answer = client::post(router.api, path, body.to_string()).await;
        assert_eq!(answer.status, 502, "{}", answer.text());
        assert_eq!(
            answer.header("x-should-retry"),
            "false",
            "{}",
            answer.text()
        );
    }
}
