//! One turn: a create as over HTTP, with a request id, a log line, limits and a place in the queue of its own.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::AUTHORIZATION;
use hyper::{Method, Response, Uri};
use tracing::debug;

use super::opener::Opener;
use crate::api::ApiServer;
use crate::api::access_log::{AccessLine, LoggedBody};
use crate::http;
use crate::ids::{ClientKey, RequestId, Tenant};
use crate::observe;
use crate::openai::error::ApiError;
use crate::openai::tenant::Admitted;
use crate::prompt::Api;
use crate::relay::RequestContext;
use crate::responses::websocket::memory::TurnContext;
use crate::responses::{ClientRequest, Endpoint};

const PATH: &str = "/v1/responses";
/// What the access log has as the method of a turn.
const METHOD: &[u8] = b"WEBSOCKET";

impl ApiServer {
    /// With the settings of the latest configuration.
    pub(super) fn latest(self: &Arc<Self>) -> Arc<Self> {
        self.latest.load().upgrade().unwrap_or_else(|| self.clone())
    }

    /// The answer to a create over HTTP with this body: a stream of events, or an error.
    pub(super) async fn turn(
        self: Arc<Self>,
        opener: Arc<Opener>,
        tenant: Tenant,
        body: Bytes,
        turn: TurnContext,
    ) -> Response<LoggedBody> {
        let id = RequestId::new(fastrand::u128(..));
        let trace = self.relay.tracer.begin(&opener.headers);
        let mut line = {
            let method = Method::from_bytes(METHOD).unwrap_or(Method::GET);
            let request = (&method, &Uri::from_static(PATH), &opener.headers);
            AccessLine::begin(request, id, opener.address, &self.tasks, trace)
        };
        if let Some(line) = &mut line {
            line.client_request_id = Some(opener.client_id.clone());
        }
        let answer = self
            .answer_turn(&opener, tenant, body, turn, id, line.as_deref_mut())
            .await;
        let response = answer.unwrap_or_else(|error| {
            let api = Api::Responses.as_str();
            self.on_error(id, &error, api, line.as_deref_mut());
            error.into_response()
        });
        LoggedBody::of(response, line)
    }

    async fn answer_turn(
        &self,
        opener: &Opener,
        tenant: Tenant,
        body: Bytes,
        turn: TurnContext,
        id: RequestId,
        mut line: Option<&mut AccessLine>,
    ) -> Result<Response<http::Body>, ApiError> {
        let started = observe::now();
        // The key may have been revoked, or a token have run out, since the connection was opened.
        let admitted = self.tenants.admit(&opener.headers).await?;
        let admitted: &Admitted = &admitted;
        if admitted.tenant != tenant {
            return Err(ApiError::other_tenant());
        }
        if let Some(line) = &mut line {
            line.tenant = Some(admitted.name.clone());
        }
        let (client, headers) = if self.tenants.require_keys() {
            // The key is the router's; engines have their own.
            let mut headers = opener.headers.clone();
            headers.remove(AUTHORIZATION);
            (ClientKey::of_tenant(admitted.tenant), Some(headers))
        } else {
            (ClientKey::of_address(opener.address), None)
        };
        let bytes = body.len() as u64;
        let context = RequestContext {
            summary: line.map(|line| line.summary.clone()),
            ..RequestContext::new(id, client, admitted.tenant, started)
        };
        let claim = self.claim(&context, &opener.headers);
        let mut reserved = self.bodies.start(claim, bytes).await?;
        reserved.grow(bytes).await?;
        turn.counted.set();
        debug!(%id, tenant = %admitted.tenant, bytes, "turn");
        let call = ClientRequest {
            headers: headers.as_ref().unwrap_or(&opener.headers),
            query: "",
            body,
            context,
            admitted,
            standing: None,
            turn: Some(&turn),
        };
        let create = &Endpoint::Create;
        self.responses.answer(create, &call, &mut reserved).await
    }
}
