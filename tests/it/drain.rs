//! What clients get whose requests outlast the drain: an end that they can tell from an answer's, whatever they asked for.

use std::time::Duration;

use serde_json::json;
use warmroute::config::Config;
use warmroute::sim::worker::Settings;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, chat, chat_only, eventually, generating, unhurried};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// More than an engine generates in a drain.
const ENDLESS: usize = 3_000;

fn short(config: &mut Config) {
    config.api.drain_timeout = Duration::from_secs(4);
}

/// A request of each kind that none of these drains can finish.
fn kinds(stream: bool) -> Vec<(&'static str, String)> {
    let unstored = json!({"model": "sim", "input": "unstored", "max_output_tokens": ENDLESS,
        "stream": stream, "store": false});
    let message = json!({"model": "sim", "max_tokens": ENDLESS, "stream": stream,
        "messages": [{"role": "user", "content": "a message"}]});
    let more = [
        (RESPONSES, unstored.to_string()),
        (MESSAGES, message.to_string()),
    ];
    generating(ENDLESS, stream)
        .into_iter()
        .chain(more)
        .collect()
}

/// The router ends as after any drain, and the engine has given up what ran.
async fn ends(cluster: &mut Cluster, requests: u64) {
    let child = cluster.router.child.as_mut().unwrap();
    let mut status = None;
    eventually("the router ends", async || {
        status = child.ended();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0));
    eventually("the engine has closed the requests", async || {
        cluster.engines[0].stats().await.aborted == requests
    })
    .await;
    let log = cluster.router.log();
    assert!(log.contains("the drain timeout is nearly over"), "{log}");
}

fn is_told_to_try_again(path: &str, answer: &Answer) {
    assert_eq!(answer.status, 503, "{path}: {}", answer.text());
    assert_eq!(answer.header("retry-after"), "1", "{path}");
    assert!(answer.text().contains("about to end"), "{}", answer.text());
    if path != MESSAGES {
        assert_eq!(answer.code(), "router_draining", "{path}");
    }
}

#[tokio::test]
async fn a_stream_that_outlasts_the_drain_ends_with_an_error_event() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], short).await;
    let kinds = kinds(true);
    let mut open = Vec::new();
    for (path, body) in &kinds {
        let mut stream = cluster.open(path, body).await;
        let begun = stream.until("\n\n").await;
        open.push((*path, stream, begun));
    }
    cluster.router.child.as_ref().unwrap().signal("TERM");
    for (path, mut stream, begun) in open {
        let (rest, is_whole) = stream.rest().await;
        let text = begun + &rest;
        assert!(is_whole, "{path}: {text}");
        assert!(text.contains("about to end"), "{path}: {text}");
        if path == MESSAGES {
            assert!(text.contains("event: error\n"), "{text}");
        } else if path == RESPONSES {
            assert!(text.contains("event: response.failed\n"), "{text}");
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        } else {
            assert!(text.contains(r#""code":"router_draining""#), "{text}");
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        }
    }
    ends(&mut cluster, 5).await;
}

#[tokio::test]
async fn a_whole_answer_that_outlasts_the_drain_is_503() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], short).await;
    let api = cluster.router.api;
    let mut asked = Vec::new();
    for (path, body) in kinds(false) {
        let answer = tokio::spawn(async move { client::post(api, path, body).await });
        asked.push((path, answer));
    }
    eventually("all run", async || {
        cluster.engines[0].stats().await.running == 5
    })
    .await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    for (path, answer) in asked {
        is_told_to_try_again(path, &answer.await.unwrap());
    }
    ends(&mut cluster, 5).await;
}

#[tokio::test]
async fn streams_of_one_http2_connection_end_with_an_error_event_as_well() {
    let mut cluster = Cluster::with_router_child(vec![unhurried()], short).await;
    let api = cluster.router.api;
    let bodies = (0..5)
        .map(|n| chat(&format!("{n}"), ENDLESS, true))
        .collect();
    let asked = tokio::spawn(async move { client::http2(api, CHAT, bodies).await });
    eventually("all run", async || {
        cluster.engines[0].stats().await.running == 5
    })
    .await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    for (status, text) in asked.await.unwrap() {
        assert_eq!(status, 200);
        assert!(text.contains(r#""code":"router_draining""#), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    ends(&mut cluster, 5).await;
}

#[tokio::test]
async fn a_response_of_an_engine_that_only_chats_ends_like_any_other() {
    let engine = Settings {
        decode_ms: 20,
        ..chat_only()
    };
    let mut cluster = Cluster::with_router_child(vec![engine], short).await;
    let ask = |stream: bool| {
        json!({"model": "sim", "input": "hello", "max_output_tokens": ENDLESS, "stream": stream})
            .to_string()
    };
    let (api, whole) = (cluster.router.api, ask(false));
    let whole = tokio::spawn(async move { client::post(api, RESPONSES, whole).await });
    let mut stream = cluster.open(RESPONSES, &ask(true)).await;
    stream.until("\n\n").await;
    eventually("both run", async || {
        cluster.engines[0].stats().await.running == 2
    })
    .await;
    cluster.router.child.as_ref().unwrap().signal("TERM");
    let (text, is_whole) = stream.rest().await;
    assert!(is_whole, "{text}");
    assert!(text.contains("event: response.failed\n"), "{text}");
    assert!(text.contains("about to end"), "{text}");
    is_told_to_try_again(RESPONSES, &whole.await.unwrap());
    ends(&mut cluster, 2).await;
}

#[tokio::test]
async fn signals_that_have_other_programs_open_their_logs_again_end_nothing() {
    let cluster = Cluster::with_router_child(vec![unhurried()], short).await;
    for name in ["USR1", "USR2"] {
        cluster.router.child.as_ref().unwrap().signal(name);
        let logged = format!("SIG{name}");
        eventually("the signal is logged", async || {
            cluster.router.log().contains(&logged)
        })
        .await;
    }
}
