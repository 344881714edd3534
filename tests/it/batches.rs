//! Files and batches: from an upload to its results, over replicas, kills and tenants.

pub(crate) mod clients;
mod giving_way;
mod limits;
mod messages;
mod replicas;
mod webhooks;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;

use self::clients::{Client, chat_line, custom_ids};
use crate::adapters::load;
use crate::cluster::{Cluster, eventually, fast, tenant, unhurried};
use crate::patience::scaled;
use crate::reload::Folder;

/// An engine and a router with files in a folder, which goes with the test.
async fn start(engine: Settings, change: impl FnOnce(&mut Config)) -> (Cluster, Folder) {
    let folder = Folder::new();
    let cluster = Cluster::start(vec![engine], |config| {
        config.batches.folder = folder.path("files").to_str().unwrap().to_owned();
        change(config);
    })
    .await;
    (cluster, folder)
}

async fn fast_cluster() -> (Cluster, Folder) {
    start(fast(), |_| {}).await
}

#[tokio::test]
async fn a_batch_completes_with_a_file_of_results_and_one_of_errors() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let mut lines: Vec<String> = (0..20)
        .map(|number| chat_line(&format!("q-{number}"), &format!("Question {number}"), 3))
        .collect();
    let wrong = json!({
        "custom_id": "wrong", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "sim", "messages": 7},
    });
    lines.insert(5, wrong.to_string());
    let file = client.upload(&lines).await;
    let created = client
        .create(&file, json!({"metadata": {"job": "nightly"}}))
        .await;
    assert_eq!(created["object"], "batch");
    assert_eq!(created["status"], "validating");
    assert_eq!(created["metadata"], json!({"job": "nightly"}));
    let batch = client.ended(&created).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let counts = json!({"total": 21, "completed": 20, "failed": 1});
    assert_eq!(batch["request_counts"], counts);
    assert_eq!(batch["model"], "sim");
    assert_eq!(batch["usage"]["output_tokens"], 60);
    let results = client.results(&batch, "output_file_id").await;
    let expected = (0..20).map(|number| format!("q-{number}"));
    let mut expected: Vec<String> = expected.collect();
    expected.sort();
    assert_eq!(custom_ids(&results), expected);
    for result in &results {
        assert_eq!(result["error"], Value::Null);
        assert_eq!(result["response"]["status_code"], 200);
        assert_eq!(result["response"]["body"]["object"], "chat.completion");
        assert!(result["id"].as_str().unwrap().starts_with("batch_req_"));
    }
    let errors = client.results(&batch, "error_file_id").await;
    assert_eq!(custom_ids(&errors), ["wrong"]);
    assert_eq!(errors[0]["response"]["status_code"], 400);

    // The results are files as others are.
    let files = client.get("/v1/files?purpose=batch_output").await.json();
    assert_eq!(files["data"].as_array().unwrap().len(), 2);
    let listed = client.get("/v1/batches?limit=1").await.json();
    assert_eq!(listed["data"][0], batch);
    assert_eq!(listed["has_more"], false);
    let lines = "warmroute_batch_lines_total";
    let completed = ["outcome=\"completed\""];
    assert_eq!(cluster.metric(lines, &completed).await, 20.0);
    // It is counted once its end is written.
    eventually("its end is counted", async || {
        cluster.metric("warmroute_batches_ended_total", &[]).await == 1.0
    })
    .await;
}

