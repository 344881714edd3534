//! Errors of the Files API. Messages are OpenAI's own where OpenAI has such an error.

use std::fmt::Display;
use std::time::Duration;

use hyper::StatusCode;

use super::ApiError;
use crate::observe::shortened;

impl ApiError {
    pub fn unknown_file(id: &str) -> Self {
        let message = format!("No such File object: {}", shortened(id));
        Self::new(StatusCode::NOT_FOUND, "", message).param("id")
    }

    pub fn no_form(content_type: &str) -> Self {
        let given = match content_type {
            "" => "no 'content-type'".to_owned(),
            given => format!("the 'content-type' '{}'", shortened(given)),
        };
        let message = format!(
            "Send the file as a form, with the 'content-type' 'multipart/form-data' and its boundary, as SDKs and \
             `curl -F purpose=batch -F file=@batch.jsonl` do. This request has {given}."
        );
        Self::bad("invalid_form", message)
    }

    /// The body is no form, or it does not say where its parts end.
    pub fn bad_form(error: &dyn Display) -> Self {
        let message = format!(
            "the request body is not a form (multipart/form-data) that can be read: {error}"
        );
        Self::bad("invalid_form", message)
    }

    pub fn unknown_parameter(param: &str) -> Self {
        let param = shortened(param);
        let message = format!("Unknown parameter: '{param}'.");
        Self::bad("unknown_parameter", message).param(param)
    }

    pub fn repeated_parameter(param: &str) -> Self {
        let message = format!("Duplicate parameter: '{param}'. Send it once.");
        Self::bad("duplicate_parameter", message).param(param)
    }

    pub fn unsupported_purpose(purpose: &str) -> Self {
        let message = format!(
            "Invalid value: '{}'. Supported values are: 'batch'.",
            shortened(purpose)
        );
        Self::bad("invalid_value", message).param("purpose")
    }

    pub fn empty_file() -> Self {
        let message = "Invalid 'file': the file is empty.";
        Self::bad("empty_file", message).param("file")
    }

    pub fn file_too_large(max: u64) -> Self {
        let message = format!("The file is larger than {max} bytes, the maximum of this router.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "file_too_large", message).param("file")
    }

    /// Not 429: SDKs would send the file again.
    pub fn too_many_files(max: u64) -> Self {
        let message = format!("You have {max} files, the maximum. Please delete old files.");
        Self::bad("too_many_files", message)
    }

    pub fn file_quota_exceeded(max: u64) -> Self {
        let message = format!(
            "You have exceeded your file storage quota of {max} bytes. Please delete old files or attempt with a \
             smaller file size."
        );
        Self::bad("file_storage_quota_exceeded", message)
    }

    /// The tenant's uploads that run.
    pub fn too_many_uploads(max: usize) -> Self {
        let message = format!("Too many uploads are running for this tenant (limit {max}).");
        let status = StatusCode::TOO_MANY_REQUESTS;
        Self::new(status, "rate_limit_exceeded", message).retry_after(Duration::from_secs(1))
    }

    /// The uploads of all tenants that run on this replica.
    pub fn uploads_full() -> Self {
        let message = "the router receives as many files as its memory allows; try again later";
        Self::unavailable("router_overloaded", message).retry_after(Duration::from_secs(1))
    }

    /// Says nothing about which files there are.
    pub fn storage_failed() -> Self {
        let message = "file storage failed; try again later";
        Self::unavailable("storage_unavailable", message).retry_after(Duration::from_secs(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_that_is_no_form_is_told_the_command_that_sends_one() {
        let message = ApiError::no_form("application/json").message;
        let command = "`curl -F purpose=batch -F file=@batch.jsonl`";
        assert!(message.contains(command), "{message}");
        assert!(!message.contains("  "), "{message}");
    }
}
