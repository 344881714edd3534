//! Settings that requests read: each request keeps those with which it started.

use warmroute::config::Config;
use warmroute::sim::fault::Faults;

use super::{Clients, Folder, applied, engines, reload, text, workers};
use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, Router, chat, eventually, fast, unhurried};

const PATH: &str = "/v1/chat/completions";

async fn post_as(cluster: &Cluster, key: &str) -> Answer {
    let bearer = format!("Bearer {key}");
    let headers = [("authorization", &*bearer)];
    client::send(
        cluster.router.api,
        "POST",
        PATH,
        &headers,
        chat("hi", 1, false),
    )
    .await
}

#[tokio::test]
async fn a_tenant_s_key_is_revoked_and_its_stream_goes_on() {
    let folder = Folder::new();
    let engines = vec![Engine::here("w0", unhurried()).await];
    let base = workers(&engines);
    let with = |keys: &str, salt: &str| {
        text(&format!(
            "{base}tenants: [{{name: a, keys: [{keys}], cache_salt: {salt}}}]\n"
        ))
    };
    let cluster = folder.start(engines, &with("old", "pepper")).await;
    cluster.is_worker("w0", "health", "up").await;
    assert_eq!(post_as(&cluster, "old").await.status, 200);
    cluster.engines[0].hold_after(3).await;
    let headers = [("authorization", "Bearer old")];
    let body = chat("a long story", 60, true);
    let mut stream = client::open(cluster.router.api, "POST", PATH, &headers, body).await;
    stream.until("data: ").await;
    let both = with("old, new", "pepper");
    folder.write(&both);
    let changes = applied(&cluster).await;
    assert_eq!(changes[0]["path"], "tenants[a].keys");
    assert_eq!(changes[0]["new"], serde_json::json!(["***", "***"]));
    assert_eq!(post_as(&cluster, "old").await.status, 200);
    assert_eq!(post_as(&cluster, "new").await.status, 200);
    folder.write(&with("new", "salt"));
    applied(&cluster).await;
    assert_eq!(post_as(&cluster, "old").await.status, 401);
    assert_eq!(post_as(&cluster, "new").await.status, 200);
    let sent = cluster.engines[0].last_body().await;
    assert_eq!(sent["cache_salt"], "salt");
    cluster.engines[0].let_go().await;
    let (rest, is_whole) = stream.rest().await;
    assert!(is_whole && rest.contains("[DONE]"), "{rest}");
    let counted = cluster
        .metric("warmroute_tenant_requests_total", &["tenant=\"a\""])
        .await;
    assert_eq!(counted, 5.0);
}

#[tokio::test]
async fn the_first_tenants_bring_the_bound_of_their_background_responses() {
    let folder = Folder::new();
    let engines = vec![Engine::here("w0", unhurried()).await];
    let base = text(&format!(
        "{}responses: {{background: {{max_running_per_tenant: 1}}}}\n",
        workers(&engines)
    ));
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    folder.write(&format!("{base}tenants: [{{name: a, keys: [key]}}]\n"));
    applied(&cluster).await;
    cluster.engines[0].hold_after(3).await;
    let body = r#"{"model": "sim", "input": "hi", "max_output_tokens": 60, "background": true}"#;
    let begin = async || {
        let headers = [("authorization", "Bearer key")];
        client::send(cluster.router.api, "POST", "/v1/responses", &headers, body).await
    };
    let first = begin().await;
    assert_eq!(first.status, 200, "{}", first.text());
    let second = begin().await;
    assert_eq!(second.status, 429, "{}", second.text());
    assert!(second.text().contains("(limit 1)"), "{}", second.text());
    cluster.engines[0].let_go().await;
}

