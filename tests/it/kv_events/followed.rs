//! A router that follows engines over one of the wires, and what it believes beside what is true.

use std::time::Duration;

use std::collections::BTreeMap;
use std::io::BufRead;
use std::net::SocketAddr;
use std::process::Command;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::events;
use warmroute::sim::worker::{CacheContents, Settings, publisher};

use crate::client;
use crate::cluster::{Cluster, Decided, Engine, Killed, Router, config, eventually};
use crate::own_ports;

/// How a router hears of an engine's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// ZeroMQ, at the addresses that the engine itself announces.
    Announced,
    /// ZeroMQ, at addresses that the router was given.
    Zmq,
    /// gRPC, through a bridge that is a process of its own.
    Bridge,
}

pub(super) const BOTH: [Wire; 2] = [Wire::Zmq, Wire::Bridge];

/// A bridge of one engine.
#[derive(Debug)]
pub(super) struct Bridge {
    pub(super) address: SocketAddr,
    arguments: Vec<String>,
    child: Killed,
}

impl Bridge {
    pub(super) fn of(engine: &Engine) -> Self {
        let first = &engine.events[0];
        let mut arguments = vec![
            format!("--zmq=tcp://{}", first.events),
            format!("--ranks={}", engine.events.len()),
            "--silence=400ms".to_owned(),
        ];
        arguments.extend(first.replay.map(|at| format!("--replay=tcp://{at}")));
        let listen = own_ports::address().to_string();
        Self::start(&listen, arguments).expect("the port is free")
    }

    fn start(listen: &str, arguments: Vec<String>) -> Option<Self> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command.args(["bridge", "--listen", listen]);
        let (child, printed) = Killed::start(command.args(&arguments));
        let line = printed.lines().next()?.unwrap();
        let address = line.trim_start_matches("listening on ").parse().unwrap();
        Some(Self {
            address,
            arguments,
            child,
        })
    }

    pub(super) fn kill(&mut self) {
        self.child.signal("KILL");
    }

    /// A new process at the same address.
    pub(super) async fn restart(&mut self) {
        let listen = self.address.to_string();
        let mut started = None;
        eventually("the bridge's port is free again", async || {
            started = Self::start(&listen, self.arguments.clone());
            started.is_some()
        })
        .await;
        *self = started.unwrap();
    }

    pub(super) fn listed(&self, engine: &Engine) -> WorkerSpec {
        WorkerSpec {
            events: Some(events::EventsSpec {
                from: events::From::Grpc,
                endpoint: self.address.to_string(),
                ranks: engine.events.len() as u32,
                ..events::EventsSpec::default()
            }),
            ..engine.listed()
        }
    }
}

/// Engines, the bridges beside them if there are any, and a router that follows them.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) cluster: Cluster,
    pub(super) bridges: Vec<Bridge>,
}

impl Followed {
    pub(super) async fn start(wire: Wire, engines: Vec<Settings>) -> Self {
        let mut started = Vec::new();
        for (place, settings) in engines.into_iter().enumerate() {
            let settings = match wire {
                Wire::Announced => everywhere(settings),
                Wire::Zmq | Wire::Bridge => settings,
            };
            started.push(Engine::here(&format!("w{place}"), settings).await);
        }
        Self::of(wire, started, |_| {}).await
    }

    pub(super) async fn of(
        wire: Wire,
        engines: Vec<Engine>,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let mut bridges = Vec::new();
        let mut config = quick();
        for engine in &engines {
            let listed = match wire {
                Wire::Announced => engine.listed(),
                Wire::Zmq => over_zmq(engine),
                Wire::Bridge => {
                    bridges.push(Bridge::of(engine));
                    bridges[bridges.len() - 1].listed(engine)
                }
            };
            config.workers.push(listed);
        }
        change(&mut config);
        let router = Router::here(&config).await;
        let cluster = Cluster { engines, router };
        cluster.all_up().await;
        Self { cluster, bridges }
    }

    pub(super) fn engine(&self, place: usize) -> &Engine {
        &self.cluster.engines[place]
    }

    pub(super) async fn status(&self, place: usize, rank: usize) -> Value {
        status(&self.cluster, &self.engine(place).name, rank).await
    }

    /// Waits until `/kv` says so of a rank of an engine. Its figures may be a moment old.
    pub(super) async fn shows(
        &self,
        place: usize,
        rank: usize,
        field: &str,
        value: impl Into<Value>,
    ) {
        let value = value.into();
        let mut last = Last::default();
        let what = format!("w{place}, rank {rank}: {field} is {value}");
        eventually(&what, async || {
            let status = self.status(place, rank).await;
            last.0 = format!("{status:#}");
            status.pointer(&format!("/{field}")) == Some(&value)
        })
        .await;
    }

