//! What we are told: YAML text -> each part's settings, checked once, all complaints together.

mod check;
pub mod document;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use self::check::NoConnector;
use self::document::{Document, Outside, Problems};
pub use self::tokenizer::{From, Loaded, Tokenizer};
use crate::fleet::discovery::Listed;
use crate::fleet::{Member, Role, breaker, events, health};
use crate::http::{client, server};
use crate::kv::{grpc, indexes, predicted, stream, tokenizer_check, unconfirmed, zmq};
use crate::openai::tenant;
use crate::relay::{self, ModelSettings, PerModel};
use crate::routing::{self, Policy, TierCredit};
use crate::secret::Secret;
use crate::{api, observe, responses};

/// The whole configuration, as `config.yaml` documents it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    pub api: Api,
    pub admin: Admin,
    pub fleet: Fleet,
    pub routing: routing::Settings,
    pub models: Vec<ModelOverride>,
    pub events: Events,
    pub predicted: predicted::Settings,
    pub tokens: relay::tokens::Settings,
    pub relay: relay::Settings,
    pub prefill_decode: relay::prefill_decode::Settings,
    pub tenants: Vec<tenant::Listed>,
    pub replicas: Replicas,
    pub responses: responses::Settings,
    pub log: observe::Settings,
    pub runtime: Runtime,
    /// Tokenizers that were loaded to see whether they can be; the start takes them.
    #[serde(skip)]
    pub loaded: Loaded,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Api {
    /// Address and port for clients.
    pub listen: String,
    pub requests: api::Settings,
    pub connections: server::Settings,
    /// How long running answers may go on after a stop was asked for.
    pub drain_timeout_ms: u64,
}

impl Default for Api {
    fn default() -> Self {
        Self {
            listen: "0.0.0.0:8080".to_owned(),
            requests: api::Settings::default(),
            connections: server::Settings::default(),
            // Kubernetes kills after 30 s; this leaves it a few seconds to spare.
            drain_timeout_ms: 25_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Admin {
    /// Address and port for operators.
    pub listen: String,
}

impl Default for Admin {
    fn default() -> Self {
        // Loopback: these pages drain workers and show prompts' routing to whoever asks.
        Self {
            listen: "127.0.0.1:9090".to_owned(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fleet {
    pub workers: Vec<Listed>,
    pub file: WorkersFile,
    pub dns: Dns,
    pub workers_max: u32,
    pub health: health::Settings,
    pub breaker: breaker::Settings,
    pub connections: client::Settings,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            workers: Vec::new(),
            file: WorkersFile::default(),
            dns: Dns::default(),
            // Twice the largest fleet that was thought of; a runaway discovery stops there.
            workers_max: 4_096,
            health: health::Settings::default(),
            breaker: breaker::Settings::default(),
            connections: client::Settings::default(),
        }
    }
}

/// A file with `workers:` in it, as here, looked at again and again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkersFile {
    /// Empty for none.
    pub path: String,
    pub interval_ms: u64,
}

impl Default for WorkersFile {
    fn default() -> Self {
        Self {
            path: String::new(),
            interval_ms: 2_000,
        }
    }
}

/// A name each of whose addresses is a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Empty for none.
    pub name: String,
    /// Each address of this one is a prefill worker. Empty for none.
    pub prefill_name: String,
    pub port: u16,
    pub interval_ms: u64,
    pub api_key: Secret,
    pub events: events::Listed,
    pub labels: BTreeMap<String, String>,
    /// Of each address of `name`.
    pub role: Role,
}

impl Default for Dns {
    fn default() -> Self {
        // Headless services of Kubernetes change within seconds, and vLLM listens on 8000.
        Self {
            name: String::new(),
            prefill_name: String::new(),
            port: 8_000,
            interval_ms: 5_000,
            api_key: Secret::default(),
            events: events::Listed::default(),
            labels: BTreeMap::new(),
            role: Role::Both,
        }
    }
}

/// What one model has of its own; the rest is as in `routing`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelOverride {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lambda: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mu: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_credit: Option<TierCredit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holders: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_on: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask_reports: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<Tokenizer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub send_tokens: Option<bool>,
}

/// What workers tell of their caches, and how it is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Events {
    pub index: indexes::Settings,
    pub expected: unconfirmed::Settings,
    pub parity: tokenizer_check::Settings,
    pub stream: stream::Settings,
    pub zmq: zmq::Settings,
    pub grpc: grpc::Settings,
}

/// How many routers serve this configuration under one name.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Replicas(pub u32);

impl Default for Replicas {
    fn default() -> Self {
        Self(1)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Runtime {
    /// Threads that carry requests; 0 for one a core.
    pub threads: u32,
}

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path);
        let mut document = Document::parse(&name, bytes.as_deref().unwrap_or_default(), outside());
        if let Err(error) = bytes {
            document.problem("", format!("cannot be read: {error}"));
        }
        check::check(document)
    }

