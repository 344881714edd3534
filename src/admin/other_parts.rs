//! What the pages need of parts that this one does not import.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use hyper::StatusCode;
use serde_json::Value;

use super::config::RunningConfig;
use crate::prompt::Api;

pub type Answering<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The configuration, the Responses API and batches.
pub trait OtherParts: fmt::Debug + Send + Sync {
    fn config(&self) -> RunningConfig;

    /// Reads the configuration's file again. Resolves with the status and the body of the answer.
    fn reload(&self) -> Answering<(StatusCode, Value)>;

    fn responses(&self) -> Value;

    /// The body that an engine would be sent for a client's body, as a request of the named tenant, and its API; or why
    /// there is none.
    fn engine_body(
        &self,
        api: Api,
        tenant: Option<String>,
        body: Bytes,
    ) -> Answering<Result<(Api, Bytes), String>>;

    /// Batches that run here; `None` without storage for them.
    fn batches(&self) -> Option<Value>;
}