    /// Waits until the router's tree of a rank is what the rank holds, and counts.
    pub(super) async fn equals(&self, place: usize, rank: usize) {
        let engine = self.engine(place);
        let what = format!("the tree of {}, rank {rank}, is its cache", engine.name);
        let mut last = Last::default();
        eventually(&what, async || {
            let scored = scored(&self.cluster, &engine.name, rank).await;
            let truth = held(&engine.cache_contents(rank).await);
            let is = scored.as_ref() == Some(&truth);
            last.0 = difference(scored.as_ref(), &truth);
            is
        })
        .await;
    }

    /// Every rank of every engine.
    pub(super) async fn all_equal(&self) {
        for place in 0..self.cluster.engines.len() {
            for rank in 0..self.engine(place).events.len() {
                self.equals(place, rank).await;
            }
        }
    }

    /// What `explain` says of each worker.
    pub(super) async fn explain(&self, prompt: &Prompt) -> Vec<Row> {
        explain(&self.cluster, prompt).await
    }

    /// Sends a prompt through the router.
    pub(super) async fn post(&self, prompt: &Prompt) -> Decided {
        let body = prompt.body();
        let (answer, decided) = self.cluster.post_decided("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        decided
    }
}

/// Printed where the test gives up on what it was waiting for.
#[derive(Default)]
pub(super) struct Last(pub(super) String);

impl Drop for Last {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[expect(clippy::print_stderr, reason = "it is what is wrong")]
            {
                eprintln!("at last: {}", self.0);
            }
        }
    }
}

/// So that a test need not wait long for what takes its time in life.
pub(super) fn quick() -> Config {
    let mut config = config();
    config.kv_events.advanced.stream.verify_interval = Duration::from_millis(400);
    // What was just sent and is evicted again would count as held for so long.
    config.kv_events.advanced.unconfirmed.grace_period = Duration::ZERO;
    config.kv_events.advanced.stream.replay_timeout = Duration::from_millis(500);
    config.kv_events.advanced.zmq.max_backoff = Duration::from_millis(200);
    config.kv_events.advanced.grpc.max_backoff = Duration::from_millis(200);
    config
}

/// An engine of a small cache that publishes its events.
pub(super) fn small(settings: Settings) -> Settings {
    Settings {
        cache_blocks: 64.try_into().unwrap(),
        ..settings
    }
}

/// On every address of this machine, as real engines are; those of one address alone are not followed
/// by what they tell themselves.
fn everywhere(settings: Settings) -> Settings {
    let anywhere = || Some("tcp://*:0".parse().unwrap());
    Settings {
        kv: publisher::Settings {
            replay: settings.kv.replay.and_then(|_| anywhere()),
            events: anywhere(),
            ..settings.kv
        },
        ..settings
    }
}

pub(crate) fn over_zmq(engine: &Engine) -> WorkerSpec {
    let first = &engine.events[0];
    let replay = first.replay.map(|at| format!("tcp://{at}"));
    WorkerSpec {
        events: Some(events::EventsSpec {
            from: events::From::Zmq,
            endpoint: format!("tcp://{}", first.events),
            replay: replay.unwrap_or_default(),
            ranks: engine.events.len() as u32,
            ..events::EventsSpec::default()
        }),
        ..engine.listed()
    }
}

/// A rank's row of `/kv`; null if there is none.
pub(super) async fn status(cluster: &Cluster, worker: &str, rank: usize) -> Value {
    let page = cluster.admin("/kv").await.json();
    let mut rows = page["ranks"].as_array().unwrap().iter();
    let row = rows.find(|row| row["worker"] == worker && row["rank"] == rank);
    row.cloned().unwrap_or_default()
}

/// A block: its parent, and how many copies there are of it.
type Blocks = BTreeMap<String, (Option<String>, u64)>;

/// What the router believes a rank to hold; none where that does not count in routing.
pub(super) async fn scored(cluster: &Cluster, worker: &str, rank: usize) -> Option<Blocks> {
    let path = format!("/kv/blocks?worker={worker}&rank={rank}");
    let answer = cluster.admin(&path).await;
    if answer.status == 404 {
        return None;
    }
    let page = answer.json();
    if !["live", "partial"].contains(&page["state"].as_str().unwrap()) {
        return None;
    }
    let blocks = page["blocks"].as_array().unwrap().iter();
    let row = |block: &Value| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let copies = block["copies"]["gpu"].as_u64().unwrap_or(u64::MAX);
        let name = text(&block["hash"]).unwrap();
        (copies > 0).then_some((name, (text(&block["parent"]), copies)))
    };
    Some(blocks.filter_map(row).collect())
}

