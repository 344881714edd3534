//! How many tokens an input has: by the model's tokenizer where it is at hand, else the engine's own count.

use bytes::Bytes;
use hyper::{Response, StatusCode};

use super::create::collect;
use super::history::Access;
use super::item::Ids;
use super::members::{self, Members};
use super::request::{self, CreateRequest};
use super::stored::json;
use super::{ClientRequest, Responses, engine_body};
use crate::openai::error::ApiError;
use crate::prompt::Api;
use crate::{http, observe};

/// No content of images comes back with the ids.
const NO_MEDIA: &str = r#""mm_payload":"none""#;

impl Responses {
    pub(super) async fn count(
        &self,
        call: &ClientRequest<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let create = CreateRequest::read_count(&call.body)?;
        let now_s = observe::unix_s().unsigned_abs();
        let state_reader = self.state_reader(call, &create, now_s);
        let past = self
            .past(&create.parent, &state_reader, Access::ReadOnly)
            .await?;
        let ids = Ids::random(request::random()?);
        let expanded = self.expand(&create, past, &ids, &state_reader).await?;
        let body = engine_body::body(&create, &expanded.input, "", Some(NO_MEDIA));
        let model = Some(&*create.model).filter(|model| !model.is_empty());
        let own = self
            .relay
            .count_tokens(Api::Responses, call.headers, &body, model);
        let tokens = match own.await? {
            Some(tokens) => tokens,
            None => self.ask_for_count(call, body).await?,
        };
        let text = format!(r#"{{"object":"response.input_tokens","input_tokens":{tokens}}}"#);
        Ok(json(text))
    }

    async fn ask_for_count(
        &self,
        call: &ClientRequest<'_>,
        body: Bytes,
    ) -> Result<usize, ApiError> {
        let path = "/v1/responses/render";
        // Nothing of it is computed, so nothing of it is held afterwards.
        let answer = self.ask(&call.context(), Api::Tokenize, path, body).await;
        let answer = answer.map_err(|error| match error.status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED if error.code.is_empty() => {
                ApiError::cannot_count()
            }
            _ => error,
        })?;
        let max = usize::try_from(self.settings.answer_bytes_max).unwrap_or(usize::MAX);
        let rendered = collect(answer.into_body(), max).await?;
        std::str::from_utf8(&rendered)
            .ok()
            .and_then(|text| Members::parse(text).ok())
            .and_then(|it| members::list(it.get("token_ids")?).map(|ids| ids.len()))
            .ok_or_else(|| ApiError::engine_broken("the engine's answer has no token ids"))
    }
}
