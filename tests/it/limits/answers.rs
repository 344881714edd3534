//! What clients of a tenant with limits see, from one replica without Redis.

use std::time::Instant;

use serde_json::json;
use warmroute::openai::tenant::TenantSpec;
use warmroute::sim::worker::Settings;

use super::counting::given_back;
use super::*;
use crate::cluster::{Cluster, chat_only, fast, generating, unhurried};

async fn cluster(tenants: Vec<TenantSpec>) -> Cluster {
    cluster_of(fast(), tenants).await
}

async fn cluster_of(engine: Settings, tenants: Vec<TenantSpec>) -> Cluster {
    Cluster::start(vec![engine], |config| config.tenants = tenants).await
}

#[tokio::test]
async fn every_answer_says_what_is_left() {
    let limits = r#"{"requests_per_minute": 100, "tokens_per_minute": 60000}"#;
    let cluster = cluster(vec![tenant("a", limits), tenant("free", "")]).await;
    let started = Instant::now();
    let mut left = 100;
    for is_stream in [false, true] {
        for (path, body) in generating(2, is_stream) {
            let answer = post_as(&cluster.router, "a", path, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            left -= 1;
            assert_eq!(number(&answer, "x-ratelimit-limit-requests"), 100);
            assert_eq!(number(&answer, "x-ratelimit-limit-tokens"), 60_000);
            let remaining = number(&answer, "x-ratelimit-remaining-requests");
            let most = left + given_back(100, started);
            assert!(
                (left..=most).contains(&remaining),
                "{path} {remaining} {left}"
            );
            assert!(number(&answer, "x-ratelimit-remaining-tokens") < 60_000);
            for header in ["x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"] {
                assert!(answer.header(header).ends_with('s'), "{answer:?}");
            }
        }
    }
    let wrong = post_as(&cluster.router, "a", "/v1/chat/completions", "{").await;
    assert_eq!(wrong.status, 400);
    assert!(number(&wrong, "x-ratelimit-remaining-requests") >= left);
    let headers = [("authorization", &*bearer("a"))];
    let models = client::send(cluster.router.api, "GET", "/v1/models", &headers, "").await;
    assert!(number(&models, "x-ratelimit-remaining-requests") >= left);
    let free = chat_as(&cluster.router, "free").await;
    assert_eq!(free.header("x-ratelimit-limit-requests"), "");
}

#[tokio::test]
async fn a_request_beyond_the_limit_is_refused_as_at_openai() {
    let limits = r#"{"requests_per_minute": 6, "burst": "20s"}"#;
    let cluster = cluster(vec![tenant("a", limits)]).await;
    for _ in 0..2 {
        assert_eq!(chat_as(&cluster.router, "a").await.status, 200);
    }
    let refused = chat_as(&cluster.router, "a").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.code(), "rate_limit_exceeded");
    let error = &refused.json()["error"];
    assert_eq!(error["type"], "requests");
    assert_eq!(error["param"], json!(null));
    let message = error["message"].as_str().unwrap();
    let begin = "Rate limit reached for sim on requests per min (RPM): Limit 6 (at most 2 at once), Used 2, \
                 Requested 1. Please try again in ";
    assert!(message.starts_with(begin), "{message}");
    let (seconds, millis) = (
        number(&refused, "retry-after"),
        number(&refused, "retry-after-ms"),
    );
    assert!((1..=10).contains(&seconds), "{seconds}");
    assert_eq!(seconds, millis.div_ceil(1_000));
    assert_eq!(refused.header("x-should-retry"), "");
    assert_eq!(number(&refused, "x-ratelimit-remaining-requests"), 0);
    assert_eq!(cluster.requests().await, [2]);
    let labels = ["tenant=\"a\"", "reason=\"requests_per_minute\""];
    let refusals = cluster.metric("warmroute_limit_refusals_total", &labels);
    assert_eq!(refusals.await, 1.0);
}

