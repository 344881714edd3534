//! `GET /responses`: responses by status, and the state of their store.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::prompt::Api;
use crate::store::{self, ResponseStore};

/// Reads the Responses API's counts.
type Counts = Box<dyn Fn() -> Value + Send + Sync>;

/// The body that an engine would be sent, and its API, or why there is none.
type EngineBody = Pin<Box<dyn Future<Output = Result<(Api, Bytes), String>> + Send>>;

/// Prepares a client's body for an engine, as a request of the named tenant.
type DryRun = Box<dyn Fn(Api, Option<String>, Bytes) -> EngineBody + Send + Sync>;

/// What the operator's pages need of the Responses API. Functions, because these two parts do not import
/// each other.
pub struct ResponsesPage {
    store: Arc<dyn ResponseStore>,
    counts: Counts,
    dry_run: DryRun,
}

impl fmt::Debug for ResponsesPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponsesPage").finish_non_exhaustive()
    }
}

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

impl ResponsesPage {
    pub fn new(store: Arc<dyn ResponseStore>, counts: Counts, dry_run: DryRun) -> Self {
        Self {
            store,
            counts,
            dry_run,
        }
    }

    pub(super) async fn page(&self) -> ResponsesReport {
        let report = self.store.report().await;
        ResponsesReport {
            responses: (self.counts)(),
            health: self.store.health(),
            error: report.as_ref().err().map(ToString::to_string),
            store: report.ok(),
        }
    }

    pub(super) async fn engine_body(
        &self,
        api: Api,
        tenant: Option<String>,
        body: Bytes,
    ) -> Result<(Api, Bytes), String> {
        (self.dry_run)(api, tenant, body).await
    }
}
