//! Which models a tenant may use: asked before anything waits, and told of no others.

use std::time::Duration;

use serde_json::json;
use warmroute::config::{Config, ModelOverride};
use warmroute::queue;

use super::{bearer, post_as, tenant};
use crate::client;
use crate::cluster::{Cluster, fast};

async fn cluster(models: serde_json::Value, change: impl FnOnce(&mut Config)) -> Cluster {
    let engine = warmroute::sim::worker::Settings {
        models: ["public", "secret"].map(str::to_owned).into(),
        ..fast()
    };
    Cluster::start(vec![engine], |config| {
        config.models = serde_json::from_value::<Vec<ModelOverride>>(models).unwrap();
        config.tenants = vec![tenant("t", r#"{"models": ["public"]}"#)];
        change(config);
    })
    .await
}

const BODIES: [(&str, &str); 10] = [
    (
        "/v1/chat/completions",
        r#""messages":[{"role":"user","content":"x"}],"max_tokens":1"#,
    ),
    ("/v1/completions", r#""prompt":"x","max_tokens":1"#),
    ("/v1/responses", r#""input":"x""#),
    ("/v1/responses", r#""input":"x","background":true"#),
    (
        "/v1/messages",
        r#""messages":[{"role":"user","content":"x"}],"max_tokens":1"#,
    ),
    (
        "/v1/messages/count_tokens",
        r#""messages":[{"role":"user","content":"x"}]"#,
    ),
    ("/v1/embeddings", r#""input":"x""#),
    ("/v1/rerank", r#""query":"x","documents":["y"]"#),
    ("/tokenize", r#""prompt":"x""#),
    ("/v1/responses/input_tokens", r#""input":"x""#),
];

#[tokio::test]
async fn no_answer_names_a_model_that_the_tenant_may_not_use() {
    let models = json!([{"name": "hidden", "targets": [{"model": "secret", "weight": 1}]}]);
    let cluster = cluster(models, |_| {}).await;
    for (path, fields) in BODIES {
        for model in ["secret", "hidden", "absent"] {
            let body = format!(r#"{{"model":"{model}",{fields}}}"#);
            let answer = post_as(&cluster.router, "t", path, &body).await;
            assert_eq!(answer.status, 404, "{path} {model}: {}", answer.text());
            let others = ["secret", "hidden"]
                .into_iter()
                .filter(|other| *other != model);
            for other in others {
                assert!(!answer.text().contains(other), "{path}: {}", answer.text());
            }
        }
        let answer = post_as(&cluster.router, "t", path, &format!("{{{fields}}}")).await;
        assert!(
            !answer.text().contains("secret"),
            "{path}: {}",
            answer.text()
        );
        assert!(
            !answer.text().contains("hidden"),
            "{path}: {}",
            answer.text()
        );
    }
    assert_eq!(cluster.requests().await, [0]);
}

#[tokio::test]
async fn an_alias_of_a_model_that_the_tenant_may_use_is_one_that_it_may_use() {
    let models = json!([{"name": "alias", "targets": [{"model": "public", "weight": 1}]}]);
    let cluster = cluster(models, |_| {}).await;
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let body = r#"{"model":"alias","messages":[{"role":"user","content":"x"}],"max_tokens":1}"#;
        let answer = post_as(&cluster.router, "t", path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_name_leads_only_to_models_that_the_tenant_may_use() {
    let models = json!([
        {"name": "split", "targets": [{"model": "public", "weight": 1}, {"model": "secret", "weight": 9}]},
        {"name": "next", "targets": [{"model": "cold", "weight": 1}], "fallback": ["secret", "public"]},
    ]);
    let cluster = cluster(models, |_| {}).await;
    for name in ["split", "next"] {
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let body = format!(
                r#"{{"model":"{name}","messages":[{{"role":"user","content":"x"}}],"max_tokens":1}}"#
            );
            for _ in 0..8 {
                let answer = post_as(&cluster.router, "t", path, &body).await;
                assert_eq!(answer.status, 200, "{name} {path}: {}", answer.text());
            }
        }
    }
}

#[tokio::test]
async fn who_may_not_use_a_model_does_not_wait_for_its_workers() {
    let cluster = cluster(json!([{"name": "cold"}, {"name": "public"}]), |config| {
        config.queue = queue::Settings {
            no_worker_timeout: Duration::from_secs(600),
            ..queue::Settings::default()
        }
        .into();
    })
    .await;
    let body = r#"{"model":"cold","prompt":"x","max_tokens":1}"#;
    let headers = [("authorization", &*bearer("t"))];
    let asked = client::send(
        cluster.router.api,
        "POST",
        "/v1/completions",
        &headers,
        body.to_owned(),
    );
    let answer = asked.await;
    assert_eq!((answer.status, &*answer.code()), (404, "model_not_found"));
    let refused = ["tenant=\"t\"", "reason=\"model\""];
    let count = cluster
        .metric("warmroute_limit_refusals_total", &refused)
        .await;
    assert_eq!(count, 1.0);
}
