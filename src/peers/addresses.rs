//! How an address is at which another replica is expected. Pure.

use super::handshake::InstanceId;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddressState {
    Connecting,
    /// This replica's own.
    Itself,
    Connected(InstanceId),
    NotListening,
    Lost(String),
    /// One side does not accept the other.
    Refused(String),
}

impl AddressState {
    /// What pages show, with the reason; `None` for an address that is another row, or none.
    pub(super) fn shown(&self) -> Option<(&'static str, Option<String>)> {
        Some(match self {
            Self::Connected(_) | Self::Itself => return None,
            Self::Connecting => ("unreachable", None),
            Self::NotListening => ("unreachable", Some("nothing listens there".to_owned())),
            Self::Lost(reason) => ("unreachable", Some(reason.clone())),
            Self::Refused(reason) => ("refused", Some(reason.clone())),
        })
    }

    /// Whether there should be another replica. Where nothing listens there is none, and a replica is not cut off from
    /// itself.
    pub(super) fn is_replica_expected(&self) -> bool {
        !matches!(self, Self::Itself | Self::NotListening)
    }
}
