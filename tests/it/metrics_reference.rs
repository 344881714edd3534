//! `docs/metrics.md` lists every metric of the code.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::routing::Policy;

use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, config, fast};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");

#[tokio::test]
async fn the_committed_page_is_what_the_code_says() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(PAGE, &page).unwrap();
    }
    let committed = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        page == committed,
        "docs/metrics.md differs from the code; write it again with\n\n    \
         UPDATE_DOCS=1 cargo test --test it metrics_reference\n"
    );
}

/// Names in string literals: a metric that the page misses is registered by something that the page's
/// writer does not start.
#[tokio::test]
async fn every_metric_in_the_source_is_on_the_page() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    let mut missing = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = fs::read_to_string(&path).unwrap();
                // A histogram's buckets are series of their own in a scrape.
                let is_missing = |name: &String| {
                    let family = name.strip_suffix("_bucket").unwrap_or(name);
                    !page.contains(&format!("`{family}`"))
                };
                missing.extend(names(&source).filter(is_missing));
            }
        }
    }
    assert!(missing.is_empty(), "not in the reference: {missing:?}");
}

/// The string literals that are nothing but a metric's name.
fn names(source: &str) -> impl Iterator<Item = String> {
    let literals = source.split("\"warmroute_").skip(1);
    let names = literals
        .filter_map(|rest| rest.split_once('"'))
        .map(|(name, _)| name);
    let is_name = |name: &&str| {
        name.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    };
    names
        .filter(is_name)
        .map(|name| format!("warmroute_{name}"))
}

#[tokio::test]
async fn every_scraped_metric_is_on_the_page() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    let scraped = Cluster::fast(1).await.admin("/metrics").await;
    let families = scraped
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    for family in families {
        let (name, kind) = family.split_once(' ').unwrap();
        assert!(page.contains(&format!("| `{name}` | {kind} |")), "{family}");
    }
}

/// Accepts connections at all addresses of this host, and passes them on.
async fn at_every_address(engine: SocketAddr) -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut engine = TcpStream::connect(engine).await?;
                tokio::io::copy_bidirectional(&mut client, &mut engine).await
            });
        }
    });
    port
}

/// Each worker has had a streamed request, so it has all series of requests. Those of KV events have a bound of their
/// own, 2.5 MB.
#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_with_1000_workers_takes_less_than_8_mb() {
    const KV_EVENTS: usize = 2_500_000;
    let engine = Engine::here("engine", fast()).await;
    let port = at_every_address(engine.address).await;
    let mut config = config();
    config.fleet.health.interval = Duration::from_secs(5);
    config.routing.policy = Policy::RoundRobin;
    config.workers = (0..1_000)
        .map(|n| WorkerSpec {
            url: format!("http://127.1.{}.{}:{port}", n / 250, n % 250 + 1),
            name: format!("vllm-llama-70b-{n:04}.inference.svc.cluster.local:8000"),
            ..WorkerSpec::default()
        })
        .collect();
    let router = Router::here(&config).await;
    let (mut text, mut answered) = (String::new(), 0);
    // In rounds and not by time: each request looks at a thousand workers, of which the first may not be up yet.
    for _ in 0..10 {
        let body = chat("hello", 2, true);
        let requests: JoinSet<_> = (0..500)
            .map(|_| client::post(router.api, "/v1/chat/completions", body.clone()))
            .collect();
        requests.join_all().await;
        text = client::get(router.admin, "/metrics")
            .await
            .text()
            .to_owned();
        let count = "warmroute_time_to_first_token_seconds_count{";
        answered = text.lines().filter(|line| line.starts_with(count)).count();
        if answered >= 1_000 {
            break;
        }
    }
    assert!(answered >= 1_000, "{answered} workers have answered");
    assert!(text.len() < 8_000_000 - KV_EVENTS, "{} bytes", text.len());
}
