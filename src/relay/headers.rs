//! Which headers pass, and which are the router's own. Pure.

use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::{self, HeaderName, HeaderValue};
use smallvec::SmallVec;

use crate::fleet::Worker;
use crate::http::HOP_BY_HOP;
use crate::ids::RequestId;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// End-to-end headers that clients may not set for an engine: its request id, its rank, its queue.
const OWNED: [HeaderName; 7] = [
    REQUEST_ID,
    super::job::DECISION,
    RANK,
    super::job::PRIORITY,
    super::job::TTFT_TARGET,
    HeaderName::from_static("x-vllm-priority"),
    HeaderName::from_static("x-session-id"),
];

/// Beginnings of such names: SGLang's headers that replace fields of a body (`SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`), and those
/// that gateways and llm-d's parts send to each other. Its sidecars obey them as a router's.
const OWNED_BEGINNINGS: [&str; 6] = [
    "x-override-",
    "x-prefiller-",
    "x-data-parallel-",
    "x-encoder-hosts-",
    "x-llm-d-",
    "x-gateway-",
];

fn is_owned(name: &HeaderName) -> bool {
    let text = name.as_str();
    OWNED.contains(name)
        || text.starts_with("x-")
            && OWNED_BEGINNINGS
                .iter()
                .any(|beginning| text.starts_with(beginning))
}

/// The headers of a request to an engine. Length and framing are the connection's business.
pub fn to_engine(client: &HeaderMap, worker: &Worker, id: RequestId) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(client.len() + 2);
    let named = named_by_connection(client);
    for (name, value) in client {
        let stays = HOP_BY_HOP.contains(name)
            || is_owned(name)
            // Usage is read from answers, and legs are read here: they must not be compressed.
            || matches!(
                *name,
                header::HOST | header::CONTENT_LENGTH | header::EXPECT | header::ACCEPT_ENCODING
            )
            || (*name == header::AUTHORIZATION && worker.authorization.is_some())
            || named
                .iter()
                .any(|named| name.as_str().eq_ignore_ascii_case(named));
        if !stays {
            headers.append(name, value.clone());
        }
    }
    if let Some(host) = worker.pool.host() {
        headers.insert(header::HOST, host.clone());
    }
    if let Some(authorization) = &worker.authorization {
        headers.insert(header::AUTHORIZATION, authorization.clone());
    }
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        headers.insert(REQUEST_ID, id);
    }
    headers
}

/// Names the dp rank that must process the request.
pub fn pin(headers: &mut HeaderMap, rank: u32) {
    headers.insert(RANK, HeaderValue::from(rank));
}

pub(super) fn to_client(mut engine: HeaderMap) -> HeaderMap {
    let named: Vec<String> = named_by_connection(&engine)
        .into_iter()
        .map(str::to_owned)
        .collect();
    for name in named {
        engine.remove(name);
    }
    // A length beside chunks is not to be believed (RFC 9112, section 6.3); and an event stream may
    // get an end that the engine did not send.
    if engine.contains_key(header::TRANSFER_ENCODING) || is_event_stream(&engine) {
        engine.remove(header::CONTENT_LENGTH);
    }
    // The client's own request id comes back to it instead. An answer has few headers: its names are looked at, rather than
    // each of these looked up.
    let is_dropped = |name: &&HeaderName| {
        HOP_BY_HOP.contains(name)
            || **name == REQUEST_ID
            // Which pages may read an answer is the router's setting; engines allow all of them by default.
            || name.as_str().starts_with("access-control-")
    };
    let dropped: SmallVec<[HeaderName; 4]> = engine.keys().filter(is_dropped).cloned().collect();
    for name in dropped {
        engine.remove(name);
    }
    engine
}

/// Whether an answer is a stream of server-sent events that can be read: a compressed one cannot.
pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    let is_events = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
    is_events
        && headers
            .get(header::CONTENT_ENCODING)
            .is_none_or(|value| value == "identity")
}

