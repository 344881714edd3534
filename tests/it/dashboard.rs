//! The dashboard's events and pages, over real connections to a real router and simulated engines. The page itself is
//! tested in a browser (tests/browser).

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use warmroute::admin::Tokens;
use warmroute::secret::Secret;

use crate::client::{self, Open};
use crate::cluster::{self, Cluster, chat, eventually, fast};

const READER: &str = "reader-0123456789";

async fn viewer(admin: SocketAddr) -> Open {
    client::open(admin, "GET", "/dashboard/events", &[], "").await
}

/// The next event: its name and data.
async fn event(viewer: &mut Open) -> (String, Value) {
    let text = viewer.until("\n\n").await;
    let (head, data) = text.split_once("\ndata: ").unwrap();
    let name = head.strip_prefix("event: ").unwrap().to_owned();
    (name, serde_json::from_str(data.trim_end()).unwrap())
}

/// The place of a column in the rows of a table.
fn column(all: &Value, table: &str, name: &str) -> usize {
    let columns = all["columns"][table].as_array().unwrap();
    columns.iter().position(|column| column == name).unwrap()
}

#[tokio::test]
async fn a_page_that_was_just_opened_gets_everything_and_then_every_worker_each_second() {
    let mut cluster = Cluster::fast(2).await;
    cluster
        .post("/v1/chat/completions", chat("Hello", 2, false))
        .await;
    let mut viewer = viewer(cluster.router.admin).await;
    assert_eq!(
        viewer.headers["content-type"],
        "text/event-stream; charset=utf-8"
    );
    assert_eq!(viewer.headers["cache-control"], "no-store");
    let (name, all) = event(&mut viewer).await;
    assert_eq!(name, "all");
    let rows = all["workers"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    let killed = cluster.engines[0].name.clone();
    cluster.engines[0].kill().await;
    let health = column(&all, "workers", "health");
    loop {
        let (name, update) = event(&mut viewer).await;
        assert_eq!(name, "update");
        let rows = update["workers"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        if rows
            .iter()
            .any(|row| row[0] == *killed && row[health] == "down")
        {
            break;
        }
    }
    let page = cluster
        .admin(&format!("/dashboard/worker?name={killed}"))
        .await;
    assert_eq!(page.json()["worker"]["health"], "down");
    assert_eq!(
        cluster.admin("/dashboard/worker?name=none").await.status,
        404
    );
}

#[tokio::test]
async fn a_decision_is_shown_with_its_candidates_and_without_the_prompt() {
    let cluster = Cluster::fast(3).await;
    let mut viewer = viewer(cluster.router.admin).await;
    let (_, all) = event(&mut viewer).await;
    let mut rows: Vec<Value> = all["decisions"].as_array().unwrap().clone();
    while rows.is_empty() {
        cluster
            .post("/v1/chat/completions", chat("Confidential words", 2, false))
            .await;
        let (_, update) = event(&mut viewer).await;
        rows = update["decisions"].as_array().cloned().unwrap_or_default();
    }
    let number = column(&all, "decisions", "number");
    let path = format!("/dashboard/decision?number={}", rows[0][number]);
    let answer = cluster.admin(&path).await;
    assert!(!answer.text().contains("Confidential"), "{}", answer.text());
    let decision = answer.json();
    assert_eq!(decision["candidates"], 3);
    let workers = decision["workers"].as_array().unwrap();
    let chosen = workers
        .iter()
        .find(|worker| worker["worker"] == decision["chosen"]);
    assert!(chosen.unwrap()["cost_ms"].is_number(), "{decision}");
    assert!(decision["explanation"].is_string(), "{decision}");
    assert_eq!(
        cluster.admin("/dashboard/decision?number=0").await.status,
        404
    );
    assert_eq!(
        cluster.admin("/dashboard/decision?number=x").await.status,
        400
    );
}

#[tokio::test]
async fn a_decision_is_shown_with_the_best_and_the_worst_candidates() {
    let cluster = Cluster::fast(25).await;
    let mut viewer = viewer(cluster.router.admin).await;
    let (_, all) = event(&mut viewer).await;
    let mut rows: Vec<Value> = all["decisions"].as_array().unwrap().clone();
    while rows.is_empty() {
        cluster
            .post("/v1/chat/completions", chat("Which of many", 2, false))
            .await;
        let (_, update) = event(&mut viewer).await;
        rows = update["decisions"].as_array().cloned().unwrap_or_default();
    }
    let number = column(&all, "decisions", "number");
    let path = format!("/dashboard/decision?number={}", rows[0][number]);
    let decision = cluster.admin(&path).await.json();
    assert_eq!(decision["candidates"], 25);
    let workers = decision["workers"].as_array().unwrap();
    // Ten of each end, and those of the others that were chosen or have the longest cached prefix.
    assert!((20..=22).contains(&workers.len()), "{decision}");
    assert!(
        workers
            .iter()
            .any(|worker| worker["worker"] == decision["chosen"])
    );
}

#[tokio::test]
async fn a_worker_without_kv_events_says_why() {
    let cluster = Cluster::fast(1).await;
    let name = &cluster.engines[0].name;
    let page = cluster
        .admin(&format!("/dashboard/worker?name={name}"))
        .await;
    let page = page.json();
    assert_eq!(page["worker"]["events"]["ranks"], 0);
    let reason = page["worker"]["events"]["none_because"].as_str().unwrap();
    assert!(reason.contains("/kv_event_sources"), "{reason}");
}

#[tokio::test]
async fn a_random_worker_is_compared_with_the_chosen_one() {
    let cluster = Cluster::fast(2).await;
    let prompt = "A long prompt that fills some blocks. ".repeat(40);
    let value = |text: &str, name: &str| -> f64 {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")));
        line.map_or(0.0, |line| {
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    };
    eventually("requests are compared", async || {
        cluster
            .post("/v1/chat/completions", chat(&prompt, 1, false))
            .await;
        let metrics = cluster.admin("/metrics").await;
        let of = |name: &str| {
            value(
                metrics.text(),
                &format!("warmroute_random_worker_{name}_total"),
            )
        };
        let (all, cached) = (of("prompt_tokens"), of("cached_prompt_tokens"));
        // The prompt is cached at one of two workers.
        cached > 0.0 && cached < 0.75 * all
    })
    .await;
}

#[tokio::test]
async fn viewers_are_bounded_counted_and_need_a_role() {
    let mut config = cluster::config();
    config.admin.tokens = Tokens {
        read: vec![Secret::new(READER)],
        operate: Vec::new(),
    };
    config.admin.dashboard.max_viewers = 1;
    let router = cluster::Router::here(&config).await;
    let bearer = format!("Bearer {READER}");
    let with_token = [("authorization", bearer.as_str())];
    let open = async |headers: &[(&str, &str)]| {
        client::open(router.admin, "GET", "/dashboard/events", headers, "").await
    };
    assert_eq!(open(&[]).await.status, 401);
    let mut first = open(&with_token).await;
    assert_eq!(event(&mut first).await.0, "all");
    let second = open(&with_token).await;
    assert_eq!(second.status, 503);
    let metrics = client::get(router.admin, "/metrics").await;
    for line in [
        "warmroute_dashboard_viewers 1",
        "warmroute_dashboard_viewers_refused_total 1",
    ] {
        assert!(metrics.text().contains(line), "{line}");
    }
    drop((first, second));
    eventually("the place is free again", async || {
        open(&with_token).await.status == 200
    })
    .await;
    // A token in an address is not looked at.
    let path = format!("/dashboard/events?token={READER}");
    assert_eq!(client::get(router.admin, &path).await.status, 401);
}

#[tokio::test]
async fn the_drain_ends_the_events() {
    let cluster = Cluster::with_router_child(vec![fast()], |_| {}).await;
    let mut viewer = viewer(cluster.router.admin).await;
    event(&mut viewer).await;
    cluster.post_admin("/drain", "").await;
    tokio::time::timeout(Duration::from_secs(20), viewer.rest())
        .await
        .expect("the events end with the router");
}

#[tokio::test]
async fn the_page_is_for_browsers_and_holds_no_data() {
    let cluster = Cluster::fast(1).await;
    let admin = cluster.router.admin;
    let listing = client::get(admin, "/").await;
    assert!(
        listing.text().contains("/dashboard/events"),
        "{}",
        listing.text()
    );
    let html = ("accept", "text/html,application/xhtml+xml;q=0.9");
    let page = client::send(admin, "GET", "/", &[html], "").await;
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    let policy = page.header("content-security-policy");
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    assert!(!page.text().contains(&cluster.engines[0].name));
    let script = page
        .text()
        .split('"')
        .find(|text| text.ends_with("/main.js"))
        .unwrap();
    let script = client::get(admin, script).await;
    assert_eq!(
        script.header("content-type"),
        "text/javascript; charset=utf-8"
    );
    assert!(script.header("cache-control").contains("immutable"));
    assert_eq!(client::get(admin, "/assets/none/main.js").await.status, 404);
}

#[tokio::test]
async fn a_dashboard_that_is_off_is_not_there() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.admin.dashboard.max_viewers = 0
    })
    .await;
    let admin = cluster.router.admin;
    let page = client::send(admin, "GET", "/", &[("accept", "text/html")], "").await;
    assert_eq!(page.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(client::get(admin, "/dashboard/events").await.status, 404);
}

/// They are tooltips, so that an operator finds the number in a query, too.
#[test]
fn every_metric_that_the_page_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let reference = fs::read_to_string(root.join("docs/metrics.md")).unwrap();
    let mut named = BTreeSet::new();
    for entry in fs::read_dir(root.join("src/admin/dashboard/assets")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|kind| kind != "js") {
            continue;
        }
        let text = fs::read_to_string(path).unwrap();
        for rest in text.split("warmroute_").skip(1) {
            let is_of_name = |c: char| c.is_ascii_lowercase() || c == '_';
            let name = rest.split(|c| !is_of_name(c)).next().unwrap();
            named.insert(format!("`warmroute_{name}`"));
        }
    }
    // The beginning that the page cuts off.
    named.remove("`warmroute_`");
    assert!(named.len() > 30, "{named:?}");
    let unknown: Vec<&String> = named
        .iter()
        .filter(|name| !reference.contains(*name))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
