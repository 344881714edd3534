//! Memory of a router that is a process of its own, by its own gauge.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{CHAT, MODELS, quick};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::patience::too_long;

const MIB: f64 = (1 << 20) as f64;

async fn resident_mib(cluster: &Cluster) -> f64 {
    let resident = cluster.metric("process_resident_memory_bytes", &[]);
    resident.await / MIB
}

/// Connections that had one request each.
async fn connections(cluster: &Cluster, count: usize) -> Vec<TcpStream> {
    let mut open = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(cluster.router.api).await.unwrap();
        stream.write_all(MODELS.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let whole = async {
            while !answer.ends_with(b"}") {
                assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0);
            }
        };
        tokio::time::timeout(too_long(), whole).await.unwrap();
        open.push(stream);
    }
    open
}

/// The lowest of what is seen for a while: memory comes back some seconds later.
async fn lowest_mib(cluster: &Cluster, enough: f64) -> f64 {
    let started = std::time::Instant::now();
    let mut lowest = f64::MAX;
    while lowest > enough && started.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        lowest = lowest.min(resident_mib(cluster).await);
    }
    lowest
}

#[tokio::test]
async fn idle_connections_cost_little_and_leave_nothing_behind() {
    const COUNT: usize = 1_000;
    let cluster = Cluster::with_router_child(vec![fast()], quick).await;
    drop(connections(&cluster, 50).await);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = resident_mib(&cluster).await;
    let mut idle = connections(&cluster, COUNT).await;
    eventually("they gave their buffers back", async || {
        let parked = cluster.metric("warmroute_connections_parked", &[]).await;
        parked >= COUNT as f64
    })
    .await;
    let with = lowest_mib(&cluster, before + 25.0).await;
    // 38 KB each before their buffers were given back.
    assert!(with - before < 25.0, "{before:.1} MiB, then {with:.1}");
    for stream in idle.iter_mut().step_by(100) {
        stream.write_all(MODELS.as_bytes()).await.unwrap();
        let mut answer = [0; 15];
        let read = tokio::time::timeout(too_long(), stream.read_exact(&mut answer)).await;
        read.unwrap().unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
    }
    drop(idle);
    let after = lowest_mib(&cluster, before + 10.0).await;
    assert!(after - before < 10.0, "{before:.1} MiB, then {after:.1}");
}

/// Prints what 100 uploads of 20 MB at a time cost, with the default budget.
#[tokio::test]
#[ignore = "takes 2 GB of loopback traffic; prints a measurement"]
async fn resident_memory_of_large_uploads() {
    let cluster = Cluster::with_router_child(vec![fast()], |_| {}).await;
    let api = cluster.router.api;
    let before = resident_mib(&cluster).await;
    let body = bytes::Bytes::from(chat(&"x".repeat(20_000_000), 1, false));
    let mut uploads = JoinSet::new();
    for _ in 0..100 {
        let body = body.clone();
        uploads.spawn(async move {
            let answer = client::try_open(api, "POST", CHAT, &[], body).await;
            answer.map_or(0, |answer| answer.status)
        });
    }
    let (mut most, mut used) = (0_f64, 0_f64);
    let mut small = Vec::new();
    let mut ended = Vec::new();
    while !uploads.is_empty() {
        let started = std::time::Instant::now();
        let answer = cluster.post(CHAT, chat("x", 1, false)).await;
        assert_eq!(answer.status, 200);
        small.push(started.elapsed());
        most = most.max(resident_mib(&cluster).await);
        used = used.max(cluster.metric("warmroute_request_body_bytes", &[]).await / MIB);
        while let Some(upload) = uploads.try_join_next() {
            ended.push(upload.unwrap());
        }
    }
    small.sort_unstable();
    let count = |status: u16| ended.iter().filter(|&&end| end == status).count();
    println!(
        "before {before:.0} MiB, at most {most:.0} MiB resident and {used:.0} MiB accounted; the engine answered {} of {} \
         uploads, {} got 503, {} were cut; {} small requests meanwhile took {:?} at the median and {:?} at most",
        count(400) + count(200),
        ended.len(),
        count(503),
        count(0),
        small.len(),
        small[small.len() / 2],
        small[small.len() - 1],
    );
}
