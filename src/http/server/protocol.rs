//! Which protocol a connection begins with. Pure.

use crate::http::tls::Protocol;

/// How HTTP/2 begins (RFC 9113, section 3.4). No HTTP/1 method is `PRI`.
const HTTP2_PREFACE: &[u8] = b"PRI ";

/// The protocol of a connection that begins with these bytes; `None` while there are too few.
pub(super) fn protocol_of(bytes: &[u8]) -> Option<Protocol> {
    if bytes.starts_with(HTTP2_PREFACE) {
        return Some(Protocol::Http2);
    }
    (!HTTP2_PREFACE.starts_with(bytes)).then_some(Protocol::Http1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_say_which_protocol_it_is() {
        assert_eq!(protocol_of(b""), None);
        assert_eq!(protocol_of(b"PR"), None);
        assert_eq!(protocol_of(b"PRI "), Some(Protocol::Http2));
        assert_eq!(protocol_of(b"PRI * HTTP/2.0\r\n"), Some(Protocol::Http2));
        assert_eq!(protocol_of(b"PROPFIND / HTTP/1.1"), Some(Protocol::Http1));
        assert_eq!(protocol_of(b"\x16\x03\x01"), Some(Protocol::Http1));
    }
}
