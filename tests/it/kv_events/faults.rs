//! Events that are lost, repeated, late, garbled or cut off: what is believed is always held.

use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;

use serde_json::Value;
use warmroute::kv::stream::Settings as Stream;
use warmroute::sim::fault::Faults;
use warmroute::sim::fault::kv::KvFaults;
use warmroute::sim::worker::Settings;

use super::followed::{self, Followed, Last, Prompt, Wire, held, over_zmq, scored, small, stale};
use crate::client;
use crate::cluster::{Engine, Router, eventually, telling};

/// How it stands with a cache after the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All is known again.
    Live,
    /// What was missed cannot be had.
    Partial,
    /// It depends on when what came.
    Either,
}

struct Case {
    name: &'static str,
    faults: KvFaults,
    end: End,
    /// What on `/kv` shows that the fault was felt, where the router itself feels it.
    felt: &'static str,
}

impl Case {
    /// What stays wrong until its end is looked at. What is asked for when answers come again is
    /// answered, and a question from the first batch on is always open for a while after one was given
    /// up: then all is known again, and rightly.
    fn lasting(&self) -> KvFaults {
        match self.end {
            End::Live | End::Either => KvFaults::default(),
            End::Partial => KvFaults {
                replay_refuse: self.faults.replay_refuse,
                replay_last: self.faults.replay_last,
                replay_stop_after: self.faults.replay_stop_after,
                ..KvFaults::default()
            },
        }
    }
}

fn every(batches: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(batches)
}

fn cases() -> Vec<Case> {
    let none = KvFaults::default;
    let case = |name, end, felt, faults| Case {
        name,
        faults,
        end,
        felt,
    };
    let lose_3 = || KvFaults {
        lose_every: every(3),
        ..none()
    };
    vec![
        case("every third is lost", End::Live, "gaps", lose_3()),
        case(
            "five in a row are lost",
            End::Live,
            "gaps",
            KvFaults {
                lose_next: 5,
                ..none()
            },
        ),
        case(
            "every third is lost for good",
            End::Partial,
            "resyncs/gap",
            KvFaults {
                lose_for_good: true,
                ..lose_3()
            },
        ),
        case(
            "every second comes twice",
            End::Live,
            "duplicates",
            KvFaults {
                repeat_every: every(2),
                ..none()
            },
        ),
        case(
            "pairs are swapped",
            End::Live,
            "gaps",
            KvFaults {
                swap_next: 8,
                ..none()
            },
        ),
        case(
            "all come late",
            End::Live,
            "batches",
            KvFaults {
                delay_ms: 60,
                ..none()
            },
        ),
        case(
            "connections are cut",
            End::Live,
            "verifications_passed",
            KvFaults {
                cut: true,
                ..none()
            },
        ),
        case(
            "connections are cut again and again",
            End::Live,
            "verifications_passed",
            KvFaults {
                cut_every: every(7),
                ..none()
            },
        ),
        case(
            "two are no batches",
            End::Partial,
            "resyncs/undecodable",
            KvFaults {
                garble_next: 2,
                ..none()
            },
        ),
        case(
            "nothing is said at all",
            End::Either,
            "verifications_started",
            KvFaults {
                silent: true,
                ..none()
            },
        ),
        case(
            "replays are refused",
            End::Partial,
            "resyncs/gap",
            KvFaults {
                replay_refuse: true,
                ..lose_3()
            },
        ),
        case(
            "only the last one is replayed",
            End::Partial,
            "verifications_failed",
            KvFaults {
                replay_last: Some(1),
                lose_next: 5,
                ..none()
            },
        ),
        case(
            "replays stop after one without an end",
            End::Either,
            "verifications_failed",
            KvFaults {
                replay_stop_after: Some(1),
                ..lose_3()
            },
        ),
        case(
            "replays are never answered",
            End::Partial,
            "verifications_failed",
            KvFaults {
                replay_stop_after: Some(0),
                ..lose_3()
            },
        ),
    ]
}

/// Sixteen requests, one after the other: more than the cache can hold.
async fn traffic(followed: &Followed, draw: &mut fastrand::Rng) {
    for _ in 0..16 {
        let prompt = Prompt::new(draw.u32(0..8), draw.u32(16..300));
        prompt.to(followed.engine(0)).await;
    }
}

