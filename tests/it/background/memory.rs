//! What requests of the Responses API hold of `api.max_total_body`: histories, and runs that go on without their client.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::fleet::ResponsesApi;
use warmroute::ids::{ResponseId, Root, Tenant};
use warmroute::observe::metrics::Registry;
use warmroute::store::record::{Content, InitialState};
use warmroute::store::redis::{self, Redis};
use warmroute::store::{
    IdempotencyToken, NewRecord, Owner, ResponseKey, Responses, RetentionSettings, RoutingHint,
    Status,
};

use super::{PATH, cancel, create, patient, short_lease, store_running};
use crate::client::{self, Answer};
use crate::cluster::{Router, eventually};
use crate::patience::too_long;
use crate::redis_server::Server;
use crate::stub::Stub;

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
const TEXT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t\"}}]}\n\n";
const STOP: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

const WAITING: &str = "warmroute_request_bodies_waiting";

/// Takes one step of the budget.
const LONG: usize = 200 << 10;
const STEP: f64 = (256 << 10) as f64;

/// A router whose requests have so much memory, before a chat worker.
async fn router(stub: &Stub, max: u64, change: impl FnOnce(&mut Config)) -> Router {
    let router = stub.router(|config| {
        config.workers[0].responses = Some(ResponsesApi::Chat);
        config.api.requests.max_total_body = max;
        config.api.requests.max_body_wait = Duration::from_millis(100);
        change(config);
    });
    router.await
}

/// A worker whose answers never end.
async fn endless() -> Stub {
    Stub::repeating(format!("{HEAD}{TEXT}"), TEXT).await
}

async fn metric(router: &Router, name: &str) -> f64 {
    let page = client::get(router.admin, "/metrics").await;
    let values = page.text().lines().filter_map(|line| {
        let value = line.strip_prefix(name)?.strip_prefix(' ')?;
        value.parse::<f64>().ok()
    });
    values.sum()
}

async fn used(router: &Router) -> f64 {
    metric(router, "warmroute_request_body_bytes").await
}

fn asking(input_bytes: usize, more: Value) -> Value {
    let mut body = json!({"model": "sim", "input": "x".repeat(input_bytes)});
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body
}

async fn post(router: &Router, body: &Value) -> Answer {
    client::post(router.api, PATH, body.to_string()).await
}

#[track_caller]
fn assert_overloaded(answer: &Answer) {
    let refused = (answer.status, answer.code(), answer.header("retry-after"));
    assert_eq!(refused, (503, "router_overloaded".to_owned(), "1"));
}

#[tokio::test]
async fn background_bodies_count_until_their_runs_have_ended() {
    let stub = endless().await;
    let router = router(&stub, 4 << 20, |_| {}).await;
    let body = asking(LONG, json!({"background": true}));
    let mut running = Vec::new();
    for _ in 0..4 {
        running.push(create(&router, &body).await);
    }
    assert_eq!(used(&router).await, 4.0 * STEP);
    // One client has half of the memory, and half as much for background responses.
    let answer = post(&router, &body).await;
    let refused = (answer.status, answer.code(), answer.header("retry-after"));
    assert_eq!(refused, (503, "router_overloaded".to_owned(), "10"));
    let refusals = "warmroute_background_refused_total{reason=\"no_memory\"}";
    assert_eq!(metric(&router, refusals).await, 1.0);
    // Its share is for those that it waits for.
    let streamed = asking(LONG, json!({"stream": true})).to_string();
    let mut live = client::open(router.api, "POST", PATH, &[], streamed).await;
    live.until("output_text.delta").await;
    drop(live);
    eventually("its body is gone", async || {
        used(&router).await == 4.0 * STEP
    })
    .await;
    let first = running.remove(0);
    assert_eq!(cancel(&router, &first).await.status, 200);
    eventually("its memory is free", async || {
        used(&router).await == 3.0 * STEP
    })
    .await;
    running.push(create(&router, &body).await);
    for response in &running {
        assert_eq!(cancel(&router, response).await.status, 200);
    }
    eventually("all memory is free", async || used(&router).await == 0.0).await;
}

