//! The OpenAI surface: which paths there are, what a request must look like, how answers and errors
//! are dressed. Never sees a worker.

pub mod foretell;
mod models;
mod request_id;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::header::{ALLOW, AUTHORIZATION, HeaderValue};
use hyper::{Method, Request, Response};
use prometheus::IntCounterVec;
use serde::{Deserialize, Serialize};
use tracing::debug;

use crate::http::client::origin_form;
use crate::ids::RequestId;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::openai::splice;
use crate::openai::tenant::{self, Admitted, Tenants};
use crate::prompt::{self, Api};
use crate::relay::{self, Relay};
use crate::responses::{self, ClientRequest, Endpoint, Mode, Responses, RouteMatch};
use crate::{http, observe};

/// Limits of requests, beyond those of connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub body_bytes_max: u64,
    /// Between two pieces of a request's body; the whole of it may take 10 times as long.
    pub body_timeout_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        // A million tokens of text, or a dozen images.
        Self {
            body_bytes_max: 64 << 20,
            body_timeout_ms: 30_000,
        }
    }
}

/// The API, shared by all connections.
#[derive(Debug)]
pub struct ApiServer {
    settings: Settings,
    tenants: Tenants,
    responses: Arc<Responses>,
    relay: Arc<Relay>,
    refused: IntCounterVec,
}

/// What a path and method lead to.
#[derive(Clone, Debug, PartialEq)]
enum Route {
    Relay(Api),
    Responses(Endpoint),
    Models,
    /// One model, by the rest of the path.
    Model,
    NotFound,
    WrongMethod {
        allow: &'static str,
    },
}

fn route(method: &Method, path: &str, mode: Mode) -> Route {
    if mode == Mode::Stateful {
        match responses::route(method, path) {
            RouteMatch::Endpoint(endpoint) => return Route::Responses(endpoint),
            RouteMatch::WrongMethod(allow) => return Route::WrongMethod { allow },
            RouteMatch::NotFound => {}
        }
    }
    let (found, allow) = match path {
        "/v1/chat/completions" => (Route::Relay(Api::Chat), "POST"),
        "/v1/completions" => (Route::Relay(Api::Completions), "POST"),
        "/v1/responses" => (Route::Relay(Api::Responses), "POST"),
        "/v1/embeddings" => (Route::Relay(Api::Embeddings), "POST"),
        "/v1/rerank" | "/rerank" | "/v2/rerank" => (Route::Relay(Api::Rerank), "POST"),
        "/tokenize" => (Route::Relay(Api::Tokenize), "POST"),
        "/detokenize" => (Route::Relay(Api::Detokenize), "POST"),
        "/v1/models" => (Route::Models, "GET"),
        _ if path
            .strip_prefix("/v1/models/")
            .is_some_and(|name| !name.is_empty()) =>
        {
            (Route::Model, "GET")
        }
        _ => return Route::NotFound,
    };
    if method.as_str() == allow {
        found
    } else {
        Route::WrongMethod { allow }
    }
}

impl ApiServer {
    pub fn new(
        settings: Settings,
        tenants: &[tenant::Listed],
        responses: Arc<Responses>,
        relay: Arc<Relay>,
        registry: &Registry,
    ) -> Arc<Self> {
        let refused = registry.counters(
            "warmroute_refused_total",
            "Requests that were answered with an error of the router's own, by status and code.",
            &["status", "code"],
        );
        Arc::new(Self {
            settings,
            tenants: Tenants::new(tenants, registry),
            responses,
            relay,
            refused,
        })
    }

    /// Answers a request. Every answer carries `x-request-id`: the client's own, or ours.
    pub async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<http::Body> {
        let id = RequestId::new(fastrand::u128(..));
        let (echo, answer) = match request_id::of_client(request.headers()) {
            Ok(client_id) => {
                let echo = client_id.unwrap_or_else(|| request_id::header(id));
                (echo.clone(), self.answer(request, id, &echo).await)
            }
            Err(error) => (request_id::header(id), Err(error)),
        };
        let mut response = answer.unwrap_or_else(|error| {
            if !error.is_engines {
                self.refused
                    .with_label_values(&[error.status.as_str(), error.code])
                    .inc();
            }
            debug!(%id, status = error.status.as_u16(), message = error.message, "refused");
            error.into_response()
        });
        response.headers_mut().insert(request_id::HEADER, echo);
        response
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        id: RequestId,
        client_id: &HeaderValue,
    ) -> Result<Response<http::Body>, ApiError> {
        let admitted = self.tenants.admit(request.headers())?;
        if self.tenants.ask_for_keys() {
            // It was for us.
            request.headers_mut().remove(AUTHORIZATION);
        }
        let mode = self.responses.mode();
        match route(request.method(), request.uri().path(), mode) {
            Route::Relay(api) => self.carry(api, admitted, request, id, client_id).await,
            Route::Responses(endpoint) => {
                self.respond(&endpoint, admitted, request, id, client_id)
                    .await
            }
            Route::Models => Ok(models::list(&self.relay.fleet().snapshot())),
            Route::Model => {
                let name = request.uri().path().trim_start_matches("/v1/models/");
                models::one(&self.relay.fleet().snapshot(), name)
            }
            Route::NotFound => Err(ApiError::not_found_path(
                request.method(),
                request.uri().path(),
            )),
            Route::WrongMethod { allow } => {
                let mut response = ApiError::wrong_method(request.method(), allow).into_response();
                response
                    .headers_mut()
                    .insert(ALLOW, HeaderValue::from_static(allow));
                Ok(response)
            }
        }
    }

