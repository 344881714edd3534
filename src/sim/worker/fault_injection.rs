//! Carries out the faults that strike before the engine gets a request.

use std::time::Duration;

use hyper::header;

use super::error::ApiError;
use super::http_answer::{Answer, error};
use crate::sim::fault::Faults;

/// Hangs, rejects or delays an inference request. Returns the answer if the request is rejected.
pub(crate) async fn before_the_engine(faults: &Faults) -> Option<Answer> {
    if faults.hang || faults.asleep {
        // Ends when the client disconnects.
        std::future::pending::<()>().await;
    }
    if let Some(status) = faults.refuse {
        let mut rejection = error(&ApiError::injected(status));
        if let Some(seconds) = faults.retry_after {
            let headers = rejection.headers_mut();
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        return Some(rejection);
    }
    delay(faults.slow_first_ms).await;
    None
}

pub(crate) async fn delay_tokenization(faults: &Faults) {
    delay(faults.slow_tokens_ms).await;
}

async fn delay(milliseconds: u64) {
    if milliseconds > 0 {
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    }
}
