//! The API listener: the route table, and what happens to every request: key, body, request ids, access
//! log, errors. Never sees a worker.

mod access_log;
mod batch_line;
mod batches;
mod body;
pub mod cors;
pub mod dry_run;
pub mod endpoint_picker;
mod endpoints;
mod envelope;
mod errors;
mod forward;
mod head_check;
mod health;
mod messages;
mod models;
mod request_id;
mod route;
mod route_name;
mod settings;
mod websocket;

use std::net::IpAddr;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response};
use prometheus::IntCounterVec;
use tracing::debug;

use self::access_log::LoggedBody;
use self::cors::Cors;
use self::envelope::Envelope;
use self::health::{HEALTH_PATH, ROOT_PATH, health, root, without_body};
use self::route::{Route, meant, route};
pub use self::settings::Settings;
use self::websocket::open::Open;
use crate::admin::{self, Readiness};
use crate::batches::Batches;
use crate::http::drain::Tasks;
use crate::http::server::RequestBody;
use crate::ids::ClientKey;
use crate::observe::metrics::Registry;
use crate::openai::body_budget::{BodyBudget, Claim};
use crate::openai::error::ApiError;
use crate::openai::tenant::{API_KEY, Admitted, Tenants, as_bearer};
use crate::prompt;
use crate::relay::{Relay, RequestContext, StandingCell};
use crate::responses::{ClientRequest, Endpoint, Mode, Responses};
use crate::{http, observe, relay};

/// The API with the settings of one configuration, shared by the requests that started with it. What outlives a
/// configuration is shared with its [successor](ApiServer::successor).
#[derive(Debug)]
pub struct ApiServer {
    settings: Settings,
    pub(crate) tenants: Tenants,
    pub(crate) responses: Arc<Responses>,
    pub(crate) relay: Arc<Relay>,
    readiness: Arc<Readiness>,
    bodies: BodyBudget,
    cors: Cors,
    tasks: Tasks,
    errors: IntCounterVec,
    /// The WebSockets, which live on with the next configuration.
    open: Arc<Open>,
    /// `None` without storage for files.
    batches: Option<Arc<Batches>>,
    /// The server of the latest configuration, for turns of connections that an earlier server opened.
    latest: Arc<ArcSwap<Weak<Self>>>,
}

/// Who sent a request, and how it is named and logged.
struct Caller<'a> {
    context: RequestContext,
    admitted: &'a Admitted,
    client_id: &'a HeaderValue,
    standing: Option<&'a StandingCell>,
}

