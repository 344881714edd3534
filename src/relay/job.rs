//! What the relay is handed and what it hands back: a request, the worker that answered, an error. Pure.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::HeaderName;
use hyper::{HeaderMap, Uri};

use super::summary::SummaryCell;
use crate::ids::RequestId;
use crate::prompt::Api;

/// A request that carries this header gets it back with the decision.
pub const DECISION: HeaderName = HeaderName::from_static("x-warmroute-decision");

/// Which worker an answer comes from, by its name: an extension of the response.
#[derive(Clone, Debug)]
pub struct ServedBy(pub Arc<str>);

/// One request to carry.
#[derive(Debug)]
pub struct Job<'a> {
    pub api: Api,
    /// In origin form: path and query, as the client sent them.
    pub target: Uri,
    pub headers: &'a HeaderMap,
    pub body: Bytes,
    pub id: RequestId,
    /// When the request's head had come.
    pub begun: Instant,
    /// Filled with the request's figures, for an access log.
    pub summary: Option<SummaryCell>,
}

/// Why no engine's answer can be passed on.
#[derive(Debug, PartialEq)]
pub enum Error {
    /// No worker serves it.
    UnknownModel { model: String, known: Vec<String> },
    /// The request names none, and there is more than one.
    NoModel { known: Vec<String> },
    /// Workers serve it, and none can take it now.
    NoWorker {
        model: String,
        retry_after: Duration,
    },
    /// Workers can take it, but none can compute its prompt for them, and they are not to do so themselves.
    NoPrefill {
        model: String,
        retry_after: Duration,
    },
    /// Every try failed before an answer.
    Unreachable { tries: u32, last: String },
    /// The last try took too long.
    TimedOut { tries: u32 },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::UnknownModel { model, known } => {
                write!(
                    f,
                    "the model `{model}` does not exist; there is {}",
                    known.join(", ")
                )
            }
            Error::NoModel { known } => {
                write!(f, "`model` is missing; there is {}", known.join(", "))
            }
            Error::NoWorker { model, .. } if model.is_empty() => {
                f.write_str("no worker can take requests now")
            }
            Error::NoWorker { model, .. } => {
                write!(f, "no worker can take requests for `{model}` now")
            }
            Error::NoPrefill { model, .. } => {
                write!(f, "no prefill worker can take requests for `{model}` now")
            }
            Error::Unreachable { tries, last } => {
                write!(f, "no engine answered in {tries} tries: {last}")
            }
            Error::TimedOut { tries } => write!(f, "no engine answered in time, in {tries} tries"),
        }
    }
}
