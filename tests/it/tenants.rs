//! Tenants: API keys, and cache salts that separate prefix caches.

use serde_json::json;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use xxhash_rust::xxh3::xxh3_64;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, chat, eventually, fast, generating};
use crate::reload::{Folder, text, workers};

fn tenant(name: &str, keys: &[&str], salt: &str) -> TenantSpec {
    TenantSpec {
        name: name.to_owned(),
        keys: keys.iter().copied().map(Secret::new).collect(),
        cache_salt: Secret::new(salt),
        ..TenantSpec::default()
    }
}

/// `a` has two keys, one configured as a digest (of `sk-example`); `b` and `c` have different salts.
async fn cluster() -> Cluster {
    const DIGEST: &str = "sha256:f2d4b279b82ad92867af5878fe7482caebdd7b75499868d0362a6e63ff51f046";
    Cluster::start(vec![fast()], |config| {
        config.tenants = vec![
            tenant("a", &["sk-a", DIGEST], ""),
            tenant("b", &["sk-b"], "pepper \"and\" salt"),
            tenant("c", &["sk-c"], "sugar"),
        ];
        // Bodies are to be as they were sent, except for salts.
        config.requests.stream_usage = false;
    })
    .await
}

async fn post_as(cluster: &Cluster, key: &str, path: &str, body: &str) -> Answer {
    let bearer = format!("Bearer {key}");
    let headers = [("authorization", &*bearer), ("x-warmroute-decision", "1")];
    client::send(cluster.router.api, "POST", path, &headers, body.to_owned()).await
}

#[tokio::test]
async fn a_request_without_a_known_key_reaches_no_engine() {
    let cluster = cluster().await;
    let body = chat("hi", 1, false);
    let paths = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/rerank"),
        ("POST", "/v2/rerank"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/sim"),
        ("GET", "/v1/unknown"),
        ("GET", "/v1"),
    ];
    let credentials = [
        None,
        Some("Bearer sk-none"),
        Some("Bearer "),
        Some("Basic c2stYTo="),
        Some("sk-a"),
    ];
    for (method, path) in paths {
        for authorization in credentials {
            let mut headers = vec![("x-request-id", "mine")];
            headers.extend(authorization.map(|value| ("authorization", value)));
            let api = cluster.router.api;
            let answer = client::send(api, method, path, &headers, body.clone()).await;
            let said = format!("{method} {path} {authorization:?}: {}", answer.text());
            assert_eq!(answer.status, 401, "{said}");
            assert_eq!(answer.code(), "invalid_api_key", "{said}");
            assert_eq!(
                answer.json()["error"]["type"],
                "invalid_request_error",
                "{said}"
            );
            assert_eq!(answer.header("www-authenticate"), "Bearer", "{said}");
            assert_eq!(answer.header("x-request-id"), "mine", "{said}");
            assert!(!answer.text().contains("sk-none"), "{said}");
        }
    }
    assert_eq!(cluster.requests().await, [0]);
    let refused = ["status=\"401\"", "code=\"invalid_api_key\""];
    let refused = cluster
        .metric("warmroute_request_errors_total", &refused)
        .await;
    assert_eq!(refused, (paths.len() * credentials.len()) as f64);
    assert_eq!(
        cluster.metric("warmroute_tenant_requests_total", &[]).await,
        0.0
    );
}

#[tokio::test]
async fn client_keys_are_not_forwarded_to_engines() {
    let cluster = cluster().await;
    for (key, name) in [("sk-a", "a"), ("sk-example", "a"), ("sk-b", "b")] {
        let label = format!("tenant=\"{name}\"");
        let labels = [&*label];
        let before = cluster
            .metric("warmroute_tenant_requests_total", &labels)
            .await;
        for (path, body) in generating(2, false) {
            let answer = post_as(&cluster, key, path, &body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let arrival = cluster.engines[0].last_post().await;
            assert!(
                !arrival.headers.contains_key("authorization"),
                "{arrival:?}"
            );
        }
        let after = cluster
            .metric("warmroute_tenant_requests_total", &labels)
            .await;
        assert_eq!(after, before + 3.0, "{key}");
    }
    let models = [("authorization", "bearer sk-a")];
    let models = client::send(cluster.router.api, "GET", "/v1/models", &models, "").await;
    assert_eq!(models.status, 200);
}

#[tokio::test]
async fn a_worker_gets_its_own_key() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.tenants = vec![tenant("a", &["sk-a"], "")];
        config.workers[0].api_key = Secret::new("engine-key");
    })
    .await;
    let answer = post_as(
        &cluster,
        "sk-a",
        "/v1/chat/completions",
        &chat("hi", 1, false),
    )
    .await;
    assert_eq!(answer.status, 200);
    let arrival = cluster.engines[0].last_post().await;
    assert_eq!(arrival.headers["authorization"], "Bearer engine-key");
}

