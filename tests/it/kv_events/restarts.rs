//! An engine's process ends, and another one takes its place: nothing of the old one is believed.

use std::time::Duration;

use std::collections::BTreeSet;

use warmroute::sim::worker::{Settings, publisher};

use super::followed::{Followed, Last, Prompt, Wire, explain, held, scored, stale, status};
use crate::cluster::{Cluster, Engine, eventually, telling};

/// Requests that the old process answers; each makes one batch.
const BEFORE: u32 = 12;

/// What the new process has done before the router hears of it, beside what the old one had.
#[derive(Clone, Copy, Debug)]
enum Counter {
    Below,
    /// The very same number, with other events.
    At,
    Above,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    wire: Wire,
    has_replay: bool,
    counter: Counter,
    /// Whether the clients come back with what they sent before.
    same_prompts: bool,
}

fn settings(case: Case) -> Settings {
    let kv = telling().kv;
    Settings {
        kv: publisher::Settings {
            replay: kv.replay.filter(|_| case.has_replay),
            ..kv
        },
        ..telling()
    }
}

fn prompt(family: u32) -> Prompt {
    Prompt::new(family, 70)
}

/// Whether what is believed of the worker is of the new process; looked at all the time.
struct Watch {
    old: Vec<Prompt>,
    /// Families that the new process was sent.
    sent: BTreeSet<u32>,
    looks: u32,
}

impl Watch {
    async fn look(&mut self, cluster: &Cluster, what: &str) {
        self.looks += 1;
        for prompt in &self.old {
            let family = prompt.tokens[0] / 1_000;
            if !self.sent.contains(&family) {
                let rows = explain(cluster, prompt).await;
                assert_eq!(rows[0].tokens, 0, "{what}: family {family} is believed in");
                assert!(matches!(&*rows[0].known_by, "exact" | "unknown"), "{what}");
            }
        }
        if let Some(scored) = scored(cluster, "w0", 0).await {
            // Afterwards: it only grows.
            let truth = held(&cluster.engines[0].cache_contents(0).await);
            let stale = stale(&scored, &truth);
            assert!(stale.is_empty(), "{what}: {stale:?} are believed in");
        }
    }
}

async fn restarts(case: Case) {
    let what = format!("{case:?}");
    let _last = Last(what.clone());
    let engine = Engine::child("w0", &settings(case));
    let mut followed = Followed::of(case.wire, vec![engine], |config| {
        // Only the events tell of the restart, and of the reconnect it hears late.
        config.fleet.health.interval = Duration::from_secs(600);
        config.kv_events.advanced.zmq.backoff = Duration::from_millis(700);
        config.kv_events.advanced.zmq.max_backoff = Duration::from_millis(700);
    })
    .await;
    followed.shows(0, 0, "connected", true).await;
    let old: Vec<Prompt> = (0..BEFORE).map(prompt).collect();
    for prompt in &old {
        prompt.to(followed.engine(0)).await;
    }
    if case.has_replay {
        followed.equals(0, 0).await;
    }
    let last = followed.engine(0).cache_contents(0).await.last_sequence;
    assert_eq!(last, Some(u64::from(BEFORE) - 1), "{what}");
    eventually(
        &format!("{what}: the old process is followed"),
        async || followed.explain(&old[11]).await[0].tokens == 64,
    )
    .await;

    followed.cluster.engines[0].kill().await;
    eventually(
        &format!("{what}: the end of the process is seen"),
        async || {
            let status = followed.status(0, 0).await;
            status["connected"] == false || status["state"] == "stale"
        },
    )
    .await;
    let mut watch = Watch {
        old,
        sent: BTreeSet::new(),
        looks: 0,
    };
    // A dead engine can't be asked what it holds, but nothing counts.
    assert_eq!(scored_blocks(&followed).await, 0, "{what}");
    let new = settings(case);
    let (count, first_sequence) = match (case.wire, case.counter) {
        (_, Counter::Below) => (5, 0),
        // The bridge is back too soon to wait for so many requests.
        (Wire::Bridge, Counter::At) => (1, u64::from(BEFORE) - 1),
        (Wire::Bridge, Counter::Above) => (3, u64::from(BEFORE)),
        (_, Counter::At) => (BEFORE, 0),
        (_, Counter::Above) => (BEFORE + 5, 0),
    };
    let new = Settings {
        kv: publisher::Settings {
            first_sequence,
            ..new.kv
        },
        ..new
    };
    followed.cluster.engines[0].restart(new).await;
    // In another order, so that no batch is where it was.
    let families: Vec<u32> = if case.same_prompts {
        (0..BEFORE)
            .rev()
            .chain(BEFORE..)
            .take(count as usize)
            .collect()
    } else {
        (100..100 + count).collect()
    };
    for family in families {
        watch.sent.insert(family);
        prompt(family).to(followed.engine(0)).await;
    }
    let expected = match case.counter {
        Counter::Below => 4,
        Counter::At => u64::from(BEFORE) - 1,
        Counter::Above if case.wire == Wire::Bridge => u64::from(BEFORE) + 2,
        Counter::Above => u64::from(BEFORE) + 4,
    };
    let last = followed.engine(0).cache_contents(0).await.last_sequence;
    assert_eq!(last, Some(expected), "{what}");
    watch.look(&followed.cluster, &what).await;
    eventually(
        &format!("{what}: the new process is followed"),
        async || {
            watch.look(&followed.cluster, &what).await;
            status(&followed.cluster, "w0", 0).await["connected"] == true
                && followed.status(0, 0).await["state"] != "stale"
        },
    )
    .await;
    // What comes now is published, whatever came before.
    let mut families = 200..;
    eventually(&format!("{what}: the new process is known"), async || {
        watch.look(&followed.cluster, &what).await;
        let family = families.next().unwrap();
        let new = prompt(family);
        new.to(followed.engine(0)).await;
        watch.look(&followed.cluster, &what).await;
        followed.explain(&new).await[0].tokens == 64
    })
    .await;
    watch.look(&followed.cluster, &what).await;
    if case.has_replay {
        followed.equals(0, 0).await;
        let state = match first_sequence {
            0 => "live",
            // It can't be known that there was nothing before.
            _ => "partial",
        };
        assert_eq!(followed.status(0, 0).await["state"], state, "{what}");
    }
    assert!(watch.looks > 3, "{what}");
}

