//! The Responses API over the memory store, as a client sees it.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::responses::{Mode, OnStoreDown, ReasoningEvents};
use warmroute::sim::fault::Faults;
use warmroute::store::redis;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, eventually, fast, tenant, unhurried};
use crate::redis_server::Server;
use crate::stub::Stub;

const PATH: &str = "/v1/responses";

async fn one() -> Cluster {
    Cluster::fast(1).await
}

pub(crate) fn ask(input: impl Into<Value>) -> Value {
    json!({"model": "sim", "input": input.into(), "max_output_tokens": 4})
}

pub(crate) fn with(mut body: Value, more: Value) -> Value {
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

impl Cluster {
    pub(crate) async fn create(&self, body: &Value) -> Value {
        let answer = self.post(PATH, body.to_string()).await;
        assert_eq!(answer.status, 200, "{body} {}", answer.text());
        answer.json()
    }

    async fn delete(&self, path: &str) -> Answer {
        client::send(self.router.api, "DELETE", path, &[], "").await
    }

    /// The body of the last request to an engine.
    async fn sent(&self) -> Value {
        self.engines[0].last_body().await
    }
}

fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

/// The events of a stream: names and data. The stream must end with `[DONE]`.
fn events(text: &str) -> Vec<(String, Value)> {
    let text = text
        .strip_suffix("data: [DONE]\n\n")
        .unwrap_or_else(|| panic!("no end: {text}"));
    let read = |(place, block): (usize, &str)| {
        let (name, data) = block.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["sequence_number"], place, "{text}");
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    text.split_terminator("\n\n")
        .enumerate()
        .map(read)
        .collect()
}

async fn streamed(cluster: &Cluster, body: &Value) -> Vec<(String, Value)> {
    let body = with(body.clone(), json!({"stream": true}));
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        answer
            .header("content-type")
            .starts_with("text/event-stream")
    );
    assert_eq!(answer.header("cache-control"), "no-cache");
    events(answer.text())
}

