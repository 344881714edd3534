//! A list of names that may be written as one name.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

/// The forms in which a list of names is written: one name, or a list.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum OneOrList {
    One(String),
    List(Vec<String>),
}

/// Reads names from any of their forms.
pub(super) fn one_or_list<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrList::deserialize(deserializer)? {
        OneOrList::One(name) => vec![name],
        OneOrList::List(names) => names,
    })
}
