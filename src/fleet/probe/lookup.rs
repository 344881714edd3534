//! Asks all workers for their models while requests wait for one that is not known.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tracing::{debug, info};

use super::models;
use crate::fleet::Status;
use crate::fleet::health::Health;
use crate::fleet::model_lookup;
use crate::fleet::registry::Registry;
use crate::observe;

/// Workers that are asked at the same time.
const MAX_CONCURRENT: usize = 64;

pub async fn run(registry: Arc<Registry>) {
    let lookup = registry.model_lookup();
    let mut last: Option<Instant> = None;
    loop {
        lookup.next().await;
        let interval = registry.settings().model_lookup.interval;
        let due = model_lookup::due(last, interval, observe::now());
        tokio::time::sleep_until(due.into()).await;
        lookup.start();
        last = Some(observe::now());
        ask_all(&registry).await;
        lookup.finish();
    }
}

async fn ask_all(registry: &Arc<Registry>) {
    let settings = registry.settings().clone();
    let limit = settings.health.timeout.min(settings.model_lookup.timeout);
    let snapshot = registry.snapshot().clone();
    let mut asked = JoinSet::new();
    let is_up = |status: &&Status| status.health == Health::Up;
    for status in snapshot.workers.iter().filter(is_up) {
        if asked.len() >= MAX_CONCURRENT {
            asked.join_next().await;
        }
        let (status, registry) = (status.clone(), registry.clone());
        asked.spawn(async move { ask(&status, &registry, limit).await });
    }
    while asked.join_next().await.is_some() {}
}

async fn ask(status: &Status, registry: &Registry, limit: Duration) {
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
