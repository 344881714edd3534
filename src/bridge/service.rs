//! The bridge's listener: `SubscribeKvEvents` under every engine's gRPC path, gRPC's health service, and
//! `/metrics` and `/healthz` over plain HTTP.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use hyper::header::HeaderValue;
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Interval;
use tonic::Status;
use tracing::info;

use super::feed::{Feed, ReadCursor, Subscribed};
use super::metrics::Metrics;
use crate::http::drain::Tasks;
use crate::http::grpc::{self, health};
use crate::http::server::RequestBody;
use crate::http::{self, Body};
use crate::kv::grpc::{INCARNATION_METADATA, LAST_SEQUENCE_METADATA, RANK_METADATA};
use crate::kv::protobuf::{self, Service};
use crate::observe::metrics::{Counted, Registry};

/// A request is a sequence number or a service name.
const MAX_REQUEST_BYTES: usize = 1_024;
/// How soon health watchers see a change.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// Shared by all connections.
#[derive(Debug)]
pub struct BridgeService {
    /// By rank.
    feeds: Vec<Arc<Feed>>,
    slots: Arc<Semaphore>,
    metrics: Metrics,
    registry: Registry,
    tasks: Tasks,
}

impl BridgeService {
    pub fn new(
        feeds: Vec<Arc<Feed>>,
        subscribers_max: usize,
        metrics: Metrics,
        registry: Registry,
        tasks: Tasks,
    ) -> Arc<Self> {
        Arc::new(Self {
            feeds,
            slots: Arc::new(Semaphore::new(subscribers_max)),
            metrics,
            registry,
            tasks,
        })
    }

    pub async fn answer(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let path = request.uri().path();
        if !grpc::is_grpc(&request) {
            return match (request.method(), path) {
                (&Method::GET, "/metrics") => http::text(StatusCode::OK, self.registry.text()),
                (&Method::GET, "/healthz") => self.healthz(),
                _ => http::text(
                    StatusCode::NOT_FOUND,
                    "not found: this port serves gRPC, /metrics and /healthz\n",
                ),
            };
        }
        let answered = match path {
            health::CHECK => self.check(request).await,
            health::WATCH => self.watch(request).await,
            path if Service::ALL.iter().any(|service| service.path() == path) => {
                self.subscribe(request).await
            }
            path => Err(Status::unimplemented(format!("{path} is not served here"))),
        };
        answered.unwrap_or_else(Status::into_http)
    }

    async fn subscribe(&self, request: Request<RequestBody>) -> Result<Response<Body>, Status> {
        let rank = request.headers().get(RANK_METADATA);
        let rank = rank.map(|rank| rank.to_str().ok().and_then(|rank| rank.parse().ok()));
        let feeds = match rank {
            None => &self.feeds[..],
            Some(rank) => {
                let at = rank.and_then(|rank: usize| Some(rank..rank.checked_add(1)?));
                at.and_then(|at| self.feeds.get(at))
                    .ok_or_else(|| Status::invalid_argument("there is no such rank"))?
            }
        };
        let body = grpc::question(request, MAX_REQUEST_BYTES).await?;
        let after =
            protobuf::decode_request(&body).map_err(|error| Status::invalid_argument(error.0))?;
        if after != 0 && feeds.len() > 1 {
            // Each rank counts on its own, and the request does not say which rank the number is of.
            return Err(Status::out_of_range(
                "with several ranks, the start sequence number must be 0",
            ));
        }
        let slot = self.reserve_slot()?;
        let mut subscription = Subscription {
            cursors: Vec::new(),
            turn: 0,
            has_joined: false,
            _count: Counted::new(&self.metrics.subscribers),
            _slot: slot,
        };
        let mut incarnations = Vec::with_capacity(feeds.len());
        let mut lasts = Vec::with_capacity(feeds.len());
        for feed in feeds {
            let Subscribed {
                cursor,
                incarnation,
                last,
            } = feed.subscribe(after).await?;
            subscription.cursors.push((feed.clone(), cursor));
            incarnations.push(incarnation);
            lasts.push(last);
        }
        subscription.has_joined = true;
        info!(after, ranks = feeds.len(), "subscriber joined");
        let mut answer = grpc::answer(subscription);
        let value = HeaderValue::from_str(&incarnations.join(","));
        let value = value.expect("incarnation ids are hexadecimal");
        answer.headers_mut().insert(INCARNATION_METADATA, value);
        // With several ranks, a single number would be ambiguous.
        if let [last] = lasts[..] {
            answer
                .headers_mut()
                .insert(LAST_SEQUENCE_METADATA, last.into());
        }
        Ok(answer)
    }

