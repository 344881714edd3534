//! Reads the pages of the admin listener.

use std::sync::Arc;
use std::time::Duration;

use hyper::Uri;
use hyper::header::HeaderValue;

use super::figures::Sample;
use super::metrics_text::Metrics;
use super::rows::Fleet;
use crate::http::client::{self, Pool};
use crate::http::tls;
use crate::observe;

/// `/metrics` of a fleet of 1,000 workers has some megabytes.
const MAX_PAGE_BYTES: usize = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Admin {
    url: String,
    pool: Arc<Pool>,
    token: Option<HeaderValue>,
}

impl Admin {
    pub(super) fn new(
        url: &str,
        token: &str,
        ca: &str,
        certificate: &str,
        key: &str,
    ) -> Result<Self, String> {
        let (address, is_tls) = address(url)?;
        let tls = is_tls.then(|| {
            tls::Clients::default().get(&tls::ClientSettings {
                ca: ca.to_owned(),
                certificate: certificate.to_owned(),
                key: key.to_owned(),
                ..tls::ClientSettings::default()
            })
        });
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            pool: Pool::with_tls(address, client::Settings::default(), tls),
            token: bearer(token)?,
        })
    }

    #[cfg(feature = "top")]
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// What the router says of itself now.
    pub(super) async fn sample(&self) -> Result<Sample, String> {
        let fleet = self.get("/fleet").await?;
        let metrics = self.get("/metrics").await?;
        let fleet: Fleet = serde_json::from_slice(&fleet)
            .map_err(|error| format!("{}/fleet: is no page of a router: {error}", self.url))?;
        let metrics = Metrics::parse(&String::from_utf8_lossy(&metrics));
        Ok(Sample {
            at: observe::now(),
            fleet,
            metrics,
        })
    }

    async fn get(&self, path: &str) -> Result<bytes::Bytes, String> {
        let failed = |error: &dyn std::fmt::Display| {
            format!(
                "{}{path}: {error}; name the router's admin listener with --url (and --ca, --token)",
                self.url
            )
        };
        let page = self.pool.get(path, self.token.as_ref(), MAX_PAGE_BYTES);
        let page = tokio::time::timeout(TIMEOUT, page).await;
        let page = page.map_err(|_| failed(&"no answer within 10 s"))?;
        let (status, body) = page.map_err(|error| failed(&error))?;
        match status.is_success() {
            true => Ok(body),
            false => Err(failed(&format!("answered {status}"))),
        }
    }
}

fn bearer(token: &str) -> Result<Option<HeaderValue>, String> {
    let token = match token.strip_prefix("file:") {
        None => token.to_owned(),
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| format!("--token file:{path}: {error}"))?,
    };
    let token = token.trim();
    if token.is_empty() {
        return Ok(None);
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| "--token: has characters that no header can carry".to_owned())?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// `host:port` of the URL, and whether it has TLS.
fn address(url: &str) -> Result<(String, bool), String> {
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
    use super::*;

    #[test]
    fn an_url_is_that_of_a_listener_or_says_what_to_write() {
        let check = |url: &str, expected: Option<(&str, bool)>| {
            let found = address(url).ok();
            let found = found
                .as_ref()
                .map(|(address, is_tls)| (&**address, *is_tls));
            assert_eq!(found, expected, "{url}");
        };
        check("http://127.0.0.1:9091", Some(("127.0.0.1:9091", false)));
        check("https://router/", Some(("router:9090", true)));
        check("127.0.0.1:9090", None);
        check("router", None);
        assert!(address("ftp://x").unwrap_err().contains("http://HOST:PORT"));
    }
}
