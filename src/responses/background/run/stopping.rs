//! What stops a run before its end: a request, the drain, its time limit, or another replica that took it over.

use tokio::time::{Instant, sleep_until};

use crate::responses::background::run_step::StopReason;
use crate::responses::background::runs::RunGuard;
use crate::responses::service::Responses;

/// Resolves when the run must stop generating, `until` at the latest.
pub(super) async fn stopped(responses: &Responses, guard: &RunGuard, until: Instant) -> StopReason {
    let mut stop = guard.run.stop.subscribe();
    let requested = async {
        match stop.wait_for(Option::is_some).await {
            Ok(reason) => (*reason).unwrap_or(StopReason::LeaseLost),
            Err(_) => StopReason::LeaseLost,
        }
    };
    let drained = async {
        responses.tasks.stopped().await;
        // A run that no engine has started is released at once; the others have until the end of the drain.
        let has_started = guard.run.state.lock().has_engine_started;
        if has_started {
            responses.tasks.aborted().await;
        }
        StopReason::Draining
    };
    tokio::select! {
        biased;
        reason = requested => reason,
        reason = drained => reason,
        () = sleep_until(until) => StopReason::TimeLimit,
    }
}

/// Resolves when another replica owns the response.
pub(super) async fn lease_lost(guard: &RunGuard) {
    let mut stop = guard.run.stop.subscribe();
    let _ = stop
        .wait_for(|reason| *reason == Some(StopReason::LeaseLost))
        .await;
}
