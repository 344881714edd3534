use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::legs::Legs;
use super::types::{Transfer, TransferError, quoted};
use crate::fleet::kv_transfer::{BootstrapInfo, Connector};
use crate::prompt::Api;

/// Exchanges with real pairs, one a line: what was sent and what came.
const NIXL: &str = include_str!("../../../tests/fixtures/vllm-0.32/kv_transfer_nixl.jsonl");
const MOONCAKE: &str = include_str!("../../../tests/fixtures/vllm-0.32/kv_transfer_mooncake.jsonl");

#[derive(Deserialize)]
pub(in crate::relay) struct Exchange {
    pub(in crate::relay) name: String,
    path: String,
    request: String,
    status: u16,
    pub(in crate::relay) answer: String,
}

impl Exchange {
    fn api(&self) -> Api {
        match &*self.path {
            "/v1/chat/completions" => Api::Chat,
            "/v1/completions" => Api::Completions,
            "/v1/responses" => Api::Responses,
            path => panic!("{path}"),
        }
    }

    fn sent(&self) -> Value {
        serde_json::from_str(&self.request).unwrap()
    }
}

pub(in crate::relay) fn recorded(connector: Connector) -> Vec<Exchange> {
    let lines = match connector {
        Connector::Nixl => NIXL,
        Connector::Mooncake => MOONCAKE,
        // No build of the first runs without an AMD GPU, and the second hands nothing over.
        Connector::Moriio | Connector::Sglang => "",
    };
    let read = |line: &str| serde_json::from_str(line).unwrap();
    lines.lines().map(read).collect()
}

/// The recorded prefill legs that went well, each with its decode leg where there is one.
fn pairs(connector: Connector) -> Vec<(Exchange, Option<Exchange>)> {
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for exchange in recorded(connector) {
        if exchange.answer.starts_with("data") {
            if exchange.name.contains("decode") {
                decodes.push(exchange);
            }
        } else if exchange.path != "/query" && exchange.status == 200 {
            let sent = exchange.sent();
            let asks = sent["kv_transfer_params"]["do_remote_decode"] == json!(true);
            if asks && sent["stream"] != json!(true) {
                prefills.push(exchange);
            } else {
                decodes.push(exchange);
            }
        }
    }
    let pairs = prefills.into_iter().map(|prefill| {
        let stem = prefill.name.replace("_1_prefill", "");
        let stem = stem.replace("_prefill", "");
        let names = [format!("{stem}_2_decode"), format!("{stem}_decode")];
        let mut all = decodes.iter();
        let position = all.position(|decode| names.contains(&decode.name));
        let decode = position.map(|position| decodes.swap_remove(position));
        (prefill, decode)
    });
    pairs.collect()
}

fn mooncake_bootstrap_info() -> Arc<BootstrapInfo> {
    let mut exchanges = recorded(Connector::Mooncake).into_iter();
    let page = exchanges.find(|exchange| exchange.path == "/query");
    let page = page.unwrap().answer;
    let bootstrap_info = BootstrapInfo::parse(page.as_bytes(), "http://127.0.0.1:8998");
    Arc::new(bootstrap_info.unwrap())
}

fn begin(connector: Connector, id: &str, host: &str) -> Transfer {
    let info = (connector == Connector::Mooncake).then(mooncake_bootstrap_info);
    Transfer::begin(connector, Api::Chat, id.to_owned(), host, info, None, 0).unwrap()
}

/// With what the bootstrap server says and with this rank, if they are known. `seed` draws a rank.
fn begin_at(
    connector: Connector,
    api: Api,
    info: Option<Arc<BootstrapInfo>>,
    rank: Option<u32>,
    seed: u64,
) -> Result<Transfer, TransferError> {
    Transfer::begin(connector, api, "x".to_owned(), "p", info, rank, seed)
}

