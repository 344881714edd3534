//! The client's `x-request-id`: checked, and returned with the response.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

use crate::ids::RequestId;
use crate::openai::error::ApiError;

pub(super) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Where Anthropic's SDKs look for the same id.
pub(super) const OF_ANTHROPIC: HeaderName = HeaderName::from_static("request-id");
/// Longer than any common scheme; a longer id is a mistake or an attack on log storage.
const MAX_LENGTH: usize = 128;

pub(super) fn of_client(headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
    let Some(value) = headers.get(HEADER) else {
        return Ok(None);
    };
    let bytes = value.as_bytes();
    let is_valid =
        (1..=MAX_LENGTH).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
    if !is_valid {
        return Err(ApiError::bad_header(
            "x-request-id",
            "x-request-id must be 1 to 128 printable ASCII characters without spaces",
        ));
    }
    Ok(Some(value.clone()))
}

/// The router's own id, for a client that sent none.
pub(super) fn header(id: RequestId) -> HeaderValue {
    HeaderValue::from_str(id.as_str()).expect("hex digits and a dash")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &[u8]) -> Result<Option<HeaderValue>, ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_bytes(text).unwrap());
        of_client(&headers)
    }

    #[test]
    fn an_id_is_returned_unchanged_or_refused() {
        assert_eq!(of(b"req-1/a:b").unwrap().unwrap(), "req-1/a:b");
        assert!(of(b"").is_err());
        assert!(of(b"a b").is_err());
        assert!(of("é".as_bytes()).is_err());
        assert!(of(&[b'x'; 129]).is_err());
        assert!(of_client(&HeaderMap::new()).unwrap().is_none());
    }
}
