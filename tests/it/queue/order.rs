//! Who is next.

use serde_json::json;
use warmroute::openai::tenant::TenantSpec;

use super::{Blocker, Waiter, block, cluster, wait, waiting, with_queue};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::failures::several_clients;

/// The first words of what the first engine got after its first request, in their order.
pub(super) async fn arrivals(cluster: &Cluster) -> Vec<String> {
    let stats = cluster.engines[0].stats().await;
    let posts = stats.last.iter().filter(|request| request.method == "POST");
    let label = |body: &[u8]| {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap();
        let text = body["messages"][0]["content"].as_str().unwrap();
        text.split(' ').next().unwrap().to_owned()
    };
    posts.map(|post| label(&post.body)).skip(1).collect()
}

/// Frees the worker, and the order in which the engine got the waiting requests.
async fn released(cluster: &Cluster, blocker: Blocker, waiters: Vec<Waiter>) -> Vec<String> {
    drop(blocker);
    for waiter in waiters {
        let answer = waiter.answer().await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    arrivals(cluster).await
}

#[tokio::test]
async fn a_higher_priority_is_earlier() {
    let cluster = cluster(1, |settings| {
        settings.objectives = [("interactive".to_owned(), -3)].into();
    })
    .await;
    let blocker = block(&cluster, "busy ").await;
    let mut waiters = Vec::new();
    let body = |label: &str, field: &str| {
        chat(&format!("{label} x"), 1, true).replacen('{', &format!("{{{field}"), 1)
    };
    let none: &[(&str, &str)] = &[];
    for (headers, body) in [
        (none, body("vllm", "\"priority\":9,")),
        (none, body("flex", "\"service_tier\":\"flex\",")),
        (
            &[("x-warmroute-priority", "-20")],
            body("header", "\"priority\":-5,"),
        ),
        (
            &[("x-llm-d-inference-objective", "interactive")],
            body("objective", ""),
        ),
        // A client may not rise.
        (&[("x-warmroute-priority", "7")], body("plain", "")),
    ] {
        waiters.push(wait(&cluster, headers, body).await);
    }
    let order = released(&cluster, blocker, waiters).await;
    assert_eq!(order[0], "plain", "{order:?}");
    // Within one class in their order.
    assert_eq!(order[1..], ["vllm", "flex", "header", "objective"]);
}

fn tenant(name: &str, priority: i32) -> TenantSpec {
    TenantSpec {
        priority,
        ..crate::cluster::tenant(name)
    }
}

/// Three tenants, and the worker busy with a request of one.
async fn tenants() -> Cluster {
    Cluster::start(vec![fast()], |config| {
        with_queue(config, |_| {});
        config.tenants = vec![tenant("flood", 0), tenant("quiet", 0), tenant("urgent", 5)];
    })
    .await
}

async fn block_as(cluster: &Cluster, key: &str) -> Waiter {
    super::set_hang(cluster, true).await;
    let bearer = format!("Bearer {key}");
    let blocker = super::send(
        cluster,
        &[("authorization", &bearer)],
        chat("busy x", 1, true),
    );
    eventually("the worker is busy", async || {
        cluster.requests().await == [1]
    })
    .await;
    super::set_hang(cluster, false).await;
    blocker
}

#[tokio::test]
async fn tenants_take_turns_however_many_requests_one_has() {
    let cluster = tenants().await;
    let blocker = block_as(&cluster, "sk-flood").await;
    let mut waiters = Vec::new();
    for (key, label) in [("sk-flood", "f"); 6]
        .into_iter()
        .chain([("sk-quiet", "q"); 2])
    {
        let bearer = format!("Bearer {key}");
        let body = chat(&format!("{label} x"), 1, true);
        waiters.push(wait(&cluster, &[("authorization", &bearer)], body).await);
    }
    drop(blocker);
    for waiter in waiters {
        assert_eq!(waiter.answer().await.status, 200);
    }
    let order = arrivals(&cluster).await.concat();
    assert_eq!(order, "fqfqffff");
}

#[tokio::test]
async fn background_responses_of_several_addresses_take_turns_without_tenants() {
    let cluster = Cluster::start(vec![fast()], |config| {
        with_queue(config, |_| {});
        several_clients(config);
    })
    .await;
    let blocker = block(&cluster, "busy ").await;
    let clients = [("192.0.2.1", "flood"); 4].into_iter();
    for (number, (address, label)) in (1..).zip(clients.chain([("192.0.2.2", "quiet"); 2])) {
        let body =
            json!({"model": "sim", "input": label, "max_output_tokens": 1, "background": true});
        let headers = [("x-forwarded-for", address)];
        let (api, path) = (cluster.router.api, "/v1/responses");
        let created = client::send(api, "POST", path, &headers, body.to_string()).await;
        assert_eq!(created.status, 200, "{}", created.text());
        eventually("it waits", async || waiting(&cluster).await == number).await;
    }
    drop(blocker);
    let order = async || {
        let stats = cluster.engines[0].stats().await;
        let posts = stats.last.iter().filter(|request| request.method == "POST");
        let is_quiet = |body: &[u8]| String::from_utf8_lossy(body).contains("quiet");
        let labels = posts.map(|post| if is_quiet(&post.body) { "q" } else { "f" });
        labels.skip(1).collect::<String>()
    };
    eventually("all were sent", async || order().await.len() == 6).await;
    let order = order().await;
    assert!(order.ends_with("ff"), "{order}");
}

#[tokio::test]
async fn a_tenants_priority_counts_and_the_floor_of_the_others_too() {
    let cluster = tenants().await;
    let blocker = block_as(&cluster, "sk-flood").await;
    let mut waiters = Vec::new();
    for (key, label) in [("sk-quiet", "q"); 3]
        .into_iter()
        .chain([("sk-urgent", "u"); 9])
    {
        let bearer = format!("Bearer {key}");
        let body = chat(&format!("{label} x"), 1, true);
        waiters.push(wait(&cluster, &[("authorization", &bearer)], body).await);
    }
    drop(blocker);
    for waiter in waiters {
        assert_eq!(waiter.answer().await.status, 200);
    }
    let order = arrivals(&cluster).await.concat();
    // A fifth is the floor of class `normal`.
    assert_eq!(order, "uuuuuquuuuqq");
}