/// Waits until nothing is believed that is not held. Where a fault can hide the last batches until more
/// come, more come.
async fn nothing_stale(followed: &Followed, more: Option<&mut fastrand::Rng>) {
    let mut last = Last::default();
    let mut more = more;
    eventually("nothing is believed that is not held", async || {
        let scored = scored(&followed.cluster, "w0", 0).await.unwrap_or_default();
        let truth = held(&followed.engine(0).cache_contents(0).await);
        let stale = stale(&scored, &truth);
        last.0 = format!(
            "of {} held and {} believed: {stale:?}",
            truth.len(),
            scored.len()
        );
        if let Some(draw) = more.as_mut().filter(|_| !stale.is_empty()) {
            Prompt::new(draw.u32(0..8), draw.u32(16..300))
                .to(followed.engine(0))
                .await;
        }
        stale.is_empty()
    })
    .await;
}

async fn faults(followed: &Followed, kv: KvFaults) {
    let faults = Faults {
        kv,
        ..Faults::default()
    };
    followed.engine(0).fault(faults).await;
}

/// Sends until what is believed counts, and gives the state in which it does.
async fn counts_again(followed: &Followed, what: &str, draw: &mut fastrand::Rng) -> String {
    let mut state = String::new();
    eventually(&format!("{what}: it is followed again"), async || {
        traffic(followed, draw).await;
        let scored = scored(&followed.cluster, "w0", 0).await;
        let status = followed.status(0, 0).await;
        status["state"].as_str().unwrap().clone_into(&mut state);
        // Partial or live, and nothing else: there is no other that counts.
        scored.is_some_and(|scored| !scored.is_empty())
            && ["partial", "live"].contains(&state.as_str())
    })
    .await;
    nothing_stale(followed, None).await;
    state
}

async fn suffers(wire: Wire, case: Case) {
    let seed = fastrand::u64(..);
    let what = format!("{}, {wire:?}, seed {seed}", case.name);
    let _last = Last(what.clone());
    let mut draw = fastrand::Rng::with_seed(seed);
    let engine = Engine::here("w0", small(telling())).await;
    let followed = Followed::of(wire, vec![engine], |config| {
        if case.end == End::Live {
            // Who answers late on a busy machine does answer; to be given up on would forget all.
            config.kv_events.advanced.stream.replay_timeout = Stream::default().replay_timeout;
        }
    })
    .await;
    traffic(&followed, &mut draw).await;
    followed.equals(0, 0).await;
    followed.shows(0, 0, "state", "live").await;

    let loses_the_last = case.faults.lose_for_good || case.end != End::Live;
    faults(&followed, case.faults.clone()).await;
    for _ in 0..3 {
        traffic(&followed, &mut draw).await;
        nothing_stale(&followed, loses_the_last.then_some(&mut draw)).await;
    }
    if wire == Wire::Zmq {
        eventually(&format!("{what}: {} rises", case.felt), async || {
            // A pause of this machine may hide it, say when it asks for a sign of life just then.
            faults(&followed, case.faults.clone()).await;
            traffic(&followed, &mut draw).await;
            let status = followed.status(0, 0).await;
            let felt = status.pointer(&format!("/{}", case.felt));
            felt.and_then(Value::as_u64).is_some_and(|count| count > 0)
        })
        .await;
    }

    let lasting = case.lasting();
    faults(&followed, lasting.clone()).await;
    let state = counts_again(&followed, &what, &mut draw).await;
    // A bridge takes longer to give up, so the fault may be over before.
    let may_outlast = wire == Wire::Bridge && case.faults.replay_stop_after.is_some();
    let end = if may_outlast { End::Either } else { case.end };
    match (end, state.as_str()) {
        (End::Live, "live") => followed.equals(0, 0).await,
        (End::Either, "live") => claims_what_it_knows(&followed).await,
        (End::Partial | End::Either, "partial") => {}
        (_, state) => panic!(
            "{what}: {state} at the end: {:#}",
            followed.status(0, 0).await
        ),
    }
    if lasting == KvFaults::default() {
        return;
    }
    faults(&followed, KvFaults::default()).await;
    counts_again(&followed, &what, &mut draw).await;
    claims_what_it_knows(&followed).await;
}

/// Waits until a tree is the cache, or does not claim to be all of it: on a busy machine even an engine
/// that answers again may do so too late for the router.
async fn claims_what_it_knows(followed: &Followed) {
    let mut last = Last::default();
    eventually(
        "all is known, or the state says that it is not",
        async || {
            let status = followed.status(0, 0).await;
            let scored = scored(&followed.cluster, "w0", 0).await;
            let truth = held(&followed.engine(0).cache_contents(0).await);
            last.0 = format!("{status:#}, {scored:?} of {truth:?}");
            status["state"] == "partial" || scored == Some(truth)
        },
    )
    .await;
}

