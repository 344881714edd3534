//! KV transfers between two workers with faults and wrong parameters.

use serde_json::json;

use super::transfer::{PATHS, Pair, body, long, settings, text, with};
use super::*;
use crate::sim::fault::TransferFaults;

const PATH: &str = "/v1/chat/completions";

fn faults(transfer: TransferFaults) -> Faults {
    Faults {
        transfer,
        ..Faults::default()
    }
}

fn wrong_uses(pair: &Pair) -> (u64, u64) {
    let (prefill, decode) = (&pair.prefill.handle, &pair.decode.handle);
    (
        prefill.kv_transfers().wrong_uses,
        decode.kv_transfers().wrong_uses,
    )
}

impl Running {
    /// What comes within a moment, if it ends.
    async fn answers_soon(&self, path: &str, body: &str) -> Option<String> {
        let moment = Duration::from_millis(200);
        let answer = tokio::time::timeout(moment, self.ask("POST", path, body));
        answer.await.ok()
    }

    async fn ends_itself(self) {
        let limit = Duration::from_secs(10);
        tokio::time::timeout(limit, self.task)
            .await
            .unwrap()
            .unwrap();
        TcpStream::connect(self.addr).await.unwrap_err();
    }
}

#[tokio::test]
async fn nixl_parameters_used_twice_or_with_another_prompt_give_wrong_text_and_status_200() {
    let pair = Pair::start(Connector::Nixl).await;
    let prompt = long("once");
    let params = pair.prefill(PATH, &prompt, "").await;
    let leg = with(body(PATH, &prompt, 3), &params);
    let right = pair.decode.post_json(PATH, &leg).await;
    assert!(!text(&right).contains("BAD"));
    assert_eq!(wrong_uses(&pair), (0, 0));
    let again = pair.decode.post_json(PATH, &leg).await;
    assert_eq!(text(&again), "BAD BAD BAD ");
    assert_eq!(wrong_uses(&pair), (1, 1));

    let params = pair.prefill(PATH, &prompt, "").await;
    let other = with(body(PATH, &long("other"), 3), &params);
    let other = pair.decode.post_json(PATH, &other).await;
    assert_eq!(text(&other), "BAD BAD BAD ");
    assert_eq!(wrong_uses(&pair), (2, 2));
    assert_eq!(pair.prefill.handle.kv_transfers().pinned, 0);
    pair.stop().await;
}

#[tokio::test]
async fn blocks_that_no_engine_fetches_are_freed_after_their_time_and_wrong_from_then_on() {
    let mut prefill = settings(Role::Prefill, Connector::Nixl);
    prefill.transfer.lease_ms = Some(50);
    let pair = Pair::of(prefill, settings(Role::Decode, Connector::Nixl)).await;
    let prompt = long("late");
    let params = pair.prefill(PATH, &prompt, "").await;
    pair.prefill
        .eventually("its time is up", |handle| {
            handle.kv_transfers().expired == 1
        })
        .await;
    let stats = pair.prefill.handle.kv_transfers();
    assert_eq!((stats.pinned, stats.pinned_blocks), (0, 0));
    assert!(stats.pinned_blocks_peak > 0);
    let leg = with(body(PATH, &prompt, 3), &params);
    let late = pair.decode.post_json(PATH, &leg).await;
    assert_eq!(text(&late), "BAD BAD BAD ");
    assert_eq!(wrong_uses(&pair), (1, 1));
    pair.stop().await;
}

#[tokio::test]
async fn a_mooncake_decode_leg_without_its_prefill_leg_is_silent() {
    let pair = Pair::start(Connector::Mooncake).await;
    let prompt = long("alone");
    let params = pair.second("x", &Value::Null).await;
    let mut elsewhere = params.clone();
    elsewhere["remote_bootstrap_addr"] = json!("http://127.0.0.1:1");
    let bare = json!({"do_remote_prefill": true});
    for params in [params, elsewhere, bare] {
        let leg = with(body(PATH, &prompt, 3), &params);
        assert_eq!(pair.decode.answers_soon(PATH, &leg).await, None);
    }
    pair.decode
        .eventually("all have left", |handle| {
            handle.kv_transfers().aborted_decode_legs == 3
        })
        .await;
    // A used name is waited for like one that never was, but it is counted.
    let params = pair.prefill(PATH, &prompt, "y").await;
    let leg = with(body(PATH, &prompt, 3), &params);
    pair.decode.post_json(PATH, &leg).await;
    assert_eq!(wrong_uses(&pair), (0, 0));
    assert_eq!(pair.decode.answers_soon(PATH, &leg).await, None);
    assert_eq!(wrong_uses(&pair).0, 1);
    pair.stop().await;
}