    async fn respond(
        &self,
        endpoint: &Endpoint,
        admitted: &Admitted,
        request: Request<Incoming>,
        id: RequestId,
        client_id: &HeaderValue,
    ) -> Result<Response<http::Body>, ApiError> {
        let begun = observe::now();
        let (head, body) = request.into_parts();
        let body = read(body, &self.settings).await?;
        debug!(
            %id, client_id = ?client_id, tenant = %admitted.tenant, ?endpoint, bytes = body.len(),
            "request"
        );
        let call = ClientRequest {
            headers: &head.headers,
            query: head.uri.query().unwrap_or_default(),
            body,
            id,
            begun,
            admitted,
        };
        self.responses.answer(endpoint, &call).await
    }

    async fn carry(
        &self,
        api: Api,
        admitted: &Admitted,
        request: Request<Incoming>,
        id: RequestId,
        client_id: &HeaderValue,
    ) -> Result<Response<http::Body>, ApiError> {
        let begun = observe::now();
        let (head, body) = request.into_parts();
        let body = read(body, &self.settings).await?;
        debug!(
            %id, client_id = ?client_id, tenant = %admitted.tenant, api = api.as_str(),
            bytes = body.len(), "request"
        );
        let salt = admitted.cache_salt.as_ref().filter(|_| api.generates());
        let body = match salt {
            Some(salt) => splice::first_field(&body, &salt.field),
            None => body,
        };
        // At what engines are sent: parts of it may be put elsewhere later.
        let peek = prompt::peek(api, &body, self.relay.block_bytes())?;
        if salt.is_some() && peek.cache_salts > 1 {
            return Err(ApiError::salted_already());
        }
        let job = relay::Job {
            api,
            target: origin_form(&head.uri),
            headers: &head.headers,
            body: body.clone(),
            id,
            begun,
            summary: None,
        };
        Ok(self.relay.run(&job, peek).await?)
    }
}

/// How many of the times between two pieces a whole body may take: a byte now and then is no excuse.
const TOTAL_TIMEOUTS: u32 = 10;

/// Reads a body whole: a decision needs its prompt, and a second try all of it.
async fn read(mut body: Incoming, settings: &Settings) -> Result<Bytes, ApiError> {
    let max = settings.body_bytes_max;
    let announced = body.size_hint().lower();
    if announced > max {
        return Err(ApiError::too_large(max));
    }
    // The announced length is the client's word: not more than this is set aside before bytes come.
    const RESERVED_MAX: u64 = 1 << 20;
    let mut whole = BytesMut::new();
    let mut first = Bytes::new();
    let limit = Duration::from_millis(settings.body_timeout_ms);
    let total = limit.saturating_mul(TOTAL_TIMEOUTS);
    // The first wait. A body that never lets us wait needs no clock.
    let mut begun = None;
    loop {
        let frame = match poll_once(body.frame()).await {
            Ok(ready) => ready,
            Err(_) => {
                let now = observe::now();
                let left = total.saturating_sub(now - *begun.get_or_insert(now));
                tokio::time::timeout(limit.min(left), body.frame())
                    .await
                    .map_err(|_| match left < limit {
                        true => ApiError::endless_body(total),
                        false => ApiError::slow_body(settings.body_timeout_ms),
                    })?
            }
        };
        let Some(frame) = frame else { break };
        let data = match frame
            .map_err(|error| ApiError::broken_body(&error))?
            .into_data()
        {
            Ok(data) => data,
            Err(_) => continue,
        };
        if (whole.len() + first.len() + data.len()) as u64 > max {
            return Err(ApiError::too_large(max));
        }
        // A body of one piece, which most are, is not copied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            if body.is_end_stream() {
                break;
            }
            continue;
        }
        if whole.is_empty() {
            whole.reserve(announced.min(RESERVED_MAX) as usize);
            whole.extend_from_slice(&first);
            first = Bytes::new();
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() {
        first
    } else {
        whole.freeze()
    })
}

/// Polls a future once: a body that is there already needs no timer.
async fn poll_once<F: Future + Unpin>(mut future: F) -> Result<F::Output, ()> {
    std::future::poll_fn(|cx| match std::pin::Pin::new(&mut future).poll(cx) {
        std::task::Poll::Ready(ready) => std::task::Poll::Ready(Ok(ready)),
        std::task::Poll::Pending => std::task::Poll::Ready(Err(())),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_one_method_and_the_rest_is_refused() {
        let check = |method: &Method, path: &str, expected| {
            let found = route(method, path, Mode::Stateful);
            assert_eq!(found, expected, "{method} {path}")
        };
        check(
            &Method::POST,
            "/v1/chat/completions",
            Route::Relay(Api::Chat),
        );
        check(
            &Method::GET,
            "/v1/chat/completions",
            Route::WrongMethod { allow: "POST" },
        );
        check(
            &Method::POST,
            "/v1/models",
            Route::WrongMethod { allow: "GET" },
        );
        check(&Method::GET, "/v1/models", Route::Models);
        check(&Method::GET, "/v1/models/org/name", Route::Model);
        check(&Method::GET, "/v1/models/", Route::NotFound);
        check(&Method::GET, "/", Route::NotFound);
        check(&Method::POST, "/v1/chat/completions/", Route::NotFound);
        check(
            &Method::POST,
            "/v1/responses",
            Route::Responses(Endpoint::Create),
        );
        check(
            &Method::GET,
            "/v1/responses",
            Route::WrongMethod { allow: "POST" },
        );
    }

    #[test]
    fn responses_may_be_none_of_the_routers_business() {
        let found = |method: &Method, path: &str| route(method, path, Mode::PassThrough);
        assert_eq!(
            found(&Method::POST, "/v1/responses"),
            Route::Relay(Api::Responses)
        );
        assert_eq!(found(&Method::GET, "/v1/responses/x"), Route::NotFound);
        assert_eq!(found(&Method::POST, "/v1/conversations"), Route::NotFound);
    }
}
