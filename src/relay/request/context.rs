//! What a request is known as.

use std::sync::Arc;
use std::time::Instant;

use crate::ids::{ClientKey, RequestId, ResponseId, Tenant};
use crate::limits::ChargeId;
use crate::relay::request::batch_line::BatchLine;
use crate::relay::request::summary::SummaryCell;
use crate::traces::RequestTrace;

#[derive(Clone, Debug, Default)]
pub enum RequestKind {
    /// A client.
    #[default]
    Interactive,
    /// A background response: no client is connected.
    Background,
    /// A line of a batch, which comes after all other requests.
    Batch(Arc<BatchLine>),
}

impl RequestKind {
    /// Whether a client waits for it.
    pub fn is_interactive(&self) -> bool {
        matches!(self, Self::Interactive)
    }

    pub fn batch_line(&self) -> Option<&BatchLine> {
        match self {
            Self::Batch(line) => Some(line),
            Self::Interactive | Self::Background => None,
        }
    }
}

/// Whose request it is, and what it is known as: the same for each attempt, each model that is tried for it, and the rest of
/// a stream.
#[derive(Clone, Debug)]
pub struct RequestContext {
    pub id: RequestId,
    pub client: ClientKey,
    /// Whose request it is, for limits, waiting and usage.
    pub tenant: Tenant,
    /// What is charged for it once, in the limits of the tenant.
    pub charge: ChargeId,
    /// When the request's head was received.
    pub started: Instant,
    /// When its time is over. `None`: `requests.request_timeout` after it was received.
    pub deadline: Option<Instant>,
    /// The response of the Responses API that it generates, if the router knows it.
    pub response: Option<ResponseId>,
    pub kind: RequestKind,
    /// Receives worker, tokens and times for the access log, if there is one.
    pub summary: Option<SummaryCell>,
}

impl RequestContext {
    /// A client's request, which is charged for once.
    pub fn new(id: RequestId, client: ClientKey, tenant: Tenant, started: Instant) -> Self {
        Self {
            id,
            client,
            tenant,
            charge: ChargeId::Request(id),
            started,
            deadline: None,
            response: None,
            kind: RequestKind::Interactive,
            summary: None,
        }
    }

    pub fn trace(&self) -> Option<&Arc<RequestTrace>> {
        self.summary.as_ref()?.trace()
    }
}
