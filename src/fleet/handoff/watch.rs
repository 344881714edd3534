//! The task that tells in the log which pairs cannot hand over, whenever that changes.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Connector;
use super::pairs::{self, NAMED_MAX, Pairs};
use crate::fleet::registry::Registry;

/// Workers come one by one; what is said of them waits until they are there.
const SETTLE: Duration = Duration::from_secs(1);

pub async fn run(registry: Arc<Registry>, connector: Connector, topology: String) {
    let mut changes = registry.changes();
    changes.mark_changed();
    let mut told = Pairs::default();
    let mut told_unplaced = Vec::new();
    loop {
        if changes.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(SETTLE).await;
        changes.mark_unchanged();
        let snapshot = registry.snapshot().clone();
        let unplaced = pairs::unplaced(&snapshot, &topology);
        if unplaced != told_unplaced {
            if !unplaced.is_empty() {
                warn!(
                    topology,
                    count = unplaced.len(),
                    workers = ?&unplaced[..unplaced.len().min(NAMED_MAX)],
                    "workers without the label of the topology; they are pairs with each other alone"
                );
            }
            told_unplaced = unplaced;
        }
        let pairs = Pairs::of(&snapshot, connector, &topology);
        if pairs != told {
            tell(connector, &pairs, &told);
            told = pairs;
        }
    }
}

/// Says what is not as it was.
fn tell(connector: Connector, pairs: &Pairs, before: &Pairs) {
    for unable in pairs.unable.iter().filter(|it| !before.unable.contains(it)) {
        warn!(
            %connector,
            pairs = unable.count,
            such_as = ?unable.such_as.first(),
            why = %unable.why,
            "prefill workers that cannot hand over to decode workers"
        );
    }
    if !pairs.alone.is_empty() && pairs.alone != before.alone {
        warn!(%connector, workers = ?pairs.alone, "workers with nobody to hand over to, or to take from");
    }
    // Whether engines understand each other is only seen by trying.
    info!(
        %connector,
        not_proved = pairs.not_proved(),
        unable = pairs.count - pairs.not_proved(),
        "pairs of prefill and decode workers"
    );
}
