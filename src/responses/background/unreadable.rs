//! The end of a response of which a lost replica kept nothing that this one can read: it fails, as the
//! record has it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::warn;

use super::run_state::StopReason;
use super::{RunGuard, reader};
use crate::responses::Responses;
use crate::responses::object::{with_member, with_output};
use crate::store::record::Content;
use crate::store::{
    self, EventBatch, Finalization, IdempotencyToken, Record, Status, WriteOutcome,
};

const PAUSE: Duration = Duration::from_millis(200);
const ERROR: &str = r#"{"code":"server_error","message":"The replica that ran this response was lost, and what it kept cannot be read."}"#;

pub(super) fn spawn(responses: Arc<Responses>, guard: RunGuard) {
    responses
        .tasks
        .clone()
        .spawn(async move { end(&responses, &guard).await });
}

/// Ends it so, where it sits.
pub(super) async fn end(responses: &Responses, guard: &RunGuard) {
    warn!(id = %guard.key.id, "what a lost replica kept of a response cannot be read");
    let mut stop = guard.run.stop.subscribe();
    tokio::select! {
        biased;
        _ = stop.wait_for(|why| *why == Some(StopReason::LeaseLost)) => {}
        () = fail(responses, guard) => {}
    }
}

async fn fail(responses: &Responses, guard: &RunGuard) {
    let (key, fence) = (guard.key, guard.run.fence);
    let token = IdempotencyToken(fastrand::u64(..));
    loop {
        let said = match responses.store.get(key).await {
            Ok(Some(record)) => {
                let end = failed(record, token);
                responses.store.finalize(key, fence, end).await
            }
            Ok(None) => return,
            Err(error) => Err(error),
        };
        match said {
            Ok(WriteOutcome::Done) => return responses.metrics.on_end(Status::Failed),
            // An event came in between: the end is told after it.
            Ok(
                WriteOutcome::Gap { .. } | WriteOutcome::Duplicate { .. } | WriteOutcome::Overflow,
            ) => {}
            Ok(WriteOutcome::Gone | WriteOutcome::Fenced | WriteOutcome::Terminal(_)) => return,
            Err(error) if error.retry_after().is_some() => sleep(PAUSE).await,
            Err(error @ store::Error::Unreadable(_)) => {
                // A newer release's replica, if there is one, reads it.
                let _ = responses.store.release(key, fence).await;
                return warn!(id = %key.id, %error, "it is left to others");
            }
            Err(error) => return warn!(id = %key.id, %error, "it was not ended"),
        }
    }
}

fn failed(record: Record, token: IdempotencyToken) -> Finalization {
    let response = with_member(&record.content.response, "status", "\"failed\"");
    let response = with_member(&response, "error", ERROR);
    let background = record.background.filter(|it| it.streams);
    let batch = background.map(|background| {
        let number = background.last_event.map_or(0, |last| last + 1);
        let told = with_output(&response, b"[]");
        EventBatch {
            first: number,
            last: number,
            bytes: reader::told("response.failed", number, &told).into(),
        }
    });
    Finalization {
        token,
        status: Status::Failed,
        content: Content {
            response: response.into(),
            output: b"[]".as_slice().into(),
        },
        hint: record.hint,
        batch,
        delta_table: bytes::Bytes::new(),
    }
}
