//! `GET /fleet`: workers, models, pairs, what waits and who is near a limit, read for each request. `top` and `doctor` read
//! the page with the same types. Their router may be of another release: what its rows lack has a default. A role or a state that
//! they do not know fails the page.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::engine_facts::EngineRow;
use super::pairs::PairsRow;
use super::tenants::{self, LimitsSummary};
use crate::fleet::health::Health;
use crate::fleet::{RateSource, Role, Status, Worker};
use crate::http::circuit_breaker;
use crate::peers::status::LoadRow;
use crate::peers::{self, Peers};
use crate::relay::{QueueSummary, Relay};

/// Models whose queue is shown; all are on `GET /queue`.
const BUSIEST: usize = 100;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetPage {
    pub is_ready: bool,
    models: Vec<ModelRow>,
    pub workers: Vec<WorkerRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairsRow>,
    /// More is on `GET /queue`.
    #[serde(skip_deserializing)]
    queue: QueueSummary,
    /// More is on `GET /tenants`. Absent if no tenant has limits.
    #[serde(skip_serializing_if = "Option::is_none", skip_deserializing)]
    limits: Option<LimitsSummary>,
    /// This replica and the others, if there may be any.
    #[serde(skip_serializing_if = "Option::is_none", flatten)]
    pub replicas: Option<peers::status::Status>,
}

