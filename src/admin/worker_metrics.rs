//! Gauges and counters of each worker. They are set when they are scraped: requests do not pay for them, and a worker
//! that left has no stale value.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use prometheus::{IntCounterVec, IntGaugeVec};

use crate::fleet::health::Health;
use crate::fleet::{Role, Status};
use crate::observe::metrics::Registry;
use crate::relay::Relay;

type Read = fn(&Status, &Relay, Instant) -> Option<u64>;

const GAUGES: [(&str, &str, Read); 16] = [
    (
        "warmroute_worker_up",
        "1 for a worker that answers its health probes, else 0.",
        |status, _, _| Some(u64::from(status.health == Health::Up)),
    ),
    (
        "warmroute_worker_draining",
        "1 for a worker that gets no new requests because it drains, else 0.",
        |status, _, _| Some(u64::from(status.draining)),
    ),
    (
        "warmroute_circuit_breaker_state",
        "A worker's circuit breaker: 0 closed, 1 half-open, 2 open.",
        |status, _, _| Some(u64::from(status.worker.breaker.state().number())),
    ),
    (
        "warmroute_worker_requests",
        "Requests of this router that run on a worker.",
        |status, _, _| Some(u64::from(status.worker.load.own_requests())),
    ),
    (
        "warmroute_worker_queued_tokens",
        "Uncached prompt tokens of this router's requests that a worker has accepted and not computed yet, as the router counts them.",
        |status, _, _| Some(status.worker.load.own_queued_tokens()),
    ),
    (
        "warmroute_worker_context_tokens",
        "Prompt tokens of all requests of this router at a worker, which its answers read again with each token.",
        |status, _, _| Some(status.worker.load.own_context_tokens()),
    ),
    (
        "warmroute_worker_prefill_tokens_per_second",
        "Prompt tokens that a worker computes in a second, as learnt or configured. None before enough was seen.",
        |status, _, _| Some(status.worker.prefill_rate()?.0 as u64),
    ),
    (
        "warmroute_worker_step_microseconds",
        "What a step of a worker's engine takes beside its prompts and answers, as learnt. None before enough was seen.",
        |status, _, _| {
            let is_learnt = status.worker.speed_samples() > 0;
            let step = status.worker.load.speed.get().step;
            is_learnt.then_some((step * 1e6) as u64)
        },
    ),
    (
        "warmroute_worker_slots",
        "Answers that a worker generates at the same time, as learnt or configured. None before enough was seen.",
        |status, _, _| Some(status.worker.known_slots()?.into()),
    ),
    (
        "warmroute_worker_free_slots",
        "Requests that a worker may still get before others wait for it: its slots and an eighth more, less its requests of all replicas.",
        |status, _, _| Some(status.worker.free_slots()?.into()),
    ),
    (
        "warmroute_worker_reported_running",
        "Running requests, as the engine reports them.",
        |status, _, _| Some(status.worker.load.reported()?.running.into()),
    ),
    (
        "warmroute_worker_reported_waiting",
        "Waiting requests, as the engine reports them.",
        |status, _, _| Some(status.worker.load.reported()?.waiting.into()),
    ),
    (
        "warmroute_worker_predicted_tokens",
        "Tokens that the router predicts to be in a worker's prefix cache.",
        |status, relay, _| Some(relay.predicted().size(status.worker.id).1),
    ),
    (
        "warmroute_worker_unusable_event_sources",
        "Publishers of KV events that an engine lists and that cannot be followed, because it connects out instead of listening. \
         Routing predicts the worker's cache.",
        |status, _, _| Some(status.facts.unusable_events.len() as u64),
    ),
    (
        "warmroute_worker_kv_transfers_pending",
        "Prompts whose blocks a prefill worker keeps until they are fetched or the engine's lease ends.",
        |status, relay, now| Some(pending(status, relay, now)?.0),
    ),
    (
        "warmroute_worker_kv_transfer_tokens_pending",
        "Tokens of the prompts that a prefill worker keeps for decode workers.",
        |status, relay, now| Some(pending(status, relay, now)?.1),
    ),
];

/// Reads a worker's counter.
type Count = fn(&Status) -> u64;

/// Counters since the worker joined.
const COUNTERS: [(&str, &str, Count); 4] = [
    (
        "warmroute_worker_prompt_tokens_total",
        "Prompt tokens of answers whose prompts a worker computed, as engines report them; of a pair its prefill worker counts, unless a gateway sends it.",
        |status| status.worker.usage.prompt_tokens(),
    ),
    (
        "warmroute_worker_cached_prompt_tokens_total",
        "Of warmroute_worker_prompt_tokens_total, those that engines report as read from the worker's prefix cache.",
        |status| status.worker.usage.cached_tokens(),
    ),
    (
        "warmroute_worker_health_check_failures_total",
        "Health checks of a worker that failed, sleep and the router's own lack of resources aside.",
        |status| status.worker.health_failures.load(Relaxed),
    ),
    (
        "warmroute_worker_bootstrap_failures_total",
        "Questions to a prefill worker's bootstrap server that failed; what it said last counts.",
        |status| status.worker.bootstrap_failures.load(Relaxed),
    ),
];

/// Prompts that wait for their transfer, and their tokens.
fn pending(status: &Status, relay: &Relay, now: Instant) -> Option<(u64, u64)> {
    if status.worker.role == Role::Decode {
        return None;
    }
    let (prompts, tokens) = relay.pinned(now, status.worker.id)?;
    Some((prompts as u64, tokens))
}

#[derive(Debug)]
pub(super) struct WorkerMetrics {
    gauges: [IntGaugeVec; GAUGES.len()],
    counters: [IntCounterVec; COUNTERS.len()],
}

impl WorkerMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            gauges: GAUGES.map(|(name, help, _)| registry.gauges(name, help, &["worker"])),
            counters: COUNTERS.map(|(name, help, _)| registry.counters(name, help, &["worker"])),
        }
    }

    pub(super) fn update(&self, relay: &Relay, now: Instant) {
        let snapshot = relay.fleet().snapshot();
        for (gauge, (_, _, read)) in self.gauges.iter().zip(GAUGES) {
            gauge.reset();
            for status in &snapshot.workers {
                if let Some(value) = read(status, relay, now) {
                    let value = i64::try_from(value).unwrap_or(i64::MAX);
                    gauge.with_label_values(&[&status.worker.name]).set(value);
                }
            }
        }
        for (counter, (_, _, read)) in self.counters.iter().zip(COUNTERS) {
            counter.reset();
            for status in &snapshot.workers {
                let of_worker = counter.with_label_values(&[&status.worker.name]);
                of_worker.inc_by(read(status));
            }
        }
    }
}
