//! The pairs of prefill and decode workers, as part of `GET /fleet`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::fleet::kv_transfer::Connector;
use crate::fleet::kv_transfer::pairs::Pairs;

#[derive(Debug, Serialize, Deserialize)]
pub struct PairsRow {
    pub connector: Connector,
    /// Pairs of a prefill and a decode worker that are both up.
    #[serde(default)]
    pub count: usize,
    /// Pairs of which nothing speaks against a KV transfer. Whether one works is shown by
    /// `check --live --transfer`.
    #[serde(skip_deserializing)]
    unverified: usize,
    #[serde(default)]
    pub incompatible: Vec<IncompatibleRow>,
    /// Workers without a compatible partner.
    #[serde(default)]
    pub unpaired: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct IncompatibleRow {
    #[serde(skip_deserializing)]
    reason: &'static str,
    #[serde(default)]
    pub message: String,
    #[serde(default)]
    pub count: usize,
    /// Some of the pairs, each as prefill worker and decode worker.
    #[serde(skip_deserializing)]
    examples: Vec<[String; 2]>,
}

impl PairsRow {
    pub(super) fn new(connector: Connector, pairs: Pairs) -> Self {
        let unverified = pairs.unverified();
        let names =
            |(prefill, decode): (Arc<str>, Arc<str>)| [prefill.to_string(), decode.to_string()];
        let incompatible = pairs
            .incompatible
            .into_iter()
            .map(|same_reason| IncompatibleRow {
                reason: same_reason.reason.as_str(),
                message: same_reason.reason.to_string(),
                count: same_reason.count,
                examples: same_reason.examples.into_iter().map(names).collect(),
            });
        Self {
            connector,
            count: pairs.count,
            unverified,
            incompatible: incompatible.collect(),
            unpaired: pairs.unpaired.iter().map(|name| name.to_string()).collect(),
        }
    }
}
