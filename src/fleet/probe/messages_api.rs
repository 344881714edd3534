//! Finds out whether an engine serves Anthropic's Messages.

use std::time::Duration;

use super::served_api::{self, OptionalApi};
use crate::fleet::{Facts, Worker};

const API: OptionalApi = OptionalApi {
    path: "/v1/messages",
    otherwise: "it gets no such requests",
};

/// As before (`facts`) if the worker does not answer.
pub(super) async fn is_lacking(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    served_api::is_lacking(worker, &API, facts.lacks_messages, limit).await
}
