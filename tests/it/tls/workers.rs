//! Workers over TLS: with each connection the same credentials.

use std::io::BufRead;
use std::process::Command;

use serde_json::Value;
use warmroute::config::{Config, From, ModelOverride, Tokenizer};
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::events::{self, EventsSpec};
use warmroute::http::tls::ClientSettings;

use super::ca::{Ca, Folder};
use super::client::metric;
use super::worker::Front;
use crate::client;
use crate::cluster::{Engine, Killed, Router, chat, config, eventually, fast, telling};
use crate::patience::too_long;

fn listed(url: String, tls: ClientSettings) -> WorkerSpec {
    WorkerSpec {
        url,
        name: "w0".to_owned(),
        tls: Some(tls),
        ..WorkerSpec::default()
    }
}

fn with(worker: WorkerSpec) -> Config {
    let mut config = config();
    config.workers = vec![worker];
    config
}

async fn worker(router: &Router) -> Value {
    let page = client::get(router.admin, "/fleet").await.json();
    page["workers"][0].clone()
}

async fn is_up(router: &Router) {
    eventually("the worker is up", async || {
        worker(router).await["health"] == "up"
    })
    .await;
}

/// Waits until the worker is down with a reason that contains `expected`.
async fn is_down(router: &Router, expected: &str) {
    let mut seen = Value::Null;
    let mut is_seen = async || {
        seen = worker(router).await;
        let error = seen["last_error"].as_str().unwrap_or_default();
        seen["health"] == "down" && error.contains(expected)
    };
    let waiting = eventually("the worker is down and says why", &mut is_seen);
    waiting.await;
    assert!(seen["models"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn requests_health_checks_and_tokenization_use_the_same_credentials_and_path() {
    let (ca, folder) = (Ca::new("workers"), Folder::new());
    let engine = Engine::here("w0", fast()).await;
    let front = Front::start(
        engine.address,
        &ca.issue(&["localhost"]),
        Some(&ca),
        "/pool/0",
    )
    .await;
    let tls = folder.client(&ca, Some(&ca.issue(&["router.example.com"])));
    let url = format!("https://localhost:{}/pool/0/", front.address.port());
    let mut config = with(listed(url, tls));
    config.models = vec![ModelOverride {
        name: "sim".to_owned(),
        tokenizer: Some(Tokenizer {
            from: From::Engine,
            ..Tokenizer::default()
        }),
        ..ModelOverride::default()
    }];
    config.tokenization.advanced.engine.timeout = too_long();
    let router = Router::here(&config).await;
    is_up(&router).await;
    let answer = client::post(router.api, "/v1/chat/completions", chat("hello", 4, true)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
    let paths = front.paths.lock().clone();
    for expected in [
        "/health",
        "/v1/models",
        "/version",
        "/metrics",
        "/kv_event_sources",
        "/v1/chat/completions/render",
        "/v1/chat/completions",
    ] {
        assert!(
            paths.iter().any(|path| path == expected),
            "{expected}: {paths:?}"
        );
    }
    assert!(
        !paths.iter().any(|path| path.contains("not-below")),
        "{paths:?}"
    );
    let shown = worker(&router).await["address"].clone();
    assert_eq!(shown, format!("localhost:{}/pool/0", front.address.port()));
}

#[tokio::test]
async fn workers_behind_one_address_differ_by_their_paths() {
    let (ca, folder) = (Ca::new("workers"), Folder::new());
    let engine = Engine::here("w0", fast()).await;
    let first = Front::start(engine.address, &ca.issue(&["localhost"]), None, "/a").await;
    let port = first.address.port();
    let tls = folder.client(&ca, None);
    let mut config = with(listed(format!("https://localhost:{port}/a"), tls.clone()));
    config.workers.push(WorkerSpec {
        name: "w1".to_owned(),
        ..listed(format!("https://localhost:{port}/b"), tls)
    });
    let router = Router::here(&config).await;
    is_up(&router).await;
    let page = client::get(router.admin, "/fleet").await.json();
    assert_eq!(page["workers"].as_array().unwrap().len(), 2);
    eventually("the other path has no worker", async || {
        let page = client::get(router.admin, "/fleet").await.json();
        page["workers"][1]["health"] == "down"
    })
    .await;
}

#[tokio::test]
async fn a_path_is_put_before_those_of_requests_without_tls_too() {
    let engine = Engine::here("w0", fast()).await;
    let worker = WorkerSpec {
        url: format!("http://{}/sim/no-such-path", engine.address),
        ..WorkerSpec::default()
    };
    let router = Router::here(&with(worker)).await;
    is_down(&router, "/health answered 404").await;
}

#[tokio::test]
async fn a_worker_whose_certificate_cannot_be_verified_is_down_and_says_why() {
    let (ca, other, folder) = (Ca::new("workers"), Ca::new("others"), Folder::new());
    let engine = Engine::here("w0", fast()).await;
    let front = Front::start(engine.address, &ca.issue(&["localhost"]), None, "").await;
    let port = front.address.port();
    let check = async |url: String, tls: ClientSettings, expected: &str| {
        let router = Router::here(&with(listed(url, tls))).await;
        is_down(&router, expected).await;
        let answer = client::post(router.api, "/v1/chat/completions", chat("x", 1, false)).await;
        assert!(answer.status >= 400);
    };
    let url = || format!("https://localhost:{port}");
    check(
        url(),
        folder.client(&other, None),
        "is not signed by a CA of `tls.ca`",
    )
    .await;
    let named = ClientSettings {
        server_name: "engine.example.com".to_owned(),
        ..folder.client(&ca, None)
    };
    check(url(), named, "is not valid for engine.example.com").await;
    let plain = format!("https://localhost:{}", engine.address.port());
    check(plain, folder.client(&ca, None), "does not speak TLS").await;
    let expired = ca.issue_for_years(&["localhost"], 2020, 2021);
    let late = Front::start(engine.address, &expired, None, "").await;
    let url = format!("https://localhost:{}", late.address.port());
    check(url, folder.client(&ca, None), "has expired").await;
}

#[tokio::test]
async fn a_worker_that_wants_another_certificate_is_down_until_the_files_have_it() {
    let (ca, other, folder) = (Ca::new("workers"), Ca::new("others"), Folder::new());
    let engine = Engine::here("w0", fast()).await;
    let front = Front::start(engine.address, &ca.issue(&["localhost"]), Some(&ca), "").await;
    let url = format!("https://localhost:{}", front.address.port());
    let without = Router::here(&with(listed(url.clone(), folder.client(&ca, None)))).await;
    is_down(
        &without,
        "does not accept the certificate of `tls.certificate`",
    )
    .await;
    let wrong = other.issue(&["router.example.com"]);
    let router = Router::here(&with(listed(url, folder.client(&ca, Some(&wrong))))).await;
    is_down(&router, "does not accept the certificate").await;
    let right = ca.issue(&["router.example.com"]);
    folder.client(&ca, Some(&right));
    is_up(&router).await;
    let page = client::get(router.admin, "/metrics").await;
    let expiry = page.text().lines().find(|line| {
        line.starts_with("warmroute_tls_certificate_expiry") && line.contains("use=\"workers\"")
    });
    assert!(expiry.is_some(), "{}", page.text());
}

#[tokio::test]
async fn kv_events_come_over_tls_with_the_credentials_of_requests() {
    let (ca, folder) = (Ca::new("workers"), Folder::new());
    let engine = Engine::here("w0", telling()).await;
    let front = Front::start(engine.address, &ca.issue(&["localhost"]), Some(&ca), "").await;
    let tls = folder.client(&ca, Some(&ca.issue(&["router.example.com"])));
    let of_bridge = ca.issue(&["localhost"]);
    let file = |name: &str, text: &str| folder.write(name, text);
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(["bridge", "--listen=127.0.0.1:0"]).args([
        format!("--zmq=tcp://{}", engine.events[0].events),
        format!(
            "--tls-certificate={}",
            file("bridge.crt", &of_bridge.certificate)
        ),
        format!("--tls-key={}", file("bridge.key", &of_bridge.key)),
        format!("--tls-client-ca={}", file("bridge-ca.crt", &ca.pem())),
    ]);
    let (_bridge, printed) = Killed::start(&mut command);
    let line = printed.lines().next().unwrap().unwrap();
    let address = line.trim_start_matches("listening on 127.0.0.1:");
    let url = format!("https://localhost:{}", front.address.port());
    let connections = "warmroute_kv_grpc_connections_total";
    for (endpoint, is_connected) in [
        (format!("localhost:{address}"), true),
        (format!("http://localhost:{address}"), false),
    ] {
        let worker = WorkerSpec {
            events: Some(EventsSpec {
                from: events::From::Grpc,
                endpoint,
                ..EventsSpec::default()
            }),
            ..listed(url.clone(), tls.clone())
        };
        let router = Router::here(&with(worker)).await;
        is_up(&router).await;
        let count = async || {
            let page = client::get(router.admin, "/metrics").await;
            metric(page.text(), connections).unwrap()
        };
        if is_connected {
            eventually("KV events are received", async || count().await >= 1.0).await;
        } else {
            assert_eq!(count().await, 0.0);
        }
    }
}
