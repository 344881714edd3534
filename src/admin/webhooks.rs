//! `GET /webhooks`: the endpoints of webhooks, and how they do; `POST /webhooks/enable`.

use std::net::IpAddr;

use hyper::{Response, StatusCode};
use serde_json::json;
use tracing::info;

use super::answers::{answer, parameter, refuse};
use crate::http;
use crate::webhooks::Webhooks;

pub(super) fn page(webhooks: &Webhooks) -> Response<http::Body> {
    answer(StatusCode::OK, &json!({"endpoints": webhooks.report()}))
}

pub(super) async fn enable(
    webhooks: &Webhooks,
    query: &str,
    client: IpAddr,
) -> Response<http::Body> {
    let Some(endpoint) = parameter(query, "endpoint") else {
        let message = "name an endpoint: /webhooks/enable?endpoint=NAME";
        return refuse(StatusCode::BAD_REQUEST, message);
    };
    match webhooks.enable(&endpoint).await {
        None => refuse(
            StatusCode::NOT_FOUND,
            &format!("no webhook endpoint `{endpoint}`; GET /webhooks lists them"),
        ),
        Some(Ok(was_disabled)) => {
            info!(%client, endpoint, was_disabled, "an operator enabled a webhook endpoint");
            answer(
                StatusCode::OK,
                &json!({"endpoint": endpoint, "was_disabled": was_disabled}),
            )
        }
        Some(Err(error)) => refuse(StatusCode::SERVICE_UNAVAILABLE, &error),
    }
}
