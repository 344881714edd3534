//! `POST /explain`: the decision for a request, without sending it.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::{Request, Response, StatusCode};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::answers::{answer, parameter, refuse};
use super::dashboard::Sources;
use super::tenants;
use crate::http;
use crate::http::server::RequestBody;
use crate::ids::Tenant;
use crate::prompt::{self, Api};

/// How long the whole body may take: operators' own tools send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

async fn read(
    body: RequestBody,
    bytes_max: usize,
    limit: Duration,
) -> Result<Bytes, (StatusCode, &'static str)> {
    let body = Limited::new(body, bytes_max).collect();
    match tokio::time::timeout(limit, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(_)) => Err((
            StatusCode::PAYLOAD_TOO_LARGE,
            "the request body is too large or incomplete",
        )),
        Err(_) => Err((
            StatusCode::REQUEST_TIMEOUT,
            "the request body did not come in time",
        )),
    }
}

pub(super) async fn page(
    sources: &Sources,
    body_bytes_max: usize,
    request: Request<RequestBody>,
    query: &str,
) -> Response<http::Body> {
    let path = parameter(query, "path");
    let shows_tokens = match parameter(query, "tokens").as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return refuse(StatusCode::BAD_REQUEST, "tokens is true or false"),
    };
    let (head, body) = request.into_parts();
    let body = match read(body, body_bytes_max, BODY_TIMEOUT).await {
        Ok(body) => body,
        Err((status, message)) => return refuse(status, message),
    };
    let api = match path.as_deref() {
        None => api_of(&body),
        Some("/v1/chat/completions") => Api::Chat,
        Some("/v1/completions") => Api::Completions,
        Some("/v1/responses") => Api::Responses,
        Some("/v1/messages") => Api::Messages,
        Some("/inference/v1/generate") => Api::Generate,
        Some(_) => {
            return refuse(
                StatusCode::BAD_REQUEST,
                "path must be /v1/chat/completions, /v1/completions, /v1/responses or /v1/messages",
            );
        }
    };
    // Engines get stored responses as one whole input, and some tenants' requests with a cache salt.
    let tenant = parameter(query, "tenant");
    let prepared = sources.others.engine_body(api, tenant.clone(), body);
    let (api, body) = match prepared.await {
        Ok(prepared) => prepared,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error),
    };
    let relay = sources.relay.load_full();
    match prompt::peek(api, &body, relay.block_bytes()) {
        Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        Ok(peek) => {
            let owner = tenant.as_deref().map_or_else(Tenant::default, Tenant::of);
            let explained = relay.explain(api, &head.headers, peek, &body, shows_tokens, owner);
            match explained.await {
                Err(error) => refuse(StatusCode::NOT_FOUND, &error.to_string()),
                Ok(explanation) => {
                    let tenant = tenant.as_deref();
                    let page = tenants::explained(explanation, relay.tenants(), tenant);
                    answer(StatusCode::OK, &page)
                }
            }
        }
    }
}

/// The API of a body without a path, by the member that has the prompt.
fn api_of(body: &[u8]) -> Api {
    #[derive(Deserialize)]
    struct PromptMembers {
        messages: Option<IgnoredAny>,
        input: Option<IgnoredAny>,
        prompt: Option<IgnoredAny>,
    }
    let Ok(members) = serde_json::from_slice::<PromptMembers>(body) else {
        // What is wrong with it is said where it is read.
        return Api::Chat;
    };
    match (members.messages, members.input, members.prompt) {
        (None, Some(_), _) => Api::Responses,
        (None, None, Some(_)) => Api::Completions,
        _ => Api::Chat,
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn a_body_without_a_path_is_of_the_api_whose_prompt_it_has() {
        for (body, api) in [
            (r#"{"model": "m", "messages": []}"#, Api::Chat),
            (r#"{"model": "m", "input": "hi"}"#, Api::Responses),
            (
                r#"{"input": [{"role": "user"}], "messages": null}"#,
                Api::Responses,
            ),
            (r#"{"messages": [], "input": "hi"}"#, Api::Chat),
            (r#"{"prompt": [1, 2]}"#, Api::Completions),
            (r#"{"model": "m"}"#, Api::Chat),
            ("{", Api::Chat),
        ] {
            assert_eq!(api_of(body.as_bytes()), api, "{body}");
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let status = async |text: &'static [u8], ends: bool| {
            let (sender, body) = mpsc::channel(1);
            sender.send(Bytes::from_static(text)).await.unwrap();
            let _open = (!ends).then_some(sender);
            let read = read(body.into(), 2, Duration::from_millis(20)).await;
            read.map_err(|(status, _)| status.as_u16())
        };
        assert_eq!(status(b"{}", true).await.unwrap(), "{}");
        assert_eq!(status(b"{ }", true).await, Err(413));
        assert_eq!(status(b"{", false).await, Err(408));
    }
}
