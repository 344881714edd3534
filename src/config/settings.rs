//! The keys of the configuration, with their defaults; each part has its own settings.

use std::collections::BTreeSet;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::discovery::DiscoveryEntry;
use super::model::ModelOverride;
use super::source::Source;
use super::tokenizer::Loaded;
use crate::fleet::discovery::{UrlOrMap, WorkerDefaults, WorkerSpec, urls_or_maps};
use crate::fleet::{Member, circuit_breaker, health, model_lookup, registry};
use crate::http::{client, server, tls};
use crate::kv::subscriber::joins;
use crate::kv::{grpc, indexes, predicted, stream, tokenizer_check, unconfirmed, zmq};
use crate::openai::tenant::TenantSpec;
use crate::relay;
use crate::routing;
use crate::secret::Secret;
use crate::units::DurationText;
use crate::{admin, api, batches, jwt, limits, observe, peers, queue, responses, traces, webhooks};

/// The configuration of `warmroute serve`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Config {
    /// The listener for clients.
    pub api: Api,
    /// The endpoint picker: gateways ask which worker is to get a request, and send it themselves.
    pub endpoint_picker: api::endpoint_picker::Settings,
    /// The listener for operators: metrics, health, fleet, explain, drain.
    pub admin: admin::Settings,
    /// The engines: URLs such as `http://10.0.0.11:8000`, or maps. The short form of one `static` entry of
    /// `discovery`.
    #[serde(deserialize_with = "urls_or_maps")]
    #[schemars(with = "Vec<UrlOrMap>")]
    pub workers: Vec<WorkerSpec>,
    /// Where workers come from besides `workers`; any number of entries of each kind.
    pub discovery: Vec<DiscoveryEntry>,
    /// Health checks and circuit breakers of workers, and the connections to them.
    pub fleet: Fleet,
    /// How requests are spread over the workers of their model.
    pub routing: routing::Settings,
    /// What a model has of its own: its tokenizer, and any setting that differs from those in `routing`.
    pub models: Vec<ModelOverride>,
    /// KV events: what engines report of their prefix caches. How each worker's are received is said in its `events`.
    pub kv_events: KvEvents,
    /// Prediction of what workers have cached from the prompts that this router sent them: for workers without KV
    /// events and prompts without token ids.
    pub predicted: predicted::Settings,
    /// Tokenization of prompts, for models that have a tokenizer.
    pub tokenization: relay::prompt::tokens::Settings,
    /// Time-outs and retries of requests.
    pub requests: relay::Settings,
    /// Waiting in the router for the worker where a request costs the least. `off`: requests are sent to it at once, however
    /// much it has to do.
    pub queue: queue::Waiting,
    /// Disaggregated prefill/decode: a prefill worker computes a request's prompt, and a decode worker fetches the KV
    /// blocks and generates.
    pub prefill_decode: relay::prefill_decode::Settings,
    /// Who may send requests, by key or token (`jwt`). Without tenants no key is asked for, what clients send is passed on, and
    /// all stored responses belong to everybody.
    pub tenants: Vec<TenantSpec>,
    /// Gives every tenant without a `cache_salt` one that is made of its name and this key, so that no tenant can find
    /// out what others have cached. The same for all replicas, at least 16 characters: text, `${NAME}` or
    /// `file:/path`. Empty: none.
    pub tenant_salt_key: Secret,
    /// JSON Web Tokens, which clients may send instead of a tenant's key. Left out: none are accepted.
    pub jwt: Option<jwt::Settings>,
    /// How the limits of tenants count, and where.
    pub limits: limits::Settings,
    /// Replicas of this router that share what they know.
    pub peers: peers::Settings,
    /// The Responses API.
    pub responses: responses::Settings,
    /// Work that can wait: the Files and Batches APIs, and Anthropic's Message Batches. Left out: none.
    pub batches: batches::Settings,
    /// Reports of the end of background responses and batches to endpoints of tenants.
    pub webhooks: webhooks::Settings,
    /// The log, on standard error.
    pub log: observe::Settings,
    /// What tenants use, for billing.
    pub usage: relay::account::usage::Settings,
    /// OpenTelemetry traces of requests, sent to a collector over OTLP. Left out: none, unless OpenTelemetry's
    /// environment variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`, ask for them.
    pub traces: Option<traces::Settings>,
    /// Changes of this configuration without a restart.
    pub reload: Reload,
    /// Threads of the process.
    pub runtime: Runtime,
    /// Tokenizers that the check loaded; the start takes them from here.
    #[serde(skip)]
    pub loaded: Loaded,
    /// Where it came from.
    #[serde(skip)]
    pub source: Source,
}

