//! A request that is split over two workers.

use std::sync::Arc;

use serde_json::json;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::kv_transfer::Connector;
use warmroute::sim::worker::{self, Role, Settings, TransferSettings};
use warmroute::traces::settings::Protocol;

use super::collector::Collector;
use super::to;
use crate::client;
use crate::cluster::{self, Cluster, Router, chat, eventually, fast};
use crate::sglang_engine::{Rooms, SglangEngine};

fn engine(role: Role) -> Settings {
    Settings {
        transfer: TransferSettings {
            role: Some(role),
            connector: Some(worker::Connector::Nixl),
            ..TransferSettings::default()
        },
        ..fast()
    }
}

#[tokio::test]
async fn both_legs_are_spans_and_the_kv_transfer_an_event() {
    let collector = Collector::start().await;
    let send = to(&collector, Protocol::Grpc);
    let engines = vec![engine(Role::Prefill), engine(Role::Decode)];
    let cluster = Cluster::start(engines, |config| {
        send(config);
        config.prefill_decode.connector = Some(Connector::Nixl);
        config.prefill_decode.advanced.min_remote_tokens = 24;
    })
    .await;
    let text = "once upon a time there was a router that split requests. ".repeat(8);
    let body = chat(&text, 4, true);
    let body = body.replacen('{', "{\"stream_options\":{\"include_usage\":true},", 1);
    let answer = cluster.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let trace = collector.trace().await;
    let [prefill, decode] = &trace.tries[..] else {
        panic!("two legs: {trace:#?}")
    };
    assert_eq!(prefill.get("warmroute.leg"), "prefill");
    assert_eq!(decode.get("warmroute.leg"), "decode");
    assert_eq!(
        (
            prefill.get("warmroute.worker"),
            decode.get("warmroute.worker")
        ),
        ("w0", "w1")
    );
    assert!(prefill.end <= decode.start, "one after the other");
    assert_eq!(prefill.get("gen_ai.usage.output_tokens"), "1");
    assert_eq!(decode.get("gen_ai.usage.output_tokens"), "4");
    decode.event("warmroute.first_token");
    let names: Vec<_> = trace
        .server
        .events
        .iter()
        .map(|(name, _)| &**name)
        .collect();
    assert_eq!(
        names,
        [
            "warmroute.decide",
            "warmroute.prefill_leg",
            "warmroute.decide",
            "warmroute.kv_transfer",
            "warmroute.first_token",
        ]
    );
    let legs = [("prefill", prefill), ("decode", decode)];
    for ((leg, span), engine) in legs.into_iter().zip(&cluster.engines) {
        let received = engine.last_post().await.headers;
        let expected = format!("00-{}-{}-01", trace.server.trace_id, span.id);
        assert_eq!(received["traceparent"], expected, "{leg}");
    }
}

#[tokio::test]
async fn legs_that_run_together_are_spans_too() {
    let collector = Collector::start().await;
    let rooms = Arc::new(Rooms::default());
    let prefill = SglangEngine::start(warmroute::fleet::Role::Prefill, &rooms).await;
    let decode = SglangEngine::start(warmroute::fleet::Role::Decode, &rooms).await;
    let spec = |engine: &SglangEngine, name: &str, role| WorkerSpec {
        name: name.to_owned(),
        url: format!("http://{}", engine.address),
        role: Some(role),
        bootstrap: format!("http://{}", engine.bootstrap),
        ..WorkerSpec::default()
    };
    let mut config = cluster::config();
    to(&collector, Protocol::Grpc)(&mut config);
    config.prefill_decode.connector = Some(Connector::Sglang);
    config.workers = vec![
        spec(&prefill, "p0", warmroute::fleet::Role::Prefill),
        spec(&decode, "d0", warmroute::fleet::Role::Decode),
    ];
    let router = Router::here(&config).await;
    let body =
        json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": true});
    let mut asked = 0;
    eventually("a request is split", async || {
        asked += 1;
        let path = "/v1/chat/completions";
        let answer = client::send(router.api, "POST", path, &[], body.to_string()).await;
        answer.status == 200
    })
    .await;
    let traces = collector.traces(asked).await;
    let trace = traces.last().unwrap();
    let of_leg = |leg: &str| {
        let mut tries = trace.tries.iter();
        let found = tries.find(|span| span.get("warmroute.leg") == leg);
        found.unwrap_or_else(|| panic!("no {leg} leg: {trace:#?}"))
    };
    let (prefill, decode) = (of_leg("prefill"), of_leg("decode"));
    assert_eq!(prefill.get("warmroute.worker"), "p0");
    assert_eq!(decode.get("warmroute.worker"), "d0");
    assert!(!prefill.is_error && !decode.is_error, "{trace:#?}");
    assert!(
        prefill.start < decode.end && decode.start < prefill.end,
        "at the same time"
    );
    trace.server.event("warmroute.kv_transfer");
}
