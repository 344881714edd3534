//! Workers, as the rules look at them. Pure.

use std::collections::BTreeMap;

use super::finding::listed;
use super::observed::Observed;
use crate::admin::WorkerRow;
use crate::fleet::engine::Engine;
use crate::fleet::health::Health;

pub(super) fn names(workers: &[&WorkerRow]) -> String {
    listed(workers.iter().map(|worker| &worker.name))
}

/// What to do about a worker that is down.
pub(super) fn why_down(worker: &WorkerRow) -> String {
    let why = worker.last_error.as_deref().unwrap_or("no answer");
    format!(
        "{}: {why}; repair the engine, or take it out of `workers` or `discovery`",
        worker.name
    )
}

pub(super) fn up(observed: &Observed) -> impl Iterator<Item = &WorkerRow> {
    observed
        .fleet
        .workers
        .iter()
        .filter(|worker| worker.health == Health::Up)
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
