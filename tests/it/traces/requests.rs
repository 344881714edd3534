//! Requests to one worker: plain, streamed, retried, failed, refused, in the background.

use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::json;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use warmroute::traces::settings::Protocol;

use super::collector::Collector;
use super::{PARENT, TRACE, to, traceparent};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::stub::Stub;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_plain_request_has_a_server_span_below_its_client_and_a_client_span_above_its_worker() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], to(&collector, Protocol::Grpc)).await;
    let body = json!({"model": "sim", "messages": [{"role": "user", "content": "my password"}],
        "max_tokens": 3, "temperature": 0.5});
    let parent = traceparent(true);
    let headers = [
        ("traceparent", &*parent),
        ("tracestate", "vendor=1"),
        ("authorization", "Bearer a-secret-key"),
    ];
    let path = format!("{CHAT}?key=query-secret");
    let answer = client::send(
        cluster.router.api,
        "POST",
        &path,
        &headers,
        body.to_string(),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let trace = collector.trace().await;
    let [tried] = &trace.tries[..] else {
        panic!("one try: {trace:#?}")
    };
    let server = &trace.server;
    assert_eq!(server.name, "POST /v1/chat/completions");
    assert_eq!(server.kind, SpanKind::Server);
    assert_eq!((&*server.trace_id, &*server.parent), (TRACE, PARENT));
    assert_eq!(server.get("http.response.status_code"), "200");
    assert_eq!(server.get("client.address"), "127.0.0.1");
    assert!(server.get("warmroute.request.id").starts_with("wr-"));
    assert!(!server.is_error && !tried.is_error);
    assert_eq!(tried.name, "chat sim");
    assert_eq!(tried.trace_id, TRACE);
    assert!(server.start <= tried.start && tried.start < tried.end && tried.end <= server.end);
    let usage = &answer.json()["usage"];
    let address = cluster.engines[0].address;
    let expected = [
        ("gen_ai.operation.name", "chat".to_owned()),
        ("gen_ai.request.model", "sim".to_owned()),
        ("gen_ai.request.max_tokens", "3".to_owned()),
        ("gen_ai.request.temperature", "0.5".to_owned()),
        ("gen_ai.request.stream", "false".to_owned()),
        (
            "gen_ai.response.id",
            answer.json()["id"].as_str().unwrap().to_owned(),
        ),
        ("gen_ai.response.finish_reasons", "length".to_owned()),
        (
            "gen_ai.usage.input_tokens",
            usage["prompt_tokens"].to_string(),
        ),
        ("gen_ai.usage.output_tokens", "3".to_owned()),
        ("openai.api.type", "chat_completions".to_owned()),
        ("server.address", "127.0.0.1".to_owned()),
        ("server.port", address.port().to_string()),
        ("warmroute.worker", "w0".to_owned()),
        ("warmroute.attempt", "1".to_owned()),
        ("warmroute.decision.reason", "cold".to_owned()),
    ];
    for (name, value) in expected {
        assert_eq!(tried.get(name), value, "{name}: {tried:#?}");
    }
    assert_eq!(server.event("warmroute.decide")["warmroute.worker"], "w0");
    // What the engine does is below the try.
    let received = cluster.engines[0].last_post().await.headers;
    assert_eq!(
        received["traceparent"],
        format!("00-{TRACE}-{}-01", tried.id)
    );
    assert_eq!(received["tracestate"], "vendor=1");
    // Nothing of the client but what the conventions name.
    let all = format!("{:?}", collector.spans());
    for secret in ["password", "a-secret-key", "query-secret"] {
        assert!(!all.contains(secret), "{secret}");
    }
    assert_eq!(collector.resource()["service.name"], "warmroute");
    assert_eq!(
        collector.paths(),
        ["/opentelemetry.proto.collector.trace.v1.TraceService/Export"]
    );
}

#[tokio::test]
async fn a_streamed_request_says_when_its_first_token_came() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], to(&collector, Protocol::Http)).await;
    let answer = cluster.post(CHAT, chat("once upon a time", 5, true)).await;
    assert_eq!(answer.status, 200);
    let trace = collector.trace().await;
    let tried = &trace.tries[0];
    assert_eq!(trace.server.parent, "");
    assert_eq!(tried.get("gen_ai.request.stream"), "true");
    assert_eq!(tried.get("gen_ai.response.finish_reasons"), "length");
    assert!(
        tried.get("gen_ai.response.id").starts_with("chatcmpl"),
        "{tried:#?}"
    );
    let first: f64 = tried
        .get("gen_ai.response.time_to_first_chunk")
        .parse()
        .unwrap();
    let took = (tried.end - tried.start) as f64 / 1e9;
    assert!(first > 0.0 && first <= took, "{first} of {took}");
    tried.event("warmroute.first_token");
    trace.server.event("warmroute.first_token");
    assert_eq!(collector.paths(), ["/v1/traces"]);
}

