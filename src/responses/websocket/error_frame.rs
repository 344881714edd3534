//! The frame that ends a turn for which no response began, and frames that belong to no turn. Pure.

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::HeaderName;

use super::client_frame::Lane;
use crate::openai::error::ApiError;
use crate::responses::members::{put_string, put_text};

/// Headers of an answer over HTTP that a client needs to know when to try again. In alphabetical order.
const HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("retry-after"),
    HeaderName::from_static("retry-after-ms"),
    HeaderName::from_static("x-should-retry"),
];

/// The frame of an error of the router.
pub fn of_error(error: ApiError, lane: &Lane) -> Bytes {
    let (head, body) = error.into_text().into_parts();
    of_answer(head.status.as_u16(), &head.headers, body.as_bytes(), lane)
}

/// The frame of an answer over HTTP whose body is an object with the member `error`.
pub fn of_answer(status: u16, headers: &HeaderMap, body: &[u8], lane: &Lane) -> Bytes {
    let mut out = Vec::with_capacity(body.len() + 128);
    out.extend_from_slice(format!(r#"{{"type":"error","status":{status}"#).as_bytes());
    if let Some(name) = lane.name() {
        put_string(&mut out, "stream_id", name);
    }
    out.extend_from_slice(br#","error":"#);
    let error = body.strip_prefix(br#"{"error":"#);
    let error = error.and_then(|rest| rest.strip_suffix(b"}"));
    // The router writes every error body, so that this is one.
    let error = error.unwrap_or(
        br#"{"message":"the request failed","type":"server_error","param":null,"code":null}"#,
    );
    let members = error.strip_suffix(b"}").unwrap_or(error);
    match members.strip_suffix(br#""code":null"#) {
        // Over a WebSocket an error has a code always; clients wait on if there is none.
        Some(rest) => {
            out.extend_from_slice(rest);
            out.extend_from_slice(format!(r#""code":"{}""#, code_of(status)).as_bytes());
        }
        None => out.extend_from_slice(members),
    }
    let mut before = r#","headers":{"#;
    for name in &HEADERS {
        let Some(value) = headers.get(name).and_then(|value| value.to_str().ok()) else {
            continue;
        };
        out.extend_from_slice(before.as_bytes());
        put_text(&mut out, name.as_str());
        out.push(b':');
        put_text(&mut out, value);
        before = ",";
    }
    if before == "," {
        out.push(b'}');
    }
    out.extend_from_slice(b"}}");
    out.into()
}

/// The code of an error that has none over HTTP.
const fn code_of(status: u16) -> &'static str {
    if status < 500 {
        "invalid_request_error"
    } else {
        "server_error"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn json_of(frame: &Bytes) -> Value {
        serde_json::from_slice(frame).unwrap()
    }

    #[test]
    fn an_error_has_its_status_lane_and_the_error_of_http() {
        let lane = Lane::named("main").unwrap();
        let frame = of_error(ApiError::unknown_previous("resp_abc"), &lane);
        assert_eq!(
            json_of(&frame),
            json!({"type": "error", "status": 400, "stream_id": "main", "error": {
                "type": "invalid_request_error", "code": "previous_response_not_found",
                "message": "Previous response with id 'resp_abc' not found.", "param": "previous_response_id"}})
        );
    }

    #[test]
    fn the_errors_of_a_connection_have_openais_words() {
        let error = |error| json_of(&of_error(error, &Lane::DEFAULT));
        let invalid = error(ApiError::invalid_stream_id());
        assert_eq!(
            invalid,
            json!({"type": "error", "status": 400, "error": {
                "message": "The 'stream_id' field must be a non-empty string with at most 256 characters and may only contain letters, numbers, underscores, hyphens, and periods.",
                "type": "invalid_request_error", "param": "stream_id", "code": "invalid_stream_id"}})
        );
        let many = error(ApiError::too_many_streams(32));
        assert_eq!(
            many["error"]["message"],
            "This WebSocket connection has reached its maximum number of distinct stream IDs (32). Reuse an existing stream_id or open a new WebSocket connection."
        );
        assert_eq!(many["error"]["code"], "websocket_stream_limit_reached");
        assert_eq!(many["error"]["param"], "stream_id");
        let old = error(ApiError::old_connection(60));
        assert_eq!(
            old["error"]["message"],
            "Responses websocket connection limit reached (60 minutes). Create a new websocket connection to continue."
        );
        assert_eq!(old["error"]["code"], "websocket_connection_limit_reached");
        assert_eq!(
            (&old["status"], &old["error"]["param"]),
            (&json!(400), &Value::Null)
        );
        assert_eq!(old.get("stream_id"), None);
    }

    #[test]
    fn headers_that_say_when_to_try_again_are_in_the_error() {
        let frame = json_of(&of_error(ApiError::stopping(), &Lane::DEFAULT));
        assert_eq!(frame["status"], 503);
        assert_eq!(frame["error"]["headers"], json!({"retry-after": "1"}));
        let mut headers = HeaderMap::new();
        for name in ["retry-after", "x-should-retry", "set-cookie"] {
            headers.insert(name, "1".parse().unwrap());
        }
        let body = br#"{"error":{"message":"a \"b\"","type":"t","param":null,"code":null}}"#;
        let frame = json_of(&of_answer(429, &headers, body, &Lane::DEFAULT));
        assert_eq!(frame["error"]["message"], "a \"b\"");
        assert_eq!(
            frame["error"]["headers"],
            json!({"retry-after": "1", "x-should-retry": "1"})
        );
    }

    #[test]
    fn every_error_has_a_code() {
        let body =
            br#"{"error":{"message":"say \"code\":null","type":"t","param":null,"code":null}}"#;
        for (status, code) in [
            (400, "invalid_request_error"),
            (404, "invalid_request_error"),
            (502, "server_error"),
        ] {
            let frame = json_of(&of_answer(status, &HeaderMap::new(), body, &Lane::DEFAULT));
            assert_eq!(
                frame["error"],
                json!({"message": "say \"code\":null", "type": "t", "param": null, "code": code})
            );
        }
    }

    #[test]
    fn a_body_that_is_no_error_still_gives_a_frame() {
        let frame = json_of(&of_answer(500, &HeaderMap::new(), b"oops", &Lane::DEFAULT));
        assert_eq!(frame["error"]["type"], "server_error");
    }
}
