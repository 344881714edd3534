//! Workers by the EndpointSlices of a Service.

use serde_json::{Value, json};
use warmroute::fleet::discovery::kubernetes::settings::Service;

use super::fake::FakeApi;
use super::*;

fn of_service() -> Settings {
    Settings {
        pods: None,
        service: Some(Service {
            name: "vllm".to_owned(),
            port: None,
        }),
        ..vllm()
    }
}

fn endpoint(name: &str, address: &str, conditions: &Value) -> Value {
    json!({
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name, "uid": format!("uid-{name}")},
    })
}

fn slice(name: &str, family: &str, endpoints: &[Value]) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    })
}

#[tokio::test]
async fn endpoints_of_all_slices_are_workers_and_drain_when_they_terminate() {
    let api = FakeApi::start().await;
    let ready = json!({"ready": true});
    let a = endpoint("a", "127.1.0.1", &ready);
    api.put(
        "endpointslices",
        slice("s1", "IPv4", std::slice::from_ref(&a)),
    );
    let b = endpoint("b", "127.1.0.2", &json!({"ready": true, "serving": true}));
    api.put("endpointslices", slice("s2", "IPv4", &[b]));
    let router = Routed::start(&api, of_service()).await;
    router.serves(&["a", "b"]).await;
    let leaving = json!({"ready": false, "serving": true, "terminating": true});
    api.put(
        "endpointslices",
        slice("s2", "IPv4", &[endpoint("b", "127.1.0.2", &leaving)]),
    );
    router.serves(&["a"]).await;
    assert_eq!(router.workers()["b"], ("127.1.0.2:8000".to_owned(), true));
    // It moves to the other slice while it leaves.
    api.put(
        "endpointslices",
        slice("s1", "IPv4", &[a, endpoint("b", "127.1.0.2", &leaving)]),
    );
    api.delete("endpointslices", "s2");
    router
        .keeps_serving(&["a"], Duration::from_millis(100))
        .await;
    assert!(router.workers()["b"].1);
    api.put("endpointslices", slice("s1", "IPv4", &[]));
    router.serves(&[]).await;
}

#[tokio::test]
async fn each_endpoint_without_the_port_is_counted_as_left_out() {
    let api = FakeApi::start().await;
    let ready = json!({"ready": true});
    let endpoints = ["a", "b"].map(|name| endpoint(name, "127.1.0.1", &ready));
    api.put("endpointslices", slice("s1", "IPv4", &endpoints));
    let mut entry = of_service();
    entry.service.as_mut().unwrap().port = Some(Port::Name("grpc".to_owned()));
    let router = Routed::start(&api, entry).await;
    eventually("both are left out", async || {
        router.metric("warmroute_kubernetes_pods", "left_out").await == 2.0
    })
    .await;
}

#[tokio::test]
async fn a_service_of_two_families_has_each_pod_once() {
    let api = FakeApi::start().await;
    let ready = json!({"ready": true});
    api.put(
        "endpointslices",
        slice("v6", "IPv6", &[endpoint("a", "::1", &ready)]),
    );
    api.put(
        "endpointslices",
        slice("v4", "IPv4", &[endpoint("a", "127.1.0.1", &ready)]),
    );
    let router = Routed::start(&api, of_service()).await;
    router.serves(&["a"]).await;
    assert_eq!(router.workers()["a"].0, "127.1.0.1:8000");
    // The controller empties one family's slice before the other's.
    api.put("endpointslices", slice("v4", "IPv4", &[]));
    router.serves(&[]).await;
    router.keeps_serving(&[], Duration::from_millis(100)).await;
}
