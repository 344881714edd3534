//! Where the list of workers comes from: the configuration, a watched file, a DNS name.

pub mod dns;
pub mod file;
pub mod fixed;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use hyper::Uri;
use hyper::header::HeaderValue;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::registry::Registry;
use super::{Member, Role, events};
use crate::secret::Secret;

/// Tells who belongs to the fleet, again and again.
pub trait Discovery: Send + 'static {
    /// Unique among the discoveries in use.
    fn name(&self) -> &'static str;

    /// The members now, the first time at once, later when they may have changed. An error leaves
    /// the fleet as it is: not being able to ask is no reason to send workers away.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Member>, String>> + Send;
}

/// Feeds the registry from a discovery for as long as this is polled.
pub async fn follow(mut discovery: impl Discovery, registry: Arc<Registry>) {
    let name = discovery.name();
    let mut last_error = None;
    loop {
        match discovery.next().await {
            Ok(members) => {
                registry.set_members(name, members);
                last_error = None;
            }
            Err(error) => {
                // Once for each new reason, not once for each try.
                if last_error.as_ref() != Some(&error) {
                    warn!(discovery = name, %error, "cannot list workers; keeping those that are known");
                    last_error = Some(error);
                }
            }
        }
    }
}

/// One worker as a file lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    /// `http://host:port`.
    pub url: String,
    /// How logs, metrics and decisions call it; the address if empty.
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub role: Role,
    /// Sent to this worker as `authorization: Bearer ...`.
    #[serde(default)]
    pub api_key: Secret,
    /// Finishes what it has and gets nothing new.
    #[serde(default)]
    pub draining: bool,
    /// How its cache events are reached.
    #[serde(default)]
    pub events: events::Listed,
    /// What an operator says of it, as where it stands.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// `http://host:port` of its Mooncake bootstrap server; its own host and the usual port if empty.
    #[serde(default)]
    pub bootstrap: String,
}

impl Listed {
    /// The key and the message of whatever is wrong.
    pub fn check(&self) -> Result<Member, (String, String)> {
        let of_url = |error| ("url".to_owned(), error);
        let address = address(&self.url).map_err(of_url)?;
        let name = if self.name.is_empty() {
            address.clone()
        } else {
            self.name.clone()
        };
        Ok(Member {
            name,
            address,
            role: self.role,
            draining: self.draining,
            authorization: bearer(&self.api_key).map_err(|error| ("api_key".to_owned(), error))?,
            events: self
                .events
                .check()
                .map_err(|(key, error)| (format!("events.{key}"), error))?,
            labels: shared(&self.labels),
            bootstrap: match &*self.bootstrap {
                "" => None,
                url => {
                    let of_bootstrap = |error| ("bootstrap".to_owned(), error);
                    let address = self::address(url).map_err(of_bootstrap)?;
                    Some(format!("http://{address}").into())
                }
            },
        })
    }
}

/// Labels as workers have them.
pub fn shared(labels: &BTreeMap<String, String>) -> BTreeMap<String, Arc<str>> {
    let labels = labels.iter();
    labels
        .map(|(name, value)| (name.clone(), value.as_str().into()))
        .collect()
}

/// The `authorization` header that carries a key.
pub fn bearer(key: &Secret) -> Result<Option<HeaderValue>, String> {
    if key.is_empty() {
        return Ok(None);
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose()))
        .map_err(|_| "api_key has characters that no header can carry".to_owned())?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// `host:port` of a worker's URL.
fn address(url: &str) -> Result<String, String> {
    let uri: Uri = url
        .parse()
        .map_err(|error| format!("`{url}` is not a URL: {error}"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some(other) => {
            return Err(format!(
                "`{url}`: workers are reached over http, not {other}"
            ));
        }
        None => return Err(format!("`{url}` has no scheme; write http://{url}")),
    }
    let host = uri
        .host()
        .filter(|host| !host.is_empty())
        .ok_or_else(|| format!("`{url}` has no host"))?;
    if uri
        .path_and_query()
        .is_some_and(|rest| rest.as_str() != "/")
    {
        return Err(format!(
            "`{url}`: give the address alone; the request's own path is used"
        ));
    }
    Ok(format!("{host}:{}", uri.port_u16().unwrap_or(80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(url: &str, expected: Result<&str, &str>) {
        let listed = Listed {
            url: url.to_owned(),
            ..Listed::default()
        };
        let found = listed.check().map(|member| member.address);
        match (&found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err((_, found)), Err(expected)) => assert!(found.contains(expected), "{found}"),
            _ => panic!("{url}: {found:?}"),
        }
    }

    #[test]
    fn a_worker_is_listed_by_host_and_port() {
        check("http://10.0.0.1:8000", Ok("10.0.0.1:8000"));
        check("http://engine/", Ok("engine:80"));
        check("http://[::1]:8000", Ok("[::1]:8000"));
        check("10.0.0.1:8000", Err("has no scheme"));
        check("https://engine", Err("not https"));
        check("http://engine/v1", Err("give the address alone"));
        check("http://", Err("is not a URL"));
    }

    #[test]
    fn a_key_with_a_line_break_is_refused() {
        assert!(bearer(&Secret::new("a\nb")).is_err());
        assert_eq!(bearer(&Secret::default()), Ok(None));
        assert_eq!(bearer(&Secret::new("k")).unwrap().unwrap(), "Bearer k");
    }
}
