//! Errors of WebSocket mode. Codes and messages are OpenAI's own where OpenAI has such an error.

use std::fmt::Display;
use std::time::Duration;

use hyper::StatusCode;

use super::ApiError;
use crate::observe::shortened;

impl ApiError {
    pub fn bad_frame(error: &dyn Display) -> Self {
        let message = format!("the frame is not a JSON object: {error}");
        Self::bad("invalid_json", message)
    }

    pub fn binary_frame() -> Self {
        let message = "a binary frame was sent; every event is JSON in a text frame";
        Self::bad("binary_frame", message)
    }

    pub fn unknown_frame(kind: &str) -> Self {
        let message = format!(
            "unknown event type `{}`; send `response.create`",
            shortened(kind)
        );
        Self::bad("unknown_event_type", message).param("type")
    }

    pub fn invalid_stream_id() -> Self {
        let message = "The 'stream_id' field must be a non-empty string with at most 256 characters and may only \
                       contain letters, numbers, underscores, hyphens, and periods.";
        Self::bad("invalid_stream_id", message).param("stream_id")
    }

    pub fn too_many_streams(max: usize) -> Self {
        let message = format!(
            "This WebSocket connection has reached its maximum number of distinct stream IDs ({max}). Reuse an \
             existing stream_id or open a new WebSocket connection."
        );
        Self::bad("websocket_stream_limit_reached", message).param("stream_id")
    }

    pub fn old_connection(minutes: u64) -> Self {
        let message = format!(
            "Responses websocket connection limit reached ({minutes} minutes). Create a new websocket connection to \
             continue."
        );
        Self::bad("websocket_connection_limit_reached", message)
    }

    /// As many turns of the connection wait as may.
    pub fn too_many_queued() -> Self {
        let message = "too many turns of this connection wait already; wait until some have ended";
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            "websocket_queue_full",
            message,
        )
    }

    /// The key of an open connection is no longer that of its tenant.
    pub fn other_tenant() -> Self {
        let message =
            "the API key of this connection is another tenant's now; open a new connection";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// As many connections are open as may be: over all tenants, or of one.
    pub fn too_many_websockets(is_of_tenant: bool) -> Self {
        let (status, setting) = if is_of_tenant {
            (StatusCode::TOO_MANY_REQUESTS, "max_connections_per_tenant")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "max_connections")
        };
        let message = format!(
            "as many WebSockets are open as may be (responses.websocket.{setting}); close one, or use \
             `POST /v1/responses`"
        );
        Self::new(status, "too_many_websockets", message).retry_after(Duration::from_secs(1))
    }

    pub fn bad_handshake(header: &str, why: &str) -> Self {
        let message = format!("the WebSocket handshake is not valid: `{header}` {why}");
        Self::bad("invalid_handshake", message).param(header)
    }
}
