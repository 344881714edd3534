//! The relay's input (a request) and output (the worker that answered, or an error).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::HeaderName;
use hyper::{HeaderMap, Uri};

use super::continuation::{Progress, Resume};
use super::failure::types::{Failure, Outcome};
use super::kv_transfer::SingleWorkerReason;
use super::request::context::RequestContext;
use super::request::gateway::Gateway;
use super::request::summary::StandingCell;
use super::request::target::TargetReason;
use super::request::usage_option::UnaskedUsage;
use crate::fleet::Worker;
use crate::ids::Model;
use crate::limits;
use crate::prompt::Api;
use crate::queue::{Refusal, RefusalReason};

/// A request with this header gets the routing decision in the same header of its response.
pub const DECISION: HeaderName = HeaderName::from_static("x-warmroute-decision");

/// A client's wish for the priority of a request that has to wait, and for the time to its first token.
pub(super) const PRIORITY: HeaderName = HeaderName::from_static("x-warmroute-priority");
pub(super) const TTFT_TARGET: HeaderName = HeaderName::from_static("x-warmroute-ttft-target");

const CHAT_PATH: &str = "/v1/chat/completions";

/// Models that the text of an error names. With thousands of adapters it would be a hundred times as long as the request.
const MAX_NAMED: usize = 20;

/// The worker that answered: an extension of the response to a request of the Responses API, or of a gateway.
#[derive(Clone, Debug)]
pub struct ServedBy(pub Arc<str>);

/// An extension of the response: a request of the Responses API was sent as a chat completion, and this is its answer.
#[derive(Clone, Copy, Debug)]
pub struct AnsweredAsChat;

/// Makes a chat completion of a request of the Responses API, for workers that do not serve that.
pub trait ChatForm: fmt::Debug + Sync {
    /// The body for `/v1/chat/completions`.
    fn chat_body(&self, native: &Bytes, loss: ToolLoss) -> Result<Bytes, NotConvertible>;
}

/// What becomes of tools that a chat completion cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolLoss {
    /// The request is refused: a worker with the Responses API can have all of it.
    Refused,
    /// There is no such worker, and the settings decide.
    AsConfigured,
}

/// What a request has that a chat completion cannot have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotConvertible {
    /// The name of the member, as the client wrote it.
    pub param: String,
    pub message: String,
}

impl NotConvertible {
    pub fn new(param: &str, message: &str) -> Self {
        Self {
            param: param.to_owned(),
            message: message.to_owned(),
        }
    }
}

/// One request to send to an engine.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    pub context: RequestContext,
    pub api: Api,
    /// In origin form: path and query, as the client sent them.
    pub target: Uri,
    pub headers: &'a HeaderMap,
    pub body: Bytes,
    /// What the client sent: the same when its SDK sends the request again.
    pub original: &'a [u8],
    /// Memory of the client's request, which is given back when the request ends.
    pub reserved_bytes: u64,
    /// Receives what the tenant has left of its limits.
    pub standing: Option<&'a StandingCell>,
    /// The name that the client asked for, if the configuration leads it to a model. Then `body` names that model.
    pub requested: Option<RequestedName>,
    /// The usage that the router asked the engine for on its own: it is not passed on.
    pub unasked_usage: UnaskedUsage,
    /// For workers that do not serve the Responses API: makes a chat completion of the body.
    pub chat: Option<&'a dyn ChatForm>,
    /// True if `body` is a chat completion that was made of a request of the Responses API.
    pub is_converted: bool,
    /// Has the connections to the workers, if the router itself does not send the request. Such a request has one attempt.
    pub gateway: Option<&'a dyn Gateway>,
    /// Learns how far the answer's stream has come, if another process may go on with it.
    pub progress: Option<&'a Arc<Progress>>,
    /// Where a stream is that another process began: only its rest is asked for.
    pub resume: Option<&'a Resume>,
}

/// A name that the configuration leads to a model.
#[derive(Clone, Debug)]
pub struct RequestedName {
    /// As the client wrote it.
    pub name: Model,
    /// Why it leads to this model.
    pub reason: TargetReason,
}

impl<'a> Job<'a> {
    /// A request as it came. `original`: what the client sent, which may be more than `body`.
    pub fn new(
        context: RequestContext,
        api: Api,
        target: Uri,
        headers: &'a HeaderMap,
        body: Bytes,
        original: &'a [u8],
    ) -> Self {
        Self {
            context,
            api,
            target,
            headers,
            body,
            original,
            reserved_bytes: original.len() as u64,
            standing: None,
            requested: None,
            unasked_usage: UnaskedUsage::default(),
            chat: None,
            is_converted: false,
            gateway: None,
            progress: None,
            resume: None,
        }
    }

