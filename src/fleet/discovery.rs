//! Where the list of workers comes from: the configuration, a watched file, a DNS name.

pub mod dns;
pub mod file;
pub mod static_list;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use hyper::Uri;
use hyper::header::HeaderValue;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use tracing::warn;

use super::events::{Events, EventsSpec};
use super::registry::Registry;
use super::{Member, Role};
use crate::secret::Secret;

/// Lists the members of the fleet.
pub trait Discovery: Send + 'static {
    /// Unique among the discoveries in use.
    fn name(&self) -> &str;

    /// Returns all members: the first time immediately, then whenever they may have changed. After an error the fleet
    /// stays as it is, because a discovery that fails says nothing about the workers.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Member>, String>> + Send;
}

/// Updates the registry from a discovery, for ever.
pub async fn follow(mut discovery: impl Discovery, registry: Arc<Registry>) {
    let name = discovery.name().to_owned();
    let mut last_error = None;
    loop {
        match discovery.next().await {
            Ok(members) => {
                registry.set_members(&name, members);
                last_error = None;
            }
            Err(error) => {
                // Log each reason once, not every attempt.
                if last_error.as_ref() != Some(&error) {
                    warn!(discovery = %name, %error, "cannot list workers; keeping the current ones");
                    last_error = Some(error);
                }
            }
        }
    }
}

/// One worker as a configuration lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerSpec {
    /// `http://host:port`.
    pub url: String,
    /// The worker's name in logs, metrics and decisions. Empty: its `host:port`.
    #[serde(default)]
    pub name: String,
    /// What the engine was started as; others than `both` need `prefill_decode.connector`. Left out: that of the
    /// discovery entry, else `both`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Sent to this worker as `authorization: Bearer ...`: text, `${NAME}` or `file:/path`. Empty: that of the
    /// discovery entry; without any, the client's own header is passed on.
    #[serde(default)]
    pub api_key: Secret,
    /// The worker finishes its requests and gets no new ones.
    #[serde(default)]
    pub draining: bool,
    /// How the worker's KV events are received. Left out: as the discovery entry says, else `from: auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<EventsSpec>,
    /// Labels such as `zone: a`, for `prefill_decode.topology`; added to those of the discovery entry.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The worker's Mooncake bootstrap server as `http://host:port`. Empty: its own host and
    /// `prefill_decode.advanced.bootstrap_port`.
    #[serde(default)]
    pub bootstrap: String,
}

/// What a discovery entry says of all its workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct WorkerDefaults {
    /// What the engines were started as; others than `both` need `prefill_decode.connector`.
    pub role: Role,
    /// Sent to the workers as `authorization: Bearer ...`: text, `${NAME}` or `file:/path`. Empty: the client's
    /// own header is passed on.
    pub api_key: Secret,
    /// How the workers' KV events are received.
    pub events: EventsSpec,
    /// Labels such as `zone: a`, for `prefill_decode.topology`.
    pub labels: BTreeMap<String, String>,
}

impl WorkerDefaults {
    /// A worker of which only the address is listed. An error is a key and a message.
    pub fn member(&self, address: String) -> Result<Member, (String, String)> {
        Ok(Member {
            name: address.clone(),
            address,
            role: self.role,
            draining: false,
            authorization: bearer(&self.api_key).map_err(|error| ("api_key".to_owned(), error))?,
            events: check_events(&self.events)?,
            labels: shared_labels(&self.labels),
            bootstrap: None,
        })
    }
}

impl WorkerSpec {
    /// The worker as listed. An error is a key and a message.
    pub fn member(&self, defaults: &WorkerDefaults) -> Result<Member, (String, String)> {
        let named = |key: &str| {
            let key = key.to_owned();
            move |error| (key, error)
        };
        let mut member = defaults.member(address(&self.url).map_err(named("url"))?)?;
        if !self.name.is_empty() {
            member.name.clone_from(&self.name);
        }
        if let Some(role) = self.role {
            member.role = role;
        }
        if !self.api_key.is_empty() {
            member.authorization = bearer(&self.api_key).map_err(named("api_key"))?;
        }
        if let Some(events) = &self.events {
            member.events = check_events(events)?;
        }
        member.draining = self.draining;
        member.labels.extend(shared_labels(&self.labels));
        if !self.bootstrap.is_empty() {
            let address = address(&self.bootstrap).map_err(named("bootstrap"))?;
            member.bootstrap = Some(format!("http://{address}").into());
        }
        Ok(member)
    }
}