    /// Reads and checks a text.
    pub fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        check::check(Document::parse(name, text.as_bytes(), outside()))
    }

    /// The workers that the configuration itself lists.
    pub fn members(&self) -> Vec<Member> {
        self.fleet
            .workers
            .iter()
            .filter_map(|worker| worker.check().ok())
            .collect()
    }

    pub fn model_settings(&self) -> ModelSettings {
        let common = PerModel {
            routing: self.routing.clone(),
            bytes_per_token: self.predicted.bytes_per_token,
            // An engine that does not know the field would refuse it, or tokenise all the same.
            send_tokens: false,
        };
        let own = |model: &ModelOverride| {
            let routing = routing::Settings {
                policy: model.policy.unwrap_or(common.routing.policy),
                lambda: model.lambda.unwrap_or(common.routing.lambda),
                mu: model.mu.unwrap_or(common.routing.mu),
                tier_credit: model.tier_credit.unwrap_or(common.routing.tier_credit),
                holders: model.holders.unwrap_or(common.routing.holders),
                sampled: model.sampled.unwrap_or(common.routing.sampled),
                hash_on: model
                    .hash_on
                    .clone()
                    .unwrap_or_else(|| common.routing.hash_on.clone()),
                ask_reports: model.ask_reports.unwrap_or(common.routing.ask_reports),
            };
            (
                model.name.clone(),
                PerModel {
                    routing,
                    bytes_per_token: model.bytes_per_token.unwrap_or(common.bytes_per_token),
                    send_tokens: model.send_tokens.unwrap_or(common.send_tokens),
                },
            )
        };
        ModelSettings {
            named: self.models.iter().map(own).collect(),
            common,
        }
    }
}

/// The members that a workers file lists, or what is wrong with it, in one line. `splits` says whether
/// requests are split, so that workers may have roles.
pub fn parse_workers(name: &str, text: &str, splits: bool) -> Result<Vec<Member>, String> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct List {
        workers: Option<Vec<Listed>>,
    }
    let mut document = Document::parse(name, text.as_bytes(), outside());
    let list: Option<List> = document.read();
    if let Some(List { workers: None }) = list {
        // A file that is being written is empty for a moment; `workers: []` says it on purpose.
        document.problem("", "has no `workers:`");
    }
    let listed = list.and_then(|list| list.workers).unwrap_or_default();
    let mut members = Vec::new();
    for (place, worker) in listed.iter().enumerate() {
        match worker.check() {
            Ok(member) if splits || member.role == Role::Both => members.push(member),
            Ok(member) => {
                let message = NoConnector(member.role).to_string();
                document.problem(&format!("workers[{place}].role"), &message);
            }
            Err((key, error)) => document.problem(&format!("workers[{place}].{key}"), &error),
        }
    }
    document
        .finish(Some(members))
        .map_err(|problems| problems.to_string().trim_end().replace('\n', "; "))
}

/// What a document may ask of the world.
fn outside() -> Outside<'static> {
    Outside {
        env: &|name| std::env::var(name).ok(),
        read_file: &|path| std::fs::read_to_string(path),
    }
}