#[tokio::test]
async fn admin_pages_need_no_key() {
    let cluster = cluster().await;
    for path in ["/healthz", "/readyz", "/metrics", "/fleet"] {
        assert_eq!(cluster.admin(path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn a_tenants_cache_salt_is_added_to_generating_requests_only() {
    let cluster = cluster().await;
    let sent = async |key: &str, path: &str, body: &str| {
        let answer = post_as(&cluster, key, path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        cluster.engines[0].last_post().await.body_xxh3
    };
    let digest = |body: &str| format!("{:016x}", xxh3_64(body.as_bytes()));
    for (path, body) in generating(1, true) {
        if path == "/v1/responses" {
            // The router writes this body itself.
            sent("sk-b", path, &body).await;
            let body = cluster.engines[0].last_body().await;
            assert_eq!(body["cache_salt"], "pepper \"and\" salt");
            continue;
        }
        let body = format!(" {body}\n");
        let salted = body.replacen('{', r#"{"cache_salt":"pepper \"and\" salt","#, 1);
        assert_eq!(sent("sk-b", path, &body).await, digest(&salted), "{path}");
        assert_eq!(sent("sk-a", path, &body).await, digest(&body), "{path}");
    }
    let body = json!({"model": "sim", "input": "hi"}).to_string();
    assert_eq!(sent("sk-b", "/v1/embeddings", &body).await, digest(&body));
}

#[tokio::test]
async fn a_client_of_a_salted_tenant_cannot_send_a_cache_salt() {
    let cluster = cluster().await;
    for (path, body) in generating(1, false) {
        for own in [
            r#""cache_salt":"x""#,
            r#""cache\u005fsalt":null"#,
            r#""cache_salt":5"#,
        ] {
            let body = body.replacen('{', &format!("{{{own},"), 1);
            let answer = post_as(&cluster, "sk-b", path, &body).await;
            assert_eq!(answer.status, 400, "{path} {own}");
            assert_eq!(
                (&*answer.code(), &*answer.param()),
                ("unsupported_parameter", "cache_salt")
            );
        }
        // A client of a tenant without a salt may send one.
        let body = body.replacen('{', r#"{"cache_salt":"x","#, 1);
        assert_eq!(
            post_as(&cluster, "sk-a", path, &body).await.status,
            200,
            "{path}"
        );
    }
}

#[tokio::test]
async fn a_client_of_a_salted_tenant_cannot_name_what_engines_keep_of_media() {
    let cluster = cluster().await;
    let message = |uuid: &str| {
        let text = json!({"type": "text", "text": "hi", "uuid": uuid});
        json!([{"role": "user", "content": [text]}])
    };
    let chat = json!({"model": "sim", "max_tokens": 1, "messages": message("logo")}).to_string();
    let embedding = json!({"model": "sim", "messages": message("logo")}).to_string();
    let features = r#"{"model":"sim","token_ids":[1],"features":{"mm_hashes":{"image":["a"]}}}"#;
    let image = json!({"type": "input_image", "image_url": "data:,", "uuid": 7});
    let input = json!([{"role": "user", "content": [image]}]);
    let response = json!({"model": "sim", "input": input}).to_string();
    let document = json!({"content": [{"type": "image_url", "image_url": null, "uuid": "logo"}]});
    let rerank = json!({"model": "sim", "query": "q", "documents": [document]}).to_string();
    for (path, body) in [
        ("/v1/chat/completions", &*chat),
        ("/v1/responses", &*response),
        ("/v1/embeddings", &*embedding),
        ("/v1/rerank", &*rerank),
        ("/inference/v1/generate", features),
    ] {
        let answer = post_as(&cluster, "sk-b", path, body).await;
        assert_eq!(answer.status, 400, "{path}");
        assert_eq!(
            (&*answer.code(), &*answer.param()),
            ("unsupported_parameter", "uuid"),
            "{path}"
        );
    }
    assert_eq!(cluster.requests().await, [0]);
    // Clients of a tenant without a salt know that they share, also with a salt of their own.
    let text = json!({"type": "input_text", "text": "hi", "uuid": "logo"});
    let mut response = json!({"model": "sim", "max_output_tokens": 1, "cache_salt": "x"});
    response["input"] = json!([{"role": "user", "content": [text]}]);
    let response = response.to_string();
    for (path, body) in [
        ("/v1/chat/completions", &chat),
        ("/v1/responses", &response),
    ] {
        let answer = post_as(&cluster, "sk-a", path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_body_asks_an_engine_for_no_earlier_place_than_its_tenant_may_have() {
    let cluster = Cluster::start(vec![fast()], |config| {
        let important = TenantSpec {
            max_priority: Some(5),
            ..tenant("b", &["sk-b"], "")
        };
        config.tenants = vec![tenant("a", &["sk-a"], ""), important];
    })
    .await;
    for (path, body) in generating(1, false) {
        for (key, asked, expected) in [
            ("sk-a", -9, 0),
            ("sk-a", 9, 9),
            ("sk-b", -9, -5),
            ("sk-b", -3, -3),
        ] {
            let body = body.replacen('{', &format!(r#"{{"priority":{asked},"#), 1);
            let answer = post_as(&cluster, key, path, &body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let sent = cluster.engines[0].last_body().await;
            assert_eq!(sent["priority"], expected, "{path} {key} {asked}");
        }
    }
}

#[tokio::test]
async fn prompts_of_one_salted_tenant_are_cold_for_another() {
    let cluster = cluster().await;
    let body = chat(
        &"Once upon a time there was a router. ".repeat(40),
        1,
        false,
    );
    let held = async |key: &str| {
        let answer = post_as(&cluster, key, "/v1/chat/completions", &body).await;
        let decision = answer.header("x-warmroute-decision").to_owned();
        let usage = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
        (decision, usage.as_u64().unwrap_or(0))
    };
    for key in ["sk-a", "sk-b", "sk-c"] {
        let (decision, cached) = held(key).await;
        assert!(decision.contains("cached_tokens=0;"), "{key}: {decision}");
        assert_eq!(cached, 0, "{key}");
        let (decision, cached) = held(key).await;
        assert!(!decision.contains("cached_tokens=0;"), "{key}: {decision}");
        assert!(cached > 0, "{key}");
    }
}

#[tokio::test]
async fn explain_respects_cache_salts_and_stored_responses() {
    let cluster = cluster().await;
    for (path, body) in generating(2, false) {
        assert_eq!(post_as(&cluster, "sk-b", path, &body).await.status, 200);
        let cached = async |tenant: &str| {
            let explain = format!("/explain?path={path}{tenant}");
            let answer = cluster.post_admin(&explain, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            answer.json()["workers"][0]["cached_tokens"]
                .as_u64()
                .unwrap()
        };
        assert!(cached("&tenant=b").await > 0, "{path}");
        for other in ["", "&tenant=a", "&tenant=c"] {
            assert_eq!(cached(other).await, 0, "{path} {other}");
        }
    }
    let path = "/v1/responses";
    let body = json!({"model": "sim", "input": "hello", "max_output_tokens": 2});
    let made = post_as(&cluster, "sk-b", path, &body.to_string())
        .await
        .json();
    let next = json!({"model": "sim", "input": "more", "previous_response_id": made["id"]});
    for (tenant, status) in [("b", 200), ("a", 400), ("unknown", 400)] {
        let explain = format!("/explain?path={path}&tenant={tenant}");
        let answer = cluster.post_admin(&explain, &next.to_string()).await;
        assert_eq!(answer.status, status, "{tenant} {}", answer.text());
    }
}

#[tokio::test]
async fn files_with_keys_are_read_again_when_they_change() {
    let folder = Folder::new();
    let keys = folder.path("keys");
    std::fs::write(&keys, "sk-old\n").unwrap();
    let engine = Engine::here("w0", fast()).await;
    let text = format!(
        "{}\ntenants: [{{name: a, keys: ['file:{}']}}]\n",
        text(&workers([&engine])).replace("watch_interval: 0s", "watch_interval: 20ms"),
        keys.display()
    );
    let cluster = folder.start(vec![engine], &text).await;
    let status = async |key: &str| {
        let body = chat("hi", 1, false);
        post_as(&cluster, key, "/v1/chat/completions", &body)
            .await
            .status
    };
    eventually("the old key is good", async || {
        status("sk-old").await == 200
    })
    .await;
    assert_eq!(status("sk-new").await, 401);
    // As the kubelet does it: another file in its place.
    let next = folder.path("next");
    std::fs::write(&next, "# rotated\nsk-new\nsk-other\n").unwrap();
    std::fs::rename(&next, &keys).unwrap();
    eventually("the new key is good", async || {
        status("sk-new").await == 200
    })
    .await;
    assert_eq!(
        [status("sk-other").await, status("sk-old").await],
        [200, 401]
    );
    // A file that cannot be used changes nothing.
    std::fs::write(&keys, "two words\n").unwrap();
    eventually("the file is refused", async || {
        let page = cluster.admin("/config").await.text().to_owned();
        page.contains("no bearer token can have")
    })
    .await;
    assert_eq!(status("sk-new").await, 200);
}
