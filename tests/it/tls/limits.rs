//! The time-outs of connections count over TLS, too.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use warmroute::http::server;

use super::ca::{Ca, Folder};
use super::client::{Client, SHORT};
use crate::client;
use crate::cluster::{Router, chat, eventually};
use crate::patience::too_long;
use crate::stub::Stub;

async fn is_closed(admin: SocketAddr, reason: &str) {
    let line = format!("warmroute_connections_closed_total{{reason=\"{reason}\"}} 1");
    eventually("the connection was closed", async || {
        let page = client::get(admin, "/metrics").await;
        page.text().contains(&line)
    })
    .await;
}

/// A router of which one time-out is short: another one could end a connection of a busy machine first.
async fn router(
    stub: &Stub,
    folder: &Folder,
    ca: &Ca,
    shorten: impl FnOnce(&mut server::Settings),
) -> Router {
    let settings = folder.server(&ca.issue(&["localhost"]));
    let change = |config: &mut warmroute::config::Config| {
        config.api.tls = Some(settings);
        shorten(&mut config.api.advanced);
    };
    stub.router(change).await
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_off() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let stub = Stub::endless().await;
    let router = router(&stub, &folder, &ca, |times| times.send_timeout = SHORT).await;
    let mut lazy = Client::new(&ca)
        .connect(router.api, "http/1.1")
        .await
        .unwrap();
    let body = chat("x", 1, true);
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    lazy.write_all(request.as_bytes()).await.unwrap();
    eventually("it started", async || stub.taken() > 0).await;
    eventually("the engine has closed the request", async || {
        stub.open() == 0
    })
    .await;
    is_closed(router.admin, "send_timeout").await;
}

#[tokio::test]
async fn a_connection_without_a_request_ends_with_a_notice() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let stub = Stub::endless().await;
    let router = router(&stub, &folder, &ca, |times| times.idle_timeout = SHORT).await;
    let mut idle = Client::new(&ca)
        .connect(router.api, "http/1.1")
        .await
        .unwrap();
    // Without the notice this is an error.
    let read = tokio::time::timeout(too_long(), idle.read(&mut [0; 64])).await;
    assert_eq!(read.unwrap().unwrap(), 0);
    is_closed(router.admin, "idle").await;
}

#[tokio::test]
async fn a_head_that_does_not_end_is_cut_off() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let stub = Stub::endless().await;
    let router = router(&stub, &folder, &ca, |times| times.header_timeout = SHORT).await;
    let mut slow = Client::new(&ca)
        .connect(router.api, "http/1.1")
        .await
        .unwrap();
    slow.write_all(b"GET /health HTTP/1.1\r\n").await.unwrap();
    is_closed(router.admin, "header_timeout").await;
    let read = tokio::time::timeout(too_long(), slow.read(&mut [0; 64])).await;
    assert!(matches!(read.unwrap(), Ok(0) | Err(_)));
}
