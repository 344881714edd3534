//! WebSocket mode of the Responses API: the handshake (RFC 6455, section 4), and who may open one.

mod connection;
pub(super) mod open;
mod opener;
mod outgoing;
mod running_turn;
mod turn;

use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body::Body as _;
use hyper::header::{
    CONNECTION, HeaderValue, ORIGIN, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::{HeaderMap, Request, Response, StatusCode, Version};
use sha1_smol::Sha1;

use self::connection::serve;
use self::opener::Opener;
use super::ApiServer;
use crate::http;
use crate::http::server::{RequestBody, Upgrade};
use crate::openai::error::ApiError;
use crate::openai::tenant::Admitted;
use crate::responses::Mode;

const VERSION: HeaderValue = HeaderValue::from_static("13");
const WEBSOCKET: HeaderValue = HeaderValue::from_static("websocket");
/// What the key of a handshake is hashed with.
const MAGIC: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

impl ApiServer {
    /// Answers a handshake. The connection is the WebSocket's after a response of 101.
    pub(super) fn upgrade(
        self: &Arc<Self>,
        mut request: Request<RequestBody>,
        admitted: &Admitted,
        key: Option<HeaderValue>,
        address: IpAddr,
        client_id: &HeaderValue,
    ) -> Result<Response<http::Body>, ApiError> {
        let upgrade = request.extensions_mut().remove::<Upgrade>();
        let settings = self.responses.websocket();
        let is_on = settings.enabled && self.responses.mode() == Mode::Stateful;
        let Some(upgrade) = upgrade.filter(|_| is_on) else {
            return Ok(unavailable());
        };
        let headers = request.headers();
        if headers.contains_key(ORIGIN) && !self.cors.grant(headers).allows() {
            // Browsers let any page open a WebSocket to any server.
            return Err(ApiError::foreign_origin());
        }
        if request.version() != Version::HTTP_11
            || headers.get(SEC_WEBSOCKET_VERSION) != Some(&VERSION)
        {
            return Ok(wrong_version());
        }
        if !request.body().is_end_stream() {
            return Err(ApiError::bad_handshake(
                "content-length",
                "is not that of a request without a body",
            ));
        }
        let accept = accept(headers)?;
        let tenant = self.tenants.require_keys().then_some(admitted.tenant);
        let slot = self.open.enter(settings, tenant)?;
        let opener = Opener::new(headers, key, address, client_id);
        let (server, caller) = (self.clone(), admitted.tenant);
        upgrade.hand_over(move |upgraded| serve(server, opener, caller, slot, upgraded));
        let mut response = Response::new(http::full(""));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let answer = response.headers_mut();
        answer.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        answer.insert(UPGRADE, WEBSOCKET);
        answer.insert(SEC_WEBSOCKET_ACCEPT, accept);
        Ok(response)
    }
}

/// Clients that would prefer a WebSocket then use HTTP at once.
fn unavailable() -> Response<http::Body> {
    let mut response = ApiError::no_websocket().into_response();
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    headers.insert(UPGRADE, HeaderValue::from_static("HTTP/1.1"));
    response
}

fn wrong_version() -> Response<http::Body> {
    let error = ApiError::bad_handshake("sec-websocket-version", "must be 13, over HTTP/1.1");
    let mut response = error.into_response();
    *response.status_mut() = StatusCode::UPGRADE_REQUIRED;
    let headers = response.headers_mut();
    headers.insert(SEC_WEBSOCKET_VERSION, VERSION);
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, WEBSOCKET);
    response
}

/// The value that shows the client that its handshake was understood.
fn accept(headers: &HeaderMap) -> Result<HeaderValue, ApiError> {
    let mut keys = headers.get_all(SEC_WEBSOCKET_KEY).iter();
    let key = keys.next().filter(|_| keys.next().is_none());
    let is_key = |key: &&HeaderValue| STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 16);
    let key = key.filter(is_key).ok_or_else(|| {
        ApiError::bad_handshake("sec-websocket-key", "must be 16 bytes in base64, once")
    })?;
    let hash = Sha1::from([key.as_bytes(), MAGIC].concat()).digest();
    let accept = HeaderValue::try_from(STANDARD.encode(hash.bytes()));
    accept.map_err(|_| ApiError::bad_handshake("sec-websocket-key", "cannot be answered"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept_of(keys: &[&str]) -> Result<String, &'static str> {
        let mut headers = HeaderMap::new();
        for key in keys {
            headers.append(SEC_WEBSOCKET_KEY, key.parse().unwrap());
        }
        let accept = accept(&headers).map_err(|error| error.code)?;
        Ok(accept.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_key_of_rfc_6455_has_its_answer() {
        let answer = accept_of(&["dGhlIHNhbXBsZSBub25jZQ=="]);
        assert_eq!(answer.as_deref(), Ok("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    }

    #[test]
    fn a_handshake_has_one_key_of_16_bytes() {
        let key = "dGhlIHNhbXBsZSBub25jZQ==";
        for keys in [&[][..], &["x"], &["dGhlIHNhbXBsZQ=="], &[key, key]] {
            assert_eq!(accept_of(keys), Err("invalid_handshake"), "{keys:?}");
        }
    }
}