/// What a rank holds, in the same words.
pub(super) fn held(truth: &CacheContents) -> Blocks {
    let hex = |hash: u64| format!("{hash:016x}");
    let row = |held: &warmroute::sim::engine::cache::CachedBlock| {
        let parent = held.parent.map(|parent| hex(parent.0));
        (hex(held.hash.0), (parent, held.copies as u64))
    };
    truth.blocks.iter().map(row).collect()
}

/// The blocks and copies that are believed in and not held.
pub(super) fn stale(scored: &Blocks, truth: &Blocks) -> Vec<String> {
    let copies = |name: &String| truth.get(name).map_or(0, |(_, copies)| *copies);
    let stale = scored
        .iter()
        .filter(|(name, (_, believed))| copies(name) < *believed);
    stale.map(|(name, _)| name.clone()).collect()
}

fn difference(scored: Option<&Blocks>, truth: &Blocks) -> String {
    let Some(scored) = scored else {
        return "it does not count".to_owned();
    };
    let only = |of: &Blocks, other: &Blocks| -> Blocks {
        let only = of
            .iter()
            .filter(|(name, row)| other.get(*name) != Some(*row));
        only.map(|(name, row)| (name.clone(), row.clone()))
            .collect()
    };
    format!(
        "of {} held and {} believed: only held {:?}; only believed {:?}",
        truth.len(),
        scored.len(),
        only(truth, scored),
        only(scored, truth)
    )
}

/// A prompt of token ids.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    pub(super) model: &'static str,
    pub(super) salt: Option<&'static str>,
}

impl Prompt {
    /// Prompts of one family begin alike; families have nothing in common.
    pub(super) fn new(family: u32, length: u32) -> Self {
        Self {
            tokens: (0..length).map(|token| family * 1_000 + token).collect(),
            model: "sim",
            salt: None,
        }
    }

    pub(super) fn body(&self) -> String {
        let mut body = json!({"model": self.model, "prompt": self.tokens, "max_tokens": 1});
        if let Some(salt) = self.salt {
            body["cache_salt"] = json!(salt);
        }
        body.to_string()
    }

    /// Sends it to an engine, past any router.
    pub(super) async fn to(&self, engine: &Engine) {
        let answer = client::post(engine.address, "/v1/completions", self.body()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    pub(super) async fn to_rank(&self, engine: &Engine, rank: usize) {
        let rank = rank.to_string();
        let headers = [("x-data-parallel-rank", rank.as_str())];
        let at = engine.address;
        let answer = client::send(at, "POST", "/v1/completions", &headers, self.body()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// How many of its tokens are held from the start.
    pub(super) fn held_by(&self, truth: &CacheContents) -> u64 {
        let adapter = (self.model != "sim").then_some(self.model);
        let mut parent = None;
        let mut tokens = 0;
        for block in self.tokens.chunks_exact(16) {
            let next = truth.blocks.iter().find(|held| {
                let label = held.label.as_deref();
                let salt = label.and_then(|label| label.cache_salt.as_deref());
                let lora = label.and_then(|label| label.lora.as_ref());
                held.parent == parent
                    && held.token_ids == block
                    && salt == self.salt
                    && lora.map(|(_, name)| &**name) == adapter
            });
            let Some(next) = next else {
                break;
            };
            parent = Some(next.hash);
            tokens += 16;
        }
        tokens
    }
}

/// One worker in an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) worker: String,
    pub(super) tokens: u64,
    pub(super) known_by: String,
}

/// The answer of `/explain`.
pub(super) async fn explained(cluster: &Cluster, prompt: &Prompt) -> Value {
    let path = "/explain?path=/v1/completions";
    let answer = cluster.post_admin(path, &prompt.body()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// What `explain` says of each worker, by name.
pub(super) async fn explain(cluster: &Cluster, prompt: &Prompt) -> Vec<Row> {
    let page = explained(cluster, prompt).await;
    let row = |row: &Value| Row {
        worker: row["worker"].as_str().unwrap().to_owned(),
        tokens: row["cached_tokens"].as_u64().unwrap(),
        known_by: row["known_by"].as_str().unwrap().to_owned(),
    };
    let mut rows: Vec<Row> = page["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(row)
        .collect();
    rows.sort_by(|a, b| a.worker.cmp(&b.worker));
    rows
}
