//! Asks workers for their models while adapters are requested that they may have loaded by now.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tracing::{debug, info};

use super::models;
use crate::fleet::Status;
use crate::fleet::health::Health;
use crate::fleet::model_lookup::{self, Round};
use crate::fleet::registry::Registry;
use crate::observe;

/// Workers that are asked at the same time.
const MAX_CONCURRENT: usize = 64;

pub async fn run(registry: Arc<Registry>) {
    let lookup = &registry.model_lookup;
    let mut last: Option<Instant> = None;
    // How many workers were asked in rounds that ask some.
    let mut asked = 0;
    loop {
        lookup.next().await;
        let settings = registry.settings().model_lookup.clone();
        let due = model_lookup::due(last, settings.interval, observe::now());
        tokio::time::sleep_until(due.into()).await;
        let round = lookup.start();
        last = Some(observe::now());
        let up = up(&registry);
        match round {
            Round::All => {
                ask(up.iter(), &registry).await;
                lookup.finish();
            }
            Round::Some => {
                let count = up.len().min(settings.workers_per_round as usize);
                let from = asked % up.len().max(1);
                ask(up.iter().cycle().skip(from).take(count), &registry).await;
                asked = from + count;
            }
        }
    }
}

fn up(registry: &Registry) -> Vec<Status> {
    let snapshot = registry.snapshot();
    let workers = snapshot.workers.iter();
    let up = workers.filter(|status| status.health == Health::Up);
    up.cloned().collect()
}

async fn ask(workers: impl Iterator<Item = &Status>, registry: &Arc<Registry>) {
    let settings = registry.settings().clone();
    let limit = settings.health.timeout.min(settings.model_lookup.timeout);
    let mut asked = JoinSet::new();
    for status in workers {
        if asked.len() >= MAX_CONCURRENT {
            asked.join_next().await;
        }
        let (status, registry) = (status.clone(), registry.clone());
        asked.spawn(async move { ask_one(&status, &registry, limit).await });
    }
    while asked.join_next().await.is_some() {}
}

async fn ask_one(status: &Status, registry: &Registry, limit: Duration) {
    let worker = &status.worker;
    match models::fetch(worker, limit).await {
        // Most workers list what is known: that takes no search for the worker.
        Ok(found) if status.facts.models.keys().eq(found.models.keys()) => {}
        Ok(found) if !found.models.is_empty() => {
            let (models, adapters) = (found.models, found.adapters);
            registry.set_models(worker.id, models, adapters);
            info!(worker = %worker.name, "models of the worker have changed");
        }
        Ok(_) => {}
        Err(error) => debug!(worker = %worker.name, error, "cannot list models"),
    }
}
