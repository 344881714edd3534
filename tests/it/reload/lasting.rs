//! Many reloads, and large files.

use std::fs;

use super::{Clients, Folder, applied, engines, text, workers};
use crate::cluster::Cluster;

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
    let (memory_after, threads_after) = usage(&cluster);
    clients.none_failed().await;
    assert_eq!(threads_after, threads);
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

#[tokio::test]
async fn a_reload_of_a_thousand_workers_costs_no_request() {
    let folder = Folder::new();
    let engines = engines(2).await;
    let up = workers(&engines);
    let with = |name: &str| {
        let mut list = up.clone();
        for number in 0..1_000 {
            let (high, low) = (number / 250, 1 + number % 250);
            // Nothing listens there.
            list += &format!("  - {{url: 'http://127.1.{high}.{low}:9', name: {name}-{number}}}\n");
        }
        text(&list)
    };
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
