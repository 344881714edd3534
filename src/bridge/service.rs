//! What is served on the bridge's listener: `SubscribeKvEvents` under every engine's path, gRPC's health
//! service, and for operators `/metrics` and `/healthz` over plain HTTP.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Interval;
use tonic::Status;
use tracing::info;

use super::feed::{Feed, Joined, Place};
use super::metrics::Metrics;
use crate::http::drain::Tasks;
use crate::http::{Body, full, grpc};
use crate::kv::grpc::{EPOCH_METADATA, LAST_METADATA, RANK_METADATA};
use crate::kv::protobuf::{self, Service};
use crate::observe::metrics::Registry;

/// A question is a number, or a service's name.
const QUESTION_BYTES_MAX: usize = 1_024;
/// How soon those who watch the health see a change.
const HEALTH_EVERY: Duration = Duration::from_millis(500);

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// The same for all connections.
#[derive(Debug)]
pub struct Served {
    /// One for each rank.
    feeds: Vec<Arc<Feed>>,
    places: Arc<Semaphore>,
    metrics: Metrics,
    registry: Registry,
    tasks: Tasks,
}

impl Served {
    pub fn new(
        feeds: Vec<Arc<Feed>>,
        subscribers_max: usize,
        metrics: Metrics,
        registry: Registry,
        tasks: Tasks,
    ) -> Arc<Self> {
        Arc::new(Self {
            feeds,
            places: Arc::new(Semaphore::new(subscribers_max)),
            metrics,
            registry,
            tasks,
        })
    }

    pub async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path();
        if !grpc::is_grpc(&request) {
            return match (request.method(), path) {
                (&Method::GET, "/metrics") => plain(StatusCode::OK, &self.registry.text()),
                (&Method::GET, "/healthz") => self.healthz(),
                _ => plain(StatusCode::NOT_FOUND, "this is gRPC\n"),
            };
        }
        let answered = match path {
            CHECK => self.check(request).await,
            WATCH => self.watch(request).await,
            path if Service::ALL.iter().any(|service| service.path() == path) => {
                self.subscribe(request).await
            }
            path => Err(Status::unimplemented(format!("{path} is not served here"))),
        };
        answered.unwrap_or_else(|status| grpc::refuse(&status))
    }

    async fn subscribe(&self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
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
        let question = grpc::question(request, QUESTION_BYTES_MAX).await?;
        let after = protobuf::decode_request(&question)
            .map_err(|error| Status::invalid_argument(error.0))?;
        if after != 0 && feeds.len() > 1 {
            // Each rank has numbers of its own, and of which this one is is not said.
            return Err(Status::out_of_range(
                "with several ranks, only 0 is a number to start from",
            ));
        }
        let place = self.place()?;
        let mut subscription = Subscription::new(place, self.metrics.clone());
        let mut epochs = Vec::with_capacity(feeds.len());
        let mut lasts = Vec::with_capacity(feeds.len());
        for feed in feeds {
            let Joined { place, epoch, last } = feed.subscribe(after).await?;
            subscription.places.push((feed.clone(), place));
            epochs.push(epoch);
            lasts.push(last);
        }
        info!(after, ranks = feeds.len(), "a subscriber joins");
        let mut answer = grpc::answer(subscription);
        let epoch = HeaderValue::from_str(&epochs.join(","));
        let epoch = epoch.expect("epochs are hexadecimal");
        answer.headers_mut().insert(EPOCH_METADATA, epoch);
        // Of which rank a number is could not be told.
        if let [last] = lasts[..] {
            answer.headers_mut().insert(LAST_METADATA, last.into());
        }
        Ok(answer)
    }

    /// For a call that stays: one of subscribers, or one that watches the health.
    fn place(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.places.clone().try_acquire_owned().map_err(|_| {
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
            None => plain(StatusCode::OK, "serving\n"),
            Some(status) => plain(
                StatusCode::SERVICE_UNAVAILABLE,
                &format!("{}\n", status.message()),
            ),
        }
    }

    async fn check(&self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        if !knows(&grpc::question(request, QUESTION_BYTES_MAX).await?)? {
            return Err(Status::not_found("no such service"));
        }
        Ok(grpc::answer(Once(Some(health(self.is_serving())))))
    }

    async fn watch(self: &Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        let is_known = knows(&grpc::question(request, QUESTION_BYTES_MAX).await?)?;
        let place = self.place()?;
        Ok(grpc::answer(Watch {
            served: self.clone(),
            is_known,
            last: None,
            interval: tokio::time::interval(HEALTH_EVERY),
            _place: place,
        }))
    }
}

/// One call of `SubscribeKvEvents`.
struct Subscription {
    places: Vec<(Arc<Feed>, Place)>,
    /// Whose turn it is.
    turn: usize,
    metrics: Metrics,
    _place: OwnedSemaphorePermit,
}

impl Subscription {
    fn new(place: OwnedSemaphorePermit, metrics: Metrics) -> Self {
        metrics.subscribers.inc();
        Self {
            places: Vec::new(),
            turn: 0,
            metrics,
            _place: place,
        }
    }
}

impl Stream for Subscription {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        for _ in 0..this.places.len() {
            let turn = this.turn;
            this.turn = (turn + 1) % this.places.len();
            let (feed, place) = &mut this.places[turn];
            if let Poll::Ready(said) = feed.poll_next(place, cx) {
                return Poll::Ready(Some(said));
            }
        }
        Poll::Pending
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        for (feed, place) in &self.places {
            feed.leave(place);
        }
        self.metrics.subscribers.dec();
        info!("a subscriber leaves");
    }
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Message)]
struct HealthCheck {
    #[prost(string, tag = "1")]
    service: String,
}

/// Whether the health of a service that is served here was asked for.
fn knows(question: &[u8]) -> Result<bool, Status> {
    let question = HealthCheck::decode(question)
        .map_err(|error| Status::invalid_argument(error.to_string()))?;
    let name = question.service;
    let of = |service: &Service| service.path()[1..].split('/').next() == Some(&name);
    Ok(name.is_empty() || Service::ALL.iter().any(of))
}

/// `grpc.health.v1.HealthCheckResponse`, framed.
fn health(is_serving: bool) -> Bytes {
    grpc::frame(&[0x08, if is_serving { 1 } else { 2 }])
}

/// The same, of a service that is not here.
fn unknown() -> Bytes {
    grpc::frame(&[0x08, 3])
}

struct Once(Option<Bytes>);

impl Stream for Once {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}

/// Tells the health, and each change of it.
struct Watch {
    served: Arc<Served>,
    is_known: bool,
    last: Option<bool>,
    interval: Interval,
    _place: OwnedSemaphorePermit,
}

impl Stream for Watch {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            std::task::ready!(self.interval.poll_tick(cx));
            if self.served.tasks.is_stopping() {
                return Poll::Ready(None);
            }
            let now = self.is_known && self.served.is_serving();
            if self.last.replace(now) == Some(now) {
                continue;
            }
            let message = if self.is_known {
                health(now)
            } else {
                unknown()
            };
            return Poll::Ready(Some(Ok(message)));
        }
    }
}

fn plain(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(full(text.to_owned()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
