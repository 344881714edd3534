//! Forgets what was recorded about caches that are gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::fleet::registry;
use crate::http::supervisor::Supervisor;
use crate::ids::WorkerId;
use crate::kv::predicted::PredictedIndex;
use crate::kv::subscriber::StatusBoard;
use crate::kv::unconfirmed::UnconfirmedBlocks;
use crate::observe;
use crate::relay::LastingState;

/// How often expired predictions are removed while the fleet does not change.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(5);
/// How often unconfirmed blocks are compared with what workers have reported: often, so that there are few.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(100);

/// Removes what is recorded about a worker's cache when the worker has left the fleet or its engine has
/// restarted.
pub(super) async fn forget(
    fleet: Arc<registry::Registry>,
    lasting: LastingState,
    predicted: Arc<PredictedIndex>,
    unconfirmed: Arc<UnconfirmedBlocks>,
    supervisor: Supervisor,
) {
    let mut changes = fleet.changes();
    let mut incarnations: BTreeMap<WorkerId, u64> = BTreeMap::new();
    loop {
        let snapshot = fleet.snapshot().clone();
        let current: BTreeMap<WorkerId, u64> = snapshot
            .workers
            .iter()
            .map(|status| (status.worker.id, status.incarnation))
            .collect();
        let look = async {
            for (worker, incarnation) in &current {
                if incarnations
                    .get(worker)
                    .is_some_and(|before| before != incarnation)
                {
                    predicted.forget(observe::now(), *worker);
                    unconfirmed.forget(*worker);
                    lasting.forget_pinned(*worker);
                }
            }
            predicted.remove_expired(observe::now(), |worker| current.contains_key(&worker));
            lasting.forget_departed(&snapshot);
            incarnations = current;
        };
        // After a panic the next look forgets what this one did not come to: only this task knows which engines have restarted.
        supervisor.attempt("lost_caches", look).await;
        tokio::time::sleep(registry::CHANGES_APART).await;
        // Also without a change: a request that was running when its worker left may have recorded the
        // worker again, and expired predictions must go even if no request comes.
        if let Ok(Err(_)) = tokio::time::timeout(EXPIRY_INTERVAL, changes.changed()).await {
            return;
        }
    }
}

/// Removes unconfirmed blocks that their workers have reported, or should have.
pub(super) async fn confirm(unconfirmed: Arc<UnconfirmedBlocks>, board: Arc<StatusBoard>) {
    loop {
        tokio::time::sleep(CONFIRM_INTERVAL).await;
        unconfirmed.remove_ended(observe::now(), |worker| board.applied_at(worker));
    }
}
