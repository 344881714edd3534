//! Errors of JSON Web Tokens.

use std::time::Duration;

use hyper::StatusCode;

use super::ApiError;
use crate::jwt::Rejection;

/// Looks at the keys of an issuer are retried sooner than this at first.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl ApiError {
    /// A token that is not accepted.
    pub fn token(rejection: &Rejection) -> Self {
        let message = rejection.to_string();
        if matches!(rejection, Rejection::NoKeys | Rejection::StaleKeys) {
            return Self::unavailable("issuer_keys_unavailable", message).retry_after(RETRY_AFTER);
        }
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }
}
