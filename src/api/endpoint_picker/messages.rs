//! What Envoy sends as the parts of HTTP messages, and the answers to it. Pure.

use bytes::Bytes;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::http::{response, uri};
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use prost::{DecodeError, Message};

use super::wire::processing_response::Response as Answer;
use super::wire::value::Kind;
use super::wire::{self, HeaderAppendAction, ProcessingResponse};
use crate::http::HOP_BY_HOP;

/// The address of the chosen worker: a request header, and a key of the metadata.
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The address of the worker of the prefill leg, for a sidecar beside the decode worker.
const PREFILLER: &str = "x-prefiller-host-port";
/// Headers by which clients could have such a sidecar connect to where they like.
const SIDECAR: [&str; 4] = [
    PREFILLER,
    "x-prefiller-url",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
];
/// The addresses among which conformance tests of gateways want the choice to be.
const TEST_SELECTION: &str = "test-epp-endpoint-selection";
/// The address that served a request, for those tests.
const TEST_SERVED: &str = "x-conformance-test-served-endpoint";

/// What an echoing engine of those tests is to set in its answer.
const TEST_ECHO: &str = "x-echo-set-header";

/// Headers with these prefixes pass between client, gateway and picker. Workers get none of them.
const CONTROL_PREFIXES: [&str; 2] = ["x-gateway-", "x-llm-d-"];
/// Targets under their old names.
const TARGETS: [&str; 2] = ["x-slo-ttft-ms", "x-slo-tpot-ms"];

/// A gateway keeps a message of this size and its frame within HTTP/2's initial window.
const PIECE_BYTES: usize = 62_000;

/// Why the head of a request cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadHead(pub(super) &'static str);

pub(super) fn request_head(headers: wire::HttpHeaders) -> Result<Request<()>, BadHead> {
    let mut request = Request::new(());
    *request.version_mut() = Version::HTTP_2;
    let mut uri = uri::Parts::default();
    for field in headers.headers.unwrap_or_default().headers {
        let value = value_of(&field);
        match &*field.key {
            b":method" => {
                *request.method_mut() =
                    Method::from_bytes(value).map_err(|_| BadHead(":method"))?;
            }
            b":path" => {
                let path = uri::PathAndQuery::from_maybe_shared(value.clone());
                uri.path_and_query = Some(path.map_err(|_| BadHead(":path"))?);
            }
            name if name.starts_with(b":") => {}
            name => {
                let name = HeaderName::from_bytes(name);
                let value = HeaderValue::from_maybe_shared(value.clone());
                let (Ok(name), Ok(value)) = (name, value) else {
                    return Err(BadHead("a header"));
                };
                request.headers_mut().append(name, value);
            }
        }
    }
    *request.uri_mut() = Uri::from_parts(uri).map_err(|_| BadHead(":path"))?;
    Ok(request)
}

/// The head of the answer that a gateway receives from a worker.
pub(super) fn response_head(headers: wire::HttpHeaders) -> Result<response::Parts, BadHead> {
    let (mut head, ()) = Response::new(()).into_parts();
    for field in headers.headers.unwrap_or_default().headers {
        let value = value_of(&field);
        if &*field.key == b":status" {
            head.status = StatusCode::from_bytes(value).map_err(|_| BadHead(":status"))?;
            continue;
        }
        let name = HeaderName::from_bytes(&field.key);
        let value = HeaderValue::from_maybe_shared(value.clone());
        // Another pseudo header, or one that could not be sent on.
        if let (Ok(name), Ok(value)) = (name, value) {
            head.headers.append(name, value);
        }
    }
    Ok(head)
}

/// Newer gateways send values as bytes, older ones as text.
fn value_of(field: &wire::HeaderValue) -> &Bytes {
    if field.raw_value.is_empty() {
        &field.value
    } else {
        &field.raw_value
    }
}

/// The workers among which the choice must be: `ip:port` or bare `ip`. `None`: any. The header of conformance tests wins.
pub(super) fn subset(
    metadata: &Bytes,
    headers: &HeaderMap,
    has_hooks: bool,
) -> Option<Vec<String>> {
    if has_hooks && let Some(selection) = headers.get(TEST_SELECTION) {
        return Some(split(selection.to_str().unwrap_or_default()));
    }
    let hint = metadata_value(metadata, "envoy.lb.subset_hint", SUBSET).transpose()?;
    Some(match hint.ok().and_then(|hint| hint.kind) {
        Some(Kind::StringValue(text)) => split(&text),
        Some(Kind::ListValue(list)) => {
            let texts = list.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            });
            texts.flat_map(split).collect()
        }
        // A hint that cannot be read is not "any".
        _ => Vec::new(),
    })
}