/// The listener for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Api {
    /// Address and port for clients, such as `:8080` (all addresses), `127.0.0.1:8080` or `localhost:8080`. It
    /// speaks HTTP/1.1 and HTTP/2; without `tls`, HTTP/2 to clients that begin with it.
    pub listen: String,
    /// TLS. Left out: connections are not encrypted.
    pub tls: Option<tls::ServerSettings>,
    /// After SIGTERM or `POST /drain` the router is not ready any more, but takes requests for this long, until load
    /// balancers have noticed. A second signal ends the wait.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub drain_delay: Duration,
    /// After `drain_delay` running requests may take this long; in its last 2 s, or its last half if it is shorter than
    /// 4 s, what still runs ends with an error. Both and 5 s to spare are to fit into the pod's
    /// `terminationGracePeriodSeconds`, which is 30 s by default.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub drain_timeout: Duration,
    #[serde(flatten)]
    pub requests: api::Settings,
    /// Settings for experts: the connections of clients.
    pub advanced: server::Settings,
}

impl Default for Api {
    fn default() -> Self {
        Self {
            listen: ":8080".to_owned(),
            tls: None,
            // Endpoints of Kubernetes follow readiness within a second or two.
            drain_delay: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(20),
            requests: api::Settings::default(),
            advanced: server::Settings::default(),
        }
    }
}

/// Health checks, circuit breakers and connections of workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Fleet {
    /// Health checks of the workers.
    pub health: health::Settings,
    /// Protects clients from a worker whose requests fail: while its circuit breaker is open, it gets none.
    pub circuit_breaker: circuit_breaker::Settings,
    /// Adapters that are loaded while the router runs: a request for a model that no worker is known to serve has all
    /// workers asked again, and waits for their answers.
    pub model_lookup: model_lookup::Settings,
    /// Settings for experts.
    pub advanced: client::Settings,
}

/// KV events: what engines report of their prefix caches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvEvents {
    #[serde(flatten)]
    pub index: indexes::Settings,
    /// How KV events are received. No keys.
    #[serde(skip)]
    pub advanced: KvEventsAdvanced,
}

/// How KV events are received, the same in all fleets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvEventsAdvanced {
    /// Compares the router's tokens with the engine's: after a request, the blocks of its prompt must be among
    /// those that the engine reports. On a tokenizer mismatch the KV events of the model or worker are not used.
    pub tokenizer_check: tokenizer_check::Settings,
    /// Blocks of prompts that were sent to a worker and are not confirmed by its KV events yet. They count as
    /// cached there, so that requests with the same prefix follow at once.
    pub unconfirmed: unconfirmed::Settings,
    /// How lost KV events are noticed and requested again.
    pub stream: stream::Settings,
    /// What ranks that join at the same time may take.
    pub joins: joins::Settings,
    /// KV events over ZeroMQ.
    pub zmq: zmq::Settings,
    /// KV events over gRPC.
    pub grpc: grpc::Settings,
}

/// Changes of the configuration without a restart. SIGHUP and `POST /reload` of the admin listener read the file again
/// at any time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Reload {
    /// Time between two looks at the file. A change is read, checked as a whole, and takes effect for the requests that
    /// start after it; a file with a mistake, or with a change that needs a restart, changes nothing. `0s`: the file is
    /// not watched.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub watch_interval: Duration,
}

impl Default for Reload {
    fn default() -> Self {
        Self {
            // As files of workers. The kubelet takes up to a minute anyway.
            watch_interval: Duration::from_secs(2),
        }
    }
}

/// Threads of the process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Runtime {
    /// I/O threads, which serve connections. 0: one for each core.
    #[schemars(range(max = 1024))]
    pub threads: u32,
}

