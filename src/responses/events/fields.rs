//! The members of an engine's event that the router reads. Pure.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// All members borrow from the event's text, so that each can be replaced in place.
#[derive(Deserialize)]
pub(super) struct EventFields<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) sequence_number: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) item_id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) output_index: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) content_index: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) delta: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) item: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) part: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) response: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) message: Option<&'a RawValue>,
    /// Older engines send null, which clients do not accept.
    #[serde(borrow, default, deserialize_with = "given")]
    pub(super) logprobs: Option<&'a RawValue>,
}

/// A member that is present, even if it is null.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl EventFields<'_> {
    /// The engine's own index of the item.
    pub(super) fn engine_index(&self) -> Option<u64> {
        self.output_index?.get().parse().ok()
    }
}
