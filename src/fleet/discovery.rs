//! Where the list of workers comes from: the configuration, a watched file, a DNS name, the Kubernetes API.

pub mod dns;
pub mod file;
pub mod kubernetes;

use std::collections::BTreeMap;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;

use hyper::Uri;
use hyper::header::HeaderValue;
use prometheus::IntCounterVec;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::sync::oneshot;
use tracing::warn;

use super::events::{Events, EventsSpec};
use super::registry::Registry;
use super::{Member, ResponsesApi, Role};
use crate::http::client::{HTTP2, UNIX};
use crate::http::supervisor::Supervisor;
use crate::http::tls::ClientSettings;
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::secret::Secret;

pub trait Discovery: Send + 'static {
    /// Unique among the discoveries in use.
    fn name(&self) -> &str;

    /// Returns all members: the first time immediately, then whenever they may have changed. After an error the fleet
    /// stays as it is, because a discovery that fails says nothing about the workers.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Member>, String>> + Send;
}

/// Updates the registry from a discovery, for ever. `answered` learns that the discovery listed its members, or could
/// not, for the first time.
pub async fn follow(
    mut discovery: impl Discovery,
    registry: Arc<Registry>,
    failures: IntCounterVec,
    answered: oneshot::Sender<()>,
    supervisor: Supervisor,
) {
    let name = discovery.name().to_owned();
    let mut log = LogOnce::default();
    let mut answered = Some(answered);
    loop {
        let step = async {
            match discovery.next().await {
                Ok(members) => {
                    registry.set_members(&name, members);
                    log.reset();
                }
                Err(error) => {
                    failures.with_label_values(&[&*name]).inc();
                    if log.should_log(observe::now(), &error) {
                        warn!(discovery = %name, %error, "cannot list workers; keeping the current ones");
                    }
                }
            }
        };
        // After a panic the workers that it listed before stay, as after an error.
        supervisor.attempt("discovery", step).await;
        if let Some(answered) = answered.take() {
            let _ = answered.send(());
        }
    }
}

