//! Models without a worker, and what autoscalers read.

use std::path::{Path, PathBuf};
use std::time::Duration;

use warmroute::config::ModelOverride;
use warmroute::sim::fault::Faults;

use super::{CHAT, block, cluster, row, seconds, send, wait, waiting, with_queue};
use crate::client;
use crate::cluster::{Cluster, Engine, Router, chat, config, eventually, fast};
use crate::reload::Folder;

fn known(name: &str) -> ModelOverride {
    ModelOverride {
        name: name.to_owned(),
        ..ModelOverride::default()
    }
}

/// A router that knows the model `sim` and has no worker until the returned file lists one. The folder has the file.
async fn without_workers(
    change: impl FnOnce(&mut warmroute::queue::Settings),
) -> (Cluster, PathBuf, Folder) {
    let folder = Folder::new();
    let list = folder.path("workers.yaml");
    std::fs::write(&list, "workers: []\n").unwrap();
    let mut config = config();
    with_queue(&mut config, change);
    config.models = vec![known("sim")];
    let entry = format!("[{{file: {{path: '{}', interval: 20ms}}}}]", list.display());
    let text = format!("discovery: {entry}");
    let file = folder.path("only_discovery.yaml");
    std::fs::write(&file, text).unwrap();
    config.discovery = warmroute::config::Config::load(&file).unwrap().discovery;
    let router = Router::here(&config).await;
    let cluster = Cluster {
        engines: Vec::new(),
        router,
    };
    (cluster, list, folder)
}

/// Lists the engine as the only worker.
fn list_only(list: &Path, engine: &Engine) {
    std::fs::write(list, format!("workers: ['http://{}']\n", engine.address)).unwrap();
}

#[tokio::test]
async fn the_first_worker_of_a_model_gets_no_more_of_what_waits_than_it_has_room_for() {
    let (cluster, list, _folder) = without_workers(|_| {}).await;
    let mut waiters = Vec::new();
    for number in 0..5 {
        let prompt = format!("{number} {}", "waits ".repeat(100));
        waiters.push(wait(&cluster, &[], chat(&prompt, 1, true)).await);
    }
    // The first prompt takes it longer than the test.
    let slow = warmroute::sim::worker::Settings {
        prefill_tokens_per_second: 1.try_into().unwrap(),
        ..fast()
    };
    let engine = Engine::here("w0", slow).await;
    list_only(&list, &engine);
    eventually("one is released", async || waiting(&cluster).await < 5).await;
    eventually("the engine has it", async || {
        engine.stats().await.running > 0
    })
    .await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(waiting(&cluster).await, 4);
}

#[tokio::test]
async fn a_request_for_a_model_without_workers_waits_for_the_first_one() {
    let (cluster, list, _folder) =
        without_workers(|settings| settings.max_worker_queued_tokens = 1_000).await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    let requests = ["model=\"sim\"", "class=\"normal\""];
    assert_eq!(
        cluster.metric("warmroute_queue_requests", &requests).await,
        1.0
    );
    assert!(
        cluster
            .metric("warmroute_saturation_ratio", &["model=\"sim\""])
            .await
            > 0.0
    );
    // Who asks for a model that is not known is not kept waiting.
    let other = chat("hello", 1, false).replace("\"sim\"", "\"other\"");
    assert_ne!(cluster.post(CHAT, other).await.status, 200);
    let engine = Engine::here("w0", fast()).await;
    list_only(&list, &engine);
    let answer = waiter.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(waiting(&cluster).await, 0);
}

/// Load balancers send requests to routers that are ready, and autoscalers start the first worker for those that wait.
#[tokio::test]
async fn a_router_whose_requests_wait_for_the_first_worker_is_ready_without_one() {
    let (cluster, list, _folder) = without_workers(|_| {}).await;
    let ready = cluster.admin("/readyz").await;
    let text = ready.text();
    assert_eq!(ready.status, 200, "{text}");
    assert!(text.contains("no healthy worker"), "{text}");
    let engine = Engine::here("w0", fast()).await;
    list_only(&list, &engine);
    eventually("it has a worker", async || {
        cluster.admin("/readyz").await.text() == "ready\n"
    })
    .await;
    let (refusing, _list, _folder) =
        without_workers(|settings| settings.no_worker_timeout = seconds(0)).await;
    assert_eq!(refusing.admin("/readyz").await.status, 503);
}

