//! Tenants by JSON Web Token, with a server that publishes the issuer's keys.

mod issuer;

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::jwt::{IssuerSettings, Settings};
use warmroute::limits::TenantLimitsSpec;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;

use self::issuer::{ISSUER, KeyServer, Signer};
use crate::client::{self, Answer};
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::pairs::check;
use crate::reload::{Folder, text, workers};

fn tenant(name: &str, limits: Value) -> TenantSpec {
    TenantSpec {
        name: name.to_owned(),
        limits: serde_json::from_value::<Option<TenantLimitsSpec>>(limits).unwrap(),
        ..TenantSpec::default()
    }
}

fn settings(jwks: &str) -> Settings {
    let mut settings = Settings {
        issuers: vec![IssuerSettings {
            issuer: ISSUER.to_owned(),
            audiences: vec!["warmroute".to_owned()],
            jwks: jwks.to_owned(),
            ..IssuerSettings::default()
        }],
        ..Settings::default()
    };
    // Only tokens make the router look again.
    settings.advanced.refresh_interval = Duration::from_secs(3_600);
    settings.advanced.unknown_key_interval = Duration::from_secs(1);
    settings.advanced.timeout = Duration::from_secs(20);
    settings
}

/// `a` and `b` are tenants without keys, `c` has `sk-c`.
fn listed(config: &mut Config, jwks: &str) {
    let keyed = TenantSpec {
        keys: vec![Secret::new("sk-c")],
        ..tenant("c", Value::Null)
    };
    config.tenants = vec![tenant("a", Value::Null), tenant("b", Value::Null), keyed];
    config.jwt = Some(settings(jwks));
}

async fn cluster(server: &KeyServer, change: impl FnOnce(&mut Config)) -> Cluster {
    Cluster::start(vec![fast()], |config| {
        listed(config, &server.url());
        change(config);
    })
    .await
}

async fn post_as(cluster: &Cluster, token: &str, path: &str, body: String) -> Answer {
    let bearer = format!("Bearer {token}");
    let headers = [("authorization", &*bearer)];
    client::send(cluster.router.api, "POST", path, &headers, body).await
}

async fn chat_as(cluster: &Cluster, token: &str) -> Answer {
    post_as(cluster, token, "/v1/chat/completions", chat("hi", 1, false)).await
}

/// The token is refused as a wrong key is, and nothing of it is in the answer.
fn refused(answer: &Answer, token: &str, reason: &str) {
    let text = answer.text();
    assert_eq!(answer.status, 401, "{reason}: {text}");
    assert_eq!(answer.code(), "invalid_api_key", "{text}");
    assert_eq!(
        answer.json()["error"]["type"],
        "invalid_request_error",
        "{text}"
    );
    assert_eq!(answer.header("www-authenticate"), "Bearer");
    let message = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(message.contains(reason), "{message}");
    for part in token.split('.').filter(|part| part.len() > 8) {
        assert!(!text.contains(part), "{text}");
    }
}

async fn of_tenant(cluster: &Cluster, name: &str) -> f64 {
    let label = format!("tenant=\"{name}\"");
    cluster
        .metric("warmroute_tenant_requests_total", &[&label])
        .await
}

async fn verified(cluster: &Cluster, result: &str) -> f64 {
    let label = format!("result=\"{result}\"");
    cluster
        .metric("warmroute_jwt_verifications_total", &[&label])
        .await
}

