//! The API listener: the route table, and what happens to every request: key, body, request ids, access
//! log, errors. Never sees a worker.

mod access_log;
mod body;
mod body_budget;
pub mod cors;
pub mod dry_run;
mod head_check;
mod models;
mod request_id;
mod route_name;
mod settings;

use std::net::IpAddr;
use std::sync::Arc;

use hyper::header::{ALLOW, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderValue, UPGRADE};
use hyper::{Method, Request, Response, StatusCode, Version};
use prometheus::IntCounterVec;
use serde_json::json;
use tracing::debug;

use self::access_log::{AccessLine, LoggedBody};
use self::body_budget::BodyBudget;
use self::cors::Cors;
pub use self::settings::Settings;
use crate::admin::Readiness;
use crate::http::client::origin_form;
use crate::http::drain::Tasks;
use crate::http::server::{OnMalformed, RequestBody};
use crate::ids::{ClientKey, RequestId};
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::openai::splice;
use crate::openai::tenant::{self, Admitted, Tenants};
use crate::prompt::{self, Api};
use crate::relay::{self, Relay, SummaryCell};
use crate::responses::{self, ClientRequest, Endpoint, Mode, Responses, RouteMatch};
use crate::{http, observe};

/// The API with the settings of one configuration, shared by the requests that started with it. What outlives a
/// configuration is shared with its [successor](ApiServer::successor).
#[derive(Debug)]
pub struct ApiServer {
    settings: Settings,
    tenants: Tenants,
    responses: Arc<Responses>,
    relay: Arc<Relay>,
    readiness: Arc<Readiness>,
    bodies: BodyBudget,
    cors: Cors,
    tasks: Tasks,
    errors: IntCounterVec,
}

/// The endpoint of a path and method.
#[derive(Clone, Debug, PartialEq)]
enum Route {
    Relay(Api),
    Responses(Endpoint),
    Models,
    /// `/v1/models/NAME`.
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

/// Who sent a request, and how it is named and logged.
#[derive(Clone, Copy)]
struct Caller<'a> {
    admitted: &'a Admitted,
    client: ClientKey,
    id: RequestId,
    client_id: &'a HeaderValue,
    summary: Option<&'a SummaryCell>,
}

