//! Many engines that are found at once, over real sockets: what the router keeps meanwhile, and for how long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use warmroute::ids::WorkerId;
use warmroute::kv::event::{Batch, EngineHash, Event, Stored};
use warmroute::kv::indexes::{self, PrefixIndexes};
use warmroute::kv::stream;
use warmroute::kv::subscriber::joins::{self, Joins};
use warmroute::kv::subscriber::{self, Shared, StatusBoard, Subject};
use warmroute::kv::zmq::{self, Target, Zmq};
use warmroute::observe::metrics::Registry;
use warmroute::sim::worker::publisher::{Hashes, Layout, encode};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const BLOCK_TOKENS: u32 = 16;
/// Blocks of one batch: a prompt of 1,024 tokens.
const BATCH_BLOCKS: u64 = 64;

/// What each publisher does.
#[derive(Clone, Copy)]
struct Load {
    publishers: u32,
    /// Batches that can be replayed when the router comes.
    kept: u64,
    /// Between two live batches.
    pause: Duration,
}

fn payload(sequence: u64) -> Bytes {
    let first = sequence * BATCH_BLOCKS;
    let stored = Stored {
        hashes: (first..first + BATCH_BLOCKS).map(EngineHash).collect(),
        parent: None,
        token_ids: (0..BATCH_BLOCKS as u32 * BLOCK_TOKENS)
            .map(|at| 1_000 + at + sequence as u32)
            .collect(),
        block_size: BLOCK_TOKENS,
        ..Stored::default()
    };
    let batch = Batch {
        timestamp: 0.0,
        rank: None,
        events: vec![Event::Stored(stored)],
        joined: 0,
    };
    encode::encode(&batch, Layout::Map, Hashes::Int).into()
}

fn message(frames: Vec<Bytes>) -> ZmqMessage {
    ZmqMessage::try_from(frames).unwrap()
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

/// One engine's sockets. Payloads are shared by all engines, so that memory is the router's.
async fn publish(load: Load, payloads: Arc<Vec<Bytes>>, found: watch::Sender<Option<Target>>) {
    let (mut events, mut replays) = (PubSocket::new(), RouterSocket::new());
    let at = events.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let replay = replays.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    found.send_replace(Some(Target {
        endpoint: at.parse().unwrap(),
        topic: String::new(),
        replay: Some(replay.parse().unwrap()),
    }));
    let mut next = load.kept;
    let mut timer = tokio::time::interval(load.pause);
    // On a busy machine they publish less, as engines do. Else what a join has to replay grows faster than it is replayed.
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let payload = |sequence: u64| payloads[sequence as usize % payloads.len()].clone();
    loop {
        tokio::select! {
            _ = timer.tick() => {
                let frames = vec![Bytes::new(), number(next), payload(next)];
                let _ = events.send(message(frames)).await;
                next += 1;
            }
            request = replays.recv() => {
                let Ok(request) = request else { continue };
                let [client, _, first] = &request.into_vec()[..] else { continue };
                let first = u64::from_be_bytes(first[..].try_into().unwrap());
                let batches = (first..next).map(|at| (number(at), payload(at)));
                let end = (Bytes::from_static(&[0xff; 8]), Bytes::new());
                for (number, payload) in batches.chain([end]) {
                    let frames = vec![client.clone(), Bytes::new(), Bytes::new(), number, payload];
                    if replays.send(message(frames)).await.is_err() {
                        break;
                    }
                }
            }
        }
    }
}

#[derive(Debug)]
struct Measured {
    all_live: Duration,
    /// Above what the process took before the first rank was followed.
    max_resident: u64,
    max_queued: u64,
    max_joining: u64,
    delayed: u64,
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1);
    pages
        .and_then(|pages| pages.parse::<u64>().ok())
        .unwrap_or(0)
        * 4_096
}

