//! Workers that leave the fleet, and come again: a tree never outlives its worker.

use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::{DiscoveryEntry, WorkersFile};
use warmroute::fleet::discovery::WorkerDefaults;

use super::followed::{BOTH, Bridge, Prompt, Wire, explain, held, over_zmq, quick, scored, status};
use crate::cluster::{Cluster, Engine, Removed, Router, eventually, telling};

async fn equals(cluster: &Cluster, engine: &Engine) {
    eventually(
        &format!("the tree of {} is its cache", engine.name),
        async || {
            let scored = scored(cluster, &engine.name, 0).await;
            scored == Some(held(&engine.cache_contents(0).await))
        },
    )
    .await;
}

/// Lines of `/metrics` about what is known of a worker's cache.
async fn metrics_of(cluster: &Cluster, worker: &str) -> usize {
    let page = cluster.admin("/metrics").await;
    let label = format!("worker=\"{worker}\"");
    let of_it = |line: &&str| line.starts_with("warmroute_kv_") && line.contains(&label);
    page.text().lines().filter(of_it).count()
}

/// Blocks that any tree holds.
async fn indexed(cluster: &Cluster) -> u64 {
    let page = cluster.admin("/kv").await.json();
    let rows = page["indexes"].as_array().unwrap().iter();
    rows.map(|row| row["blocks"].as_u64().unwrap()).sum()
}

#[tokio::test]
async fn a_worker_that_is_removed_takes_its_tree_along_and_comes_back_with_a_new_one() {
    for wire in BOTH {
        let engines = [
            Engine::here("w0", telling()).await,
            Engine::here("w1", telling()).await,
        ];
        let bridges: Vec<Bridge> = match wire {
            Wire::Bridge => engines.iter().map(Bridge::of).collect(),
            Wire::Announced | Wire::Zmq => Vec::new(),
        };
        let file = Removed::new("workers: []\n");
        let list = |places: &[usize]| {
            let listed = places.iter().map(|place| match wire {
                Wire::Bridge => bridges[*place].listed(&engines[*place]),
                Wire::Announced | Wire::Zmq => over_zmq(&engines[*place]),
            });
            let listed: Vec<Value> = listed.map(|listed| json!(listed)).collect();
            // All JSON is YAML.
            std::fs::write(&file.0, json!({"workers": listed}).to_string()).unwrap();
        };
        let mut config = quick();
        config.discovery = vec![DiscoveryEntry::File(WorkersFile {
            path: file.0.to_str().unwrap().to_owned(),
            interval: Duration::from_millis(20),
            defaults: WorkerDefaults::default(),
        })];
        let cluster = Cluster {
            router: Router::here(&config).await,
            engines: Vec::new(),
        };
        let (old, other) = (Prompt::new(1, 200), Prompt::new(2, 100));
        old.to(&engines[1]).await;
        other.to(&engines[0]).await;
        list(&[0, 1]);
        equals(&cluster, &engines[0]).await;
        equals(&cluster, &engines[1]).await;
        cluster.is_worker("w1", "health", "up").await;
        assert_eq!(explain(&cluster, &old).await[1].tokens, 192, "{wire:?}");
        assert_eq!(indexed(&cluster).await, 12 + 6, "{wire:?}");
        assert!(metrics_of(&cluster, "w1").await > 5, "{wire:?}");

        list(&[0]);
        eventually(
            "the worker is gone, and all that was known of it",
            async || {
                status(&cluster, "w1", 0).await == Value::Null
                    && indexed(&cluster).await == 6
                    && metrics_of(&cluster, "w1").await == 0
            },
        )
        .await;
        let rows = explain(&cluster, &old).await;
        assert_eq!((rows.len(), rows[0].tokens), (1, 0), "{wire:?}");
        assert_eq!(cluster.admin("/kv/blocks?worker=w1").await.status, 404);
        assert!(metrics_of(&cluster, "w0").await > 5, "{wire:?}");

        // What it held it no longer holds when it comes back.
        engines[1].reset().await;
        let new = Prompt::new(3, 100);
        new.to(&engines[1]).await;
        list(&[0, 1]);
        eventually("it is followed anew", async || {
            let rows = explain(&cluster, &old).await;
            // A bridge's list is of a moment ago; nothing of it counts before what happened since.
            assert!(rows.iter().all(|row| row.tokens == 0), "{wire:?}: {rows:?}");
            let scored = scored(&cluster, "w1", 0).await;
            scored == Some(held(&engines[1].cache_contents(0).await))
        })
        .await;
        let rows = explain(&cluster, &old).await;
        assert!(rows.iter().all(|row| row.tokens == 0), "{wire:?}: {rows:?}");
        eventually("its new blocks count", async || {
            let rows = explain(&cluster, &new).await;
            rows.len() == 2 && rows[1].tokens == 96
        })
        .await;
        assert_eq!(indexed(&cluster).await, 6 + 6, "{wire:?}");

        list(&[]);
        eventually("nothing is left", async || {
            let page = cluster.admin("/kv").await.json();
            page["ranks"] == json!([]) && indexed(&cluster).await == 0
        })
        .await;
        assert_eq!(metrics_of(&cluster, "w0").await, 0, "{wire:?}");
    }
}
