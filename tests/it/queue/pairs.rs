//! With disaggregated prefill/decode, room is judged where prompts are computed.

use warmroute::fleet::kv_transfer::Connector;
use warmroute::sim::worker::{self, Role, Settings, TransferSettings};

use super::{block, wait, waiting, with_queue};
use crate::cluster::{Cluster, chat, fast};

fn engine(role: Role) -> Settings {
    Settings {
        transfer: TransferSettings {
            role: Some(role),
            connector: Some(worker::Connector::Nixl),
            connect_ms: 50,
            ..TransferSettings::default()
        },
        ..fast()
    }
}

#[tokio::test]
async fn requests_wait_for_prefill_workers_although_decode_workers_are_idle() {
    let engines = vec![engine(Role::Prefill), engine(Role::Decode)];
    let cluster = Cluster::start(engines, |config| {
        with_queue(config, |_| {});
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
    })
    .await;
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
