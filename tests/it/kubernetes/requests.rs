//! Requests, while Kubernetes takes workers away.

use super::fake::FakeApi;
use super::*;
use crate::client;
use crate::cluster::{Engine, chat, unhurried};

fn pod_of(engine: &Engine, name: &str) -> Value {
    pod(name, "127.0.0.1", engine.address.port())
}

#[tokio::test]
async fn a_worker_that_leaves_keeps_the_requests_that_it_has() {
    let api = FakeApi::start().await;
    let engines = [
        Engine::here("a", unhurried()).await,
        Engine::here("b", unhurried()).await,
    ];
    api.put("pods", pod_of(&engines[0], "a"));
    let router = Routed::start(&api, vllm()).await;
    let is_ready = async || {
        client::get(router.app.admin_address(), "/readyz")
            .await
            .status
            == 200
    };
    eventually("the worker takes requests", is_ready).await;
    let path = "/v1/chat/completions";
    engines[0].hold_after(3).await;
    let request = client::post(
        router.app.api_address(),
        path,
        chat("once upon a time", 60, true),
    );
    let request = tokio::spawn(request);
    eventually("it generates", async || {
        engines[0].stats().await.running == 1
    })
    .await;
    api.put("pods", pod_of(&engines[1], "b"));
    api.put("pods", with_ready(pod_of(&engines[0], "a"), false));
    router.serves(&["b"]).await;
    api.delete("pods", "a");
    eventually("it has left", async || !router.workers().contains_key("a")).await;
    assert_eq!(engines[0].stats().await.running, 1, "it still generates");
    engines[0].let_go().await;
    let answer = request.await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.text().contains("[DONE]"), "{}", answer.text());
    assert_eq!(engines[0].stats().await.finished, 1);
    assert_eq!(engines[1].stats().await.finished, 0);
    eventually("new requests go to the other one", is_ready).await;
    let answer = client::post(router.app.api_address(), path, chat("again", 2, false)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(engines[1].stats().await.finished, 1);
}
