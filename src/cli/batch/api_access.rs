//! Where a router's API is, and what it may ask for: the arguments of the command.

use clap::Args;
use hyper::Uri;
use hyper::header::HeaderValue;

use super::api_client::{ApiClient, CONNECT_TIMEOUT};
use crate::http::client::{self, Pool};
use crate::http::tls;

/// Where a router's API is by default.
const LOCAL: &str = "http://127.0.0.1:8080";

/// How a router's API is reached.
#[derive(Args)]
pub(super) struct ApiAccess {
    /// The router's API, with or without `/v1` at its end.
    #[arg(long, value_name = "URL", env = "OPENAI_BASE_URL", default_value = LOCAL)]
    url: String,
    /// The API key, if the router has tenants; `file:/path` is read.
    #[arg(
        long,
        value_name = "KEY",
        env = "OPENAI_API_KEY",
        hide_env_values = true
    )]
    key: Option<String>,
    /// The CA of an API with TLS; without it, those of the operating system.
    #[arg(long, value_name = "CA.CRT", default_value = "")]
    ca: String,
    /// The certificate for an API that asks for one.
    #[arg(
        long,
        value_name = "TLS.CRT",
        default_value = "",
        requires = "certificate_key"
    )]
    certificate: String,
    /// Its private key.
    #[arg(
        long,
        value_name = "TLS.KEY",
        default_value = "",
        requires = "certificate"
    )]
    certificate_key: String,
}

impl ApiAccess {
    pub(super) fn client(&self) -> Result<ApiClient, String> {
        let address = ApiAddress::of_url(&self.url)?;
        let key = match &self.key {
            None => String::new(),
            Some(key) => match key.strip_prefix("file:") {
                None => key.clone(),
                Some(path) => std::fs::read_to_string(path)
                    .map_err(|error| format!("--key file:{path}: {error}"))?,
            },
        };
        let authorization = match key.trim() {
            "" => None,
            key => Some(bearer(key).map_err(|error| format!("--key: the key {error}"))?),
        };
        let tls = address.is_tls.then(|| {
            tls::Clients::default().get(&tls::ClientSettings {
                ca: self.ca.clone(),
                certificate: self.certificate.clone(),
                key: self.certificate_key.clone(),
                ..tls::ClientSettings::default()
            })
        });
        let settings = client::Settings {
            connect_timeout: CONNECT_TIMEOUT,
            ..client::Settings::default()
        };
        let place = format!("{}{}", address.authority, address.path);
        let pool = Pool::with_tls(place, settings, tls);
        let base = address.base();
        Ok(ApiClient::new(pool, base, address.path, authorization))
    }
}

fn bearer(key: &str) -> Result<HeaderValue, &'static str> {
    let value = HeaderValue::from_str(&format!("Bearer {key}"));
    let mut value = value.map_err(|_| "has characters that no header can carry")?;
    value.set_sensitive(true);
    Ok(value)
}

/// The parts of an API's URL.
#[derive(Debug, PartialEq, Eq)]
struct ApiAddress {
    is_tls: bool,
    authority: String,
    /// What stands before `/v1`, without a slash at its end.
    path: String,
}

impl ApiAddress {
    fn of_url(url: &str) -> Result<Self, String> {
        let wrong = || {
            format!("--url {url}: write http://HOST:PORT or https://HOST:PORT of the router's API")
        };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let (is_tls, port) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => return Err(wrong()),
        };
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(wrong)?;
        if uri.query().is_some() {
            return Err(wrong());
        }
        let path = uri.path().trim_end_matches('/');
        let path = path
            .strip_suffix("/v1")
            .unwrap_or(path)
            .trim_end_matches('/');
        Ok(Self {
            is_tls,
            authority: format!("{host}:{}", uri.port_u16().unwrap_or(port)),
            path: path.to_owned(),
        })
    }

    /// As `--url` takes it, the same for every way to write it.
    fn base(&self) -> String {
        let scheme = if self.is_tls { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_an_url_leads_to_the_same_api() {
        let check = |url: &str, expected: Option<&str>| {
            let found = ApiAddress::of_url(url).ok().map(|address| address.base());
            assert_eq!(found.as_deref(), expected, "{url}");
        };
        for url in [
            "http://router",
            "http://router:80/",
            "http://router/v1",
            "http://router/v1/",
        ] {
            check(url, Some("http://router:80"));
        }
        check("https://router/llm/v1", Some("https://router:443/llm"));
        check("http://[::1]:8080", Some("http://[::1]:8080"));
        for wrong in ["router:8080", "router", "ftp://x", "http://x?y=1", ""] {
            check(wrong, None);
        }
    }
}
