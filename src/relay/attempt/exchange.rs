//! One exchange with one engine: send a request; wait for the first byte of the answer. `first_token` waits for that of a stream.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::http::response;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use tokio::time::Sleep;

use crate::fleet::Worker;
use crate::http::client::{self, EngineBody};
use crate::relay::course::reuse::Reuse;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::Fault;
use crate::relay::failure::types::{Failure, Stage};
use crate::relay::headers;
use crate::relay::job::Job;
use crate::relay::kv_transfer::ANSWER_BYTES_MAX;
use crate::relay::request::gateway::{CarriedTo, Handover};
use crate::traces::TrySpan;

/// The beginning of an engine's answer.
pub(in crate::relay) struct Answer {
    pub(in crate::relay) head: response::Parts,
    pub(in crate::relay) body: EngineBody,
    /// The body's first bytes; `None` if the body is empty. The router sends nothing to the client before it has
    /// them, so a request whose engine dies while computing the prompt can still be retried.
    pub(in crate::relay) first: Option<Bytes>,
    /// `first` is known to begin an answer: its events were looked at for the first token of a stream.
    pub(in crate::relay) has_begun: bool,
    /// `host:port` of the worker that answered, if a gateway carried the request and says it.
    pub(in crate::relay) served: Option<String>,
    /// The attempt's time limit, which also bounds what is still to be read of the body.
    pub(in crate::relay) timer: Pin<Box<Sleep>>,
}

impl Answer {
    /// The next piece of the body, within the attempt's time limit; `None` at its end.
    pub(in crate::relay) async fn next_piece(&mut self) -> Result<Option<Bytes>, Error> {
        tokio::select! {
            biased;
            piece = next_data(&mut self.body) => piece.map_err(Error::BrokeOff),
            () = &mut self.timer => Err(Error::TimedOut),
        }
    }

