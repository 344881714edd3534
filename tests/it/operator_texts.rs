//! What an operator reads of a configuration that works but is not safe: in the log, on `/readyz` and in
//! `check --live`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::json;
use warmroute::store::redis;

use crate::client;
use crate::cluster::{Cluster, Removed, eventually, fast};
use crate::redis_server::Server;

const RESPONSES: &str = "/v1/responses";

/// What a router logs until it listens.
fn log_of_start(configuration: &str) -> String {
    let common = "api: {listen: \"127.0.0.1:0\"}\nadmin: {listen: \"127.0.0.1:0\"}\n\
                  workers: [\"http://127.0.0.1:1\"]\n";
    let file = Removed::new(&format!("{common}{configuration}"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["serve", "--config", file.0.to_str().unwrap()])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut log = String::new();
    for line in lines.map_while(Result::ok) {
        log += &line;
        log.push('\n');
        if line.contains("listening") {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(log.contains("listening"), "{log}");
    log
}

#[test]
fn tenants_that_share_caches_are_warned_of_until_one_line_salts_them_all() {
    const TENANTS: &str =
        "tenants: [{name: a, keys: [sk-aaaaaaaa]}, {name: b, keys: [sk-bbbbbbbb]}]\n";
    const WARNING: &str = "tenants share prefix caches";
    let log = log_of_start(TENANTS);
    let line = log.lines().find(|line| line.contains(WARNING));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("WARN"), "{line}");
    assert!(line.contains("tenant_salt_key"), "{line}");

    let salted = log_of_start(&format!("{TENANTS}tenant_salt_key: 0123456789abcdef\n"));
    assert!(!salted.contains(WARNING), "{salted}");
    let single = log_of_start("tenants: [{name: a, keys: [sk-aaaaaaaa]}]\n");
    assert!(!single.contains(WARNING), "{single}");
}

async fn over(redis: &Server) -> Cluster {
    Cluster::start(vec![fast()], |config| {
        config.responses.store.redis = Some(redis::Settings {
            urls: vec![redis.url()],
            ..redis::Settings::default()
        });
        config.responses.advanced.ready_without_store = false;
    })
    .await
}

/// The exit code of `check --live` and what it prints.
async fn check_live(cluster: &Cluster, redis: &Server) -> (i32, String) {
    let text = format!(
        "workers: [\"http://{}\"]\nresponses: {{store: {{redis: {{urls: [\"{}\"]}}}}, state_token: {{keys: [\"{}\"]}}}}\n",
        cluster.engines[0].address,
        redis.url(),
        "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    );
    let file = Removed::new(&text);
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(["check", "--live", "--config", file.0.to_str().unwrap()]);
    // The engine that it asks runs here.
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = output.await.unwrap().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    (output.status.code().unwrap(), printed)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_may_evict_is_named_on_readyz_and_by_the_check() {
    let redis = Server::start().await;
    redis.cli(&["config", "set", "maxmemory-policy", "volatile-ttl"]);
    let cluster = over(&redis).await;
    let wanted = "set maxmemory-policy to noeviction (it is volatile-ttl)";
    eventually("readiness says so", async || {
        let ready = cluster.admin("/readyz").await;
        ready.status == 200 && ready.text().contains(wanted)
    })
    .await;
    assert_eq!(cluster.metric("warmroute_store_may_evict", &[]).await, 1.0);

    let (code, printed) = check_live(&cluster, &redis).await;
    assert_eq!(code, 1, "{printed}");
    assert!(printed.contains("response store: WRONG: "), "{printed}");
    assert!(printed.contains(wanted), "{printed}");

    redis.cli(&["config", "set", "maxmemory-policy", "noeviction"]);
    let (code, printed) = check_live(&cluster, &redis).await;
    assert_eq!(code, 0, "{printed}");
    assert!(
        printed.contains("response store: Redis answers"),
        "{printed}"
    );
}

#[tokio::test]
async fn a_full_redis_refuses_a_create_by_name_before_anything_is_generated() {
    let redis = Server::start().await;
    let cluster = over(&redis).await;
    let ask = |more: &str| format!(r#"{{"model":"sim","input":"x","max_output_tokens":2{more}}}"#);
    let stored = cluster.post(RESPONSES, ask("")).await;
    assert_eq!(stored.status, 200, "{}", stored.text());
    let id = stored.json()["id"].as_str().unwrap().to_owned();

    redis.cli(&["config", "set", "maxmemory", "1"]);
    eventually("readiness knows", async || {
        let ready = cluster.admin("/readyz").await;
        ready.status == 503 && ready.text().contains("response store full")
    })
    .await;
    let before = cluster.engines[0].generated().await;
    let more = format!(r#","previous_response_id":"{id}""#);
    for more in ["", r#","stream":true"#, r#","background":true"#, &*more] {
        let refused = cluster.post(RESPONSES, ask(more)).await;
        assert_eq!(
            (refused.status, refused.code()),
            (503, "store_full".to_owned()),
            "{more}: {}",
            refused.text()
        );
        assert_ne!(refused.header("retry-after"), "", "{more}");
    }
    assert_eq!(cluster.engines[0].generated().await, before);
    // What needs no memory of Redis is served.
    let unstored = cluster.post(RESPONSES, ask(r#","store":false"#)).await;
    assert_eq!(unstored.status, 200);
    let read = cluster.get(&format!("{RESPONSES}/{id}")).await;
    assert_eq!(read.json()["id"], json!(id));

    redis.cli(&["config", "set", "maxmemory", "0"]);
    eventually("it takes creates again", async || {
        let answer = client::post(cluster.router.api, RESPONSES, ask("")).await;
        answer.status == 200
    })
    .await;
}

/// `/readyz`, the live check and a create name what Redis refuses, and nothing is generated.
async fn check_refused(redis: &Server, cluster: &Cluster, named: &str, not_ready: &str) {
    eventually("readiness names it", async || {
        let ready = cluster.admin("/readyz").await;
        let text = ready.text();
        ready.status == 503 && text.contains(not_ready) && text.contains(named)
    })
    .await;
    let (code, printed) = check_live(cluster, redis).await;
    assert_eq!(code, 1, "{printed}");
    assert!(printed.contains("response store: FAILED: "), "{printed}");
    assert!(printed.contains(named), "{printed}");
    let before = cluster.engines[0].generated().await;
    let ask = r#"{"model":"sim","input":"x","max_output_tokens":2}"#;
    for _ in 0..3 {
        let refused = cluster.post(RESPONSES, ask).await;
        assert_eq!(refused.status, 503, "{}", refused.text());
        assert_ne!(refused.header("retry-after"), "");
    }
    assert_eq!(cluster.engines[0].generated().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_redis_does_not_give_is_named_on_readyz_and_by_the_check() {
    const NOT_READY: &str = "response store unavailable";
    // A user who lacks them, and servers that have them under another name.
    let redis = Server::start().await;
    redis.cli(&["acl", "setuser", "default", "-hset", "-zrevrank"]);
    let cluster = over(&redis).await;
    check_refused(&redis, &cluster, "HSET, ZREVRANK", NOT_READY).await;
    redis.cli(&["acl", "setuser", "default", "+@all"]);
    eventually("it is ready", async || {
        cluster.admin("/readyz").await.status == 200
    })
    .await;
    assert_eq!(check_live(&cluster, &redis).await.0, 0);
    for (command, name) in [("XADD", "other"), ("EVALSHA", "")] {
        let redis = Server::with(&["--rename-command", command, name], &[]).await;
        let cluster = over(&redis).await;
        check_refused(&redis, &cluster, command, NOT_READY).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_redis_is_named_on_readyz_and_by_the_check() {
    let redis = Server::start().await;
    let cluster = over(&redis).await;
    redis.cli(&["config", "set", "maxmemory", "1"]);
    check_refused(&redis, &cluster, "full", "response store full").await;
}
