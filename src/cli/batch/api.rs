//! A router's API: where it is, and one exchange with it at a time.

use std::error::Error as StdError;
use std::fmt::Display;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use indicatif::ProgressBar;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::sent_body::SentBody;
use crate::cli::admin_client::{ListenerTls, bearer, given_secret};
use crate::http::tls::{self, Protocol, Socket};

/// Where a router's API is by default.
const LOCAL: &str = "http://127.0.0.1:8080";
/// A batch has a few kilobytes, a page of a hundred less than a megabyte.
const MAX_PAGE_BYTES: usize = 8 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// An exchange in which nothing moves for so long is over. A router's storage may take a while for the last part.
const STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Of an error's body, of a server that is no router: enough to see what it is.
const SHOWN_BYTES: usize = 200;

/// How a router's API is reached.
#[derive(Args)]
pub(super) struct ApiAccess {
    /// The router's API, with or without `/v1` at its end.
    #[arg(long, value_name = "URL", env = "OPENAI_BASE_URL", default_value = LOCAL, value_parser = api_url)]
    url: ApiUrl,
    /// The API key, if the router has tenants; `file:/path` is read.
    #[arg(
        long,
        value_name = "KEY",
        env = "OPENAI_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    #[command(flatten)]
    tls: ListenerTls,
}

impl ApiAccess {
    pub(super) fn client(&self) -> Result<ApiClient, String> {
        let key = given_secret("--api-key", self.api_key.as_deref())?;
        let key = key.filter(|key| !key.is_empty());
        let authorization = key.as_ref().map(bearer).transpose();
        Ok(ApiClient {
            url: self.url.clone(),
            authorization: authorization.map_err(|error| format!("--api-key: the key {error}"))?,
            tls: self.url.is_tls.then(|| self.tls.client()),
        })
    }
}

/// A router's API, as `--url` names it.
#[derive(Clone, Debug)]
pub(super) struct ApiUrl {
    /// The URL without `/v1`, for messages and for `--url`.
    pub(super) base: String,
    host: String,
    port: u16,
    /// What stands before `/v1`.
    path: String,
    is_tls: bool,
}

fn api_url(text: &str) -> Result<ApiUrl, String> {
    let expected = "expected http://HOST:PORT or https://HOST:PORT, in --url or OPENAI_BASE_URL";
    read_url(base_of(text)).ok_or_else(|| expected.to_owned())
}

fn read_url(base: &str) -> Option<ApiUrl> {
    let uri: Uri = base.parse().ok()?;
    let (usual_port, is_tls) = match uri.scheme_str()? {
        "http" => (80, false),
        "https" => (443, true),
        _ => return None,
    };
    // A password has no place here: `--api-key` has one.
    if base.contains(['?', '#', '@']) {
        return None;
    }
    let authority = uri.authority()?;
    let host = authority.host();
    let port = match authority.port_u16() {
        Some(port) => port,
        None if authority.as_str() == host => usual_port,
        // No number of a port.
        None => return None,
    };
    (!host.is_empty()).then(|| ApiUrl {
        base: base.to_owned(),
        host: host.to_owned(),
        port,
        path: uri.path().trim_end_matches('/').to_owned(),
        is_tls,
    })
}

/// What stands before `/v1`: the same for every way to write an URL.
fn base_of(url: &str) -> &str {
    let base = url.trim_end_matches('/');
    base.strip_suffix("/v1")
        .unwrap_or(base)
        .trim_end_matches('/')
}

/// Why a router has not done what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct AskError {
    /// With what to do, if that is the same for every request.
    text: String,
    pub(super) kind: AskErrorKind,
}

/// What helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskErrorKind {
    /// The same request may succeed a little later.
    Passing,
    /// The router does not have what the request names.
    Gone,
    /// The run that exists was started with other arguments.
    OtherRun,
    /// Something must be changed first.
    Final,
}

impl AskError {
    fn new(kind: AskErrorKind, why: impl Display) -> Self {
        let text = why.to_string();
        Self { text, kind }
    }

    pub(super) fn passing(why: impl Display) -> Self {
        Self::new(AskErrorKind::Passing, why)
    }

    /// Of arguments that are not those of the run.
    pub(super) fn other_run(why: impl Display) -> Self {
        Self::new(AskErrorKind::OtherRun, why)
    }

    /// Of this machine.
    pub(super) fn local(why: impl Display) -> Self {
        Self::new(AskErrorKind::Final, why)
    }