#[tokio::test]
async fn mooncake_gives_up_a_prompt_whose_answer_ends_by_itself() {
    let pair = Pair::start(Connector::Mooncake).await;
    pair.prefill.handle.set_faults(Faults {
        stop_at_once: true,
        ..Faults::default()
    });
    let prompt = long("the end");
    let mut leg = body(PATH, &prompt, 1);
    let answer = pair
        .prefill
        .post_json(PATH, &with(leg.clone(), &pair.first("x")))
        .await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(pair.prefill.handle.kv_transfers().granted, 0);
    leg["ignore_eos"] = json!(true);
    let answer = pair
        .prefill
        .post_json(PATH, &with(leg, &pair.first("y")))
        .await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(pair.prefill.handle.kv_transfers().granted, 1);
    pair.stop().await;
}

#[tokio::test]
async fn a_transfer_from_an_engine_that_is_gone_fails_in_the_shape_of_its_api() {
    for path in PATHS {
        let pair = Pair::start(Connector::Nixl).await;
        let prompt = long("gone");
        let params = pair.prefill(path, &prompt, "").await;
        pair.prefill.stop().await;
        let leg = with(body(path, &prompt, 3), &params);
        let whole = pair.decode.ask("POST", path, &leg).await;
        assert!(whole.starts_with("HTTP/1.1 500 "), "{whole}");
        let error = r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#;
        assert!(whole.ends_with(error), "{whole}");
        let stream = pair.decode.ask("POST", path, &streamed(&leg)).await;
        assert!(stream.starts_with("HTTP/1.1 200 "), "{stream}");
        let has_event =
            stream.contains("data: {\"error\": {\"message\": \"Internal server error\"");
        let has_end = stream.ends_with("0\r\n\r\n");
        let is_response = path == "/v1/responses";
        assert_eq!(
            (has_event, has_end),
            (!is_response, !is_response),
            "{stream}"
        );
        assert_eq!(pair.decode.handle.kv_transfers().failed_transfers, 2);
        pair.decode.stop().await;
    }
}

