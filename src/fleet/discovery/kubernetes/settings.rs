//! What a `kubernetes` entry of the configuration says. A build without the feature `kubernetes` has it too, so that
//! it can refuse such an entry by name.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fleet::discovery::WorkerDefaults;

/// Pods that the Kubernetes API lists: by `pods`, `service` or `inference_pool`, one of them. The router needs to get,
/// list and watch what it follows: pods for `pods`, endpointslices for `service`, inferencepools and pods for
/// `inference_pool`. Needs a build with the feature `kubernetes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Pods that a label selector matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<Pods>,
    /// The endpoints of a Service. Labels of pods are not known then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
    /// The pods and ports of an InferencePool (`inference.networking.k8s.io/v1`). Each of its ports is a worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference_pool: Option<InferencePool>,
    /// The namespace of all that. Empty: the router's own, outside of a cluster that of the context.
    pub namespace: String,
    /// Path of a kubeconfig file, outside of a cluster. Empty: the pod's service account, and without one what kubectl
    /// reads (`KUBECONFIG`, `~/.kube/config`).
    pub kubeconfig: String,
    /// The context of the kubeconfig. Empty: its current one.
    pub context: String,
    /// The pod's label that says what its engine was started as: `prefill`, `decode`, or `both` (or llm-d's
    /// `prefill-decode`). A pod without it has `role`. Empty: no label is looked at.
    pub role_label: String,
    /// Labels of the pod that the worker has too, besides the one that `prefill_decode.topology` names. A pod whose
    /// value changes is a new worker.
    pub pod_labels: Vec<String>,
    #[serde(flatten)]
    pub defaults: WorkerDefaults,
    /// How the API is asked. No keys.
    #[serde(skip)]
    pub advanced: Advanced,
}

/// Pods that a label selector matches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Pods {
    /// As `kubectl get pods -l` takes it, such as `app=vllm` or `app=vllm,tier in (a,b)`.
    pub selector: String,
    /// The port of the engine: its number, or the name that the container gives it. vLLM listens on 8000.
    #[serde(default = "Pods::port")]
    pub port: Port,
}

impl Pods {
    fn port() -> Port {
        Port::Number(8_000)
    }
}

/// The endpoints of a Service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Service {
    /// The Service's name.
    pub name: String,
    /// The port of the engine: the name of the Service's port, or the number that the pods listen on. Not needed if the
    /// Service has one port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<Port>,
}

/// The pods and ports of an InferencePool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InferencePool {
    /// The pool's name.
    pub name: String,
}

/// A port by number or by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Port {
    Number(u16),
    Name(String),
}

impl std::fmt::Display for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// How the API is asked, the same for all entries.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// Everything is listed anew after this time at the latest, beside the running watch, so that an event that the
    /// watch has lost is made up for.
    pub relist_interval: Duration,
    /// A list that takes longer has failed.
    pub list_timeout: Duration,
    /// Objects on one page of a list. 0 stands for a list in one piece.
    pub page_size: u32,
    /// After a failure the API is asked again after 200 ms, then after twice as long, up to this time.
    pub max_retry_pause: Duration,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // A list of 1,000 pods has some 10 MB.
            relist_interval: Duration::from_secs(5 * 60),
            // The API server itself ends a list after 60 s by default.
            list_timeout: Duration::from_secs(60),
            // A page is parsed in one go, 250 pods in some 10 ms.
            page_size: 250,
            max_retry_pause: Duration::from_secs(30),
        }
    }
}

/// The label by which llm-d's charts say it.
const ROLE_LABEL: &str = "llm-d.ai/role";

impl Default for Settings {
    fn default() -> Self {
        Self {
            pods: None,
            service: None,
            inference_pool: None,
            namespace: String::new(),
            kubeconfig: String::new(),
            context: String::new(),
            role_label: ROLE_LABEL.to_owned(),
            pod_labels: Vec::new(),
            defaults: WorkerDefaults::default(),
            advanced: Advanced::default(),
        }
    }
}

/// What an entry of the configuration follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    Pods(Pods),
    Service(Service),
    InferencePool(InferencePool),
}

