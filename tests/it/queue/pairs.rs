//! With disaggregated prefill/decode, room is judged where prompts are computed.

use warmroute::fleet::kv_transfer::Connector;
use warmroute::sim::worker::{self, Role, Settings};

use super::{CHAT, block, send, wait, waiting, with_queue};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast, with_role};
use crate::patience::too_long;

fn engine(role: Role) -> Settings {
    with_role(fast(), worker::Connector::Nixl, role)
}

async fn pair() -> Cluster {
    let engines = vec![engine(Role::Prefill), engine(Role::Decode)];
    Cluster::start(engines, |config| {
        with_queue(config, |_| {});
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
    })
    .await
}

#[tokio::test]
async fn a_target_that_the_prefill_worker_cannot_meet_ends_the_wait() {
    let cluster = pair().await;
    let _blocker = block(&cluster, "the prefill worker computes this ").await;
    let prompt = "and this one has to have its first token soon ".repeat(20);
    let headers = [("x-warmroute-ttft-target", "200ms")];
    let body = chat(&prompt, 2, true);
    let answer = client::send(cluster.router.api, "POST", CHAT, &headers, body).await;
    let ended = (answer.status, answer.code());
    assert_eq!(
        ended,
        (429, "ttft_target_unreachable".to_owned()),
        "{}",
        answer.text()
    );
    // The decode worker is idle, and computes prompts that are not worth a transfer.
    let body = chat("hi", 2, true);
    let answer = client::send(cluster.router.api, "POST", CHAT, &headers, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn requests_wait_for_prefill_workers_although_decode_workers_are_idle() {
    let cluster = pair().await;
    let blocker = block(&cluster, "the prefill worker computes this ").await;
    let prompt = "and later it computes this one ".repeat(20);
    let waiter = wait(&cluster, &[], chat(&prompt, 2, true)).await;
    drop(blocker);
    let answer = waiter.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let decision = answer.header("x-warmroute-decision");
    assert!(decision.contains("; queue_ms="), "{decision}");
    assert!(
        decision.contains("; disaggregated=yes; prefill=w0"),
        "{decision}"
    );
    assert_eq!(waiting(&cluster).await, 0);
}

#[tokio::test]
async fn a_prompt_that_is_not_worth_a_transfer_waits_for_no_prefill_worker() {
    let cluster = pair().await;
    let _blocker = block(&cluster, "the prefill worker computes this ").await;
    let prompt = "and later it computes this one ".repeat(20);
    let waiters: Vec<_> = (0..60)
        .map(|number| send(&cluster, &[], chat(&format!("{number} {prompt}"), 2, true)))
        .collect();
    eventually("all wait", async || waiting(&cluster).await == 60).await;
    let answer = tokio::time::timeout(too_long(), cluster.post(CHAT, chat("hi", 2, true))).await;
    let answer = answer.expect("it is sent");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(waiting(&cluster).await, 60);
    drop(waiters);
}