fn value(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

/// What a client would have sent for a decode leg that was recorded.
fn clients(decode: &Exchange) -> Bytes {
    let mut sent = decode.sent();
    let fields = sent.as_object_mut().unwrap();
    fields.shift_remove("kv_transfer_params");
    sent.to_string().into()
}

#[test]
fn both_legs_of_what_a_client_sent_are_those_that_real_pairs_took() {
    let mut seen = 0;
    for connector in Connector::ALL {
        for (prefill, decode) in pairs(connector) {
            let Some(decode) = decode else { continue };
            let name = &prefill.name;
            let body = clients(&decode);
            let legs = Legs::of(decode.api(), &body).unwrap();
            let asked = prefill.sent();
            let id = asked["kv_transfer_params"]["transfer_id"].as_str();
            let transfer = begin(connector, id.unwrap_or_default(), "127.0.0.1");

            let sent = value(&legs.prefill(&transfer));
            let mut expected = asked;
            let expected = expected.as_object_mut().unwrap();
            // The recorded ones say a limit twice, fields that are null, and nothing of what ends an answer.
            expected.shift_remove("max_completion_tokens");
            let params = expected["kv_transfer_params"].as_object_mut().unwrap();
            params.retain(|_, value| !value.is_null());
            if connector == Connector::Mooncake {
                expected.insert("ignore_eos".to_owned(), json!(true));
            }
            expected.entry("stream").or_insert(json!(false));
            if prefill.api() == Api::Responses {
                expected.entry("store").or_insert(json!(false));
            }
            assert_eq!(sent, json!(expected), "{name}");

            let handed = transfer.end(prefill.answer.as_bytes()).unwrap();
            assert_eq!(value(&legs.decode(handed.params)), decode.sent(), "{name}");
            seen += 1;
        }
    }
    assert_eq!(seen, 14);
}

#[test]
fn every_recorded_prefill_leg_is_read() {
    let mut seen = 0;
    for connector in Connector::ALL {
        for (prefill, _) in pairs(connector) {
            let transfer = begin(connector, "xfer-1", "127.0.0.1");
            let handed = transfer.end(prefill.answer.as_bytes());
            let handed = handed.unwrap_or_else(|why| panic!("{}: {why}", prefill.name));
            let is_cached = prefill.name.starts_with("same_prefix_again");
            let cached_tokens = if is_cached { 384 } else { 0 };
            assert_eq!(handed.cached_tokens, cached_tokens, "{}", prefill.name);
            assert!(handed.prompt_tokens > 0, "{}", prefill.name);
            seen += 1;
        }
    }
    assert_eq!(seen, 18);
}

#[test]
fn an_answer_that_hands_nothing_over_is_told_apart() {
    let recorded = recorded(Connector::Nixl);
    let named = |name: &str| {
        let found = recorded.iter().find(|exchange| exchange.name == name);
        &found.unwrap().answer
    };
    let plain = named("edge_plain_request_on_prefiller");
    let streamed = named("edge_prefill_stream_true");
    let good = named("chat_1_prefill");
    let end = |connector, answer: &str| {
        let handed = begin(connector, "x", "h").end(answer.as_bytes());
        handed.map(|_| ()).unwrap_err()
    };
    assert_eq!(end(Connector::Nixl, plain), TransferError::NoParams);
    assert_eq!(end(Connector::Nixl, streamed), TransferError::Malformed);
    let changed = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        end(Connector::Nixl, &good.replacen(from, to, 1))
    };
    let blocks = "[[256,257,258,259,260,261,262,263,264,265,266,267,268]]";
    for (from, to) in [
        // These would kill the decode engine, or make it compute all by itself.
        (blocks, "[]"),
        (blocks, "null"),
        ("\"remote_engine_id\"", "\"remote_engine\""),
        ("\"remote_port\":5600", "\"remote_port\":null"),
        ("\"do_remote_prefill\":true", "\"do_remote_prefill\":false"),
    ] {
        assert_eq!(changed(from, to), TransferError::NoParams, "{to}");
    }

    let stopped = plain.replace("\"length\"", "\"stop\"");
    assert_eq!(end(Connector::Mooncake, &stopped), TransferError::Stopped);
    assert_eq!(end(Connector::Mooncake, "{}"), TransferError::Stopped);
    assert_eq!(end(Connector::Mooncake, "<html>"), TransferError::Malformed);
    let without = begin_at(Connector::Mooncake, Api::Chat, None, None, 0);
    assert_eq!(without.unwrap_err(), TransferError::NoBootstrap);
}

