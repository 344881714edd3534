//! Workers by an InferencePool.

use serde_json::{Value, json};
use warmroute::fleet::discovery::kubernetes::settings::InferencePool;

use super::fake::FakeApi;
use super::*;

fn of_pool() -> Settings {
    Settings {
        pods: None,
        inference_pool: Some(InferencePool {
            name: "pool".to_owned(),
        }),
        ..vllm()
    }
}

fn pool(app: &str, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "metadata": {"name": "pool"},
        "spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": ports},
    })
}

#[tokio::test]
async fn each_port_of_each_pod_is_a_worker_and_changes_of_the_pool_count() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b"]);
    let mut other = named_pod("c");
    other["metadata"]["labels"]["app"] = json!("other");
    api.put("pods", other);
    let mut elsewhere = pool("other", &[9_000]);
    elsewhere["metadata"]["name"] = json!("another");
    api.put("inferencepools", elsewhere);
    let router = Routed::start(&api, of_pool()).await;
    api.put("inferencepools", pool("vllm", &[8_000, 8_001]));
    router
        .serves(&["a:8000", "a:8001", "b:8000", "b:8001"])
        .await;
    assert_eq!(router.workers()["b:8001"].0, "127.1.0.2:8001");
    api.put("inferencepools", pool("vllm", &[8_000]));
    router.serves(&["a", "b"]).await;
    api.put("inferencepools", pool("other", &[8_000]));
    router.serves(&["c"]).await;
    // An empty selector would match every pod of the namespace.
    let mut everything = pool("vllm", &[8_000]);
    everything["spec"]["selector"]["matchLabels"] = json!({});
    api.put("inferencepools", everything);
    router.serves(&[]).await;
    api.put("inferencepools", pool("vllm", &[8_000]));
    router.serves(&["a", "b"]).await;
    api.delete("inferencepools", "pool");
    router.serves(&[]).await;
}
