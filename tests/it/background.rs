//! Background responses with two routers and one Redis.

mod batch_clients;
mod chaos;
mod continued;
mod ends;
mod faults;
mod fleet;
mod leaving;
mod long_streams;
mod memory;
mod races;
mod readers;
mod talk;
mod turns;

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;
use warmroute::ids::{ResponseId, Root, Tenant};
use warmroute::observe::metrics::Registry;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::Settings;
use warmroute::store::record::{Content, InitialState, Retention};
use warmroute::store::redis::{self, Redis};
use warmroute::store::{
    FencingToken, IdempotencyToken, NewRecord, Owner, ResponseKey, Responses, RetentionSettings,
    RoutingHint, Status,
};

use crate::client::{self, Answer, Open};
use crate::cluster::{self, Engine, Router, eventually, fast, unhurried};
use crate::patience::too_long;
use crate::redis_server::Server;

const PATH: &str = "/v1/responses";

/// Two routers, one engine, one Redis.
struct Pair {
    a: Router,
    b: Router,
    engine: Engine,
    redis: Server,
}

impl Pair {
    async fn new(engine: Settings) -> Self {
        Self::with(engine, |_| {}).await
    }

    async fn with(engine: Settings, change: impl FnOnce(&mut Config)) -> Self {
        let (engine, redis, config) = Self::parts(engine, change).await;
        let a = Router::here(&config).await;
        Self::beside(a, engine, redis, &config).await
    }

    /// The first router is a process of its own.
    async fn with_child(engine: Settings, change: impl FnOnce(&mut Config)) -> Self {
        let (engine, redis, config) = Self::parts(engine, change).await;
        let a = Router::child(&config).await;
        Self::beside(a, engine, redis, &config).await
    }

    async fn parts(engine: Settings, change: impl FnOnce(&mut Config)) -> (Engine, Server, Config) {
        let redis = Server::start().await;
        let engine = Engine::here("w0", engine).await;
        let mut config = over(&engine, &redis);
        change(&mut config);
        (engine, redis, config)
    }

    /// Starts the second router, and waits for both.
    async fn beside(a: Router, engine: Engine, redis: Server, config: &Config) -> Self {
        let b = Router::here(config).await;
        for router in [&a, &b] {
            router.worker_is_up().await;
        }
        Self {
            a,
            b,
            engine,
            redis,
        }
    }

    /// Waits until the engine runs this many requests.
    async fn runs(&self, count: u64) {
        eventually("the engine runs them", async || {
            self.engine.stats().await.running as u64 == count
        })
        .await;
    }
}

/// The configuration of a router for this engine and store.
fn over(engine: &Engine, redis: &Server) -> Config {
    let mut config = cluster::config();
    config.workers = vec![engine.listed()];
    config.responses.store.redis = Some(patient(redis));
    config.responses.state_token.keys = vec![key()];
    config
}

/// Longer time-outs, so that a slow store on a busy machine does not count as down.
pub(crate) fn patient(redis: &Server) -> redis::Settings {
    redis::Settings {
        urls: vec![redis.url()],
        advanced: redis::Advanced {
            read_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(10),
            ..redis::Advanced::default()
        },
        ..redis::Settings::default()
    }
}

/// The time-outs of a configuration that says nothing of them.
fn impatient(config: &mut Config) {
    let redis = config.responses.store.redis.as_mut().unwrap();
    redis.advanced = redis::Advanced::default();
}

