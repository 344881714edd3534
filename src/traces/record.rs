//! What is kept of a sampled request until its end. Pure.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use hyper::header::HeaderValue;

use super::context::TraceContext;
use crate::ids::RequestId;

/// Events that one request keeps; more are counted.
const MAX_EVENTS: usize = 64;
/// Tries that one request keeps; more are counted. A background response may be tried again for hours.
const MAX_TRIES: usize = 32;

/// One request: the span of its own, and those of its tries.
#[derive(Clone, Debug)]
pub struct Record {
    pub context: TraceContext,
    /// The client's span.
    pub parent: Option<u64>,
    /// `tracestate` as the client sent it.
    pub state: Option<HeaderValue>,
    /// The create of a background response, which has a trace of its own.
    pub link: Option<TraceContext>,
    pub conversation: Option<Arc<str>>,
    pub started: Instant,
    /// The time of day at `started`.
    pub started_at: SystemTime,
    pub ended: Option<Instant>,
    pub end: RequestEnd,
    pub events: Vec<(Instant, Event)>,
    pub dropped_events: u32,
    pub tries: Vec<Try>,
    pub dropped_tries: u32,
}

#[derive(Clone, Debug, Default)]
pub struct RequestEnd {
    pub method: Option<hyper::Method>,
    pub path: Option<String>,
    /// The path with names of parameters instead of ids; `None` for a path that no route has.
    pub route: Option<&'static str>,
    pub status: Option<u16>,
    pub client: Option<IpAddr>,
    /// Why the request failed.
    pub error: Option<&'static str>,
    pub tenant: Option<Arc<str>>,
    pub id: Option<RequestId>,
    /// Of a background response.
    pub response: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request has waited in the router for a worker.
    Queued {
        waited: Duration,
    },
    /// The prompt's token ids were looked for.
    Tokenized {
        took: Duration,
        /// `None` if they are not known.
        tokens: Option<u64>,
    },
    Decided {
        worker: Arc<str>,
        /// The dp rank of it that the request is pinned to.
        rank: Option<u32>,
        decision: Decision,
        leg: Option<Leg>,
    },
    /// A prefill worker has computed the prompt.
    PrefillLeg {
        worker: Arc<str>,
        took: Duration,
    },
    /// A decode worker has the prompt's KV blocks.
    KvTransfer {
        worker: Arc<str>,
        took: Duration,
    },
    /// The stream's worker is lost after so many tokens of the answer, and another one is looked for.
    Continued {
        lost: Arc<str>,
        answer_tokens: u64,
    },
    FirstToken,
}

/// Which part of a disaggregated request a try is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    Prefill,
    Decode,
}

/// Why a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    pub reason: &'static str,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub new_tokens: u64,
    /// Prompt tokens that the worker had accepted and not computed yet, those of this request left out.
    pub queued_tokens: u64,
    pub cost: f64,
}

/// One request to a worker, with its answer.
#[derive(Clone, Debug)]
pub struct Try {
    pub span_id: u64,
    pub started: Instant,
    pub ended: Option<Instant>,
    /// As the GenAI conventions name it.
    pub operation: &'static str,
    /// `chat_completions` or `responses`.
    pub api_type: Option<&'static str>,
    pub model: Arc<str>,
    /// The name that the client asked for, if the configuration leads it to the model.
    pub requested_model: Option<Arc<str>>,
    pub worker: Arc<str>,
    /// The dp rank of it that the request is pinned to.
    pub rank: Option<u32>,
    /// `host:port`.
    pub authority: String,
    pub leg: Option<Leg>,
    /// From 1.
    pub attempt: u32,
    pub decision: Decision,
    pub request: RequestFields,
    pub status: Option<u16>,
    /// Its kind, and what there is to say of it.
    pub error: Option<(&'static str, String)>,
    pub first_token: Option<Instant>,
    pub usage: Option<Usage>,
    pub response: ResponseFields,
}

/// What a body asks for, besides the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestFields {
    pub is_stream: bool,
    pub max_tokens: Option<u64>,
    pub temperature: Option<f64>,
}

/// Tokens, as the engine reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// The tokens of the output that are reasoning, if the engine says so.
    pub reasoning_tokens: Option<u64>,
}

/// What an answer says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseFields {
    pub id: Option<String>,
    pub model: Option<String>,
    pub finish_reasons: Vec<String>,
}

impl Record {
    pub fn new(context: TraceContext, started: Instant, started_at: SystemTime) -> Self {
        Self {
            context,
            parent: None,
            state: None,
            link: None,
            conversation: None,
            started,
            started_at,
            ended: None,
            end: RequestEnd::default(),
            events: Vec::new(),
            dropped_events: 0,
            tries: Vec::new(),
            dropped_tries: 0,
        }
    }

    pub(super) fn push_event(&mut self, at: Instant, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push((at, event));
        } else {
            self.dropped_events += 1;
        }
    }

    pub(super) fn push_try(&mut self, tried: Try) {
        if self.tries.len() < MAX_TRIES {
            self.tries.push(tried);
        } else {
            self.dropped_tries += 1;
        }
    }

    pub(super) fn spans(&self) -> usize {
        1 + self.tries.len()
    }
}