#[tokio::test]
async fn longer_bodies_bring_longer_state_tokens() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let base = text(&workers(&engines));
    let base = base.replace("drain_delay: 0s", "drain_delay: 0s, max_body: 8KiB");
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    folder.write(&base.replace("8KiB", "64KiB"));
    applied(&cluster).await;
    // By its first characters it is a token. How long it is comes before all else that is wrong with it.
    let token = format!("wrc1.{}", "x".repeat(20_000));
    let item = format!(r#"{{"type": "reasoning", "summary": [], "encrypted_content": "{token}"}}"#);
    let body = format!(r#"{{"model": "sim", "input": [{item}]}}"#);
    let answer = cluster.post("/v1/responses", body).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    let name = "warmroute_state_tokens_rejected_total";
    assert_eq!(cluster.metric(name, &["too_large"]).await, 0.0);
    assert!(cluster.metric(name, &["malformed"]).await > 0.0);
}

#[tokio::test]
async fn routing_and_models_change_and_counts_go_on() {
    let folder = Folder::new();
    let engines = engines(2).await;
    let base = text(&workers(&engines));
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.is_worker("w1", "health", "up").await;
    let reason = async || {
        cluster
            .post_decided(PATH, &chat("hello", 1, false))
            .await
            .1
            .reason
    };
    assert_ne!(reason().await, "round_robin");
    folder.write(&format!("{base}routing: {{policy: round_robin}}\n"));
    applied(&cluster).await;
    assert_eq!(reason().await, "round_robin");
    folder.write(&format!(
        "{base}routing: {{policy: round_robin}}\nmodels: [{{name: sim, policy: random}}]\n"
    ));
    applied(&cluster).await;
    assert_eq!(reason().await, "random");
    let explained = cluster
        .post_admin("/explain", &chat("hello", 1, false))
        .await;
    assert!(explained.text().contains("random"), "{}", explained.text());
    assert_eq!(
        cluster
            .metric("warmroute_requests_total", &["status=\"200\""])
            .await,
        3.0
    );
}

#[tokio::test]
async fn limits_and_timeouts_change_for_requests_that_start_later() {
    let folder = Folder::new();
    let engines = vec![Engine::here("w0", unhurried()).await];
    let base = text(&workers(&engines));
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.engines[0].hold_after(3).await;
    let body = chat("a long story", 60, true);
    let mut before = cluster.open(PATH, &body).await;
    before.until("data: ").await;
    let limited = base.replace("drain_delay: 0s", "drain_delay: 0s, max_body: 300B")
        + "requests: {request_timeout: 300ms}\n";
    folder.write(&limited);
    applied(&cluster).await;
    assert_eq!(
        cluster
            .post(PATH, chat(&"long ".repeat(100), 1, false))
            .await
            .status,
        413
    );
    let mut after = cluster.open(PATH, &body).await;
    let (rest, _) = after.rest().await;
    assert!(client::has_error(&rest), "{rest}");
    cluster.engines[0].let_go().await;
    let (rest, is_whole) = before.rest().await;
    assert!(is_whole && !client::has_error(&rest), "{rest}");
}

#[tokio::test]
async fn the_health_check_and_the_admin_token_change() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let base = text(&workers(&engines));
    let patient = base.replace("50ms", "50ms, unhealthy_threshold: 1000000");
    let cluster = folder.start(engines, &patient).await;
    cluster.is_worker("w0", "health", "up").await;
    assert_eq!(cluster.admin("/fleet").await.status, 200);
    folder.write(&patient.replace("admin: {", "admin: {token: 0123456789abcdef, "));
    applied(&cluster).await;
    assert_eq!(cluster.admin("/fleet").await.status, 401);
    assert_eq!(reload(&cluster).await.status, 401);
    let headers = [("authorization", "Bearer 0123456789abcdef")];
    let admin = cluster.router.admin;
    folder.write(&base);
    let answer = client::send(admin, "POST", "/reload", &headers, "").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(cluster.admin("/fleet").await.status, 200);
    let page = cluster.admin("/config").await.json();
    assert_eq!(page["config"]["admin"]["token"], "");
    let unhealthy = Faults {
        unhealthy: true,
        ..Faults::default()
    };
    cluster.engines[0].fault(unhealthy).await;
    cluster.is_worker("w0", "health", "down").await;
}

#[tokio::test]
async fn the_log_level_changes() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let base = text(&workers(&engines));
    let with = |log: &str| base.replace("{format: json}", &format!("{{format: json, {log}}}"));
    let cluster = folder.start_child(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    let send = async || {
        let answer = cluster.post(PATH, chat("hi", 1, false)).await;
        assert_eq!(answer.status, 200);
    };
    let count = |what: &str| cluster.router.log().matches(what).count();
    send().await;
    eventually("it is logged", async || count("warmroute::access") == 1).await;
    assert_eq!(count("\"DEBUG\""), 0);
    folder.write(&with("level: debug"));
    applied(&cluster).await;
    send().await;
    eventually("it is logged", async || count("\"DEBUG\"") > 0).await;
    eventually("it is logged", async || count("warmroute::access") > 1).await;
    folder.write(&with("access: false"));
    applied(&cluster).await;
    let before = count("warmroute::access");
    send().await;
    folder.write(&with("level: info"));
    applied(&cluster).await;
    send().await;
    eventually("it is logged", async || {
        count("warmroute::access") == before + 1
    })
    .await;
}

