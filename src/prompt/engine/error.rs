//! Why an engine did not return the token ids of a prompt.

use crate::observe::metrics::words;

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Error: Display {
        /// The maximum number of tokenization requests is running.
        Busy = "engine_busy",
        /// No response within the configured timeout.
        Timeout = "engine_timeout",
        /// The connection failed, or the response is not one of this endpoint.
        Failed = "engine_failed",
        /// The engine responded that the body is invalid or the prompt too long.
        Refused = "engine_refused",
        /// No endpoint of the engine returns token ids for this body.
        Unsupported = "engine_unsupported",
    }
}

impl std::error::Error for Error {}

impl Error {
    /// What the error says about the engine, for its circuit breaker: `true` for success, `false` for failure, `None`
    /// if the engine was not called.
    pub fn engine_succeeded(self) -> Option<bool> {
        match self {
            Error::Timeout | Error::Failed => Some(false),
            Error::Refused => Some(true),
            Error::Busy | Error::Unsupported => None,
        }
    }
}
