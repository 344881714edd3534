//! One request of a client, and the part of it that goes along to an engine.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;

use super::chat::Written;
use super::request::CreateRequest;
use super::websocket::memory::TurnContext;
use crate::ids::{ClientKey, RequestId, ResponseId, Tenant};
use crate::limits::ChargeId;
use crate::openai::error::ApiError;
use crate::openai::tenant::Admitted;
use crate::relay::{Progress, Resume, StandingCell, SummaryCell};

/// A client's request with its whole body.
#[derive(Debug)]
pub(crate) struct ClientRequest<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) query: &'a str,
    pub(crate) body: Bytes,
    pub(crate) id: RequestId,
    pub(crate) started: Instant,
    pub(crate) admitted: &'a Admitted,
    pub(crate) client: ClientKey,
    /// Filled with the figures of the engine's work, for the access log.
    pub(crate) summary: Option<&'a SummaryCell>,
    /// Filled with what the tenant has left of its limits.
    pub(crate) standing: Option<&'a StandingCell>,
    /// Of a create over a WebSocket.
    pub(crate) turn: Option<&'a TurnContext>,
}

/// What the relay needs to know of the client's request besides the engine's body.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) headers: &'a HeaderMap,
    /// What the client sent; the same if its SDK sends the request again.
    pub(super) original: &'a [u8],
    pub(super) client: ClientKey,
    pub(super) tenant: Tenant,
    pub(super) id: RequestId,
    /// What is charged once in the limits of the tenant.
    pub(super) charge: ChargeId,
    pub(super) started: Instant,
    /// The response that an engine generates for it.
    pub(super) response: Option<ResponseId>,
    /// No client waits for the answer.
    pub(super) is_background: bool,
    pub(super) summary: Option<&'a SummaryCell>,
    pub(super) standing: Option<&'a StandingCell>,
    /// Of a background response: learns how far the answer has come.
    pub(super) progress: Option<&'a Arc<Progress>>,
    /// Of a background response of which another replica wrote the beginning.
    pub(super) resumed: Option<&'a Resumed>,
}

/// What another replica wrote of an answer.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) tokens: Resume,
    pub(super) written: Written,
}

impl ClientRequest<'_> {
    pub(super) fn context(&self) -> RequestContext<'_> {
        RequestContext {
            headers: self.headers,
            original: &self.body,
            client: self.client,
            tenant: self.admitted.tenant,
            id: self.id,
            charge: ChargeId::Request(self.id),
            started: self.started,
            response: None,
            is_background: false,
            summary: self.summary,
            standing: self.standing,
            progress: None,
            resumed: None,
        }
    }

    /// The JSON member that separates this tenant's prefix cache from other tenants'.
    pub(super) fn salt(&self, create: &CreateRequest<'_>) -> Result<Option<&str>, ApiError> {
        let Some(salt) = &self.admitted.cache_salt else {
            return Ok(None);
        };
        if create.members.iter().any(|(name, _)| name == "cache_salt") {
            return Err(ApiError::salted_already());
        }
        Ok(Some(&salt.field))
    }
}