    /// All of a prefill leg's answer, within the attempt's time limit and [`ANSWER_BYTES_MAX`].
    pub(in crate::relay) async fn read_whole(&mut self) -> Result<Bytes, Error> {
        let mut whole = BytesMut::from(self.first.take().unwrap_or_default());
        while let Some(piece) = self.next_piece().await? {
            whole.extend_from_slice(&piece);
            if whole.len() > ANSWER_BYTES_MAX {
                return Err(Error::TooLong);
            }
        }
        Ok(whole.freeze())
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(in crate::relay) enum Error {
    #[error("{0}")]
    Send(client::Error),
    /// The connection broke after the answer's status and headers.
    #[error("connection closed after the headers: {0}")]
    BrokeOff(hyper::Error),
    #[error("timed out")]
    TimedOut,
    /// A redirect, which is never followed: its place may be one that clients must not know. Or another protocol, which
    /// was not asked for.
    #[error("answered {0}, which no request asks for")]
    NoAnswer(StatusCode),
    /// A prefill leg's answer exceeds its size limit.
    #[error("the answer is larger than the limit")]
    TooLong,
}

impl Error {
    /// Whether the connection broke after the request was sent over it. One that was idle for long, and was replaced, says
    /// nothing.
    pub(in crate::relay) fn is_cut(&self) -> bool {
        match self {
            Error::Send(error) => error.may_have_been_read(),
            Error::BrokeOff(_) => true,
            Error::TimedOut | Error::NoAnswer(_) | Error::TooLong => false,
        }
    }

    /// What it means for an attempt that it ended at `stage`, for a request whose time ends at `deadline`.
    pub(in crate::relay) fn fault(&self, stage: Stage, now: Instant, deadline: Instant) -> Fault {
        let failure = match self {
            Error::Send(error) if error.is_local() => Failure::Local,
            Error::Send(client::Error::Connect(_)) => Failure::Connect,
            Error::Send(_) | Error::BrokeOff(_) => Failure::Broken,
            Error::NoAnswer(_) => Failure::NoAnswer,
            // A prefill leg's answer; the decode leg would not understand it either.
            Error::TooLong => Failure::KvTransfer,
            Error::TimedOut if now >= deadline => Failure::Deadline,
            Error::TimedOut => Failure::TimedOut,
        };
        let is_stale = matches!(self, Error::Send(client::Error::Stale { .. }));
        let owner = FailureOwner::of_failure(failure, is_stale);
        Fault {
            is_cut: self.is_cut(),
            ..Fault::new(stage, failure, owner)
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(in crate::relay) struct Sending<'a> {
    /// The dp rank that must process it.
    pub(in crate::relay) rank: Option<u32>,
    pub(in crate::relay) reuse: Reuse,
    /// The gateway that sends it, if the router itself does not.
    pub(in crate::relay) carried: Option<&'a CarriedTo<'a>>,
    /// The parent of what the engine does, if the request is traced.
    pub(in crate::relay) span: Option<&'a TrySpan>,
}

/// Sends a request with `body`, and waits for the first bytes of the answer's body.
pub(in crate::relay) async fn attempt(
    job: &Job<'_>,
    body: &Bytes,
    sending: Sending<'_>,
    worker: &Arc<Worker>,
    timer: Pin<Box<Sleep>>,
) -> Result<Answer, Error> {
    // Pinned, so that it is not moved again.
    let begin = pin!(async {
        if let Some(to) = sending.carried {
            let request = request(job, body, sending, worker);
            // Boxed, so that other requests do not carry its state.
            return Box::pin(carried(to, request.headers(), body)).await;
        }
        let build = || request(job, body, sending, worker);
        let mut answer = match sending.reuse.max_idle() {
            // Boxed, here and below, so that what goes over a pooled connection does not carry the state of a new one.
            None => Box::pin(worker.pool.send_anew(build())).await,
            Some(max_idle) => worker.pool.send_young(build(), max_idle).await,
        };
        if let Err(error @ client::Error::Stale { idle, .. }) = &answer
            && sending.reuse.replaces(*idle, error.may_have_been_read())
        {
            answer = Box::pin(worker.pool.send_anew(build())).await;
        }
        begun(answer).await
    });
    within(timer, begin).await
}

pub(in crate::relay) fn request(
    job: &Job<'_>,
    body: &Bytes,
    sending: Sending<'_>,
    worker: &Worker,
) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = job.target.clone();
    *request.headers_mut() = headers::to_engine(job.headers, worker, job.context.id);
    if let Some(rank) = sending.rank {
        headers::pin(request.headers_mut(), rank);
    }
    if let Some(span) = sending.span {
        span.put_into(request.headers_mut());
    }
    request
}

/// Sends a request over a new connection, and waits for the first bytes of the answer's body.
pub(in crate::relay) async fn attempt_anew(
    worker: &Worker,
    request: Request<Full<Bytes>>,
    timer: Pin<Box<Sleep>>,
) -> Result<Answer, Error> {
    let begin = pin!(async { begun(worker.pool.send_anew(request).await).await });
    within(timer, begin).await
}

async fn within(
    mut timer: Pin<Box<Sleep>>,
    begin: Pin<&mut impl Future<Output = Result<Begun, Error>>>,
) -> Result<Answer, Error> {
    let (head, body, first, served) = tokio::select! {
        biased;
        result = begin => result?,
        () = &mut timer => return Err(Error::TimedOut),
    };
    if head.status.is_informational() || head.status.is_redirection() {
        return Err(Error::NoAnswer(head.status));
    }
    Ok(Answer {
        head,
        body,
        first,
        has_begun: false,
        served,
        timer,
    })
}

type Begun = (response::Parts, EngineBody, Option<Bytes>, Option<String>);

async fn begun(answer: Result<Response<EngineBody>, client::Error>) -> Result<Begun, Error> {
    let (head, mut body) = answer.map_err(Error::Send)?.into_parts();
    let first = next_data(&mut body).await.map_err(Error::BrokeOff)?;
    Ok((head, body, first, None))
}

/// Has a gateway send a request.
async fn carried(to: &CarriedTo<'_>, headers: &HeaderMap, body: &Bytes) -> Result<Begun, Error> {
    let handover = Handover {
        workers: &to.workers,
        prefill: to.prefill.as_ref(),
        headers,
        body,
    };
    let mut answer = to.gateway.send(handover).await;
    let first = next_data(&mut answer.body).await.map_err(Error::BrokeOff)?;
    Ok((answer.head, answer.body, first, answer.served))
}

/// The next non-empty piece of a body.
async fn next_data(body: &mut EngineBody) -> Result<Option<Bytes>, hyper::Error> {
    while let Some(frame) = body.frame().await {
        // Trailers are not read, and empty frames say nothing.
        if let Ok(data) = frame?.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
    Ok(None)
}
