//! Fails a response that was taken over although this replica cannot decode its stored request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;
use tracing::warn;

use super::run_step::StopReason;
use super::runs::RunGuard;
use crate::responses::events::final_event;
use crate::responses::object::{with_member, with_output};
use crate::responses::service::Responses;
use crate::store::record::{Content, Retention};
use crate::store::{
    self, EventBatch, Finalization, IdempotencyToken, Record, Status, WriteOutcome,
};

const PAUSE: Duration = Duration::from_millis(200);
const ERROR: &str = r#"{"code":"server_error","message":"The replica that ran this response was lost, and its stored request cannot be read."}"#;

pub(super) fn spawn(responses: Arc<Responses>, guard: RunGuard) {
    responses
        .tasks
        .clone()
        .spawn(async move { end(&responses, &guard).await });
}

/// Stores the failure, unless another replica has taken the response over.
pub(super) async fn end(responses: &Responses, guard: &RunGuard) {
    warn!(response_id = %guard.key.id, "stored request of a background response cannot be decoded; the response fails");
    let mut stop = guard.run.stop.subscribe();
    tokio::select! {
        biased;
        _ = stop.wait_for(|reason| *reason == Some(StopReason::LeaseLost)) => {}
        () = fail(responses, guard) => {}
    }
}

async fn fail(responses: &Responses, guard: &RunGuard) {
    let (key, fence) = (guard.key, guard.run.fence);
    let token = IdempotencyToken(fastrand::u64(..));
    loop {
        let result = match responses.store.get(key).await {
            Ok(Some(record)) => {
                let end = failed(record, token);
                responses.store.finalize(key, fence, end).await
            }
            Ok(None) => return,
            Err(error) => Err(error),
        };
        match result {
            Ok(WriteOutcome::Done) => return responses.metrics.on_end(Status::Failed),
            // An event was stored meanwhile: the end gets the next number.
            Ok(
                WriteOutcome::Gap { .. } | WriteOutcome::Duplicate { .. } | WriteOutcome::Overflow,
            ) => {}
            Ok(
                WriteOutcome::Gone
                | WriteOutcome::Fenced
                | WriteOutcome::Terminal(_)
                | WriteOutcome::NotAdded(_),
            ) => return,
            Err(error) if error.retry_after().is_some() => sleep(PAUSE).await,
            Err(error @ store::Error::Unreadable(_)) => {
                // A replica of a newer release may be able to decode it.
                let _ = responses.store.release(key, fence).await;
                return warn!(response_id = %key.id, %error, "response record cannot be decoded; leaving it to other replicas");
            }
            Err(error) => {
                return warn!(response_id = %key.id, %error, "failure of a background response not stored");
            }
        }
    }
}

fn failed(record: Record, token: IdempotencyToken) -> Finalization {
    let response = with_member(&record.content.response, "status", "\"failed\"");
    let response = with_member(&response, "error", ERROR);
    let background = record.background.filter(|background| background.streams);
    let batch = background.map(|background| {
        let number = background.last_event.map_or(0, |last| last + 1);
        let object = with_output(&response, b"[]");
        let event = final_event(Status::Failed, number, &object);
        EventBatch::new(number, number, event)
    });
    Finalization {
        commit: None,
        retention: Retention::Stored,
        token,
        status: Status::Failed,
        content: Content {
            response: response.into(),
            output: b"[]".as_slice().into(),
        },
        hint: record.hint,
        batch,
        delta_table: Bytes::new(),
    }
}
