//! Who opened a WebSocket.

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};

/// Who opened a connection, as each of its turns is authorised and logged.
#[derive(Debug)]
pub(super) struct Opener {
    /// The headers of the handshake, with the client's key.
    pub(super) headers: HeaderMap,
    pub(super) address: IpAddr,
    /// The id of the handshake, for the log.
    pub(super) client_id: HeaderValue,
}

impl Opener {
    /// Copies what it keeps: the values of a request's headers are slices of the buffer that it was read into.
    pub(super) fn new(
        headers: &HeaderMap,
        left_out: &[HeaderName],
        address: IpAddr,
        client_id: &HeaderValue,
    ) -> Self {
        let mut copies = HeaderMap::with_capacity(headers.len());
        let kept = headers.iter().filter(|(name, _)| !left_out.contains(name));
        for (name, value) in kept {
            copies.append(name, copy(value));
        }
        Self {
            headers: copies,
            address,
            client_id: copy(client_id),
        }
    }

    /// The client's key, with which each turn is authorised.
    pub(super) fn set_key(&mut self, key: &HeaderValue) {
        let mut key = copy(key);
        key.set_sensitive(true);
        self.headers.insert(AUTHORIZATION, key);
    }
}

/// `HeaderValue::clone` shares the buffer.
fn copy(value: &HeaderValue) -> HeaderValue {
    let mut copy = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
    copy.set_sensitive(value.is_sensitive());
    copy
}
