//! `POST /v1/messages/count_tokens`: counted with the model's tokenizer if the router has it, else by a worker.

use hyper::{Request, Response, StatusCode};
use tracing::debug;

use super::forward::{job, with_shaped_error};
use super::{ApiServer, Caller, body};
use crate::http::server::RequestBody;
use crate::openai::error::ApiError;
use crate::prompt::{self, Api};
use crate::{http, relay};

impl ApiServer {
    pub(super) async fn count_tokens(
        &self,
        request: Box<Request<RequestBody>>,
        caller: Box<Caller<'_>>,
    ) -> Result<Response<http::Body>, ApiError> {
        let (head, body) = (*request).into_parts();
        let (body, _reserved) = {
            let claim = self.claim(&caller.context, &head.headers);
            body::read(body, &self.settings, &self.bodies, claim).await?
        };
        prompt::check_nesting(&body)?;
        debug!(id = %caller.context.id, tenant = %caller.context.tenant, bytes = body.len(), "request");
        let original = body.clone();
        let body = prompt::without_billing_header(&body).unwrap_or(body);
        let api = Api::CountTokens;
        let peek = Box::new(prompt::peek(api, &body, self.relay.block_bytes())?);
        let model = peek.model.as_deref();
        let tenant = caller.context.tenant;
        let counted = self
            .relay
            .count_tokens(tenant, Api::Messages, &head.headers, &body, model, None)
            .await?;
        if let Some(tokens) = counted {
            return Ok(http::json(format!(r#"{{"input_tokens":{tokens}}}"#)));
        }
        let name = model.unwrap_or_default().to_owned();
        let job = job(api, &head, body.clone(), &original, caller);
        match self.relay.run(&job, peek).await {
            Err(relay::Error::NotServed { .. }) => {
                let mut error = ApiError::cannot_count(&name);
                error.is_counted = true;
                Err(error)
            }
            answer => {
                let answer = answer.map_err(ApiError::of_run)?;
                let is_unknown = matches!(
                    answer.status(),
                    StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
                );
                if is_unknown {
                    Err(ApiError::cannot_count(&name))
                } else {
                    Ok(with_shaped_error(answer).await)
                }
            }
        }
    }
}
