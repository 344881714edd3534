//! `POST /v1/responses/input_tokens`: counted with the model's tokenizer if the router has it, else by an engine.

use bytes::Bytes;
use hyper::StatusCode;

use super::client_request::ClientRequest;
use super::engine_body;
use super::engine_call::collect;
use super::history::Access;
use super::item::Ids;
use super::members::{self, Members};
use super::request::CreateRequest;
use super::service::Responses;
use crate::openai::body_budget::Reservation;
use crate::openai::error::{Answer, ApiError, ENGINE_KEY_REFUSED};
use crate::prompt::Api;
use crate::relay::{ChatForm, ToolLoss};
use crate::{http, openai};

/// Asks the engine to answer without image data.
const NO_MEDIA: &str = r#""mm_payload":"none""#;

impl Responses {
    pub(super) async fn count(
        &self,
        request: &ClientRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let create = CreateRequest::read_without_required(&request.body)?;
        let ids = Ids::random(openai::random()?);
        let tenant = request.admitted.tenant;
        let expanded = self
            .read_input(&create, tenant, Access::ReadOnly, &ids, reserved)
            .await?;
        let tokens = self
            .prompt_tokens(request, &create, &expanded.input)
            .await?;
        let text = format!(r#"{{"object":"response.input_tokens","input_tokens":{tokens}}}"#);
        Ok(http::json(text))
    }

    /// The tokens of the prompt with a list of items as engines get them.
    pub(super) async fn prompt_tokens(
        &self,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        input: &[u8],
    ) -> Result<usize, ApiError> {
        let body = engine_body::body(create, input, "", Some(NO_MEDIA), create.stream);
        let model = Some(&*create.model).filter(|model| !model.is_empty());
        let counted = self
            .relay
            .count_tokens(
                request.admitted.tenant,
                Api::Responses,
                request.headers,
                &body,
                model,
                Some(self),
            )
            .await?;
        match counted {
            Some(tokens) => Ok(tokens),
            None => self.ask_engine(request, create, body).await,
        }
    }

    async fn ask_engine(
        &self,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        body: Bytes,
    ) -> Result<usize, ApiError> {
        let sends_chat = self
            .relay
            .sends_chat(Some(self.relay.names().canonical(&create.model)));
        let chat = sends_chat.then(|| self.chat_body(&body, ToolLoss::AsConfigured).ok());
        let (path, body) = match chat.flatten() {
            Some(chat) => ("/v1/chat/completions/render", chat),
            None => ("/v1/responses/render", body),
        };
        let answer = self
            .ask(&request.engine_call(), Api::Tokenize, path, body)
            .await;
        let answer = answer.map_err(|error| match error.status {
            // The engine has no such endpoint, or was started without it.
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED
                if error.is_from_engine && error.code.is_empty() =>
            {
                ApiError::cannot_count(&create.model)
            }
            // All engines said 401, as some do of an endpoint that they do not have.
            _ if error.code == ENGINE_KEY_REFUSED => ApiError::cannot_count(&create.model),
            _ => error,
        })?;
        let rendered = collect(answer.into_body(), self.event_options().bytes_max, None).await?;
        Members::of_bytes(&rendered)
            .and_then(|answer| members::list(answer.get("token_ids")?).map(|ids| ids.len()))
            .ok_or_else(|| {
                ApiError::invalid_engine_response("the engine's answer contains no token ids")
            })
    }
}
