//! Cancels that race with the end of a response.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::fleet::{end, ends_once};
use super::{PATH, Pair, ask, cancel, events, part, resumed};
use crate::client::{self, Open};
use crate::cluster::fast;

/// Takes some seconds; the store's own tests run ten thousand races.
const RACES: usize = 1_000;
const LANES: usize = 25;
const STEP_MICROS: u64 = 500;

#[derive(Default)]
struct Score {
    /// Delay of the cancel, adjusted so that each side wins about half of the races.
    pause_micros: AtomicU64,
    cancelled: AtomicUsize,
    ended: AtomicUsize,
}

/// On an overloaded machine a router may lose its lease for a while and refuses new responses; then this retries.
async fn started(pair: &Pair, body: &Value) -> Open {
    loop {
        let open = client::open(pair.a.api, "POST", PATH, &[], body.to_string()).await;
        if open.status != 503 {
            assert_eq!(open.status, 200);
            return open;
        }
    }
}

async fn race(pair: &Pair, streams: bool, score: &Score) -> (Value, Value) {
    let mut live = started(pair, &ask(3, json!({"stream": streams}))).await;
    let (response, live) = if streams {
        let started = live.until("response.queued").await;
        let response = part(&started, 0)[0].1["response"].clone();
        (response, Some((live, started)))
    } else {
        (serde_json::from_str(&live.rest().await.0).unwrap(), None)
    };
    let pause = score.pause_micros.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_micros(pause)).await;
    let answer = cancel(&pair.b, &response).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let status = answer.json()["status"].clone();
    if status == "cancelled" {
        score.cancelled.fetch_add(1, Ordering::Relaxed);
        score.pause_micros.fetch_add(STEP_MICROS, Ordering::Relaxed);
    } else {
        assert_eq!(status, "incomplete");
        score.ended.fetch_add(1, Ordering::Relaxed);
        let less = |pause: u64| Some(pause.saturating_sub(STEP_MICROS));
        let _ = score
            .pause_micros
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
    if let Some((mut live, started)) = live {
        let (rest, is_whole) = live.rest().await;
        assert!(is_whole);
        let received = events(&(started + &rest), 0);
        ends_once(&received);
        let (name, last) = received.last().unwrap();
        assert_eq!(
            (name.as_str(), &last["response"]["status"]),
            ("response.incomplete", &status)
        );
        let again = resumed(&pair.b, &response, None).await;
        assert_eq!(again.len(), received.len());
        assert_eq!(again[..received.len() - 1], received[..received.len() - 1]);
    }
    (response, status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_cancel_and_an_end_one_wins_on_every_router() {
    let pair = Arc::new(Pair::new(fast()).await);
    let score = Arc::new(Score::default());
    let mut lanes = JoinSet::new();
    for lane in 0..LANES {
        let (pair, score) = (pair.clone(), score.clone());
        lanes.spawn(async move {
            let mut outcomes = Vec::new();
            for _ in 0..RACES / LANES {
                outcomes.push(race(&pair, lane % 2 == 0, &score).await);
            }
            outcomes
        });
    }
    let outcomes = lanes.join_all().await.concat();
    // Afterwards the reported results have not changed.
    pair.runs(0).await;
    for (response, status) in outcomes {
        assert_eq!(end(&[&pair.a, &pair.b], &response).await["status"], status);
    }
    let (cancelled, ended) = (&score.cancelled, &score.ended);
    let won = [cancelled, ended].map(|counter| counter.load(Ordering::Relaxed));
    assert!(won.iter().all(|won| *won > RACES / 10), "{won:?}");
}