#[tokio::test]
async fn streams_go_on_through_many_reloads() {
    let folder = Folder::new();
    let engines = vec![
        Engine::here("w0", unhurried()).await,
        Engine::here("w1", fast()).await,
    ];
    let base = text(&workers(&engines));
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.is_worker("w1", "health", "up").await;
    let clients = Clients::start(&cluster, 4);
    // More tokens than an answer of those clients has.
    for engine in &cluster.engines {
        engine.hold_after(5).await;
    }
    let mut streams = Vec::new();
    for number in 0..6 {
        let body = chat(&format!("story {number}"), 80, true);
        streams.push(cluster.open(PATH, &body).await);
    }
    for number in 0..20 {
        folder.write(&format!(
            "{base}queue: {{max_worker_queued_tokens: {}}}\nrequests: {{max_attempts: {}}}\n",
            8_192 + number,
            2 + number % 2
        ));
        applied(&cluster).await;
    }
    for engine in &cluster.engines {
        engine.let_go().await;
    }
    for mut stream in streams {
        let (rest, is_whole) = stream.rest().await;
        assert!(is_whole && rest.contains("[DONE]"), "{rest}");
    }
    assert!(clients.none_failed().await > 4);
}

#[tokio::test]
async fn a_tokenizer_comes_with_a_reload_and_is_loaded_again_when_its_files_change() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let base = text(&workers(&engines));
    let cluster = folder.start(engines, &base).await;
    cluster.is_worker("w0", "health", "up").await;
    let outcome = ["outcome=\"complete\""];
    let tokenized = async || {
        let answer = cluster.post(PATH, chat("hello", 1, false)).await;
        assert_eq!(answer.status, 200);
        cluster
            .metric("warmroute_tokenizer_prompts_total", &outcome)
            .await
    };
    assert_eq!(tokenized().await, 0.0);
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let template = folder.path("chat_template.jinja");
    std::fs::copy(
        fixtures.join("tokenizers/qwen2.json"),
        folder.path("tokenizer.json"),
    )
    .unwrap();
    std::fs::copy(fixtures.join("templates/chatml.jinja"), &template).unwrap();
    let path = folder.path("");
    folder.write(&format!(
        "{base}models: [{{name: sim, tokenizer: '{}'}}]\n",
        path.display()
    ));
    applied(&cluster).await;
    assert_eq!(tokenized().await, 1.0);
    // Nothing has changed, so it stays.
    assert_eq!(reload(&cluster).await.json()["result"], "unchanged");
    let changed = std::fs::read_to_string(&template).unwrap() + "{# changed #}";
    std::fs::write(&template, changed).unwrap();
    let changes = applied(&cluster).await;
    assert_eq!(changes[0]["path"], "models[sim].tokenizer");
    assert_eq!(tokenized().await, 2.0);
    assert_eq!(reload(&cluster).await.json()["result"], "unchanged");
    std::fs::remove_file(folder.path("tokenizer.json")).unwrap();
    assert_eq!(reload(&cluster).await.status, 400);
    assert_eq!(tokenized().await, 3.0);
}

/// Its secrets may be mounted files, which change by themselves.
#[tokio::test]
async fn a_changed_file_of_a_secret_is_noticed() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let key = folder.path("key");
    std::fs::write(&key, "one").unwrap();
    let base = text(&workers(&engines)).replace("0s}\nlog", "20ms}\nlog");
    folder.write(&format!(
        "{base}tenants: [{{name: a, keys: ['file:{}']}}]\n",
        key.display()
    ));
    let router = Router::here(&Config::load(&folder.file()).unwrap()).await;
    let cluster = Cluster { engines, router };
    cluster.is_worker("w0", "health", "up").await;
    assert_eq!(post_as(&cluster, "one").await.status, 200);
    std::fs::write(&key, "two").unwrap();
    eventually("it is used", async || {
        post_as(&cluster, "two").await.status == 200
    })
    .await;
    assert_eq!(post_as(&cluster, "one").await.status, 401);
}