#[tokio::test]
async fn a_decode_engine_that_refuses_frees_the_blocks() {
    let pair = Pair::start(Connector::Nixl).await;
    let prompt = long("refused");
    let params = pair.prefill(PATH, &prompt, "").await;
    let mut leg = body(PATH, &prompt, 3);
    leg["model"] = json!("nope");
    let refused = pair.decode.ask("POST", PATH, &with(leg, &params)).await;
    assert!(refused.starts_with("HTTP/1.1 404 "), "{refused}");
    let stats = pair.prefill.handle.kv_transfers();
    assert_eq!((stats.released, stats.pinned), (1, 0));
    pair.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_a_prefill_leg_leaves_nothing_pinned() {
    let mut slow = settings(Role::Prefill, Connector::Nixl);
    slow.prefill_tokens_per_second = std::num::NonZeroU32::new(10).unwrap();
    let pair = Pair::of(slow, settings(Role::Decode, Connector::Nixl)).await;
    let leg = with(body(PATH, &long("leaves"), 1), &pair.first(""));
    let stream = pair.prefill.send("POST", PATH, &leg).await;
    pair.prefill
        .eventually("it runs", |handle| handle.gauges().running == 1)
        .await;
    drop(stream);
    pair.prefill
        .eventually("it is gone", |handle| {
            handle.kv_transfers().aborted_prefill_legs == 1
        })
        .await;
    let stats = pair.prefill.handle.kv_transfers();
    assert_eq!((stats.granted, stats.pinned), (0, 0));
    assert_eq!(pair.prefill.handle.gauges(), Gauges::default());
    pair.stop().await;
}

#[tokio::test]
async fn parameters_at_the_wrong_role_kill_the_engine_and_then_the_process() {
    for connector in [Connector::Nixl, Connector::Mooncake] {
        for role in [Role::Prefill, Role::Decode] {
            let worker = Running::start(settings(role, connector)).await;
            let params = match role {
                Role::Prefill => json!({"do_remote_prefill": true, "remote_block_ids": [[1]]}),
                Role::Decode | Role::Both => json!({"do_remote_decode": true}),
            };
            let leg = with(body(PATH, "x", 3), &params);
            let answer = worker.ask("POST", PATH, &leg).await;
            assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
            assert!(answer.contains("EngineCore encountered"), "{answer}");
            let health = worker.ask("GET", "/health", "").await;
            assert!(health.starts_with("HTTP/1.1 503 "), "{health}");
            assert_eq!(worker.handle.kv_transfers().wrong_role, 1);
            worker.ends_itself().await;
        }
    }
}

#[tokio::test]
async fn a_nixl_decode_leg_without_blocks_kills_the_engine_and_all_it_runs() {
    let worker = Running::start(settings(Role::Decode, Connector::Nixl)).await;
    let endless = streamed(&CHAT.replace("\"max_tokens\":5", "\"max_tokens\":30000"));
    let mut other = worker.send("POST", PATH, &endless).await;
    read_until(&mut other, r#""delta":{"content""#).await;
    let leg = with(body(PATH, "x", 3), &json!({"do_remote_prefill": true}));
    let answer = worker.ask("POST", PATH, &leg).await;
    assert!(answer.contains("EngineCore encountered"), "{answer}");
    let ended = read_until(&mut other, "[DONE]").await;
    assert!(ended.contains("EngineCore encountered"));
    worker.ends_itself().await;
}

#[tokio::test]
async fn without_a_connector_parameters_are_not_looked_at_but_counted() {
    let worker = Running::fast().await;
    let leg = with(body(PATH, "x", 3), &json!({"do_remote_prefill": true}));
    let answer = worker.post_json(PATH, &leg).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(worker.handle.kv_transfers().wrong_role, 1);
    worker.stop().await;
}

#[tokio::test]
async fn it_can_fail_at_each_point() {
    let pair = Pair::start(Connector::Nixl).await;
    let leg = with(body(PATH, &long("p"), 1), &pair.first(""));

    pair.prefill.handle.set_faults(faults(TransferFaults {
        no_params: true,
        ..TransferFaults::default()
    }));
    let answer = pair.prefill.post_json(PATH, &leg).await;
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(pair.prefill.handle.kv_transfers().pinned, 0);

    pair.prefill.handle.set_faults(faults(TransferFaults {
        die_after_answer: true,
        ..TransferFaults::default()
    }));
    // The answer comes whole, and then nothing more.
    let answer = pair.prefill.post_json(PATH, &leg).await;
    let params = answer["kv_transfer_params"].clone();
    assert_eq!(params["do_remote_prefill"], true);
    pair.prefill.ends_itself().await;

    pair.decode.handle.set_faults(faults(TransferFaults {
        transfer_fails_ms: Some(1),
        ..TransferFaults::default()
    }));
    let leg = with(body(PATH, &long("p"), 3), &params);
    let answer = pair.decode.ask("POST", PATH, &leg).await;
    assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");

    pair.decode.handle.set_faults(faults(TransferFaults {
        die_at_leg: true,
        ..TransferFaults::default()
    }));
    assert_eq!(pair.decode.ask("POST", PATH, &leg).await, "");
    pair.decode.ends_itself().await;
}

#[tokio::test]
async fn it_can_die_in_the_middle_of_an_answer() {
    let worker = Running::with_faults(Faults {
        die_after_tokens: Some(2),
        ..Faults::default()
    })
    .await;
    let stream = worker.ask("POST", PATH, &streamed(CHAT)).await;
    assert!(token_events(&stream) <= 2 && !stream.contains("[DONE]"));
    worker.ends_itself().await;
}
