//! `/v1/files`, `/v1/batches` and `/v1/messages/batches`: bodies and tenants, for the part that answers.

use hyper::{Request, Response};
use tracing::debug;

use super::{ApiServer, Caller, body};
use crate::batches::{BatchCaller, BatchEndpoint, FileUpload};
use crate::http;
use crate::http::server::RequestBody;
use crate::openai::error::ApiError;
use crate::prompt;

impl ApiServer {
    pub(super) async fn answer_batches(
        &self,
        endpoint: &BatchEndpoint,
        request: Box<Request<RequestBody>>,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let Some(batches) = &self.batches else {
            return Err(ApiError::no_batches());
        };
        let (context, admitted) = (&caller.context, caller.admitted);
        debug!(id = %context.id, client_id = ?caller.client_id, tenant = %context.tenant, ?endpoint, "request");
        let of_tenant = BatchCaller {
            tenant: admitted.tenant,
            name: &admitted.own_name,
        };
        let (head, body) = (*request).into_parts();
        if endpoint.is_upload() {
            // Streamed: it may be larger than all memory for bodies.
            let upload = FileUpload {
                headers: &head.headers,
                body,
                timeout: self.settings.body_timeout,
            };
            return batches.upload(endpoint, of_tenant, upload).await;
        }
        let (body, _reserved) = {
            let claim = self.claim(context, &head.headers);
            body::read(body, &self.settings, &self.bodies, claim).await?
        };
        prompt::check_nesting(&body)?;
        let query = head.uri.query().unwrap_or_default();
        batches.answer(endpoint, of_tenant, query, &body).await
    }
}
