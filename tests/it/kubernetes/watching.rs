//! What is listed and watched, without faults of the API server.

use serde_json::json;

use super::fake::FakeApi;
use super::*;

#[tokio::test]
async fn pods_of_all_pages_are_workers_and_others_are_not() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b", "c", "d", "e", "f", "g"]);
    let mut other = named_pod("x");
    other["metadata"]["labels"]["app"] = json!("other");
    api.put("pods", other);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a", "b", "c", "d", "e", "f", "g"]).await;
    assert_eq!(router.workers()["c"], ("127.1.0.3:8000".to_owned(), false));
    assert_eq!(api.count("list", "pods"), 3, "pages of three");
}

#[tokio::test]
async fn pods_that_come_and_go_do_so_within_a_moment() {
    let api = FakeApi::start().await;
    let router = Routed::start(&api, vllm()).await;
    put_pods(&api, &["a", "b"]);
    router.serves(&["a", "b"]).await;
    api.delete("pods", "a");
    router.serves(&["b"]).await;
    assert_eq!(router.workers().len(), 1, "a deleted pod is no worker");
    put_pods(&api, &["c"]);
    router.serves(&["b", "c"]).await;
    assert_eq!(api.count("list", "pods"), 1, "the rest came by the watch");
}

#[tokio::test]
async fn a_pod_that_is_not_ready_any_more_drains_and_keeps_its_load() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b"]);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a", "b"]).await;
    let id = |name: &str| {
        let snapshot = router.app.fleet().snapshot();
        let found = snapshot
            .workers
            .iter()
            .find(|status| &*status.worker.name == name);
        found.unwrap().worker.id
    };
    let before = id("a");
    for _ in 0..3 {
        api.put("pods", with_ready(named_pod("a"), false));
        router.serves(&["b"]).await;
        assert_eq!(router.workers()["a"], ("127.1.0.1:8000".to_owned(), true));
        api.put("pods", with_ready(named_pod("a"), true));
        router.serves(&["a", "b"]).await;
    }
    assert_eq!(id("a"), before, "the same worker, with its counters");
}

#[tokio::test]
async fn a_pod_that_is_being_deleted_drains_until_it_is_gone() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b"]);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a", "b"]).await;
    let mut leaving = named_pod("a");
    leaving["metadata"]["deletionTimestamp"] = json!("2026-11-01T00:00:00Z");
    api.put("pods", leaving);
    router.serves(&["b"]).await;
    assert!(router.workers()["a"].1, "it drains");
    api.delete("pods", "a");
    eventually("it is gone", async || !router.workers().contains_key("a")).await;
}

#[tokio::test]
async fn a_pod_joins_when_it_is_ready_for_the_first_time() {
    let api = FakeApi::start().await;
    let router = Routed::start(&api, vllm()).await;
    let mut starting = with_ready(named_pod("a"), false);
    starting["status"]["podIP"] = json!("");
    api.put("pods", starting);
    api.put("pods", with_ready(named_pod("a"), false));
    put_pods(&api, &["b"]);
    router.serves(&["b"]).await;
    assert_eq!(router.workers().len(), 1);
    assert!(router.metric("warmroute_kubernetes_pods", "starting").await > 0.0);
    put_pods(&api, &["a"]);
    router.serves(&["a", "b"]).await;
}

#[tokio::test]
async fn a_pod_whose_labels_do_not_match_any_more_gets_no_requests() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b"]);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a", "b"]).await;
    let mut quarantined = named_pod("a");
    quarantined["metadata"]["labels"]["app"] = json!("quarantined");
    api.put("pods", quarantined);
    router.serves(&["b"]).await;
    put_pods(&api, &["a"]);
    router.serves(&["a", "b"]).await;
}

#[tokio::test]
async fn a_pod_without_an_address_is_gone_and_one_with_another_address_is_there() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b"]);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a", "b"]).await;
    let mut moved = named_pod("a");
    moved["status"]["podIP"] = json!(null);
    moved["status"].as_object_mut().unwrap().remove("podIP");
    api.put("pods", moved.clone());
    router.serves(&["b"]).await;
    assert!(!router.workers().contains_key("a"));
    moved["status"]["podIP"] = json!("127.1.0.99");
    api.put("pods", moved);
    router.serves(&["a", "b"]).await;
    assert_eq!(router.workers()["a"].0, "127.1.0.99:8000");
}

#[tokio::test]
async fn another_pod_of_the_same_name_and_address_is_another_worker() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a"]);
    let router = Routed::start(&api, vllm()).await;
    router.serves(&["a"]).await;
    let id = || {
        router
            .app
            .fleet()
            .snapshot()
            .workers
            .first()
            .map(|status| status.worker.id)
    };
    let before = id();
    // A StatefulSet's pod, so fast that no moment without it is seen.
    let mut again = named_pod("a");
    again["metadata"]["uid"] = json!("another");
    api.put("pods", again);
    eventually("it is another worker", async || {
        id().is_some() && id() != before
    })
    .await;
    router.serves(&["a"]).await;
}

#[tokio::test]
async fn labels_say_role_and_topology() {
    let api = FakeApi::start().await;
    let mut prefill = named_pod("a");
    prefill["metadata"]["labels"]["llm-d.ai/role"] = json!("prefill");
    prefill["metadata"]["labels"]["zone"] = json!("z1");
    let mut odd = named_pod("b");
    odd["metadata"]["labels"]["llm-d.ai/role"] = json!("encode");
    api.put("pods", prefill);
    api.put("pods", odd);
    put_pods(&api, &["c"]);
    let file = kubeconfig(&api, &json!({}));
    let router = Routed::with_kubeconfig(file, vllm(), |config| {
        config.prefill_decode.connector = Some(warmroute::fleet::kv_transfer::Connector::Nixl);
        "zone".clone_into(&mut config.prefill_decode.topology);
    })
    .await;
    router.serves(&["a", "c"]).await;
    let snapshot = router.app.fleet().snapshot().clone();
    let worker = &snapshot
        .workers
        .iter()
        .find(|status| &*status.worker.name == "a")
        .unwrap()
        .worker;
    assert_eq!(worker.role, warmroute::fleet::Role::Prefill);
    assert_eq!(&*worker.labels["zone"], "z1");
    assert_eq!(
        router.metric("warmroute_kubernetes_pods", "left_out").await,
        1.0
    );
}
