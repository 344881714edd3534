//! KV transfers between two workers without faults.

use serde_json::json;

use super::event_clients::{Subscriber, with_events};
use super::*;
use crate::kv::event::Event;

pub(super) const PATHS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

pub(super) fn settings(role: Role, connector: Connector) -> Settings {
    Settings {
        decode_ms: 1,
        transfer: TransferSettings {
            role: Some(role),
            connector: Some(connector),
            connect_ms: 50,
            ..TransferSettings::default()
        },
        ..Settings::default()
    }
}

/// A prefill and a decode worker, and who their requests are for.
pub(super) struct Pair {
    pub(super) prefill: Running,
    pub(super) decode: Running,
    pub(super) connector: Connector,
}

/// What a request asks, of the same prompt on each path.
pub(super) fn body(path: &str, prompt: &str, tokens: usize) -> Value {
    match path {
        "/v1/chat/completions" => {
            json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens})
        }
        "/v1/completions" => json!({"prompt": prompt, "max_tokens": tokens}),
        _ => json!({"input": prompt, "max_output_tokens": tokens}),
    }
}

pub(super) fn with(mut body: Value, params: &Value) -> String {
    body["kv_transfer_params"] = params.clone();
    body.to_string()
}

/// What was said, whole or streamed, in any of the shapes.
pub(super) fn text(answer: &Value) -> &str {
    let chat = &answer["choices"][0]["message"]["content"];
    let completion = &answer["choices"][0]["text"];
    let response = &answer["output"][0]["content"][0]["text"];
    let texts = [chat, completion, response];
    texts.iter().find_map(|text| text.as_str()).unwrap_or("")
}

pub(super) fn long(word: &str) -> String {
    format!("{word} and so on ").repeat(20)
}

impl Pair {
    pub(super) async fn start(connector: Connector) -> Self {
        Self::of(
            settings(Role::Prefill, connector),
            settings(Role::Decode, connector),
        )
        .await
    }

    pub(super) async fn of(prefill: Settings, decode: Settings) -> Self {
        let connector = prefill.transfer.connector.unwrap();
        Self {
            prefill: Running::start(prefill).await,
            decode: Running::start(decode).await,
            connector,
        }
    }

    /// What a router adds to the first leg.
    pub(super) fn first(&self, transfer: &str) -> Value {
        match self.connector {
            Connector::Nixl => json!({"do_remote_decode": true, "do_remote_prefill": false}),
            Connector::Mooncake | Connector::Moriio => {
                json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer})
            }
        }
    }

    /// What it adds to the second, of the first one's answer.
    pub(super) async fn second(&self, transfer: &str, answer: &Value) -> Value {
        match self.connector {
            Connector::Nixl | Connector::Moriio => answer["kv_transfer_params"].clone(),
            Connector::Mooncake => {
                let bootstrap = self.prefill.handle.bootstrap().unwrap();
                let page = get(bootstrap, "/query").await;
                json!({
                    "do_remote_decode": false,
                    "do_remote_prefill": true,
                    "remote_bootstrap_addr": format!("http://{bootstrap}"),
                    "remote_engine_id": page["0"]["engine_id"],
                    "transfer_id": transfer,
                })
            }
        }
    }

    /// The first leg; what the second is to carry.
    pub(super) async fn prefill(&self, path: &str, prompt: &str, transfer: &str) -> Value {
        let leg = with(body(path, prompt, 1), &self.first(transfer));
        let answer = self.prefill.post_json(path, &leg).await;
        self.second(transfer, &answer).await
    }

    pub(super) async fn stop(self) {
        self.prefill.stop().await;
        self.decode.stop().await;
    }
}

async fn get(address: SocketAddr, path: &str) -> Value {
    let mut stream = TcpStream::connect(address).await.unwrap();
    write(&mut stream, "GET", path, "", "connection: close\r\n").await;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap()
}

#[tokio::test]
async fn a_prompt_that_was_handed_over_is_answered_as_one_that_was_not() {
    for connector in [Connector::Nixl, Connector::Mooncake, Connector::Moriio] {
        let pair = Pair::start(connector).await;
        for (place, path) in PATHS.into_iter().enumerate() {
            let prompt = long(path);
            let whole = Running::fast().await;
            let plain = body(path, &prompt, 5).to_string();
            let expected = whole.post_json(path, &plain).await;
            whole.stop().await;
            let params = pair.prefill(path, &prompt, &format!("x{place}")).await;
            let stats = pair.prefill.handle.kv_transfers();
            assert_eq!((stats.pinned, stats.granted), (1, place as u64 + 1));
            assert!(stats.pinned_blocks > 5, "{stats:?}");

            let leg = with(body(path, &prompt, 5), &params);
            let answer = pair.decode.post_json(path, &leg).await;
            assert_eq!(text(&answer), text(&expected), "{answer}");
            assert_eq!(answer["kv_transfer_params"], Value::Null);
            let stats = pair.prefill.handle.kv_transfers();
            assert_eq!((stats.pinned, stats.pinned_blocks), (0, 0));
            assert_eq!(stats.fetched, place as u64 + 1);
        }
        let counters = pair.decode.handle.counters();
        let stats = pair.decode.handle.kv_transfers();
        assert_eq!(counters.received_tokens, counters.prompt_tokens);
        assert_eq!((stats.decode_legs, stats.received), (3, 3));
        assert_eq!((stats.wrong_uses, stats.wrong_role), (0, 0));
        let page = pair.decode.ask("GET", "/metrics", "").await;
        let tokens = counters.received_tokens as f64;
        let line = format!("source=\"external_kv_transfer\"}} {tokens:?}\n");
        assert!(page.contains(&line), "{line}: {page}");
        pair.stop().await;
    }
}

