//! Over which connection an attempt is sent, and when it is sent once more within the attempt, because the connection had been
//! closed while it was idle. That counts as no attempt, and takes nothing from the retry budget. Pure.
//!
//! What a connection that breaks means:
//!
//! | it | broke | the engine may have read the request | then |
//! |---|---|---|---|
//! | was idle, for however long | within a second (`http::client::Error::Stale`) | no | replaced by a new one |
//! | was idle for a second or more | within a second | yes | replaced, if the request may be sent twice |
//! | was idle for less, or may not be replaced | within a second | yes | a cut (`failure::cuts`); no worker's fault, nothing from the retry budget |
//! | was idle, or is new | later, a new one at any time (`Broken`) | yes | a cut; the request's or the worker's fault (`failure::evidence`) |

use std::time::Duration;

/// A server's keep-alive limit is seconds. A connection that was idle for less and breaks was rather cut because of
/// the request.
const IDLE_LIMIT_MIN: Duration = Duration::from_secs(1);

/// Whether a request may be sent over a connection that was kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Reuse {
    /// One that turns out to be closed is replaced by a new one, once.
    Replaced,
    /// One that was used so recently that no server closes it for its age. It is not replaced if the engine may have read
    /// the request.
    Young,
    Never,
}

impl Reuse {
    /// For what may be sent once only: a KV transfer that can take place once.
    #[must_use]
    pub(in crate::relay) fn without_replacement(self) -> Self {
        match self {
            Self::Replaced | Self::Young => Self::Young,
            Self::Never => Self::Never,
        }
    }

    /// For how long the connection may have been idle. `None`: it must be a new one.
    pub(in crate::relay) fn max_idle(self) -> Option<Duration> {
        match self {
            Self::Replaced => Some(Duration::MAX),
            Self::Young => Some(IDLE_LIMIT_MIN),
            Self::Never => None,
        }
    }

    /// Whether the request is sent again over a new connection, after one broke at once that had been idle for `idle`.
    pub(in crate::relay) fn replaces(self, idle: Duration, may_have_been_read: bool) -> bool {
        !may_have_been_read || self == Self::Replaced && idle >= IDLE_LIMIT_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_may_have_been_read_is_sent_again_only_after_a_long_idle_time() {
        let (short, long) = (Duration::from_millis(999), IDLE_LIMIT_MIN);
        for reuse in [Reuse::Replaced, Reuse::Young, Reuse::Never] {
            assert!(reuse.replaces(short, false) && reuse.replaces(long, false));
            assert!(!reuse.replaces(short, true));
            assert_eq!(reuse.replaces(long, true), reuse == Reuse::Replaced);
        }
    }

    #[test]
    fn what_may_be_sent_once_only_never_goes_over_a_connection_that_a_server_may_be_closing() {
        for (reuse, expected) in [
            (Reuse::Replaced, Some(IDLE_LIMIT_MIN)),
            (Reuse::Young, Some(IDLE_LIMIT_MIN)),
            (Reuse::Never, None),
        ] {
            assert_eq!(reuse.without_replacement().max_idle(), expected);
        }
    }
}
