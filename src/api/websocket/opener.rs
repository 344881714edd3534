//! Who opened a WebSocket.

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HOST, HeaderName, HeaderValue, ORIGIN, SEC_WEBSOCKET_EXTENSIONS,
    SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};

/// Headers of the handshake that are no headers of its turns.
const NOT_OF_TURNS: [HeaderName; 9] = [
    CONNECTION,
    UPGRADE,
    HOST,
    ORIGIN,
    SEC_WEBSOCKET_EXTENSIONS,
    SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION,
    HeaderName::from_static("content-length"),
];

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
    /// `key`: the client's, with which each turn is authorised. Copies what it keeps: the values of a request's headers
    /// are slices of the buffer that it was read into.
    pub(super) fn new(
        headers: &HeaderMap,
        key: Option<HeaderValue>,
        address: IpAddr,
        client_id: &HeaderValue,
    ) -> Self {
        let mut copies = HeaderMap::with_capacity(headers.len());
        let kept = headers
            .iter()
            .filter(|(name, _)| !NOT_OF_TURNS.contains(name));
        for (name, value) in kept {
            copies.append(name, copy(value));
        }
        if let Some(key) = key {
            let mut key = copy(&key);
            key.set_sensitive(true);
            copies.insert(AUTHORIZATION, key);
        }
        Self {
            headers: copies,
            address,
            client_id: copy(client_id),
        }
    }
}

/// `HeaderValue::clone` shares the buffer.
fn copy(value: &HeaderValue) -> HeaderValue {
    let mut copy = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
    copy.set_sensitive(value.is_sensitive());
    copy
}
