//! Repeats the ends that the store has lost: after a failover to a copy that did not have them.

use std::time::Duration;

use tracing::{debug, info};

use super::recent_ends::{self, EndWrite};
use super::runs::Background;
use crate::observe;
use crate::store::{self, CancelOutcome, ResponseKey, ResponseStore, WriteOutcome};

/// Time between two looks at what is due.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) async fn run(background: &Background, store: &dyn ResponseStore) {
    while !background.tasks.is_stopping() {
        background.pause(INTERVAL).await;
        let due = background.recent_ends.lock().due(observe::now());
        let (known, unknown): (Vec<_>, Vec<_>) = due
            .into_iter()
            .partition(|(_, write)| write.fence().is_some());
        let fences = known
            .iter()
            .filter_map(|(key, write)| Some((*key, write.fence()?)));
        let fences: Vec<_> = fences.collect();
        let lost = if fences.is_empty() {
            Vec::new()
        } else {
            // While the store is away nothing can be repeated; the next check comes.
            match store.check_ownership(fences).await {
                Ok(lost) => lost,
                Err(_) => continue,
            }
        };
        let is_running = |key: &ResponseKey| !lost.iter().any(|(lost, _)| lost == key);
        for (key, write) in known {
            if is_running(&key) {
                repeat(background, store, key, &write).await;
            }
        }
        for (key, write) in unknown {
            repeat(background, store, key, &write).await;
        }
    }
}

/// Writes an end again. If the store has it, nothing changes.
pub(super) async fn repeat(
    background: &Background,
    store: &dyn ResponseStore,
    key: ResponseKey,
    write: &EndWrite,
) {
    let is_done = match write {
        EndWrite::Finalized(fence, end) => {
            let mut end = end.clone();
            let mut tries = 0;
            loop {
                tries += 1;
                let result = store.finalize(key, *fence, end.clone()).await;
                let may_adapt = tries < recent_ends::TRIES_MAX;
                if let Ok(outcome) = &result
                    && may_adapt
                    && recent_ends::adapt(&mut end, outcome)
                {
                    continue;
                }
                break result.map(|outcome| outcome == WriteOutcome::Done);
            }
        }
        EndWrite::Cancelled { cancel, output } => {
            match store.cancel(key, cancel.clone()).await {
                Ok(CancelOutcome::Done { .. }) => {
                    background.on_cancelled(key, observe::now());
                    if let Some((fence, output)) = output {
                        let stored = store.finalize_cancelled(key, *fence, output.clone()).await;
                        debug!(response_id = %key.id, ?stored, "output of a cancelled response stored again");
                    }
                    // The same reply as to the first cancel.
                    return;
                }
                Ok(_) => Ok(false),
                Err(error) => Err(error),
            }
        }
    };
    report(background, key, &is_done);
}

fn report(background: &Background, key: ResponseKey, is_done: &Result<bool, store::Error>) {
    match is_done {
        Ok(true) => {
            background.metrics.ends_repeated.inc();
            info!(response_id = %key.id, "the store had lost the end of a background response; it is stored again");
        }
        Ok(false) => {}
        Err(error) => {
            debug!(response_id = %key.id, %error, "end of a background response not repeated");
        }
    }
}