#[tokio::test]
async fn a_request_is_of_the_tenant_that_its_token_names() {
    let signer = Signer::new("k1");
    let server = KeyServer::start(&signer.keys()).await;
    let cluster = cluster(&server, |_| {}).await;
    let token = signer.token(&json!({"tenant": "a"}));
    for _ in 0..5 {
        let answer = chat_as(&cluster, &token).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    // Verified once, and no key or token reaches an engine.
    assert_eq!(verified(&cluster, "accepted").await, 1.0);
    let arrival = cluster.engines[0].last_post().await;
    assert!(!arrival.headers.contains_key("authorization"));
    assert_eq!(of_tenant(&cluster, "a").await, 5.0);
    assert_eq!(chat_as(&cluster, "sk-c").await.status, 200);
    assert_eq!(of_tenant(&cluster, "c").await, 1.0);
    assert_eq!(cluster.metric("warmroute_jwks_keys", &[ISSUER]).await, 1.0);
    // What one tenant stored is not another's.
    let body = json!({"model": "sim", "input": "hi", "max_output_tokens": 1}).to_string();
    let stored = post_as(&cluster, &token, "/v1/responses", body)
        .await
        .json();
    let path = format!("/v1/responses/{}", stored["id"].as_str().unwrap());
    let get = async |token: &str| {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", &*bearer)];
        client::send(cluster.router.api, "GET", &path, &headers, "")
            .await
            .status
    };
    assert_eq!(get(&token).await, 200);
    assert_eq!(get(&signer.token(&json!({"tenant": "b"}))).await, 404);
    assert_eq!(get("sk-c").await, 404);
}

#[tokio::test]
async fn wrong_tokens_are_refused_with_the_reason_and_reach_no_engine() {
    let signer = Signer::new("k1");
    let other = Signer::new("k1");
    let server = KeyServer::start(&signer.keys()).await;
    let cluster = cluster(&server, |_| {}).await;
    let good = json!({"tenant": "a"});
    let (now, with) = (warmroute::observe::unix_s(), |change: Value| {
        let mut claims = json!({"tenant": "a"});
        claims
            .as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        signer.token(&claims)
    });
    let cases = [
        (
            with(json!({"iss": "https://evil.example"})),
            "issuer (`iss`)",
        ),
        (with(json!({"exp": now - 3_600})), "expired"),
        (with(json!({"nbf": now + 3_600})), "not valid yet"),
        (with(json!({"aud": "another"})), "audience"),
        (
            with(json!({"tenant": "not-listed"})),
            "claim `tenant` names is not known",
        ),
        (with(json!({"tenant": 5})), "claim `tenant` is missing"),
        (other.token(&good), "signature"),
        (signer.unsigned(&good), "accepted algorithm"),
        (
            signer.with_public_key_as_secret(&good),
            "accepted algorithm",
        ),
        ("a.b.c".to_owned(), "no valid JSON Web Token"),
        ("sk-unknown".to_owned(), "incorrect API key"),
    ];
    for (token, reason) in cases {
        for _ in 0..2 {
            refused(&chat_as(&cluster, &token).await, &token, reason);
        }
    }
    assert_eq!(cluster.requests().await, [0]);
    assert!(verified(&cluster, "expired").await >= 2.0);
}

#[tokio::test]
async fn a_rotated_key_is_found_at_once_and_the_old_one_is_forgotten() {
    let (first, second) = (Signer::new("k1"), Signer::new("k2"));
    let server = KeyServer::start(&first.keys()).await;
    let cluster = cluster(&server, |_| {}).await;
    let (old, new) = (
        first.token(&json!({"tenant": "a"})),
        second.token(&json!({"tenant": "a"})),
    );
    assert_eq!(chat_as(&cluster, &old).await.status, 200);
    server.publish(200, &second.keys());
    // The first look was less than the interval ago, perhaps.
    eventually("the new key is known", async || {
        chat_as(&cluster, &new).await.status == 200
    })
    .await;
    // The old token was known; its key is withdrawn.
    refused(
        &chat_as(&cluster, &old).await,
        &old,
        "not among the public keys",
    );
}

#[tokio::test]
async fn a_flood_of_unknown_keys_does_not_flood_the_issuer() {
    let signer = Signer::new("k1");
    let server = KeyServer::start(&signer.keys()).await;
    let cluster = cluster(&server, |config| {
        let advanced = &mut config.jwt.as_mut().unwrap().advanced;
        advanced.unknown_key_interval = Duration::from_secs(3_600);
    })
    .await;
    let good = signer.token(&json!({"tenant": "a"}));
    assert_eq!(chat_as(&cluster, &good).await.status, 200);
    for number in 0..50 {
        let unknown = Signer::new(&format!("made-up-{number}"));
        let token = unknown.token(&json!({"tenant": "a"}));
        refused(
            &chat_as(&cluster, &token).await,
            &token,
            "not among the public keys",
        );
    }
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn without_any_keys_tokens_get_503_and_the_last_keys_outlive_their_server() {
    let signer = Signer::new("k1");
    let server = KeyServer::start("").await;
    server.publish(500, "");
    let cluster = cluster(&server, |_| {}).await;
    let token = signer.token(&json!({"tenant": "a"}));
    let answer = chat_as(&cluster, &token).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(answer.code(), "issuer_keys_unavailable");
    assert!(answer.text().contains("public keys of its issuer"));
    assert!(!answer.header("retry-after").is_empty());
    // Keys of the configuration need no issuer.
    assert_eq!(chat_as(&cluster, "sk-c").await.status, 200);
    assert_eq!(cluster.metric("warmroute_jwks_keys", &[ISSUER]).await, 0.0);
    server.publish(200, &signer.keys());
    eventually("the keys are read", async || {
        chat_as(&cluster, &token).await.status == 200
    })
    .await;
    for (status, body) in [
        (500, ""),
        (200, "no keys"),
        (200, r#"{"keys":[]}"#),
        (302, ""),
    ] {
        server.publish(status, body);
        let (before, failed) = (server.requests(), ["result=\"failed\""]);
        let failures = cluster.metric("warmroute_jwks_reads_total", &failed).await;
        // A made-up key makes the router look, and may be one that the issuer has published since.
        let with_made_up_key = async || {
            let token = Signer::new("k9").token(&json!({"tenant": "a"}));
            chat_as(&cluster, &token).await
        };
        eventually("a key that is not known may exist", async || {
            let answer = with_made_up_key().await;
            let is_unavailable = answer.code() == "issuer_keys_unavailable";
            let expected = if is_unavailable { 503 } else { 401 };
            assert_eq!(answer.status, expected, "{}", answer.text());
            is_unavailable && server.requests() > before
        })
        .await;
        eventually("it is counted", async || {
            cluster.metric("warmroute_jwks_reads_total", &failed).await > failures
        })
        .await;
        let fresh = signer.token(&json!({"tenant": "b", "jti": status}));
        assert_eq!(chat_as(&cluster, &fresh).await.status, 200);
        assert_eq!(chat_as(&cluster, &token).await.status, 200);
        server.publish(200, &signer.keys());
        eventually("a made-up key is none of the issuer", async || {
            with_made_up_key().await.status == 401
        })
        .await;
    }
}

#[tokio::test]
async fn limits_hold_for_the_tenant_that_tokens_name() {
    let signer = Signer::new("k1");
    let server = KeyServer::start(&signer.keys()).await;
    let cluster = cluster(&server, |config| {
        config.tenants[0] = TenantSpec {
            keys: vec![Secret::new("sk-a")],
            ..tenant("a", json!({"requests_per_minute": 3}))
        };
        config.tenants[1] = tenant("b", json!({"requests_per_minute": 2}));
        config.jwt.as_mut().unwrap().default_tenant = "b".to_owned();
    })
    .await;
    // Two tokens and a key of one tenant count together.
    let tokens = ["1", "2"].map(|id| signer.token(&json!({"tenant": "a", "jti": id})));
    for key in [&*tokens[0], &tokens[1], "sk-a"] {
        let answer = chat_as(&cluster, key).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "3");
    }
    for key in [&*tokens[0], &tokens[1], "sk-a"] {
        let answer = chat_as(&cluster, key).await;
        assert_eq!(answer.status, 429, "{}", answer.text());
    }
    // Tenants that are not listed share the limits of the default one.
    let unlisted = ["x", "y", "z"].map(|name| signer.token(&json!({ "tenant": name })));
    let mut statuses = Vec::new();
    for token in &unlisted {
        statuses.push(chat_as(&cluster, token).await.status);
    }
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(of_tenant(&cluster, "b").await, 3.0);
    let reserved = signer.token(&json!({"tenant": "default"}));
    refused(&chat_as(&cluster, &reserved).await, &reserved, "not known");
}

#[tokio::test]
async fn tokens_are_turned_on_changed_and_off_without_a_restart() {
    let signer = Signer::new("k1");
    let folder = Folder::new();
    let keys = folder.path("jwks.json");
    std::fs::write(&keys, signer.keys()).unwrap();
    let engine = crate::cluster::Engine::here("w0", fast()).await;
    let base = format!(
        "{}\ntenants: [{{name: a, keys: [sk-a]}}, {{name: b, keys: [sk-b]}}]\n",
        text(&workers([&engine]))
    );
    let with = |claim: &str| {
        format!(
            "{base}jwt: {{issuers: [{{issuer: '{ISSUER}', audiences: [warmroute], jwks: '{}', tenant_claim: {claim}}}]}}\n",
            keys.display()
        )
    };
    let cluster = folder.start(vec![engine], &base).await;
    let token = signer.token(&json!({"tenant": "a", "team": "b"}));
    let reload = async |text: &str| {
        folder.write(text);
        let answer = client::post(cluster.router.admin, "/reload", "").await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    eventually("the worker is up", async || {
        chat_as(&cluster, "sk-a").await.status == 200
    })
    .await;
    refused(
        &chat_as(&cluster, &token).await,
        &token,
        "incorrect API key",
    );
    reload(&with("tenant")).await;
    assert_eq!(chat_as(&cluster, &token).await.status, 200);
    let (a, b) = (
        of_tenant(&cluster, "a").await,
        of_tenant(&cluster, "b").await,
    );
    reload(&with("team")).await;
    assert_eq!(chat_as(&cluster, &token).await.status, 200);
    assert_eq!(of_tenant(&cluster, "a").await, a);
    assert_eq!(of_tenant(&cluster, "b").await, b + 1.0);
    // The file is looked at again and again.
    let other = Signer::new("k2");
    std::fs::write(&keys, other.keys()).unwrap();
    let second = other.token(&json!({"team": "a"}));
    eventually("the file is read again", async || {
        chat_as(&cluster, &second).await.status == 200
    })
    .await;
    reload(&base).await;
    refused(
        &chat_as(&cluster, &token).await,
        &token,
        "incorrect API key",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_live_check_reads_the_keys_of_each_issuer() {
    let server = KeyServer::start(&Signer::new("k1").keys()).await;
    let engine = crate::cluster::Engine::here("w0", fast()).await;
    let issuer =
        |name: &str, url: &str| format!("{{issuer: '{name}', audiences: [a], jwks: '{url}'}}");
    let with = |issuers: &str| {
        let base = text(&workers([&engine]));
        format!("{base}\ntenants: [{{name: a}}]\njwt: {{issuers: [{issuers}]}}\n")
    };
    let good = issuer("good", &server.url());
    let (printed, code) = check(&with(&good), &["--live"]).await;
    assert!(
        printed.contains("keys of good: 1 can verify tokens"),
        "{printed}"
    );
    assert_eq!(code, 0, "{printed}");
    server.publish(404, "");
    let (printed, code) = check(&with(&good), &["--live"]).await;
    assert!(
        printed.contains("keys of good: FAILED: the server answered 404"),
        "{printed}"
    );
    assert_eq!(code, 1, "{printed}");
}
