//! Refuses request heads that are too large or that two servers could read differently, and bodies in an encoding that
//! the router does not read. Pure.

use hyper::header::{CONTENT_ENCODING, HOST, SEC_WEBSOCKET_KEY, TRANSFER_ENCODING, UPGRADE};
use hyper::{Method, Request, StatusCode, Version};

use crate::http::server::OversizedHead;
use crate::openai::error::ApiError;

/// RFC 9112, sections 3.2 and 6.1; RFC 9110, section 8.4.
pub(super) fn check<B>(request: &Request<B>) -> Result<(), ApiError> {
    if request.extensions().get::<OversizedHead>().is_some() {
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return Err(ApiError::malformed(status));
    }
    let headers = request.headers();
    let hosts = headers.get_all(HOST).iter().count();
    let needs_host = request.version() == Version::HTTP_11;
    if hosts > 1 || needs_host && hosts == 0 {
        let message = "an HTTP/1.1 request has exactly one Host header";
        return Err(ApiError::bad_header("host", message));
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    if codings.any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"chunked")) {
        return Err(ApiError::transfer_coding());
    }
    let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
    let is_plain = |encoding: &[u8]| encoding.eq_ignore_ascii_case(b"identity");
    match encodings.find(|encoding| !is_plain(encoding.as_bytes())) {
        Some(encoding) => Err(ApiError::content_encoding(
            encoding.to_str().unwrap_or_default(),
        )),
        None => Ok(()),
    }
}

/// True if a WebSocket was asked for, and a proxy on the way has dropped the header that says so: it is one of the connection,
/// unlike the WebSocket's key.
pub(super) fn lost_upgrade<B>(request: &Request<B>) -> bool {
    request.method() == Method::GET
        && request.uri().path() == "/v1/responses"
        && request.headers().contains_key(SEC_WEBSOCKET_KEY)
        && !request.headers().contains_key(UPGRADE)
}

/// True if the client wants the Responses API over a WebSocket (RFC 6455, section 4.1).
pub(super) fn asks_for_websocket<B>(request: &Request<B>) -> bool {
    if request.method() != Method::GET || request.uri().path() != "/v1/responses" {
        return false;
    }
    let upgrades = request.headers().get_all(UPGRADE).iter();
    let names = upgrades.filter_map(|value| value.to_str().ok());
    names
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("websocket"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_head(version: Version, headers: &[(&str, &str)], expected: Option<u16>) {
        let mut request = Request::builder().version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let found = check(&request.body(()).unwrap()).err();
        assert_eq!(
            found.map(|error| error.status.as_u16()),
            expected,
            "{headers:?}"
        );
    }

    #[test]
    fn a_head_that_is_too_large_is_refused_whatever_it_has() {
        let mut request = Request::builder()
            .version(Version::HTTP_2)
            .body(())
            .unwrap();
        assert!(check(&request).is_ok());
        request.extensions_mut().insert(OversizedHead);
        assert_eq!(check(&request).unwrap_err().code, "headers_too_large");
    }

    #[test]
    fn a_head_that_is_ambiguous_or_encoded_is_refused() {
        let host = ("host", "x");
        check_head(Version::HTTP_11, &[host], None);
        check_head(Version::HTTP_11, &[], Some(400));
        check_head(Version::HTTP_11, &[host, host], Some(400));
        check_head(Version::HTTP_10, &[], None);
        check_head(Version::HTTP_2, &[], None);
        let chunked = ("transfer-encoding", "Chunked");
        check_head(Version::HTTP_11, &[host, chunked], None);
        let coded = ("transfer-encoding", "gzip, chunked");
        check_head(Version::HTTP_11, &[host, coded], Some(501));
        let gzip = ("content-encoding", "gzip");
        check_head(Version::HTTP_11, &[host, gzip], Some(415));
        let identity = ("content-encoding", "identity");
        check_head(Version::HTTP_11, &[host, identity], None);
    }
}
