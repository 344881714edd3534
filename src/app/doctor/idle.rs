//! Workers that have nothing to do while others of their model have more than they can take. Pure.

use super::finding::Finding;
use super::observed::Observed;
use super::workers;
use crate::admin::WorkerRow;
use crate::http::circuit_breaker;

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let models = workers::by_model(observed).into_iter();
    models
        .filter_map(|(model, workers)| of_model(observed, model, &workers))
        .collect()
}

fn of_model(observed: &Observed, model: &str, all: &[&WorkerRow]) -> Option<Finding> {
    let value = |metric: &str, worker: &WorkerRow| {
        let labels = [("worker", worker.name.as_str())];
        observed.value(metric, &labels)
    };
    let requests = |worker: &WorkerRow| {
        let peers = worker.peers.iter().map(|peer| peer.requests);
        u64::from(worker.requests) + peers.sum::<u64>()
    };
    // What an engine has reported is seconds old, and the metrics are read later than the fleet: a worker without a
    // request has nothing that waits, whatever they say.
    let is_busy = |worker: &&&WorkerRow| {
        let waits = value("warmroute_worker_reported_waiting", worker);
        let free = value("warmroute_worker_free_slots", worker);
        let is_full = waits.is_some_and(|waits| waits > 0.0) || free == Some(0.0);
        is_full && requests(worker) > 0
    };
    let busy: Vec<&WorkerRow> = all.iter().filter(is_busy).copied().collect();
    // What computes prompts only is no help to who generates.
    let is_alike = |worker: &&&WorkerRow| busy.iter().any(|busy| busy.role == worker.role);
    let is_idle = |worker: &&&WorkerRow| requests(worker) == 0 && !worker.is_draining;
    let idle: Vec<&WorkerRow> = all
        .iter()
        .filter(is_idle)
        .filter(is_alike)
        .copied()
        .collect();
    if idle.is_empty() || busy.is_empty() {
        return None;
    }
    let kept_out: Vec<&WorkerRow> = idle
        .iter()
        .filter(|worker| worker.circuit_breaker == circuit_breaker::State::Open)
        .copied()
        .collect();
    let policy = observed.config["routing"]["policy"].as_str();
    let change = match policy {
        _ if !kept_out.is_empty() => format!(
            "the circuit breakers of {} are open: their engines' logs, or the reason in warmroute's",
            workers::names(&kept_out)
        ),
        Some("cache_aware") | None => "POST /explain with one of the requests: it shows what each worker would cost, and why. \
             What is learnt of a speed may be wrong (GET /fleet, `speed`); `prefill_rate` and `slots` of a worker count before it"
            .to_owned(),
        Some(policy) => format!("routing: {{policy: cache_aware}}; {policy} does not look at load, or not first"),
    };
    Some(Finding {
        rule: "workers_idle_beside_busy",
        model: Some(model.to_owned()),
        is_broken: false,
        cost: 0.5 * idle.len() as f64 / all.len() as f64,
        problem: format!(
            "{} have no request of {model}, while requests wait for the slots of {}",
            workers::names(&idle),
            workers::names(&busy)
        ),
        effect: "requests wait although there is room",
        change,
    })
}
