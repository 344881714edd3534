//! Which requests are traced, and what workers get of the trace context.

use warmroute::traces::settings::Protocol;

use super::collector::Collector;
use super::{TRACE, to, traceparent};
use crate::client;
use crate::cluster::{Cluster, chat, fast};
use crate::reload::{Folder, applied, engines, reload, text, workers};

async fn send(cluster: &Cluster, headers: &[(&str, &str)]) -> Option<String> {
    let body = chat("once", 2, false);
    let api = cluster.router.api;
    let answer = client::send(api, "POST", "/v1/chat/completions", headers, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let received = cluster.engines[0].last_post().await.headers;
    received.get("traceparent").cloned()
}

#[tokio::test]
async fn flags_of_the_parent_decide_and_a_context_that_is_not_sampled_passes_unchanged() {
    let collector = Collector::start().await;
    for (count, ratio) in [(1, 0.0), (2, 1.0)] {
        let cluster = Cluster::start(vec![fast()], |config| {
            to(&collector, Protocol::Grpc)(config);
            config.traces.as_mut().unwrap().sample_ratio = ratio;
        })
        .await;
        let (off, on) = (traceparent(false), traceparent(true));
        let passed = send(&cluster, &[("traceparent", &off)]).await;
        assert_eq!(passed.as_deref(), Some(&*off), "{ratio}");
        let passed = send(&cluster, &[("traceparent", &on)]).await.unwrap();
        assert!(
            passed.starts_with(&format!("00-{TRACE}-")) && passed != on,
            "{ratio}: {passed}"
        );
        // Before the router goes.
        collector.traces(count).await;
    }
    let traces = collector.traces(2).await;
    assert_eq!(traces.len(), 2, "only those with flags 01");
    assert!(traces.iter().all(|trace| trace.server.trace_id == TRACE));
}

#[tokio::test]
async fn without_a_parent_the_ratio_decides() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], |config| {
        to(&collector, Protocol::Grpc)(config);
        config.traces.as_mut().unwrap().sample_ratio = 0.0;
    })
    .await;
    assert_eq!(send(&cluster, &[]).await, None);
    // Not a valid one, so that it is no parent; it passes as any other header does.
    assert_eq!(
        send(&cluster, &[("traceparent", "00-1")]).await.as_deref(),
        Some("00-1")
    );
    send(&cluster, &[("traceparent", &traceparent(true))]).await;
    assert_eq!(collector.traces(1).await.len(), 1, "none but the last");
}

#[tokio::test]
async fn with_traces_off_the_context_passes_unchanged() {
    let cluster = Cluster::fast(1).await;
    for is_sampled in [false, true] {
        let parent = traceparent(is_sampled);
        assert_eq!(
            send(&cluster, &[("traceparent", &parent)]).await,
            Some(parent)
        );
    }
}

#[tokio::test]
async fn a_reload_changes_the_ratio() {
    let collector = Collector::start().await;
    let folder = Folder::new();
    let engines = engines(1).await;
    let base = workers(&engines);
    let with = |ratio: &str| {
        let address = collector.address;
        let traces = format!("{{endpoint: 'http://{address}', sample_ratio: {ratio}}}");
        text(&format!("{base}traces: {traces}\n"))
    };
    let cluster = folder.start(engines, &with("0")).await;
    cluster.is_worker("w0", "health", "up").await;
    send(&cluster, &[]).await;
    folder.write(&with("1"));
    applied(&cluster).await;
    send(&cluster, &[]).await;
    assert_eq!(collector.traces(1).await.len(), 1, "none but the second");
    folder.write(&with("1").replace("http://", "http://other."));
    assert_eq!(
        reload(&cluster).await.status,
        422,
        "another collector needs a restart"
    );
}
