//! `/v1/models`: the models of all workers. Each entry is copied byte for byte from a worker's own list.

use hyper::Response;
use hyper::header::{self, HeaderValue};

use crate::fleet::Snapshot;
use crate::http;
use crate::openai::error::ApiError;

pub(super) fn list(fleet: &Snapshot) -> Response<http::Body> {
    let cards: Vec<&str> = fleet
        .models
        .values()
        .map(|group| group.card.get())
        .collect();
    json(format!(
        "{{\"object\":\"list\",\"data\":[{}]}}",
        cards.join(",")
    ))
}

pub(super) fn one(fleet: &Snapshot, name: &str) -> Result<Response<http::Body>, ApiError> {
    // SDKs escape the slash of `org/name`.
    let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
    let group = fleet
        .models
        .get(name.as_ref())
        .ok_or_else(|| ApiError::unknown_model(&name))?;
    Ok(json(group.card.get().to_owned()))
}

fn json(text: String) -> Response<http::Body> {
    let mut response = Response::new(http::full(text));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}