#[tokio::test]
async fn a_model_whose_worker_does_not_come_back_is_waited_for_only_so_long() {
    let mut config = config();
    with_queue(&mut config, |settings| {
        settings.no_worker_timeout = Duration::from_millis(300)
    });
    config.models = vec![known("sim")];
    let router = Router::here(&config).await;
    let cluster = Cluster {
        engines: Vec::new(),
        router,
    };
    let answer = cluster.post(CHAT, chat("hello", 1, false)).await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (503, "no_healthy_worker"),
        "{}",
        answer.text()
    );
    assert!(
        answer.text().contains("no_worker_timeout"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn requests_wait_while_the_only_worker_is_down_and_go_on_when_it_is_up() {
    let cluster = cluster(1, |_| {}).await;
    let unhealthy = |unhealthy| Faults {
        unhealthy,
        ..Faults::default()
    };
    cluster.engines[0].fault(unhealthy(true)).await;
    cluster.is_worker("w0", "health", "down").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    cluster.engines[0].fault(unhealthy(false)).await;
    assert_eq!(waiter.answer().await.status, 200);
}

#[tokio::test]
async fn a_busy_worker_that_stopped_computing_makes_no_request_wait_for_ever() {
    let cluster = cluster(1, |settings| {
        settings.max_wait = seconds(600);
        settings.stale_after = Duration::from_millis(300);
    })
    .await;
    let _blocker = block(&cluster, "busy ").await;
    let answer = cluster.post(CHAT, chat("hello", 1, false)).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_worker_that_joins_gets_what_waits_for_busy_ones() {
    let folder = Folder::new();
    let list = folder.path("workers.yaml");
    let first = Engine::here("w0", fast()).await;
    let second = Engine::here("w1", fast()).await;
    let lines = |engines: &[&Engine]| {
        let urls: Vec<String> = engines
            .iter()
            .map(|engine| {
                format!(
                    "{{url: 'http://{}', name: {}}}",
                    engine.address, engine.name
                )
            })
            .collect();
        format!("workers: [{}]\n", urls.join(", "))
    };
    std::fs::write(&list, lines(&[&first])).unwrap();
    let file = folder.path("only_discovery.yaml");
    let text = format!(
        "discovery: [{{file: {{path: '{}', interval: 20ms}}}}]\n",
        list.display()
    );
    std::fs::write(&file, text).unwrap();
    let mut config = config();
    with_queue(&mut config, |_| {});
    config.discovery = warmroute::config::Config::load(&file).unwrap().discovery;
    let router = Router::here(&config).await;
    let cluster = Cluster {
        engines: vec![first],
        router,
    };
    cluster.is_worker("w0", "health", "up").await;
    let _blocker = block(&cluster, "busy ").await;
    let waiter = wait(&cluster, &[], chat("hello", 1, false)).await;
    std::fs::write(&list, lines(&[&cluster.engines[0], &second])).unwrap();
    let answer = waiter.answer().await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("x-warmroute-decision").contains("worker=w1;"));
}

#[tokio::test]
async fn metrics_of_known_models_are_there_before_anything_waits() {
    // Without a queue too: autoscalers are set up first.
    let cluster = Cluster::start(vec![fast()], |config| {
        config.queue = warmroute::queue::Waiting::Off;
        config.models = vec![known("cold")];
    })
    .await;
    let page = client::get(cluster.router.admin, "/metrics").await;
    for line in [
        "warmroute_queue_requests{class=\"normal\",model=\"sim\"} 0",
        "warmroute_queue_requests{class=\"normal\",model=\"cold\"} 0",
        "warmroute_queue_tokens{class=\"high\",model=\"cold\"} 0",
        "warmroute_queue_bytes{class=\"low\",model=\"sim\"} 0",
        "warmroute_saturation_ratio{model=\"cold\"} 0",
        "warmroute_saturation_ratio{model=\"sim\"} 0",
    ] {
        assert!(page.text().lines().any(|sample| sample == line), "{line}");
    }
    let status = cluster.admin("/queue").await.json();
    assert_eq!(status["is_on"], false);
    assert_eq!(row(&cluster, "cold").await["workers"], 0);
}

#[tokio::test]
async fn saturation_is_what_is_queued_by_what_may_be() {
    let cluster = cluster(2, |settings| settings.max_worker_queued_tokens = 10_000).await;
    let _blocker = block(&cluster, "busy ").await;
    let queued = cluster.worker("w0").await["queued_tokens"]
        .as_u64()
        .unwrap()
        + cluster.worker("w1").await["queued_tokens"]
            .as_u64()
            .unwrap();
    let saturation = cluster
        .metric("warmroute_saturation_ratio", &["model=\"sim\""])
        .await;
    assert!(
        (saturation - queued as f64 / 20_000.0).abs() < 1e-6,
        "{saturation} {queued}"
    );
    drop(send(&cluster, &[], chat("x", 1, false)));
}

#[tokio::test]
async fn explain_says_what_happens_to_a_request_whose_model_has_no_worker_yet() {
    let explain = async |cluster: &Cluster, model: &str| {
        let body = chat("hello", 1, false).replace("\"sim\"", &format!("\"{model}\""));
        cluster.post_admin("/explain", &body).await
    };
    let change = |config: &mut warmroute::config::Config, with: bool| {
        if with {
            with_queue(config, |settings| {
                settings.no_worker_timeout = seconds(90);
            });
        }
        config.models = vec![
            known("cold"),
            ModelOverride {
                aliases: vec!["frozen".to_owned()],
                ..known("ice")
            },
        ];
    };
    let waits = Cluster::start(vec![fast()], |config| change(config, true)).await;
    for (asked, model) in [("cold", "cold"), ("frozen", "ice")] {
        let answer = explain(&waits, asked).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let page = answer.json();
        assert_eq!(page["model"], model);
        assert_eq!(page["chosen"], serde_json::Value::Null);
        assert_eq!(page["queue"]["would_wait"], true, "{page}");
        assert_eq!(page["queue"]["waits_for"], "worker");
        assert_eq!(page["queue"]["max_wait_ms"], 90_000);
        let text = page["explanation"].as_str().unwrap();
        assert!(
            text.contains("90s (queue.no_worker_timeout)")
                || text.contains("1m 30s (queue.no_worker_timeout)"),
            "{text}"
        );
    }
    assert_eq!(explain(&waits, "unknown").await.status, 404);
    let refuses = Cluster::start(vec![fast()], |config| change(config, false)).await;
    let page = explain(&refuses, "cold").await.json();
    let text = page["explanation"].as_str().unwrap();
    assert!(text.contains("refused at once"), "{text}");
}