async fn scored_blocks(followed: &Followed) -> usize {
    let scored = scored(&followed.cluster, "w0", 0).await;
    scored.map_or(0, |scored| scored.len())
}

/// All at once: each waits for the router to connect again.
async fn restarts_all(wire: Wire, has_replay: bool) {
    let local = tokio::task::LocalSet::new();
    let mut running = Vec::new();
    for counter in [Counter::Below, Counter::At, Counter::Above] {
        for same_prompts in [false, true] {
            let case = Case {
                wire,
                has_replay,
                counter,
                same_prompts,
            };
            running.push(local.spawn_local(restarts(case)));
        }
    }
    local.await;
    for done in running {
        done.await.unwrap();
    }
}

#[tokio::test]
async fn nothing_of_an_engine_that_ended_is_believed() {
    restarts_all(Wire::Zmq, true).await;
}

#[tokio::test]
async fn nothing_of_an_engine_that_ended_is_believed_without_a_replay() {
    restarts_all(Wire::Zmq, false).await;
}

#[tokio::test]
async fn nothing_of_an_engine_that_ended_is_believed_through_a_bridge() {
    restarts_all(Wire::Bridge, true).await;
}

#[tokio::test]
async fn nothing_of_an_engine_that_ended_is_believed_through_a_bridge_without_a_replay() {
    restarts_all(Wire::Bridge, false).await;
}

#[tokio::test]
async fn a_bridge_gives_each_life_of_an_engine_a_name_of_its_own() {
    let engine = Engine::child("w0", &telling());
    let mut followed = Followed::of(Wire::Bridge, vec![engine], |_| {}).await;
    prompt(1).to(followed.engine(0)).await;
    followed.equals(0, 0).await;
    followed.shows(0, 0, "state", "live").await;
    let incarnation = followed.status(0, 0).await["incarnation"].clone();
    assert!(incarnation.is_string());
    followed.cluster.engines[0].restart(telling()).await;
    prompt(2).to(followed.engine(0)).await;
    followed.equals(0, 0).await;
    eventually("another life is followed", async || {
        let status = followed.status(0, 0).await;
        status["incarnation"].is_string() && status["incarnation"] != incarnation
    })
    .await;
}

#[tokio::test]
async fn a_restarted_engine_has_its_ports_again_and_an_empty_cache() {
    let here = Engine::here("w0", telling()).await;
    let child = Engine::child("w1", &telling());
    for mut engine in [here, child] {
        let events = engine.events.clone();
        assert_eq!(events.len(), 1);
        Prompt::new(0, 40).to(&engine).await;
        let truth = engine.cache_contents(0).await;
        assert_eq!(truth.last_sequence, Some(0));
        assert_eq!(Prompt::new(0, 40).held_by(&truth), 32);
        assert_eq!(held(&truth).len(), 2);
        let settings = telling();
        engine
            .restart(Settings {
                kv: publisher::Settings {
                    first_sequence: 5,
                    ..settings.kv
                },
                ..settings
            })
            .await;
        assert_eq!(engine.events, events);
        assert!(held(&engine.cache_contents(0).await).is_empty());
        Prompt::new(0, 16).to(&engine).await;
        assert_eq!(engine.cache_contents(0).await.last_sequence, Some(5));
    }
}
