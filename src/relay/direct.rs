//! One try at one worker: send, and wait for the first byte of an answer.

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

use super::attempt::Failure;
use super::{Job, headers};
use crate::fleet::Worker;
use crate::http::client::{self, EngineBody};

/// The beginning of an engine's answer.
pub(super) struct Answer {
    pub(super) head: response::Parts,
    pub(super) body: EngineBody,
    /// The body's first bytes. Nothing has gone to the client before they are here, so that an
    /// engine that dies while it computes the prompt costs a retry and not the answer.
    pub(super) first: Option<Bytes>,
    /// Limits the rest.
    pub(super) timer: Pin<Box<Sleep>>,
}

impl Answer {
    /// Whether it says that something is wrong with the worker, not with the request or its timing.
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
    /// The head came, the body did not.
    Cut(hyper::Error),
    TimedOut,
    /// More than the answer to a prompt's leg has.
    TooLong,
}

impl Error {
    /// Whether a connection that had waited too long was closed meanwhile, which says nothing of the worker.
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
            Error::Cut(error) => write!(f, "answer broke off at its first byte: {error}"),
            Error::TimedOut => f.write_str("no answer in time"),
            Error::TooLong => f.write_str("an answer that is too long"),
        }
    }
}

/// What of a request a try is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Whole,
    /// One of two legs, whose answer is read here; for a worker of several ranks to this one of them.
    Leg {
        rank: Option<u32>,
        /// What it carries is used up by an engine that has read it, even if no answer comes.
        is_once: bool,
    },
}

/// Sends a body, the job's own or one that was made of it.
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
            // The engine closed a connection that had waited too long: nothing is wrong with it. Whether it had
            // read the request is not known.
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