#[tokio::test]
async fn a_history_counts_with_the_request_that_continues_it() {
    let stub = Stub::start(format!("{HEAD}{TEXT}{STOP}{DONE}")).await;
    let router = router(&stub, 300 << 10, |_| {}).await;
    let conversation = client::post(router.api, "/v1/conversations", "{}").await;
    let conversation = json!({"conversation": conversation.json()["id"]});
    let first = post(&router, &asking(LONG, conversation.clone())).await;
    assert_eq!(first.status, 200, "{}", first.text());
    let alone = post(&router, &asking(LONG, json!({}))).await;
    assert_eq!(alone.status, 200, "{}", alone.text());
    let chain = json!({"previous_response_id": alone.json()["id"]});
    for parent in [conversation, chain] {
        let asked = stub.posts();
        // Both together are larger than all memory.
        let answer = post(&router, &asking(LONG, parent.clone())).await;
        let refused = (answer.status, answer.code());
        assert_eq!(refused, (413, "request_too_large".to_owned()));
        assert_eq!(stub.posts(), asked, "no worker was asked");
        // A refusal leaves the conversation unlocked.
        let short = post(&router, &asking(1, parent)).await;
        assert_eq!(short.status, 200, "{}", short.text());
    }
    eventually("all memory is free", async || used(&router).await == 0.0).await;
}

#[tokio::test]
async fn a_history_without_memory_is_refused_until_there_is_some() {
    let stub = endless().await;
    let router = router(&stub, 600 << 10, |_| {}).await;
    let items = json!({"items": [{"role": "user", "content": "x".repeat(LONG)}]});
    let conversation = client::post(router.api, "/v1/conversations", items.to_string()).await;
    let more = json!({"conversation": conversation.json()["id"], "stream": true});
    let short = asking(1, more);
    let running = create(&router, &asking(LONG, json!({"background": true}))).await;
    assert_overloaded(&post(&router, &short).await);
    let refused = metric(&router, "warmroute_request_bodies_refused_total").await;
    let waited = metric(&router, "warmroute_request_bodies_waited_total").await;
    assert_eq!((refused, waited), (1.0, 1.0));
    assert_eq!(cancel(&router, &running).await.status, 200);
    eventually("there is memory", async || used(&router).await == 0.0).await;
    // The refusal has left the conversation unlocked.
    let mut live = client::open(router.api, "POST", PATH, &[], short.to_string()).await;
    live.until("output_text.delta").await;
}

#[tokio::test]
async fn a_history_waits_for_memory_whatever_it_is_read_for() {
    let stub = endless().await;
    let router = router(&stub, 1_200 << 10, |config| {
        config.api.requests.max_body_wait = too_long();
        config.api.requests.trusted_proxies = vec!["127.0.0.1".to_owned()].try_into().unwrap();
    })
    .await;
    let items = json!({"items": [{"role": "user", "content": "x".repeat(3 * LONG)}]});
    let conversation = client::post(router.api, "/v1/conversations", items.to_string()).await;
    let id = conversation.json()["id"].clone();
    // Another client's.
    let body = asking(2 * LONG, json!({"background": true})).to_string();
    let other = [("x-forwarded-for", "10.0.0.1")];
    let running = client::send(router.api, "POST", PATH, &other, body).await;
    assert_eq!(running.status, 200, "{}", running.text());
    let running = running.json();
    let send = |path: &'static str, more: Value| {
        let (api, body) = (router.api, asking(1, more).to_string());
        tokio::spawn(async move { client::post(api, path, body).await })
    };
    let waiting = async |count: f64| metric(&router, WAITING).await == count;
    let created = send(PATH, json!({"conversation": id, "background": true}));
    eventually("the create waits", async || waiting(1.0).await).await;
    let counting = send("/v1/responses/input_tokens", json!({"conversation": id}));
    eventually("the count waits", async || waiting(2.0).await).await;
    let compacting = send("/v1/responses/compact", json!({"conversation": id}));
    eventually("the compaction waits", async || waiting(3.0).await).await;
    for waits in [counting, compacting] {
        waits.abort();
    }
    eventually("their clients have left", async || waiting(1.0).await).await;
    // A wait leaves the conversation unlocked.
    let item = json!({"items": [{"role": "user", "content": "y"}]}).to_string();
    let path = format!("/v1/conversations/{}/items", id.as_str().unwrap());
    let added = client::post(router.api, &path, item).await;
    assert_eq!(added.status, 200, "{}", added.text());
    assert_eq!(cancel(&router, &running).await.status, 200);
    let created = tokio::time::timeout(too_long(), created).await.unwrap();
    let created = created.unwrap();
    assert_eq!(created.status, 200, "{}", created.text());
    assert_eq!(created.json()["status"], "queued");
}

