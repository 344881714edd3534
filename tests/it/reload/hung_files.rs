//! Files whose file system hangs, as one on a network does when its server is gone. A pipe that nobody opens to write
//! does so, too: who opens it to read waits.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::{Folder, applied, text, workers};
use crate::client;
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

#[tokio::test]
async fn a_secret_that_hangs_stops_no_reload_to_a_configuration_without_it() {
    let folder = Folder::new();
    let engine = Engine::here("w0", fast()).await;
    let base = text(&workers([&engine])).replace("watch_interval: 0s", "watch_interval: 20ms");
    let with = |key: &str| format!("{base}tenants: [{{name: a, keys: ['{key}']}}]\n");
    let secret = folder.path("key");
    std::fs::write(&secret, "sk-first").unwrap();
    let named = format!("file:{}", secret.display());
    let cluster = folder.start(vec![engine], &with(&named)).await;
    let takes = async |key: &str| {
        let bearer = format!("Bearer {key}");
        let (headers, body) = ([("authorization", &*bearer)], chat("hi", 1, false));
        let api = cluster.router.api;
        let answer = client::send(api, "POST", "/v1/chat/completions", &headers, body).await;
        answer.status == 200
    };
    eventually("the first key is good", async || takes("sk-first").await).await;
    hang(&secret);
    // It opens once a look has opened the pipe, too, which then waits for what is never written.
    let pipe = tokio::task::spawn_blocking(move || File::options().write(true).open(secret));
    let pipe = pipe.await.unwrap().unwrap();
    folder.write(&with("sk-second"));
    applied(&cluster).await;
    assert!(takes("sk-second").await);
    // The new files are watched.
    folder.write(&with("sk-third"));
    eventually("the file is read again", async || takes("sk-third").await).await;
    drop(pipe);
}
