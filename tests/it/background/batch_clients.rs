//! Clients that run batches while everything is killed and stopped, and what must then be in the results.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::fleet::{Places, any};
use crate::batches::clients::{Client, ENDS, FORM, chat_line, custom_ids, form, path};
use crate::client;
use crate::cluster::{Router, eventually};

/// Lines of a batch: more than one shard has.
const MAX_LINES: usize = 400;

/// What a client knows of one batch.
#[derive(Clone, Debug)]
pub(super) struct CreatedBatch {
    /// As some router answered it.
    batch: Value,
    /// The ids of its lines, sorted.
    custom_ids: Vec<String>,
}

/// What some router answers that is up and has the store.
async fn answered(
    places: &Places,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Value {
    let mut answer = Value::Null;
    eventually("some router answers", async || {
        let asked = async {
            let open = client::try_open(any(places), method, path, headers, body.to_owned()).await;
            let mut open = open.ok()?;
            let status = open.status;
            let (text, is_whole) = open.rest().await;
            let is_down = status >= 500 || !is_whole;
            assert!(status == 200 || is_down, "{path}: {status} {text}");
            (!is_down).then(|| serde_json::from_str::<Value>(&text).unwrap())
        };
        match asked.await {
            Some(answered) => {
                answer = answered;
                true
            }
            None => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                false
            }
        }
    })
    .await;
    answer
}

/// Asks some router for a cancel, which it may not do.
async fn cancel(places: &Places, batch: &Value) {
    let path = format!("{}/cancel", path(batch));
    let Ok(mut open) = client::try_open(any(places), "POST", &path, &[], "").await else {
        return;
    };
    let status = open.status;
    let (text, is_whole) = open.rest().await;
    let is_late = status == 400 && text.contains("batch_not_cancellable");
    let is_down = status >= 500 || !is_whole;
    assert!(status == 200 || is_late || is_down, "{status} {text}");
}

/// A line of its own. Engines refuse some of them.
fn line(custom_id: &str) -> String {
    if fastrand::u8(..40) > 0 {
        return chat_line(custom_id, custom_id, fastrand::u32(1..20));
    }
    let body = json!({"model": "sim", "messages": 7});
    let endpoint = "/v1/chat/completions";
    json!({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}).to_string()
}

async fn create(places: &Places, name: &str) -> CreatedBatch {
    let ids = (0..fastrand::usize(1..MAX_LINES)).map(|number| format!("{name}-{number:03}"));
    let custom_ids: Vec<String> = ids.collect();
    let lines: Vec<String> = custom_ids.iter().map(|id| line(id)).collect();
    let file = answered(places, "POST", "/v1/files", &[FORM], &form(&lines)).await;
    let body = json!({
        "input_file_id": file["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    });
    let batch = answered(places, "POST", "/v1/batches", &[], &body.to_string()).await;
    CreatedBatch { batch, custom_ids }
}

/// Runs one batch after the other, each step at any router.
pub(super) async fn run(
    places: Places,
    is_over: Arc<AtomicBool>,
    name: usize,
) -> Vec<CreatedBatch> {
    let mut all: Vec<CreatedBatch> = Vec::new();
    // Also where few batches fit into the time of the faults, one completes.
    let mut has_completed = false;
    let may_end = |has_enough: bool| has_enough && is_over.load(Ordering::Relaxed);
    while !may_end(has_completed) {
        let created = create(&places, &format!("{name}-{}", all.len())).await;
        let batch = created.batch.clone();
        all.push(created);
        let cancels = fastrand::u8(..5) == 0;
        let mut has_ended = false;
        while !has_ended && !may_end(has_completed) {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(100..1_000))).await;
            if cancels && fastrand::bool() {
                cancel(&places, &batch).await;
            }
            let now = answered(&places, "GET", &path(&batch), &[], "").await;
            has_ended = ENDS.contains(&now["status"].as_str().unwrap());
            has_completed |= now["status"] == "completed";
        }
    }
    all
}

/// All batches there are, each of which has ended.
pub(super) async fn ended(router: &Router) -> Vec<Value> {
    let client = Client::of(router);
    let mut all: Vec<Value> = Vec::new();
    loop {
        let after = all.last().and_then(|batch| batch["id"].as_str());
        let after = after.map(|id| format!("&after={id}")).unwrap_or_default();
        let page = client.get(&format!("/v1/batches?limit=100{after}")).await;
        assert_eq!(page.status, 200, "{}", page.text());
        let page = page.json();
        for batch in page["data"].as_array().unwrap() {
            all.push(client.ended(batch).await);
        }
        if page["has_more"] != true {
            return all;
        }
    }
}

/// Every batch is the same on every router, and every line of each has one result. Returns how many lines there are, by
/// what became of them.
pub(super) async fn check(
    routers: &[&Router],
    created: &[CreatedBatch],
) -> BTreeMap<String, usize> {
    let mut all = Vec::new();
    // A router that could not confirm a batch takes it back, perhaps between two looks.
    eventually("every router has the same batches", async || {
        all = ended(routers[0]).await;
        for router in routers {
            if ended(router).await != all {
                return false;
            }
        }
        true
    })
    .await;
    for CreatedBatch { batch, .. } in created {
        assert!(all.iter().any(|one| one["id"] == batch["id"]), "{batch}");
    }
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for (batch, router) in all.iter().zip(routers.iter().cycle()) {
        // It is another one, if its creation was answered to nobody and asked for again.
        let input = &batch["input_file_id"];
        let mut given = created.iter();
        let given = given.find(|created| created.batch["input_file_id"] == *input);
        let given = given.unwrap_or_else(|| panic!("nobody created {batch}"));
        for (outcome, count) in check_lines(&Client::of(router), batch, &given.custom_ids).await {
            *lines.entry(outcome).or_default() += count;
        }
    }
    lines
}

async fn check_lines(
    client: &Client,
    batch: &Value,
    expected: &[String],
) -> BTreeMap<String, usize> {
    let mut results = Vec::new();
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    for (file, is_good) in [("output_file_id", true), ("error_file_id", false)] {
        if batch[file].is_null() {
            continue;
        }
        for result in client.results(batch, file).await {
            let status = &result["response"]["status_code"];
            assert_eq!(*status == 200, is_good, "{batch}: {result}");
            let outcome = match result["error"]["code"].as_str() {
                Some(code) => code.to_owned(),
                None => status.to_string(),
            };
            *outcomes.entry(outcome).or_default() += 1;
            results.push(result);
        }
    }
    assert_eq!(custom_ids(&results), expected, "{batch}");
    let total = expected.len();
    let completed = outcomes.get("200").copied().unwrap_or(0);
    let counts = json!({"total": total, "completed": completed, "failed": total - completed});
    assert_eq!(batch["request_counts"], counts);
    assert!(!outcomes.contains_key("result_lost"), "{batch}");
    let was_cut = outcomes.contains_key("batch_cancelled");
    match batch["status"].as_str().unwrap() {
        "completed" => assert!(!was_cut, "{batch}"),
        "cancelled" => assert!(!batch["cancelling_at"].is_null(), "{batch}"),
        _ => panic!("{batch}"),
    }
    outcomes
}
