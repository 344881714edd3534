//! Handshakes that stall, and many at a time.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use warmroute::http::tls::Advanced;

use super::ca::{Ca, Folder};
use super::client::{Client, SHORT, handshakes, metric};
use crate::client;
use crate::cluster::{Cluster, eventually, fast};
use crate::patience::too_long;

async fn cluster(folder: &Folder, ca: &Ca, advanced: Advanced) -> Cluster {
    let mut settings = folder.server(&ca.issue(&["localhost"]));
    settings.advanced = advanced;
    Cluster::start(vec![fast()], |config| config.api.tls = Some(settings)).await
}

#[tokio::test]
async fn a_handshake_that_stalls_ends_after_its_time() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let advanced = Advanced {
        handshake_timeout: SHORT,
        ..Advanced::default()
    };
    let cluster = cluster(&folder, &ca, advanced).await;
    let (api, admin) = (cluster.router.api, cluster.router.admin);
    let mut silent = TcpStream::connect(api).await.unwrap();
    let mut partial = TcpStream::connect(api).await.unwrap();
    // The beginning of a record whose end never comes.
    partial.write_all(&[0x16, 3, 1, 2, 0, 1]).await.unwrap();
    for stream in [&mut silent, &mut partial] {
        let read = tokio::time::timeout(too_long(), stream.read(&mut [0; 64])).await;
        assert!(matches!(read.unwrap(), Ok(0) | Err(_)));
    }
    eventually("both are counted", async || {
        handshakes(admin, "timeout").await == 2
    })
    .await;
    let page = client::get(admin, "/metrics").await;
    let running = "warmroute_tls_handshakes_in_progress{listener=\"api\"}";
    assert_eq!(metric(page.text(), running), Some(0.0));
}

#[tokio::test]
async fn handshakes_that_stall_do_not_keep_others_out() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let advanced = Advanced {
        handshake_timeout: Duration::from_secs(20),
        max_concurrent_handshakes: 4,
    };
    let cluster = cluster(&folder, &ca, advanced).await;
    let (api, admin) = (cluster.router.api, cluster.router.admin);
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(TcpStream::connect(api).await.unwrap());
    }
    let running = "warmroute_tls_handshakes_in_progress{listener=\"api\"}";
    eventually("they have started", async || {
        let page = client::get(admin, "/metrics").await;
        metric(page.text(), running) == Some(4.0)
    })
    .await;
    let client = Client::new(&ca);
    // The first waits until one that stalls has taken a tenth of its time.
    for _ in 0..8 {
        assert_eq!(client.get(api, "/health").await.unwrap().status, 200);
    }
    assert!(handshakes(admin, "limit").await >= 1);
    assert_eq!(handshakes(admin, "timeout").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_handshakes_succeed_with_a_small_limit() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let advanced = Advanced {
        // One that takes a tenth of it is ended when another one waits.
        handshake_timeout: 10 * too_long(),
        max_concurrent_handshakes: 8,
    };
    let cluster = cluster(&folder, &ca, advanced).await;
    let (api, admin) = (cluster.router.api, cluster.router.admin);
    let mut clients = JoinSet::new();
    for _ in 0..20 {
        let client = Client::new(&ca);
        clients.spawn(async move {
            for _ in 0..50 {
                client.connect(api, "http/1.1").await.unwrap();
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    eventually("all are counted", async || {
        handshakes(admin, "ok").await == 1_000
    })
    .await;
}