#[tokio::test]
async fn tokens_are_reserved_and_corrected_by_what_was_used() {
    let limits = r#"{"tokens_per_minute": 6000}"#;
    let cluster = cluster(vec![tenant("a", limits)]).await;
    // The reserve is 100 and 300, of which 5 are used.
    let first = completion(100, 300);
    let started = Instant::now();
    let answer = post_as(&cluster.router, "a", "/v1/completions", &first).await;
    assert_eq!(answer.status, 200);
    assert!(number(&answer, "x-ratelimit-remaining-tokens") <= 5_610);
    let generated = answer.json()["usage"]["completion_tokens"]
        .as_u64()
        .unwrap();
    let row = tenant_row(&cluster, "a").await;
    let remaining = row["limits"][0]["remaining"].as_u64().unwrap();
    let expected = 5_900 - generated;
    let most = expected + given_back(6_000, started);
    assert!((expected - 1..=most).contains(&remaining), "{row}");
    // More than was ever free.
    let large = post_as(
        &cluster.router,
        "a",
        "/v1/completions",
        &completion(6_001, 1),
    )
    .await;
    assert_eq!(large.status, 429);
    assert_eq!(large.header("x-should-retry"), "false");
    assert_eq!(large.header("retry-after"), "");
    assert_eq!(large.json()["error"]["type"], "tokens");
    let message = large.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.starts_with(
            "Request too large for sim on tokens per min (TPM): Limit 6000, Requested 6002."
        ),
        "{message}"
    );
}