#[tokio::test]
async fn a_background_create_whose_client_keeps_as_much_as_it_may_does_not_wait() {
    let stub = endless().await;
    let router = router(&stub, 600 << 10, |config| {
        config.api.requests.max_body_wait = too_long();
    })
    .await;
    let items = json!({"items": [{"role": "user", "content": "x".repeat(LONG)}]});
    let conversation = client::post(router.api, "/v1/conversations", items.to_string()).await;
    let running = create(&router, &asking(LONG, json!({"background": true}))).await;
    let more = json!({"conversation": conversation.json()["id"], "background": true});
    let continuing = asking(1, more);
    let answer = tokio::time::timeout(too_long(), post(&router, &continuing)).await;
    let answer = answer.unwrap();
    let refused = (answer.status, answer.code(), answer.header("retry-after"));
    assert_eq!(refused, (503, "router_overloaded".to_owned(), "10"));
    let refusals = "warmroute_background_refused_total{reason=\"no_memory\"}";
    assert_eq!(metric(&router, refusals).await, 1.0);
    let waited = metric(&router, "warmroute_request_bodies_waited_total").await;
    assert_eq!(waited, 0.0);
    // The refusal has left the conversation unlocked.
    assert_eq!(cancel(&router, &running).await.status, 200);
    eventually("there is memory", async || used(&router).await == 0.0).await;
    create(&router, &continuing).await;
}

/// Stores a response whose input is one message with so many bytes of text. Returns the id of the message.
async fn store_message(store: &Redis, bytes: usize) -> String {
    let key = ResponseKey {
        tenant: Tenant::default(),
        id: ResponseId::new(Root(fastrand::u64(..)), fastrand::u128(..)),
    };
    // The first item of its input.
    let item = format!("msg_{}8000", &key.id.to_string()["resp_".len()..]);
    let text = json!({"type": "input_text", "text": "x".repeat(bytes)});
    let message = json!({
        "id": item, "type": "message", "role": "user", "status": "completed", "content": [text],
    });
    let record = NewRecord {
        token: IdempotencyToken(fastrand::u64(..)),
        parent: None,
        hint: RoutingHint {
            model: "sim".into(),
            worker: None,
        },
        input: json!([message]).to_string().into(),
        content: Content {
            response: "{\"object\":\"response\"}".into(),
            output: "[]".into(),
        },
        initial: InitialState::Finished {
            status: Status::Completed,
        },
    };
    store.create(key, record).await.unwrap();
    item
}

