//! Who is next.

use warmroute::openai::tenant::TenantSpec;

use super::{Blocker, Waiter, block, cluster, wait, with_queue};
use crate::cluster::{Cluster, chat, eventually, fast};

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
