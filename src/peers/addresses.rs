//! The addresses at which other replicas are expected, and how each is. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handshake::InstanceId;

/// How a listed address is.
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
}

/// All listed addresses.
#[derive(Debug, Default)]
pub(super) struct Addresses(BTreeMap<Arc<str>, AddressState>);

impl Addresses {
    pub(super) fn keep(&mut self, is_listed: impl Fn(&str) -> bool) {
        self.0.retain(|address, _| is_listed(address));
    }

    pub(super) fn set(&mut self, address: &Arc<str>, state: AddressState) {
        self.0.insert(address.clone(), state);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &AddressState> {
        self.0.values()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &AddressState)> {
        self.0.iter()
    }

    /// Whether there should be another replica. Where nothing listens there is none, and a replica is not cut off from
    /// itself.
    pub(super) fn are_replicas_expected(&self) -> bool {
        let is_expected = |state: &AddressState| {
            !matches!(state, AddressState::Itself | AddressState::NotListening)
        };
        self.0.values().any(is_expected)
    }
}
