//! Errors of limits, as OpenAI writes them.

use hyper::StatusCode;

use super::ApiError;
use crate::limits::Refusal;

impl ApiError {
    /// The limits of a tenant refuse a request.
    pub fn limited(refusal: &Refusal) -> Self {
        let message = refusal.to_string();
        let retry_after = refusal.retry_after();
        match refusal {
            Refusal::Rate { .. } | Refusal::TooLarge { .. } | Refusal::Concurrent { .. } => Self {
                retry_after,
                counted: Some(refusal.counted()),
                should_retry: retry_after.is_none().then_some(false),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_exceeded",
                    message,
                )
            },
            Refusal::Model { .. } => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            Refusal::MaxTokens { .. } => Self::bad("invalid_value", message).param("max_tokens"),
            Refusal::Type { param } => Self::bad("invalid_type", message).param(param),
            Refusal::Store { .. } => Self {
                retry_after,
                ..Self::unavailable("limits_unavailable", message)
            },
        }
    }
}
