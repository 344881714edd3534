//! Sends a body of the router's own to an engine through the relay.

use std::borrow::Cow;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Response, Uri};

use super::client_request::RequestContext;
use super::engine_error;
use super::service::Responses;
use crate::http;
use crate::openai::error::ApiError;
use crate::prompt::{self, Api};
use crate::relay;

/// How much of an engine's error is read: enough for its message.
const ERROR_BYTES_MAX: usize = 64 << 10;

impl Responses {
    pub(super) async fn ask_response(
        &self,
        context: &RequestContext<'_>,
        body: Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        self.ask(context, Api::Responses, "/v1/responses", body)
            .await
    }

    /// Sends `body` to an engine. An error status becomes an [`ApiError`].
    pub(super) async fn ask(
        &self,
        context: &RequestContext<'_>,
        api: Api,
        path: &'static str,
        body: Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        let headers = engine_headers(context.headers);
        let peek = prompt::peek_router_made(api, &body, self.relay.block_bytes())?;
        let job = relay::Job {
            api,
            target: Uri::from_static(path),
            headers: &headers,
            body: body.clone(),
            original: context.original,
            client: context.client,
            tenant: context.tenant,
            charge: context.charge,
            standing: context.standing,
            id: context.id,
            started: context.started,
            response: context.response,
            is_background: context.is_background,
            requested: None,
            strips_usage: false,
            summary: context.summary.cloned(),
        };
        let answer = self.relay.run(&job, peek).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let retry_after = engine_error::retry_after(answer.headers());
        let body = collect(answer.into_body(), ERROR_BYTES_MAX).await;
        let mut error = engine_error::of_engine(status, &body.unwrap_or_default());
        error.set_retry_after(retry_after);
        Err(error)
    }
}

/// The client's headers, adjusted to the router's body; no compression, since the router reads the answer.
fn engine_headers(headers: &HeaderMap) -> Cow<'_, HeaderMap> {
    const JSON: &str = "application/json";
    let kinds = headers.get_all(header::CONTENT_TYPE).iter();
    if kinds.eq([JSON]) && !headers.contains_key(header::ACCEPT_ENCODING) {
        return Cow::Borrowed(headers);
    }
    let mut headers = headers.clone();
    headers.remove(header::ACCEPT_ENCODING);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    Cow::Owned(headers)
}

/// Reads a whole answer of up to `bytes_max` bytes.
pub(super) async fn collect(mut body: http::Body, bytes_max: usize) -> Result<Bytes, ApiError> {
    let mut whole = Vec::new();
    let mut first = Bytes::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::invalid_engine_response(format!("the engine's answer ended early: {error}"))
        })?;
        let data = frame.into_data().unwrap_or_default();
        if first.len() + whole.len() + data.len() > bytes_max {
            return Err(ApiError::invalid_engine_response(
                "the engine's answer is longer than the router allows",
            ));
        }
        // An answer in one piece, as most are, is not copied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.extend_from_slice(&first);
            first = Bytes::new();
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() {
        first
    } else {
        whole.into()
    })
}
