//! Asks the API of a router: files and batches.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

use super::file_form::FileForm;
use crate::http::BodyError;
use crate::http::client::{EngineBody, Pool};
use crate::http::tls::{Protocol, Socket};

/// A batch has a few kilobytes, a page of a hundred less than a megabyte.
const MAX_PAGE_BYTES: usize = 8 << 20;
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Of an answer to anything but an upload. A router waits for Redis for some seconds at most.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Of an error's body, of a server that is no router: enough to see what it is.
const SHOWN_BYTES: usize = 200;

/// Why a router has not done what it was asked.
#[derive(Debug)]
pub(super) enum AskError {
    /// The router has answered with an error.
    Refused { status: StatusCode, text: String },
    /// No answer has come, or none of a router.
    Failed(String),
}

impl AskError {
    /// Whether the same request may succeed a little later.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Refused { status, .. } => {
                let waits = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];
                status.is_server_error() || waits.contains(status)
            }
            Self::Failed(_) => true,
        }
    }

    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if *status == StatusCode::NOT_FOUND)
    }
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { text, .. } | Self::Failed(text) => f.write_str(text),
        }
    }
}

/// A router's API.
pub(super) struct ApiClient {
    pool: Arc<Pool>,
    /// The API's URL without `/v1`, for messages and for `--url`.
    pub(super) base: String,
    /// What stands before `/v1`.
    path: String,
    authorization: Option<HeaderValue>,
}

impl ApiClient {
    pub(super) fn new(
        pool: Arc<Pool>,
        base: String,
        path: String,
        authorization: Option<HeaderValue>,
    ) -> Self {
        Self {
            pool,
            base,
            path,
            authorization,
        }
    }

    /// A page's body.
    pub(super) async fn get_page(&self, path: &str) -> Result<Bytes, AskError> {
        let authorization = self.authorization.as_ref();
        let page = self.pool.get(path, authorization, MAX_PAGE_BYTES);
        self.answer("GET", path, page).await
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, AskError> {
        self.parse("GET", path, &self.get_page(path).await?)
    }

    pub(super) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        json: Bytes,
    ) -> Result<T, AskError> {
        let authorization = self.authorization.as_ref();
        let page = self.pool.post(path, authorization, json, MAX_PAGE_BYTES);
        self.parse("POST", path, &self.answer("POST", path, page).await?)
    }

    /// What a body says.
    pub(super) fn parse<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<T, AskError> {
        serde_json::from_slice(body).map_err(|error| {
            self.failed(
                method,
                path,
                &format!("the answer is none of a router's: {error}"),
            )
        })
    }

    async fn answer(
        &self,
        method: &str,
        path: &str,
        page: impl Future<Output = Result<(StatusCode, Bytes), BodyError>>,
    ) -> Result<Bytes, AskError> {
        let page = tokio::time::timeout(TIMEOUT, page).await;
        let page = page.map_err(|_| self.failed(method, path, "no answer within 30 s"))?;
        let (status, body) =
            page.map_err(|error| self.failed(method, path, &with_causes(&*error)))?;
        self.accepted(method, path, status, body)
    }

    fn accepted(
        &self,
        method: &str,
        path: &str,
        status: StatusCode,
        body: Bytes,
    ) -> Result<Bytes, AskError> {
        if status.is_success() {
            return Ok(body);
        }
        let base = &self.base;
        let text = format!(
            "{method} {base}{path}: answered {status}: {}",
            reason(&body)
        );
        Err(AskError::Refused { status, text })
    }

    fn failed(&self, method: &str, path: &str, why: &str) -> AskError {
        AskError::Failed(format!("{method} {}{path}: {why}", self.base))
    }