#[tokio::test]
async fn items_of_other_responses_are_read_only_until_they_are_too_many_bytes() {
    let stub = Stub::start(format!("{HEAD}{TEXT}{STOP}{DONE}")).await;
    let redis = Server::start().await;
    let settings = redis::Settings {
        urls: vec![redis.url()],
        // The router's thread looks through lists of megabytes, which takes a busy machine long.
        advanced: redis::Advanced {
            connect_timeout: too_long(),
            read_timeout: too_long(),
            write_timeout: too_long(),
            ..redis::Advanced::default()
        },
        ..redis::Settings::default()
    };
    let router = router(&stub, 256 << 20, |config| {
        config.responses.store.redis = Some(settings.clone());
        config.responses.state_token.keys = vec![super::key()];
    })
    .await;
    let registry = Registry::default();
    let store = Redis::open(&settings, &RetentionSettings::default(), 1, &registry).unwrap();
    let mut input = Vec::new();
    for _ in 0..60 {
        let id = store_message(&store, 2 << 20).await;
        input.push(json!({"type": "item_reference", "id": id}));
    }
    let few = json!({"model": "sim", "input": input[..2]});
    let answer = post(&router, &few).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let all = json!({"model": "sim", "input": input});
    let answer = post(&router, &all).await;
    let refused = (answer.status, answer.code());
    assert_eq!(refused, (400, "context_length_exceeded".to_owned()));
    let reads = "warmroute_store_operations_total{operation=\"input\",outcome=\"ok\"}";
    let reads = metric(&router, reads).await;
    assert!((2.0..30.0).contains(&reads), "{reads}");
    eventually("all memory is free", async || used(&router).await == 0.0).await;
}

#[tokio::test]
async fn an_orphan_without_memory_waits_for_it_and_runs() {
    wait_and_run(None).await;
}

#[tokio::test]
async fn an_orphan_without_memory_stays_with_its_owner_until_there_is_some() {
    wait_and_run(Some(Owner(7))).await;
}

/// `lost`: the owner without a lease that has it. `None`: the replica itself, which does not know of it.
async fn wait_and_run(lost: Option<Owner>) {
    let stub = endless().await;
    let redis = Server::start().await;
    let settings = patient(&redis);
    let router = router(&stub, 600 << 10, |config| {
        config.responses.store.redis = Some(settings.clone());
        config.responses.state_token.keys = vec![super::key()];
        short_lease(config);
    })
    .await;
    let running = create(&router, &asking(LONG, json!({"background": true}))).await;
    let own = client::get(router.admin, "/responses").await.json();
    let owner = own["responses"]["background"]["owner"].as_str().unwrap();
    let owner = lost.unwrap_or(Owner(u64::from_str_radix(owner, 16).unwrap()));
    let registry = Registry::default();
    let store = Redis::open(&settings, &RetentionSettings::default(), 1, &registry).unwrap();
    // What the replica does not know that it has is handed back, and taken over.
    let text = json!({"type": "input_text", "text": "x".repeat(2 * LONG)});
    let message = json!({"type": "message", "role": "user", "content": [text]});
    let request = json!({
        "created_at": 1, "previous": null, "conversation": null, "store": true, "salt": null,
        "is_portable": true, "client": {"model": "sim", "background": true}, "input": [message],
    });
    let key = store_running(&store, owner, request.to_string(), false).await;
    let waits = "warmroute_background_refused_total{reason=\"no_memory\"}";
    eventually("it waits", async || metric(&router, waits).await > 0.0).await;
    // Its request is read once, and it counts once, however often it is found.
    let count = async |operation: &str| {
        let labels = format!("{{operation=\"{operation}\",outcome=\"ok\"}}");
        metric(
            &router,
            &format!("warmroute_store_operations_total{labels}"),
        )
        .await
    };
    let before = count("orphans").await;
    eventually("it is found again", async || {
        count("orphans").await >= before + 3.0
    })
    .await;
    assert_eq!(count("request").await, 1.0);
    assert_eq!(metric(&router, waits).await, 1.0);
    if lost.is_some() {
        assert_eq!(count("take_over").await, 0.0, "its owner may run it still");
    }
    assert_eq!(used(&router).await, STEP);
    let status = async || store.get(key).await.unwrap().unwrap().status;
    assert_eq!(status().await, Status::Queued);
    assert_eq!(cancel(&router, &running).await.status, 200);
    eventually("it runs", async || status().await == Status::InProgress).await;
    assert_eq!(used(&router).await, 2.0 * STEP);
}
