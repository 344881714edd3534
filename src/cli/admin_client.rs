//! Asks the admin listener of a running router.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use hyper::header::HeaderValue;
use hyper::{StatusCode, Uri};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::Config;
#[cfg(feature = "top")]
use crate::http::client::EngineBody;
use crate::http::client::{self, Pool};
use crate::http::listen_address::listen_address;
use crate::http::tls;
use crate::secret::Secret;

/// A page of 10,000 workers has some megabytes.
const MAX_PAGE_BYTES: usize = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);
/// Letters of an error that are shown: more than any of a router's has.
const SHOWN_REASON: usize = 500;
/// Where a router's admin listener is by default.
pub(super) const LOCAL: &str = "http://127.0.0.1:9090";

/// Another program listens there, or the router's API; or one side has TLS and the other has not, or another CA.
const ASK_WHERE: &str =
    "is this the router's admin listener? (--url; with `admin.tls` https:// and --ca)";

/// How a listener of a router is reached over TLS.
#[derive(Args, Default)]
pub(super) struct ListenerTls {
    /// The CA of a listener with TLS; without it, those of the operating system.
    #[arg(long, value_name = "CA.CRT", default_value = "")]
    ca: String,
    /// The certificate for a listener that asks for one.
    #[arg(long, value_name = "TLS.CRT", default_value = "", requires = "key")]
    certificate: String,
    /// Its private key.
    #[arg(
        long,
        value_name = "TLS.KEY",
        default_value = "",
        requires = "certificate"
    )]
    key: String,
}

impl ListenerTls {
    pub(super) fn client(&self) -> Arc<tls::Client> {
        tls::Clients::default().get(&tls::ClientSettings {
            ca: self.ca.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            ..tls::ClientSettings::default()
        })
    }
}

/// What an admin listener may ask for.
#[derive(Args)]
pub(super) struct AdminAccess {
    /// The token of the admin listener, if it asks for one; `file:/path` is read.
    #[arg(
        long,
        value_name = "TOKEN",
        env = "WARMROUTE_ADMIN_TOKEN",
        hide_env_values = true
    )]
    token: Option<String>,
    #[command(flatten)]
    pub(super) tls: ListenerTls,
}

impl AdminAccess {
    pub(super) fn token(&self) -> Result<Option<Secret>, String> {
        given_secret("--token", self.token.as_deref())
    }
}

/// What an option says, or the file that it names.
pub(super) fn given_secret(option: &str, text: Option<&str>) -> Result<Option<Secret>, String> {
    let Some(text) = text else {
        return Ok(None);
    };
    let text = match text.strip_prefix("file:") {
        None => text.to_owned(),
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| format!("{option} file:{path}: {error}"))?,
    };
    Ok(Some(Secret::new(text.trim())))
}

pub(super) struct AdminClient {
    pool: Arc<Pool>,
    /// `http://HOST:PORT`, for messages.
    pub(super) base: String,
    token: Option<HeaderValue>,
}

impl AdminClient {
    /// `url`, or else the `admin.listen` of `config`. The token is one of `config`'s.
    pub(super) fn new(
        url: Option<&str>,
        config: Option<&Config>,
        token: Option<&Secret>,
        tls: &ListenerTls,
    ) -> Result<Self, String> {
        let (address, is_tls) = match (url, config) {
            (Some(url), _) => of_url(url)?,
            (None, Some(config)) => of_config(config)?,
            (None, None) => of_url(LOCAL)?,
        };
        let scheme = if is_tls { "https" } else { "http" };
        let base = format!("{scheme}://{address}");
        let own = config.map(|config| {
            let tokens = &config.admin.tokens;
            let listed = tokens.read.iter().chain(&tokens.operate);
            std::iter::once(&config.admin.token).chain(listed)
        });
        let mut tokens = token.into_iter().chain(own.into_iter().flatten());
        let token = tokens.find(|token| !token.is_empty());
        let token = token.map(bearer).transpose();
        let token = token.map_err(|error| format!("{base}: the token: {error}"))?;
        let tls = is_tls.then(|| tls.client());
        Ok(Self {
            pool: Pool::with_tls(address, client::Settings::default(), tls),
            base,
            token,
        })
    }

