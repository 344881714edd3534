//! Webhooks, with receivers that are well, slow, wrong, dead, or where they must not be.

pub(crate) mod receiver;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use warmroute::config::Config;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::webhooks::{EndpointSettings, EventType};

use self::receiver::{Received, Receiver, Reply};
use crate::client;
use crate::cluster::{Cluster, Engine, Router, config, eventually, fast, tenant, unhurried};
use crate::localhost_tls;
use crate::redis_server::Server;
use crate::reload::{Folder, text, workers};

pub(crate) const KEY: &[u8] = b"a key of twenty-four bytes or more";
const PATH: &str = "/v1/responses";

fn secret() -> Secret {
    Secret::new(std::str::from_utf8(KEY).unwrap())
}

/// An endpoint on this host, which is allowed to be there.
pub(crate) fn endpoint(name: &str, url: &str) -> EndpointSettings {
    EndpointSettings {
        name: name.to_owned(),
        url: url.to_owned(),
        secrets: vec![secret()],
        allow_http: true,
        allowed_networks: vec!["127.0.0.0/8".to_owned()].try_into().unwrap(),
        ..EndpointSettings::default()
    }
}

pub(crate) fn quick(config: &mut Config) {
    config.webhooks.advanced.scan_interval = Duration::from_millis(200);
    config.webhooks.advanced.open_duration = Duration::from_millis(500);
}

async fn cluster(endpoints: Vec<EndpointSettings>, change: impl FnOnce(&mut Config)) -> Cluster {
    Cluster::start(vec![fast()], |config| {
        quick(config);
        config.webhooks.endpoints = endpoints;
        change(config);
    })
    .await
}

async fn with_receiver(reply: Reply) -> (Receiver, Cluster) {
    let receiver = Receiver::start(reply).await;
    let cluster = cluster(vec![endpoint("hook", &receiver.url())], |_| {}).await;
    (receiver, cluster)
}

