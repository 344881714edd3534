//! Writes JSON and server-sent events. Pure.

use serde::Serialize;

pub(crate) const DONE: &str = "data: [DONE]\n\n";

pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("these values have string keys only")
}

/// An event without a name, as in chat completions.
pub(crate) fn event(data: &impl Serialize) -> String {
    format!("data: {}\n\n", json(data))
}

/// An event with a name, as in the Responses API.
pub(crate) fn named_event(name: &str, data: &impl Serialize) -> String {
    format!("event: {name}\ndata: {}\n\n", json(data))
}
