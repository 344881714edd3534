//! `/responses`: what became of responses, and how the store of them is.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use crate::prompt::Api;
use crate::store::{self, ResponseStore};

/// What the API counts of responses, when it is asked.
type Counts = Box<dyn Fn() -> Value + Send + Sync>;

/// What an engine would be sent for a client's body, or why not.
type Foretold = Pin<Box<dyn Future<Output = Result<Bytes, String>> + Send>>;

/// Foretells it for a tenant of that name, if there is one.
type Foretell = Box<dyn Fn(Api, Option<String>, Bytes) -> Foretold + Send + Sync>;

/// The page, and what readiness depends on.
pub struct ResponsesPage {
    store: Arc<dyn ResponseStore>,
    counts: Counts,
    foretell: Foretell,
    needs_store: bool,
}

impl fmt::Debug for ResponsesPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponsesPage").finish_non_exhaustive()
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Shown {
    responses: Value,
    health: store::Health,
    store: Option<store::Report>,
    /// Why there is no report of the store.
    error: Option<String>,
}

impl ResponsesPage {
    /// With `needs_store` a router is ready only while its store is up.
    pub fn new(
        store: Arc<dyn ResponseStore>,
        counts: Counts,
        foretell: Foretell,
        needs_store: bool,
    ) -> Self {
        Self {
            store,
            counts,
            foretell,
            needs_store,
        }
    }

    pub(super) async fn show(&self) -> Shown {
        let report = self.store.report().await;
        Shown {
            responses: (self.counts)(),
            health: self.store.health(),
            error: report.as_ref().err().map(ToString::to_string),
            store: report.ok(),
        }
    }

    pub(super) async fn foretell(
        &self,
        api: Api,
        tenant: Option<String>,
        body: Bytes,
    ) -> Result<Bytes, String> {
        (self.foretell)(api, tenant, body).await
    }

    /// Asks the store if it must be up: one that nobody uses would not be missed.
    pub(super) async fn is_ready(&self) -> bool {
        !self.needs_store || self.store.admit().await.is_ok()
    }
}
