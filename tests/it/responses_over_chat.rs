//! The Responses API over workers that speak chat completions only.

mod others_faults;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::ResponsesApi;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client;
use crate::cluster::{Cluster, chat_only, eventually, fast, unhurried};
use crate::responses::{ask, with};

const PATH: &str = "/v1/responses";
const CHAT_PATH: &str = "/v1/chat/completions";

async fn cluster(engines: Vec<Settings>) -> Cluster {
    Cluster::start(engines, |_| {}).await
}

/// The events of a stream, which must be numbered and end with `[DONE]`.
fn events(text: &str) -> Vec<Value> {
    let text = text.strip_suffix("data: [DONE]\n\n");
    let text = text.unwrap_or_else(|| panic!("no end: {text:?}"));
    let read = |(number, block): (usize, &str)| {
        let (_, data) = block.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["sequence_number"], number, "{text}");
        data
    };
    text.split_terminator("\n\n")
        .enumerate()
        .map(read)
        .collect()
}

async fn stream(cluster: &Cluster, body: &Value) -> Vec<Value> {
    let body = with(body.clone(), json!({"stream": true}));
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    events(answer.text())
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter();
    let parts = items.filter(|item| item["type"] == "message");
    let parts = parts.flat_map(|item| item["content"].as_array().unwrap());
    parts.map(|part| part["text"].as_str().unwrap()).collect()
}

/// A response without what differs from one to the next.
fn comparable(response: &Value) -> Value {
    let mut text = response.to_string();
    for id in ["id", "call_id"] {
        let marker = format!("\"{id}\":\"");
        let mut kept = String::new();
        for (index, piece) in text.split(&marker).enumerate() {
            match index {
                0 => kept += piece,
                _ => kept += &format!("{marker}\"{}", piece.split_once('"').unwrap().1),
            }
        }
        text = kept;
    }
    let mut response: Value = serde_json::from_str(&text).unwrap();
    for name in ["created_at", "completed_at"] {
        response[name] = Value::Null;
    }
    response
}