    /// The body of a page that may be large, as it comes.
    pub(super) async fn open(&self, path: &str) -> Result<EngineBody, AskError> {
        let failed = |why: &str| self.failed("GET", path, why);
        let mut request = Request::get(path).header(HOST, self.pool.authority());
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(Full::default());
        let request = request.map_err(|error| failed(&error.to_string()))?;
        let answer = tokio::time::timeout(TIMEOUT, self.pool.send_anew(request)).await;
        let answer = answer.map_err(|_| failed("no answer within 30 s"))?;
        let answer = answer.map_err(|error| failed(&error.to_string()))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let body = Limited::new(answer.into_body(), MAX_PAGE_BYTES).collect();
        let body = tokio::time::timeout(TIMEOUT, body).await;
        let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
        self.accepted("GET", path, status, body.unwrap_or_default())?;
        Err(failed("no answer"))
    }

    /// Sends a form of any size over a connection of its own. The caller sees to it that it goes on.
    pub(super) async fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        form: FileForm,
    ) -> Result<T, AskError> {
        let failed = |why: String| self.failed("POST", path, &why);
        let mut request = Request::post(format!("{}{path}", self.path))
            .header(HOST, self.pool.authority())
            .header(CONTENT_TYPE, form.content_type());
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(form);
        let request = request.map_err(|error| failed(error.to_string()))?;
        let socket = tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await;
        let socket = socket.map_err(|_| failed("no connection within 10 s".to_owned()))?;
        let socket = socket.map_err(|error| failed(format!("cannot connect: {error}")))?;
        let connection = http1::handshake::<_, FileForm>(TokioIo::new(socket)).await;
        let (mut sender, connection) = connection.map_err(|error| failed(with_causes(&error)))?;
        let exchange = async {
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_PAGE_BYTES).collect();
            Ok::<_, BodyError>((status, body.await?.to_bytes()))
        };
        let mut exchange = std::pin::pin!(exchange);
        let answered = tokio::select! {
            answered = &mut exchange => answered,
            // What has come before the connection ended can still be read.
            _ = connection => exchange.await,
        };
        let (status, body) = answered.map_err(|error| failed(with_causes(&*error)))?;
        self.parse("POST", path, &self.accepted("POST", path, status, body)?)
    }

    async fn connect(&self) -> std::io::Result<Socket> {
        let authority = self.pool.authority();
        let stream = TcpStream::connect(authority).await?;
        let _ = stream.set_nodelay(true);
        let Some(tls) = self.pool.tls() else {
            return Ok(Socket::Clear(stream));
        };
        let host = authority
            .rsplit_once(':')
            .map_or(authority, |(host, _)| host);
        tls.connect(host, stream, Protocol::Http1).await
    }
}

/// An error with what has caused it.
pub(super) fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// The message of an error's body.
fn reason(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct ErrorBody {
        error: ErrorMessage,
    }
    #[derive(Deserialize)]
    struct ErrorMessage {
        message: String,
    }
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => body.error.message,
        Err(_) => {
            let shown = &body[..body.len().min(SHOWN_BYTES)];
            String::from_utf8_lossy(shown).trim().to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_shown_by_its_message_or_by_how_it_begins() {
        assert_eq!(reason(br#"{"error":{"message":"no","code":null}}"#), "no");
        assert_eq!(reason(b"<html>busy</html>\n"), "<html>busy</html>");
        assert_eq!(reason(&[b'x'; 1_000]).len(), SHOWN_BYTES);
    }

    #[test]
    fn only_what_the_router_decided_is_final() {
        let refused = |status: StatusCode| AskError::Refused {
            status,
            text: String::new(),
        };
        for (error, expected) in [
            (refused(StatusCode::NOT_FOUND), false),
            (refused(StatusCode::UNAUTHORIZED), false),
            (refused(StatusCode::TOO_MANY_REQUESTS), true),
            (refused(StatusCode::SERVICE_UNAVAILABLE), true),
            (AskError::Failed("gone".to_owned()), true),
        ] {
            assert_eq!(error.may_pass(), expected, "{error:?}");
        }
    }
}
