//! Anthropic's Messages over pairs of workers.

use serde_json::{Value, json};
use warmroute::sim::worker::Connector;

use super::paths::{decided, decision, one_pair};
use crate::client::Answer;
use crate::cluster::Cluster;

const PATH: &str = "/v1/messages";

fn body(said: &str, stream: bool) -> String {
    json!({
        "model": "sim",
        "max_tokens": 6,
        "stream": stream,
        "stop_sequences": ["never"],
        "system": "once upon a time there was a router. ".repeat(9),
        "messages": [{"role": "user", "content": said}],
    })
    .to_string()
}

fn text(answer: &Answer, stream: bool) -> String {
    if !stream {
        return answer.json()["content"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned();
    }
    let data = answer
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let data = data.map(|line| serde_json::from_str::<Value>(line).unwrap());
    let texts = data.filter_map(|data| data["delta"]["text"].as_str().map(str::to_owned));
    texts.collect()
}

/// The last usage of an answer: input, cached, written, output.
fn usage(answer: &Answer) -> [u64; 4] {
    let (_, end) = answer.text().rsplit_once("\"usage\":").unwrap();
    let mut values = serde_json::Deserializer::from_str(end).into_iter::<Value>();
    let usage = values.next().unwrap().unwrap();
    [
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "output_tokens",
    ]
    .map(|name| usage[name].as_u64().unwrap())
}

#[tokio::test]
async fn messages_are_split_and_report_what_the_prefill_worker_had_cached() {
    let alone = Cluster::fast(1).await;
    // The second prompt begins as the first, and is long enough to be split again.
    let said = ["hello".to_owned(), "and then some more ".repeat(20)];
    for connector in [Connector::Nixl, Connector::Mooncake] {
        for stream in [false, true] {
            let cluster = one_pair(connector).await;
            for (index, said) in said.iter().enumerate() {
                let plain = alone.post(PATH, body(said, false)).await;
                let [input, cached, written, _] = usage(&plain);
                let prompt = input + cached + written;
                let answer = decided(&cluster, PATH, &body(said, stream)).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(decision(&answer, "disaggregated"), "yes", "{connector:?}");
                assert_eq!(text(&answer, stream), text(&plain, false), "{connector:?}");
                assert!(!answer.text().contains("remote"), "{}", answer.text());
                let [input, cached, written, output] = usage(&answer);
                assert_eq!((input + cached + written, output), (prompt, 6));
                // What the decode worker received counts as not cached; what the prefill worker had, as cached.
                assert_eq!(cached > 0, index > 0, "{connector:?} {index}");
                assert!(cached < prompt);
            }
            let transfers = cluster.engines[1].kv_transfers().await;
            assert_eq!(transfers.decode_legs, 2, "{connector:?}");
        }
    }
}
