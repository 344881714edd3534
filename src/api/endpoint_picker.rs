//! The endpoint picker: a gateway such as Envoy asks which worker is to get a request (`ext_proc`, one gRPC stream a
//! request), and sends it itself. Each request takes the same way as one of the API's listener; only the connection to
//! the worker is the gateway's.

mod exchange;
mod gateway;
mod messages;
mod metrics;
mod settings;
mod wire;

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use hyper::{Request, Response};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use self::exchange::Messages;
use self::gateway::Options;
use self::metrics::Metrics;
pub use self::settings::Settings;
use super::ApiServer;
use crate::admin::Readiness;
use crate::http::grpc::{self, health};
use crate::http::server::RequestBody;
use crate::http::{self, server};
use crate::observe::metrics::Registry;

/// Connections of gateways; more wait in the kernel's backlog. A gateway has one for each of its threads.
pub const MAX_CONNECTIONS: u32 = 1_024;
/// Requests at a time on one connection. Each request of a client is one, for as long as its answer lasts.
const MAX_STREAMS: u32 = 16_384;
/// What the exchanges of one connection may have sent that nobody has read yet: 256 of them may stand still, because a
/// body waits for memory or a client reads its answer slowly, and the others go on. It counts in no memory budget, and
/// is more than for clients, since all clients of a gateway share its few connections.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Gateways send pieces of up to 1 MiB by default.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// A question about health is a service's name.
const MAX_QUESTION_BYTES: usize = 1_024;
/// Messages that wait for the gateway.
const QUEUED_MESSAGES: usize = 16;

/// What a gateway may ask the health of. The last one is what the manifests of the reference picker ask for.
const SERVICES: [&str; 5] = [
    "",
    "liveness",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "inference-extension",
];

/// The listener for gateways.
#[derive(Debug)]
pub struct EndpointPicker {
    readiness: Arc<Readiness>,
    options: Options,
    metrics: Arc<Metrics>,
}

impl EndpointPicker {
    pub fn new(settings: &Settings, readiness: Arc<Readiness>, registry: &Registry) -> Arc<Self> {
        Arc::new(Self {
            readiness,
            options: Options {
                has_hooks: settings.advanced.conformance_hooks,
                fallbacks: settings.fallbacks as usize,
            },
            metrics: Arc::new(Metrics::new(registry)),
        })
    }

    pub fn connections() -> server::Settings {
        server::Settings {
            max_connections: MAX_CONNECTIONS,
            max_http2_streams: MAX_STREAMS,
            http2_connection_window: CONNECTION_WINDOW_BYTES,
            ..server::Settings::default()
        }
    }

    /// Answers a call of a gateway, with the configuration that `api` has.
    pub async fn answer(
        self: Arc<Self>,
        api: Arc<ApiServer>,
        request: Request<RequestBody>,
        peer: IpAddr,
    ) -> Response<http::Body> {
        if !grpc::is_grpc(&request) {
            let status = Status::invalid_argument("this port serves gRPC: ext_proc and health");
            return status.into_http();
        }
        match request.uri().path() {
            wire::PROCESS => self.process(api, request, peer),
            health::CHECK => self.check(request).await.unwrap_or_else(Status::into_http),
            path => Status::unimplemented(format!("{path} is not served here")).into_http(),
        }
    }

    fn process(
        &self,
        api: Arc<ApiServer>,
        request: Request<RequestBody>,
        peer: IpAddr,
    ) -> Response<http::Body> {
        let incoming =
            Streaming::new_request(Messages, request.into_body(), None, Some(MAX_MESSAGE_BYTES));
        let (outgoing, messages) = mpsc::channel(QUEUED_MESSAGES);
        let running = exchange::run(
            api,
            peer,
            incoming,
            outgoing,
            self.options,
            self.metrics.clone(),
        );
        grpc::answer(Running {
            exchange: Some(Box::pin(running)),
            messages,
        })
    }

    async fn check(&self, request: Request<RequestBody>) -> Result<Response<http::Body>, Status> {
        let question = grpc::question(request, MAX_QUESTION_BYTES).await?;
        let service = health::service(&question)?;
        if !SERVICES.contains(&&*service) {
            return Err(Status::not_found("no such service"));
        }
        let is_serving = service == "liveness" || self.readiness.check().await.is_ok();
        Ok(grpc::answer_once(health::serving(is_serving)))
    }
}

/// The messages of an exchange on their way out. The stream's own task runs the exchange, so that no other one has to be
/// woken for each message.
struct Running {
    /// `None`: it is over.
    exchange: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    messages: mpsc::Receiver<Result<Bytes, Status>>,
}

impl Stream for Running {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Not `poll_recv`: the exchange would wake the task that it runs in.
        if let Ok(message) = self.messages.try_recv() {
            return Poll::Ready(Some(message));
        }
        if let Some(exchange) = &mut self.exchange
            && exchange.as_mut().poll(cx).is_ready()
        {
            self.exchange = None;
        }
        match self.messages.try_recv() {
            Ok(message) => Poll::Ready(Some(message)),
            Err(_) if self.exchange.is_some() => Poll::Pending,
            Err(_) => Poll::Ready(None),
        }
    }
}
