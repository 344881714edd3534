//! Files whose file system hangs, as one on a network does when its server is gone. A pipe that nobody opens to write
//! does so, too: who opens it to read waits.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::{Folder, applied, text};
use crate::cluster::{Cluster, Engine, chat, eventually, fast};

/// Puts something that hangs in the file's place.
fn hang(file: &Path) {
    let pipe = file.with_extension("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    std::fs::rename(pipe, file).unwrap();
}

async fn is_answered(cluster: &Cluster) {
    let body = chat("a connection of its own", 2, false);
    let answer = cluster.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(cluster.admin("/readyz").await.status, 200);
}

#[tokio::test]
async fn a_list_of_workers_that_hangs_stops_neither_requests_nor_a_reload_nor_the_drain() {
    let folder = Folder::new();
    let engine = Engine::here("w0", fast()).await;
    let url = format!("http://{}", engine.address);
    let listed = json!({"workers": [{"url": url, "name": "w0"}]}).to_string();
    let (first, second) = (folder.path("first.yaml"), folder.path("second.yaml"));
    let with = |list: &Path| {
        let path = list.display();
        text(&format!(
            "discovery: [{{file: {{path: '{path}', interval: 20ms}}}}]\n"
        ))
    };
    std::fs::write(&first, &listed).unwrap();
    let mut cluster = folder.start_child(vec![engine], &with(&first)).await;
    cluster.is_worker("w0", "health", "up").await;
    hang(&first);
    let entry = format!("discovery=\"file:{}\"", first.display());
    eventually("the hang is counted", async || {
        is_answered(&cluster).await;
        let failures = "warmroute_discovery_failures_total";
        cluster.metric(failures, &[entry.as_str()]).await >= 1.0
    })
    .await;
    assert_eq!(cluster.worker("w0").await["health"], "up");
    std::fs::write(&second, &listed).unwrap();
    folder.write(&with(&second));
    applied(&cluster).await;
    assert_eq!(cluster.worker("w0").await["health"], "up");
    hang(&second);
    is_answered(&cluster).await;
    let child = cluster.router.child.as_mut().unwrap();
    child.signal("TERM");
    eventually("it has drained", async || child.ended().is_some()).await;
    assert!(child.ended().unwrap().success());
}