fn refused(answer: &Answer, status: u16, code: &str, param: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    let said = (answer.code(), answer.param());
    assert_eq!(
        (said.0.as_str(), said.1.as_str()),
        (code, param),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_response_has_every_member_and_can_be_retrieved() {
    let cluster = one().await;
    let body = with(
        ask("hello"),
        json!({
        "instructions": "be terse", "metadata": {"k": "v"}, "temperature": 0.5, "user": "me",
        "tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}),
    );
    let response = cluster.create(&body).await;
    assert!(id(&response).starts_with("resp_") && id(&response).len() == 53);
    assert_eq!(response["status"], "incomplete");
    assert_eq!(
        response["incomplete_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(
        (&response["store"], &response["background"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(
        (&response["metadata"], &response["user"]),
        (&json!({"k": "v"}), &json!("me"))
    );
    assert_eq!(
        response["tools"],
        json!([{"type": "function", "name": "f", "description": null, "parameters": null, "strict": null}])
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
    for name in [
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "top_p",
    ] {
        assert!(response[name].is_number(), "{name}");
    }
    for absent in ["kv_transfer_params", "input_messages", "metrics"] {
        assert_eq!(response.get(absent), None);
    }
    assert!(
        response["usage"]["input_tokens_details"]
            .get("input_tokens_per_turn")
            .is_none()
    );
    let again = cluster.get(&format!("{PATH}/{}", id(&response))).await;
    assert_eq!((again.status, again.json()), (200, response));
}

#[tokio::test]
async fn the_engine_gets_one_self_contained_request() {
    let cluster = one().await;
    let body = with(
        ask("hello"),
        json!({"metadata": {"k": "v"}, "seed": 7, "truncation": "auto", "store": true}),
    );
    let response = cluster.create(&body).await;
    let sent = cluster.sent().await;
    assert_eq!(
        (&sent["request_id"], &sent["store"]),
        (&response["id"], &json!(false))
    );
    assert_eq!(
        (&sent["seed"], &sent["max_output_tokens"]),
        (&json!(7), &json!(4))
    );
    for absent in ["metadata", "truncation", "stream", "previous_response_id"] {
        assert_eq!(sent.get(absent), None, "{absent}");
    }
    assert_eq!(
        sent["input"],
        json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}])
    );
}

#[tokio::test]
async fn an_unstored_response_cannot_be_retrieved() {
    let cluster = one().await;
    let response = cluster
        .create(&with(ask("x"), json!({"store": false})))
        .await;
    assert_eq!(response["store"], false);
    let path = format!("{PATH}/{}", id(&response));
    for answer in [
        cluster.get(&path).await,
        cluster.delete(&path).await,
        cluster.post(&format!("{path}/cancel"), "").await,
        cluster.get(&format!("{path}/input_items")).await,
        cluster.get(&format!("{PATH}/resp_no%20such")).await,
    ] {
        refused(&answer, 404, "", "");
        assert!(answer.text().contains("not found."));
    }
    let next = with(ask("y"), json!({"previous_response_id": id(&response)}));
    let answer = cluster.post(PATH, next.to_string()).await;
    refused(
        &answer,
        400,
        "previous_response_not_found",
        "previous_response_id",
    );
}

#[tokio::test]
async fn a_stream_is_numbered_and_its_end_is_stored_before_it_is_sent() {
    let cluster = one().await;
    let received = streamed(&cluster, &ask("hello")).await;
    let names: Vec<&str> = received
        .iter()
        .map(|(name, _)| name.trim_start_matches("response."))
        .collect();
    assert_eq!(
        names[..4],
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added"
        ]
    );
    assert_eq!(
        names[names.len() - 4..],
        [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete"
        ]
    );
    let last = &received.last().unwrap().1["response"];
    assert_eq!(received[0].1["response"]["id"], last["id"]);
    assert_eq!(received[0].1["response"]["status"], "in_progress");
    let again = cluster.get(&format!("{PATH}/{}", id(last))).await;
    assert_eq!(&again.json(), last);
    let text: String = received
        .iter()
        .filter_map(|(_, data)| data["delta"].as_str())
        .collect();
    assert_eq!(last["output"][0]["content"][0]["text"], *text);
}

#[tokio::test]
async fn a_multi_line_body_gives_single_line_events() {
    let cluster = one().await;
    let body = with(
        ask("hello"),
        json!({"stream": true, "metadata": {"k": "v"}, "tool_choice": "none",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
            "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
    );
    let lf = serde_json::to_string_pretty(&body).unwrap();
    for body in [lf.replace('\n', "\r\n"), lf] {
        let answer = cluster.post(PATH, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let received = events(answer.text());
        assert_eq!(received[0].1["response"]["metadata"], json!({"k": "v"}));
        let last = &received.last().unwrap().1["response"];
        assert_eq!(last["tools"][0]["parameters"]["type"], "object");
        let again = cluster.get(&format!("{PATH}/{}", id(last))).await;
        assert_eq!(&again.json(), last);
    }
}

#[tokio::test]
async fn a_response_that_ends_by_itself_is_completed() {
    let cluster = one().await;
    let body = json!({"model": "sim", "input": "x"});
    let received = streamed(&cluster, &body).await;
    let (name, last) = received.last().unwrap();
    assert_eq!(
        (name.as_str(), &last["response"]["status"]),
        ("response.completed", &json!("completed"))
    );
    assert!(last["response"]["completed_at"].is_u64());
    assert_eq!(last["response"]["output"][0]["status"], "completed");
    assert_eq!(cluster.create(&body).await["status"], "completed");
}

#[tokio::test]
async fn a_chain_is_sent_whole_without_earlier_instructions() {
    let cluster = one().await;
    let first = cluster
        .create(&with(ask("one"), json!({"instructions": "old"})))
        .await;
    let second = cluster
        .create(&with(
            ask("two"),
            json!({"previous_response_id": id(&first)}),
        ))
        .await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let third = with(
        ask("three"),
        json!({"previous_response_id": id(&second), "instructions": "new"}),
    );
    let received = streamed(&cluster, &third).await;
    let sent = cluster.sent().await;
    assert_eq!(sent["instructions"], "new");
    let input = sent["input"].as_array().unwrap();
    let roles: Vec<&str> = input
        .iter()
        .map(|item| item["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant", "user"]);
    let said = |response: &Value| response["output"][0]["content"][0]["text"].clone();
    assert_eq!(input[1]["content"][0]["text"], said(&first));
    assert_eq!(input[3]["content"][0]["text"], said(&second));
    assert_eq!(
        input[1]["status"], "completed",
        "an incomplete one would be gone on with"
    );
    // Two responses may continue the same one, which stays unchanged.
    let branch = cluster
        .create(&with(
            ask("other"),
            json!({"previous_response_id": id(&first)}),
        ))
        .await;
    assert_eq!(cluster.sent().await["input"].as_array().unwrap().len(), 3);
    assert_ne!(branch["id"], received[0].1["response"]["id"]);
}

#[tokio::test]
async fn a_continuation_goes_to_the_worker_that_caches_its_history() {
    let cluster = Cluster::fast(4).await;
    let text = "once upon a time there was a router that remembered. ".repeat(40);
    let mut body = ask(text);
    let mut workers = Vec::new();
    for _ in 0..5 {
        let (answer, decided) = cluster.post_decided(PATH, &body.to_string()).await;
        let response = answer.json();
        workers.push(decided);
        body = with(
            ask("and then?"),
            json!({"previous_response_id": id(&response)}),
        );
    }
    for decided in &workers[1..] {
        assert_eq!(decided.worker, workers[0].worker);
        assert!(decided.cached_tokens > 400, "{decided:?}");
    }
}

#[tokio::test]
async fn tool_calls_and_outputs_pass_through_a_chain() {
    let cluster = one().await;
    let tools = json!({"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]});
    let first = cluster
        .create(&with(
            json!({"model": "sim", "input": "weather?"}),
            tools.clone(),
        ))
        .await;
    let call = first["output"]
        .as_array()
        .unwrap()
        .iter()
        .find(|item| item["type"] == "function_call")
        .unwrap();
    assert!(call["id"].as_str().unwrap().starts_with("fc_"));
    assert_eq!(call["status"], "completed");
    let output =
        json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]);
    let next = with(
        json!({"model": "sim", "previous_response_id": id(&first), "input": output}),
        tools,
    );
    let second = cluster.create(&next).await;
    assert_eq!(second["output"][0]["type"], "message");
    let input = cluster.sent().await["input"].clone();
    assert_eq!(input[1]["arguments"], call["arguments"]);
    assert_eq!(input[2]["output"], "sunny");
    let wrong = with(
        next,
        json!({"input": [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]}),
    );
    let answer = cluster.post(PATH, wrong.to_string()).await;
    refused(&answer, 400, "", "input");
    assert!(
        answer
            .text()
            .contains("No tool call found for function call output with call_id call_x.")
    );
    let unanswered =
        json!({"model": "sim", "previous_response_id": id(&first), "input": "never mind"});
    let answer = cluster.post(PATH, unanswered.to_string()).await;
    refused(&answer, 400, "", "input");
    assert!(
        answer
            .text()
            .contains("No tool output found for function call")
    );
}

#[tokio::test]
async fn reasoning_events_have_the_configured_names() {
    for (dialect, name) in [
        (ReasoningEvents::OpenAi, "response.reasoning_text.delta"),
        (ReasoningEvents::OpenResponses, "response.reasoning.delta"),
    ] {
        let cluster = Cluster::start(vec![fast()], |config| {
            config.responses.advanced.reasoning_events = dialect
        })
        .await;
        let body = json!({"model": "sim", "input": "x", "reasoning": {"effort": "low"}});
        let received = streamed(&cluster, &body).await;
        assert!(
            received
                .iter()
                .any(|(received, data)| received == name && data["type"] == name)
        );
        let last = &received.last().unwrap().1["response"];
        assert_eq!(last["output"][0]["type"], "reasoning");
        let next = json!({"model": "sim", "input": "y", "previous_response_id": last["id"]});
        cluster.create(&next).await;
        assert_eq!(cluster.sent().await["input"][1]["type"], "reasoning");
    }
}

#[tokio::test]
async fn a_deleted_response_is_gone_for_everyone() {
    let cluster = one().await;
    let response = cluster.create(&ask("x")).await;
    let path = format!("{PATH}/{}", id(&response));
    let deleted = cluster.delete(&path).await;
    assert_eq!(
        deleted.json(),
        json!({"id": id(&response), "object": "response.deleted", "deleted": true})
    );
    refused(&cluster.delete(&path).await, 404, "", "");
    refused(&cluster.get(&path).await, 404, "", "");
    let next = with(ask("y"), json!({"previous_response_id": id(&response)}));
    let answer = cluster.post(PATH, next.to_string()).await;
    refused(
        &answer,
        400,
        "previous_response_not_found",
        "previous_response_id",
    );
}

#[tokio::test]
async fn a_missing_response_of_a_chain_is_an_error() {
    let cluster = one().await;
    let first = cluster.create(&ask("one")).await;
    let second = cluster
        .create(&with(
            ask("two"),
            json!({"previous_response_id": id(&first)}),
        ))
        .await;
    cluster.delete(&format!("{PATH}/{}", id(&first))).await;
    let third = with(ask("three"), json!({"previous_response_id": id(&second)}));
    let answer = cluster.post(PATH, third.to_string()).await;
    refused(
        &answer,
        400,
        "previous_response_not_found",
        "previous_response_id",
    );
}

#[tokio::test]
async fn input_items_are_listed_page_by_page() {
    let cluster = one().await;
    let items: Vec<Value> = (0..5)
        .map(|number| json!({"role": "user", "content": format!("{number}")}))
        .collect();
    let response = cluster.create(&ask(items)).await;
    let path = format!("{PATH}/{}/input_items", id(&response));
    let all = cluster.get(&format!("{path}?order=asc")).await.json();
    let ids: Vec<Value> = all["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["id"].clone())
        .collect();
    assert_eq!((ids.len(), &all["has_more"]), (5, &json!(false)));
    assert_eq!(
        all["data"][0]["content"],
        json!([{"type": "input_text", "text": "0"}])
    );
    let mut listed = Vec::new();
    let mut after = String::new();
    loop {
        let page = cluster.get(&format!("{path}?limit=2{after}")).await.json();
        listed.extend(
            page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|item| item["id"].clone()),
        );
        if page["has_more"] == false {
            break;
        }
        after = format!("&after={}", listed.last().unwrap().as_str().unwrap());
    }
    listed.reverse();
    assert_eq!(listed, ids);
    refused(
        &cluster.get(&format!("{path}?limit=0")).await,
        400,
        "invalid_value",
        "limit",
    );
    refused(
        &cluster.get(&format!("{path}?after=x")).await,
        400,
        "invalid_value",
        "after",
    );
}

#[tokio::test]
async fn an_item_reference_needs_only_the_id() {
    let cluster = one().await;
    let first = cluster.create(&ask("one")).await;
    let said = &first["output"][0];
    let input = json!([{"role": "user", "content": "one"}, {"type": "item_reference", "id": said["id"]}, {"role": "user", "content": "two"}]);
    cluster.create(&ask(input)).await;
    let sent = cluster.sent().await;
    assert_eq!(
        sent["input"][1]["content"][0]["text"],
        said["content"][0]["text"]
    );
    let unknown = ask(json!([{"type": "item_reference", "id": "msg_unknown"}]));
    let answer = cluster.post(PATH, unknown.to_string()).await;
    refused(&answer, 404, "", "input");
    assert!(
        answer
            .text()
            .contains("Item with id 'msg_unknown' not found. Items are not persisted")
    );
}

#[tokio::test]
async fn an_item_of_the_history_that_is_sent_again_is_refused() {
    let cluster = one().await;
    let first = cluster.create(&ask("one")).await;
    let said = &first["output"][0];
    let next = json!({"role": "user", "content": "two"});
    let previous = json!({"previous_response_id": first["id"]});
    let reference = json!({"type": "item_reference", "id": said["id"]});
    for twice in [said, &reference] {
        let input = json!([twice, next]);
        let body = with(ask(input.clone()), previous.clone());
        let answer = cluster.post(PATH, body.to_string()).await;
        refused(&answer, 400, "", "input");
        let text = answer.text();
        let named = format!("Duplicate item found with id {}.", id(said));
        assert!(text.contains(&named), "{text}");
        // Without the history it comes once.
        cluster.create(&ask(input)).await;
    }
    cluster.create(&with(ask(json!([next])), previous)).await;
    assert_eq!(cluster.sent().await["input"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn item_references_are_limited_to_as_many_responses_as_a_history() {
    const TURNS_MAX: usize = 20;
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.advanced.max_history_turns = TURNS_MAX as u64;
    })
    .await;
    let mut said = Vec::new();
    for number in 0..=TURNS_MAX {
        let response = cluster.create(&ask(format!("n{number}"))).await;
        said.push(response["output"][0].clone());
    }
    let refer = |count: usize| {
        let mut input: Vec<Value> = said[..count]
            .iter()
            .map(|item| json!({"type": "item_reference", "id": item["id"]}))
            .collect();
        input.push(json!({"role": "user", "content": "go on"}));
        ask(input)
    };
    cluster.create(&refer(TURNS_MAX)).await;
    let sent = cluster.sent().await;
    for (place, item) in said[..TURNS_MAX].iter().enumerate() {
        assert_eq!(
            sent["input"][place]["content"][0]["text"],
            item["content"][0]["text"]
        );
    }
    let answer = cluster.post(PATH, refer(TURNS_MAX + 1).to_string()).await;
    refused(&answer, 400, "context_length_exceeded", "input");
    assert!(answer.text().contains("more than 20 other responses"));
}

#[tokio::test]
async fn a_wrong_parameter_is_refused_by_name() {
    let cluster = one().await;
    let response = cluster.create(&ask("x")).await;
    let path = format!("{PATH}/{}", id(&response));
    for (more, code, param) in [
        (
            json!({"prompt": {"id": "p"}}),
            "unsupported_parameter",
            "prompt",
        ),
        (
            json!({"request_id": "x"}),
            "unsupported_parameter",
            "request_id",
        ),
        (
            json!({"kv_transfer_params": {}}),
            "unsupported_parameter",
            "kv_transfer_params",
        ),
        (json!({"include": ["x"]}), "invalid_value", "include[0]"),
        (json!({"metadata": {"k": 1}}), "invalid_type", "metadata.k"),
        (
            json!({"previous_response_id": id(&response), "conversation": "conv_1"}),
            "mutually_exclusive_parameters",
            "conversation",
        ),
        (
            json!({"previous_response_id": "a b"}),
            "invalid_value",
            "previous_response_id",
        ),
    ] {
        let before = cluster.engines[0].generated().await;
        let answer = cluster.post(PATH, with(ask("x"), more).to_string()).await;
        refused(&answer, 400, code, param);
        assert_eq!(cluster.engines[0].generated().await, before);
    }
    let answer = cluster.post(&format!("{path}/cancel"), "").await;
    refused(&answer, 400, "", "response_id");
    assert!(
        answer
            .text()
            .contains("Cannot cancel a synchronous response.")
    );
    refused(
        &cluster.get(&format!("{path}?stream=true")).await,
        400,
        "",
        "stream",
    );
    refused(
        &cluster.get(&format!("{path}?starting_after=3")).await,
        400,
        "invalid_value",
        "starting_after",
    );
    refused(&cluster.get(PATH).await, 405, "method_not_allowed", "");
}

#[tokio::test]
async fn engine_errors_have_openais_shape() {
    let cluster = one().await;
    let answer = cluster
        .post(
            PATH,
            with(ask("x"), json!({"max_output_tokens": 0})).to_string(),
        )
        .await;
    refused(&answer, 400, "invalid_value", "max_output_tokens");
    let long = ask("word ".repeat(200_000));
    let answer = cluster.post(PATH, long.to_string()).await;
    refused(&answer, 400, "context_length_exceeded", "input");
    assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    let answer = cluster
        .post(PATH, with(ask("x"), json!({"model": "nope"})).to_string())
        .await;
    refused(&answer, 404, "model_not_found", "model");
    assert_eq!(
        cluster.metric("warmroute_responses_in_flight", &[]).await,
        0.0
    );
}

#[tokio::test]
async fn truncation_drops_the_oldest_items_of_a_too_long_conversation() {
    let cluster = one().await;
    let long = json!([{"role": "user", "content": "word ".repeat(200_000)}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "short"}]);
    let body = ask(long);
    refused(
        &cluster.post(PATH, body.to_string()).await,
        400,
        "context_length_exceeded",
        "input",
    );
    let response = cluster
        .create(&with(body, json!({"truncation": "auto"})))
        .await;
    assert_eq!(response["truncation"], "auto");
    assert_eq!(cluster.sent().await["input"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_stream_that_an_engine_breaks_off_fails() {
    let cluster = one().await;
    cluster.engines[0]
        .fault(Faults {
            cut_after_tokens: Some(2),
            ..Faults::default()
        })
        .await;
    let received = streamed(&cluster, &ask("x")).await;
    let (name, last) = received.last().unwrap();
    assert_eq!(name, "response.failed");
    let response = &last["response"];
    assert_eq!(
        (&response["status"], &response["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert!(
        received
            .iter()
            .any(|(name, _)| name == "response.output_item.done")
    );
    // The failed response is stored and cannot be continued.
    let again = cluster.get(&format!("{PATH}/{}", id(response))).await;
    assert_eq!(&again.json(), response);
    cluster.engines[0].fault(Faults::default()).await;
    let next = with(ask("y"), json!({"previous_response_id": id(response)}));
    refused(
        &cluster.post(PATH, next.to_string()).await,
        400,
        "",
        "previous_response_id",
    );
}

#[tokio::test]
async fn a_disconnected_client_stops_the_engine_and_nothing_is_stored() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let body = with(ask("x"), json!({"stream": true, "max_output_tokens": 3000}));
    let mut open = cluster.open(PATH, &body.to_string()).await;
    let text = open.until("output_text.delta").await;
    let id = text
        .split("\"id\":\"")
        .nth(1)
        .unwrap()
        .split('"')
        .next()
        .unwrap()
        .to_owned();
    drop(open);
    eventually("the engine stops", async || {
        let stats = cluster.engines[0].stats().await;
        stats.aborted == 1 && stats.running == 0
    })
    .await;
    eventually("nothing is in flight", async || {
        cluster.metric("warmroute_responses_in_flight", &[]).await == 0.0
    })
    .await;
    refused(&cluster.get(&format!("{PATH}/{id}")).await, 404, "", "");
}

#[tokio::test]
async fn a_silent_stream_gets_keep_alive_comments() {
    const COMMENT: &str = ": keep-alive\n\n";
    let silent = async |keep_alive: Duration| {
        let cluster = Cluster::start(vec![fast()], |config| {
            config.requests.stream_idle_timeout = Duration::from_secs(1);
            config.responses.keep_alive = keep_alive;
        })
        .await;
        let stall = Faults {
            stall_after_tokens: Some(3),
            ..Faults::default()
        };
        cluster.engines[0].fault(stall).await;
        let body = with(ask("x"), json!({"stream": true, "max_output_tokens": 50}));
        let (text, whole) = cluster.open(PATH, &body.to_string()).await.rest().await;
        assert!(whole, "{text}");
        text
    };
    let text = silent(Duration::from_millis(50)).await;
    assert!(text.matches(COMMENT).count() >= 2, "{text}");
    let received = events(&text.replace(COMMENT, ""));
    assert_eq!(received.last().unwrap().0, "response.failed");
    assert!(!silent(Duration::ZERO).await.contains(COMMENT));
}

#[tokio::test]
async fn a_conversation_grows_with_its_responses() {
    let cluster = one().await;
    let made = cluster
        .post(
            "/v1/conversations",
            json!({"metadata": {"a": "b"}, "items": [{"role": "user", "content": "zero"}]})
                .to_string(),
        )
        .await;
    assert_eq!(made.status, 200, "{}", made.text());
    let conversation = made.json();
    assert_eq!(
        (&conversation["object"], &conversation["metadata"]),
        (&json!("conversation"), &json!({"a": "b"}))
    );
    let path = format!("/v1/conversations/{}", id(&conversation));
    assert_eq!(cluster.get(&path).await.json(), conversation);
    let first = cluster
        .create(&with(
            ask("one"),
            json!({"conversation": id(&conversation)}),
        ))
        .await;
    assert_eq!(first["conversation"], json!({"id": id(&conversation)}));
    let received = streamed(
        &cluster,
        &with(
            ask("two"),
            json!({"conversation": {"id": id(&conversation)}}),
        ),
    )
    .await;
    assert_eq!(
        received[0].1["response"]["conversation"]["id"],
        conversation["id"]
    );
    assert_eq!(cluster.sent().await["input"].as_array().unwrap().len(), 4);
    let items = cluster.get(&format!("{path}/items?order=asc")).await.json();
    let kinds: Vec<&str> = items["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["role"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["user", "user", "assistant", "user", "assistant"]);
    assert_eq!(items["data"][2]["id"], first["output"][0]["id"]);
    // One item: retrieved and deleted.
    let item = format!("{path}/items/{}", items["data"][0]["id"].as_str().unwrap());
    assert_eq!(cluster.get(&item).await.json(), items["data"][0]);
    assert_eq!(cluster.delete(&item).await.json(), conversation);
    refused(&cluster.get(&item).await, 404, "", "");
    // Items added by the client.
    let added = cluster
        .post(
            &format!("{path}/items"),
            json!({"items": [{"role": "user", "content": "x"}]}).to_string(),
        )
        .await
        .json();
    assert_eq!(
        (&added["object"], added["data"].as_array().unwrap().len()),
        (&json!("list"), 1)
    );
    // The SDK sends `None`, which its type allows.
    let cleared = cluster.post(&path, r#"{"metadata": null}"#).await.json();
    assert_eq!(cleared["metadata"], json!({}));
    let updated = cluster
        .post(&path, json!({"metadata": {"c": "d"}}).to_string())
        .await
        .json();
    assert_eq!(updated["metadata"], json!({"c": "d"}));
    assert_eq!(cluster.get(&path).await.json(), updated);
    refused(
        &cluster.post(&path, "{}").await,
        400,
        "missing_required_parameter",
        "metadata",
    );
    let many: Vec<Value> = vec![json!({"role": "user", "content": "x"}); 21];
    refused(
        &cluster
            .post("/v1/conversations", json!({"items": many}).to_string())
            .await,
        400,
        "invalid_value",
        "items",
    );
    let deleted = cluster.delete(&path).await.json();
    assert_eq!(
        deleted,
        json!({"id": id(&conversation), "object": "conversation.deleted", "deleted": true})
    );
    refused(&cluster.get(&path).await, 404, "", "");
    refused(
        &cluster
            .post(
                PATH,
                with(ask("x"), json!({"conversation": id(&conversation)})).to_string(),
            )
            .await,
        404,
        "",
        "",
    );
    // The conversation's responses still exist.
    assert_eq!(
        cluster.get(&format!("{PATH}/{}", id(&first))).await.status,
        200
    );
}

#[tokio::test]
async fn a_conversation_has_one_running_response() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    let conversation = cluster.post("/v1/conversations", "").await.json();
    let body = with(
        ask("x"),
        json!({"conversation": id(&conversation), "stream": true, "max_output_tokens": 3000}),
    );
    let mut open = cluster.open(PATH, &body.to_string()).await;
    open.until("output_text.delta").await;
    let second = with(ask("y"), json!({"conversation": id(&conversation)}));
    let answer = cluster.post(PATH, second.to_string()).await;
    refused(&answer, 400, "conversation_locked", "conversation");
    // A client that disconnects unlocks the conversation and adds nothing.
    drop(open);
    let mut response = Value::Null;
    eventually("it is free again", async || {
        let answer = cluster.post(PATH, second.to_string()).await;
        response = answer.json();
        answer.status == 200
    })
    .await;
    let items = cluster
        .get(&format!("/v1/conversations/{}/items", id(&conversation)))
        .await
        .json();
    assert_eq!(items["data"].as_array().unwrap().len(), 2);
    assert_eq!(items["data"][0]["id"], response["output"][0]["id"]);
    // An engine's error unlocks it too, before the client gets the error.
    let bad = with(second.clone(), json!({"max_output_tokens": 0}));
    for _ in 0..5 {
        assert_eq!(cluster.post(PATH, bad.to_string()).await.status, 400);
        cluster.create(&second).await;
    }
}

#[tokio::test]
async fn a_response_that_its_conversation_rejects_fails() {
    let cluster = Cluster::start(vec![unhurried()], |_| {}).await;
    for stream in [true, false] {
        let conversation = cluster.post("/v1/conversations", "").await.json();
        let body = with(
            ask("x"),
            json!({"conversation": id(&conversation), "stream": true, "max_output_tokens": 40}),
        );
        let path = format!("/v1/conversations/{}", id(&conversation));
        cluster.engines[0].hold_after(3).await;
        if stream {
            let mut open = cluster.open(PATH, &body.to_string()).await;
            let started = open.until("output_text.delta").await;
            assert_eq!(cluster.delete(&path).await.status, 200);
            cluster.engines[0].let_go().await;
            let (rest, _) = open.rest().await;
            let received = events(&(started + &rest));
            let (name, last) = received.last().unwrap();
            let last = &last["response"];
            assert_eq!(
                (name.as_str(), &last["error"]["code"]),
                ("response.failed", &json!("conversation_not_found"))
            );
            let again = cluster.get(&format!("{PATH}/{}", id(last))).await;
            assert_eq!(&again.json(), last);
        } else {
            let body = with(body, json!({"stream": false}));
            let deleted = async {
                eventually("it runs", async || {
                    cluster.engines[0].stats().await.running == 1
                })
                .await;
                let status = cluster.delete(&path).await.status;
                cluster.engines[0].let_go().await;
                status
            };
            let (answer, deleted) = tokio::join!(cluster.post(PATH, body.to_string()), deleted);
            assert_eq!(deleted, 200);
            refused(&answer, 404, "conversation_not_found", "");
        }
    }
}

#[tokio::test]
async fn an_input_too_large_to_store_never_reaches_an_engine() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.store.retention.max_record = 10_000;
    })
    .await;
    let long = ask("x".repeat(10_000));
    let conversation = cluster.post("/v1/conversations", "").await.json();
    let before = cluster.engines[0].generated().await;
    for body in [
        long.clone(),
        with(
            long.clone(),
            json!({"store": false, "conversation": id(&conversation)}),
        ),
    ] {
        let answer = cluster.post(PATH, body.to_string()).await;
        refused(&answer, 400, "context_length_exceeded", "input");
        assert!(answer.text().contains("10000 bytes"));
    }
    assert_eq!(cluster.engines[0].generated().await, before);
    cluster.create(&with(long, json!({"store": false}))).await;
    // The answer makes it too large, which is known only at the end.
    let almost = ask("x".repeat(9_500));
    let answer = cluster.post(PATH, almost.to_string()).await;
    refused(&answer, 400, "", "input");
}

#[tokio::test]
async fn items_that_a_conversation_cannot_take_are_named() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.store.retention.max_record = 10_000;
    })
    .await;
    let conversation = cluster.post("/v1/conversations", "").await.json();
    let items = format!("/v1/conversations/{}/items", id(&conversation));
    let said = cluster.create(&ask("hi")).await;
    let reference = json!({"type": "item_reference", "id": said["output"][0]["id"]});
    let large = json!({"role": "user", "content": "x".repeat(10_000)});
    for path in ["/v1/conversations", &*items] {
        let post = async |item: &Value| {
            let body = json!({"items": [item]});
            cluster.post(path, body.to_string()).await
        };
        refused(&post(&large).await, 400, "invalid_value", "items");
        // It exists, so that it must not be called unknown.
        let referring = post(&reference).await;
        refused(&referring, 400, "unsupported_parameter", "items[0]");
    }
}

#[tokio::test]
async fn a_state_token_that_is_too_large_is_left_out_with_a_header() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.state_token.max_plain_size = 4 << 10;
    })
    .await;
    let body = |length: usize| {
        with(
            ask("x".repeat(length)),
            json!({"store": false, "include": ["reasoning.encrypted_content"]}),
        )
    };
    let whole = cluster.post(PATH, body(100).to_string()).await;
    assert_eq!((whole.status, whole.header("x-warmroute-state")), (200, ""));
    // The input alone fits.
    let answer = cluster.post(PATH, body(3_900).to_string()).await;
    assert_eq!(
        (answer.status, answer.header("x-warmroute-state")),
        (200, "left-out"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_large_state_token_works_like_a_small_one() {
    let cluster = one().await;
    let long: String = (0..110_000).map(|_| fastrand::lowercase()).collect();
    let sealed = json!({"store": false, "include": ["reasoning.encrypted_content"]});
    let body = |input: Value, more: Value| with(with(ask(input), sealed.clone()), more);
    let first = cluster.create(&body(json!(long), json!({}))).await;
    let output = first["output"].as_array().unwrap();
    let text = output.last().unwrap()["encrypted_content"]
        .as_str()
        .unwrap();
    assert!(text.len() > 70_000, "{}", text.len());
    let whole = body(json!("two"), json!({"previous_response": first}));
    cluster.create(&whole).await;
    let sent = cluster.sent().await["input"].clone();
    assert_eq!(sent[0]["content"][0]["text"], long);
    let mut items = vec![json!({"role": "user", "content": long})];
    items.extend(output.iter().cloned());
    items.push(json!({"role": "user", "content": "two"}));
    let items = body(items.into(), json!({}));
    cluster.create(&items).await;
    assert_eq!(cluster.sent().await["input"], sent);
    for body in [whole, items] {
        let forged = body.to_string().replace("wrc1.", "wrc1.0");
        let answer = cluster.post(PATH, forged).await;
        let said = (answer.status, answer.code());
        assert_eq!(said, (400, "invalid_encrypted_content".to_owned()));
    }
}

#[tokio::test]
async fn a_client_may_keep_the_state_itself() {
    let cluster = one().await;
    let sealed = json!({"store": false, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}});
    let first = cluster
        .create(&with(
            json!({"model": "sim", "input": "one"}),
            sealed.clone(),
        ))
        .await;
    let output = first["output"].as_array().unwrap();
    let state = output.last().unwrap();
    assert_eq!(
        (&state["type"], &state["summary"]),
        (&json!("reasoning"), &json!([]))
    );
    assert!(
        state["encrypted_content"]
            .as_str()
            .unwrap()
            .starts_with("wrc1.")
    );
    assert!(
        output[0]["encrypted_content"].is_string(),
        "its thoughts are sealed as well"
    );
    // The client sends the whole Response object back.
    let next = with(
        json!({"model": "sim", "input": "two", "previous_response": first}),
        sealed.clone(),
    );
    let received = streamed(&cluster, &next).await;
    let sent = cluster.sent().await["input"].clone();
    let kinds: Vec<&str> = sent
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["message", "reasoning", "message", "message"]);
    assert!(!sent.to_string().contains("encrypted_content"));
    let names: Vec<&str> = received.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[names.len() - 3..],
        [
            "response.output_item.added",
            "response.output_item.done",
            "response.completed"
        ]
    );
    let second = &received.last().unwrap().1["response"];
    let count = second["output"].as_array().unwrap().len();
    assert_eq!(
        second["output"][count - 1],
        received[received.len() - 2].1["item"]
    );
    assert_eq!(received[received.len() - 2].1["output_index"], count - 1);
    // The client sends the output items back, as SDKs do.
    let mut input = vec![json!({"role": "user", "content": "one"})];
    input.extend(output.iter().cloned());
    input.push(json!({"role": "user", "content": "two"}));
    cluster
        .create(&with(
            json!({"model": "sim", "input": input}),
            sealed.clone(),
        ))
        .await;
    assert_eq!(cluster.sent().await["input"], sent);
    // A changed token is rejected in both places.
    let mut forged = first.clone();
    let text = state["encrypted_content"]
        .as_str()
        .unwrap()
        .replace("wrc1.", "wrc1.0");
    forged["output"].as_array_mut().unwrap().last_mut().unwrap()["encrypted_content"] = json!(text);
    for body in [
        json!({"model": "sim", "input": "x", "previous_response": forged}),
        json!({"model": "sim", "input": [forged["output"][2], {"role": "user", "content": "x"}]}),
        json!({"model": "sim", "input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}]}),
    ] {
        refused(
            &cluster.post(PATH, body.to_string()).await,
            400,
            "invalid_encrypted_content",
            "",
        );
    }
    let bare = json!({"model": "sim", "input": "x", "previous_response": {"object": "response", "id": "resp_1", "output": []}});
    refused(
        &cluster.post(PATH, bare.to_string()).await,
        400,
        "invalid_value",
        "previous_response",
    );
}

#[tokio::test]
async fn in_pass_through_mode_responses_pass_byte_for_byte() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.responses.mode = Mode::PassThrough
    })
    .await;
    let body =
        r#"{ "model": "sim", "input": "x" , "max_output_tokens": 2, "metadata": {"a":"b"} }"#;
    let answer = cluster.post(PATH, body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(cluster.engines[0].last_post().await.body, body);
    assert!(answer.json().get("kv_transfer_params").is_some());
    for path in ["/v1/responses/resp_1", "/v1/conversations/conv_1/items"] {
        let answer = cluster.get(path).await;
        refused(&answer, 404, "unknown_url", "");
        assert!(answer.text().contains("pass_through"), "{}", answer.text());
    }
}

#[tokio::test]
async fn tokens_are_counted_by_the_engine() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let stub = Stub::start(format!("{head}{{\"token_ids\":[1, 2, 3]}}")).await;
    let router = stub.router(|_| {}).await;
    let path = format!("{PATH}/input_tokens");
    let answer = client::post(router.api, &path, ask("hello").to_string()).await;
    let expected = json!({"object": "response.input_tokens", "input_tokens": 3});
    assert_eq!((answer.status, answer.json()), (200, expected));
    assert!(
        stub.last_head()
            .starts_with("post /v1/responses/render http")
    );
    for something in [
        r#"{"model":"sim","instructions":"be terse"}"#,
        r#"{"model":"sim","tools":[{"type":"function","name":"f"}]}"#,
    ] {
        let answer = client::post(router.api, &path, something).await;
        assert_eq!(answer.status, 200, "{something} {}", answer.text());
    }
    let empty = client::post(router.api, &path, r#"{"model":"sim","tools":[]}"#).await;
    refused(&empty, 400, "missing_required_parameter", "input");
    let empty = client::post(router.api, &path, r#"{"model":"sim"}"#).await;
    refused(&empty, 400, "missing_required_parameter", "input");
    let stub = Stub::start(
        "HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n{\"detail\":\"Not Found\"}",
    )
    .await;
    let router = stub.router(|_| {}).await;
    let answer = client::post(router.api, &path, ask("hello").to_string()).await;
    refused(&answer, 501, "cannot_count_tokens", "");
    assert_eq!(answer.header("x-should-retry"), "false");
}

#[tokio::test]
async fn an_invalid_engine_answer_is_an_error_without_retry() {
    for body in ["", "7", "{}", r#"{"status":"in_progress"}"#] {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
        let stub = Stub::start(format!("{head}{body}")).await;
        let router = stub.router(|_| {}).await;
        let answer = client::post(router.api, PATH, ask("hello").to_string()).await;
        refused(&answer, 502, "invalid_engine_response", "");
        assert_eq!(answer.header("x-should-retry"), "false");
        // A stream has started already and ends with a failed response.
        let body = with(ask("hello"), json!({"stream": true}));
        let answer = client::post(router.api, PATH, body.to_string()).await;
        let received = events(answer.text());
        assert_eq!(received.last().unwrap().0, "response.failed");
    }
}

#[tokio::test]
async fn other_tenants_responses_are_not_found() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.tenants = vec![tenant("a"), tenant("b")];
    })
    .await;
    let send = async |key: &str, method: &str, path: &str, body: &Value| {
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", &*bearer)];
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        client::send(cluster.router.api, method, path, &headers, body).await
    };
    let response = send("sk-a", "POST", PATH, &ask("x")).await.json();
    let conversation = send("sk-a", "POST", "/v1/conversations", &json!({}))
        .await
        .json();
    let unknown = "resp_000000000000000000000000000000000000000000000000";
    for (method, below) in [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
    ] {
        let of = async |id: &str| {
            let answer = send("sk-b", method, &format!("{PATH}/{id}{below}"), &Value::Null).await;
            (answer.status, answer.text().replace(id, ""))
        };
        assert_eq!(
            of(id(&response)).await,
            of(unknown).await,
            "{method} {below}"
        );
    }
    let next = with(ask("y"), json!({"previous_response_id": id(&response)}));
    let answer = send("sk-b", "POST", PATH, &next).await;
    refused(
        &answer,
        400,
        "previous_response_not_found",
        "previous_response_id",
    );
    let reference = ask(json!([{"type": "item_reference", "id": response["output"][0]["id"]}]));
    refused(
        &send("sk-b", "POST", PATH, &reference).await,
        404,
        "",
        "input",
    );
    let body = with(ask("y"), json!({"conversation": id(&conversation)}));
    refused(&send("sk-b", "POST", PATH, &body).await, 404, "", "");
    assert_eq!(send("sk-a", "POST", PATH, &body).await.status, 200);
}

#[tokio::test]
async fn the_admin_page_counts_responses_by_status() {
    let cluster = one().await;
    cluster.create(&ask("x")).await;
    cluster.create(&json!({"model": "sim", "input": "x"})).await;
    let page = cluster.admin("/responses").await.json();
    assert_eq!(page["responses"]["finished"]["incomplete"], 1);
    assert_eq!(page["responses"]["finished"]["completed"], 1);
    assert_eq!(
        (&page["responses"]["mode"], &page["health"]["is_up"]),
        (&json!("stateful"), &json!(true))
    );
    assert_eq!(page["store"]["kind"], "memory");
    assert_eq!(cluster.admin("/readyz").await.status, 200);
}

/// A router whose store is unreachable.
async fn storeless(change: impl FnOnce(&mut Config)) -> Cluster {
    Cluster::start(vec![fast()], |config| {
        let store = &mut config.responses.store;
        // Nothing listens on this port.
        store.redis = Some(redis::Settings {
            urls: vec!["redis://127.0.0.1:1".to_owned()],
            ..redis::Settings::default()
        });
        change(config);
    })
    .await
}

#[tokio::test]
async fn a_store_outage_stops_only_requests_that_need_the_store() {
    let cluster = storeless(|_| {}).await;
    let unknown = "resp_000000000000000000000000000000000000000000000000";
    let stored = ask("x");
    let next = with(
        ask("x"),
        json!({"previous_response_id": unknown, "store": false}),
    );
    let conversation = with(
        ask("x"),
        json!({"conversation": unknown.replace("resp", "conv"), "store": false}),
    );
    let before = cluster.engines[0].generated().await;
    for answer in [
        cluster.post(PATH, stored.to_string()).await,
        cluster.post(PATH, next.to_string()).await,
        cluster.post(PATH, conversation.to_string()).await,
        cluster.post("/v1/conversations", "").await,
        cluster.get(&format!("{PATH}/{unknown}")).await,
        cluster.delete(&format!("{PATH}/{unknown}")).await,
        cluster.get(&format!("{PATH}/{unknown}/input_items")).await,
    ] {
        refused(&answer, 503, "store_unavailable", "");
        assert!(answer.header("retry-after").parse::<u32>().unwrap() >= 1);
    }
    assert_eq!(cluster.engines[0].generated().await, before);
    let free = cluster
        .create(&with(ask("x"), json!({"store": false})))
        .await;
    assert_eq!(free["status"], "incomplete");
    assert_eq!(cluster.admin("/readyz").await.status, 200);
    let page = cluster.admin("/responses").await.json();
    assert_eq!(page["health"]["is_up"], false);
}

#[tokio::test]
async fn responses_can_be_served_unstored_while_the_store_is_down() {
    let cluster = storeless(|config| {
        config.responses.on_store_down = OnStoreDown::Degrade;
        config.responses.advanced.ready_without_store = false;
    })
    .await;
    let answer = cluster.post(PATH, ask("x").to_string()).await;
    assert_eq!(
        (answer.status, answer.header("x-warmroute-store")),
        (200, "degraded")
    );
    assert_eq!(answer.json()["store"], false);
    let received = streamed(&cluster, &ask("x")).await;
    assert_eq!(received[0].1["response"]["store"], false);
    let outcome = ["outcome=\"served\""];
    assert_eq!(
        cluster
            .metric("warmroute_responses_not_stored_total", &outcome)
            .await,
        2.0
    );
    // Stored history cannot be replaced.
    let unknown = "resp_000000000000000000000000000000000000000000000000";
    let next = with(ask("x"), json!({"previous_response_id": unknown}));
    refused(
        &cluster.post(PATH, next.to_string()).await,
        503,
        "store_unavailable",
        "",
    );
    assert_eq!(cluster.admin("/readyz").await.status, 503);
}

#[tokio::test]
async fn an_answer_that_could_not_be_stored_is_withheld() {
    for (on_store_down, status) in [(OnStoreDown::Fail, 503), (OnStoreDown::Degrade, 200)] {
        let mut redis = Server::start().await;
        let cluster = Cluster::start(vec![unhurried()], |config| {
            config.responses.on_store_down = on_store_down;
            let store = &mut config.responses.store;
            store.redis = Some(redis::Settings {
                urls: vec![redis.url()],
                ..redis::Settings::default()
            });
        })
        .await;
        let long = with(ask("x"), json!({"max_output_tokens": 40}));
        let body = with(long.clone(), json!({"stream": true}));
        cluster.engines[0].hold_after(3).await;
        let mut open = cluster.open(PATH, &body.to_string()).await;
        let started = open.until("output_text.delta").await;
        let whole = cluster.post(PATH, long.to_string());
        let killed = async {
            eventually("both run", async || {
                cluster.engines[0].stats().await.running == 2
            })
            .await;
            redis.kill();
            cluster.engines[0].let_go().await;
        };
        let (answer, ()) = tokio::join!(whole, killed);
        let (rest, is_whole) = open.rest().await;
        assert!(is_whole);
        let received = events(&(started + &rest));
        let last = &received.last().unwrap().1["response"];
        assert_eq!(
            (&last["status"], &last["store"]),
            (&json!("incomplete"), &json!(false))
        );
        assert_eq!(answer.status, status, "{}", answer.text());
        if status == 503 {
            assert_eq!(answer.header("x-should-retry"), "false");
        } else {
            assert_eq!(answer.json()["store"], false);
        }
    }
}
