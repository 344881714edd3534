//! The pairs of prefill and decode workers, as part of `GET /fleet`.

use std::sync::Arc;

use serde::Serialize;

use crate::fleet::kv_transfer::Connector;
use crate::fleet::kv_transfer::pairs::Pairs;

#[derive(Debug, Serialize)]
pub(super) struct PairsRow {
    connector: Connector,
    /// Pairs of a prefill and a decode worker that are both up.
    count: usize,
    /// Pairs of which nothing speaks against a KV transfer. Whether one works is shown by
    /// `check --live --transfer`.
    unverified: usize,
    incompatible: Vec<IncompatibleRow>,
    /// Workers without a compatible partner.
    unpaired: Vec<String>,
}

#[derive(Debug, Serialize)]
struct IncompatibleRow {
    reason: &'static str,
    message: String,
    count: usize,
    /// Some of the pairs, each as prefill worker and decode worker.
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
