//! What an event is about. Pure.

use std::fmt;

use crate::ids::Tenant;
use crate::store::keys::ResponseKey;

/// Identifies what has ended, by which an outbox knows its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EventKey {
    Response(ResponseKey),
    Batch(BatchKey),
}

/// Identifies a batch of the Batch API of a tenant, by the 128 bits of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchKey {
    pub tenant: Tenant,
    pub number: u128,
}

impl BatchKey {
    /// `None` if `id` is no id of such a batch.
    pub fn of(tenant: Tenant, id: &str) -> Option<Self> {
        let digits = id.strip_prefix("batch_")?;
        let number = u128::from_str_radix(digits, 16).ok()?;
        let key = Self { tenant, number };
        (key.to_string() == id).then_some(key)
    }
}

impl fmt::Display for BatchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch_{:032x}", self.number)
    }
}

impl EventKey {
    pub fn tenant(self) -> Tenant {
        match self {
            Self::Response(key) => key.tenant,
            Self::Batch(key) => key.tenant,
        }
    }

    /// What it is, as the types of events begin.
    pub(super) fn subject(self) -> &'static str {
        match self {
            Self::Response(_) => "response",
            Self::Batch(_) => "batch",
        }
    }
}

/// The id of the response or batch, as its client knows it.
impl fmt::Display for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Response(key) => fmt::Display::fmt(&key.id, f),
            Self::Batch(key) => fmt::Display::fmt(key, f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_known_by_its_whole_id() {
        let tenant = Tenant::tagged(1);
        let id = "batch_000000000000000000000000000000ab";
        let key = BatchKey::of(tenant, id).unwrap();
        assert_eq!((key.number, key.to_string()), (0xab, id.to_owned()));
        for wrong in [
            "",
            "batch_ab",
            "batch_000000000000000000000000000000AB",
            "batch_+00000000000000000000000000000ab",
            "msgbatch_000000000000000000000000000000ab",
        ] {
            assert_eq!(BatchKey::of(tenant, wrong), None, "{wrong}");
        }
    }
}
