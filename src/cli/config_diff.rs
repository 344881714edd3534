//! `warmroute config diff`: what a file would change. Secrets are compared where both sides are known, and never shown.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use hyper::Uri;
use hyper::header::HeaderValue;
use serde_json::Value;

use crate::config::diff::Comparable;
use crate::config::{Config, Effect};
use crate::http::client::{self, Pool};
use crate::http::listen_address::listen_address;
use crate::http::tls;

/// As of `diff` and `kubectl diff`.
const SAME: u8 = 0;
const DIFFERS: u8 = 1;
const TROUBLE: u8 = 2;

/// A configuration of 10,000 workers with all defaults has some megabytes.
const MAX_PAGE_BYTES: usize = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Show what a file would change, and what of it a running router takes over without a restart. Exit code 0: nothing;
/// 1: something; 2: a file is wrong, or the router cannot be asked.
#[derive(Args)]
pub(super) struct ConfigDiff {
    /// The new configuration.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The configuration that it is compared with; without it, that of the running router.
    #[arg(long, value_name = "OTHER", conflicts_with = "url")]
    with: Option<PathBuf>,
    /// The admin listener of the running router; without it, `admin.listen` of FILE. The token is one of FILE's `admin`, too.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The CA of an admin listener with TLS; without it, those of the operating system.
    #[arg(
        long,
        value_name = "CA.CRT",
        default_value = "",
        conflicts_with = "with"
    )]
    ca: String,
    /// The certificate for an admin listener that asks for one.
    #[arg(
        long,
        value_name = "TLS.CRT",
        default_value = "",
        requires = "key",
        conflicts_with = "with"
    )]
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

impl ConfigDiff {
    pub(super) async fn run(self) -> ExitCode {
        let found = match self.compare().await {
            Ok(found) => found,
            Err(problem) => {
                eprintln!("{}", problem.trim_end());
                return ExitCode::from(TROUBLE);
            }
        };
        // The reader of the output may want no more of it.
        let _ = io::stdout().write_all(found.text.as_bytes());
        ExitCode::from(if found.differs { DIFFERS } else { SAME })
    }

    async fn compare(&self) -> Result<Found, String> {
        let new = Config::load(&self.file).map_err(|problems| problems.to_string())?;
        let comparable = Comparable::of(&new);
        let changes = match &self.with {
            Some(other) => {
                let old = Config::load(other).map_err(|problems| problems.to_string())?;
                Comparable::of(&old).changes(&comparable)
            }
            None => {
                let running = self.running(&new).await?;
                running.changes(&comparable.without_digests())
            }
        };
        let mut text = String::new();
        for change in &changes {
            text += &format!("{change}\n");
        }
        let restarts = changes.iter().filter(|it| it.effect == Effect::Restart);
        text += &match (changes.len(), restarts.count()) {
            (0, _) => "no changes".to_owned(),
            (count, 0) => format!("{count} to change, with a reload"),
            (count, restarts) => format!(
                "{count} to change; {restarts} of them need a restart, so that a reload refuses the file as a whole"
            ),
        };
        text += match self.with {
            Some(_) => "\n",
            None => " (secrets of the running router are not compared)\n",
        };
        Ok(Found {
            text,
            differs: !changes.is_empty(),
        })
    }

    /// The configuration of the running router.
    async fn running(&self, new: &Config) -> Result<Comparable, String> {
        let (address, is_tls) = self.address(new)?;
        let scheme = if is_tls { "https" } else { "http" };
        let failed = |error: &dyn std::fmt::Display| {
            format!(
                "{scheme}://{address}/config: {error}; name the router's admin listener with --url (and --ca), or \
                 compare with a file by --with"
            )
        };
        let tokens = &new.admin.tokens;
        let tokens = tokens.read.iter().chain(&tokens.operate);
        let token = std::iter::once(&new.admin.token)
            .chain(tokens)
            .find(|token| !token.is_empty())
            .map(|token| HeaderValue::from_str(&format!("Bearer {}", token.expose())));
        let token = token.transpose().map_err(|error| failed(&error))?;
        let tls = is_tls.then(|| {
            tls::Clients::default().get(&tls::ClientSettings {
                ca: self.ca.clone(),
                certificate: self.certificate.clone(),
                key: self.key.clone(),
                ..tls::ClientSettings::default()
            })
        });
        let pool = Pool::with_tls(address.clone(), client::Settings::default(), tls);
        let page = pool.get("/config", token.as_ref(), MAX_PAGE_BYTES);
        let page = tokio::time::timeout(TIMEOUT, page).await;
        let page = page.map_err(|_| failed(&"no answer within 10 s"))?;
        let (status, body) = page.map_err(|error| failed(&error))?;
        if !status.is_success() {
            return Err(failed(&format!("answered {status}")));
        }
        let page: Value = serde_json::from_slice(&body).map_err(|error| failed(&error))?;
        match page.get("config") {
            Some(config) => Ok(Comparable::from_shown(config.clone())),
            None => Err(failed(&"is no configuration")),
        }
    }

    /// `host:port` of the admin listener, and whether it has TLS.
    fn address(&self, new: &Config) -> Result<(String, bool), String> {
        let Some(url) = &self.url else {
            let mut address = listen_address(&new.admin.listen)?;
            if address.ip().is_unspecified() {
                address.set_ip(match address.ip() {
                    IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                    IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
                });
            }
            return Ok((address.to_string(), new.admin.tls.is_some()));
        };
        let wrong = || {
            format!(
                "--url {url}: write http://HOST:PORT or https://HOST:PORT of the admin listener"
            )
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
}

struct Found {
    text: String,
    differs: bool,
}
