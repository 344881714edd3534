//! The way to the collector: the environment, a collector that is away or silent, TLS, the end of a drain.

use std::fs;
use std::time::Duration;

use tokio::net::TcpListener;
use warmroute::config::Config;
use warmroute::http::tls::ClientSettings;
use warmroute::secret::Secret;
use warmroute::traces::settings::{Compression, Protocol};

use super::collector::Collector;
use super::{settings, to};
use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, config, eventually, fast};
use crate::localhost_tls::tls;
use crate::own_ports;

const CHAT: &str = "/v1/chat/completions";

async fn send(cluster: &Cluster) {
    let answer = cluster.post(CHAT, chat("once upon a time", 2, false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// Spans with an outcome.
async fn spans(cluster: &Cluster, outcome: &str) -> f64 {
    let outcome = format!("outcome=\"{outcome}\"");
    cluster
        .metric("warmroute_trace_spans_total", &[&outcome])
        .await
}

#[tokio::test]
async fn a_collector_that_is_away_is_not_felt_and_its_spans_are_counted() {
    let endpoint = format!("http://{}", own_ports::address());
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let mut traces = settings(endpoint.clone(), protocol);
        traces.advanced.timeout = Duration::from_millis(200);
        let cluster = Cluster::start(vec![fast()], |config| config.traces = Some(traces)).await;
        for _ in 0..5 {
            send(&cluster).await;
        }
        eventually("each span is counted", async || {
            spans(&cluster, "export_failed").await == 10.0
        })
        .await;
        assert_eq!(spans(&cluster, "exported").await, 0.0, "{protocol:?}");
    }
}

#[tokio::test]
async fn a_collector_that_never_answers_fills_the_queue_and_no_more() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut traces = settings(endpoint, Protocol::Grpc);
    traces.advanced.timeout = Duration::from_secs(60);
    traces.advanced.max_queue = 10;
    traces.advanced.max_batch = 2;
    let cluster = Cluster::start(vec![fast()], |config| config.traces = Some(traces)).await;
    for _ in 0..20 {
        send(&cluster).await;
    }
    // One batch is being sent, five records of two spans wait.
    eventually("the rest is dropped and counted", async || {
        spans(&cluster, "queue_full").await >= 26.0
    })
    .await;
    assert_eq!(spans(&cluster, "queue_full").await % 2.0, 0.0);
}

#[tokio::test]
async fn the_environment_turns_traces_on_and_the_end_of_the_process_sends_the_last_spans() {
    let collector = Collector::start().await;
    let engine = Engine::here("w0", fast()).await;
    let mut config = config();
    config.workers = vec![engine.listed()];
    let endpoint = format!("http://{}", collector.address);
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=team%20a"),
        ("OTEL_SERVICE_NAME", "edge"),
        ("OTEL_RESOURCE_ATTRIBUTES", "zone=a"),
        // Longer than the test.
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
        ("OTEL_TRACES_SAMPLER", "no_such_sampler"),
    ];
    let mut router = Router::child_in(&config, &environment).await;
    eventually("the router is ready", async || {
        client::get(router.admin, "/readyz").await.status == 200
    })
    .await;
    let answer = client::post(router.api, CHAT, chat("once", 2, false)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(collector.spans().len(), 0);
    let child = router.child.as_mut().unwrap();
    child.signal("TERM");
    eventually("the router has ended", async || child.ended().is_some()).await;
    assert_eq!(collector.trace().await.tries.len(), 1);
    let resource = collector.resource();
    assert_eq!(
        (&*resource["service.name"], &*resource["zone"]),
        ("edge", "a")
    );
    assert_eq!(collector.headers()["x-scope"], "team a");
    assert_eq!(collector.paths(), ["/v1/traces"]);
    assert!(
        router
            .log()
            .contains("OTEL_TRACES_SAMPLER=no_such_sampler is ignored")
    );
}

#[tokio::test]
async fn a_silent_collector_does_not_hold_up_the_end_of_the_process() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let traces = settings(endpoint, Protocol::Grpc);
    let change = |config: &mut Config| config.traces = Some(traces);
    let mut cluster = Cluster::with_router_child(vec![fast()], change).await;
    send(&cluster).await;
    let child = cluster.router.child.as_mut().unwrap();
    child.signal("TERM");
    eventually("the router has ended", async || child.ended().is_some()).await;
    let log = cluster.router.log();
    assert!(
        log.contains("the last spans were not exported in time"),
        "{log}"
    );
}

