//! The task that logs which workers cannot transfer KV blocks to each other, whenever that changes.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::connector::Connector;
use super::pairs::{self, MAX_EXAMPLES, Pairs};
use crate::fleet::registry::Registry;

/// Wait after a change, because workers join one after the other.
const SETTLE_TIME: Duration = Duration::from_secs(1);

pub async fn run(registry: Arc<Registry>, connector: Connector) {
    let mut changes = registry.changes();
    changes.mark_changed();
    let mut logged = Pairs::default();
    let mut logged_unlabelled = Vec::new();
    loop {
        if changes.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(SETTLE_TIME).await;
        changes.mark_unchanged();
        let snapshot = registry.snapshot().clone();
        let topology = &*registry.topology();
        let unlabelled = pairs::unlabelled(&snapshot, topology);
        if unlabelled != logged_unlabelled {
            if !unlabelled.is_empty() {
                warn!(
                    topology,
                    count = unlabelled.len(),
                    workers = ?&unlabelled[..unlabelled.len().min(MAX_EXAMPLES)],
                    "workers without the topology label; they are paired only with each other"
                );
            }
            logged_unlabelled = unlabelled;
        }
        let pairs = Pairs::of(&snapshot, connector, topology);
        if pairs != logged {
            log_changes(connector, &pairs, &logged);
            logged = pairs;
        }
    }
}

fn log_changes(connector: Connector, pairs: &Pairs, before: &Pairs) {
    let is_new = |pairs: &&pairs::IncompatiblePairs| !before.incompatible.contains(pairs);
    for incompatible in pairs.incompatible.iter().filter(is_new) {
        warn!(
            %connector,
            pairs = incompatible.count,
            example = ?incompatible.examples.first(),
            reason = %incompatible.reason,
            "no KV transfer is possible between these prefill and decode workers"
        );
    }
    if !pairs.unpaired.is_empty() && pairs.unpaired != before.unpaired {
        warn!(%connector, workers = ?pairs.unpaired, "prefill or decode workers without a compatible partner");
    }
    info!(
        %connector,
        unverified = pairs.unverified(),
        incompatible = pairs.count - pairs.unverified(),
        "pairs of prefill and decode workers changed; `check --live --transfer` verifies them"
    );
}