/// How long an engine asks to be left alone, in seconds (a date is not worth reading: engines send none).
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?))
}

/// Headers that a `connection` header declares to be hop-by-hop.
fn named_by_connection(headers: &HeaderMap) -> Vec<&str> {
    let values = headers.get_all(header::CONNECTION).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|name| {
            !name.is_empty()
                && !name.eq_ignore_ascii_case("keep-alive")
                && !name.eq_ignore_ascii_case("close")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    fn sent(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        to_engine(&map(lines), &worker("a"), RequestId::new(0))
    }

    #[test]
    fn end_to_end_headers_pass() {
        let sent = sent(&[
            ("traceparent", "00-1"),
            ("x-custom", "1"),
            ("authorization", "Bearer k"),
            ("accept", "*/*"),
        ]);
        assert_eq!(sent["traceparent"], "00-1");
        assert_eq!(sent["x-custom"], "1");
        assert_eq!(sent["authorization"], "Bearer k");
        assert_eq!(sent["accept"], "*/*");
    }

    #[test]
    fn the_router_owns_ids_ranks_and_framing() {
        let sent = sent(&[
            ("host", "router"),
            ("connection", "keep-alive, x-hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("content-length", "5"),
            ("x-request-id", "mine"),
            ("x-data-parallel-rank", "3"),
            ("x-vllm-priority", "-1"),
            ("x-session-id", "s"),
            ("x-override-bootstrap-host", "2.2.2.2"),
            ("x-prefiller-host-port", "2.2.2.2:80"),
            ("x-data-parallel-host-port", "2.2.2.2:80"),
            ("x-encoder-hosts-ports", "2.2.2.2:80"),
            ("x-llm-d-slo-ttft-ms", "5"),
            ("x-gateway-destination-endpoint", "2.2.2.2:80"),
        ]);
        assert_eq!(sent["x-request-id"], "wr-000000000000000000000000");
        assert_eq!(sent["host"], "a.test:8000");
        assert_eq!(sent.len(), 2);
    }

    #[test]
    fn a_request_goes_to_its_rank_and_comes_back_as_it_can_be_read() {
        let mut headers = sent(&[("accept-encoding", "gzip"), ("x-custom", "1")]);
        pin(&mut headers, 3);
        assert_eq!(headers["x-data-parallel-rank"], "3");
        assert_eq!(headers["x-custom"], "1");
        assert!(!headers.contains_key("accept-encoding"));
    }

    #[test]
    fn an_answers_own_headers_pass_and_its_connections_do_not() {
        let client = to_client(map(&[
            ("content-type", "application/json"),
            ("content-length", "3"),
            ("connection", "close"),
            ("x-request-id", "engine's"),
            ("access-control-allow-origin", "*"),
            ("access-control-allow-credentials", "true"),
            ("vary", "Origin"),
        ]));
        assert_eq!(client.len(), 3);
        assert_eq!(client["content-length"], "3");
    }

    #[test]
    fn a_length_that_may_not_hold_is_dropped() {
        for other in [
            ("transfer-encoding", "chunked"),
            ("content-type", "text/event-stream; charset=utf-8"),
        ] {
            assert!(
                !to_client(map(&[("content-length", "3"), other])).contains_key("content-length")
            );
        }
    }

    #[test]
    fn a_compressed_stream_is_passed_without_reading_it() {
        let events = ("content-type", "text/event-stream");
        assert!(is_event_stream(&map(&[events])));
        assert!(!is_event_stream(&map(&[
            events,
            ("content-encoding", "gzip")
        ])));
    }

    #[test]
    fn a_pause_is_read_in_seconds() {
        assert_eq!(
            retry_after(&map(&[("retry-after", "7")])),
            Some(Duration::from_secs(7))
        );
        assert_eq!(retry_after(&map(&[("retry-after", "soon")])), None);
    }
}
