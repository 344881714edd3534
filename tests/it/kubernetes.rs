//! Discovery by the Kubernetes API, against a fake API server over real sockets, with faults.

mod catalog;
mod churn;
mod credentials;
mod fake;
mod faults;
mod kubectl;
mod pools;
mod query;
mod requests;
mod services;
mod stream;
mod watching;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use warmroute::app::App;
use warmroute::config::{Config, DiscoveryEntry};
use warmroute::fleet::discovery::kubernetes::Settings;
use warmroute::fleet::discovery::kubernetes::settings::{Advanced, Pods, Port};

use self::fake::{FakeApi, NAMESPACE};
use crate::cluster::{self, Removed, eventually};

/// A router that finds its workers by the fake API server.
#[derive(Debug)]
struct Routed {
    app: App,
    _kubeconfig: Removed,
}

/// The file by which clients find the fake API server.
fn kubeconfig(api: &FakeApi, user: &Value) -> Removed {
    kubeconfig_of(&json!({"server": format!("http://{}", api.address)}), user)
}

fn kubeconfig_of(cluster: &Value, user: &Value) -> Removed {
    // JSON is YAML.
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
        "clusters": [{"name": "fake", "cluster": cluster}],
        "users": [{"name": "fake", "user": user}],
    });
    Removed::new(&config.to_string())
}

/// Pods with the label `app: vllm`, at the port that is called `http`.
fn vllm() -> Settings {
    Settings {
        pods: Some(Pods {
            selector: "app=vllm".to_owned(),
            port: Port::Name("http".to_owned()),
        }),
        advanced: Advanced {
            // Tests of lost events shorten it.
            relist_interval: Duration::from_secs(600),
            page_size: 3,
            max_retry_pause: Duration::from_millis(400),
            ..Advanced::default()
        },
        ..Settings::default()
    }
}

/// A running and ready pod.
fn pod(name: &str, address: &str, port: u16) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": port}]}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

fn with_ready(mut pod: Value, is_ready: bool) -> Value {
    pod["status"]["conditions"][0]["status"] = if is_ready { "True" } else { "False" }.into();
    pod
}

/// Pods `a`, `b`, ... at 127.1.0.1, 127.1.0.2, ... They are members; that no engine answers there does not matter.
fn put_pods(api: &FakeApi, names: &[&str]) {
    for name in names {
        api.put("pods", named_pod(name));
    }
}

fn named_pod(name: &str) -> Value {
    let number = name.as_bytes()[0] - b'a' + 1;
    pod(name, &format!("127.1.0.{number}"), 8_000)
}

/// A worker as the router has it: address, and whether it drains.
type Row = (String, bool);

impl Routed {
    async fn start(api: &FakeApi, entry: Settings) -> Self {
        let file = kubeconfig(api, &json!({}));
        Self::with_kubeconfig(file, entry, |_| {}).await
    }

    async fn with_kubeconfig(
        file: Removed,
        mut entry: Settings,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        entry.kubeconfig = file.0.display().to_string();
        let mut config = cluster::config();
        config.discovery = vec![DiscoveryEntry::Kubernetes(Box::new(entry))];
        // Most of the pods have no engine.
        config.fleet.health.interval = Duration::from_secs(5);
        change(&mut config);
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let app = App::start(&config, listen().await, listen().await).unwrap();
        Self {
            app,
            _kubeconfig: file,
        }
    }

    fn workers(&self) -> BTreeMap<String, Row> {
        let snapshot = self.app.fleet().snapshot();
        let rows = snapshot.workers.iter().map(|status| {
            let address = status.worker.pool.address().to_owned();
            (status.worker.name.to_string(), (address, status.draining))
        });
        rows.collect()
    }

    /// The workers that get requests.
    fn serving(&self) -> Vec<String> {
        let workers = self.workers().into_iter();
        let serving = workers.filter(|(_, (_, is_draining))| !is_draining);
        serving.map(|(name, _)| name).collect()
    }

    /// Waits until exactly these get requests.
    async fn serves(&self, names: &[&str]) {
        eventually(&format!("{names:?} serve"), async || {
            self.serving() == names
        })
        .await;
    }

    /// Stays so for a while in which anything wrong would have shown.
    async fn keeps_serving(&self, names: &[&str], time: Duration) {
        let started = Instant::now();
        while started.elapsed() < time {
            assert_eq!(self.serving(), names);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The sum of the samples of a metric whose line has this text.
    async fn metric(&self, name: &str, label: &str) -> f64 {
        let page = crate::client::get(self.app.admin_address(), "/metrics").await;
        let lines = page.text().lines();
        let named = lines.filter(|line| line.starts_with(name) && line.contains(label));
        named
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }
}