    pub(super) fn asked_api(&self) -> Api {
        if self.is_converted {
            Api::Responses
        } else {
            self.api
        }
    }

    /// Whether a worker gets the router's own key for it. A gateway sends what it likes.
    pub(super) fn sends_own_key(&self, worker: &Worker) -> bool {
        worker.authorization.is_some() && self.gateway.is_none()
    }

    /// A worker has answered this request, which was sent at `sent`, and not with 401: if the router's key was sent
    /// with it, the engine takes that. Not where no prompt is computed, since engines may need no key there.
    pub(super) fn on_no_refusal_of_key(&self, worker: &Worker, sent: Instant) {
        if self.api.computes_prompt() && self.sends_own_key(worker) {
            worker.key.on_accepted(sent);
        }
    }

    pub(super) fn as_chat(&self, body: Bytes) -> Job<'a> {
        Job {
            api: Api::Chat,
            target: Uri::from_static(CHAT_PATH),
            body,
            chat: None,
            is_converted: true,
            ..self.clone()
        }
    }
}

/// Why the client gets no answer of an engine.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// No worker serves the model.
    #[error("the model `{model}` does not exist{}", there_is(.known))]
    UnknownModel { model: String, known: Vec<Model> },
    /// The request names no model, and there is more than one.
    #[error("`model` is missing{}", there_is(.known))]
    NoModel { known: Vec<Model> },
    /// No worker of the model is usable now.
    #[error("no worker can take requests{} now", for_model(.model))]
    NoWorker {
        model: String,
        /// False if the name may as well be wrong: it is not known, but a worker has yet to say what it serves.
        is_known: bool,
        retry_after: Duration,
    },
    /// No prefill worker is usable now, and decode workers must not compute prompts (`on_prefill_failure: fail`).
    #[error(
        "no prefill worker can take requests for `{model}` now, and its decode workers compute no prompts"
    )]
    NoPrefill {
        model: String,
        retry_after: Duration,
    },
    /// It cannot be split into a prefill and a decode leg, and the model's workers take nothing else.
    #[error(
        "the workers of `{model}` compute prompts and answers apart, which this request does not allow ({}): {}",
        .reason.as_str(),
        .reason.explanation()
    )]
    NotSplit {
        model: String,
        reason: SingleWorkerReason,
    },
    /// Every attempt failed before an answer.
    #[error(
        "no engine answered in {attempts} attempts: {}{}",
        at(.worker),
        .last.explanation()
    )]
    Unreachable {
        attempts: u32,
        last: Failure,
        /// The worker of the last attempt, if clients may know it.
        worker: Option<Arc<str>>,
        /// An engine may have computed an answer that was lost.
        may_have_computed: bool,
    },
    #[error("no engine answered in time, in {attempts} attempts")]
    TimedOut { attempts: u32 },
    /// The time of the whole request is over.
    #[error(
        "the request took longer than the {limit:?} that the router allows, in {attempts} attempts"
    )]
    Deadline { attempts: u32, limit: Duration },
    /// The router had no file descriptor, port or memory for a connection to a worker.
    #[error("the router cannot open a connection to an engine now")]
    OutOfResources { retry_after: Duration },
    /// It waited in vain for a worker with room, or did not wait.
    #[error("{}", .0.reason)]
    NotQueued(Refusal),
    /// A header that the router reads has a value that it cannot.
    #[error("the header `{name}` must be {expected}")]
    BadHeader {
        name: HeaderName,
        expected: &'static str,
    },
    /// Engines cut the connection when they got the request; it is not sent again.
    #[error(
        "engines closed the connection without an answer each time they got this request; it is not sent again"
    )]
    CutsConnections,
    /// Each engine that could have the request refused the router's own key. A 401 would say that the client's own key
    /// is wrong.
    #[error("an engine refused the key that the router is configured with for it (`api_key`)")]
    KeyRefused,
    /// The limits of its tenant have no room for the request.
    #[error("{0}")]
    Limited(Box<limits::Refusal>),
    /// No worker of the model serves the API.
    #[error(
        "no worker of `{model}` serves the Messages API (`/v1/messages`); send chat completions (`/v1/chat/completions`)"
    )]
    NotServed { model: String },
    /// Only workers that speak chat completions could take the request, and it cannot be one.
    #[error("{}", .0.message)]
    NotConvertible(NotConvertible),
    /// No worker can go on with the stream that another process began.
    #[error("no worker can go on with the answer ({reason})")]
    NotContinued { reason: &'static str },
}