impl ApiServer {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the router, named once"
    )]
    pub fn new(
        settings: Settings,
        tenants: Tenants,
        responses: Arc<Responses>,
        batches: Option<Arc<Batches>>,
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
        Self {
            bodies: BodyBudget::new(
                responses.bodies().clone(),
                settings.max_total_body,
                settings.max_body_wait,
                registry,
            ),
            cors: Cors::new(settings.cors.clone()),
            settings,
            tenants,
            responses,
            relay,
            readiness,
            tasks,
            errors,
            open: Open::new(registry),
            batches,
            latest: Arc::default(),
        }
        .started()
    }

    /// The API of the next configuration.
    pub fn successor(
        &self,
        settings: Settings,
        tenants: Tenants,
        responses: Arc<Responses>,
        relay: Arc<Relay>,
    ) -> Arc<Self> {
        Self {
            bodies: self
                .bodies
                .successor(settings.max_total_body, settings.max_body_wait),
            cors: Cors::new(settings.cors.clone()),
            settings,
            tenants,
            responses,
            relay,
            readiness: self.readiness.clone(),
            tasks: self.tasks.clone(),
            errors: self.errors.clone(),
            open: self.open.clone(),
            batches: self.batches.clone(),
            latest: self.latest.clone(),
        }
        .started()
    }

    fn started(self) -> Arc<Self> {
        let server = Arc::new(self);
        server.latest.store(Arc::new(Arc::downgrade(&server)));
        server
    }

    /// Answers a request that came over a connection from `peer`. Every response carries `x-request-id`:
    /// the client's own, or ours.
    pub async fn handle(
        self: Arc<Self>,
        request: Request<RequestBody>,
        peer: IpAddr,
    ) -> Response<LoggedBody> {
        // Boxed, so that no future below has a copy.
        let request = Box::new(request);
        if let Some(page) = self.open_page(request.method(), request.uri().path()).await {
            return LoggedBody::of(page, None);
        }
        let (mut envelope, checked) = {
            let trace = self.relay.tracer.begin(request.headers());
            Envelope::begin(
                &self.settings,
                &self.cors,
                &self.tasks,
                trace,
                &request,
                peer,
            )
        };
        let preflight = || self.cors.preflight(&request, &envelope.grant);
        let answer =
            if let Some(answer) = checked.map_or_else(|error| Some(Err(error)), |()| preflight()) {
                answer
            } else {
                self.answer(request, &mut envelope).await
            };
        let response = answer.unwrap_or_else(|error| {
            let Envelope { id, api, shape, .. } = envelope;
            self.on_error(id, &error, api, envelope.line.as_deref_mut());
            error.shaped(shape)
        });
        envelope.finish(response, self.readiness.is_draining())
    }

    /// A page that needs no key. It is not logged: load balancers ask every few seconds.
    async fn open_page(&self, method: &Method, path: &str) -> Option<Response<http::Body>> {
        let is_head = method == Method::HEAD;
        let page = match path {
            _ if !is_head && method != Method::GET => return None,
            HEALTH_PATH => health(self.readiness.check().await),
            ROOT_PATH => root(),
            _ => return None,
        };
        Some(if is_head { without_body(page) } else { page })
    }

    async fn answer(
        self: &Arc<Self>,
        mut request: Box<Request<RequestBody>>,
        envelope: &mut Envelope,
    ) -> Result<Response<http::Body>, ApiError> {
        head_check::check(&request)?;
        let admitted = self.tenants.admit(request.headers()).await?;
        let admitted: &Admitted = &admitted;
        if let Some(line) = &mut envelope.line {
            line.tenant = Some(admitted.name.clone());
        }
        let mut key = None;
        if self.tenants.require_keys() {
            // The key is the router's; engines have their own.
            key = request.headers_mut().remove(AUTHORIZATION);
            let api_key = request.headers_mut().remove(API_KEY);
            key = key.or_else(|| api_key.as_ref().and_then(as_bearer));
        }
        if head_check::asks_for_websocket(&request) {
            return self.upgrade(*request, admitted, key, envelope.client, &envelope.echo);
        }
        if head_check::lost_upgrade(&request) {
            return Err(ApiError::upgrade_lost());
        }
        let limits = self.relay.tenants().of(admitted.tenant).limits.as_ref();
        let cell = limits.map(|_| StandingCell::default());
        let client = if self.tenants.require_keys() {
            ClientKey::of_tenant(admitted.tenant)
        } else {
            ClientKey::of_address(envelope.client)
        };
        let summary = envelope.line.as_ref().map(|line| line.summary.clone());
        let caller = Box::new(Caller {
            context: RequestContext {
                summary,
                ..RequestContext::new(envelope.id, client, admitted.tenant, observe::now())
            },
            admitted,
            client_id: &envelope.echo,
            standing: cell.as_ref(),
        });
        let answer = self.route(request, caller).await;
        // A request that was not charged is said what is left without it.
        let read = cell.and_then(|cell| cell.read());
        envelope.standing = read.or_else(|| limits.map(|limits| limits.standing(None)));
        answer
    }

    async fn route(
        &self,
        request: Box<Request<RequestBody>>,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let mode = match request.extensions().get::<relay::CarriedBy>() {
            // A gateway sends requests as they are: no state is kept for them here.
            Some(_) => Mode::PassThrough,
            None => self.responses.mode(),
        };
        let further = &self.settings.extra_endpoints;
        match route(request.method(), request.uri().path(), mode, further) {
            Route::Relay(api) => self.forward(api, request, caller).await,
            Route::CountTokens => self.count_tokens(request, caller).await,
            Route::Responses(endpoint) => {
                // Boxed, so that other requests do not carry its state.
                Box::pin(self.respond(&endpoint, request, caller)).await
            }
            Route::Batches(endpoint) => {
                Box::pin(self.answer_batches(&endpoint, request, caller)).await
            }
            Route::Models => Ok(models::list(&self.relay, caller.context.tenant)),
            Route::Model => {
                let name = request.uri().path().trim_start_matches("/v1/models/");
                models::one(&self.relay, caller.context.tenant, name)
            }
            Route::NotFound => {
                let path = request.uri().path();
                let meant = meant(path, mode, further);
                let method = request.method();
                let is_of_store = mode == Mode::PassThrough
                    && route(method, path, Mode::Stateful, further) != Route::NotFound;
                Err(match meant {
                    _ if is_of_store => ApiError::path_of_store(method, path),
                    None if admin::has_page(path) => ApiError::admin_path(method, path),
                    meant => ApiError::not_found_path(method, path, meant.as_deref()),
                })
            }
            Route::WrongMethod { allow } => Err(ApiError::wrong_method(request.method(), allow)),
        }
    }

    /// Whose memory a body uses.
    fn claim<'a>(&'a self, context: &RequestContext, headers: &'a HeaderMap) -> Claim<'a> {
        Claim {
            owner: context.client,
            tenant: context.tenant,
            headers,
            relay: Some(&self.relay),
        }
    }

    async fn respond(
        &self,
        endpoint: &Endpoint,
        request: Box<Request<RequestBody>>,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let Caller {
            context,
            admitted,
            client_id,
            standing,
        } = *caller;
        let (head, body) = (*request).into_parts();
        let (body, mut reserved) = {
            let claim = self.claim(&context, &head.headers);
            body::read(body, &self.settings, &self.bodies, claim).await?
        };
        prompt::check_nesting(&body)?;
        debug!(
            id = %context.id, client_id = ?client_id, tenant = %context.tenant, ?endpoint, bytes = body.len(),
            "request"
        );
        let call = ClientRequest {
            headers: &head.headers,
            query: head.uri.query().unwrap_or_default(),
            body,
            context,
            admitted,
            standing,
            turn: None,
        };
        // Boxed, so that what is read before has no room for its state.
        Box::pin(self.responses.answer(endpoint, &call, &mut reserved)).await
    }
}
