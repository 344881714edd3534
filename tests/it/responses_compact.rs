//! `POST /v1/responses/compact`: the summary, the prompt that it is made from, and how a conversation goes on from it.

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::openai::tenant::TenantSpec;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, fast, tenant};
use crate::model_names::named;

const PATH: &str = "/v1/responses";
const COMPACT: &str = "/v1/responses/compact";

/// One engine, whose answers end by themselves.
fn finishing() -> Settings {
    let faults = Faults {
        stop_at_once: true,
        ..Faults::default()
    };
    Settings {
        faults,
        // Its prompts are counted by it.
        enable_scale_out: true,
        ..fast()
    }
}

async fn one() -> Cluster {
    Cluster::start(vec![finishing()], |_| {}).await
}

impl Cluster {
    async fn compacted(&self, body: &Value) -> Value {
        let answer = self.post(COMPACT, body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    /// The body of the last request to the engine, and its `input` as the engine got it.
    async fn last_sent(&self) -> (Value, String) {
        let arrival = self.engines[0].last_post().await;
        let text = String::from_utf8(arrival.body.to_vec()).unwrap();
        let input = text.split_once(r#""input":"#).unwrap().1.to_owned();
        (serde_json::from_str(&text).unwrap(), input)
    }

    /// The bodies of the last turns that the engine was asked for, oldest first.
    async fn turns(&self) -> Vec<String> {
        let stats = self.engines[0].stats().await;
        let posts = stats.last.into_iter();
        let turns = posts.filter(|post| post.path == PATH && post.body.len() > 2);
        turns
            .map(|post| String::from_utf8(post.body.to_vec()).unwrap())
            .collect()
    }
}

fn texts(input: &Value) -> Vec<&str> {
    let items = input.as_array().unwrap().iter();
    items
        .map(|item| item["content"][0]["text"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn a_conversation_becomes_its_user_messages_and_a_summary() {
    let cluster = one().await;
    let tools = json!([{"type": "function", "name": "f"}]);
    let first = cluster
        .create(&json!({"model": "sim", "input": "one", "tools": tools, "tool_choice": "none", "instructions": "brief"}))
        .await;
    let (_, turn) = cluster.last_sent().await;
    let body = json!({"model": "sim", "input": "two", "previous_response_id": first["id"], "tools": tools,
        "instructions": "brief", "text": {"verbosity": "low"}, "parallel_tool_calls": true});
    let compacted = cluster.compacted(&body).await;
    assert_eq!(compacted["object"], "response.compaction");
    assert!(compacted["usage"]["input_tokens"].as_u64().unwrap() > 0);
    let output = compacted["output"].as_array().unwrap();
    assert_eq!(output.len(), 3);
    assert_eq!(texts(&json!(output[..2])), ["one", "two"]);
    assert_eq!(output[2]["type"], "compaction");
    assert!(output[2]["id"].as_str().unwrap().starts_with("cmp_"));

    let (sent, asked) = cluster.last_sent().await;
    // The conversation in the same bytes, so that the worker has it cached; tools stand in front of it.
    let open = turn.strip_suffix("]}").unwrap();
    assert!(
        asked.starts_with(open),
        "{asked} does not begin with {open}"
    );
    assert_eq!(
        (&sent["tools"], &sent["tool_choice"]),
        (&tools, &json!("none"))
    );
    assert_eq!(
        (&sent["instructions"], &sent["store"]),
        (&json!("brief"), &json!(false))
    );
    assert!(sent.get("text").is_none());
    let last = sent["input"].as_array().unwrap().last().unwrap();
    assert!(
        last["content"][0]["text"]
            .as_str()
            .unwrap()
            .contains("summary")
    );
}

#[tokio::test]
async fn a_compacted_conversation_goes_on_by_its_items_or_by_its_id() {
    let cluster = one().await;
    let body = json!({"model": "sim", "input": [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]});
    let compacted = cluster.compacted(&body).await;
    let mut window = compacted["output"].as_array().unwrap().clone();
    window.push(json!({"role": "user", "content": "three"}));
    cluster
        .create(&json!({"model": "sim", "input": window, "store": false}))
        .await;
    let (by_items, _) = cluster.last_sent().await;
    cluster
        .create(&json!({"model": "sim", "input": "three", "previous_response_id": compacted["id"]}))
        .await;
    let (by_id, _) = cluster.last_sent().await;
    assert_eq!(by_items["input"], by_id["input"]);
    let sent = texts(&by_id["input"]);
    assert_eq!((sent[0], sent[1], sent[3]), ("one", "two", "three"));
    assert_eq!(by_id["input"][2]["role"], "assistant");
    assert!(
        sent[2].starts_with("Summary of the conversation so far:\n"),
        "{}",
        sent[2]
    );
    // Compacted again, only the new summary counts.
    let again = json!({"model": "sim", "input": "four", "previous_response_id": compacted["id"]});
    let again = cluster.compacted(&again).await;
    let output = again["output"].as_array().unwrap();
    assert_eq!(texts(&json!(output[..3])), ["one", "two", "four"]);
    assert_eq!(output.len(), 4);
    let both = json!([compacted["output"][2], output[3], {"role": "user", "content": "five"}]);
    cluster
        .create(&json!({"model": "sim", "input": both, "store": false}))
        .await;
    let (sent, _) = cluster.last_sent().await;
    assert_eq!(sent["input"].as_array().unwrap().len(), 2, "{sent}");
}

#[tokio::test]
async fn a_chain_with_too_many_turns_is_compacted_and_goes_on() {
    let cluster = Cluster::start(vec![finishing()], |config: &mut Config| {
        config.responses.advanced.max_history_turns = 2;
    })
    .await;
    let next = |previous: &Value| json!({"model": "sim", "input": "x", "previous_response_id": previous["id"]});
    let mut last = cluster
        .create(&json!({"model": "sim", "input": "first"}))
        .await;
    for _ in 0..2 {
        last = cluster.create(&next(&last)).await;
    }
    let refused = cluster.post(PATH, next(&last).to_string()).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (400, "context_length_exceeded")
    );
    assert!(refused.text().contains(COMPACT), "{}", refused.text());
    let compacted = cluster.compacted(&next(&last)).await;
    cluster.create(&next(&compacted)).await;
    let (sent, _) = cluster.last_sent().await;
    assert_eq!(texts(&sent["input"])[0], "first");
}

#[tokio::test]
async fn a_compacted_conversation_is_no_response() {
    let cluster = one().await;
    let compacted = cluster
        .compacted(&json!({"model": "sim", "input": "x"}))
        .await;
    let path = format!("{PATH}/{}", compacted["id"].as_str().unwrap());
    assert_eq!(cluster.get(&path).await.status, 404);
    assert_eq!(
        cluster.post(&format!("{path}/cancel"), "").await.status,
        404
    );
    let unstored = cluster
        .compacted(&json!({"model": "sim", "input": "x", "store": false}))
        .await;
    let next = json!({"model": "sim", "input": "y", "previous_response_id": unstored["id"]});
    let answer = cluster.post(PATH, next.to_string()).await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (400, "previous_response_not_found")
    );
}

#[tokio::test]
async fn a_summary_that_is_cut_is_an_error_that_is_not_retried() {
    let cluster = Cluster::start(vec![fast()], |config: &mut Config| {
        config.responses.compact.max_output_tokens = 16;
    })
    .await;
    let long = json!({"model": "sim", "input": "tell me of the sea", "ignore_eos": true});
    let answer = cluster.post(COMPACT, long.to_string()).await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (502, "invalid_engine_response"),
        "{}",
        answer.text()
    );
    assert_eq!(answer.header("x-should-retry"), "false");
    assert_eq!(cluster.engines[0].generated().await, 1);
}

#[tokio::test]
async fn a_summary_is_no_longer_than_its_tenant_may_ask_for() {
    let cluster = Cluster::start(vec![finishing()], |config: &mut Config| {
        let limits =
            r#"{"max_tokens": 200, "models": ["org/*", {"name": "sim", "max_tokens": 100}]}"#;
        config.tenants = vec![TenantSpec {
            limits: Some(serde_json::from_str(limits).unwrap()),
            ..tenant("a")
        }];
        config.models = named(json!([{"name": "sim", "aliases": ["alias"]}]));
    })
    .await;
    let headers = [("authorization", "Bearer sk-a")];
    for model in ["sim", "alias"] {
        let body = json!({"model": model, "input": "x"}).to_string();
        let answer = client::send(cluster.router.api, "POST", COMPACT, &headers, body).await;
        assert_eq!(answer.status, 200, "{model}: {}", answer.text());
        let (sent, _) = cluster.last_sent().await;
        assert_eq!(sent["max_output_tokens"], 100, "{model}");
    }
}

#[tokio::test]
async fn another_tenants_summary_cannot_be_read() {
    let cluster = Cluster::start(vec![finishing()], |config: &mut Config| {
        config.tenants = vec![tenant("a"), tenant("b")];
    })
    .await;
    let post = async |key: &str, path: &str, body: Value| -> Answer {
        let key = format!("Bearer sk-{key}");
        let headers = [("authorization", &*key)];
        client::send(cluster.router.api, "POST", path, &headers, body.to_string()).await
    };
    let compacted = post("a", COMPACT, json!({"model": "sim", "input": "x"})).await;
    let item = compacted.json()["output"][1].clone();
    let body = json!({"model": "sim", "input": [item, {"role": "user", "content": "y"}]});
    let own = post("a", PATH, body.clone()).await;
    assert_eq!(own.status, 200, "{}", own.text());
    let foreign = post("b", PATH, body).await;
    assert_eq!(
        (foreign.status, &*foreign.code()),
        (400, "invalid_encrypted_content")
    );
}

fn with_threshold(tokens: u64) -> Value {
    json!([{"type": "compaction", "compact_threshold": tokens}])
}

fn kinds(response: &Value) -> Vec<&str> {
    let items = response["output"].as_array().unwrap().iter();
    items.map(|item| item["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_long_conversation_is_compacted_before_its_answer() {
    let cluster = one().await;
    let first = cluster
        .create(&json!({"model": "sim", "input": "one", "instructions": "brief"}))
        .await;
    let (_, turn) = cluster.last_sent().await;
    let mut body = json!({"model": "sim", "input": "two", "instructions": "brief", "previous_response_id": first["id"],
        "context_management": with_threshold(1_000_000)});
    let short = cluster.create(&body).await;
    assert_eq!(kinds(&short), ["message"]);

    body["context_management"] = with_threshold(1);
    let before = cluster.engines[0].generated().await;
    let compacted = cluster.create(&body).await;
    assert_eq!(kinds(&compacted), ["compaction", "message"]);
    assert_eq!(compacted["previous_response_id"], first["id"]);
    assert_eq!(
        cluster.engines[0].generated().await,
        before + 2,
        "one summary and one answer"
    );
    let turns = cluster.turns().await;
    let bodies = &turns[turns.len() - 2..];
    // The summary's prompt begins with the conversation as the last turn had it, without the new message.
    let open = turn.strip_suffix("]}").unwrap();
    assert!(
        bodies[0].contains(open) && !bodies[0].contains("two"),
        "{}",
        bodies[0]
    );
    let sent: Value = serde_json::from_str(&bodies[1]).unwrap();
    let sent_texts = texts(&sent["input"]);
    assert_eq!((sent_texts[0], sent_texts[2]), ("one", "two"));
    assert!(sent_texts[1].starts_with("Summary of the conversation so far:\n"));
    // Both calls are counted.
    let usage = &compacted["usage"];
    let tokens = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(
        tokens("total_tokens"),
        tokens("input_tokens") + tokens("output_tokens")
    );
    assert!(tokens("input_tokens") > short["usage"]["input_tokens"].as_u64().unwrap());

    // It goes on from the summary, and what came before it is not sent again.
    cluster
        .create(&json!({"model": "sim", "input": "three", "previous_response_id": compacted["id"]}))
        .await;
    let (next, _) = cluster.last_sent().await;
    let next = texts(&next["input"]);
    assert_eq!(
        (next.len(), next[0], next[2], next[4]),
        (5, "one", "two", "three")
    );
    // A client that keeps the items itself goes on from the compaction item.
    let kept = json!([compacted["output"][0], {"role": "user", "content": "three"}]);
    cluster
        .create(&json!({"model": "sim", "input": kept, "store": false}))
        .await;
    let (next, _) = cluster.last_sent().await;
    assert_eq!(texts(&next["input"])[0], sent_texts[1]);
    let stored = cluster
        .get(&format!("{PATH}/{}", compacted["id"].as_str().unwrap()))
        .await;
    assert_eq!(kinds(&stored.json()), ["compaction", "message"]);
}

#[tokio::test]
async fn a_list_of_tools_before_the_first_message_is_nothing_to_compact() {
    let cluster = one().await;
    let tools = json!({"type": "additional_tools", "role": "developer", "tools": []});
    let input = json!([tools, {"role": "user", "content": "one two three four five six"}]);
    let body = json!({"model": "sim", "input": input, "context_management": with_threshold(1)});
    let response = cluster.create(&body).await;
    assert_eq!(kinds(&response), ["message"]);
}

#[tokio::test]
async fn a_stream_shows_the_compaction_first() {
    let cluster = one().await;
    let input = json!([{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]);
    let body = json!({"model": "sim", "input": input, "stream": true, "store": false, "context_management": with_threshold(1)});
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.text();
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = events
        .filter_map(|data| serde_json::from_str(data).ok())
        .collect();
    let names: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        names[..6],
        [
            "response.created",
            "response.in_progress",
            "response.compaction.compacting",
            "response.output_item.added",
            "response.output_item.done",
            "response.output_item.added",
        ]
    );
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    assert_eq!(events[2]["item_id"], events[4]["item"]["id"]);
    assert_eq!(
        (&events[3]["output_index"], &events[5]["output_index"]),
        (&json!(0), &json!(1))
    );
    let ended = events.last().unwrap();
    assert_eq!(ended["type"], "response.completed");
    assert_eq!(kinds(&ended["response"]), ["compaction", "message"]);
    let deltas = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta");
    assert!(deltas.clone().count() > 0);
    assert!(deltas.clone().all(|event| event["output_index"] == 1));
}

#[tokio::test]
async fn a_trigger_compacts_at_once_and_there_is_no_other_answer() {
    let cluster = one().await;
    let items = json!([{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}, {"type": "compaction_trigger"}]);
    for stream in [false, true] {
        let before = cluster.engines[0].generated().await;
        let body = json!({"model": "sim", "input": items, "stream": stream});
        let answer = cluster.post(PATH, body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.text();
        let response = if stream {
            let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
            let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
            events.collect::<Vec<_>>().pop().unwrap()["response"].clone()
        } else {
            answer.json()
        };
        assert_eq!(kinds(&response), ["compaction"]);
        assert_eq!(response["status"], "completed");
        assert!(response["usage"]["output_tokens"].as_u64().unwrap() > 0);
        assert_eq!(cluster.engines[0].generated().await, before + 1);
        cluster
            .create(
                &json!({"model": "sim", "input": "two", "previous_response_id": response["id"]}),
            )
            .await;
        let (next, _) = cluster.last_sent().await;
        let next = texts(&next["input"]);
        assert_eq!((next.len(), next[0], next[2]), (3, "one", "two"));
    }
}

#[tokio::test]
async fn a_compaction_that_cannot_be_is_refused_by_name() {
    let cluster = one().await;
    let conversation = cluster.post("/v1/conversations", "{}").await.json();
    let refused = async |body: Value, param: &str| {
        let answer = cluster.post(PATH, body.to_string()).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["param"]),
            (400, &json!(param)),
            "{error}"
        );
    };
    let threshold = with_threshold(1);
    refused(
        json!({"model": "sim", "input": "x", "conversation": conversation["id"], "context_management": threshold}),
        "context_management",
    )
    .await;
    refused(
        json!({"model": "sim", "input": "x", "background": true, "context_management": threshold}),
        "context_management",
    )
    .await;
    refused(
        json!({"model": "sim", "input": [{"type": "compaction_trigger"}]}),
        "input",
    )
    .await;
}
