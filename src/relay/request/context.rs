//! What a request is known as.

use std::sync::Arc;
use std::time::Instant;

use crate::ids::{ClientKey, RequestId, ResponseId, Tenant};
use crate::limits::ChargeId;
use crate::relay::request::summary::SummaryCell;
use crate::traces::RequestTrace;

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
    /// The response of the Responses API that it generates, if the router knows it.
    pub response: Option<ResponseId>,
    /// No client waits for its answer.
    pub is_background: bool,
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
            response: None,
            is_background: false,
            summary: None,
        }
    }

    /// The request's trace, if it is traced.
    pub fn trace(&self) -> Option<&Arc<RequestTrace>> {
        self.summary.as_ref()?.trace()
    }
}
