//! Finds out whether an engine serves the Responses API.

use std::time::Duration;

use super::served_api::{self, OptionalApi};
use crate::fleet::{Facts, ResponsesApi, Worker};

const API: OptionalApi = OptionalApi {
    path: "/v1/responses",
    otherwise: "it is sent chat completions",
};

/// Whether the worker needs chat completions: an engine without the path, or one whose answers to chat completions
/// are better than those of its own Responses API (SGLang). Asked only where the configuration does not say.
pub(super) async fn is_lacking(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    if worker.responses != ResponsesApi::Auto {
        return false;
    }
    if facts.capabilities().prefers_chat {
        return true;
    }
    served_api::is_lacking(worker, &API, facts.lacks_responses, limit).await
}
