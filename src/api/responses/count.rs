//! How many tokens an input has: the engine's own count, for nobody else's is right.

use hyper::Response;
use hyper::StatusCode;

use super::super::error::ApiError;
use super::Call;
use super::Responses;
use super::create::collect;
use super::engine;
use super::item::Ids;
use super::members;
use super::members::Members;
use super::past::Access;
use super::request;
use super::request::Create;
use super::stored::json;
use crate::http;
use crate::observe;
use crate::prompt::Api;

/// No content of images comes back with the ids.
const NO_MEDIA: &str = r#""mm_payload":"none""#;

impl Responses {
    pub(super) async fn count(&self, call: &Call<'_>) -> Result<Response<http::Body>, ApiError> {
        let create = Create::read_count(&call.body)?;
        let now_s = observe::unix_s().unsigned_abs();
        let opener = self.opener(call, &create, now_s);
        let past = self.past(&create.before, &opener, Access::ReadOnly).await?;
        let ids = Ids::random(request::random()?);
        let expanded = self.expand(&create, past, &ids, &opener).await?;
        let body = engine::body(&create, &expanded.input, "", Some(NO_MEDIA));
        let path = "/v1/responses/render";
        // Nothing of it is computed, so nothing of it is held afterwards.
        let answer = self.ask(call, Api::Tokenize, path, body).await;
        let answer = answer.map_err(|error| match error.status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED if error.code.is_empty() => {
                ApiError::cannot_count()
            }
            _ => error,
        })?;
        let max = usize::try_from(self.settings.answer_bytes_max).unwrap_or(usize::MAX);
        let rendered = collect(answer.into_body(), max).await?;
        let tokens = std::str::from_utf8(&rendered)
            .ok()
            .and_then(|text| Members::parse(text).ok())
            .and_then(|it| members::list(it.get("token_ids")?).map(|ids| ids.len()));
        let tokens = tokens
            .ok_or_else(|| ApiError::engine_broken("the engine's answer has no token ids"))?;
        let text = format!(r#"{{"object":"response.input_tokens","input_tokens":{tokens}}}"#);
        Ok(json(text))
    }
}