    /// A page's body.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}{path}: {error}", self.base);
        let page = self.pool.get(path, self.token.as_ref(), MAX_PAGE_BYTES);
        let page = tokio::time::timeout(TIMEOUT, page).await;
        let page = page.map_err(|_| failed(&"no answer within 10 s"))?;
        let (status, body) = page.map_err(|error| failed(&format!("{error}; {ASK_WHERE}")))?;
        let answered = || format!("answered {status}{}", reason(&body));
        match status {
            status if status.is_success() => Ok(body),
            StatusCode::UNAUTHORIZED => Err(failed(&format!(
                "{}; give a token by --token or WARMROUTE_ADMIN_TOKEN",
                answered()
            ))),
            StatusCode::FORBIDDEN => Err(failed(&format!(
                "{}; give another token (--token) or a certificate (--certificate, --key)",
                answered()
            ))),
            StatusCode::NOT_FOUND => Err(failed(&format!("answered {status}; {ASK_WHERE}"))),
            _ => Err(failed(&answered())),
        }
    }

    /// A JSON page.
    pub(super) async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let page = serde_json::from_slice(&self.get(path).await?);
        page.map_err(|error| format!("{}{path}: is no page of a router: {error}", self.base))
    }

    /// The body of a page that does not end, such as a stream of events.
    #[cfg(feature = "top")]
    pub(super) async fn open(&self, path: &str) -> Result<EngineBody, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}{path}: {error}", self.base);
        let mut request = hyper::Request::get(path).header("host", self.pool.authority());
        if let Some(token) = &self.token {
            request = request.header(hyper::header::AUTHORIZATION, token);
        }
        let request = request.body(http_body_util::Full::default());
        let request = request.map_err(|error| failed(&error))?;
        let answer = tokio::time::timeout(TIMEOUT, self.pool.send_anew(request)).await;
        let answer = answer.map_err(|_| failed(&"no answer within 10 s"))?;
        let answer = answer.map_err(|error| failed(&error))?;
        match answer.status() {
            status if status.is_success() => Ok(answer.into_body()),
            status => Err(failed(&format!("answered {status}"))),
        }
    }
}

/// What a router says of an error, after a colon. Another program may write its errors so, too: what it says is short, and
/// has no control characters for the terminal.
fn reason(body: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(reason) = answer["error"].as_str() else {
        return String::new();
    };
    let letters = reason.chars().filter(|letter| !letter.is_control());
    let shown: String = letters.take(SHOWN_REASON).collect();
    format!(": {shown}")
}

/// The value of an `authorization` header.
pub(super) fn bearer(token: &Secret) -> Result<HeaderValue, &'static str> {
    let value = HeaderValue::from_str(&format!("Bearer {}", token.expose()));
    let mut value = value.map_err(|_| "has characters that no header can carry")?;
    value.set_sensitive(true);
    Ok(value)
}

/// `host:port` of the admin listener, and whether it has TLS.
fn of_config(config: &Config) -> Result<(String, bool), String> {
    let mut address = listen_address(&config.admin.listen)?;
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    Ok((address.to_string(), config.admin.tls.is_some()))
}

fn of_url(url: &str) -> Result<(String, bool), String> {
    let wrong = || {
        format!("--url {url}: write http://HOST:PORT or https://HOST:PORT of the admin listener")
    };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.host().ok_or_else(wrong)?;
    let address = format!("{host}:{}", uri.port_u16().unwrap_or(9090));
    match uri.scheme_str() {
        Some("http") => Ok((address, false)),
        Some("https") => Ok((address, true)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_url_is_that_of_a_listener_or_says_what_to_write() {
        let check = |url: &str, expected: Option<(&str, bool)>| {
            let found = of_url(url).ok();
            let found = found
                .as_ref()
                .map(|(address, is_tls)| (&**address, *is_tls));
            assert_eq!(found, expected, "{url}");
        };
        check("http://127.0.0.1:9091", Some(("127.0.0.1:9091", false)));
        check("https://router/", Some(("router:9090", true)));
        check("127.0.0.1:9090", None);
        check("router", None);
        assert!(of_url("ftp://x").unwrap_err().contains("http://HOST:PORT"));
    }

    #[test]
    fn an_error_is_repeated_if_it_may_be_a_routers_and_cannot_write_to_the_terminal() {
        let of_router = br#"{"error": "call this listener as `localhost`"}"#;
        assert_eq!(reason(of_router), ": call this listener as `localhost`");
        for other in ["", "<html>", r#"{"error": {"message": "no"}}"#, "[]", "1"] {
            assert_eq!(reason(other.as_bytes()), "", "{other}");
        }
        let text = format!("\u{1b}[2Jno\n{}", "x".repeat(9_000));
        let of_another = json!({"error": text}).to_string();
        let shown = reason(of_another.as_bytes());
        assert!(shown.starts_with(": [2Jnox"), "{shown}");
        assert_eq!(shown.len(), 2 + SHOWN_REASON);
    }
}