/// All at once: each waits for time-outs most of the time.
async fn suffers_all(wire: Wire) {
    let local = tokio::task::LocalSet::new();
    let running = cases().into_iter();
    let running: Vec<_> = running
        .map(|case| local.spawn_local(suffers(wire, case)))
        .collect();
    local.await;
    for done in running {
        done.await.unwrap();
    }
}

#[tokio::test]
async fn what_is_believed_is_held_whatever_zeromq_loses() {
    suffers_all(Wire::Zmq).await;
}

#[tokio::test]
async fn what_is_believed_is_held_whatever_a_bridge_loses() {
    suffers_all(Wire::Bridge).await;
}

fn without_replay() -> Settings {
    let mut settings = small(telling());
    settings.kv.replay = None;
    settings
}

#[tokio::test]
async fn without_a_replay_a_lost_batch_or_connection_forgets_all() {
    let lost = KvFaults {
        lose_next: 1,
        ..KvFaults::default()
    };
    let cut = KvFaults {
        cut: true,
        ..KvFaults::default()
    };
    for wire in super::followed::BOTH {
        for (name, kv, reset) in [
            ("lost", lost.clone(), "gap"),
            ("cut", cut.clone(), "disconnected"),
        ] {
            let mut draw = fastrand::Rng::with_seed(7);
            let followed = Followed::start(wire, vec![without_replay()]).await;
            let old = Prompt::new(100, 150);
            // What was published before a subscriber came is lost, too.
            eventually(&format!("{wire:?}, {name}: it arrives"), async || {
                let new = Prompt::new(draw.u32(1_000..1_000_000), 40);
                new.to(followed.engine(0)).await;
                old.to(followed.engine(0)).await;
                let scored = scored(&followed.cluster, "w0", 0).await;
                scored.is_some_and(|scored| !scored.is_empty())
            })
            .await;
            let reset_path = format!("/resyncs/{reset}");
            let resets = async || {
                followed
                    .status(0, 0)
                    .await
                    .pointer(&reset_path)
                    .and_then(Value::as_u64)
            };
            let before = resets().await;
            faults(&followed, kv).await;
            Prompt::new(101, 40).to(followed.engine(0)).await;
            Prompt::new(102, 40).to(followed.engine(0)).await;
            if wire == Wire::Zmq {
                eventually(&format!("{name}: all is forgotten"), async || {
                    resets().await > before
                })
                .await;
            }
            faults(&followed, KvFaults::default()).await;
            let mut families = 200..;
            eventually(
                &format!("{wire:?}, {name}: it is followed again"),
                async || {
                    let new = Prompt::new(families.next().unwrap(), 40);
                    new.to(followed.engine(0)).await;
                    nothing_stale(&followed, Some(&mut draw)).await;
                    followed.explain(&new).await[0].tokens == 32
                },
            )
            .await;
            assert_eq!(
                followed.explain(&old).await[0].tokens,
                0,
                "{wire:?}, {name}"
            );
            assert_eq!(followed.status(0, 0).await["state"], "partial");
        }
    }
}

/// vLLM's replay socket drops what it cannot queue: batches in between, and the end.
#[tokio::test]
async fn a_router_started_beside_a_busy_engine_ends_live_though_long_replays_are_cut() {
    let engine = Engine::here("w0", telling()).await;
    for family in 0..60 {
        Prompt::new(family, 40).to(&engine).await;
    }
    let followed = Followed::of(Wire::Zmq, vec![engine], |_| {}).await;
    faults(
        &followed,
        KvFaults {
            replay_drop_after: NonZeroUsize::new(8),
            cut: true,
            ..KvFaults::default()
        },
    )
    .await;
    // The second router has never had a whole replay.
    let mut config = followed::quick();
    config.workers = vec![over_zmq(followed.engine(0))];
    let late = Router::here(&config).await;
    let busy = async {
        for family in 60.. {
            Prompt::new(family, 40).to(followed.engine(0)).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let mut last = Last::default();
    let is_live = eventually("all is known in the end", async || {
        let page = client::get(late.admin, "/kv").await.json();
        let rank = &page["ranks"][0];
        last.0 = format!("{rank:#}");
        rank["state"] == "live" && rank["last_sequence"].as_u64() > Some(60)
    });
    tokio::select! {
        () = busy => unreachable!("there is always another"),
        () = is_live => {}
    }
    let page = client::get(late.admin, "/kv").await.json();
    let rank = &page["ranks"][0];
    assert_eq!(rank["reason"], "full_replay");
    assert_eq!(rank["resyncs"], serde_json::json!({}));
    assert!(rank["replays_continued"].as_u64() >= Some(7), "{rank:#}");
}
