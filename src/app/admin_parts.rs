//! What operators' pages show of the configuration, the Responses API and batches.

use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hyper::StatusCode;
use serde_json::Value;

use super::reload;
use crate::admin::{Answering, OtherParts, RunningConfig};
use crate::api::dry_run::DryRun;
use crate::batches::Batches;
use crate::prompt::Api;

#[derive(Debug)]
pub(super) struct AdminParts {
    pub(super) reload: reload::Handle,
    pub(super) dry_run: Arc<ArcSwap<DryRun>>,
    pub(super) batches: Option<Arc<Batches>>,
}

impl OtherParts for AdminParts {
    fn config(&self) -> RunningConfig {
        self.reload.status.page()
    }

    fn reload(&self) -> Answering<(StatusCode, Value)> {
        let reload = self.reload.clone();
        Box::pin(async move { reload.answer().await })
    }

    fn responses(&self) -> Value {
        serde_json::to_value(self.dry_run.load().counts()).unwrap_or_default()
    }

    fn engine_body(
        &self,
        api: Api,
        tenant: Option<String>,
        body: Bytes,
    ) -> Answering<Result<(Api, Bytes), String>> {
        let dry_run = self.dry_run.load_full();
        Box::pin(async move { dry_run.engine_body(api, tenant.as_deref(), body).await })
    }

    fn batches(&self) -> Option<Value> {
        let batches = self.batches.as_ref()?;
        Some(serde_json::to_value(batches.running()).unwrap_or_default())
    }
}
