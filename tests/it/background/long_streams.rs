//! Streams with more events than a log may have.

use std::time::Duration;

use serde_json::json;
use warmroute::sim::worker::Settings;

use super::{PATH, Pair, ask, ended, events, fast, part, path, resumed, said};
use crate::client;
use crate::cluster::{Router, eventually};

const LOG_BYTES: u64 = 32 << 10;
/// Some 220 bytes of events each: twice as many as a log may have.
const TOKENS: usize = 300;
const BEHIND: &str = "warmroute_background_readers_behind_total";

async fn count(router: &Router, name: &str) -> f64 {
    let page = client::get(router.admin, "/metrics").await;
    let mut lines = page.text().lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_default()
}

#[tokio::test]
async fn a_stream_longer_than_its_log_goes_on_being_readable() {
    let engine = Settings {
        decode_ms: 10,
        ..fast()
    };
    let pair = Pair::with(engine, |config| {
        let retention = &mut config.responses.store.retention;
        retention.max_event_log = LOG_BYTES;
        retention.event_logs = Duration::from_secs(2);
    })
    .await;
    let body = ask(TOKENS, json!({"stream": true}));
    // More than the log takes.
    pair.engine.hold_after(260).await;
    let mut live = client::open(pair.a.api, "POST", PATH, &[], body.to_string()).await;
    let mut text = live.until("output_text.delta").await;
    let response = part(&text, 0)[0].1["response"].clone();
    let stream = format!("{}?stream=true", path(&response));
    // One that follows on another router.
    let mut other = client::open(pair.b.api, "GET", &stream, &[], "").await;
    let follows = async {
        eventually("its log is cut", async || {
            count(&pair.a, "warmroute_background_logs_cut_total").await == 1.0
        })
        .await;
        // One that goes on from a recent event, and one that wants the dropped ones.
        text += &live.until("\"sequence_number\":250,").await;
        let recent = part(&text, 0).len() as u64 - 20;
        let after = format!("{stream}&starting_after={recent}");
        let mut recently = client::open(pair.b.api, "GET", &after, &[], "").await;
        let first = recently.until("\n\n").await;
        assert!(!first.contains("response.incomplete"), "{first}");
        let late = resumed(&pair.b, &response, Some(4));
        let found = async {
            eventually("one wants dropped events", async || {
                count(&pair.b, BEHIND).await == 1.0
            })
            .await;
            pair.engine.let_go().await;
        };
        let (late, ()) = tokio::join!(late, found);
        let recently = first + &recently.rest().await.0;
        (recent, events(&recently, recent + 1), late)
    };
    let (other, (recent, recently, late)) = tokio::join!(other.rest(), follows);
    text += &live.rest().await.0;
    let all = events(&text, 0);
    assert!(
        text.len() as u64 > 2 * LOG_BYTES && all.len() > TOKENS,
        "{}",
        text.len()
    );
    assert_eq!(events(&other.0, 0), all);
    assert_eq!(recently, all[recent as usize + 1..]);
    assert_eq!(late, all[5..]);
    assert_eq!(
        (count(&pair.a, BEHIND).await, count(&pair.b, BEHIND).await),
        (0.0, 1.0)
    );
    let last = ended(&pair.b, &response).await;
    assert_eq!(last["output"][0]["content"][0]["text"], *said(&all));
    // While what is left of the log is kept, and when it has expired.
    assert_eq!(resumed(&pair.b, &response, None).await, all);
    eventually("the log has expired", async || {
        pair.redis
            .cli(&["--scan", "--pattern", "*e:{*"])
            .trim()
            .is_empty()
    })
    .await;
    for router in [&pair.a, &pair.b] {
        assert_eq!(resumed(router, &response, None).await, all);
    }
}