impl Config {
    /// The workers that the configuration itself lists.
    pub fn members(&self) -> Vec<Member> {
        let none = WorkerDefaults::default();
        let short = self.workers.iter().map(|worker| worker.member(&none));
        let entries = self.discovery.iter().filter_map(|entry| match entry {
            DiscoveryEntry::Static(list) => Some(list),
            DiscoveryEntry::File(_) | DiscoveryEntry::Dns(_) | DiscoveryEntry::Kubernetes(_) => {
                None
            }
        });
        let listed = entries.flat_map(|list| {
            let workers = list.workers.iter();
            workers.map(|worker| worker.member(&list.defaults))
        });
        short.chain(listed).filter_map(Result::ok).collect()
    }

    /// TLS of the connections that the router may open: to workers, also to those that `discovery` finds later, to
    /// endpoints of webhooks and to issuers of tokens.
    pub fn client_tls(&self) -> BTreeSet<tls::ClientSettings> {
        let https = "https://";
        let is_https = |url: &str| {
            let scheme = url.get(..https.len());
            scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(https))
        };
        let listed = self.members().into_iter().filter_map(|member| member.tls);
        let entries = self.discovery.iter();
        let found = entries.filter_map(|entry| entry.defaults().tls.clone());
        let endpoints = self.webhooks.endpoints.iter();
        let endpoints = endpoints.filter(|endpoint| is_https(&endpoint.url));
        let issuers = self.jwt.iter().flat_map(|jwt| &jwt.issuers);
        let issuers = issuers.filter(|issuer| is_https(&issuer.jwks));
        let endpoints = endpoints.map(|endpoint| endpoint.tls.clone().unwrap_or_default());
        let issuers = issuers.map(|issuer| issuer.tls.clone().unwrap_or_default());
        let workers = listed.chain(found);
        workers.chain(endpoints).chain(issuers).collect()
    }

    pub fn registry_settings(&self) -> registry::Settings {
        registry::Settings {
            health: self.fleet.health.clone(),
            circuit_breaker: self.fleet.circuit_breaker.clone(),
            topology: self.prefill_decode.topology.as_str().into(),
            model_lookup: self.fleet.model_lookup.clone(),
            ..registry::Settings::default()
        }
    }

    /// Without tenants all clients are one tenant, to which the limit of the replica applies.
    pub fn responses_settings(&self) -> responses::Settings {
        let mut settings = self.responses.clone();
        if self.tenants.is_empty() {
            settings.background.max_running_per_tenant = settings.background.max_running;
        }
        settings
    }

    pub fn salted_tenants(&self) -> Vec<TenantSpec> {
        let tenants = self.tenants.iter().cloned();
        tenants
            .map(|tenant| tenant.salted(&self.tenant_salt_key))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::discovery::DnsWorkers;
    use crate::webhooks::EndpointSettings;

    #[test]
    fn tls_of_connections_is_of_workers_entries_and_https_endpoints() {
        let with = |ca: &str| tls::ClientSettings {
            ca: ca.to_owned(),
            ..tls::ClientSettings::default()
        };
        let endpoint = |url: &str| EndpointSettings {
            url: url.to_owned(),
            ..EndpointSettings::default()
        };
        let worker = WorkerSpec {
            tls: Some(with("worker")),
            ..WorkerSpec::from("https://engine".to_owned())
        };
        let found = DnsWorkers {
            name: "engines".to_owned(),
            port: 8_000,
            defaults: WorkerDefaults {
                tls: Some(with("name")),
                ..WorkerDefaults::default()
            },
        };
        let mut config = Config {
            workers: vec![worker, WorkerSpec::from("http://other".to_owned())],
            discovery: vec![DiscoveryEntry::Dns(found)],
            ..Config::default()
        };
        let both = BTreeSet::from([with("worker"), with("name")]);
        config.webhooks.endpoints = vec![endpoint("http://hook")];
        assert_eq!(config.client_tls(), both);
        let mut all = both;
        all.insert(tls::ClientSettings::default());
        for url in ["https://hook", "HTTPS://hook"] {
            config.webhooks.endpoints = vec![endpoint(url)];
            assert_eq!(config.client_tls(), all, "{url}");
        }
    }
}