impl FleetPage {
    /// The models whose tokens this one has: of a LoRA adapter, its base model.
    pub fn bases_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a str> {
        let rows = self.models.iter().filter(move |row| row.name == model);
        rows.flat_map(|row| row.bases.iter().map(String::as_str))
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ModelRow {
    name: String,
    /// The base model of a LoRA adapter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bases: Vec<String>,
    /// Workers that can answer its requests now.
    workers: Vec<String>,
    /// Workers that can compute prompts for them.
    prefill: Vec<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerRow {
    pub name: String,
    /// What clients see in place of a name that is the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_name: Option<String>,
    address: String,
    pub role: Role,
    pub health: Health,
    /// Why the last health probe failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    pub circuit_breaker: circuit_breaker::State,
    pub is_draining: bool,
    pub version: Option<String>,
    #[serde(flatten)]
    pub facts: EngineRow,
    pub models: Vec<String>,
    /// Requests of this router that run on the worker; the next three are counted by this router, too.
    pub requests: u32,
    pub requests_total: u64,
    pub queued_tokens: u64,
    context_tokens: u64,
    /// Of the requests that are pinned to a dp rank, the part of each rank.
    #[serde(skip_serializing_if = "Vec::is_empty", skip_deserializing)]
    ranks: Vec<RankRow>,
    /// How fast it computes prompts, if that is known.
    #[serde(skip_serializing_if = "Option::is_none", skip_deserializing)]
    prefill_rate: Option<PrefillRateRow>,
    /// What a step of its engine takes, as decisions count it.
    #[serde(skip_deserializing)]
    speed: SpeedRow,
    /// The load on the worker of other replicas that have any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<LoadRow>,
    /// The engine's own numbers.
    pub reported: Option<ReportedRow>,
    /// The worker's cache as the router predicts it.
    predicted_blocks: usize,
    predicted_tokens: u64,
    /// The size of the worker's KV cache, if the engine reports it.
    cache_tokens: Option<u64>,
    /// The LoRA adapters that it has in its GPU, as far as known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    loaded_adapters: Vec<String>,
    /// Only with disaggregated prefill/decode, and not for decode workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfers: Option<KvTransfersRow>,
}

#[derive(Debug, Serialize)]
struct RankRow {
    rank: u32,
    requests: u32,
    queued_tokens: u64,
    context_tokens: u64,
}

impl RankRow {
    fn of(worker: &Worker, rank: u32) -> Self {
        let own = worker.pinned.own(rank);
        Self {
            rank,
            requests: own.requests,
            queued_tokens: own.queued_tokens,
            context_tokens: own.context_tokens,
        }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KvTransfersRow {
    /// Open after several transfers from it failed in a row.
    pub circuit_breaker: circuit_breaker::State,
    /// Prefill legs in a row that returned no `kv_transfer_params`, up to the last one.
    pub legs_without_params: u64,
    /// Prompts whose blocks the worker keeps until a decode worker fetches them or the engine's lease ends.
    pending: usize,
    pending_tokens: u64,
    /// The address of the engine's bootstrap server, which Mooncake needs.
    bootstrap: Option<String>,
}

#[derive(Debug, Serialize)]
struct PrefillRateRow {
    tokens_per_second: u64,
    source: RateSource,
}

#[derive(Debug, Default, Serialize)]
struct SpeedRow {
    prompt_tokens_per_second: u64,
    /// A step with nothing in it.
    step_ms: f64,
    /// What one more answer adds to a step.
    answer_us: f64,
    /// What a thousand more tokens of the answers' contexts add to a step.
    thousand_context_tokens_us: f64,
    /// The part of the time of computing prompts in which its answers go on all the same, 0 to 1.
    overlap: f64,
    /// What first tokens take beside steps: network, and the engine's server.
    overhead_ms: f64,
    /// From how many observations its own speed was learnt; with few it counts as workers of its model and hardware.
    samples: u64,
    /// Answers that its engine generates at the same time, as decisions count them.
    slots: u32,
    /// Answers that its engine was seen to generate at the same time, if that was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    learnt_slots: Option<u32>,
}

impl SpeedRow {
    fn of(worker: &Worker) -> Self {
        let speed = worker.load.speed.get();
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        Self {
            prompt_tokens_per_second: speed.rate() as u64,
            step_ms: rounded(speed.step * 1e3),
            answer_us: rounded(speed.answer() * 1e6),
            thousand_context_tokens_us: rounded(speed.context() * 1e9),
            overlap: rounded(speed.overlap),
            overhead_ms: rounded(worker.overhead.get() * 1e3),
            samples: worker.speed_samples(),
            slots: worker.slots(),
            learnt_slots: worker.load.learnt_slots(),
        }
    }
}

/// The engine's own numbers.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedRow {
    age_ms: u64,
    running: u32,
    waiting: u32,
    /// Share of its KV cache that is used.
    pub kv_usage: f64,
}

pub(super) fn page(relay: &Relay, peers: &Peers, now: Instant) -> FleetPage {
    let snapshot = relay.fleet().snapshot();
    let names = |workers: &[Arc<Worker>]| {
        let names = workers.iter().map(|worker| worker.name.to_string());
        names.collect()
    };
    let models = snapshot.models.iter().map(|(name, group)| ModelRow {
        name: name.to_string(),
        bases: group.bases.iter().map(|base| base.to_string()).collect(),
        workers: names(group.decode_workers()),
        prefill: if relay.is_disaggregated() {
            names(group.prefill_workers())
        } else {
            Vec::new()
        },
    });
    let workers = snapshot.workers.iter();
    let workers = workers.map(|status| worker_row(status, relay, peers, now));
    FleetPage {
        is_ready: snapshot.is_ready(),
        models: models.collect(),
        workers: workers.collect(),
        pairs: relay
            .pairs()
            .map(|(connector, pairs)| PairsRow::new(connector, pairs)),
        queue: relay.queues().status().summary(BUSIEST),
        limits: tenants::summary(relay.tenants()),
        replicas: peers.status(now),
    }
}

pub(super) fn worker(relay: &Relay, peers: &Peers, now: Instant, name: &str) -> Option<WorkerRow> {
    let snapshot = relay.fleet().snapshot();
    let mut workers = snapshot.workers.iter();
    let status = workers.find(|status| *status.worker.name == *name)?;
    Some(worker_row(status, relay, peers, now))
}

fn worker_row(status: &Status, relay: &Relay, peers: &Peers, now: Instant) -> WorkerRow {
    let worker = &status.worker;
    let (predicted_blocks, predicted_tokens) = relay.predicted().size(worker.id);
    WorkerRow {
        name: worker.name.to_string(),
        client_name: (worker.client_name != worker.name).then(|| worker.client_name.to_string()),
        address: worker.pool.address().to_owned(),
        role: worker.role,
        health: status.health,
        last_error: worker.last_probe_error.load().as_deref().cloned(),
        circuit_breaker: worker.breaker.state(),
        is_draining: status.draining,
        version: status.facts.version.clone(),
        facts: EngineRow::of(status),
        models: status
            .facts
            .models
            .keys()
            .map(|model| model.to_string())
            .collect(),
        requests: worker.load.own_requests(),
        requests_total: worker.load.total(),
        ranks: match status.event_endpoints().len() {
            0 | 1 => Vec::new(),
            ranks => (0..ranks as u32)
                .map(|rank| RankRow::of(worker, rank))
                .collect(),
        },
        queued_tokens: worker.load.own_queued_tokens(),
        context_tokens: worker.load.own_context_tokens(),
        prefill_rate: worker.prefill_rate().map(|(rate, source)| PrefillRateRow {
            tokens_per_second: rate as u64,
            source,
        }),
        speed: SpeedRow::of(worker),
        peers: peers.loads(worker.pool.address()),
        reported: worker.load.reported().map(|reported| ReportedRow {
            age_ms: now.saturating_duration_since(reported.at).as_millis() as u64,
            running: reported.running,
            waiting: reported.waiting,
            kv_usage: reported.kv_usage,
        }),
        predicted_blocks,
        predicted_tokens,
        cache_tokens: Some(worker.cache_tokens.load(Relaxed)).filter(|tokens| *tokens > 0),
        loaded_adapters: worker
            .adapters
            .used()
            .iter()
            .map(|adapter| adapter.to_string())
            .collect(),
        kv_transfers: relay
            .pinned(now, worker.id)
            .filter(|_| worker.role != Role::Decode)
            .map(|(pending, pending_tokens)| KvTransfersRow {
                circuit_breaker: worker.kv_transfer_breaker.state(),
                legs_without_params: worker.returned_params.missing(),
                pending,
                pending_tokens,
                bootstrap: worker
                    .bootstrap_info
                    .load()
                    .as_ref()
                    .map(|bootstrap_info| bootstrap_info.url.to_string()),
            }),
    }
}