#[tokio::test]
async fn each_try_of_a_retried_request_is_a_span() {
    let collector = Collector::start().await;
    let busy =
        "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
    let busy = Stub::start(busy).await;
    let url = format!("http://{}", busy.address);
    let send = to(&collector, Protocol::Grpc);
    let cluster = Cluster::start(vec![fast()], |config| {
        send(config);
        config.workers.push(WorkerSpec {
            url,
            name: "busy".to_owned(),
            ..WorkerSpec::default()
        });
        config.routing.policy = warmroute::routing::Policy::RoundRobin;
    })
    .await;
    cluster.is_worker("busy", "health", "up").await;
    for _ in 0..2 {
        let answer = cluster.post(CHAT, chat("once upon a time", 2, false)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let traces = collector.traces(2).await;
    let retried = traces.iter().find(|trace| trace.tries.len() == 2);
    let retried = retried.unwrap_or_else(|| panic!("{traces:#?}"));
    let [failed, answered] = &retried.tries[..] else {
        unreachable!()
    };
    assert!(failed.is_error && !answered.is_error && !retried.server.is_error);
    assert_eq!(failed.get("error.type"), "refused");
    assert_eq!(failed.get("http.response.status_code"), "503");
    assert_eq!(
        (
            failed.get("warmroute.worker"),
            failed.get("warmroute.attempt")
        ),
        ("busy", "1")
    );
    assert_eq!(
        (
            answered.get("warmroute.worker"),
            answered.get("warmroute.attempt")
        ),
        ("w0", "2")
    );
    // Each with a context of its own.
    let seen = busy.last_head();
    assert!(seen.contains(&format!("-{}-01", failed.id)), "{seen}");
    let seen = cluster.engines[0].last_post().await.headers;
    assert_eq!(failed.trace_id, answered.trace_id);
    assert!(seen.contains_key("traceparent"));
}

#[tokio::test]
async fn a_request_that_no_worker_answers_is_an_error_and_one_that_is_wrong_is_none() {
    let collector = Collector::start().await;
    let settings = to(&collector, Protocol::Grpc);
    let mut cluster = Cluster::start(vec![fast()], |config| {
        settings(config);
        // The worker that is killed stays known.
        config.fleet.health.interval = Duration::from_secs(600);
    })
    .await;
    let wrong = cluster
        .post(CHAT, r#"{"model": "other", "messages": []}"#)
        .await;
    assert_eq!(wrong.status, 404, "{}", wrong.text());
    cluster.engines[0].kill().await;
    let failed = cluster.post(CHAT, chat("once", 2, false)).await;
    assert!(failed.status >= 500, "{}", failed.status);
    assert_eq!(cluster.get("/v1/nowhere/secret").await.status, 404);
    assert_eq!(cluster.get("/v1/models").await.status, 200);
    assert_eq!(cluster.get("/health").await.status, 200);
    let traces = collector.traces(4).await;
    let servers: Vec<_> = traces
        .iter()
        .map(|trace| {
            (
                &*trace.server.name,
                trace.server.is_error,
                trace.server.get("error.type"),
            )
        })
        .collect();
    let code = failed.code();
    let lost = match traces[1].server.get("error.type") {
        "worker_failed" => "worker_failed",
        _ => &code,
    };
    assert_eq!(
        servers,
        [
            ("POST /v1/chat/completions", false, &*wrong.code()),
            ("POST /v1/chat/completions", true, lost),
            ("GET", false, "unknown_url"),
            ("GET /v1/models", false, ""),
        ]
    );
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_spans() {
    let collector = Collector::start().await;
    let engine = crate::cluster::unhurried();
    let cluster = Cluster::start(vec![engine], to(&collector, Protocol::Grpc)).await;
    let mut open = cluster
        .open(CHAT, &chat("once upon a time", 500, true))
        .await;
    open.next().await.unwrap().unwrap();
    drop(open);
    let trace = collector.trace().await;
    assert_eq!(trace.server.get("error.type"), "client_disconnected");
    assert_eq!(trace.tries[0].get("error.type"), "client_disconnected");
}

#[tokio::test]
async fn the_tenant_is_named_and_its_key_is_not() {
    let collector = Collector::start().await;
    let send = to(&collector, Protocol::Grpc);
    let cluster = Cluster::start(vec![fast()], |config| {
        send(config);
        config.tenants = vec![TenantSpec {
            name: "team-a".to_owned(),
            keys: vec![Secret::new("key-of-team-a-0123456789")],
            ..TenantSpec::default()
        }];
    })
    .await;
    let key = [("authorization", "Bearer key-of-team-a-0123456789")];
    let body = chat("once", 2, false);
    let answer = client::send(cluster.router.api, "POST", CHAT, &key, body).await;
    assert_eq!(answer.status, 200);
    let trace = collector.trace().await;
    assert_eq!(trace.server.get("warmroute.tenant"), "team-a");
    assert!(!format!("{:?}", collector.spans()).contains("0123456789"));
}

#[tokio::test]
async fn a_background_response_has_a_trace_that_links_to_its_create() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], to(&collector, Protocol::Grpc)).await;
    let body = json!({"model": "sim", "input": "once upon a time", "max_output_tokens": 4,
        "background": true});
    let created = cluster.post("/v1/responses", body.to_string()).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let id = created.json()["id"].as_str().unwrap().to_owned();
    eventually("the run has ended", async || {
        let spans = collector.spans();
        spans.iter().any(|span| span.kind == SpanKind::Consumer)
    })
    .await;
    let traces = collector.traces(2).await;
    let create = &traces[0].server;
    assert_eq!(create.name, "POST /v1/responses");
    assert_eq!(traces[0].tries.len(), 0);
    let run = traces
        .iter()
        .find(|trace| trace.server.kind == SpanKind::Consumer);
    let run = run.unwrap();
    assert_eq!(
        run.server.links,
        [(create.trace_id.clone(), create.id.clone())]
    );
    assert_ne!(run.server.trace_id, create.trace_id);
    assert_eq!(run.server.get("warmroute.response.id"), id);
    assert_eq!(run.server.get("error.type"), "");
    let [tried] = &run.tries[..] else {
        panic!("one try: {run:#?}")
    };
    assert_eq!(tried.get("openai.api.type"), "responses");
    assert_eq!(tried.get("gen_ai.usage.output_tokens"), "4");
    let received = cluster.engines[0].last_post().await.headers;
    let expected = format!("00-{}-{}-01", run.server.trace_id, tried.id);
    assert_eq!(received["traceparent"], expected);
}