/// One worker as a configuration lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerSpec {
    /// `http://host:port` or `https://host:port`, with a path such as `/engine-0` if the worker's own paths are below
    /// it. `h2c://host:port` if the worker speaks HTTP/2 without TLS; `unix:/run/vllm.sock` for a socket of this host.
    pub url: String,
    /// The worker's name in logs, metrics and decisions. Empty: its `host:port`, with the path.
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
    /// TLS, for an `https://` URL. Left out: that of the discovery entry, else the CAs of the operating system and no
    /// client certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ClientSettings>,
    /// How the worker's KV events are received. Left out: as the discovery entry says, else `from: auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<EventsSpec>,
    /// How the worker is sent requests of the Responses API. Left out: as the discovery entry says, else `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub responses: Option<ResponsesApi>,
    /// Labels such as `zone: a`, for `prefill_decode.topology`; added to those of the discovery entry.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The worker's Mooncake bootstrap server as `http://host:port`. Empty: its own host and
    /// `prefill_decode.advanced.bootstrap_port`.
    #[serde(default)]
    pub bootstrap: String,
    /// Prompt tokens that the worker computes in a second, such as 12000. Left out: as the discovery entry says, else
    /// it is learnt from answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_rate: Option<NonZeroU32>,
    /// Answers that the worker generates at the same time: vLLM's `--max-num-seqs`, SGLang's `--max-running-requests`. Left
    /// out: as the discovery entry says, else it is learnt: the most requests, eight or more, that the engine ran while others waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<NonZeroU32>,
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
    /// TLS. Left out: workers without a URL are connected without TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<ClientSettings>,
    /// How the workers' KV events are received.
    pub events: EventsSpec,
    /// How the workers are sent requests of the Responses API: `native`, `chat` or `auto`.
    pub responses: ResponsesApi,
    /// Labels such as `zone: a`, for `prefill_decode.topology`.
    pub labels: BTreeMap<String, String>,
    /// Prompt tokens that each of the workers computes in a second, such as 12000. Left out: it is learnt from
    /// answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_rate: Option<NonZeroU32>,
    /// Answers that each of the workers generates at the same time: vLLM's `--max-num-seqs`, SGLang's
    /// `--max-running-requests`. Left out: it is learnt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<NonZeroU32>,
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
            tls: check_tls(self.tls.as_ref())?,
            events: check_events(&self.events)?,
            responses: self.responses,
            labels: shared_labels(&self.labels),
            bootstrap: None,
            prefill_rate: self.prefill_rate,
            slots: self.slots,
            identity: None,
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
        let url = WorkerUrl::parse(&self.url).map_err(named("url"))?;
        let mut member = defaults.member(url.address)?;
        if self.tls.is_some() {
            member.tls = check_tls(self.tls.as_ref())?;
        }
        match (url.is_https, &member.tls) {
            (true, None) => member.tls = Some(ClientSettings::default()),
            (false, Some(_)) => {
                let message = format!(
                    "`{}` is not encrypted although `tls` is set; write https://",
                    self.url
                );
                return Err(("url".to_owned(), message));
            }
            (true, Some(_)) | (false, None) => {}
        }
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
        if let Some(responses) = self.responses {
            member.responses = responses;
        }
        if self.prefill_rate.is_some() {
            member.prefill_rate = self.prefill_rate;
        }
        if self.slots.is_some() {
            member.slots = self.slots;
        }
        member.draining = self.draining;
        member.labels.extend(shared_labels(&self.labels));
        if !self.bootstrap.is_empty() {
            let url = WorkerUrl::parse(&self.bootstrap).map_err(named("bootstrap"))?;
            let scheme = if url.is_https { "https" } else { "http" };
            member.bootstrap = Some(format!("{scheme}://{}", url.address).into());
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

fn check_tls(tls: Option<&ClientSettings>) -> Result<Option<ClientSettings>, (String, String)> {
    if let Some(tls) = tls {
        let named = |error| ("tls.server_name".to_owned(), error);
        tls.check_server_name().map_err(named)?;
    }
    Ok(tls.cloned())
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

#[derive(Debug)]
struct WorkerUrl {
    is_https: bool,
    /// As [`Pool::new`](crate::http::client::Pool::new) takes it.
    address: String,
}

impl WorkerUrl {
    fn parse(url: &str) -> Result<Self, String> {
        if url.is_empty() {
            return Err("is missing; write http://HOST:PORT".to_owned());
        }
        if let Some(path) = url.strip_prefix(UNIX) {
            // Also `unix:///run/vllm.sock`.
            let path = format!("/{}", path.trim_start_matches('/'));
            if !url[UNIX.len()..].starts_with('/') || path == "/" {
                return Err(format!(
                    "`{url}`: write the whole path of a socket, such as unix:/run/vllm.sock"
                ));
            }
            return Ok(Self {
                is_https: false,
                address: format!("{UNIX}{path}"),
            });
        }
        let uri: Uri = url
            .parse()
            .map_err(|error| format!("`{url}` is not a URL: {error}"))?;
        let (is_https, prefix) = match uri.scheme_str() {
            Some("http") => (false, ""),
            Some("https") => (true, ""),
            Some("h2c") => (false, HTTP2),
            Some(other) => {
                return Err(format!(
                    "`{url}`: the scheme must be http, https, h2c or unix, not {other}"
                ));
            }
            None => return Err(format!("`{url}` has no scheme; write http://{url}")),
        };
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(|| format!("`{url}` has no host"))?;
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return Err("must not have a user or password; use `api_key`".to_owned());
        }
        if uri.query().is_some() {
            return Err(format!("`{url}`: a query is not allowed"));
        }
        let path = uri.path().trim_end_matches('/');
        if has_own_path(path) {
            return Err(format!(
                "`{url}`: leave `/v1` and what follows out; requests have it in their own paths"
            ));
        }
        let is_port_written = authority
            .rsplit_once(host)
            .is_some_and(|(_, rest)| !rest.is_empty());
        let port = match uri.port_u16() {
            None | Some(0) if is_port_written => {
                return Err(format!("`{url}`: the port must be from 1 to 65535"));
            }
            Some(port) => port,
            None if is_https => 443,
            None => 80,
        };
        Ok(Self {
            is_https,
            address: format!("{prefix}{host}:{port}{path}"),
        })
    }
}

/// The paths of engines' endpoints, below `/v1`.
const ENDPOINTS: [&str; 9] = [
    "chat/completions",
    "completions",
    "embeddings",
    "messages",
    "messages/count_tokens",
    "models",
    "rerank",
    "responses",
    "score",
];

/// True if a worker's path ends with `/v1`, or with an endpoint's path. Other paths are prefixes, also such that have a `v1`.
fn has_own_path(path: &str) -> bool {
    let Some((_, after)) = path.rsplit_once("/v1") else {
        return false;
    };
    match after.strip_prefix('/') {
        None => after.is_empty(),
        Some(endpoint) => ENDPOINTS.contains(&endpoint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::{member, registry};

    /// Lists a worker, panics, and lists another worker.
    struct PanicsOnce {
        looks: u32,
    }

    impl Discovery for PanicsOnce {
        fn name(&self) -> &str {
            "test"
        }

        async fn next(&mut self) -> Result<Vec<Member>, String> {
            self.looks += 1;
            match self.looks {
                1 => Ok(vec![member("a")]),
                2 => panic!("on purpose"),
                3 => Ok(vec![member("b")]),
                _ => std::future::pending().await,
            }
        }
    }

    #[tokio::test]
    async fn a_discovery_that_panics_is_asked_again() {
        let fleet = registry(&[]);
        let metrics = observe::metrics::Registry::default();
        let failures = metrics.counters("failures", "Failures.", &["discovery"]);
        let (answered, _answer) = oneshot::channel();
        let discovery = PanicsOnce { looks: 0 };
        let supervisor = Supervisor::without_pause();
        let following = follow(discovery, fleet.clone(), failures, answered, supervisor);
        let is_listed = || {
            let snapshot = fleet.snapshot();
            let mut workers = snapshot.workers.iter();
            workers.any(|status| &*status.worker.name == "b")
        };
        let listed = async {
            while !is_listed() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = following => unreachable!("it never ends"),
            () = listed => {}
        }
    }

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
        check("https://engine", Ok("engine:443"));
        check("https://engine/", Ok("engine:443"));
        check(
            "ftp://engine",
            Err("must be http, https, h2c or unix, not ftp"),
        );
        check("http://engine/pool/0/", Ok("engine:80/pool/0"));
        check("https://engine:8443/pool", Ok("engine:8443/pool"));
        let own_path = Err("leave `/v1` and what follows out");
        check("http://engine/v1", own_path);
        check("http://engine/pool/v1/", own_path);
        check("http://engine/v1/chat/completions", own_path);
        check("http://engine/pool/v1/models/", own_path);
        check("http://engine/v1/completions", own_path);
        check("http://engine/v1/messages", own_path);
        check("http://engine/v1/responses", own_path);
        check("http://engine/v10", Ok("engine:80/v10"));
        check("http://gw/v1/models/llama", Ok("gw:80/v1/models/llama"));
        check(
            "http://k8s/api/v1/namespaces/n/services/e/proxy",
            Ok("k8s:80/api/v1/namespaces/n/services/e/proxy"),
        );
        check("http://engine?a=b", Err("a query is not allowed"));
        check("http://user:password@engine", Err("must not have a user"));
        check("http://", Err("is not a URL"));
        check("", Err("is missing"));
        check("http://h:99999", Err("from 1 to 65535"));
        check("http://h:", Err("from 1 to 65535"));
        check("http://[::1]:0", Err("from 1 to 65535"));
        check("http://[::1]", Ok("[::1]:80"));
        check("h2c://engine:8000/pool", Ok("h2c://engine:8000/pool"));
        check("h2c://engine", Ok("h2c://engine:80"));
        check("unix:/run/vllm.sock", Ok("unix:/run/vllm.sock"));
        check("unix:///run/vllm.sock", Ok("unix:/run/vllm.sock"));
        check("unix:vllm.sock", Err("write the whole path"));
        check("unix:", Err("write the whole path"));
    }

    #[test]
    fn tls_follows_the_scheme_of_the_url() {
        let own = ClientSettings {
            server_name: "engine.example.com".to_owned(),
            ..ClientSettings::default()
        };
        let entry = WorkerDefaults {
            tls: Some(ClientSettings {
                ca: "/ca".to_owned(),
                ..ClientSettings::default()
            }),
            ..WorkerDefaults::default()
        };
        let none = WorkerDefaults::default();
        let tls = |url: &str, tls: Option<&ClientSettings>, defaults: &WorkerDefaults| {
            let worker = WorkerSpec {
                url: url.to_owned(),
                tls: tls.cloned(),
                ..WorkerSpec::default()
            };
            worker.member(defaults).map(|member| member.tls)
        };
        assert_eq!(tls("http://h", None, &none), Ok(None));
        let system = Some(ClientSettings::default());
        assert_eq!(tls("https://h", None, &none), Ok(system));
        assert_eq!(tls("https://h", None, &entry), Ok(entry.tls.clone()));
        assert_eq!(tls("https://h", Some(&own), &entry), Ok(Some(own.clone())));
        for (tls_of_worker, defaults) in [(Some(&own), &none), (None, &entry)] {
            let (key, error) = tls("http://h", tls_of_worker, defaults).unwrap_err();
            assert_eq!(key, "url");
            assert!(error.contains("write https://"), "{error}");
        }
        let wrong = ClientSettings {
            server_name: "no name".to_owned(),
            ..ClientSettings::default()
        };
        let (key, _) = tls("https://h", Some(&wrong), &none).unwrap_err();
        assert_eq!(key, "tls.server_name");
    }

    #[test]
    fn a_key_with_a_line_break_is_refused() {
        assert!(bearer(&Secret::new("a\nb")).is_err());
        assert_eq!(bearer(&Secret::default()), Ok(None));
        assert_eq!(bearer(&Secret::new("k")).unwrap().unwrap(), "Bearer k");
    }
}