#[test]
fn an_address_that_means_itself_to_everybody_becomes_the_listed_one() {
    let (good, _) = pairs(Connector::Nixl).swap_remove(0);
    let check = |given: &str, listed: &str, expected: &str| {
        let given = format!("\"remote_host\":{}", quoted(given));
        let answer = good.answer.replace("\"remote_host\":\"127.0.0.1\"", &given);
        let handed = begin(Connector::Nixl, "", listed).end(answer.as_bytes());
        let params = format!("{{{}}}", handed.unwrap().params.0);
        let mut before = value(answer.as_bytes())["kv_transfer_params"].take();
        before["remote_host"] = json!(expected);
        assert_eq!(value(params.as_bytes()), before);
    };
    check("127.0.0.1", "10.0.0.7", "10.0.0.7");
    check("localhost", "prefill-0.prefill", "prefill-0.prefill");
    check("::1", "[fd00::7]", "fd00::7");
    check("localhost", "127.0.0.1", "localhost");
    check("localhost", "[::1]", "localhost");
    check("10.1.1.1", "10.0.0.7", "10.1.1.1");
}

#[test]
fn a_rank_is_chosen_only_where_the_decode_worker_must_be_told_it() {
    let page = br#"{"0":{"engine_id":"a"},"1":{"engine_id":"b"}}"#;
    let bootstrap_info = Arc::new(BootstrapInfo::parse(page, "http://p:8998").unwrap());
    let begin = |connector, api, rank, seed| {
        let info = Some(bootstrap_info.clone());
        begin_at(connector, api, info, rank, seed)
    };
    for (seed, engine) in [(0, "\"a\""), (1, "\"b\"")] {
        let transfer = begin(Connector::Mooncake, Api::Chat, None, seed).unwrap();
        assert_eq!(transfer.rank(), Some(seed as u32));
        let answer = br#"{"choices":[{"finish_reason":"length"}]}"#;
        assert!(transfer.end(answer).unwrap().params.0.contains(engine));
    }
    let responses = begin(Connector::Mooncake, Api::Responses, None, 0);
    assert_eq!(responses.unwrap_err(), TransferError::NoRank);
    let nixl = begin(Connector::Nixl, Api::Responses, None, 1);
    assert_eq!(nixl.unwrap().rank(), None);
    let info = Some(mooncake_bootstrap_info());
    let alone = begin_at(Connector::Mooncake, Api::Responses, info, None, 5);
    assert_eq!(alone.unwrap().rank(), None);
    for connector in [Connector::Nixl, Connector::Mooncake] {
        let chosen = begin(connector, Api::Responses, Some(1), 0);
        assert_eq!(chosen.unwrap().rank(), Some(1), "{connector}");
    }
    // Its bootstrap server knows of no such rank.
    let unknown = begin(Connector::Mooncake, Api::Chat, Some(2), 1);
    assert_eq!(unknown.unwrap().rank(), Some(1));
}

proptest! {
    #[test]
    fn no_answer_makes_it_panic(
        answer in "(\\{|\\}|\\[|\\]|,|:|\"kv_transfer_params\"|\"remote_host\"|\"remote_block_ids\"|\"do_remote_prefill\"|true|null|1|\"é\\\\u0041\"){0,24}",
        cut in 0usize..2_000,
    ) {
        for connector in [Connector::Nixl, Connector::Mooncake, Connector::Moriio] {
            let _ = begin(connector, "x", "h").end(answer.as_bytes());
        }
        for (prefill, _) in pairs(Connector::Nixl).into_iter().take(2) {
            let answer = &prefill.answer.as_bytes()[..cut.min(prefill.answer.len())];
            let whole = cut >= prefill.answer.len();
            prop_assert_eq!(begin(Connector::Nixl, "x", "h").end(answer).is_ok(), whole);
        }
    }
}