impl Error {
    /// True if another model might answer: this one has no worker that can. False for mistakes of the client, for what
    /// its tenant may not do, and for requests that may have harmed the engines.
    pub(super) fn is_lack_of_workers(&self) -> bool {
        match self {
            Error::UnknownModel { .. }
            | Error::NoWorker { .. }
            | Error::NoPrefill { .. }
            | Error::NotServed { .. }
            | Error::NotSplit { .. }
            | Error::KeyRefused
            | Error::Unreachable { .. } => true,
            Error::NoModel { .. }
            | Error::TimedOut { .. }
            | Error::Deadline { .. }
            | Error::OutOfResources { .. }
            | Error::BadHeader { .. }
            | Error::Limited(_)
            | Error::NotConvertible(_)
            | Error::NotContinued { .. }
            | Error::CutsConnections => false,
            // A full queue is a lack of workers, too.
            Error::NotQueued(refusal) => refusal.reason != RefusalReason::Draining,
        }
    }

    /// How a request has ended that gets this error.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            // A client with a wrong name is no failure of the fleet.
            Error::UnknownModel { .. }
            | Error::NoWorker {
                is_known: false, ..
            }
            | Error::NoModel { .. }
            | Error::NotSplit { .. }
            | Error::BadHeader { .. }
            | Error::NotServed { .. }
            | Error::NotConvertible(_) => Outcome::Refused,
            Error::Limited(refusal) => match **refusal {
                limits::Refusal::Store { .. } => Outcome::RouterFailed,
                _ => Outcome::Refused,
            },
            Error::NotQueued(refusal) => match refusal.reason {
                RefusalReason::NoWorker { .. } => Outcome::WorkerFailed,
                RefusalReason::Draining => Outcome::RouterFailed,
                _ => Outcome::NotQueued,
            },
            Error::NoWorker { is_known: true, .. }
            | Error::NoPrefill { .. }
            | Error::Unreachable { .. }
            | Error::TimedOut { .. }
            | Error::KeyRefused
            | Error::CutsConnections => Outcome::WorkerFailed,
            Error::OutOfResources { .. } | Error::NotContinued { .. } => Outcome::RouterFailed,
            Error::Deadline { .. } => Outcome::RequestTimeout,
        }
    }
}

/// The error of a request that no worker has answered. It is counted once its client gets the error: a fallback may answer.
#[derive(Debug)]
pub(super) struct FailedRequest {
    pub(super) error: Error,
    /// The model that it counts for. `None` if it ended before its model was known to have a worker.
    pub(super) model: Option<Model>,
}

impl From<Error> for FailedRequest {
    fn from(error: Error) -> Self {
        Self { error, model: None }
    }
}

fn there_is(known: &[Model]) -> String {
    let (named, others) = known.split_at(known.len().min(MAX_NAMED));
    let named = named.join(", ");
    match others.len() {
        _ if known.is_empty() => String::new(),
        0 => format!("; there is {named}"),
        more => format!("; there is {named} and {more} more (GET /v1/models)"),
    }
}

/// Nothing for a request that names no model.
fn for_model(model: &str) -> String {
    match model {
        "" => String::new(),
        model => format!(" for `{model}`"),
    }
}

fn at(worker: &Option<Arc<str>>) -> String {
    worker
        .as_ref()
        .map_or_else(String::new, |worker| format!("{worker}: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_an_unknown_model_names_some_of_many_others() {
        let text = |count: usize| {
            let names = (0..count).map(|number| Model::from(format!("m{number}")));
            let unknown = Error::UnknownModel {
                model: "x".to_owned(),
                known: names.collect(),
            };
            unknown.to_string()
        };
        assert_eq!(text(0), "the model `x` does not exist");
        assert_eq!(text(2), "the model `x` does not exist; there is m0, m1");
        assert!(text(20).ends_with(", m18, m19"));
        let of_many = text(5_000);
        let end = ", m18, m19 and 4980 more (GET /v1/models)";
        assert!(of_many.ends_with(end), "{of_many}");
    }
}