    /// Of a connection, with what has caused it; or of the file that was sent over it.
    pub(super) fn broken(error: &(dyn StdError + 'static)) -> Self {
        let causes = std::iter::successors(Some(error), |error| (**error).source());
        let texts: Vec<String> = causes.map(ToString::to_string).collect();
        let of_hyper = error.downcast_ref::<hyper::Error>();
        let is_ours = of_hyper.is_some_and(hyper::Error::is_user);
        // hyper names its own end as ours too, without one of these.
        let is_of_file = is_ours && error.source().is_some_and(|cause| cause.is::<io::Error>());
        let kind = if is_of_file {
            AskErrorKind::Final
        } else {
            AskErrorKind::Passing
        };
        Self::new(kind, texts.join(": "))
    }

    fn refused(status: StatusCode, body: &[u8]) -> Self {
        use AskErrorKind::{Final, Gone, Passing};
        let answer: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = &answer["error"];
        let (kind, advice) = match status.as_u16() {
            400 if error["param"] == "input_file_id" => (Gone, ""),
            400 => (Final, ""),
            // A path that no router has gets a code, or no such object.
            404 if error.is_object() && error["code"].is_null() => (
                Gone,
                "; it was deleted or forgotten, or belongs to another key (--api-key) or router (--url)",
            ),
            // A router says so itself.
            404 if error["code"] == "batches_not_configured" => (Final, ""),
            401 => (Final, "; check the key (--api-key, or OPENAI_API_KEY)"),
            403 => (
                Final,
                "; take a key that may do this (--api-key, or OPENAI_API_KEY)",
            ),
            413 => (Final, "; split the input into smaller ones"),
            408 | 429 | 500..=599 => (Passing, ""),
            // Redirects too.
            _ => (Final, "; is this the router's API? (--url)"),
        };
        let reason = reason(body);
        let reason = reason.trim_end_matches('.');
        Self::new(kind, format!("answered {status}: {reason}{advice}"))
    }
}

/// The message of an error's body.
fn reason(body: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    match answer["error"]["message"].as_str() {
        Some(message) => message.to_owned(),
        None => {
            let shown = &body[..body.len().min(SHOWN_BYTES)];
            String::from_utf8_lossy(shown).trim().to_owned()
        }
    }
}

pub(super) struct ApiClient {
    pub(super) url: ApiUrl,
    authorization: Option<HeaderValue>,
    tls: Option<Arc<tls::Client>>,
}

impl ApiClient {
    /// An exchange whose answer is a small JSON object.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: SentBody,
        bar: &ProgressBar,
    ) -> Result<T, AskError> {
        let read = async |answer: Incoming| {
            let page = Limited::new(answer, MAX_PAGE_BYTES).collect().await;
            let page = page.map_err(|error| AskError::broken(&*error))?;
            serde_json::from_slice::<T>(&page.to_bytes()).map_err(|error| {
                AskError::passing(format!("the answer is none of a router's: {error}"))
            })
        };
        self.exchange(method, path, body, bar, read).await
    }

    /// Sends a request over a connection of its own, and reads the answer if it is no error. The bar shows whether
    /// anything moves.
    pub(super) async fn exchange<T>(
        &self,
        method: Method,
        path: &str,
        body: SentBody,
        bar: &ProgressBar,
        read: impl AsyncFnOnce(Incoming) -> Result<T, AskError>,
    ) -> Result<T, AskError> {
        let ApiUrl {
            base,
            host,
            port,
            path: before,
            ..
        } = &self.url;
        let name = format!("{method} {base}{path}");
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{before}{path}"))
            .header(HOST, format!("{host}:{port}"))
            .header(CONTENT_TYPE, &*body.content_type);
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(body);
        let exchange = async {
            let request = request.map_err(AskError::local)?;
            let socket = timeout(CONNECT_TIMEOUT, self.connect()).await;
            let socket = socket.unwrap_or_else(|_| Err(io::Error::other("no answer within 10 s")));
            let socket = socket.map_err(|error| {
                AskError::passing(format!(
                    "cannot connect: {error}; is this the router's API? (--url)"
                ))
            })?;
            let connected = http1::handshake(TokioIo::new(socket)).await;
            let (mut sender, connection) = connected.map_err(|error| AskError::broken(&error))?;
            let mut answered = pin!(async {
                let answer = sender.send_request(request).await;
                let answer = answer.map_err(|error| AskError::broken(&error))?;
                let status = answer.status();
                if status.is_success() {
                    return read(answer.into_body()).await;
                }
                let body = Limited::new(answer.into_body(), MAX_PAGE_BYTES).collect();
                let body = body.await.map(|body| body.to_bytes()).unwrap_or_default();
                Err(AskError::refused(status, &body))
            });
            tokio::select! {
                answered = &mut answered => answered,
                // What has come before the connection ended can still be read.
                _ = connection => answered.await,
            }
        };
        let ended = while_it_moves(bar, exchange).await;
        ended.map_err(|error| AskError {
            text: format!("{name}: {error}"),
            ..error
        })
    }