impl ApiServer {
    pub fn new(
        settings: Settings,
        tenants: &[tenant::TenantSpec],
        responses: Arc<Responses>,
        relay: Arc<Relay>,
        readiness: Arc<Readiness>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Arc<Self> {
        let errors = registry.counters(
            "warmroute_request_errors_total",
            "Requests that the router itself answered with an error, by HTTP status and error code.",
            &["status", "code"],
        );
        Arc::new(Self {
            bodies: BodyBudget::new(settings.max_total_body, settings.max_body_wait, registry),
            cors: Cors::new(settings.cors.clone()),
            settings,
            tenants: Tenants::new(tenants, registry),
            responses,
            relay,
            readiness,
            tasks,
            errors,
        })
    }

    /// The API of the next configuration.
    pub fn successor(
        &self,
        settings: Settings,
        tenants: &[tenant::TenantSpec],
        responses: Arc<Responses>,
        relay: Arc<Relay>,
    ) -> Arc<Self> {
        Arc::new(Self {
            bodies: self
                .bodies
                .successor(settings.max_total_body, settings.max_body_wait),
            cors: Cors::new(settings.cors.clone()),
            settings,
            tenants: self.tenants.successor(tenants),
            responses,
            relay,
            readiness: self.readiness.clone(),
            tasks: self.tasks.clone(),
            errors: self.errors.clone(),
        })
    }

    pub fn responses(&self) -> &Responses {
        &self.responses
    }

    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Answers a request that came over a connection from `peer`. Every response carries `x-request-id`:
    /// the client's own, or ours.
    pub async fn handle(
        self: Arc<Self>,
        request: Request<RequestBody>,
        peer: IpAddr,
    ) -> Response<LoggedBody> {
        if request.uri().path() == HEALTH_PATH && request.method() == Method::GET {
            // Needs no key. Not logged: load balancers ask every few seconds.
            let response = health(self.readiness.check().await);
            return response.map(|body| LoggedBody::new(body, None));
        }
        let id = RequestId::new(fastrand::u128(..));
        let is_http1 = request.version() < Version::HTTP_2;
        let client = self
            .settings
            .trusted_proxies
            .client_of(peer, request.headers());
        let trace = self.relay.tracer().begin(request.headers());
        let mut line = (trace.is_some() || access_log::is_on()).then(|| {
            let tasks = self.tasks.clone();
            Box::new(AccessLine::begin(&request, id, client, tasks, trace))
        });
        let grant = self.cors.grant(request.headers());
        let (echo, answer) = match request_id::of_client(request.headers()) {
            Ok(client_id) => {
                if let Some(line) = &mut line {
                    line.client_request_id.clone_from(&client_id);
                }
                let echo = client_id.unwrap_or_else(|| request_id::header(id));
                let line = line.as_deref_mut();
                let answer = match self.cors.preflight(&request, &grant) {
                    Some(answer) => answer,
                    None => self.answer(request, id, client, &echo, line).await,
                };
                (echo, answer)
            }
            Err(error) => (request_id::header(id), Err(error)),
        };
        let mut response = answer.unwrap_or_else(|error| {
            if !error.is_from_engine {
                self.errors
                    .with_label_values(&[error.status.as_str(), error.code])
                    .inc();
                if let Some(line) = &mut line {
                    line.error_code = Some(error.code);
                }
            }
            debug!(%id, status = error.status.as_u16(), message = error.message, "request refused");
            error.into_response()
        });
        response.headers_mut().insert(request_id::HEADER, echo);
        grant.apply(response.headers_mut());
        if is_http1 && self.readiness.is_draining() {
            // Its next request should find another replica now, and not a connection that closes just then.
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
        }
        if let Some(line) = &mut line {
            line.status = Some(response.status());
        }
        response.map(|body| LoggedBody::new(body, line))
    }

    /// Answers request heads that cannot be parsed, with an id of ours.
    pub fn on_malformed(self: &Arc<Self>) -> OnMalformed {
        let server = self.clone();
        OnMalformed::new(move |status| {
            let id = RequestId::new(fastrand::u128(..));
            let error = ApiError::malformed(status);
            let counter = [error.status.as_str(), error.code];
            server.errors.with_label_values(&counter).inc();
            debug!(%id, status = status.as_u16(), message = error.message, "request refused");
            let mut response = error.into_text();
            let headers = response.headers_mut();
            headers.insert(request_id::HEADER, request_id::header(id));
            response
        })
    }

    async fn answer(
        &self,
        mut request: Request<RequestBody>,
        id: RequestId,
        address: IpAddr,
        client_id: &HeaderValue,
        mut line: Option<&mut AccessLine>,
    ) -> Result<Response<http::Body>, ApiError> {
        head_check::check(&request)?;
        let admitted = self.tenants.admit(request.headers())?;
        if let Some(line) = &mut line {
            line.tenant = Some(admitted.name.clone());
        }
        if self.tenants.require_keys() {
            // The key is the router's; engines have their own.
            request.headers_mut().remove(AUTHORIZATION);
        }
        let caller = Caller {
            admitted,
            client: match self.tenants.require_keys() {
                true => ClientKey::of_tenant(admitted.tenant),
                false => ClientKey::of_address(address),
            },
            id,
            client_id,
            summary: line.map(|line| &line.summary),
        };
        let mode = self.responses.mode();
        if head_check::asks_for_websocket(&request) {
            let mut response = ApiError::no_websocket().into_response();
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
            headers.insert(UPGRADE, HeaderValue::from_static("HTTP/1.1"));
            return Ok(response);
        }
        match route(request.method(), request.uri().path(), mode) {
            Route::Relay(api) => self.forward(api, request, caller).await,
            Route::Responses(endpoint) => self.respond(&endpoint, request, caller).await,
            Route::Models => Ok(models::list(
                &self.relay.fleet().snapshot(),
                self.relay.names(),
            )),
            Route::Model => {
                let name = request.uri().path().trim_start_matches("/v1/models/");
                models::one(&self.relay.fleet().snapshot(), self.relay.names(), name)
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

    fn body_limits(&self) -> body::Limits {
        body::Limits {
            max: self.settings.max_body,
            timeout: self.settings.body_timeout,
        }
    }

    async fn respond(
        &self,
        endpoint: &Endpoint,
        request: Request<RequestBody>,
        caller: Caller<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let started = observe::now();
        let Caller {
            admitted,
            id,
            client_id,
            ..
        } = caller;
        let (head, body) = request.into_parts();
        let (body, _reserved) = body::read(body, self.body_limits(), &self.bodies).await?;
        prompt::check_nesting(&body)?;
        debug!(
            %id, client_id = ?client_id, tenant = %admitted.tenant, ?endpoint, bytes = body.len(),
            "request"
        );
        let call = ClientRequest {
            headers: &head.headers,
            query: head.uri.query().unwrap_or_default(),
            body,
            id,
            started,
            admitted,
            client: caller.client,
            summary: caller.summary,
        };
        self.responses.answer(endpoint, &call).await
    }

    async fn forward(
        &self,
        api: Api,
        request: Request<RequestBody>,
        caller: Caller<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let started = observe::now();
        let Caller {
            admitted,
            id,
            client_id,
            ..
        } = caller;
        let (head, body) = request.into_parts();
        let (body, _reserved) = body::read(body, self.body_limits(), &self.bodies).await?;
        prompt::check_nesting(&body)?;
        debug!(
            %id, client_id = ?client_id, tenant = %admitted.tenant, api = api.as_str(),
            bytes = body.len(), "request"
        );
        let salt = admitted.cache_salt.as_ref().filter(|_| api.generates());
        let original = body.clone();
        let body = match salt {
            Some(salt) => splice::first_field(&body, &salt.field),
            None => body,
        };
        // The body as engines get it: the relay may move parts of it.
        let peek = prompt::peek(api, &body, self.relay.block_bytes())?;
        if salt.is_some() && peek.cache_salt_count > 1 {
            return Err(ApiError::salted_already());
        }
        let job = relay::Job {
            api,
            target: origin_form(&head.uri),
            headers: &head.headers,
            body: body.clone(),
            original: &original,
            client: caller.client,
            tenant: caller.admitted.tenant,
            id,
            started,
            response: None,
            is_background: false,
            requested: None,
            strips_usage: false,
            summary: caller.summary.cloned(),
        };
        Ok(self.relay.run(&job, peek).await?)
    }
}

const HEALTH_PATH: &str = "/health";

/// The answer to a load balancer's health check.
fn health(readiness: Result<(), &'static str>) -> Response<http::Body> {
    let (status, body) = match readiness {
        Ok(()) => (StatusCode::OK, json!({"status": "ready"})),
        Err(missing) => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "not_ready", "reason": missing}),
        ),
    };
    let mut response = Response::new(http::full(body.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
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
    fn with_pass_through_the_router_stores_no_responses() {
        let found = |method: &Method, path: &str| route(method, path, Mode::PassThrough);
        assert_eq!(
            found(&Method::POST, "/v1/responses"),
            Route::Relay(Api::Responses)
        );
        assert_eq!(found(&Method::GET, "/v1/responses/x"), Route::NotFound);
        assert_eq!(found(&Method::POST, "/v1/conversations"), Route::NotFound);
    }
}
