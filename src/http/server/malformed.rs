//! hyper answers a request head that it cannot parse by itself, with a status and nothing else, and then closes the
//! connection. Here is how such an answer is recognised, and what is sent in its place. Pure.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hyper::{Response, StatusCode};

/// Makes the response to a request head that cannot be parsed, from hyper's status.
#[derive(Clone)]
pub struct OnMalformed(Arc<dyn Fn(StatusCode) -> Response<String> + Send + Sync>);

impl OnMalformed {
    pub fn new(respond: impl Fn(StatusCode) -> Response<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(respond))
    }

    /// The whole response, as it is sent over HTTP/1.
    pub(super) fn response(&self, status: StatusCode) -> Bytes {
        let (head, body) = (self.0)(status).into_parts();
        let mut text = format!(
            "HTTP/1.1 {} {}\r\nconnection: close\r\ncontent-length: {}\r\n",
            status.as_str(),
            status.canonical_reason().unwrap_or_default(),
            body.len()
        );
        for (name, value) in &head.headers {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap_or_default());
        }
        text += "\r\n";
        text += &body;
        Bytes::from(text)
    }
}

impl fmt::Debug for OnMalformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnMalformed")
    }
}

/// hyper's own response has a status line and three short headers.
const MAX_HEAD_BYTES: usize = 200;

/// The status, if `bytes` are a whole response that hyper wrote by itself. A handler's error has a content type.
pub(super) fn automatic_status(bytes: &[u8]) -> Option<StatusCode> {
    if bytes.len() > MAX_HEAD_BYTES {
        return None;
    }
    let head = std::str::from_utf8(bytes).ok()?;
    let lines = head.strip_suffix("\r\n\r\n")?;
    let mut lines = lines.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.get(..3)?;
    let status = StatusCode::from_bytes(status.as_bytes()).ok()?;
    let is_automatic = matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::URI_TOO_LONG
            | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
    );
    let has_body = |line: &str| {
        let name = line.split(':').next().unwrap_or_default();
        !matches!(name, "connection" | "date") && line != "content-length: 0"
    };
    (is_automatic && !lines.any(has_body)).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hypers_own_error_is_recognised() {
        let own = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\
                   date: Sun, 22 Nov 2026 17:00:00 GMT\r\n\r\n";
        assert_eq!(
            automatic_status(own.as_bytes()),
            Some(StatusCode::BAD_REQUEST)
        );
        let large = own.replace("400 Bad Request", "431 Request Header Fields Too Large");
        assert_eq!(automatic_status(large.as_bytes()).unwrap().as_u16(), 431);
        for other in [
            own.replace("400", "404"),
            own.replace("content-length: 0", "content-length: 7"),
            own.replace("date:", "x-request-id:"),
            own.replace("\r\n\r\n", "\r\n"),
            own.replace("HTTP/1.1", "HTTP/1.0"),
            format!("{own}x"),
            String::new(),
        ] {
            assert_eq!(automatic_status(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn the_response_in_its_place_has_a_length_and_closes() {
        let respond = OnMalformed::new(|_| {
            let response = Response::builder().header("x-a", "b");
            response.body("{}".to_owned()).unwrap()
        });
        assert_eq!(
            respond.response(StatusCode::BAD_REQUEST),
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 2\r\nx-a: b\r\n\r\n{}"
        );
    }
}
