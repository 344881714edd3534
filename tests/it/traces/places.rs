//! Where a try went: to which rank of a worker, and, after the stream's worker was lost, to which other worker.

use serde_json::json;
use warmroute::routing::Policy;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;
use warmroute::traces::settings::Protocol;

use super::collector::Collector;
use super::to;
use crate::cluster::{Cluster, Engine, chat, fast, telling};
use crate::kv_events::over_zmq;
use crate::model_names::named;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_try_names_the_dp_rank_that_it_is_pinned_to() {
    let collector = Collector::start().await;
    let settings = Settings {
        data_parallel_size: 2.try_into().unwrap(),
        ..telling()
    };
    let engine = Engine::here("w0", settings).await;
    let send = to(&collector, Protocol::Grpc);
    let listed = over_zmq(&engine);
    let cluster = Cluster::with(vec![engine], |config| {
        send(config);
        config.workers = vec![listed];
    })
    .await;
    cluster.all_up().await;
    for (number, text) in (1..).zip(["one", "two", "three", "four"]) {
        let answer = cluster.post(CHAT, chat(text, 2, false)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let received = cluster.engines[0].last_post().await.headers;
        let traces = collector.traces(number).await;
        let last = traces.last().unwrap();
        let rank = last.tries[0].get("warmroute.dp_rank");
        assert_eq!(received["x-data-parallel-rank"], rank, "{last:#?}");
        let decided = last.server.event("warmroute.decide");
        assert_eq!(decided["warmroute.dp_rank"], rank);
    }
}

#[tokio::test]
async fn a_worker_without_ranks_has_none() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], to(&collector, Protocol::Grpc)).await;
    cluster.post(CHAT, chat("one", 2, false)).await;
    let trace = collector.trace().await;
    assert_eq!(trace.tries[0].get("warmroute.dp_rank"), "");
}

#[tokio::test]
async fn a_stream_that_goes_on_elsewhere_has_a_span_at_each_worker_and_an_event_between() {
    let collector = Collector::start().await;
    let send = to(&collector, Protocol::Grpc);
    let cluster = Cluster::start(vec![fast(); 2], |config| {
        send(config);
        config.routing.policy = Policy::RoundRobin;
        config.models = named(json!([{"name": "sim", "stream_continuation": {}}]));
    })
    .await;
    let cut = Faults {
        cut_after_tokens: Some(4),
        ..Faults::default()
    };
    cluster.engines[0].fault(cut).await;
    let mut asked = 0;
    let trace = loop {
        asked += 1;
        let answer = cluster.post(CHAT, chat("tell me all", 12, true)).await;
        assert_eq!(answer.status, 200);
        let traces = collector.traces(asked).await;
        let mut traces = traces.into_iter();
        if let Some(trace) = traces.find(|trace| trace.tries.len() == 2) {
            break trace;
        }
        assert!(
            asked < 4,
            "one of two turns is that of the worker that cuts"
        );
    };
    let [lost, next] = &trace.tries[..] else {
        unreachable!()
    };
    assert_eq!(lost.get("warmroute.worker"), "w0");
    assert_eq!(next.get("warmroute.worker"), "w1");
    assert!(lost.is_error && !next.is_error && !trace.server.is_error);
    assert!(lost.end <= next.start, "one after the other");
    let event = trace.server.event("warmroute.continue");
    assert_eq!(event["warmroute.worker"], "w0");
    assert_eq!(event["warmroute.answer_tokens"], "4");
    let received = cluster.engines[1].last_post().await.headers;
    let expected = format!("00-{}-{}-01", trace.server.trace_id, next.id);
    assert_eq!(received["traceparent"], expected);
}

#[tokio::test]
async fn a_response_of_a_conversation_names_it() {
    let collector = Collector::start().await;
    let cluster = Cluster::start(vec![fast()], to(&collector, Protocol::Grpc)).await;
    let made = cluster.post("/v1/conversations", "{}").await;
    assert_eq!(made.status, 200, "{}", made.text());
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let body = json!({"model": "sim", "input": "once", "max_output_tokens": 2, "conversation": id});
    let answer = cluster.post("/v1/responses", body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let traces = collector.traces(2).await;
    let create = &traces[1];
    assert_eq!(create.server.name, "POST /v1/responses");
    for span in [&create.server, &create.tries[0]] {
        assert_eq!(span.get("gen_ai.conversation.id"), id, "{span:#?}");
    }
}