#[tokio::test]
async fn without_redis_files_of_earlier_processes_go_at_the_start_after_their_retention() {
    let mut places = Vec::new();
    let (_cluster, _folder) = start(fast(), |config| {
        let tenant = Path::new(&config.batches.folder).join("files/0123456789abcdef");
        fs::create_dir_all(&tenant).unwrap();
        let write = |name: &str, days: u64| -> PathBuf {
            let path = tenant.join(name);
            let age = Duration::from_secs(days * 24 * 3_600);
            let file = File::create(&path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
            path
        };
        places.push(write("file-000000000000000000000001", 31));
        places.push(write("file-000000000000000000000002", 29));
        places.push(write("file-000000000000000000000003", 0));
        places.push(write("other", 31));
    })
    .await;
    let are_there: Vec<bool> = places.iter().map(|path| path.exists()).collect();
    assert_eq!(are_there, [false, true, true, true]);
}

#[tokio::test]
async fn each_endpoint_runs_in_a_batch() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    for (endpoint, mut body, object) in [
        (
            "/v1/completions",
            json!({"prompt": "Hi", "max_tokens": 2}),
            "text_completion",
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "max_output_tokens": 2}),
            "response",
        ),
        ("/v1/embeddings", json!({"input": "Hi"}), "list"),
        (
            "/v1/messages",
            json!({"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}),
            "",
        ),
    ] {
        body["model"] = "sim".into();
        let line = json!({"custom_id": "a", "method": "POST", "url": endpoint, "body": body});
        let file = client.upload(&[line.to_string()]).await;
        let created = client.create(&file, json!({"endpoint": endpoint})).await;
        let batch = client.ended(&created).await;
        assert_eq!(batch["status"], "completed", "{batch}");
        let results = client.results(&batch, "output_file_id").await;
        let answer = &results[0]["response"]["body"];
        assert_eq!(
            answer["object"].as_str().unwrap_or_default(),
            object,
            "{answer}"
        );
        if endpoint == "/v1/responses" {
            // It is stored as any other response.
            let path = format!("/v1/responses/{}", answer["id"].as_str().unwrap());
            assert_eq!(client.get(&path).await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_file_with_mistakes_fails_by_line_number_and_nothing_of_it_runs() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let other_model = chat_line("c", "Hi", 1).replace("\"sim\"", "\"nobody\"");
    let lines = [
        chat_line("a", "Hi", 1),
        "not JSON".to_owned(),
        chat_line("a", "again", 1),
        String::new(),
        chat_line("b", "Hi", 1).replace("/chat/", "/"),
        other_model,
    ];
    let file = client.upload(&lines).await;
    let created = client.create(&file, json!({})).await;
    let batch = client.ended(&created).await;
    assert_eq!(batch["status"], "failed", "{batch}");
    let errors = batch["errors"]["data"].as_array().unwrap();
    let found: Vec<(&str, u64)> = errors
        .iter()
        .map(|error| {
            (
                error["code"].as_str().unwrap(),
                error["line"].as_u64().unwrap(),
            )
        })
        .collect();
    let expected = [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
        ("invalid_url", 5),
        ("model_not_found", 6),
    ];
    assert_eq!(found, expected);
    assert_eq!(cluster.engines[0].generated().await, 0);
}

#[tokio::test]
async fn a_cancel_stops_what_runs_within_a_second() {
    let (cluster, _folder) = start(unhurried(), |_| {}).await;
    let client = Client::of(&cluster.router);
    let lines: Vec<String> = (0..8)
        .map(|number| chat_line(&number.to_string(), "Go on", 30_000))
        .collect();
    let file = client.upload(&lines).await;
    let mut batch = Value::Null;
    let mut took = Vec::new();
    for _ in 0..3 {
        let created = client.create(&file, json!({})).await;
        eventually("lines run", async || {
            cluster.engines[0].stats().await.running > 0
        })
        .await;
        let began = Instant::now();
        let cancelled = client.cancel(&created).await;
        assert_eq!(cancelled.status, 200, "{}", cancelled.text());
        assert_eq!(cancelled.json()["status"], "cancelling");
        eventually("nothing runs", async || {
            cluster.engines[0].stats().await.running == 0
        })
        .await;
        took.push(began.elapsed());
        batch = client.ended(&created).await;
        assert_eq!(batch["status"], "cancelled", "{batch}");
    }
    // A machine that stops for a while does not stop each time.
    let is_soon = |took: &Duration| *took < scaled(Duration::from_secs(1));
    assert!(took.iter().any(is_soon), "{took:?}");
    let errors = client.results(&batch, "error_file_id").await;
    assert_eq!(errors.len(), 8);
    for error in errors {
        assert_eq!(error["error"]["code"], "batch_cancelled");
    }
    let again = client.cancel(&batch).await;
    assert_eq!(
        (again.status, &*again.code()),
        (400, "batch_not_cancellable")
    );
}

#[tokio::test]
async fn expiry_keeps_what_is_done() {
    let (cluster, _folder) = start(unhurried(), |_| {}).await;
    let client = Client::of(&cluster.router);
    let lines = [
        chat_line("short", "Hi", 1),
        chat_line("long", "Go on", 30_000),
    ];
    let file = client.upload(&lines).await;
    let created = client
        .create(&file, json!({"completion_window": "5s"}))
        .await;
    let batch = client.ended(&created).await;
    assert_eq!(batch["status"], "expired", "{batch}");
    let results = client.results(&batch, "output_file_id").await;
    assert_eq!(custom_ids(&results), ["short"]);
    let errors = client.results(&batch, "error_file_id").await;
    assert_eq!(errors[0]["error"]["code"], "batch_expired");
    assert_eq!(errors[0]["custom_id"], "long");
}

#[tokio::test]
async fn a_line_is_tried_again_when_its_engine_fails() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let refuse = |status| Faults {
        refuse: status,
        ..Faults::default()
    };
    cluster.engines[0].fault(refuse(Some(500))).await;
    let file = client.upload(&[chat_line("a", "Hi", 2)]).await;
    let created = client.create(&file, json!({})).await;
    eventually("the engine has failed", async || {
        cluster.engines[0].stats().await.refused > 0
    })
    .await;
    cluster.engines[0].fault(refuse(None)).await;
    let batch = client.ended(&created).await;
    let counts = json!({"total": 1, "completed": 1, "failed": 0});
    assert_eq!(batch["request_counts"], counts);
    let retries = "warmroute_batch_line_retries_total";
    assert!(cluster.metric(retries, &["status=\"500\""]).await >= 1.0);
}

#[tokio::test]
async fn an_adapter_that_was_loaded_just_now_is_found_by_a_batch() {
    let (cluster, _folder) = start(fast(), |config| {
        // The health checks find nothing in the meantime.
        config.fleet.health.interval = Duration::from_secs(600);
    })
    .await;
    let client = Client::of(&cluster.router);
    load(&cluster.engines[0], "new").await;
    let line = chat_line("a", "Hi", 1).replace("\"sim\"", "\"new\"");
    let file = client.upload(&[line]).await;
    let created = client.create(&file, json!({})).await;
    let batch = client.ended(&created).await;
    let counts = json!({"total": 1, "completed": 1, "failed": 0});
    assert_eq!(batch["request_counts"], counts, "{batch}");
}

#[tokio::test]
async fn lines_of_one_conversation_wait_for_each_other() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let conversation = client
        .send("POST", "/v1/conversations", String::new())
        .await
        .json();
    let id = conversation["id"].as_str().unwrap();
    let line = |number: u32| {
        json!({
            "custom_id": number.to_string(),
            "method": "POST",
            "url": "/v1/responses",
            "body": {
                "model": "sim", "input": format!("Turn {number}"), "max_output_tokens": 200, "conversation": id,
            },
        })
        .to_string()
    };
    let lines: Vec<String> = (0..3).map(line).collect();
    let file = client.upload(&lines).await;
    let responses = json!({"endpoint": "/v1/responses"});
    let created = client.create(&file, responses).await;
    let batch = client.ended(&created).await;
    let counts = json!({"total": 3, "completed": 3, "failed": 0});
    assert_eq!(batch["request_counts"], counts, "{batch}");
    let items = client
        .get(&format!("/v1/conversations/{id}/items"))
        .await
        .json();
    // Each turn has a question and an answer.
    assert_eq!(items["data"].as_array().unwrap().len(), 6, "{items}");
}

#[tokio::test]
async fn no_tenant_sees_the_batches_of_another() {
    let log = Folder::new();
    let (cluster, _folder) = start(fast(), |config| {
        config.tenants = vec![tenant("a"), tenant("b")];
        config.usage.log = log.path("usage.jsonl").to_str().unwrap().to_owned();
    })
    .await;
    let a = Client::with_key(&cluster.router, "sk-a");
    let b = Client::with_key(&cluster.router, "sk-b");
    let file = a.upload(&[chat_line("a", "Hi", 2)]).await;
    let refused = b.try_create(&file, json!({})).await;
    assert_eq!((refused.status, &*refused.param()), (400, "input_file_id"));
    let created = a.create(&file, json!({})).await;
    let batch = a.ended(&created).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let id = batch["id"].as_str().unwrap();
    let output = batch["output_file_id"].as_str().unwrap();
    for path in [
        format!("/v1/batches/{id}"),
        format!("/v1/files/{file}"),
        format!("/v1/files/{output}/content"),
    ] {
        assert_eq!(a.get(&path).await.status, 200, "{path}");
        assert_eq!(b.get(&path).await.status, 404, "{path}");
    }
    assert_eq!(b.cancel(&batch).await.status, 404);
    let listed = b.get("/v1/batches").await.json();
    assert_eq!(listed["data"], json!([]));
    let files = b.get("/v1/files").await.json();
    assert_eq!(files["data"], json!([]));
    let unknown = Client::with_key(&cluster.router, "sk-c");
    assert_eq!(unknown.get("/v1/files").await.status, 401);
    let mut line = Value::Null;
    eventually("the usage log has the line", async || {
        let text = std::fs::read_to_string(log.path("usage.jsonl")).unwrap_or_default();
        let first = text.lines().next().map(serde_json::from_str);
        line = first.and_then(Result::ok).unwrap_or_default();
        !line.is_null()
    })
    .await;
    assert_eq!((&line["tenant"], &line["batch"]), (&json!("a"), &json!(id)));
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_named() {
    let (cluster, _folder) = fast_cluster().await;
    let client = Client::of(&cluster.router);
    let file = client.upload(&[chat_line("a", "Hi", 2)]).await;
    for (more, param) in [
        (json!({"completion_window": "60d"}), "completion_window"),
        (json!({"endpoint": "/v1/audio/speech"}), "endpoint"),
        (json!({"metadata": {"a": 1}}), "metadata.a"),
        (json!({"input_file_id": "file-1"}), "input_file_id"),
        (json!({"priority": 1}), "priority"),
    ] {
        let answer = client.try_create(&file, more).await;
        assert_eq!((answer.status, &*answer.param()), (400, param));
    }
    let missing = client.get("/v1/batches/batch_1").await;
    assert_eq!(missing.status, 404);
    let after = client.get("/v1/batches?after=batch_1").await;
    assert_eq!((after.status, &*after.param()), (400, "after"));
}

#[tokio::test]
async fn a_router_without_storage_says_how_to_get_batches() {
    let cluster = Cluster::fast(1).await;
    let client = Client::of(&cluster.router);
    for path in ["/v1/files", "/v1/batches", "/v1/files/file-1"] {
        let answer = client.get(path).await;
        assert_eq!(
            (answer.status, &*answer.code()),
            (404, "batches_not_configured")
        );
        assert!(answer.text().contains("folder: DIR"), "{}", answer.text());
    }
    let answer = client.get("/v1/messages/batches").await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json()["error"]["type"], "not_found_error");
}
