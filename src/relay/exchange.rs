//! One exchange with one engine: send a request, wait for the first byte of the answer.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http_body::Body;
use http_body_util::Full;
use hyper::http::response;
use hyper::{Method, Request, StatusCode};
use tokio::time::Sleep;

use super::headers;
use super::job::Job;
use super::retries::Failure;
use crate::fleet::Worker;
use crate::http::client::{self, EngineBody};

/// The beginning of an engine's answer.
pub(super) struct Answer {
    pub(super) head: response::Parts,
    pub(super) body: EngineBody,
    /// The body's first bytes; `None` if the body is empty. The router sends nothing to the client before it has
    /// them, so a request whose engine dies while computing the prompt can still be retried.
    pub(super) first: Option<Bytes>,
    /// The attempt's time limit, which also bounds what is still to be read of the body.
    pub(super) timer: Pin<Box<Sleep>>,
}

impl Answer {
    /// True for a status that means a defect of the worker. 501 is a defect of the request, and 503 means that
    /// the worker is overloaded or starting.
    pub(super) fn is_failure(&self) -> bool {
        self.head.status.is_server_error()
            && !matches!(
                self.head.status,
                StatusCode::NOT_IMPLEMENTED | StatusCode::SERVICE_UNAVAILABLE
            )
    }
}

#[derive(Debug)]
pub(super) enum Error {
    Send(client::Error),
    /// The connection broke after the answer's status and headers.
    BrokeOff(hyper::Error),
    TimedOut,
    /// A prefill leg's answer exceeds its size limit.
    TooLong,
}

impl Error {
    /// True if the engine closed an idle connection just when the router sent a request on it. This does not count
    /// as a failure of the worker.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self, Error::Send(client::Error::Stale(_)))
    }

    pub(super) fn failure(&self) -> Failure {
        match self {
            Error::Send(client::Error::Connect(_)) => Failure::Connect,
            Error::Send(client::Error::Stale(_) | client::Error::Broken(_))
            | Error::BrokeOff(_)
            | Error::TooLong => Failure::Broken,
            Error::TimedOut => Failure::TimedOut,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Send(error) => error.fmt(f),
            Error::BrokeOff(error) => write!(f, "connection closed after the headers: {error}"),
            Error::TimedOut => f.write_str("timed out"),
            Error::TooLong => f.write_str("the answer is larger than the limit"),
        }
    }
}

/// Whether a client's request is sent as it is, or as one leg of a disaggregated request.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestKind {
    Whole,
    /// One leg of a disaggregated request. The router itself reads the answer.
    Leg {
        /// The dp rank that must process it.
        rank: Option<u32>,
        /// The leg names a KV transfer that can take place only once. An engine that read the leg and then closed
        /// the connection may already have used the transfer, so the leg is not sent again.
        is_single_use: bool,
    },
}

/// Sends a request with `body`, and waits for the first bytes of the answer's body. An idle connection that turns
/// out to be closed is replaced once.
pub(super) async fn attempt(
    job: &Job<'_>,
    body: &Bytes,
    kind: RequestKind,
    worker: &Arc<Worker>,
    mut timer: Pin<Box<Sleep>>,
) -> Result<Answer, Error> {
    let begin = async {
        let build = || {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = job.target.clone();
            *request.headers_mut() = headers::to_engine(job.headers, worker, job.id);
            if let RequestKind::Leg { rank, .. } = kind {
                headers::of_leg(request.headers_mut(), rank);
            }
            request
        };
        let is_single_use = matches!(
            kind,
            RequestKind::Leg {
                is_single_use: true,
                ..
            }
        );
        let answer = match worker.pool.send(build()).await {
            // The engine closed an idle connection. It may have read the request, so a single-use leg fails here.
            Err(client::Error::Stale(_)) if !is_single_use => worker.pool.send_anew(build()).await,
            answer => answer,
        };
        let (head, mut body) = answer.map_err(Error::Send)?.into_parts();
        let first = next_data(&mut body).await.map_err(Error::BrokeOff)?;
        Ok((head, body, first))
    };
    let (head, body, first) = tokio::select! {
        biased;
        begun = begin => begun?,
        () = &mut timer => return Err(Error::TimedOut),
    };
    Ok(Answer {
        head,
        body,
        first,
        timer,
    })
}

/// The next non-empty piece of a body.
pub(super) async fn next_data(body: &mut EngineBody) -> Result<Option<Bytes>, hyper::Error> {
    loop {
        match poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            Some(Err(error)) => return Err(error),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if !data.is_empty() => return Ok(Some(data)),
                // Trailers or an empty frame: read on.
                _ => {}
            },
        }
    }
}
