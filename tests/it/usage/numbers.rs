//! Whose numbers count: what the engine reports, wherever it stands in the answer, or else what its events show.

use serde_json::{Value, json};

use super::lines;
use crate::client;
use crate::cluster::{Cluster, Router, eventually, unhurried};
use crate::reload::Folder;
use crate::stub::Stub;

/// A router with a usage log before one engine that answers with these bytes.
struct Counting {
    router: Router,
    folder: Folder,
}

impl Counting {
    async fn start(stub: &Stub) -> Self {
        let folder = Folder::new();
        let file = folder.path("usage.jsonl");
        let router = stub
            .router(|config| {
                config.usage.log = file.to_str().unwrap().to_owned();
                let listed = ["/score", "/generate"];
                config.api.requests.extra_endpoints = listed.map(str::to_owned).to_vec();
            })
            .await;
        Self { router, folder }
    }

    /// The only line of the log, once it is there.
    async fn line(&self) -> Value {
        let file = self.folder.path("usage.jsonl");
        eventually("the line is written", async || !lines(&file).is_empty()).await;
        lines(&file).remove(0)
    }
}

fn whole(answer: &Value) -> Vec<u8> {
    let text = answer.to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let length = text.len();
    format!("{head}content-length: {length}\r\n\r\n{text}").into()
}

fn stream_head() -> &'static str {
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
}

/// A JSON object whose members stand in this order.
fn ordered(members: &[(&str, Value)]) -> Value {
    members
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.clone()))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[tokio::test]
async fn usage_counts_wherever_it_stands_in_an_answer() {
    let usage =
        json!({"prompt_tokens": 12_525, "completion_tokens": 20_000, "total_tokens": 32_525});
    let long = "words ".repeat(50_000);
    let behind = |name| {
        ordered(&[
            ("object", json!("x")),
            ("usage", usage.clone()),
            (name, json!(long)),
        ])
    };
    let chat = (
        "/v1/chat/completions",
        json!({"model": "sim", "messages": [{"role": "user", "content": "a"}]}),
    );
    let rerank = (
        "/v1/rerank",
        json!({"model": "sim", "query": "a", "documents": ["b"]}),
    );
    let total = ordered(&[
        ("usage", json!({"total_tokens": 12_525})),
        ("z_results", json!([{"document": {"text": long}}])),
    ]);
    let of_sglang = ordered(&[
        ("meta_info", usage.clone()),
        ("output_ids", json!((0..90_000).collect::<Vec<_>>())),
    ]);
    let message = json!({"usage": {"input_tokens": 12_000, "cache_read_input_tokens": 525, "output_tokens": 20_000}, "z": long});
    for ((path, body), answer, output) in [
        (chat.clone(), behind("z_prompt_logprobs"), 20_000),
        (
            ("/v1/completions", json!({"model": "sim", "prompt": "a"})),
            behind("z_prompt_text"),
            20_000,
        ),
        (rerank.clone(), behind("z_results"), 20_000),
        (rerank, total, 0),
        (
            ("/v1/embeddings", json!({"model": "sim", "input": "a"})),
            behind("z_data"),
            20_000,
        ),
        (
            (
                "/v1/messages",
                json!({"model": "sim", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
            ),
            message,
            20_000,
        ),
        (
            ("/score", json!({"model": "sim", "text_1": "a"})),
            behind("z_data"),
            20_000,
        ),
        (
            ("/generate", json!({"model": "sim", "text": "a"})),
            of_sglang,
            20_000,
        ),
    ] {
        let stub = Stub::start(whole(&answer)).await;
        let counting = Counting::start(&stub).await;
        let got = client::post(counting.router.api, path, body.to_string()).await;
        assert_eq!(got.json(), answer, "{path}");
        let line = counting.line().await;
        let found = (
            &line["prompt_tokens"],
            &line["output_tokens"],
            &line["complete"],
        );
        assert_eq!(
            found,
            (&json!(12_525), &json!(output), &json!(true)),
            "{path}"
        );
    }
}

/// What a client that leaves got of a stream of events with a hundred words each, and what was counted.
async fn left_early(event: &str) -> (String, Value) {
    let stub = Stub::repeating(format!("{}{event}", stream_head()), event).await;
    let counting = Counting::start(&stub).await;
    let body = json!({"model": "sim", "prompt": "a", "stream": true, "stream_interval": 100});
    let mut open = client::open(
        counting.router.api,
        "POST",
        "/v1/completions",
        &[],
        body.to_string(),
    )
    .await;
    let mut got = String::new();
    while got.matches("word").count() < 1_500 {
        got += str::from_utf8(&open.next().await.unwrap().unwrap()).unwrap();
    }
    drop(open);
    (got, counting.line().await)
}

#[tokio::test]
async fn a_stream_of_many_tokens_an_event_counts_them_though_its_client_leaves() {
    let words = "word ".repeat(100);
    let listed: Vec<u32> = (0..100).collect();
    for choice in [
        json!({"text": words, "logprobs": null}),
        json!({"text": words, "token_ids": listed}),
        json!({"text": words, "logprobs": {"tokens": listed}}),
    ] {
        let event = format!("data: {}\n\n", json!({"choices": [choice]}));
        let (got, line) = left_early(&event).await;
        let (got, output) = (
            got.matches("word").count() as u64,
            line["output_tokens"].as_u64(),
        );
        assert_eq!(line["outcome"], "client_disconnected");
        // By the text it is an estimate.
        assert!((got..got * 2).contains(&output.unwrap()), "{got} {line}");
    }
    // The engine says it with each event, because the router asks.
    let usage = json!({"prompt_tokens": 9, "completion_tokens": 1_234});
    let event = json!({"choices": [{"text": words}], "usage": usage});
    let (got, line) = left_early(&format!("data: {event}\n\n")).await;
    assert_eq!(line["output_tokens"], 1_234, "{line}");
    assert!(!got.contains("usage"), "{got}");
}

#[tokio::test]
async fn the_usage_of_each_event_is_asked_for_and_kept_from_the_client() {
    let folder = Folder::new();
    let file = folder.path("usage.jsonl");
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.usage.log = file.to_str().unwrap().to_owned();
    })
    .await;
    let body = json!({"model": "sim", "prompt": "a b c", "max_tokens": 9, "stream": true, "stream_interval": 5});
    let mut asking = body.clone();
    asking["stream_options"] = json!({"include_usage": true});
    for (body, usages) in [(body, 0), (asking, 1)] {
        let answer = cluster.post("/v1/completions", body.to_string()).await;
        assert_eq!(
            answer.text().matches("\"usage\"").count(),
            usages,
            "{}",
            answer.text()
        );
        assert!(
            answer.text().ends_with("data: [DONE]\n\n"),
            "{}",
            answer.text()
        );
        let sent = cluster.engines[0].last_body().await;
        assert_eq!(
            sent["stream_options"]["continuous_usage_stats"], true,
            "{sent}"
        );
    }
    eventually("both lines are written", async || lines(&file).len() == 2).await;
    for line in lines(&file) {
        assert_eq!(
            (&line["output_tokens"], &line["complete"]),
            (&json!(9), &json!(true))
        );
    }
}