    /// For a long-lived call: a subscriber or a health watcher.
    fn reserve_slot(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.slots.clone().try_acquire_owned().map_err(|_| {
            self.metrics.refused.inc();
            Status::resource_exhausted("too many subscribers")
        })
    }

    fn is_serving(&self) -> bool {
        self.feeds.iter().all(|feed| feed.is_open())
    }

    fn healthz(&self) -> Response<Body> {
        let closed = self.feeds.iter().find_map(|feed| feed.closed());
        match closed {
            None => http::text(StatusCode::OK, "serving\n"),
            Some(status) => http::text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{}\n", status.message()),
            ),
        }
    }

    async fn check(&self, request: Request<RequestBody>) -> Result<Response<Body>, Status> {
        if !is_served(&grpc::question(request, MAX_REQUEST_BYTES).await?)? {
            return Err(Status::not_found("no such service"));
        }
        Ok(grpc::answer_once(health::serving(self.is_serving())))
    }

    async fn watch(
        self: &Arc<Self>,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, Status> {
        let is_known = is_served(&grpc::question(request, MAX_REQUEST_BYTES).await?)?;
        let slot = self.reserve_slot()?;
        Ok(grpc::answer(Watch {
            service: self.clone(),
            is_known,
            last: None,
            interval: tokio::time::interval(HEALTH_INTERVAL),
            _slot: slot,
        }))
    }
}

/// One call of `SubscribeKvEvents`.
struct Subscription {
    cursors: Vec<(Arc<Feed>, ReadCursor)>,
    /// The feed to poll next.
    turn: usize,
    /// Whether it was answered; a refused one was no subscriber.
    has_joined: bool,
    _count: Counted,
    _slot: OwnedSemaphorePermit,
}

impl Stream for Subscription {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        for _ in 0..this.cursors.len() {
            let turn = this.turn;
            this.turn = (turn + 1) % this.cursors.len();
            let (feed, cursor) = &mut this.cursors[turn];
            if let Poll::Ready(message) = feed.poll_next(cursor, cx) {
                return Poll::Ready(Some(message));
            }
        }
        Poll::Pending
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        for (feed, cursor) in &self.cursors {
            feed.leave(cursor);
        }
        if self.has_joined {
            info!("subscriber left");
        }
    }
}

/// Whether the service that a health question is about is one of ours.
fn is_served(question: &[u8]) -> Result<bool, Status> {
    let name = health::service(question)?;
    let of = |service: &Service| service.path()[1..].split('/').next() == Some(&name);
    Ok(name.is_empty() || Service::ALL.iter().any(of))
}

/// Sends the health, and each change of it.
struct Watch {
    service: Arc<BridgeService>,
    is_known: bool,
    last: Option<bool>,
    interval: Interval,
    _slot: OwnedSemaphorePermit,
}

impl Stream for Watch {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            std::task::ready!(self.interval.poll_tick(cx));
            if self.service.tasks.is_stopping() {
                return Poll::Ready(None);
            }
            let now = self.is_known && self.service.is_serving();
            if self.last.replace(now) == Some(now) {
                continue;
            }
            let message = if self.is_known {
                health::serving(now)
            } else {
                health::unknown()
            };
            return Poll::Ready(Some(Ok(message)));
        }
    }
}