/// Requests with all that an answer may consist of.
fn requests() -> Vec<Value> {
    let tool = json!({"type": "function", "name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}});
    let format = json!({"type": "json_schema", "name": "n", "schema": {
        "type": "object", "properties": {"a": {"type": "string"}}}});
    vec![
        ask("hello"),
        json!({"model": "sim", "input": "hello"}),
        with(
            ask("hello"),
            json!({"instructions": "be terse", "temperature": 0.5}),
        ),
        with(ask("think"), json!({"reasoning": {"effort": "low"}})),
        json!({"model": "sim", "input": "call", "tools": [tool]}),
        with(
            ask("call"),
            json!({"tools": [tool], "reasoning": {"effort": "low"}}),
        ),
        with(ask("json"), json!({"text": {"format": format}})),
    ]
}

#[tokio::test]
async fn a_client_cannot_tell_a_chat_worker_from_a_native_one() {
    let native = cluster(vec![fast()]).await;
    let chat = cluster(vec![chat_only()]).await;
    for request in requests() {
        let expected = native.create(&request).await;
        let found = chat.create(&request).await;
        let sent = chat.engines[0].last_post().await;
        assert_eq!(sent.path, CHAT_PATH);
        let usage_of = |response: &Value| response["usage"]["output_tokens"].clone();
        assert_eq!(usage_of(&found), usage_of(&expected), "{request}");
        let shape = |response: &Value| {
            let mut response = comparable(response);
            // The two forms of a prompt are other tokens to a simulated engine, so the words differ.
            response["usage"] = Value::Null;
            let output = response["output"].as_array().unwrap().iter();
            let output = output.map(|item| {
                (
                    item["type"].clone(),
                    item["status"].clone(),
                    item["name"].clone(),
                )
            });
            let output: Vec<_> = output.collect();
            response["output"] = Value::Null;
            (response, output)
        };
        assert_eq!(shape(&found), shape(&expected), "{request}");
        // Streamed, it is the same as whole.
        let streamed = stream(&chat, &request).await;
        let last = &streamed.last().unwrap()["response"];
        assert_eq!(text(last), text(&found), "{request}");
        let mut last = comparable(last);
        let mut found = comparable(&found);
        for response in [&mut last, &mut found] {
            response["usage"]["input_tokens_details"] = Value::Null;
        }
        assert_eq!(last, found, "{request}");
        let names: Vec<String> = stream(&native, &request).await.iter().map(kind).collect();
        let found: Vec<String> = streamed.iter().map(kind).collect();
        assert_eq!(without_repeats(found), without_repeats(names), "{request}");
    }
}

fn kind(event: &Value) -> String {
    event["type"].as_str().unwrap().to_owned()
}

fn without_repeats(mut kinds: Vec<String>) -> Vec<String> {
    kinds.dedup();
    kinds
}

#[tokio::test]
async fn a_conversation_goes_on_with_all_its_turns() {
    let cluster = cluster(vec![chat_only()]).await;
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}});
    let first =
        json!({"model": "sim", "input": "a", "tools": [tool], "reasoning": {"effort": "low"}});
    let first = cluster.create(&first).await;
    let call = first["output"]
        .as_array()
        .unwrap()
        .iter()
        .find(|item| item["type"] == "function_call")
        .unwrap()
        .clone();
    let next = json!({"model": "sim", "previous_response_id": first["id"], "tools": [tool], "max_output_tokens": 4,
        "input": [{"type": "function_call_output", "call_id": call["call_id"], "output": "warm"}]});
    let second = cluster.create(&next).await;
    assert_eq!(second["output"][0]["type"], "message");
    let sent = cluster.engines[0].last_body().await;
    let roles: Vec<&Value> = sent["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| &message["role"])
        .collect();
    assert_eq!(roles, ["user", "assistant", "tool"]);
    assert_eq!(sent["messages"][1]["tool_calls"][0]["id"], call["call_id"]);
    assert!(
        !sent["messages"][1]["reasoning"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    let stored = cluster
        .get(&format!("{PATH}/{}", second["id"].as_str().unwrap()))
        .await
        .json();
    assert_eq!(stored, second);
    // Simulated engines end an answer at its limit, and a summary must end by itself.
    let faults = Faults {
        stop_at_once: true,
        ..Faults::default()
    };
    cluster.engines[0].fault(faults).await;
    let compacted = cluster
        .post(
            "/v1/responses/compact",
            json!({"model": "sim", "previous_response_id": second["id"]}).to_string(),
        )
        .await;
    assert_eq!(compacted.status, 200, "{}", compacted.text());
}

#[tokio::test]
async fn background_responses_run_resume_and_cancel() {
    let slow = Settings {
        no_responses: true,
        ..unhurried()
    };
    let cluster = cluster(vec![slow]).await;
    let body = |tokens: usize| json!({"model": "sim", "input": "x", "background": true, "max_output_tokens": tokens});
    let created = cluster.create(&body(10)).await;
    let path = format!("{PATH}/{}", created["id"].as_str().unwrap());
    assert_eq!(created["status"], "queued");
    eventually("it ends", async || {
        cluster.get(&path).await.json()["status"] == "incomplete"
    })
    .await;
    assert!(!text(&cluster.get(&path).await.json()).is_empty());
    let streamed = with(body(10), json!({"stream": true}));
    let answer = cluster.post(PATH, streamed.to_string()).await;
    let all = events(answer.text());
    let id = all[0]["response"]["id"].as_str().unwrap();
    let rest = cluster
        .get(&format!("{PATH}/{id}?stream=true&starting_after=3"))
        .await;
    let count = rest.text().split_terminator("\n\n").count();
    assert_eq!(count, all.len() - 4 + 1, "{}", rest.text());
    let created = cluster.create(&body(2_000)).await;
    let path = format!("{PATH}/{}", created["id"].as_str().unwrap());
    eventually("it runs", async || cluster.requests().await[0] == 3).await;
    let cancelled = cluster.post(&format!("{path}/cancel"), "").await;
    assert_eq!(cancelled.json()["status"], "cancelled");
    eventually("the engine stops", async || {
        cluster.engines[0].stats().await.aborted == 1
    })
    .await;
}

#[tokio::test]
async fn of_a_mixed_fleet_each_worker_gets_its_form() {
    let cluster = cluster(vec![fast(), chat_only()]).await;
    cluster.is_worker("w0", "responses", "native").await;
    cluster.is_worker("w1", "responses", "chat").await;
    eventually("both were asked", async || {
        let prompt = format!("{} is a prompt of its own", fastrand::u64(..));
        cluster.create(&ask(prompt)).await;
        let counts = cluster.requests().await;
        counts.iter().all(|count| *count > 0)
    })
    .await;
    for (engine, path) in [(0, PATH), (1, CHAT_PATH)] {
        assert_eq!(cluster.engines[engine].last_post().await.path, path);
    }
    // What a chat completion cannot have goes to the native worker.
    let native_only = with(ask("search"), json!({"tools": [{"type": "web_search"}]}));
    let before = cluster.requests().await[1];
    for _ in 0..20 {
        cluster.create(&native_only).await;
    }
    assert_eq!(cluster.requests().await[1], before);
}

#[tokio::test]
async fn a_retry_on_a_worker_of_the_other_kind_is_converted_again() {
    for failing in [0, 1] {
        let cluster = cluster(vec![fast(), chat_only()]).await;
        let faults = Faults {
            refuse: Some(503),
            ..Faults::default()
        };
        cluster.engines[failing].fault(faults).await;
        for number in 0..8 {
            let response = cluster.create(&ask(format!("{number} prompt"))).await;
            assert_eq!(response["status"], "incomplete");
        }
        let path = [CHAT_PATH, PATH][failing];
        assert_eq!(cluster.engines[1 - failing].last_post().await.path, path);
    }
}

#[tokio::test]
async fn a_request_that_no_worker_can_take_is_refused_by_name() {
    let cluster = Cluster::start(vec![chat_only()], |config: &mut Config| {
        config.responses.chat.unsupported_tools = warmroute::responses::UnsupportedTools::Refuse;
    })
    .await;
    let check = async |more: Value, param: &str| {
        let answer = cluster.post(PATH, with(ask("x"), more).to_string()).await;
        assert_eq!(
            (answer.status, answer.param().as_str()),
            (400, param),
            "{}",
            answer.text()
        );
        assert_eq!(answer.code(), "unsupported_parameter");
    };
    check(json!({"tools": [{"type": "web_search"}]}), "tools[0]").await;
    assert_eq!(cluster.requests().await, [0]);
}

#[tokio::test]
async fn tools_that_no_worker_can_run_are_left_out_and_named() {
    const LEFT_OUT: &str = "x-warmroute-tools-left-out";
    let cluster = cluster(vec![chat_only()]).await;
    // As Codex sends them.
    let grammar = json!({"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}});
    let tools =
        json!([grammar, {"type": "local_shell"}, {"type": "web_search"}, {"type": "web_search"}]);
    for stream in [false, true] {
        let more = json!({"tools": tools, "stream": stream});
        let answer = cluster.post(PATH, with(ask("x"), more).to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.header(LEFT_OUT), "local_shell, web_search");
        let sent = cluster.engines[0].last_body().await;
        let sent = sent["tools"].as_array().unwrap();
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0]["function"]["name"], "apply_patch");
    }
    let answer = cluster.post(PATH, ask("x").to_string()).await;
    assert_eq!(answer.header(LEFT_OUT), "");
}

#[tokio::test]
async fn an_engines_error_names_what_the_client_sent() {
    let cluster = cluster(vec![chat_only()]).await;
    let long = with(ask("x"), json!({"max_output_tokens": 1_000_000}));
    let answer = cluster.post(PATH, long.to_string()).await;
    assert_eq!(
        (answer.status, answer.param().as_str()),
        (400, "max_output_tokens"),
        "{}",
        answer.text()
    );
    let long = ask("word ".repeat(60_000));
    let answer = cluster.post(PATH, long.to_string()).await;
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
async fn a_stream_of_a_killed_engine_ends_as_failed() {
    let slow = Settings {
        no_responses: true,
        ..unhurried()
    };
    let mut cluster = cluster(vec![slow]).await;
    let body = json!({"model": "sim", "input": "x", "stream": true, "max_output_tokens": 2_000});
    let mut open = client::open(cluster.router.api, "POST", PATH, &[], body.to_string()).await;
    let mut text = open.until("output_text.delta").await;
    cluster.engines[0].kill().await;
    text += &open.rest().await.0;
    let events = events(&text);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "server_error");
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    let stored = cluster
        .get(&format!(
            "{PATH}/{}",
            last["response"]["id"].as_str().unwrap()
        ))
        .await
        .json();
    assert_eq!(stored["status"], "failed");
}

#[tokio::test]
async fn an_engines_error_in_mid_stream_fails_the_response() {
    let cluster = cluster(vec![chat_only()]).await;
    let faults = |faults: Faults| cluster.engines[0].fault(faults);
    for fault in [
        Faults {
            error_after_tokens: Some(2),
            ..Faults::default()
        },
        Faults {
            cut_after_tokens: Some(2),
            ..Faults::default()
        },
    ] {
        faults(fault).await;
        let events = stream(&cluster, &ask("x")).await;
        assert_eq!(events.last().unwrap()["type"], "response.failed");
        let whole = cluster.post(PATH, ask("x").to_string()).await;
        assert!(whole.status >= 500, "{}", whole.text());
    }
}

#[tokio::test]
async fn a_whole_answer_of_a_lost_engine_is_asked_for_again() {
    let cluster = cluster((0..8).map(|_| chat_only()).collect()).await;
    let faults = Faults {
        cut_after_tokens: Some(2),
        ..Faults::default()
    };
    cluster.engines[0].fault(faults).await;
    let (mut sent, mut failed) = (0, 0);
    let requests = loop {
        let answer = cluster
            .post(PATH, ask(format!("{sent} prompt")).to_string())
            .await;
        sent += 1;
        failed += u64::from(answer.status != 200);
        let requests = cluster.requests().await;
        // The second try may go to the same worker again: of those that fail it got both.
        let elsewhere = requests[1..].iter().sum::<u64>();
        assert_eq!(elsewhere, sent - failed, "{requests:?}");
        assert!(requests[0] >= 2 * failed, "{requests:?}");
        if requests[0] > 2 * failed {
            break requests;
        }
        assert!(
            sent < 500,
            "none was asked for again elsewhere: {requests:?}"
        );
    };
    let converted = cluster
        .metric("warmroute_responses_over_chat_total", &["converted"])
        .await;
    assert_eq!(converted, requests.iter().sum::<u64>() as f64);
}

#[tokio::test]
async fn what_a_worker_serves_is_asked_for_unless_the_configuration_says_it() {
    let says = |responses: ResponsesApi| {
        move |config: &mut Config| {
            for worker in &mut config.workers {
                worker.responses = Some(responses);
            }
        }
    };
    let chat = Cluster::start(vec![fast()], says(ResponsesApi::Chat)).await;
    chat.create(&ask("x")).await;
    assert_eq!(chat.engines[0].last_post().await.path, CHAT_PATH);
    let native = Cluster::start(vec![chat_only()], says(ResponsesApi::Native)).await;
    native.is_worker("w0", "responses", "native").await;
    let answer = native.post(PATH, ask("x").to_string()).await;
    assert_eq!(answer.status, 404);
    // Asking counts as no request, and generates nothing.
    let auto = cluster(vec![fast(), chat_only()]).await;
    assert_eq!(auto.requests().await, [0, 0]);
}
