//! Errors of the Batches APIs. Messages are OpenAI's own where OpenAI has such an error.

use std::time::Duration;

use hyper::StatusCode;

use super::ApiError;
use crate::observe::shortened;

/// Until a line is tried again that the configuration of this replica refuses. After a minute its shard is given back.
const CONFIGURATION_PAUSE: Duration = Duration::from_secs(20);

impl ApiError {
    pub fn unknown_batch(id: &str) -> Self {
        let message = format!("No batch found with id '{}'.", shortened(id));
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    /// A client asks for files or batches of a router without storage for them.
    pub fn no_batches() -> Self {
        let message = "files and batches are not configured on this router: set `batches` in its configuration, with \
                       `folder: DIR` for one router or `s3: {bucket: NAME}` for several";
        Self::new(StatusCode::NOT_FOUND, "batches_not_configured", message)
    }

    /// The storage of this replica is not the one that all replicas share. `marker`: the path of the object that it
    /// lacks. Another replica can answer.
    pub fn batch_storage_differs(marker: &str) -> Self {
        let message = format!(
            "this replica's storage of files and batches is not the one of the other replicas: it has no object \
             '{marker}'. Mount the folder of the others at 'batches.folder', or set 'batches.s3' as the others have it."
        );
        Self::unavailable("batch_storage_differs", message).retry_after(Duration::from_secs(2))
    }

    /// What is created would be kept for too long or too short a time. Another replica may answer.
    pub fn batch_clock_differs() -> Self {
        let message = "the clocks of this replica and of its store are more than five minutes apart: set the wrong one \
                       by NTP";
        Self::unavailable("batch_clock_differs", message).retry_after(Duration::from_secs(2))
    }

    /// Not 409: SDKs would try again.
    pub fn not_cancellable(status: &str) -> Self {
        let message = format!("Cannot cancel a batch with status '{status}'.");
        Self::bad("batch_not_cancellable", message)
    }

    /// What is asked for is possible only once the batch has ended.
    pub fn batch_not_ended(what: &str) -> Self {
        let message = format!("The batch has not ended yet, so that {what}.");
        Self::bad("batch_not_ended", message)
    }

    pub fn no_batch_results(id: &str) -> Self {
        let message = format!("The batch '{}' has no results.", shortened(id));
        Self::new(StatusCode::NOT_FOUND, "", message)
    }

    /// Not 409: SDKs would try again.
    pub fn file_in_use(id: &str, batch: &str) -> Self {
        let id = shortened(id);
        let message = format!(
            "The file '{id}' is the input of the batch '{batch}', which has not ended. Cancel the batch first, or wait \
             for its end."
        );
        Self::bad("file_in_use", message).param("id")
    }

    pub fn unknown_input_file(id: &str) -> Self {
        let message = format!("No such File object: {}", shortened(id));
        Self::bad("invalid_value", message).param("input_file_id")
    }

    /// Not 429: SDKs would try again.
    pub fn too_many_batches(max: u64) -> Self {
        let message = format!(
            "You have {max} batches, the maximum of this router. Wait until one has ended; Message Batches that have \
             ended can be deleted."
        );
        Self::bad("too_many_batches", message)
    }

    /// The body that creates a batch of Messages.
    pub fn invalid_batch_requests(message: &str) -> Self {
        Self::bad("invalid_value", message).param("requests")
    }

    /// The configuration of this replica does not have the tenant of a batch, as that of another one had. The line
    /// waits for another replica, or for the next configuration.
    pub fn no_tenant_of_batch() -> Self {
        let message = "the configuration of this replica does not have the tenant of this batch";
        Self::unavailable("unknown_tenant", message).retry_after(CONFIGURATION_PAUSE)
    }

    /// The configuration of this replica does not let the tenant of a batch use the model of a line, as that of the
    /// replica did which has checked the line. The line waits as without a tenant.
    pub fn no_model_of_batch(model: &str) -> Self {
        let message = format!(
            "the configuration of this replica does not let the tenant of this batch use the model '{}'",
            shortened(model)
        );
        Self::unavailable("model_not_found", message).retry_after(CONFIGURATION_PAUSE)
    }

    pub fn too_long_line_answer(max: u64) -> Self {
        let message = format!("the answer is longer than {max} bytes, which a batch can keep");
        let mut error = Self::new(StatusCode::BAD_GATEWAY, "answer_too_long", message);
        error.should_retry = Some(false);
        error.is_counted = true;
        error
    }
}
