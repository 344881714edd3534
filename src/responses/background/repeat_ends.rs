//! Repeats the ends that the store has lost: after a failover to a copy that did not have them.

use std::time::Duration;

use tracing::{debug, info};

use super::recent_ends::{self, EndWrite};
use crate::observe;
use crate::responses::service::Responses;
use crate::store::{self, CancelOutcome, ResponseKey, WriteOutcome};

/// Time between two looks at what is due.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) async fn run(responses: &Responses) {
    let background = &responses.background;
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
            match responses.store.check_ownership(fences).await {
                Ok(lost) => lost,
                Err(_) => continue,
            }
        };
        let is_running = |key: &ResponseKey| !lost.iter().any(|(lost, _)| lost == key);
        for (key, write) in known {
            if is_running(&key) {
                repeat(responses, key, &write).await;
            }
        }
        for (key, write) in unknown {
            repeat(responses, key, &write).await;
        }
    }
}

/// Writes an end again. If the store has it, nothing changes.
pub(super) async fn repeat(responses: &Responses, key: ResponseKey, write: &EndWrite) {
    let is_done = match write {
        EndWrite::Finalized(fence, end) => {
            let mut end = end.clone();
            let mut tries = 0;
            loop {
                tries += 1;
                let result = responses.store.finalize(key, *fence, end.clone()).await;
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
            match responses.store.cancel(key, cancel.clone()).await {
                Ok(CancelOutcome::Done { .. }) => {
                    responses.background.on_cancelled(key, observe::now());
                    if let Some((fence, output)) = output {
                        let store = &responses.store;
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
    report(responses, key, &is_done);
}

fn report(responses: &Responses, key: ResponseKey, is_done: &Result<bool, store::Error>) {
    match is_done {
        Ok(true) => {
            responses.background.metrics.ends_repeated.inc();
            info!(response_id = %key.id, "the store had lost the end of a background response; it is stored again");
        }
        Ok(false) => {}
        Err(error) => {
            debug!(response_id = %key.id, %error, "end of a background response not repeated");
        }
    }
}
