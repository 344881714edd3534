//! The fleet as JSON and as gauges: both are read off the snapshot when somebody asks.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use prometheus::IntGaugeVec;
use serde::Serialize;

use super::pairs::PairsRow;
use crate::fleet::health::Health;
use crate::fleet::{Role, Worker};
use crate::http::circuit_breaker;
use crate::observe::metrics::Registry;
use crate::relay::Relay;

#[derive(Debug, Serialize)]
pub(super) struct Page {
    is_ready: bool,
    models: Vec<ModelRow>,
    workers: Vec<WorkerRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pairs: Option<PairsRow>,
}

#[derive(Debug, Serialize)]
struct ModelRow {
    name: String,
    /// Workers that can take its requests now.
    workers: Vec<String>,
    /// Those that can compute prompts for others.
    prefill: Vec<String>,
}

#[derive(Debug, Serialize)]
struct WorkerRow {
    name: String,
    address: String,
    role: Role,
    health: Health,
    circuit_breaker: circuit_breaker::State,
    is_draining: bool,
    version: Option<String>,
    models: Vec<String>,
    /// Counted by this router.
    requests: u32,
    requests_total: u64,
    queued_tokens: u64,
    decode_tokens: u64,
    /// Told by the engine.
    reported: Option<ReportedRow>,
    /// What the router believes it to hold.
    predicted_blocks: usize,
    predicted_tokens: u64,
    cache_tokens: Option<u64>,
    /// What it computed for others and keeps for them, where requests are split.
    #[serde(skip_serializing_if = "Option::is_none")]
    handoffs: Option<HandoffsRow>,
}

#[derive(Debug, Serialize)]
struct HandoffsRow {
    /// Open after several transfers from it failed in a row.
    circuit_breaker: circuit_breaker::State,
    /// Not fetched yet, or never, while the engine's lease runs.
    pinned: usize,
    pinned_tokens: u64,
    /// Where its blocks are fetched, if that must be known.
    bootstrap: Option<String>,
}

#[derive(Debug, Serialize)]
struct ReportedRow {
    age_ms: u64,
    running: u32,
    waiting: u32,
    kv_usage: f64,
}

pub(super) fn page(relay: &Relay, now: Instant) -> Page {
    let snapshot = relay.fleet().snapshot();
    let names = |workers: &[Arc<Worker>]| {
        let names = workers.iter().map(|worker| worker.name.to_string());
        names.collect()
    };
    let models = snapshot.models.iter().map(|(name, group)| ModelRow {
        name: name.to_string(),
        workers: names(&group.workers[group.decode()]),
        prefill: match relay.splits() {
            true => names(&group.workers[group.prefill()]),
            false => Vec::new(),
        },
    });
    let workers = snapshot.workers.iter().map(|status| {
        let worker = &status.worker;
        let (predicted_blocks, predicted_tokens) = relay.predicted().size(worker.id);
        WorkerRow {
            name: worker.name.to_string(),
            address: worker.pool.address().to_owned(),
            role: worker.role,
            health: status.health,
            circuit_breaker: worker.breaker.state(),
            is_draining: status.draining,
            version: status.facts.version.clone(),
            models: status
                .facts
                .models
                .keys()
                .map(|model| model.to_string())
                .collect(),
            requests: worker.load.own_requests(),
            requests_total: worker.load.total(),
            queued_tokens: worker.load.queued_tokens(),
            decode_tokens: worker.load.decode_tokens(),
            reported: worker.load.reported().map(|reported| ReportedRow {
                age_ms: now.saturating_duration_since(reported.at).as_millis() as u64,
                running: reported.running,
                waiting: reported.waiting,
                kv_usage: reported.kv_usage,
            }),
            predicted_blocks,
            predicted_tokens,
            cache_tokens: Some(worker.cache_tokens.load(Relaxed)).filter(|tokens| *tokens > 0),
            handoffs: relay
                .pinned(now, worker.id)
                .filter(|_| worker.role != Role::Decode)
                .map(|(pinned, pinned_tokens)| HandoffsRow {
                    circuit_breaker: worker.kv_transfer_breaker.state(),
                    pinned,
                    pinned_tokens,
                    bootstrap: worker
                        .peer
                        .load()
                        .as_ref()
                        .map(|peer| peer.bootstrap.to_string()),
                }),
        }
    });
    Page {
        is_ready: snapshot.is_ready(),
        models: models.collect(),
        workers: workers.collect(),
        pairs: relay
            .pairs()
            .map(|(connector, pairs)| PairsRow::new(connector, pairs)),
    }
}

