//! Limits of tenants: over real sockets, three replicas and a real Redis.

mod answers;
mod counting;
mod lines;
mod replicas;
mod rights;

use serde_json::json;
use warmroute::config::Config;
use warmroute::limits::TenantLimitsSpec;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;

use crate::background::patient;
use crate::client::{self, Answer};
use crate::cluster::{self, Engine, Router, eventually};
use crate::redis_server::Server;

/// A tenant with these limits, whose key is `sk-` and its name.
fn tenant(name: &str, limits: &str) -> TenantSpec {
    TenantSpec {
        limits: (!limits.is_empty()).then(|| spec(limits)),
        ..cluster::tenant(name)
    }
}

fn spec(limits: &str) -> TenantLimitsSpec {
    let spec: TenantLimitsSpec = serde_json::from_str(limits).unwrap();
    assert_eq!(spec.check(), []);
    spec
}

fn bearer(name: &str) -> String {
    format!("Bearer sk-{name}")
}

async fn post_as(router: &Router, name: &str, path: &str, body: &str) -> Answer {
    let headers = [("authorization", &*bearer(name))];
    client::send(router.api, "POST", path, &headers, body.to_owned()).await
}

/// A completion whose prompt has this many tokens.
fn completion(prompt: usize, max_tokens: usize) -> String {
    let ids: Vec<usize> = (1..=prompt).collect();
    json!({"model": "sim", "prompt": ids, "max_tokens": max_tokens}).to_string()
}

async fn chat_as(router: &Router, name: &str) -> Answer {
    let body = cluster::chat("hello", 1, false);
    post_as(router, name, "/v1/chat/completions", &body).await
}

fn number(answer: &Answer, header: &str) -> u64 {
    let text = answer.header(header);
    text.parse()
        .unwrap_or_else(|_| panic!("{header}: `{text}` of {}", answer.text()))
}

/// The key of state tokens.
const KEY: &str = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";

/// Replicas over one Redis and one engine.
struct Replicas {
    routers: Vec<Router>,
    engine: Engine,
    redis: Server,
}

impl Replicas {
    async fn start(
        count: usize,
        engine: warmroute::sim::worker::Settings,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let redis = Server::start().await;
        let engine = Engine::here("w0", engine).await;
        let mut config = cluster::config();
        config.workers = vec![engine.listed()];
        config.responses.store.redis = Some(patient(&redis));
        config.responses.state_token.keys = vec![Secret::new(KEY)];
        // A busy machine is not a Redis that is away.
        config.limits.advanced.timeout = std::time::Duration::from_secs(5);
        change(&mut config);
        let mut routers = Vec::new();
        for _ in 0..count {
            let router = Router::here(&config).await;
            router.worker_is_up().await;
            routers.push(router);
        }
        Self {
            routers,
            engine,
            redis,
        }
    }

    async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let mut sum = 0.0;
        for router in &self.routers {
            let page = client::get(router.admin, "/metrics").await;
            let lines = page.text().lines().filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
                    && labels.iter().all(|label| line.contains(label))
            });
            let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            sum += values.sum::<f64>();
        }
        sum
    }
}