#[tokio::test]
async fn a_second_prompt_brings_only_what_is_missing_and_usage_says_what_its_connector_knows() {
    for connector in [Connector::Nixl, Connector::Mooncake] {
        let pair = Pair::start(connector).await;
        let path = "/v1/chat/completions";
        let prompt = long("a question");
        let cached = |answer: &Value| {
            let details = &answer["usage"]["prompt_tokens_details"];
            (
                details["cached_tokens"].as_u64(),
                details["created_cache_tokens"].as_u64(),
            )
        };
        for round in 0..2 {
            let params = pair.prefill(path, &prompt, &format!("x{round}")).await;
            let leg = with(body(path, &prompt, 5), &params);
            let answer = pair.decode.post_json(path, &leg).await;
            let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
            let whole_blocks = (tokens - 1) / 16 * 16;
            let expected = match (connector, round) {
                (Connector::Nixl | Connector::Moriio, 0) => 0,
                (Connector::Nixl | Connector::Moriio, _) => whole_blocks,
                (Connector::Mooncake, _) => tokens,
            };
            assert_eq!(cached(&answer), (Some(expected), Some(0)), "{connector:?}");
            let received = pair.decode.handle.kv_transfers().received_tokens;
            let missing = if round == 0 { 0 } else { tokens - whole_blocks };
            assert_eq!(received, tokens + missing);
        }
        pair.stop().await;
    }
}

#[tokio::test]
async fn parameters_show_whole_and_at_the_end_of_a_response_and_in_no_other_stream() {
    let pair = Pair::start(Connector::Nixl).await;
    for path in PATHS {
        let leg = with(body(path, &long(path), 1), &pair.first(""));
        let answer = pair.prefill.post_json(path, &leg).await;
        let params = &answer["kv_transfer_params"];
        assert_eq!(params["do_remote_prefill"], true);
        assert_eq!(params["remote_port"], pair.prefill.addr.port());
        let blocks = params["remote_block_ids"][0].as_array().unwrap().len();
        let tokens = params["remote_num_tokens"].as_u64().unwrap() as usize;
        assert_eq!(blocks, tokens.div_ceil(16));

        let stream = pair.prefill.ask("POST", path, &streamed(&leg)).await;
        let shows = stream.contains("remote_block_ids");
        assert_eq!(shows, path == "/v1/responses", "{stream}");
    }
    // Where those of two streams are is unknown.
    assert_eq!(pair.prefill.handle.kv_transfers().pinned, 6);
    pair.stop().await;
}

#[tokio::test]
async fn a_chat_begins_with_its_role_and_a_response_with_itself_before_the_transfer() {
    let pair = Pair::start(Connector::Nixl).await;
    pair.decode.handle.set_faults(Faults {
        transfer: crate::sim::fault::TransferFaults {
            transfer_hangs: true,
            ..Default::default()
        },
        ..Faults::default()
    });
    for (path, opening) in [
        ("/v1/chat/completions", r#""delta":{"role":"assistant""#),
        ("/v1/responses", "event: response.in_progress"),
    ] {
        let params = pair.prefill(path, &long(path), "").await;
        let leg = with(body(path, &long(path), 5), &params);
        let mut stream = pair.decode.send("POST", path, &streamed(&leg)).await;
        let started = read_until(&mut stream, opening).await;
        assert!(!started.contains("output_item"), "{started}");
    }
    pair.decode
        .eventually("both are gone", |handle| {
            handle.kv_transfers().aborted_decode_legs == 2
        })
        .await;
    pair.stop().await;
}

#[tokio::test]
async fn mooncake_legs_may_come_in_any_order() {
    let pair = Pair::start(Connector::Mooncake).await;
    let path = "/v1/chat/completions";
    let prompt = long("which comes first");
    let params = pair.second("x", &Value::Null).await;
    let leg = with(body(path, &prompt, 5), &params);
    let (answer, _) = tokio::join!(pair.decode.post_json(path, &leg), async {
        pair.decode
            .eventually("it waits", |handle| handle.kv_transfers().decode_legs == 1)
            .await;
        pair.prefill(path, &prompt, "x").await
    });
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    assert_eq!(pair.prefill.handle.kv_transfers().fetched, 1);
    pair.stop().await;
}

#[tokio::test]
async fn a_restarted_engine_is_another_one() {
    let mut ids = Vec::new();
    for _ in 0..2 {
        let worker = Running::start(settings(Role::Prefill, Connector::Mooncake)).await;
        let page = get(worker.handle.bootstrap().unwrap(), "/query").await;
        ids.push(page["0"]["engine_id"].as_str().unwrap().to_owned());
        worker.stop().await;
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!(ids[0].len(), 36);
}

#[tokio::test]
async fn what_was_received_is_reported_as_stored_under_the_same_names() {
    let events = |role| Settings {
        kv: with_events().kv,
        ..settings(role, Connector::Mooncake)
    };
    let pair = Pair::of(events(Role::Prefill), events(Role::Decode)).await;
    let mut subscriber = Subscriber::join(&pair.decode, 0).await;
    let (path, prompt) = ("/v1/completions", long("stored"));
    let params = pair.prefill(path, &prompt, "x").await;
    let leg = with(body(path, &prompt, 1), &params);
    pair.decode.post_json(path, &leg).await;
    let mut events = subscriber.next().await.batch().events;
    let Some(Event::Stored(stored)) = events.pop() else {
        panic!("{events:?}");
    };
    let at_prefill = pair.prefill.handle.cache_contents(0).blocks;
    assert_eq!(stored.hashes.len(), at_prefill.len());
    pair.stop().await;
}
