//! One request of a client, and the part of it that goes along to an engine.

use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;

use super::chat::Written;
use super::request::CreateRequest;
use super::websocket::memory::TurnContext;
use crate::openai::error::ApiError;
use crate::openai::tenant::Admitted;
use crate::relay::{Progress, RequestContext, Resume, StandingCell};

/// A client's request with its whole body.
#[derive(Debug)]
pub(crate) struct ClientRequest<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) query: &'a str,
    pub(crate) body: Bytes,
    pub(crate) context: RequestContext,
    pub(crate) admitted: &'a Admitted,
    /// Filled with what the tenant has left of its limits.
    pub(crate) standing: Option<&'a StandingCell>,
    /// What a create over a WebSocket has besides its body; `None` for any other request.
    pub(crate) turn: Option<&'a TurnContext>,
}

/// What the relay needs to know of the client's request besides the engine's body.
#[derive(Clone, Debug)]
pub(super) struct EngineCall<'a> {
    pub(super) context: RequestContext,
    pub(super) headers: &'a HeaderMap,
    /// What the client sent; the same if its SDK sends the request again.
    pub(super) original: &'a [u8],
    /// Memory of the client's request, with the history that it continues.
    pub(super) reserved_bytes: u64,
    pub(super) standing: Option<&'a StandingCell>,
    /// Whether its tenant has a salt. A body may also have one of the client's own.
    pub(super) is_salted: bool,
    /// Learns how far the answer has come, for a background response.
    pub(super) progress: Option<&'a Arc<Progress>>,
    /// The beginning of the answer, for a background response of which another replica wrote it.
    pub(super) resumed: Option<&'a Resumed>,
}

/// What another replica wrote of an answer.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) tokens: Resume,
    pub(super) written: Written,
}

impl<'a> EngineCall<'a> {
    pub(super) fn new(context: RequestContext, headers: &'a HeaderMap, original: &'a [u8]) -> Self {
        Self {
            context,
            headers,
            original,
            reserved_bytes: original.len() as u64,
            standing: None,
            is_salted: false,
            progress: None,
            resumed: None,
        }
    }
}

impl ClientRequest<'_> {
    pub(super) fn engine_call(&self) -> EngineCall<'_> {
        EngineCall {
            standing: self.standing,
            is_salted: self.admitted.cache_salt.is_some(),
            ..EngineCall::new(self.context.clone(), self.headers, &self.body)
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