impl Settings {
    /// The one source that is configured.
    pub fn source(&self) -> Result<Source, String> {
        let sources = [
            self.pods.clone().map(Source::Pods),
            self.service.clone().map(Source::Service),
            self.inference_pool.clone().map(Source::InferencePool),
        ];
        let mut given = sources.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(source), None) => Ok(source),
            (None, _) => Err(
                "needs one of `pods: {selector: app=vllm}`, `service: {name: NAME}` and `inference_pool: {name: NAME}`"
                    .to_owned(),
            ),
            (Some(_), Some(_)) => Err(
                "has more than one of `pods`, `service` and `inference_pool`; write an entry for each".to_owned(),
            ),
        }
    }

    /// What is wrong with it: keys and messages.
    pub fn check(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        match self.source() {
            Err(error) => problems.push(("", error)),
            Ok(Source::Pods(pods)) => {
                if pods.selector.trim().is_empty() {
                    let error =
                        "is empty, which matches every pod; write labels such as `app=vllm`";
                    problems.push(("pods.selector", error.to_owned()));
                }
                problems.extend(check_port(&pods.port).map(|error| ("pods.port", error)));
            }
            Ok(Source::Service(service)) => {
                problems.extend(check_name(&service.name).map(|error| ("service.name", error)));
                let port = service.port.as_ref().and_then(check_port);
                problems.extend(port.map(|error| ("service.port", error)));
            }
            Ok(Source::InferencePool(pool)) => {
                problems.extend(check_name(&pool.name).map(|error| ("inference_pool.name", error)));
            }
        }
        if !self.namespace.is_empty() {
            problems.extend(check_name(&self.namespace).map(|error| ("namespace", error)));
        }
        problems
    }

    /// Unique for what is followed: two entries with the same one are the same.
    pub fn name(&self) -> String {
        let followed = match self.source() {
            Ok(Source::Pods(pods)) => format!("pods:{}:{}", pods.selector, pods.port),
            Ok(Source::Service(service)) => match service.port {
                Some(port) => format!("service:{}:{port}", service.name),
                None => format!("service:{}", service.name),
            },
            Ok(Source::InferencePool(pool)) => format!("inference_pool:{}", pool.name),
            Err(_) => String::new(),
        };
        let parts = [&self.kubeconfig, &self.context, &self.namespace].into_iter();
        let given = parts.filter(|part| !part.is_empty());
        let within: String = given.map(|part| format!("{part}/")).collect();
        format!("kubernetes:{within}{followed}")
    }
}

/// Names of objects are parts of the paths that the API is asked for.
fn check_name(name: &str) -> Option<String> {
    let is_valid =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    match name {
        "" => Some("is empty".to_owned()),
        name if name.len() > 253 || !name.bytes().all(is_valid) => Some(format!(
            "`{name}` is no name of Kubernetes, which has lower-case letters, digits, `-` and `.`"
        )),
        _ => None,
    }
}

fn check_port(port: &Port) -> Option<String> {
    match port {
        Port::Number(0) => Some("must be from 1 to 65535, or a port's name".to_owned()),
        Port::Name(name) if name.is_empty() => Some("is empty".to_owned()),
        Port::Name(name) if name.bytes().all(|byte| byte.is_ascii_digit()) => Some(format!(
            "`{name}` is no port; it must be from 1 to 65535, or a port's name"
        )),
        Port::Number(_) | Port::Name(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(selector: &str, port: Port) -> Settings {
        Settings {
            pods: Some(Pods {
                selector: selector.to_owned(),
                port,
            }),
            ..Settings::default()
        }
    }

    #[test]
    fn exactly_one_source_is_needed() {
        let none = Settings::default();
        assert!(none.check()[0].1.contains("needs one of"));
        let mut two = pods("app=vllm", Port::Number(8_000));
        assert_eq!(two.check(), []);
        two.inference_pool = Some(InferencePool {
            name: "vllm".to_owned(),
        });
        assert!(two.check()[0].1.contains("more than one"));
    }

    #[test]
    fn what_the_api_would_refuse_is_refused_with_its_key() {
        let key = |settings: &Settings| settings.check().first().map(|(key, _)| *key);
        assert_eq!(key(&pods(" ", Port::Number(1))), Some("pods.selector"));
        assert_eq!(key(&pods("a", Port::Number(0))), Some("pods.port"));
        let digits = Port::Name("99999".to_owned());
        assert_eq!(key(&pods("a", digits)), Some("pods.port"));
        let name = Port::Name("http".to_owned());
        assert_eq!(key(&pods("a", name.clone())), None);
        let mut elsewhere = pods("a", name);
        elsewhere.namespace = "../secrets".to_owned();
        assert_eq!(key(&elsewhere), Some("namespace"));
    }
}
