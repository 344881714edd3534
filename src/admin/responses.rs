//! `GET /responses`: responses by status, and the state of their store.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::store::{self, ResponseStore};

/// `GET /responses`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ResponsesReport {
    #[serde(skip_deserializing)]
    responses: Value,
    pub health: store::Health,
    #[serde(skip_deserializing)]
    store: Option<store::Report>,
    /// Why the store gave no report.
    error: Option<String>,
}

/// `counts`: those of the Responses API.
pub(super) async fn page(store: &dyn ResponseStore, counts: Value) -> ResponsesReport {
    let report = store.report().await;
    ResponsesReport {
        responses: counts,
        health: store.health(),
        error: report.as_ref().err().map(ToString::to_string),
        store: report.ok(),
    }
}