/// Starts a background response; returns its id.
async fn begin(router: &Router, key: &str, tokens: usize) -> String {
    let body = json!({
        "model": "sim", "input": "Hi", "background": true, "max_output_tokens": tokens,
    });
    let bearer = format!("Bearer {key}");
    let headers = [("authorization", &*bearer)];
    let answer = client::send(router.api, "POST", PATH, &headers, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["id"].as_str().unwrap().to_owned()
}

pub(crate) async fn received(receiver: &Receiver, count: usize) -> Vec<Received> {
    let mut found = Vec::new();
    eventually("the receiver gets its events", async || {
        found = receiver.received();
        found.len() >= count
    })
    .await;
    assert_eq!(found.len(), count, "{found:?}");
    found
}

async fn attempts(cluster: &Cluster, outcome: &str, count: f64) {
    let label = format!("outcome=\"{outcome}\"");
    eventually(&format!("{count} of {outcome}"), async || {
        let name = "warmroute_webhook_attempts_total";
        cluster.metric(name, &[&label]).await >= count
    })
    .await;
}

async fn page(router: &Router) -> Value {
    let page = client::get(router.admin, "/webhooks").await.json();
    page["endpoints"][0].clone()
}

#[tokio::test]
async fn every_end_of_a_background_response_is_one_signed_event() {
    let receiver = Receiver::start(Reply::Status(204)).await;
    let both = EndpointSettings {
        secrets: vec![
            secret(),
            Secret::new("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"),
        ],
        ..endpoint("hook", &receiver.url())
    };
    let cluster = Cluster::start(vec![unhurried()], |config| {
        quick(config);
        config.webhooks.endpoints = vec![both];
    })
    .await;
    // In the foreground nothing is reported.
    let body = json!({"model": "sim", "input": "Hi", "max_output_tokens": 3});
    let answer = cluster.post(PATH, body.to_string()).await;
    assert_eq!(answer.status, 200);
    let incomplete = begin(&cluster.router, "", 3).await;
    let first = received(&receiver, 1).await.remove(0);
    assert_eq!(first.ended(), incomplete);
    let cancelled = begin(&cluster.router, "", 10_000).await;
    let answer = cluster
        .post(&format!("{PATH}/{cancelled}/cancel"), "")
        .await;
    assert_eq!(answer.status, 200);
    let second = received(&receiver, 2).await.remove(1);
    assert_eq!(
        (second.kind(), second.ended()),
        ("response.cancelled".to_owned(), cancelled)
    );
    cluster.engines[0]
        .fault(Faults {
            refuse: Some(400),
            ..Faults::default()
        })
        .await;
    let failed = begin(&cluster.router, "", 3).await;
    let third = received(&receiver, 3).await.remove(2);
    assert_eq!(
        (third.kind(), third.ended()),
        ("response.failed".to_owned(), failed)
    );
    // To the letter.
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    for event in [&first, &second, &third] {
        assert_eq!(event.line, "POST /hook?a=b HTTP/1.1");
        assert_eq!(event.headers["content-type"], "application/json");
        assert_eq!(event.headers["host"], receiver.address.to_string());
        assert!(event.headers["user-agent"].starts_with("warmroute/"));
        let timestamp: u64 = event.headers["webhook-timestamp"].parse().unwrap();
        assert!(now.abs_diff(timestamp) < 300);
        assert!(event.is_signed_by(KEY) && event.is_signed_by(b"012345678901234567890123"));
        assert!(!event.is_signed_by(b"another key of twenty-four bytes"));
        assert!(!event.headers.contains_key("authorization"));
        let created_at = event.json()["created_at"].as_u64().unwrap();
        assert!(now.abs_diff(created_at) < 300);
        let expected = json!({
            "id": event.id(),
            "object": "event",
            "created_at": created_at,
            "type": event.kind(),
            "data": {"id": event.ended()},
        });
        assert_eq!(event.json(), expected);
        assert!(event.id().starts_with("evt_"));
    }
    assert_eq!(first.kind(), "response.incomplete");
    assert!(first.id() != second.id() && second.id() != third.id());
    eventually("nothing waits", async || {
        let page = page(&cluster.router).await;
        page["waiting_events"] == 0 && page["state"] == "ok" && page["in_flight"] == 0
    })
    .await;
    assert_eq!(receiver.received().len(), 3);
    let delivered = "warmroute_webhook_events_total";
    let delivered = cluster.metric(delivered, &["outcome=\"delivered\""]).await;
    assert_eq!(delivered, 3.0);
}

#[tokio::test]
async fn an_endpoint_gets_what_it_asked_for_of_its_tenant() {
    let (of_a, of_all) = (
        Receiver::start(Reply::Status(200)).await,
        Receiver::start(Reply::Status(200)).await,
    );
    let none = Receiver::start(Reply::Status(200)).await;
    let endpoints = vec![
        EndpointSettings {
            tenant: "a".to_owned(),
            ..endpoint("a", &of_a.url())
        },
        EndpointSettings {
            tenant: "*".to_owned(),
            ..endpoint("all", &of_all.url())
        },
        EndpointSettings {
            tenant: "a".to_owned(),
            events: vec![EventType::ResponseCancelled],
            ..endpoint("cancelled", &none.url())
        },
    ];
    let cluster = cluster(endpoints, |config| {
        config.tenants = vec![tenant("a"), tenant("b")];
    })
    .await;
    let first = begin(&cluster.router, "sk-a", 3).await;
    assert_eq!(received(&of_all, 1).await[0].ended(), first);
    let second = begin(&cluster.router, "sk-b", 3).await;
    assert_eq!(received(&of_all, 2).await[1].ended(), second);
    assert_eq!(received(&of_a, 1).await[0].ended(), first);
    assert_eq!(none.connections(), 0);
}

#[tokio::test]
async fn a_failed_attempt_is_repeated_with_the_same_id() {
    let (receiver, cluster) = with_receiver(Reply::Status(500)).await;
    begin(&cluster.router, "", 3).await;
    received(&receiver, 1).await;
    receiver.reply(Reply::Cut);
    received(&receiver, 2).await;
    let failing = page(&cluster.router).await;
    assert_eq!(failing["waiting_events"], 1, "{failing}");
    assert_ne!(failing["last_failure"], "");
    let after = receiver.received();
    assert_eq!(after[0].id(), after[1].id());
    assert_eq!(after[0].body, after[1].body);
    attempts(&cluster, "server_error", 1.0).await;
    attempts(&cluster, "broken", 1.0).await;
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let inside = Receiver::start(Reply::Status(200)).await;
    let (receiver, cluster) = with_receiver(Reply::RedirectTo(inside.url())).await;
    begin(&cluster.router, "", 3).await;
    attempts(&cluster, "redirect", 1.0).await;
    assert_eq!((receiver.received().len(), inside.connections()), (1, 0));
    let failure = page(&cluster.router).await["last_failure"].clone();
    assert!(
        failure.as_str().unwrap().contains("not followed"),
        "{failure}"
    );
}

#[tokio::test]
async fn an_address_inside_is_refused_whatever_name_leads_to_it() {
    let receiver = Receiver::start(Reply::Status(200)).await;
    let port = receiver.address.port();
    let urls = [
        format!("http://127.0.0.1:{port}/"),
        format!("http://localhost:{port}/"),
        format!("http://[::ffff:127.0.0.1]:{port}/"),
        format!("http://0.0.0.0:{port}/"),
        "http://169.254.169.254/latest/meta-data".to_owned(),
        "http://10.255.255.1/".to_owned(),
    ];
    let endpoints = urls.iter().enumerate();
    let endpoints = endpoints.map(|(place, url)| EndpointSettings {
        allowed_networks: Default::default(),
        ..endpoint(&format!("hook-{place}"), url)
    });
    let cluster = cluster(endpoints.collect(), |_| {}).await;
    begin(&cluster.router, "", 3).await;
    attempts(&cluster, "address_refused", urls.len() as f64).await;
    assert_eq!(receiver.connections(), 0);
    let failure = page(&cluster.router).await["last_failure"].clone();
    assert!(
        failure.as_str().unwrap().contains("allowed_networks"),
        "{failure}"
    );
}

#[tokio::test]
async fn a_slow_receiver_holds_up_no_other_and_gets_few_events_at_a_time() {
    let slow = Receiver::start(Reply::Never).await;
    let well = Receiver::start(Reply::Status(200)).await;
    let endpoints = vec![endpoint("slow", &slow.url()), endpoint("well", &well.url())];
    let cluster = cluster(endpoints, |config| {
        config.webhooks.advanced.attempt_timeout = Duration::from_millis(800);
        config.webhooks.advanced.connect_timeout = Duration::from_millis(800);
        config.webhooks.advanced.max_concurrent_per_endpoint = 2;
        config.webhooks.advanced.failure_threshold = 4;
    })
    .await;
    for _ in 0..12 {
        begin(&cluster.router, "", 3).await;
    }
    eventually("the other gets all events", async || {
        let events = well.received();
        // An attempt of a busy machine may end too late, and is repeated.
        let ended: BTreeSet<String> = events.iter().map(Received::ended).collect();
        ended.len() == 12
    })
    .await;
    attempts(&cluster, "timed_out", 4.0).await;
    assert!(slow.most_open() <= 2, "{}", slow.most_open());
    eventually("its circuit breaker is open", async || {
        page(&cluster.router).await["state"] == "failing"
    })
    .await;
    assert_eq!(page(&cluster.router).await["waiting_events"], 12);
}

#[tokio::test]
async fn a_huge_answer_is_not_read() {
    let (receiver, cluster) = with_receiver(Reply::EndlessBody).await;
    begin(&cluster.router, "", 3).await;
    attempts(&cluster, "delivered", 1.0).await;
    receiver.reply(Reply::EndlessHead);
    begin(&cluster.router, "", 3).await;
    attempts(&cluster, "broken", 1.0).await;
    // No more than the buffers of the sockets.
    assert!(receiver.sent() < 16 << 20, "{}", receiver.sent());
}

#[tokio::test]
async fn a_killed_receiver_has_its_event_when_it_is_back() {
    let (receiver, cluster) = with_receiver(Reply::Never).await;
    let id = begin(&cluster.router, "", 3).await;
    received(&receiver, 1).await;
    receiver.kill().await;
    attempts(&cluster, "broken", 1.0).await;
    let back = Receiver::at(&receiver.address.to_string(), Reply::Status(200), None).await;
    let event = received(&back, 1).await.remove(0);
    assert_eq!(event.ended(), id);
    assert_eq!(event.id(), receiver.received()[0].id());
    eventually("nothing waits", async || {
        page(&cluster.router).await["waiting_events"] == 0
    })
    .await;
}

#[tokio::test]
async fn a_gone_endpoint_is_disabled_until_an_operator_enables_it() {
    let (receiver, cluster) = with_receiver(Reply::Status(410)).await;
    begin(&cluster.router, "", 3).await;
    eventually("it is disabled", async || {
        page(&cluster.router).await["state"] == "disabled"
    })
    .await;
    receiver.reply(Reply::Status(200));
    begin(&cluster.router, "", 3).await;
    eventually("the event is dropped", async || {
        let dropped = "outcome=\"dropped_disabled\"";
        let events = "warmroute_webhook_events_total";
        cluster.metric(events, &[dropped]).await == 2.0
    })
    .await;
    let unknown = cluster
        .post_admin("/webhooks/enable?endpoint=other", "")
        .await;
    assert_eq!(unknown.status, 404);
    let enabled = cluster
        .post_admin("/webhooks/enable?endpoint=hook", "")
        .await;
    assert_eq!(
        enabled.json(),
        json!({"endpoint": "hook", "was_disabled": true})
    );
    let id = begin(&cluster.router, "", 3).await;
    let events = received(&receiver, 2).await;
    assert_eq!(events[1].ended(), id);
}

#[tokio::test]
async fn an_event_is_sent_over_tls_to_a_receiver_that_is_who_it_says() {
    let (ca, acceptor) = localhost_tls::tls(&["http/1.1"]);
    let folder = Folder::new();
    let file = folder.path("ca.pem");
    std::fs::write(&file, ca).unwrap();
    let receiver = Receiver::with_tls(acceptor).await;
    let url = format!("https://{}/", receiver.address);
    let mut known = endpoint("known", &url);
    known.allow_http = false;
    known.tls = Some(warmroute::http::tls::ClientSettings {
        ca: file.display().to_string(),
        ..Default::default()
    });
    let mut other = known.clone();
    other.name = "wrong-name".to_owned();
    other.tls.as_mut().unwrap().server_name = "example.com".to_owned();
    let cluster = cluster(vec![known, other], |_| {}).await;
    let id = begin(&cluster.router, "", 3).await;
    let event = received(&receiver, 1).await.remove(0);
    assert!(event.ended() == id && event.is_signed_by(KEY));
    attempts(&cluster, "not_connected", 1.0).await;
    assert_eq!(receiver.received().len(), 1);
}

/// A replica is killed while its receiver does not answer; another delivers what it had claimed.
#[tokio::test]
async fn what_a_killed_replica_was_delivering_is_delivered_by_another() {
    let (receiver, redis) = (Receiver::start(Reply::Never).await, Server::start().await);
    let engine = Engine::here("w0", fast()).await;
    let mut config = config();
    config.workers = vec![engine.listed()];
    let responses = &mut config.responses;
    responses.store.redis = Some(warmroute::store::redis::Settings {
        urls: vec![redis.url()],
        ..Default::default()
    });
    responses.state_token.keys = vec![Secret::new(
        "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
    )];
    quick(&mut config);
    config.webhooks.endpoints = vec![endpoint("hook", &receiver.url())];
    let killed = Router::child(&config).await;
    eventually("it is ready", async || {
        client::get(killed.admin, "/readyz").await.status == 200
    })
    .await;
    let id = begin(&killed, "", 3).await;
    received(&receiver, 1).await;
    drop(killed);
    let other = Router::here(&config).await;
    receiver.reply(Reply::Status(200));
    let events = received(&receiver, 2).await;
    assert!(events.iter().all(|event| event.ended() == id));
    assert_eq!(events[0].id(), events[1].id());
    eventually("nothing waits", async || {
        page(&other).await["waiting_events"] == 0
    })
    .await;
}

/// A router whose file has an endpoint at this receiver, and the text of that file.
async fn cluster_of_file(folder: &Folder, receiver: &Receiver) -> (Cluster, String) {
    let engine = Engine::here("w0", fast()).await;
    let file = folder.path("secret");
    std::fs::write(&file, std::str::from_utf8(KEY).unwrap()).unwrap();
    let (url, secret) = (receiver.url(), file.display());
    let listed = workers([&engine]);
    let config = text(&format!(
        "{listed}webhooks: {{endpoints: [{{name: hook, url: '{url}', allow_http: true, allowed_networks: \
         [127.0.0.1], secrets: ['file:{secret}']}}]}}\n"
    ));
    let cluster = folder.start(vec![engine], &config).await;
    cluster.all_up().await;
    (cluster, config)
}

#[tokio::test]
async fn a_late_410_of_a_former_url_drops_no_event_of_the_new_one() {
    let signal = Arc::new(Notify::new());
    let before = Receiver::start(Reply::StatusAfter(signal.clone(), 410)).await;
    let after = Receiver::start(Reply::Status(200)).await;
    let folder = Folder::new();
    let (cluster, first) = cluster_of_file(&folder, &before).await;
    let mut expected = vec![begin(&cluster.router, "", 3).await];
    received(&before, 1).await;
    folder.write(&first.replace(&before.url(), &after.url()));
    let reloaded = cluster.post_admin("/reload", "").await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    signal.notify_one();
    expected.push(begin(&cluster.router, "", 3).await);
    let events = received(&after, 2).await;
    let mut ended: Vec<String> = events.iter().map(Received::ended).collect();
    ended.sort();
    expected.sort();
    assert_eq!(ended, expected);
    assert_eq!(page(&cluster.router).await["state"], "ok");
}

#[tokio::test]
async fn a_reload_rotates_a_secret_and_moves_an_endpoint() {
    let (before, after) = (
        Receiver::start(Reply::Status(200)).await,
        Receiver::start(Reply::Status(200)).await,
    );
    let folder = Folder::new();
    let (cluster, first) = cluster_of_file(&folder, &before).await;
    begin(&cluster.router, "", 3).await;
    assert!(received(&before, 1).await[0].is_signed_by(KEY));
    let next = "another key of twenty-four bytes";
    let second = first
        .replace(&before.url(), &after.url())
        .replace("']", &format!("', '{next}']"));
    folder.write(&second);
    let reloaded = cluster.post_admin("/reload", "").await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    begin(&cluster.router, "", 3).await;
    let event = received(&after, 1).await.remove(0);
    assert!(event.is_signed_by(KEY) && event.is_signed_by(next.as_bytes()));
    assert_eq!(before.received().len(), 1);
    // A mistake is reported with its place, and changes nothing.
    folder.write(&second.replace(", allow_http: true", ""));
    let refused = cluster.post_admin("/reload", "").await;
    assert_eq!(refused.status, 400);
    let text = refused.text();
    assert!(
        text.contains("webhooks.endpoints[0].url") && text.contains("allow_http"),
        "{text}"
    );
    let shown = cluster.admin("/config").await;
    assert!(!shown.text().contains(next));
}