impl From<String> for WorkerSpec {
    fn from(url: String) -> Self {
        Self {
            url,
            ..Self::default()
        }
    }
}

/// The forms in which a worker is written: its URL, or a map.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum UrlOrMap {
    Url(String),
    Map(Box<WorkerSpec>),
}

/// Reads workers from any of their forms.
pub fn urls_or_maps<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<WorkerSpec>, D::Error> {
    let forms = Vec::<UrlOrMap>::deserialize(deserializer)?;
    let workers = forms.into_iter().map(|form| match form {
        UrlOrMap::Url(url) => WorkerSpec::from(url),
        UrlOrMap::Map(worker) => *worker,
    });
    Ok(workers.collect())
}

fn check_events(events: &EventsSpec) -> Result<Events, (String, String)> {
    let prefixed = |(key, error)| (format!("events.{key}"), error);
    events.check().map_err(prefixed)
}

/// Labels with shared values, as [`Member`] has them.
fn shared_labels(labels: &BTreeMap<String, String>) -> BTreeMap<String, Arc<str>> {
    let labels = labels.iter();
    labels
        .map(|(name, value)| (name.clone(), value.as_str().into()))
        .collect()
}

/// The `authorization` header with an API key.
fn bearer(key: &Secret) -> Result<Option<HeaderValue>, String> {
    if key.is_empty() {
        return Ok(None);
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose()))
        .map_err(|_| "api_key has characters that a header cannot contain".to_owned())?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// `host:port` of a worker's URL.
fn address(url: &str) -> Result<String, String> {
    if url.is_empty() {
        return Err("is missing; write http://HOST:PORT".to_owned());
    }
    let uri: Uri = url
        .parse()
        .map_err(|error| format!("`{url}` is not a URL: {error}"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some(other) => {
            return Err(format!("`{url}`: the scheme must be http, not {other}"));
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
            "`{url}`: a path is not allowed; each request has its own path"
        ));
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let is_port_written = authority
        .rsplit_once(host)
        .is_some_and(|(_, rest)| !rest.is_empty());
    match uri.port_u16() {
        None | Some(0) if is_port_written => {
            Err(format!("`{url}`: the port must be from 1 to 65535"))
        }
        port => Ok(format!("{host}:{}", port.unwrap_or(80))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(url: &str, expected: Result<&str, &str>) {
        let worker = WorkerSpec::from(url.to_owned());
        let found = worker
            .member(&WorkerDefaults::default())
            .map(|member| member.address);
        match (&found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err((_, found)), Err(expected)) => assert!(found.contains(expected), "{found}"),
            _ => panic!("{url}: {found:?}"),
        }
    }

    #[test]
    fn a_url_becomes_host_and_port() {
        check("http://10.0.0.1:8000", Ok("10.0.0.1:8000"));
        check("http://engine/", Ok("engine:80"));
        check("http://[::1]:8000", Ok("[::1]:8000"));
        check("10.0.0.1:8000", Err("has no scheme"));
        check("https://engine", Err("must be http, not https"));
        check("http://engine/v1", Err("a path is not allowed"));
        check("http://", Err("is not a URL"));
        check("", Err("is missing"));
        check("http://h:99999", Err("from 1 to 65535"));
        check("http://h:", Err("from 1 to 65535"));
        check("http://[::1]:0", Err("from 1 to 65535"));
        check("http://[::1]", Ok("[::1]:80"));
    }

    #[test]
    fn a_key_with_a_line_break_is_refused() {
        assert!(bearer(&Secret::new("a\nb")).is_err());
        assert_eq!(bearer(&Secret::default()), Ok(None));
        assert_eq!(bearer(&Secret::new("k")).unwrap().unwrap(), "Bearer k");
    }
}
