//! Many reloads, and large files.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{Clients, Folder, applied, engines, text, workers};
use crate::client;
use crate::cluster::{Cluster, chat, eventually};

/// Resident memory in KiB, and the number of threads.
fn usage(cluster: &Cluster) -> (u64, u64) {
    let id = cluster.router.child.as_ref().unwrap().id();
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let field = |name: &str| {
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    (field("VmRSS:"), field("Threads:"))
}

async fn reload_many(first: usize, count: usize) -> (u64, u64) {
    let folder = Folder::new();
    let engines = engines(2).await;
    // Workers that are never up, each reload another one of them, and one that is.
    let with = |number: usize| {
        let port = 1 + number % 2;
        let list = workers(&engines) + &format!("  - 'http://127.0.0.2:{port}'\n");
        let file = folder.path(&format!("list{port}"));
        fs::write(&file, "workers: []\n").unwrap();
        text(&format!(
            "{list}discovery: [{{file: {{path: '{}'}}}}]\n",
            file.display()
        ))
    };
    let texts = [with(0), with(1)];
    let cluster = folder.start_child(engines, &texts[1]).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.is_worker("w1", "health", "up").await;
    let clients = Clients::start(&cluster, 2);
    for number in 0..first {
        folder.write(&texts[number % 2]);
        applied(&cluster).await;
    }
    let (memory, threads) = usage(&cluster);
    for number in 0..count {
        folder.write(&texts[(first + number) % 2]);
        applied(&cluster).await;
    }
    let (memory_after, _) = usage(&cluster);
    clients.none_failed().await;
    // The thread that looked at a file of the configuration before may still be ending.
    eventually("there are no more threads than before", async || {
        usage(&cluster).1 <= threads
    })
    .await;
    (memory, memory_after)
}

#[tokio::test]
async fn many_reloads_leave_memory_and_threads_as_they_were() {
    let (before, after) = reload_many(20, 40).await;
    // A leak of one configuration, its workers and tasks would be more.
    assert!(
        after < before + before / 4,
        "{before} KiB, then {after} KiB"
    );
}

/// The bar: 200 reloads under load leave memory flat. Run by name.
#[tokio::test]
#[ignore = "takes a minute, and measures"]
async fn measure_200_reloads_under_load() {
    let (before, after) = reload_many(50, 200).await;
    println!("RSS after 50 reloads {before} KiB, after 200 more {after} KiB");
    assert!(
        after < before + before / 10,
        "{before} KiB, then {after} KiB"
    );
}

/// A configuration of two workers that are up and 1,000 at addresses where nothing listens.
fn thousand(up: &str, name: &str) -> String {
    let mut list = up.to_owned();
    for number in 0..1_000 {
        let (high, low) = (number / 250, 1 + number % 250);
        list += &format!("  - {{url: 'http://127.1.{high}.{low}:9', name: {name}-{number}}}\n");
    }
    // A thousand refused connections a second are enough.
    text(&list).replace("50ms", "2s")
}

/// The bar: the p99 of requests while a file of 1,000 workers is reloaded is within twice that without. Run by name.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute, and measures"]
async fn measure_requests_during_reloads_of_a_thousand_workers() {
    let folder = Folder::new();
    let engines = engines(2).await;
    let up = workers(&engines);
    let cluster = folder.start_child(engines, &thousand(&up, "a")).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.is_worker("w1", "health", "up").await;
    let api = cluster.router.api;
    let measure = async |reloads: bool| {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |number: usize| {
            let stop = stop.clone();
            async move {
                let mut times = Vec::new();
                while !stop.load(Relaxed) {
                    let started = Instant::now();
                    let body = chat(&format!("client {number}"), 1, false);
                    let answer = client::post(api, "/v1/chat/completions", body).await;
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    times.push(started.elapsed());
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                times
            }
        };
        let clients: Vec<_> = (0..4).map(|number| tokio::spawn(client(number))).collect();
        let started = Instant::now();
        let mut count = 0;
        while started.elapsed() < Duration::from_secs(10) {
            if reloads {
                // One worker in ten is another one.
                let text = thousand(&up, "a");
                let other = [".1:9', name: a", ".1:9', name: b"][count % 2];
                let text = text.replace("1:9', name: a", other.trim_start_matches('.'));
                folder.write(
                    &(text + &format!("queue: {{max_worker_queued_tokens: {}}}\n", 8_192 + count)),
                );
                applied(&cluster).await;
                count += 1;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        stop.store(true, Relaxed);
        let mut times = Vec::new();
        for client in clients {
            times.extend(client.await.unwrap());
        }
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "{} requests, {count} reloads: p50 {:?}, p99 {:?}, longest {:?}",
            times.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
    };
    for _ in 0..3 {
        measure(false).await;
        measure(true).await;
    }
}

#[tokio::test]
async fn a_reload_of_a_thousand_workers_costs_no_request() {
    let folder = Folder::new();
    let engines = engines(2).await;
    let up = workers(&engines);
    let with = |name: &str| thousand(&up, name);
    let cluster = folder.start_child(engines, &with("a")).await;
    cluster.is_worker("w0", "health", "up").await;
    cluster.is_worker("w1", "health", "up").await;
    let clients = Clients::start(&cluster, 4);
    for name in ["b", "c"] {
        folder.write(&with(name));
        applied(&cluster).await;
        assert!(!cluster.worker(&format!("{name}-999")).await.is_null());
    }
    assert!(clients.none_failed().await > 4);
}
