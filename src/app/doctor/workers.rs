//! Workers, as the rules look at them. Pure.

use std::collections::BTreeMap;

use super::finding::{SHOWN, listed};
use super::observed::Observed;
use crate::admin::WorkerRow;
use crate::fleet::engine::Engine;
use crate::fleet::health::Health;

pub(super) fn names(workers: &[&WorkerRow]) -> String {
    listed(workers.iter().map(|worker| &worker.name))
}

pub(super) fn why_down(down: &[&WorkerRow]) -> String {
    let reason = |worker: &&WorkerRow| {
        let why = worker.last_error.as_deref().unwrap_or("no answer");
        format!("{}: {why}", worker.name)
    };
    let mut reasons: Vec<String> = down.iter().take(SHOWN).map(reason).collect();
    if let Some(more @ 1..) = down.len().checked_sub(SHOWN) {
        reasons.push(format!("and {more} more"));
    }
    let (engines, them) = match down.len() {
        1 => ("engine", "it"),
        _ => ("engines", "them"),
    };
    format!(
        "{}; repair the {engines}, or take {them} out of `workers` or `discovery`",
        reasons.join("; ")
    )
}

/// Workers that are up and serve a model. One that serves none has a finding of its own, and what else it lacks says nothing.
pub(super) fn up(observed: &Observed) -> impl Iterator<Item = &WorkerRow> {
    healthy(observed).filter(|worker| !worker.models.is_empty())
}

/// Workers whose health checks succeed.
pub(super) fn healthy(observed: &Observed) -> impl Iterator<Item = &WorkerRow> {
    let workers = observed.fleet.workers.iter();
    workers.filter(|worker| worker.health == Health::Up)
}

pub(super) fn is_sglang(worker: &WorkerRow) -> bool {
    worker.facts.engine == Engine::Sglang
}

/// The workers of each model that are up.
pub(super) fn by_model(observed: &Observed) -> BTreeMap<&str, Vec<&WorkerRow>> {
    let mut models: BTreeMap<&str, Vec<&WorkerRow>> = BTreeMap::new();
    for worker in up(observed) {
        for model in &worker.models {
            models.entry(model).or_default().push(worker);
        }
    }
    models
}

/// How many workers `/fleet` lists with a model, whether they are up or not.
pub(super) fn listed_with(observed: &Observed, model: &str) -> usize {
    let workers = observed.fleet.workers.iter();
    let serving = workers.filter(|worker| worker.models.iter().any(|served| served == model));
    serving.count()
}

/// The values of a model's workers, with the workers, if there is more than one value.
pub(super) fn different<K: Ord>(
    workers: &[&WorkerRow],
    value: impl Fn(&WorkerRow) -> Option<K>,
) -> Option<BTreeMap<K, Vec<String>>> {
    let mut values: BTreeMap<K, Vec<String>> = BTreeMap::new();
    for worker in workers {
        if let Some(value) = value(worker) {
            values.entry(value).or_default().push(worker.name.clone());
        }
    }
    (values.len() > 1).then_some(values)
}
