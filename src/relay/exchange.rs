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
    /// The body's first bytes. Nothing has gone to the client before they are here, so that an
    /// engine that dies while it computes the prompt costs a retry and not the answer.
    pub(super) first: Option<Bytes>,
    /// The time limit of the rest.
    pub(super) timer: Pin<Box<Sleep>>,
}

impl Answer {
    /// True for a status that means a defect of the worker, not of the request or its timing.
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
    /// The answer broke off after its head.
    Cut(hyper::Error),
    TimedOut,
    /// A prefill leg's answer exceeds its size limit.
    TooLong,
}

impl Error {
    /// True if an idle connection was closed by the engine just when it was used: no failure of the worker.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self, Error::Send(client::Error::Stale(_)))
    }

    pub(super) fn failure(&self) -> Failure {
        match self {
            Error::Send(client::Error::Connect(_)) => Failure::Connect,
            Error::Send(client::Error::Stale(_) | client::Error::Broken(_))
            | Error::Cut(_)
            | Error::TooLong => Failure::Broken,
            Error::TimedOut => Failure::TimedOut,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Send(error) => error.fmt(f),
            Error::Cut(error) => write!(f, "answer broke off before its body: {error}"),
            Error::TimedOut => f.write_str("timed out"),
            Error::TooLong => f.write_str("answer too long"),
        }
    }
}

/// Which part of a client's request is sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Whole,
    /// A leg of a disaggregated request, perhaps to one dp rank. Its answer is read here.
    Leg {
        rank: Option<u32>,
        /// It must not be sent twice: an engine that has read it may have used up what it refers to.
        is_once: bool,
    },
}

/// Sends a body: the job's own or one made of it.
pub(super) async fn attempt(
    job: &Job<'_>,
    body: &Bytes,
    part: Part,
    worker: &Arc<Worker>,
    mut timer: Pin<Box<Sleep>>,
) -> Result<Answer, Error> {
    let begin = async {
        let build = || {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = job.target.clone();
            *request.headers_mut() = headers::to_engine(job.headers, worker, job.id);
            if let Part::Leg { rank, .. } = part {
                headers::of_leg(request.headers_mut(), rank);
            }
            request
        };
        let is_once = matches!(part, Part::Leg { is_once: true, .. });
        let answer = match worker.pool.send(build()).await {
            // The engine closed an idle connection, perhaps after reading the request.
            Err(client::Error::Stale(_)) if !is_once => worker.pool.send_anew(build()).await,
            answer => answer,
        };
        let (head, mut body) = answer.map_err(Error::Send)?.into_parts();
        let first = next_data(&mut body).await.map_err(Error::Cut)?;
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
                // Trailers, or nothing: no byte yet.
                _ => {}
            },
        }
    }
}
