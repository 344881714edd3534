//! `POST /v1/responses/compact`: the summary, the prompt that it is made from, and how a conversation goes on from it.

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, fast};

const PATH: &str = "/v1/responses";
const COMPACT: &str = "/v1/responses/compact";

/// One engine, whose answers end by themselves.
fn finishing() -> Settings {
    let faults = Faults {
        stop_at_once: true,
        ..Faults::default()
    };
    Settings { faults, ..fast() }
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

    async fn created(&self, body: &Value) -> Value {
        let answer = self.post(PATH, body.to_string()).await;
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
        .created(&json!({"model": "sim", "input": "one", "tools": tools, "tool_choice": "none", "instructions": "brief"}))
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
        .created(&json!({"model": "sim", "input": window, "store": false}))
        .await;
    let (by_items, _) = cluster.last_sent().await;
    cluster
        .created(
            &json!({"model": "sim", "input": "three", "previous_response_id": compacted["id"]}),
        )
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
        .created(&json!({"model": "sim", "input": both, "store": false}))
        .await;
    let (sent, _) = cluster.last_sent().await;
    assert_eq!(sent["input"].as_array().unwrap().len(), 2, "{sent}");
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
async fn another_tenants_summary_cannot_be_read() {
    let cluster = Cluster::start(vec![finishing()], |config: &mut Config| {
        let tenant = |name: &str| TenantSpec {
            name: name.to_owned(),
            keys: vec![Secret::new(format!("sk-{name}"))],
            ..TenantSpec::default()
        };
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
