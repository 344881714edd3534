//! What a run continues is kept for as long as the run lasts, and for as long as its response is kept.

use std::future::pending;
use std::time::Duration;

use tokio::time::sleep;
use tracing::debug;

use crate::responses::service::Responses;
use crate::store::ResponseKey;
use crate::store::record::Retention;

/// How often the store is asked at the end of a run while it is away. The end is written without an answer.
const TRIES_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(200);

/// Extends the retention of what the response continues again and again. Does not return.
pub(super) async fn keep(responses: &Responses, key: ResponseKey, continues: bool) {
    let retention = responses.settings.store.retention.responses;
    if !continues || retention.is_zero() {
        return pending().await;
    }
    loop {
        sleep(retention / 2).await;
        if let Err(error) = responses.store.keep_chain(key).await {
            debug!(response_id = %key.id, %error, "retention of what a background response continues not extended");
        }
    }
}

/// How long the ended response is kept: if something that it continues was deleted meanwhile, only to be polled.
pub(super) async fn at_end(responses: &Responses, key: ResponseKey) -> Retention {
    for _ in 0..TRIES_MAX {
        match responses.store.keep_chain(key).await {
            // It was deleted itself: the write of the end says so.
            Ok(Some(missing)) if missing != key.id => {
                debug!(response_id = %key.id, %missing, "background response kept for polling only, because one that it continues was deleted");
                responses.metrics.on_not_stored("deleted");
                return Retention::Ephemeral;
            }
            Err(error) if error.retry_after().is_some() => sleep(PAUSE).await,
            Ok(_) | Err(_) => return Retention::Stored,
        }
    }
    Retention::Stored
}
