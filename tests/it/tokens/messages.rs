//! Prompts of Anthropic's Messages, as the router and the engines tokenize them.

use serde_json::{Value, json};

use super::{Folder, cluster_with_events, patient, row, tokenized_by_engine};
use crate::cluster::Cluster;

const PATH: &str = "/v1/messages";
const HEADER: &str = "x-anthropic-billing-header: cc_version=2.1; cch=";

/// Long prompts without a common prefix.
fn bodies() -> Vec<Value> {
    let text = |of: &str| format!("{of}: once upon a time there was a router.\n").repeat(12);
    let tool = json!({"name": "find", "description": "finds", "input_schema": {"properties": {}}});
    vec![
        json!({"model": "sim", "max_tokens": 2, "system": text("A"),
            "messages": [{"role": "user", "content": "Why?"}]}),
        json!({"model": "sim", "max_tokens": 2,
            "system": [{"type": "text", "text": text("B")}, {"type": "text", "text": text("C")}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Größe, 世界"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "and so on."}]},
                {"role": "user", "content": text("and")}]}),
        json!({"model": "sim", "max_tokens": 2, "system": text("D"), "tools": [tool],
            "messages": [
                {"role": "user", "content": "call"},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "now"},
                    {"type": "tool_use", "id": "t", "name": "find", "input": {"b": 1, "a": "ü"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": text("found")},
                    {"type": "text", "text": "next"}]}]}),
        json!({"model": "sim", "max_tokens": 2, "cache_salt": "s",
            "messages": [
                {"role": "user", "content": text("E")},
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "go"}]}),
    ]
}

/// All prompt tokens of a message's usage.
fn prompt_tokens(message: &Value) -> u64 {
    let names = [
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    ];
    let counts = names.map(|name| message["usage"][name].as_u64().unwrap());
    counts.iter().sum()
}

async fn explained(cluster: &Cluster, body: &Value) -> Value {
    cluster.explain(PATH, &body.to_string()).await
}

#[tokio::test]
async fn messages_are_routed_by_kv_events_and_counted_exactly() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine(); 2], folder.model(), |_| {}).await;
    for (index, body) in bodies().into_iter().enumerate() {
        let text = body.to_string();
        let owner = index % 2;
        // Sent without the router, so that it learns of the blocks by events only.
        let answer = cluster.post_to_engine(owner, PATH, &text).await;
        cluster.wait_for_kv_events(owner).await;
        let tokens = prompt_tokens(&answer);
        let page = explained(&cluster, &body).await;
        assert_eq!(page["prompt_tokens"], tokens, "{body}");
        // The engine computes at least the last token.
        let held = (tokens - 1) / 16 * 16;
        let name = format!("w{owner}");
        assert_eq!(row(&page, &name)["cached_tokens"], held, "{body}: {page:#}");
        let (answer, decided) = cluster.post_decided(PATH, &text).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!((decided.worker, decided.cached_tokens), (name, held));
        // The engine's own count agrees, and the router answers without it.
        let counted = cluster
            .post("/v1/messages/count_tokens", text.clone())
            .await;
        assert_eq!(counted.json(), json!({ "input_tokens": tokens }));
    }
    let counts = cluster.metric("warmroute_requests_total", &["api=\"count_tokens\""]);
    assert_eq!(counts.await, 0.0);
}

#[tokio::test]
async fn a_billing_header_does_not_spoil_the_prefix() {
    let folder = Folder::new();
    let cluster = cluster_with_events(vec![folder.engine(); 2], folder.model(), |_| {}).await;
    let body = |number: u32| {
        let mut body = bodies().remove(1);
        let header = json!({"type": "text", "text": format!("{HEADER}{number};")});
        body["system"].as_array_mut().unwrap().insert(0, header);
        body
    };
    let (_, first) = cluster.post_decided(PATH, &body(1).to_string()).await;
    let owner = usize::from(first.worker == "w1");
    let sent = cluster.engines[owner].last_post().await;
    assert!(!String::from_utf8_lossy(&sent.body).contains("billing"));
    cluster.wait_for_kv_events(owner).await;
    let (answer, second) = cluster.post_decided(PATH, &body(2).to_string()).await;
    assert_eq!(second.worker, first.worker);
    assert!(second.cached_tokens >= 48, "{second:?}");
    let usage = &answer.json()["usage"];
    assert_eq!(usage["cache_read_input_tokens"], second.cached_tokens);
}

#[tokio::test]
async fn engines_tokenize_messages_too() {
    let folder = Folder::new();
    let settings = warmroute::sim::worker::Settings {
        enable_scale_out: true,
        ..folder.engine()
    };
    let cluster = cluster_with_events(vec![settings], tokenized_by_engine(), patient).await;
    for body in bodies().into_iter().take(3) {
        let answer = cluster.post_to_engine(0, PATH, &body.to_string()).await;
        let page = explained(&cluster, &body).await;
        assert_eq!(page["tokens_known"], true, "{page:#}");
        assert_eq!(page["prompt_tokens"], prompt_tokens(&answer), "{body}");
    }
}
