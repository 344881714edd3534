//! The pairs of prefill and decode workers, as part of `GET /fleet`.

use std::sync::Arc;

use serde::Serialize;

use crate::fleet::handoff::Connector;
use crate::fleet::handoff::pairs::Pairs;

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
        let unverified = pairs.not_proved();
        let names =
            |(prefill, decode): (Arc<str>, Arc<str>)| [prefill.to_string(), decode.to_string()];
        let incompatible = pairs.unable.into_iter().map(|unable| IncompatibleRow {
            reason: unable.why.as_str(),
            message: unable.why.to_string(),
            count: unable.count,
            examples: unable.such_as.into_iter().map(names).collect(),
        });
        Self {
            connector,
            count: pairs.count,
            unverified,
            incompatible: incompatible.collect(),
            unpaired: pairs.alone.iter().map(|name| name.to_string()).collect(),
        }
    }
}
