//! What lines of batches count in, over one Redis.

use std::time::Duration;

use warmroute::ids::RequestId;
use warmroute::limits::{ChargeId, Kind, Refusal};

use super::counting::{Replica, at, new_id};
use super::*;

fn line() -> ChargeId {
    ChargeId::Line(RequestId::new(fastrand::u128(..)))
}

fn two(server: &Server, limits: &str) -> [Replica; 2] {
    [(); 2].map(|()| Replica::new(&at(server), limits))
}

#[tokio::test]
async fn lines_count_in_the_limits_a_minute_and_not_as_running() {
    let server = Server::start().await;
    let limits = r#"{"concurrent_requests": 1, "input_tokens_per_minute": 100}"#;
    let [a, b] = two(&server, limits);
    let mut lines = Vec::new();
    for _ in 0..3 {
        lines.push(a.charge(line(), 10).await.unwrap());
    }
    let request = b.charge(new_id(), 10).await.unwrap();
    let second = b.charge(new_id(), 0).await;
    let is_concurrent = matches!(second, Err(Refusal::Concurrent { used: 1, .. }));
    assert!(is_concurrent, "{second:?}");
    let refused = b.charge(line(), 90).await;
    assert!(matches!(refused, Err(Refusal::Rate { .. })), "{refused:?}");
    drop(lines);
    eventually("what the lines had reserved is given back", async || {
        b.charge(line(), 85).await.is_ok()
    })
    .await;
    drop(request);
}

#[tokio::test]
async fn a_line_that_was_sent_and_gave_way_is_not_charged() {
    let server = Server::start().await;
    let [a, b] = two(&server, r#"{"batch_tokens_per_day": 1000}"#);
    let mut sent = a.charge(line(), 900).await.unwrap();
    sent.on_sent();
    drop(sent);
    eventually("what the line had reserved is given back", async || {
        b.charge(line(), 950).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_day_of_lines_is_counted_for_all_replicas_and_apart_from_other_requests() {
    let server = Server::start().await;
    let limits = r#"{"batch_tokens_per_day": 1000, "requests_per_minute": 1}"#;
    let [a, b] = two(&server, limits);
    let mut charge = a.charge(line(), 100).await.unwrap();
    // Its correction is most of a day.
    charge.use_tokens(900, 0, 0);
    drop(charge);
    let mut last = None;
    eventually("the day is used up", async || {
        // One that is granted before is given back only later. With both, no more is used than the most that counts (a day and an
        // hour).
        last = b.charge(line(), 120).await.err();
        last.is_some()
    })
    .await;
    let Some(Refusal::Rate {
        kind, retry_after, ..
    }) = &last
    else {
        panic!("{last:?}");
    };
    assert_eq!(*kind, Kind::BatchTokens);
    // 20 tokens of a day's 1,000.
    assert!(*retry_after > Duration::from_secs(1_200), "{last:?}");
    drop(b.charge(line(), 50).await.unwrap());
    let large = b.charge(line(), 1_001).await;
    assert!(matches!(large, Err(Refusal::TooLarge { .. })), "{large:?}");
    drop(b.charge(new_id(), 5_000).await.unwrap());
}
