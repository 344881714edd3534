//! How large the head of a request may be. Pure.

use hyper::{Request, Version};

/// A head of this size is refused (431). Over HTTP/2 each of its fields counts 32 bytes more.
pub(super) const MAX_REQUEST_HEAD: u32 = 64 << 10;
/// h2 answers a larger head by itself, with a bare 431 that nobody can count or log. So where a handler can do better,
/// heads of up to this size come to it. Not more, because all of it is in memory before it is refused.
pub(super) const MAX_HTTP2_HEAD: u32 = 2 * MAX_REQUEST_HEAD;
/// What a field counts besides its name and its value (RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;

/// Among the extensions of an HTTP/2 request whose head is too large: its handler refuses it (431).
#[derive(Clone, Copy, Debug)]
pub struct OversizedHead;

/// Whether the head of an HTTP/2 request is too large. hyper refuses those of HTTP/1 before there is a request.
pub(super) fn is_too_large<B>(request: &Request<B>) -> bool {
    if request.version() != Version::HTTP_2 {
        return false;
    }
    let uri = request.uri();
    let pseudo = [
        (":method", Some(request.method().as_str())),
        (":scheme", uri.scheme_str()),
        (
            ":authority",
            uri.authority().map(|authority| authority.as_str()),
        ),
        (":path", uri.path_and_query().map(|path| path.as_str())),
    ];
    let pseudo = pseudo
        .iter()
        .filter_map(|(name, value)| Some(name.len() + (*value)?.len()));
    let headers = request.headers().iter();
    let headers = headers.map(|(name, value)| name.as_str().len() + value.len());
    let bytes: usize = pseudo.chain(headers).map(|bytes| bytes + FIELD_BYTES).sum();
    bytes >= MAX_REQUEST_HEAD as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_size(version: Version, name_and_value: usize, fields: usize, expected: bool) {
        let mut request = Request::post("http://h/p").version(version);
        for number in 100..100 + fields {
            let name = format!("x-{number}");
            request = request.header(&name, "v".repeat(name_and_value - name.len()));
        }
        let request = request.body(()).unwrap();
        assert_eq!(
            is_too_large(&request),
            expected,
            "{name_and_value} {fields}"
        );
    }

    #[test]
    fn all_fields_of_an_http2_head_count_with_32_bytes_more_each() {
        // The method, the scheme, the authority and the path, and the 32 bytes of the field.
        let others = (7 + 4) + (7 + 4) + (10 + 1) + (5 + 2) + 5 * FIELD_BYTES;
        let max = MAX_REQUEST_HEAD as usize;
        check_size(Version::HTTP_2, max - others - 1, 1, false);
        check_size(Version::HTTP_2, max - others, 1, true);
        check_size(Version::HTTP_2, 32, 1_000, false);
        check_size(Version::HTTP_2, 32, 1_024, true);
        check_size(Version::HTTP_11, max, 1, false);
    }
}
