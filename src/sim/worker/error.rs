//! The errors of a vLLM server: status and body. Pure.

use serde_json::json;

use crate::sim::engine::Refused;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: u16,
    kind: &'static str,
    message: String,
    param: Option<String>,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
        }
    }

    fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequestError", message)
    }

    pub(crate) fn bad_param(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request(message).with_param(param)
    }

    pub(crate) fn missing_field(name: &str, fields: usize) -> Self {
        let location = format!("body.{name}");
        let details = format!(
            "{{'type': 'missing', 'loc': '{location}', 'msg': 'Field required', 'input': '<dict of {fields} items>'}}"
        );
        Self::validation(&details).with_param(location)
    }

    /// The error for a body that is not valid JSON or has fields of wrong types.
    pub(crate) fn unreadable(body: &[u8], error: &serde_json::Error) -> Self {
        if error.is_data() {
            let details = format!("{{'type': 'value_error', 'loc': 'body', 'msg': '{error}'}}");
            return Self::validation(&details).with_param("body");
        }
        let location = format!("body.{}", offset(body, error));
        let details = format!(
            "{{'type': 'json_invalid', 'loc': '{location}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': '{error}'}}}}"
        );
        Self::validation(&details).with_param(location)
    }

    pub(crate) fn media_type() -> Self {
        Self::validation("Unsupported Media Type: Only 'application/json' is allowed")
    }

    fn validation(details: &str) -> Self {
        Self::new(
            400,
            "Bad Request",
            format!("1 validation error:\n  {details}"),
        )
    }

    pub(crate) fn unknown_model(name: &str, known: &[String]) -> Self {
        let known = known.join(", ");
        let message = format!("The model `{name}` does not exist. Valid aliases: {known}.");
        Self::new(404, "NotFoundError", message).with_param("model")
    }

    pub(crate) fn unknown_response(id: &str) -> Self {
        let message = format!("Response with id '{id}' not found.");
        Self::new(404, "invalid_request_error", message).with_param("response_id")
    }

    pub(crate) fn too_long(tokens: usize, tokens_max: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {tokens_max} tokens. However, your prompt contains {tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})"
        );
        Self::bad_param("input_tokens", message)
    }

    pub(crate) fn answer_too_long(param: &str, tokens: usize, tokens_max: usize) -> Self {
        let message = format!(
            "{param}={tokens} cannot be greater than max_model_len={tokens_max}. Please request fewer output tokens. (parameter={param}, value={tokens})"
        );
        Self::bad_param(param, message)
    }

    pub(crate) fn scale_out_disabled() -> Self {
        Self {
            status: 403,
            kind: "PermissionDeniedError",
            ..Self::bad_request("This endpoint needs --enable-scale-out.")
        }
    }

    pub(crate) fn engine_error() -> Self {
        let message =
            "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Self::new(500, "InternalServerError", message)
    }

    /// The error of a fault inside the engine, for example when a KV transfer fails.
    pub(crate) fn internal() -> Self {
        Self::new(500, "InternalServerError", "Internal server error")
    }

    /// The answer of the fault `refuse`.
    pub(crate) fn injected(status: u16) -> Self {
        match status {
            503 => Self::from(Refused::Busy),
            _ => Self::new(
                status,
                "InternalServerError",
                "Rejected by an injected fault.",
            ),
        }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The body of an error event in a stream, which Python writes with spaces.
    pub(crate) fn event_body(&self) -> String {
        let message = json!(self.message);
        let param = json!(self.param);
        let (kind, code) = (self.kind, self.status);
        format!(
            "{{\"error\": {{\"message\": {message}, \"type\": \"{kind}\", \"param\": {param}, \"code\": {code}}}}}"
        )
    }

    pub(crate) fn body(&self) -> String {
        let error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        });
        json!({ "error": error }).to_string()
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::new(
                503,
                "Service Unavailable",
                "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.",
            ),
            Refused::Empty => Self::bad_request("The decoder prompt cannot be empty"),
            Refused::TooLong => Self::bad_param(
                "input_tokens",
                "The prompt and its answer are longer than the KV cache.",
            ),
        }
    }
}

/// The byte offset in the body at which parsing failed.
fn offset(body: &[u8], error: &serde_json::Error) -> usize {
    let lines = body.split_inclusive(|byte| *byte == b'\n');
    let before: usize = lines
        .take(error.line().saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    before + error.column()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_bodies_are_those_of_a_real_server() {
        let unknown = ApiError::unknown_model("nope", &["tiny".to_owned()]);
        assert_eq!(
            unknown.body(),
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError","param":"model","code":404}}"#
        );
        assert_eq!(
            ApiError::missing_field("messages", 1).body(),
            r#"{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}","type":"Bad Request","param":"body.messages","code":400}}"#
        );
    }

    #[test]
    fn an_error_event_is_written_with_spaces() {
        assert_eq!(
            ApiError::internal().event_body(),
            r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#
        );
    }

    #[test]
    fn invalid_json_is_reported_with_its_offset() {
        let body = br#"{"model": "tiny", "#;
        let error = serde_json::from_slice::<serde_json::Value>(body).unwrap_err();
        let error_body = ApiError::unreadable(body, &error);
        assert_eq!(error_body.param.as_deref(), Some("body.18"));
        assert_eq!((error_body.status, error_body.kind), (400, "Bad Request"));
    }
}