/// Gauges of each worker, set when they are scraped: requests do not pay for them, and a worker that
/// left leaves no stale number.
#[derive(Debug)]
pub(super) struct FleetMetrics {
    up: IntGaugeVec,
    draining: IntGaugeVec,
    circuit_breaker: IntGaugeVec,
    requests: IntGaugeVec,
    queued_tokens: IntGaugeVec,
    decode_tokens: IntGaugeVec,
    reported_running: IntGaugeVec,
    reported_waiting: IntGaugeVec,
    predicted_tokens: IntGaugeVec,
    pinned_handoffs: IntGaugeVec,
    pinned_tokens: IntGaugeVec,
}

impl FleetMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauges = |name, help| registry.gauges(name, help, &["worker"]);
        Self {
            up: gauges(
                "warmroute_worker_up",
                "1 for a worker that answers its health probe.",
            ),
            draining: gauges(
                "warmroute_worker_draining",
                "1 for a worker that gets nothing new.",
            ),
            circuit_breaker: gauges(
                "warmroute_circuit_breaker_state",
                "A worker's circuit breaker: 0 closed, 1 half-open, 2 open.",
            ),
            requests: gauges(
                "warmroute_worker_requests",
                "Requests of this router on a worker.",
            ),
            queued_tokens: gauges(
                "warmroute_worker_queued_tokens",
                "Uncached prompt tokens not computed yet.",
            ),
            decode_tokens: gauges(
                "warmroute_worker_decode_tokens",
                "Prompt tokens of requests being decoded.",
            ),
            reported_running: gauges(
                "warmroute_worker_reported_running",
                "Running requests, as the engine reports.",
            ),
            reported_waiting: gauges(
                "warmroute_worker_reported_waiting",
                "Waiting requests, as the engine reports.",
            ),
            predicted_tokens: gauges(
                "warmroute_worker_predicted_tokens",
                "Tokens a worker is believed to hold.",
            ),
            pinned_handoffs: gauges(
                "warmroute_worker_pinned_handoffs",
                "Prompts that a worker computed for others and keeps, since they were not fetched yet or never will be.",
            ),
            pinned_tokens: gauges(
                "warmroute_worker_pinned_tokens",
                "Tokens of the prompts that a worker keeps for others.",
            ),
        }
    }

    pub(super) fn observe(&self, relay: &Relay, now: Instant) {
        for gauges in [
            &self.up,
            &self.draining,
            &self.circuit_breaker,
            &self.requests,
            &self.queued_tokens,
            &self.decode_tokens,
            &self.reported_running,
            &self.reported_waiting,
            &self.predicted_tokens,
            &self.pinned_handoffs,
            &self.pinned_tokens,
        ] {
            gauges.reset();
        }
        for status in &relay.fleet().snapshot().workers {
            let worker = &status.worker;
            let set = |gauges: &IntGaugeVec, value: u64| {
                gauges
                    .with_label_values(&[&worker.name])
                    .set(i64::try_from(value).unwrap_or(i64::MAX));
            };
            set(&self.up, u64::from(status.health == Health::Up));
            set(&self.draining, u64::from(status.draining));
            set(
                &self.circuit_breaker,
                u64::from(worker.breaker.state().number()),
            );
            set(&self.requests, u64::from(worker.load.own_requests()));
            set(&self.queued_tokens, worker.load.queued_tokens());
            set(&self.decode_tokens, worker.load.decode_tokens());
            if let Some(reported) = worker.load.reported() {
                set(&self.reported_running, u64::from(reported.running));
                set(&self.reported_waiting, u64::from(reported.waiting));
            }
            set(&self.predicted_tokens, relay.predicted().size(worker.id).1);
            let pinned = relay.pinned(now, worker.id);
            if let Some((handoffs, tokens)) = pinned.filter(|_| worker.role != Role::Decode) {
                set(&self.pinned_handoffs, handoffs as u64);
                set(&self.pinned_tokens, tokens);
            }
        }
    }
}
