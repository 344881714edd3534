//! Why an engine did not return the token ids of a prompt.

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.reason())]
pub enum Error {
    /// The maximum number of tokenization requests is running.
    Busy,
    /// No response within the configured timeout.
    Timeout,
    /// The connection failed, or the response is not one of this endpoint.
    Failed,
    /// The engine responded that the body is invalid or the prompt too long.
    Refused,
    /// No endpoint of the engine returns token ids for this body.
    Unsupported,
}

impl Error {
    /// Every value of `reason`, in the order of the variants.
    pub const REASONS: [&'static str; 5] = [
        "engine_busy",
        "engine_timeout",
        "engine_failed",
        "engine_refused",
        "engine_unsupported",
    ];

    /// The label value in metrics.
    pub fn reason(self) -> &'static str {
        Self::REASONS[self as usize]
    }

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
