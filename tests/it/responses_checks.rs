//! What the Responses API refuses before it promises or computes anything, and what it fills in.

use serde_json::{Value, json};
use warmroute::secret::Secret;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, fast};
use crate::responses;
use crate::stub::Stub;

const PATH: &str = "/v1/responses";

async fn one() -> Cluster {
    Cluster::fast(1).await
}

fn with(more: Value) -> Value {
    responses::with(responses::ask("x"), more)
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
        (
            json!({"input": [{"type": "additional_tools", "role": "developer", "tools": []}]}),
            400,
            "missing_required_parameter",
            "input",
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
    let sent = cluster.engines[0].last_body().await;
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
    let sent = cluster.engines[0].last_body().await;
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
    for status in [
        // Some engines say so of an endpoint that they do not have, to the router's own key, too.
        "401 Unauthorized",
        "403 Forbidden",
        "404 Not Found",
        "405 Method Not Allowed",
    ] {
        let answer = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{{\"error\":{{\"message\":\"off\",\"code\":403}}}}"
        );
        let stub = Stub::start(answer).await;
        let router = stub
            .router(|config| config.workers[0].api_key = Secret::new("engine-key"))
            .await;
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

#[tokio::test]
async fn items_of_clients_and_hosted_tools_reach_the_engine_as_functions() {
    let cluster = one().await;
    let shell = json!({"commands": ["ls"]});
    let patch = json!({"type": "delete_file", "path": "a"});
    let ended = json!([{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]);
    let found = json!([{"file_id": "f", "text": "t"}]);
    let input = json!([
        {"role": "user", "content": "go"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "call_id": "c1", "output": "a"},
        {"type": "shell_call", "call_id": "c2", "status": "completed", "action": shell},
        {"type": "shell_call_output", "call_id": "c2", "output": ended},
        {"type": "apply_patch_call", "call_id": "c3", "status": "completed", "operation": patch},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed", "output": "done"},
        {"type": "mcp_call", "id": "mcp_1", "name": "n", "server_label": "s", "arguments": "{}",
         "output": "done"},
        {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "k",
         "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["q"],
         "results": found},
        // Without a result: stored and listed, and not sent.
        {"type": "code_interpreter_call", "id": "ci_2", "status": "completed",
         "container_id": "k", "code": "2", "outputs": null},
        {"type": "file_search_call", "id": "fs_2", "status": "completed", "queries": ["q"]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "q"}},
        {"role": "user", "content": "so?"},
    ]);
    let kinds = |items: &Value| -> Vec<String> {
        let items = items.as_array().unwrap().iter();
        items
            .map(|item| item["type"].as_str().unwrap_or("message").to_owned())
            .collect()
    };
    let answer = cluster
        .post(PATH, with(json!({"input": input})).to_string())
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let sent = cluster.engines[0].last_body().await;
    let sent = sent["input"].as_array().unwrap();
    let call = |id: &str, name: &str, arguments: &Value| {
        json!({"type": "function_call", "call_id": id, "name": name,
            "arguments": arguments.to_string()})
    };
    let output = |id: &str, output: &str| json!({"type": "function_call_output", "call_id": id, "output": output});
    let expected = [
        (
            "c1",
            "local_shell_call",
            json!({"type": "exec", "command": ["ls"], "env": {}}),
            "a".to_owned(),
        ),
        ("c2", "shell_call", shell.clone(), ended.to_string()),
        ("c3", "apply_patch_call", patch.clone(), "done".to_owned()),
        ("mcp_1", "n", json!({}), "done".to_owned()),
        (
            "ci_1",
            "code_interpreter",
            json!({"code": "1+1"}),
            "2".to_owned(),
        ),
        (
            "fs_1",
            "file_search",
            json!({"queries": ["q"]}),
            found.to_string(),
        ),
    ];
    assert_eq!(sent.len(), 2 + 2 * expected.len());
    for (index, (id, name, arguments, text)) in expected.iter().enumerate() {
        assert_eq!(sent[1 + 2 * index], call(id, name, arguments));
        assert_eq!(sent[2 + 2 * index], output(id, text));
    }
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let path = format!("{PATH}/{id}/input_items?order=asc&limit=100");
    let listed = cluster.get(&path).await.json();
    assert_eq!(kinds(&listed["data"]), kinds(&input));
}

#[tokio::test]
async fn a_call_that_allowed_tools_do_not_list_fails_whichever_worker_made_it() {
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {}});
    let choice = |name: &str| {
        json!({"tools": [tool("f"), tool("g")], "max_output_tokens": 64, "tool_choice":
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}})
    };
    for no_responses in [false, true] {
        let engine = Settings {
            no_responses,
            ..fast()
        };
        let cluster = Cluster::start(vec![engine], |_| {}).await;
        let called = async |body: Value| {
            let answer = cluster.post(PATH, with(body).to_string()).await;
            (answer.status, answer.text().to_owned())
        };
        // A simulated engine calls the first one.
        let (allowed, other) = ("f", "g");
        let (status, text) = called(choice(allowed)).await;
        assert_eq!(status, 200, "{text}");
        let (status, text) = called(choice(other)).await;
        assert_eq!(status, 502, "{text}");
        assert!(
            text.contains("which `tool_choice` does not allow"),
            "{text}"
        );
        let mut streamed = choice(other);
        streamed["stream"] = true.into();
        // The call may be seen with the engine's first event, when nothing was sent to the client yet, or after it.
        let (status, text) = called(streamed).await;
        match status {
            502 => assert!(text.contains("invalid_engine_response"), "{text}"),
            200 => assert!(text.contains("event: response.failed"), "{text}"),
            _ => panic!("{status}: {text}"),
        }
        assert!(!text.contains("function_call_arguments"), "{text}");
        assert!(
            text.contains("which `tool_choice` does not allow"),
            "{text}"
        );
    }
}