#[tokio::test]
async fn headers_and_compression_are_as_configured() {
    let collector = Collector::start().await;
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let change = to(&collector, protocol);
        let cluster = Cluster::start(vec![fast()], |config| {
            change(config);
            let traces = config.traces.as_mut().unwrap();
            let key = Secret::new("key-of-the-collector");
            traces.headers.insert("x-key".to_owned(), key);
            traces.compression = Compression::None;
        })
        .await;
        send(&cluster).await;
        eventually("its spans have come", async || {
            spans(&cluster, "exported").await == 2.0
        })
        .await;
        assert_eq!(
            collector.headers()["x-key"],
            "key-of-the-collector",
            "{protocol:?}"
        );
    }
}

#[tokio::test]
async fn a_collector_with_tls_gets_compressed_spans() {
    let (ca, acceptor) = tls(&["h2", "http/1.1"]);
    let (other_ca, _) = tls(&[]);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, pem: &str| {
        let path = folder.path().join(name);
        fs::write(&path, pem).unwrap();
        path.display().to_string()
    };
    let (good, bad) = (file("collector.crt", &ca), file("other.crt", &other_ca));
    let collector = Collector::start_with(Some(acceptor)).await;
    for (protocol, header) in [
        (Protocol::Grpc, "grpc-encoding"),
        (Protocol::Http, "content-encoding"),
    ] {
        for (ca, outcome) in [(&bad, "export_failed"), (&good, "exported")] {
            let before = collector.spans().len();
            let endpoint = format!("https://{}", collector.address);
            let mut traces = settings(endpoint, protocol);
            traces.compression = Compression::Gzip;
            traces.tls = Some(ClientSettings {
                ca: ca.clone(),
                ..ClientSettings::default()
            });
            let cluster = Cluster::start(vec![fast()], |config| config.traces = Some(traces)).await;
            send(&cluster).await;
            eventually("its spans are counted", async || {
                spans(&cluster, outcome).await == 2.0
            })
            .await;
            let received = collector.spans().len() - before;
            let expected = if outcome == "exported" { 2 } else { 0 };
            assert_eq!(received, expected, "{protocol:?} {outcome}");
        }
        assert_eq!(collector.headers()[header], "gzip", "{protocol:?}");
    }
}

#[test]
fn settings_have_their_place_in_problems() {
    let check = |traces: &str, expected: &str| {
        let text = format!("workers: [\"http://h:1\"]\ntraces: {traces}\n");
        let found = match Config::parse("test.yaml", &text) {
            Ok(_) => String::new(),
            Err(problems) => problems.to_string(),
        };
        match expected {
            "" => assert_eq!(found, "", "{traces}"),
            expected => assert!(found.contains(expected), "{traces}: {found}"),
        }
    };
    check("{}", "");
    check("{endpoint: \"http://otel:4317\", sample_ratio: 0.01}", "");
    check(
        "{protocol: http/protobuf, headers: {x-key: \"file:/nowhere\"}}",
        "traces.headers",
    );
    check("{endpoint: \"otel:4317\"}", "traces.endpoint");
    check("{sample_ratio: 2}", "traces.sample_ratio");
    check("{protocol: http/json}", "traces.protocol");
    check(
        "{endpoint: \"https://otel:4317\", tls: {ca: /nowhere.crt}}",
        "traces.tls.ca",
    );
}