/// What a filter of the gateway has set under a key of its namespace. Of equal names the last one counts, as in a map.
fn metadata_value(
    metadata: &Bytes,
    namespace: &str,
    key: &str,
) -> Result<Option<wire::Value>, DecodeError> {
    let mut metadata = wire::Metadata::decode(metadata.clone())?;
    metadata
        .filter_metadata
        .retain(|entry| entry.name == namespace);
    let Some(namespace) = metadata.filter_metadata.pop() else {
        return Ok(None);
    };
    let mut fields = wire::Struct::decode(namespace.fields)?.fields;
    fields.retain(|field| field.key == key);
    let field = fields.pop();
    Ok(field.map(|field| field.value.unwrap_or_default()))
}

fn split(list: &str) -> Vec<String> {
    let names = list.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The address of the worker that answered.
pub(super) fn served(metadata: &Bytes) -> Option<String> {
    match metadata_value(metadata, "envoy.lb", SERVED).ok()??.kind? {
        Kind::StringValue(address) => Some(address),
        _ => None,
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    /// `ip:port`, in the order in which they are to be tried.
    pub(super) workers: String,
    pub(super) prefill: Option<String>,
    /// Conformance tests of gateways are to see the choice.
    pub(super) has_hooks: bool,
}

/// Whether a header controls a picker or a sidecar, and not an engine.
fn is_control(name: &[u8]) -> bool {
    let is = |known: &str| known.as_bytes() == name;
    let begins = |prefix: &str| name.starts_with(prefix.as_bytes());
    CONTROL_PREFIXES.into_iter().any(begins) || SIDECAR.into_iter().chain(TARGETS).any(is)
}

/// The answer to the head of a request: the choice, and the headers that the worker is to get instead of the `client`'s.
pub(super) fn chosen(
    client: &HeaderMap,
    to_worker: &HeaderMap,
    destination: &Destination,
) -> ProcessingResponse {
    let mut mutation = difference(client, to_worker);
    mutation.set_headers.retain(|option| {
        !option
            .header
            .as_ref()
            .is_some_and(|header| is_control(&header.key))
    });
    let controls = client.keys().map(HeaderName::as_str);
    let removed = controls.filter(|name| is_control(name.as_bytes()));
    mutation.remove_headers.extend(removed.map(str::to_owned));
    let prefill = destination.prefill.as_deref();
    let first = destination.workers.split(',').next().unwrap_or_default();
    let echo = destination
        .has_hooks
        .then(|| format!("{TEST_SERVED}:{first}"));
    let sets = [
        (DESTINATION, Some(destination.workers.as_str())),
        (PREFILLER, prefill),
        (TEST_ECHO, echo.as_deref()),
    ];
    for (name, value) in sets {
        let Some(value) = value else { continue };
        // The order of setting and removing is not defined.
        mutation.remove_headers.retain(|removed| removed != name);
        let name = Bytes::from_static(name.as_bytes());
        mutation.set_headers.push(overwrite(name, value.as_bytes()));
    }
    mutation.remove_headers.sort_unstable();
    mutation.remove_headers.dedup();
    let destination = wire::Value {
        kind: Some(Kind::StringValue(destination.workers.clone())),
    };
    let lb = structure(DESTINATION, destination);
    let lb = wire::Value {
        kind: Some(Kind::StructValue(lb)),
    };
    ProcessingResponse {
        response: Some(Answer::RequestHeaders(wire::HeadersResponse {
            response: Some(wire::CommonResponse {
                header_mutation: Some(mutation),
                // The gateway's own route depended on headers that have changed.
                clear_route_cache: true,
                ..wire::CommonResponse::default()
            }),
        })),
        dynamic_metadata: Some(structure("envoy.lb", lb)),
    }
}

fn structure(key: &'static str, value: wire::Value) -> wire::Struct {
    wire::Struct {
        fields: vec![wire::Field {
            key: Bytes::from_static(key.as_bytes()),
            value: Some(value),
        }],
    }
}

/// The body of a request or of a response, in pieces that a gateway takes. With `ends` the last one is marked as such; an
/// empty body is one empty piece.
pub(super) fn pieces(
    body: &Bytes,
    ends: bool,
    part: fn(wire::BodyResponse) -> Answer,
) -> impl Iterator<Item = ProcessingResponse> {
    let count = body.len().div_ceil(PIECE_BYTES).max(1);
    let body = body.clone();
    (0..count).map(move |index| {
        let start = index * PIECE_BYTES;
        let piece = body.slice(start..body.len().min(start + PIECE_BYTES));
        let streamed = wire::StreamedBodyResponse {
            body: piece,
            end_of_stream: ends && index + 1 == count,
        };
        answer(part(wire::BodyResponse {
            response: Some(wire::CommonResponse {
                body_mutation: Some(wire::BodyMutation {
                    streamed_response: Some(streamed),
                }),
                ..wire::CommonResponse::default()
            }),
        }))
    })
}

pub(super) fn trailers(part: fn(wire::TrailersResponse) -> Answer) -> ProcessingResponse {
    answer(part(wire::TrailersResponse::default()))
}

/// The answer to the head of a response: the headers that the client is to get instead of the worker's.
pub(super) fn response_headers(
    from_worker: &HeaderMap,
    to_client: &HeaderMap,
    served: Option<&str>,
) -> ProcessingResponse {
    let mut mutation = difference(from_worker, to_client);
    if let Some(served) = served {
        let option = overwrite(
            Bytes::from_static(TEST_SERVED.as_bytes()),
            served.as_bytes(),
        );
        mutation.set_headers.push(option);
    }
    answer(Answer::ResponseHeaders(wire::HeadersResponse {
        response: Some(wire::CommonResponse {
            header_mutation: Some(mutation),
            ..wire::CommonResponse::default()
        }),
    }))
}

/// A response of the router's own, instead of a worker's.
pub(super) fn immediate(head: &response::Parts, body: Bytes) -> ProcessingResponse {
    let headers = head.headers.iter();
    let headers = headers.filter(|(name, _)| **name != header::CONTENT_LENGTH);
    let set = headers.map(|(name, value)| overwrite(bytes_of(name), value.as_bytes()));
    answer(Answer::ImmediateResponse(wire::ImmediateResponse {
        status: Some(wire::HttpStatus {
            code: i32::from(head.status.as_u16()),
        }),
        headers: Some(wire::HeaderMutation {
            set_headers: set.collect(),
            remove_headers: Vec::new(),
        }),
        body,
        details: "warmroute".to_owned(),
    }))
}

fn answer(response: Answer) -> ProcessingResponse {
    ProcessingResponse {
        response: Some(response),
        dynamic_metadata: None,
    }
}

/// What makes `after` of `before`. Names that a picker may not touch stay as they are.
fn difference(before: &HeaderMap, after: &HeaderMap) -> wire::HeaderMutation {
    let mut mutation = wire::HeaderMutation::default();
    for name in after.keys().filter(|name| may_change(name)) {
        let values = after.get_all(name);
        if values.iter().eq(before.get_all(name).iter()) {
            continue;
        }
        for (index, value) in values.iter().enumerate() {
            let mut option = overwrite(bytes_of(name), value.as_bytes());
            if index > 0 {
                option.set_append_action(HeaderAppendAction::AppendIfExistsOrAdd);
            }
            mutation.set_headers.push(option);
        }
    }
    let removed = before
        .keys()
        .filter(|name| may_change(name) && !after.contains_key(*name));
    mutation.remove_headers = removed.map(|name| name.as_str().to_owned()).collect();
    mutation
}

/// Framing and routing are the gateway's.
fn may_change(name: &HeaderName) -> bool {
    !(HOP_BY_HOP.contains(name)
        || matches!(
            *name,
            header::HOST | header::CONTENT_LENGTH | header::EXPECT
        )
        || name.as_str().starts_with("x-envoy"))
}

fn bytes_of(name: &HeaderName) -> Bytes {
    Bytes::copy_from_slice(name.as_str().as_bytes())
}

fn overwrite(name: Bytes, value: &[u8]) -> wire::HeaderValueOption {
    wire::HeaderValueOption {
        header: Some(wire::HeaderValue {
            key: name,
            value: Bytes::new(),
            raw_value: Bytes::copy_from_slice(value),
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

#[cfg(test)]
mod tests;