fn measure(load: Load, settings: &joins::Settings) -> Measured {
    let engines = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let payloads: Arc<Vec<Bytes>> = Arc::new((0..load.kept).map(payload).collect());
    let targets: Vec<_> = (0..load.publishers)
        .map(|_| {
            let (sender, target) = watch::channel(None);
            drop(engines.spawn(publish(load, payloads.clone(), sender)));
            target
        })
        .collect();
    let router = Builder::new_current_thread().enable_all().build().unwrap();
    let registry = Registry::default();
    let shared = Shared {
        indexes: PrefixIndexes::new(indexes::Settings::default(), &registry),
        board: Arc::new(StatusBoard::default()),
        metrics: subscriber::Metrics::new(&registry),
        settings: stream::Settings::default(),
        on_cache_lost: Arc::new(|_| {}),
        joins: Joins::new(settings, &registry),
        trees: None,
    };
    let zmq_metrics = zmq::Metrics::new(&registry);
    router.block_on(async {
        let mut found = Vec::new();
        for mut target in targets {
            let target = target.wait_for(Option::is_some).await.unwrap().clone();
            found.extend(target);
        }
        let before = resident();
        let started = Instant::now();
        let mut running = JoinSet::new();
        for (number, target) in (0..).zip(found) {
            let subject = Subject {
                worker: WorkerId(number),
                name: format!("engine-{number}").into(),
                address: format!("engine-{number}:1").into(),
                rank: 0,
                is_only_rank: false,
                model: "m".into(),
                caches_pages: false,
            };
            let source = Zmq::new(target, zmq::Settings::default(), zmq_metrics.clone());
            let (_, restarts) = watch::channel(0);
            running.spawn(subscriber::run(source, subject, shared.clone(), restarts));
        }
        let mut measured = Measured {
            all_live: Duration::ZERO,
            max_resident: 0,
            max_queued: 0,
            max_joining: 0,
            delayed: 0,
        };
        loop {
            // A scrape of hundreds of ranks takes the router's thread for a while.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let text = registry.text();
            let value = |name: &str| -> u64 {
                let line = text.lines().find(|line| line.starts_with(name)).unwrap();
                line.rsplit(' ').next().unwrap().parse().unwrap()
            };
            measured.max_resident = measured.max_resident.max(resident().saturating_sub(before));
            measured.max_queued = measured.max_queued.max(value("warmroute_kv_queued_bytes "));
            measured.max_joining = measured
                .max_joining
                .max(value("warmroute_kv_joining_ranks "));
            measured.delayed = value("warmroute_kv_joins_delayed_total ");
            let statuses = shared.board.statuses(Instant::now());
            let live = statuses.iter().filter(|status| status.state == "live");
            if live.count() == load.publishers as usize {
                measured.all_live = started.elapsed();
                return measured;
            }
            assert!(started.elapsed() < Duration::from_secs(300), "{measured:?}");
        }
    })
}

#[test]
fn forty_engines_found_at_once_become_live_within_the_bounds() {
    let load = Load {
        publishers: 40,
        kept: 60,
        pause: Duration::from_millis(200),
    };
    let settings = joins::Settings {
        max_concurrent: 5,
        max_queued_size: 1 << 20,
    };
    let measured = measure(load, &settings);
    assert!(measured.max_joining <= 5, "{measured:?}");
    assert!(measured.delayed >= 20, "{measured:?}");
    // Each rank may keep its first batch, of some 5 kB.
    assert!(
        measured.max_queued <= (1 << 20) + 40 * 16_384,
        "{measured:?}"
    );
}

/// Prints what 300 engines cost, with the default bounds, or without any if WARMROUTE_JOINS is `unbounded`.
#[test]
#[ignore = "a measurement of about a minute, run by itself"]
fn three_hundred_engines_found_at_once() {
    let load = Load {
        publishers: 300,
        kept: 60,
        pause: Duration::from_millis(200),
    };
    let unbounded = joins::Settings {
        max_concurrent: 100_000,
        max_queued_size: 1 << 40,
    };
    let which = std::env::var("WARMROUTE_JOINS").unwrap_or_default();
    let settings = match which.as_str() {
        "unbounded" => unbounded,
        _ => joins::Settings::default(),
    };
    eprintln!("{settings:?}: {:?}", measure(load, &settings));
}