fn key() -> Secret {
    Secret::new("e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
}

fn ask(tokens: usize, more: Value) -> Value {
    let mut body =
        json!({"model": "sim", "input": "hello", "max_output_tokens": tokens, "background": true});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

async fn create(router: &Router, body: &Value) -> Value {
    let answer = client::post(router.api, PATH, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn path(response: &Value) -> String {
    format!("{PATH}/{}", response["id"].as_str().unwrap())
}

/// A stream that has started its output, the text so far, and the response.
async fn streaming(router: &Router, tokens: usize) -> (Open, String, Value) {
    let body = ask(tokens, json!({"stream": true})).to_string();
    let mut live = client::open(router.api, "POST", PATH, &[], body).await;
    let started = live.until("output_text.delta").await;
    let response = part(&started, 0)[0].1["response"].clone();
    (live, started, response)
}

async fn get(router: &Router, response: &Value) -> Value {
    let answer = client::get(router.api, &path(response)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn ended(router: &Router, response: &Value) -> Value {
    let mut last = Value::Null;
    eventually("it ends", async || {
        last = get(router, response).await;
        !["queued", "in_progress"].contains(&last["status"].as_str().unwrap())
    })
    .await;
    last
}

async fn cancel(router: &Router, response: &Value) -> Answer {
    client::post(router.api, &format!("{}/cancel", path(response)), "").await
}

/// The events of a stream, numbered from `first` on.
fn events(text: &str, first: u64) -> Vec<(String, Value)> {
    let text = text
        .strip_suffix("data: [DONE]\n\n")
        .unwrap_or_else(|| panic!("no end: {text}"));
    part(text, first)
}

fn part(text: &str, first: u64) -> Vec<(String, Value)> {
    let mut number = first;
    let blocks = text
        .split_inclusive("\n\n")
        .filter(|block| block.ends_with("\n\n") && block.contains("data: "));
    let read = blocks.map(|block| {
        let lines = block.trim_end().lines();
        let lines: Vec<&str> = lines.filter(|line| !line.starts_with(':')).collect();
        let [name, data] = lines[..] else {
            panic!("{block}")
        };
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["sequence_number"], number, "{text}");
        number += 1;
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    });
    read.collect()
}

fn said(events: &[(String, Value)]) -> String {
    events
        .iter()
        .filter_map(|(_, data)| data["delta"].as_str())
        .collect()
}

async fn resumed(router: &Router, response: &Value, after: Option<u64>) -> Vec<(String, Value)> {
    let after_text = after.map_or(String::new(), |after| format!("&starting_after={after}"));
    let answer = client::get(
        router.api,
        &format!("{}?stream=true{after_text}", path(response)),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    events(answer.text(), after.map_or(0, |after| after + 1))
}

#[tokio::test]
async fn any_router_serves_a_response_from_queued_to_its_end() {
    let pair = Pair::new(unhurried()).await;
    pair.engine.hold_after(3).await;
    let response = create(&pair.a, &ask(20, json!({}))).await;
    assert_eq!(
        (&response["status"], &response["background"]),
        (&json!("queued"), &json!(true))
    );
    assert_eq!(response["output"], json!([]));
    eventually("the other router sees it run", async || {
        get(&pair.b, &response).await["status"] == "in_progress"
    })
    .await;
    pair.engine.let_go().await;
    let last = ended(&pair.b, &response).await;
    assert_eq!(last["status"], "incomplete");
    assert_eq!(last, get(&pair.a, &response).await);
    assert!(
        !last["output"][0]["content"][0]["text"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    let next = json!({"model": "sim", "input": "and?", "previous_response_id": response["id"]});
    assert_eq!(
        create(&pair.b, &next).await["previous_response_id"],
        response["id"]
    );
    let answer = client::get(pair.a.api, &format!("{}?stream=true", path(&response))).await;
    assert_eq!((answer.status, answer.param().as_str()), (400, "stream"));
}

#[tokio::test]
async fn an_unstored_response_can_be_polled_but_not_continued() {
    let pair = Pair::new(fast()).await;
    let response = create(&pair.a, &ask(4, json!({"store": false}))).await;
    let last = ended(&pair.b, &response).await;
    assert_eq!(
        (&last["status"], &last["store"]),
        (&json!("incomplete"), &json!(false))
    );
    let next = json!({"model": "sim", "input": "and?", "previous_response_id": response["id"]});
    let answer = client::post(pair.a.api, PATH, next.to_string()).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "previous_response_not_found")
    );
}

#[tokio::test]
async fn a_cancel_on_another_router_stops_the_engine_and_keeps_the_output() {
    let pair = Pair::new(unhurried()).await;
    for streams in [false, true] {
        let mut open = None;
        let response = if streams {
            let (live, started, response) = streaming(&pair.a, 2_000).await;
            open = Some((live, started));
            response
        } else {
            create(&pair.a, &ask(2_000, json!({"stream": false}))).await
        };
        pair.runs(1).await;
        eventually("it has started", async || {
            get(&pair.b, &response).await["status"] == "in_progress"
        })
        .await;
        let answer = cancel(&pair.b, &response).await;
        assert_eq!(
            (answer.status, &answer.json()["status"]),
            (200, &json!("cancelled"))
        );
        pair.runs(0).await;
        if let Some((mut live, started)) = open {
            let (rest, is_whole) = live.rest().await;
            assert!(is_whole);
            let received = events(&(started + &rest), 0);
            let (name, end) = received.last().unwrap();
            assert_eq!(
                (name.as_str(), &end["response"]["status"]),
                ("response.incomplete", &json!("cancelled"))
            );
            let mut again = Value::Null;
            eventually("what there is is kept", async || {
                again = get(&pair.b, &response).await;
                again["output"] != json!([])
            })
            .await;
            assert_eq!(again["output"][0]["content"][0]["text"], *said(&received));
            assert_eq!(again["output"][0]["status"], "incomplete");
            let replayed = resumed(&pair.b, &response, None).await;
            assert_eq!(
                replayed[..replayed.len() - 1],
                received[..received.len() - 1]
            );
        }
        let twice = cancel(&pair.a, &response).await;
        assert_eq!(
            (twice.status, &twice.json()["status"]),
            (200, &json!("cancelled"))
        );
    }
    let done = create(&pair.a, &ask(1, json!({}))).await;
    let last = ended(&pair.a, &done).await;
    let answer = cancel(&pair.b, &done).await;
    assert_eq!((answer.status, answer.json()), (200, last));
}

#[tokio::test]
async fn a_stream_resumes_from_any_event_on_any_router() {
    let pair = Pair::new(unhurried()).await;
    let body = ask(40, json!({"stream": true}));
    pair.engine.hold_after(3).await;
    let mut live = client::open(pair.a.api, "POST", PATH, &[], body.to_string()).await;
    let started = live.until("output_text.delta").await;
    drop(live);
    pair.engine.let_go().await;
    let seen = part(&started, 0);
    let names: Vec<&str> = seen
        .iter()
        .map(|(name, _)| name.trim_start_matches("response."))
        .collect();
    assert_eq!(
        names[..4],
        ["created", "queued", "in_progress", "output_item.added"]
    );
    assert_eq!(seen[0].1["response"]["status"], "queued");
    let response = seen[0].1["response"].clone();
    let last = seen.len() as u64 - 1;
    let (rest, whole, own) = tokio::join!(
        resumed(&pair.b, &response, Some(last)),
        resumed(&pair.b, &response, None),
        resumed(&pair.a, &response, Some(2)),
    );
    let joined: Vec<_> = seen.into_iter().chain(rest).collect();
    assert_eq!((&joined, &joined[3..]), (&whole, &own[..]));
    let end = &whole.last().unwrap().1["response"];
    assert_eq!(end["output"][0]["content"][0]["text"], *said(&whole));
    assert_eq!(&get(&pair.b, &response).await, end);
    // After the end as well; a reader that has all events gets the last one again.
    assert_eq!(resumed(&pair.b, &response, None).await, whole);
    let number = whole.len() as u64 - 1;
    for after in [number, number + 7, 1 << 53] {
        let answer = client::get(
            pair.b.api,
            &format!("{}?stream=true&starting_after={after}", path(&response)),
        )
        .await;
        assert_eq!(events(answer.text(), number), whole[whole.len() - 1..]);
    }
}

#[tokio::test]
async fn starting_after_an_impossible_event_number_is_refused() {
    let pair = Pair::new(unhurried()).await;
    let (_live, _, response) = streaming(&pair.a, 2_000).await;
    for router in [&pair.a, &pair.b] {
        for after in [(1 << 53) + 1, u64::MAX] {
            let path = format!("{}?stream=true&starting_after={after}", path(&response));
            let answer = client::get(router.api, &path).await;
            assert_eq!(
                (answer.status, answer.code().as_str()),
                (400, "invalid_value")
            );
            assert_eq!(answer.json()["error"]["param"], "starting_after");
        }
    }
    assert_eq!(cancel(&pair.a, &response).await.status, 200);
}

/// The Redis key of the only record.
fn record_name(redis: &Server) -> String {
    redis.cli(&["keys", "*r:{*"]).trim().to_owned()
}

#[tokio::test]
async fn a_stream_whose_record_is_unreadable_ends() {
    let pair = Pair::new(unhurried()).await;
    let (_live, _, response) = streaming(&pair.a, 2_000).await;
    let path = format!("{}?stream=true", path(&response));
    let mut reading = client::open(pair.b.api, "GET", &path, &[], String::new()).await;
    reading.until("output_text.delta").await;
    // As a newer release would write it.
    pair.redis
        .cli(&["hset", &record_name(&pair.redis), "v", "99"]);
    let rest = tokio::time::timeout(too_long(), reading.rest());
    let (rest, is_whole) = rest.await.unwrap();
    assert!(is_whole && rest.contains("event: error\n"), "{rest}");
}

/// Stores a background response with this request that its owner does not know of.
async fn store_running(store: &Redis, owner: Owner, request: String, streams: bool) -> ResponseKey {
    let key = ResponseKey {
        tenant: Tenant::default(),
        id: ResponseId::new(Root(fastrand::u64(..)), fastrand::u128(..)),
    };
    let record = NewRecord {
        token: IdempotencyToken(fastrand::u64(..)),
        parent: None,
        hint: RoutingHint {
            model: "sim".into(),
            worker: None,
        },
        input: "[]".into(),
        content: Content {
            response: "{\"object\":\"response\"}".into(),
            output: "[]".into(),
        },
        initial: InitialState::Background {
            fence: FencingToken::first(owner),
            retention: Retention::Stored,
            streams,
            request: request.into(),
        },
    };
    store.create(key, record).await.unwrap();
    key
}

/// The store of a pair, and the first router's name in it.
async fn store_of_first(pair: &Pair) -> (Redis, Owner) {
    let own = client::get(pair.a.admin, "/responses").await.json();
    let owner = own["responses"]["background"]["owner"].as_str().unwrap();
    let owner = Owner(u64::from_str_radix(owner, 16).unwrap());
    let retention = RetentionSettings::default();
    let store = Redis::open(&patient(&pair.redis), &retention, 1, &Registry::default());
    (store.unwrap(), owner)
}

#[tokio::test]
async fn a_stored_run_that_no_router_runs_is_ended() {
    let pair = Pair::with(fast(), short_lease).await;
    let (store, owner) = store_of_first(&pair).await;
    // An unreadable stored request, and a readable one whose body is invalid.
    let odd = json!({
        "created_at": 1, "previous": null, "conversation": null, "store": true, "salt": null,
        "is_portable": true, "client": {"model": 7}, "input": [],
    });
    for request in ["{}".to_owned(), odd.to_string()] {
        let key = store_running(&store, owner, request, true).await;
        eventually("it has failed", async || {
            let found = store.get(key).await.unwrap();
            found.unwrap().status == Status::Failed
        })
        .await;
    }
}

/// A release may check more of a create than the one that has accepted it.
#[tokio::test]
async fn a_stored_run_that_would_be_refused_today_is_run() {
    let pair = Pair::with(fast(), short_lease).await;
    let (store, owner) = store_of_first(&pair).await;
    let body =
        json!({"model": "sim", "background": true, "max_output_tokens": 4, "max_tool_calls": "3"});
    let refused = client::post(pair.a.api, PATH, body.to_string()).await;
    assert_eq!(refused.json()["error"]["param"], "max_tool_calls");
    let request = json!({
        "created_at": 1, "previous": null, "conversation": null, "store": true, "salt": null,
        "is_portable": true, "client": body, "input": [{"role": "user", "content": "hello"}],
    });
    let key = store_running(&store, owner, request.to_string(), false).await;
    let mut status = Status::Queued;
    eventually("it has ended", async || {
        status = store.get(key).await.unwrap().unwrap().status;
        !matches!(status, Status::Queued | Status::InProgress)
    })
    .await;
    assert_eq!(status, Status::Incomplete, "at its limit of tokens");
}

#[tokio::test]
async fn a_stream_is_the_same_after_its_log_has_expired() {
    let pair = Pair::with(fast(), |config| {
        config.responses.store.retention.event_logs = Duration::from_secs(1)
    })
    .await;
    let body = ask(9, json!({"stream": true}));
    let answer = client::post(pair.a.api, PATH, body.to_string()).await;
    let received = events(answer.text(), 0);
    let response = received[0].1["response"].clone();
    let pattern = "*e:{*";
    let logs = || pair.redis.cli(&["keys", pattern]).trim().to_owned();
    eventually("the log is gone", async || logs().is_empty()).await;
    assert_eq!(resumed(&pair.b, &response, None).await, received);
    assert_eq!(resumed(&pair.b, &response, Some(3)).await, received[4..]);
}

#[tokio::test]
async fn another_router_serves_the_output_of_a_cancelled_response() {
    let pair = Pair::with(unhurried(), |config| {
        // It reads again before the owner has got the notice.
        config.responses.background.poll_interval = Duration::from_millis(10);
    })
    .await;
    let (_first, _, response) = streaming(&pair.a, 2_000).await;
    let follow = format!("{}?stream=true", path(&response));
    let mut live = client::open(pair.b.api, "GET", &follow, &[], String::new()).await;
    let started = live.until("output_text.delta").await;
    assert_eq!(cancel(&pair.b, &response).await.status, 200);
    let (rest, is_whole) = live.rest().await;
    assert!(is_whole);
    let received = events(&(started + &rest), 0);
    let (name, end) = received.last().unwrap();
    assert_eq!(
        (name.as_str(), &end["response"]["status"]),
        ("response.incomplete", &json!("cancelled"))
    );
    let output = &end["response"]["output"];
    assert_eq!(output[0]["content"][0]["text"], *said(&received));
}

#[tokio::test]
async fn background_runs_are_limited() {
    // The first limit is a tenant's, the second the router's. Without tenants there is only that one.
    let tenant = TenantSpec {
        name: "one".to_owned(),
        keys: vec![Secret::new("secret")],
        ..TenantSpec::default()
    };
    for (tenants, expected) in [
        (vec![tenant], (429, "rate_limit_exceeded")),
        (Vec::new(), (503, "background_full")),
    ] {
        let pair = Pair::with(unhurried(), |config| {
            config.tenants = tenants.clone();
            config.responses.background.max_running_per_tenant = 1;
            config.responses.background.max_running = 2;
        })
        .await;
        let headers = [("authorization", "Bearer secret")];
        let post = async |path: &str, body: String| {
            client::send(pair.a.api, "POST", path, &headers, body).await
        };
        let mut running = Vec::new();
        for _ in tenants.len()..2 {
            let answer = post(PATH, ask(2_000, json!({})).to_string()).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            running.push(answer.json());
        }
        let answer = post(PATH, ask(1, json!({})).to_string()).await;
        assert_eq!((answer.status, answer.code().as_str()), expected);
        assert!(!answer.header("retry-after").is_empty());
        for response in &running {
            let answer = post(&format!("{}/cancel", path(response)), String::new()).await;
            assert_eq!(answer.status, 200);
        }
        eventually("there is room again", async || {
            let answer = post(PATH, ask(1, json!({})).to_string()).await;
            answer.status == 200
        })
        .await;
    }
}

#[tokio::test]
async fn without_a_store_no_background_response_starts() {
    let mut pair = Pair::new(fast()).await;
    pair.redis.kill();
    let before = pair.engine.generated().await;
    let body = ask(1, json!({"store": false}));
    let answer = client::post(pair.a.api, PATH, body.to_string()).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (503, "store_unavailable")
    );
    assert_eq!(pair.engine.generated().await, before);
}

fn short_lease(config: &mut Config) {
    config.responses.store.lease.duration = Duration::from_millis(1_500);
}

#[tokio::test]
async fn a_run_of_a_killed_router_without_output_is_started_again() {
    let pair = Pair::with_child(unhurried(), short_lease).await;
    pair.engine.hold_after(3).await;
    let response = create(&pair.a, &ask(60, json!({}))).await;
    pair.runs(1).await;
    pair.a.child.as_ref().unwrap().signal("KILL");
    pair.engine.let_go().await;
    let last = ended(&pair.b, &response).await;
    assert_eq!(last["status"], "incomplete", "{last}");
    assert_eq!(last["usage"]["output_tokens"], 60);
    let admin = client::get(pair.b.admin, "/metrics").await;
    assert!(
        admin
            .text()
            .contains("warmroute_background_orphans_total{action=\"rerun\"} 1")
    );
}

#[tokio::test]
async fn a_run_of_a_killed_router_with_output_fails_and_keeps_it() {
    let pair = Pair::with_child(unhurried(), short_lease).await;
    let (_live, started, response) = streaming(&pair.a, 2_000).await;
    let seen = part(&started, 0);
    pair.a.child.as_ref().unwrap().signal("KILL");
    let last = ended(&pair.b, &response).await;
    assert_eq!(
        (&last["status"], &last["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
    pair.runs(0).await;
    let received = resumed(&pair.b, &response, None).await;
    assert_eq!(received[..seen.len()], seen);
    let (name, end) = received.last().unwrap();
    assert_eq!(
        (name.as_str(), &end["response"]),
        ("response.failed", &last)
    );
    assert_eq!(last["output"][0]["content"][0]["text"], *said(&received));
}

#[tokio::test]
async fn a_stopping_router_releases_runs_that_no_engine_has_started() {
    let long =
        |config: &mut Config| config.responses.store.lease.duration = Duration::from_secs(600);
    let pair = Pair::with_child(fast(), long).await;
    pair.engine
        .fault(Faults {
            hang: true,
            ..Faults::default()
        })
        .await;
    let body = ask(4, json!({"stream": true}));
    let mut live = client::open(pair.a.api, "POST", PATH, &[], body.to_string()).await;
    let started = live.until("response.queued").await;
    let response = part(&started, 0)[0].1["response"].clone();
    pair.a.child.as_ref().unwrap().signal("TERM");
    let _ = live.rest().await;
    pair.engine.fault(Faults::default()).await;
    let last = ended(&pair.b, &response).await;
    assert_eq!(last["status"], "incomplete", "{last}");
    let received = resumed(&pair.b, &response, None).await;
    assert_eq!(received.last().unwrap().1["response"], last);
}

#[tokio::test]
async fn a_stopping_router_finishes_running_responses() {
    let pair = Pair::with_child(unhurried(), |_| {}).await;
    pair.engine.hold_after(3).await;
    let response = create(&pair.a, &ask(60, json!({"stream": false}))).await;
    eventually("it has started", async || {
        get(&pair.b, &response).await["status"] == "in_progress"
    })
    .await;
    pair.a.child.as_ref().unwrap().signal("TERM");
    pair.engine.let_go().await;
    let last = ended(&pair.b, &response).await;
    assert_eq!(
        (&last["status"], pair.engine.generated().await),
        (&json!("incomplete"), 1)
    );
}

#[tokio::test]
async fn an_owner_cut_off_from_the_store_goes_on_when_it_is_back() {
    let pair = Pair::with(unhurried(), |config| {
        short_lease(config);
        impatient(config);
    })
    .await;
    pair.engine.hold_after(3).await;
    let one = create(&pair.a, &ask(60, json!({}))).await;
    let (mut live, started, two) = streaming(&pair.a, 60).await;
    pair.runs(2).await;
    pair.redis.pause();
    // Some tokens come meanwhile, and the rest afterwards.
    pair.engine.hold_after(30).await;
    // Twice the lease.
    tokio::time::sleep(Duration::from_secs(3)).await;
    pair.redis.wake();
    // A hanging connection may still be in use.
    eventually("the store answers again", async || {
        let answer = client::get(pair.b.api, &path(&two)).await;
        assert!([200, 503].contains(&answer.status), "{}", answer.text());
        answer.status == 200
    })
    .await;
    pair.engine.let_go().await;
    for response in [&one, &two] {
        let last = ended(&pair.b, response).await;
        assert_eq!(
            (&last["status"], &last["usage"]["output_tokens"]),
            (&json!("incomplete"), &json!(60)),
            "{last}"
        );
    }
    let (rest, is_whole) = live.rest().await;
    assert!(is_whole);
    let received = events(&(started + &rest), 0);
    assert_eq!(
        received.last().unwrap().1["response"]["status"],
        "incomplete"
    );
    assert_eq!(pair.engine.generated().await, 2);
}

#[tokio::test]
async fn an_idle_reader_gets_keep_alive_comments() {
    let pair = Pair::with(fast(), |config| {
        config.responses.keep_alive = Duration::from_millis(50);
    })
    .await;
    pair.engine.hold_after(1).await;
    let body = ask(9, json!({"stream": true})).to_string();
    let mut here = client::open(pair.a.api, "POST", PATH, &[], body).await;
    let started = here.until("response.queued").await;
    let id = part(&started, 0)[0].1["response"]["id"].clone();
    let path = format!("{PATH}/{}?stream=true", id.as_str().unwrap());
    let mut elsewhere = client::open(pair.b.api, "GET", &path, &[], "").await;
    for reader in [&mut here, &mut elsewhere] {
        for _ in 0..2 {
            reader.until(": waiting\n\n").await;
        }
    }
    pair.engine.let_go().await;
    for (text, whole) in [here.rest().await, elsewhere.rest().await] {
        assert!(whole && text.ends_with("data: [DONE]\n\n"), "{text}");
    }
}