#[tokio::test]
async fn cached_prompt_tokens_count_their_weight_from_admission_on() {
    // It gives back less than two a second.
    let limits = r#"{"tokens_per_minute": 100, "burst": "1h"}"#;
    let cluster = Cluster::start(vec![fast()], |config| {
        config.limits.cached_weight = 0.1;
        config.tenants = vec![tenant("a", limits)];
    })
    .await;
    let body = completion(1_000, 1);
    let mut left = Vec::new();
    for _ in 0..2 {
        let answer = post_as(&cluster.router, "a", "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        left.push(number(&answer, "x-ratelimit-remaining-tokens"));
    }
    assert!((4_999..5_050).contains(&left[0]), "{left:?}");
    // Nearly all of it is cached: 100 of its tokens, the last block and the output.
    let charged = left[0] - left[1];
    assert!((60..200).contains(&charged), "{left:?}");
    // The engine reports as much.
    eventually("the request has ended", async || {
        tenant_row(&cluster, "a").await["running_requests"] == 0
    })
    .await;
    let row = tenant_row(&cluster, "a").await;
    let remaining = row["limits"][0]["remaining"].as_u64().unwrap();
    assert!((left[1]..left[1] + 60).contains(&remaining), "{row}");
}

async fn tenant_row(cluster: &Cluster, name: &str) -> serde_json::Value {
    let page = cluster.admin("/tenants").await.json();
    let mut rows = page["tenants"].as_array().unwrap().iter();
    rows.find(|row| row["name"] == name).cloned().unwrap()
}

#[tokio::test]
async fn every_answer_of_the_router_is_counted_with_its_outcome() {
    let limits = r#"{"requests_per_minute": 1, "burst": "60s"}"#;
    let cluster = cluster(vec![tenant("a", limits), tenant("free", "")]).await;
    let path = "/v1/chat/completions";
    let ask = async |key: &str, method: &str, path: &str, model: &str| {
        let body = cluster::chat("hello", 1, false).replace("\"sim\"", &format!("\"{model}\""));
        let headers = [("authorization", &*bearer(key))];
        let answer = client::send(cluster.router.api, method, path, &headers, body).await;
        answer.status
    };
    assert_eq!(ask("a", "POST", path, "sim").await, 200);
    for (key, method, path, model, status) in [
        ("a", "POST", path, "sim", 429),
        ("nobody", "POST", path, "sim", 401),
        ("free", "POST", path, "none-such", 404),
        ("free", "POST", "/v1/nothing", "sim", 404),
        ("free", "GET", path, "sim", 405),
        ("free", "GET", "/v1/responses/resp_none", "sim", 404),
        ("free", "POST", "/v1/responses", "none-such", 400),
    ] {
        let count = async || {
            let labels = ["outcome=\"refused\"", "worker=\"none\"", "status=\"none\""];
            cluster.metric("warmroute_requests_total", &labels).await
        };
        let before = count().await;
        assert_eq!(
            ask(key, method, path, model).await,
            status,
            "{method} {path}"
        );
        assert_eq!(count().await - before, 1.0, "{method} {path} {status}");
    }
    let all = cluster.metric("warmroute_requests_total", &[]).await;
    let complete = ["outcome=\"complete\"", "worker=\"w0\""];
    assert_eq!(all, 8.0);
    assert_eq!(
        cluster.metric("warmroute_requests_total", &complete).await,
        1.0
    );
    // 429, 401, 404 and 405: the path tells the API.
    let chats = ["api=\"chat\"", "outcome=\"refused\""];
    assert_eq!(
        cluster.metric("warmroute_requests_total", &chats).await,
        4.0
    );
}

#[tokio::test]
async fn models_and_lengths_that_a_tenant_may_not_use_are_refused() {
    let limits =
        r#"{"requests_per_minute": 100, "models": ["other*", {"name": "sim", "max_tokens": 10}]}"#;
    let cluster = cluster(vec![
        tenant("a", limits),
        tenant("b", r#"{"models": ["other"]}"#),
    ])
    .await;
    let hidden = chat_as(&cluster.router, "b").await;
    assert_eq!((hidden.status, &*hidden.code()), (404, "model_not_found"));
    let headers = [("authorization", &*bearer("b"))];
    let models = client::send(cluster.router.api, "GET", "/v1/models", &headers, "").await;
    assert_eq!(models.json()["data"], json!([]));
    let model = client::send(cluster.router.api, "GET", "/v1/models/sim", &headers, "").await;
    assert_eq!(model.status, 404);
    let long = post_as(&cluster.router, "a", "/v1/completions", &completion(3, 11)).await;
    assert_eq!((long.status, &*long.code()), (400, "invalid_value"));
    assert_eq!(long.param(), "max_tokens");
    let fits = post_as(&cluster.router, "a", "/v1/completions", &completion(3, 10)).await;
    assert_eq!(fits.status, 200);
    assert_eq!(tenant_row(&cluster, "b").await["running_requests_here"], 0);
    let other = Cluster::start(vec![fast()], |config| {
        config.tenants = vec![tenant("c", r#"{"models": ["sim"]}"#)];
    });
    let other = other.await;
    assert_eq!(chat_as(&other.router, "c").await.status, 200);
    eventually("nothing runs", async || {
        tenant_row(&other, "c").await["running_requests_here"] == 0
    })
    .await;
    // The refusals charged nothing.
    assert_eq!(number(&fits, "x-ratelimit-remaining-requests"), 99);
}

#[tokio::test]
async fn requests_at_the_same_time_are_limited_until_they_end_or_their_client_leaves() {
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.limits.output_reserve = 20;
        config.tenants = vec![tenant(
            "a",
            // It gives one token back in six seconds, so that what was read of the second is still seen.
            r#"{"concurrent_requests": 2, "output_tokens_per_minute": 10, "burst": "1h"}"#,
        )];
    })
    .await;
    let headers = [("authorization", &*bearer("a"))];
    let body = cluster::chat("hello", 10_000, true);
    let open = async || {
        client::open(
            cluster.router.api,
            "POST",
            "/v1/chat/completions",
            &headers,
            body.clone(),
        )
        .await
    };
    let (first, mut second) = (open().await, open().await);
    assert_eq!((first.status, second.status), (200, 200));
    let refused = chat_as(&cluster.router, "a").await;
    assert_eq!(
        (refused.status, &*refused.code()),
        (429, "rate_limit_exceeded")
    );
    assert!(
        refused
            .text()
            .contains("concurrent requests: Limit 2, Used 2"),
        "{}",
        refused.text()
    );
    second.until("content").await;
    for _ in 0..5 {
        second.next().await.unwrap().unwrap();
    }
    drop(first);
    drop(second);
    eventually("the requests have ended", async || {
        tenant_row(&cluster, "a").await["running_requests"] == 0
    })
    .await;
    assert_eq!(chat_as(&cluster.router, "a").await.status, 200);
    // Charged for what was read of the second, and not for the 10,000 that it asked for.
    let row = tenant_row(&cluster, "a").await;
    let remaining = row["limits"][0]["remaining"].as_u64().unwrap();
    assert!((300..600).contains(&remaining), "{row}");
}

#[tokio::test]
async fn a_request_that_no_engine_answers_is_given_back() {
    let mut cluster = cluster(vec![tenant("a", r#"{"requests_per_minute": 2}"#)]).await;
    cluster.engines[0].kill().await;
    for _ in 0..5 {
        let answer = chat_as(&cluster.router, "a").await;
        assert!([502, 503].contains(&answer.status), "{}", answer.text());
        assert_eq!(number(&answer, "x-ratelimit-limit-requests"), 2);
    }
    let row = tenant_row(&cluster, "a").await;
    assert_eq!(row["limits"][0]["remaining"], 2, "{row}");
}

#[tokio::test]
async fn a_refusal_of_a_length_names_the_member_that_the_client_sent() {
    let body = |path: &str, members: &str| {
        let prompt = match path {
            "/v1/chat/completions" => r#""messages":[{"role":"user","content":"hi"}]"#,
            "/v1/completions" => r#""prompt":"hi""#,
            "/v1/responses" => r#""input":"hi""#,
            _ => r#""token_ids":[1]"#,
        };
        format!(r#"{{"model":"sim",{prompt},{members}}}"#)
    };
    for engine in [fast(), chat_only()] {
        let cluster = cluster_of(engine, vec![tenant("a", r#"{"max_tokens": 10}"#)]).await;
        for (path, members, expected) in [
            ("/v1/completions", r#""max_tokens":11"#, "max_tokens"),
            ("/v1/chat/completions", r#""max_tokens":11"#, "max_tokens"),
            (
                "/v1/chat/completions",
                r#""max_completion_tokens":11,"max_tokens":5"#,
                "max_completion_tokens",
            ),
            (
                "/v1/responses",
                r#""max_output_tokens":16"#,
                "max_output_tokens",
            ),
            (
                "/inference/v1/generate",
                r#""sampling_params":{"max_tokens":11}"#,
                "sampling_params.max_tokens",
            ),
        ] {
            let answer = post_as(&cluster.router, "a", path, &body(path, members)).await;
            let found = (answer.status, &*answer.param());
            assert_eq!(found, (400, expected), "{path} {}", answer.text());
            let begin = format!("{expected} is too large: ");
            assert!(answer.text().contains(&begin), "{}", answer.text());
        }
        let no_object = body("/inference/v1/generate", r#""sampling_params":5"#);
        let answer = post_as(&cluster.router, "a", "/inference/v1/generate", &no_object).await;
        assert_eq!(answer.param(), "sampling_params");
        assert!(
            answer.text().contains("must be an object"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn a_request_that_names_no_max_tokens_gets_the_most_that_its_tenant_may_ask_for() {
    let limits = r#"{"max_tokens": 100, "models": ["*", {"name": "sim", "max_tokens": 7}]}"#;
    let cluster = cluster(vec![tenant("a", limits), tenant("free", "")]).await;
    let sent = async |name: &str, path: &str, body: serde_json::Value| {
        let answer = post_as(&cluster.router, name, path, &body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let body = cluster.engines[0].last_body().await;
        let names = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
        names.map(|name| body[name].as_u64())
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = "/v1/chat/completions";
    let body = json!({"model": "sim", "messages": messages});
    assert_eq!(sent("a", chat, body).await, [Some(7), None, None]);
    let body = json!({"model": "sim", "messages": messages, "max_completion_tokens": null});
    assert_eq!(sent("a", chat, body).await, [None, Some(7), None]);
    let body = json!({"model": "sim", "messages": messages, "stream": true});
    assert_eq!(sent("a", chat, body).await, [Some(7), None, None]);
    let body = json!({"model": "sim", "messages": messages, "max_tokens": 3});
    assert_eq!(sent("a", chat, body).await, [Some(3), None, None]);
    let body = json!({"model": "sim", "input": "hi"});
    assert_eq!(sent("a", "/v1/responses", body).await[2], Some(7));
    let body = json!({"model": "sim", "prompt": "hi", "max_tokens": null});
    assert_eq!(
        sent("a", "/v1/completions", body).await,
        [Some(7), None, None]
    );
    let body = json!({"model": "sim", "messages": messages, "max_tokens": null});
    assert_eq!(sent("free", chat, body).await, [None, None, None]);
}

/// vLLM and SGLang read `"1000"` and `1e3` as numbers, so that a limit that does not is none.
#[tokio::test]
async fn numbers_that_only_engines_understand_get_around_no_limit() {
    let limits = r#"{"max_tokens": 100, "tokens_per_minute": 2000}"#;
    let cluster = cluster(vec![tenant("a", limits), tenant("free", "")]).await;
    let post = async |name: &str, field: &str, value: &str| {
        let body = format!(
            r#"{{"model":"sim","messages":[{{"role":"user","content":"hi"}}],"{field}":{value}}}"#
        );
        post_as(&cluster.router, name, "/v1/chat/completions", &body).await
    };
    let odd = [
        "\"100000\"",
        "-1",
        "1.5",
        "1e400",
        "true",
        "[5]",
        "{}",
        "\" 9 \"",
    ];
    for field in ["max_tokens", "max_completion_tokens", "n"] {
        for value in odd {
            let answer = post("a", field, value).await;
            let found = (answer.status, &*answer.code(), &*answer.param());
            assert_eq!(
                found,
                (400, "invalid_type", field),
                "{field} {value}: {}",
                answer.text()
            );
        }
    }
    for stream in ["1", "\"true\""] {
        let answer = post("a", "stream", stream).await;
        assert_eq!((answer.status, &*answer.code()), (400, "invalid_type"));
    }
    assert_eq!(post("a", "max_tokens", "1e5").await.code(), "invalid_value");
    assert_eq!(
        post("a", "max_tokens", "101.0").await.code(),
        "invalid_value"
    );
    // 128 answers of up to 100 tokens are more than a minute's worth.
    let many = post("a", "n", "128").await;
    assert_eq!((many.status, many.header("x-should-retry")), (429, "false"));
    let huge = post("a", "n", "18446744073709551615").await;
    assert_eq!((huge.status, huge.header("x-should-retry")), (429, "false"));
    assert_eq!(cluster.requests().await, [0]);
    let labels = ["tenant=\"a\"", "reason=\"type\""];
    let refusals = cluster
        .metric("warmroute_limit_refusals_total", &labels)
        .await;
    assert_eq!(refusals, (3 * odd.len() + 2) as f64);
    // Nothing was charged.
    let answer = post("a", "max_tokens", "1").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(number(&answer, "x-ratelimit-remaining-tokens") > 1_900);
}

#[tokio::test]
async fn streams_that_are_left_at_once_neither_hold_a_place_nor_get_their_tokens_back() {
    // It gives back 333 tokens a second, so that what the streams pay is still seen at the end.
    let limits = r#"{"concurrent_requests": 4, "tokens_per_minute": 20000}"#;
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.tenants = vec![tenant("a", limits)];
    })
    .await;
    let headers = [("authorization", &*bearer("a"))];
    let body = cluster::chat(&"hello ".repeat(300), 1_000, true);
    for _ in 0..6 {
        let mut open = Vec::new();
        for _ in 0..4 {
            let path = "/v1/chat/completions";
            let stream =
                client::open(cluster.router.api, "POST", path, &headers, body.clone()).await;
            assert_eq!(stream.status, 200);
            open.push(stream);
        }
        let fifth = post_as(&cluster.router, "a", "/v1/chat/completions", &body).await;
        assert_eq!(fifth.status, 429, "{}", fifth.text());
        drop(open);
        eventually("all places are free", async || {
            let page = cluster.admin("/tenants").await.json();
            page["tenants"][0]["running_requests"] == 0
        })
        .await;
    }
    // Each pays for its prompt at least.
    let page = cluster.admin("/tenants").await.json();
    let left = page["tenants"][0]["limits"][0]["remaining"]
        .as_u64()
        .unwrap();
    assert!(left < 20_000, "{page}");
}

#[tokio::test]
async fn the_decision_says_what_is_left_of_the_limits() {
    let limits = r#"{"requests_per_minute": 100, "tokens_per_minute": 60000}"#;
    let cluster = cluster(vec![tenant("a", limits)]).await;
    let headers = [
        ("authorization", &*bearer("a")),
        ("x-warmroute-decision", "1"),
    ];
    let body = cluster::chat("hello", 1, false);
    let path = "/v1/chat/completions";
    let answer = client::send(cluster.router.api, "POST", path, &headers, body.clone()).await;
    let decision = answer.header("x-warmroute-decision");
    assert!(
        decision.contains("; remaining_requests=99/100; remaining_tokens=599"),
        "{decision}"
    );
    let page = cluster.post_admin("/explain?tenant=a", &body).await.json();
    let rows = page["tenant_limits"]["limits"].as_array().unwrap().clone();
    assert!(
        rows.iter()
            .any(|row| row["limit"] == "requests_per_minute" && row["burst"] == 100),
        "{page}"
    );
}

#[tokio::test]
async fn without_tenants_all_clients_share_the_limits_of_everybody() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.limits.everybody = Some(spec(r#"{"requests_per_minute": 3, "models": ["sim"]}"#));
    })
    .await;
    let body = crate::cluster::chat("hello", 1, false);
    for left in [2, 1, 0] {
        let answer = cluster.post("/v1/chat/completions", body.clone()).await;
        assert_eq!(answer.status, 200);
        assert_eq!(number(&answer, "x-ratelimit-remaining-requests"), left);
    }
    let refused = chat_as(&cluster.router, "whoever").await;
    assert_eq!(
        (refused.status, &*refused.code()),
        (429, "rate_limit_exceeded")
    );
    let error = &refused.json()["error"];
    let message = error["message"].as_str().unwrap();
    let begin = "Rate limit reached for all clients together on requests per min (RPM): Limit 3";
    assert!(message.starts_with(begin), "{message}");
    let page = cluster.admin("/tenants").await.json();
    let tenants = page["tenants"].as_array().unwrap();
    assert_eq!(tenants.len(), 1, "{page}");
    assert_eq!(tenants[0]["name"], "default");
}

#[tokio::test]
async fn a_background_response_gets_its_turn_before_clients_that_retry() {
    let cluster = Cluster::start(vec![unhurried()], |config| {
        config.tenants = vec![tenant("a", r#"{"concurrent_requests": 1}"#)];
    })
    .await;
    let headers = [("authorization", &*bearer("a"))];
    let api = cluster.router.api;
    let long = cluster::chat("hello", 10_000, true);
    let first = client::open(api, "POST", "/v1/chat/completions", &headers, long).await;
    assert_eq!(first.status, 200);
    let body = json!({"model": "sim", "input": "x", "max_output_tokens": 3, "background": true});
    let created = post_as(&cluster.router, "a", "/v1/responses", &body.to_string()).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let path = format!("/v1/responses/{}", created.json()["id"].as_str().unwrap());
    let status = async || {
        let answer = client::send(api, "GET", &path, &headers, "").await;
        answer.json()["status"].clone()
    };
    eventually("it waits for a place", async || {
        let labels = ["tenant=\"a\"", "reason=\"concurrent_requests\""];
        let refusals = cluster.metric("warmroute_limit_refusals_total", &labels);
        refusals.await >= 1.0
    })
    .await;
    assert_eq!(status().await, "queued");
    drop(first);
    eventually("a client gets the place", async || {
        let answer = chat_as(&cluster.router, "a").await;
        assert!([200, 429].contains(&answer.status), "{}", answer.text());
        answer.status == 200
    })
    .await;
    let after = status().await;
    assert!(after != "queued", "the client came first");
    eventually("it ends", async || status().await == "incomplete").await;
}