    async fn connect(&self) -> io::Result<Socket> {
        let ApiUrl { host, port, .. } = &self.url;
        let stream = TcpStream::connect(format!("{host}:{port}")).await?;
        let _ = stream.set_nodelay(true);
        match &self.tls {
            None => Ok(Socket::Clear(stream)),
            Some(tls) => tls.connect(host, stream, Protocol::Http1).await,
        }
    }
}

/// Ends an exchange in which nothing has moved for a while.
async fn while_it_moves<T>(
    bar: &ProgressBar,
    exchange: impl Future<Output = Result<T, AskError>>,
) -> Result<T, AskError> {
    let mut exchange = pin!(exchange);
    let mut moved = bar.position();
    loop {
        match timeout(STALL_TIMEOUT, &mut exchange).await {
            Ok(ended) => return ended,
            Err(_) if bar.position() == moved => {
                return Err(AskError::passing("nothing moved for 120 s"));
            }
            Err(_) => moved = bar.position(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_an_url_leads_to_the_same_api() {
        let of_url = |url: &str| {
            let access = ApiAccess {
                url: api_url(url).ok()?,
                api_key: None,
                tls: ListenerTls::default(),
            };
            access.client().ok()
        };
        for (url, base, host, port, path) in [
            ("http://router", "http://router", "router", 80, ""),
            ("http://router/v1/", "http://router", "router", 80, ""),
            ("https://r/llm/v1", "https://r/llm", "r", 443, "/llm"),
            ("http://[::1]:8080", "http://[::1]:8080", "[::1]", 8080, ""),
        ] {
            let api = of_url(url).unwrap().url;
            let found = (&*api.base, &*api.host, api.port, &*api.path);
            assert_eq!(found, (base, host, port, path), "{url}");
        }
        let with_more = ["http://x?y=1", "http://x#y", "http://me:secret@x"];
        let no_host_or_port = ["http://", "http://:80", "http://x:99999", "http://x:y"];
        for wrong in ["router:8080", "router", "ftp://x", ""]
            .iter()
            .chain(&with_more)
            .chain(&no_host_or_port)
        {
            assert!(of_url(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn an_error_is_shown_by_its_message_or_by_how_it_begins() {
        assert_eq!(reason(br#"{"error":{"message":"no","code":null}}"#), "no");
        assert_eq!(reason(b"<html>busy</html>\n"), "<html>busy</html>");
        assert_eq!(reason(&[b'x'; 1_000]).len(), SHOWN_BYTES);
    }

    #[test]
    fn an_answer_says_whether_waiting_helps_and_what_does() {
        use AskErrorKind::{Final, Gone, Passing};
        let unknown = r#"{"error":{"message":"No batch.","code":null}}"#;
        let no_path = r#"{"error":{"message":"No path.","code":"unknown_url"}}"#;
        let no_storage = r#"{"error":{"message":"No batches.","code":"batches_not_configured"}}"#;
        let no_input = r#"{"error":{"message":"No file.","param":"input_file_id"}}"#;
        for (status, body, kind, advice) in [
            (404, unknown, Gone, ": No batch; it was deleted"),
            (
                404,
                no_path,
                Final,
                ": No path; is this the router's API? (--url)",
            ),
            (404, "<html>", Final, "(--url)"),
            (404, no_storage, Final, ": No batches"),
            (308, "", Final, "(--url)"),
            (400, no_input, Gone, ": No file"),
            (400, no_path, Final, ": No path"),
            (401, "", Final, "(--api-key, or OPENAI_API_KEY)"),
            (403, "", Final, "(--api-key, or OPENAI_API_KEY)"),
            (413, "", Final, "split the input"),
            (429, "", Passing, "answered 429"),
            (503, "busy", Passing, ": busy"),
        ] {
            let code = StatusCode::from_u16(status).unwrap();
            let error = AskError::refused(code, body.as_bytes());
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.to_string().contains(advice), "{error}");
        }
        let configured = AskError::refused(StatusCode::NOT_FOUND, no_storage.as_bytes());
        assert!(!configured.to_string().contains("--url"), "{configured}");
    }
}
