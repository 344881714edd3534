//! Requests that go to a worker as they are.

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Request, Response};
use tracing::debug;

use super::{ApiServer, Caller, body};
use crate::http::client::origin_form;
use crate::http::server::RequestBody;
use crate::openai::error::{ApiError, SHOULD_RETRY, anthropic_of_engine, is_permanent};
use crate::openai::splice;
use crate::prompt::{self, Api};
use crate::{http, relay};

/// How much of an engine's error on Anthropic's Messages is read: enough for its message.
const ERROR_BYTES_MAX: usize = 64 << 10;

impl ApiServer {
    pub(super) async fn forward(
        &self,
        api: Api,
        request: Box<Request<RequestBody>>,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let (head, body) = (*request).into_parts();
        let (body, _reserved) = {
            let claim = self.claim(&caller.context, &head.headers);
            body::read(body, &self.settings, &self.bodies, claim).await?
        };
        self.forward_body(api, &head, body, caller).await
    }

    /// As [`Self::forward`], of a request whose body was read.
    pub(super) async fn forward_body(
        &self,
        api: Api,
        head: &Parts,
        body: Bytes,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let (context, admitted) = (&caller.context, caller.admitted);
        let content_type = head.headers.get(CONTENT_TYPE);
        let form = content_type.and_then(|value| value.to_str().ok());
        let form = form.filter(|form| api == Api::Other && prompt::is_form(form));
        if form.is_none() {
            prompt::check_nesting(&body)?;
        }
        debug!(
            id = %context.id, client_id = ?caller.client_id, tenant = %context.tenant,
            api = api.as_str(), bytes = body.len(), "request"
        );
        let body = match api {
            Api::Messages => prompt::without_billing_header(&body).unwrap_or(body),
            _ => body,
        };
        let salt = admitted.cache_salt.as_ref().filter(|_| api.generates());
        let original = body.clone();
        let body = match salt {
            Some(salt) => splice::first_field(&body, &salt.field),
            None => body,
        };
        // The body as engines get it: the relay may move parts of it.
        let peek = match form {
            Some(content_type) => prompt::peek_form(content_type, &body)?,
            None => prompt::peek(api, &body, self.relay.block_bytes())?,
        };
        if salt.is_some() && peek.cache_salt_count > 1 {
            return Err(ApiError::salted_already());
        }
        if admitted.cache_salt.is_some() && peek.names_media {
            return Err(ApiError::media_named());
        }
        let job = job(api, head, body.clone(), &original, caller);
        let answer = self.relay.run(&job, Box::new(peek)).await;
        let mut answer = answer.map_err(ApiError::of_run)?;
        if is_permanent(answer.status()) {
            // SDKs would send it again; so says an engine's error on the Responses API, too.
            let headers = answer.headers_mut();
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        Ok(match api {
            Api::Messages => with_shaped_error(answer).await,
            _ => answer,
        })
    }
}

/// A request that goes to a worker as the client sent it, but for what was taken out of `original`.
pub(super) fn job<'a>(
    api: Api,
    head: &'a Parts,
    body: Bytes,
    original: &'a Bytes,
    caller: Box<Caller<'a>>,
) -> relay::Job<'a> {
    let target = origin_form(&head.uri);
    let carried: Option<&relay::CarriedBy> = head.extensions.get();
    relay::Job {
        standing: caller.standing,
        gateway: carried.map(|carried| &*carried.0),
        ..relay::Job::new(caller.context, api, target, &head.headers, body, original)
    }
}

/// An engine's error in the shape that Anthropic's SDKs read; other answers as they are.
pub(super) async fn with_shaped_error(answer: Response<http::Body>) -> Response<http::Body> {
    let status = answer.status();
    let is_error = status.is_client_error() || status.is_server_error();
    if !is_error || answer.headers().contains_key(CONTENT_ENCODING) {
        return answer;
    }
    let (mut head, mut body) = answer.into_parts();
    let mut read = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        let data = frame.into_data().unwrap_or_default();
        if read.len() + data.len() > ERROR_BYTES_MAX {
            // Not a JSON object any more: its message is the status.
            read.clear();
            break;
        }
        read.extend_from_slice(&data);
    }
    let Some(shaped) = anthropic_of_engine(status, &read) else {
        return Response::from_parts(head, http::full(read));
    };
    head.headers.remove(CONTENT_LENGTH);
    let json = HeaderValue::from_static("application/json");
    head.headers.insert(CONTENT_TYPE, json);
    Response::from_parts(head, http::full(shaped))
}
