//! Heads over HTTP/2, and how its connections end, with frames written by hand, so that a test decides when bytes are
//! read.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::CHAT;
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};
use crate::patience::too_long;
use crate::stub::Stub;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// The largest flow-control window.
const WINDOW: u32 = (1 << 31) - 1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Headers without any compression.
fn headers(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend(text.as_bytes());
        }
    }
    block
}

/// The preface, and windows that never close.
async fn connect(router: std::net::SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(router).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let mut initial_window = 4_u16.to_be_bytes().to_vec();
    initial_window.extend(WINDOW.to_be_bytes());
    bytes.extend(frame(SETTINGS, 0, 0, &initial_window));
    let more = (WINDOW - 65_535).to_be_bytes();
    bytes.extend(frame(WINDOW_UPDATE, 0, 0, &more));
    stream.write_all(&bytes).await.unwrap();
    stream
}

/// Reads frames until one of this kind has come; false if the connection ends before.
async fn has_frame(stream: &mut TcpStream, wanted: u8) -> bool {
    let read = async {
        let mut head = [0; 9];
        loop {
            stream.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            stream.read_exact(&mut payload).await.ok()?;
            if head[3] == wanted {
                return Some(());
            }
        }
    };
    let found = tokio::time::timeout(too_long(), read).await;
    found.expect("a frame or an end, but no hang").is_some()
}

#[tokio::test]
async fn a_head_may_be_as_large_as_over_http1() {
    let cluster = Cluster::fast(1).await;
    let connection = client::Http2::connect(cluster.router.api).await;
    for length in [30 << 10, 60 << 10] {
        let value = "x".repeat(length);
        let headers = [("x-mine", &*value)];
        let answer = connection.post(CHAT, &headers, chat("x", 1, false));
        let (status, text) = tokio::time::timeout(too_long(), answer).await.unwrap();
        assert_eq!(status, 200, "{length}: {text}");
        let body = chat("x", 1, false);
        let over_http1 = client::send(cluster.router.api, "POST", CHAT, &headers, body).await;
        assert_eq!(over_http1.status, 200, "{length}");
    }
}

#[tokio::test]
async fn a_head_that_is_too_large_gets_the_same_error_as_over_http1() {
    let cluster = Cluster::fast(1).await;
    let connection = client::Http2::connect(cluster.router.api).await;
    let errors = "warmroute_request_errors_total";
    let counted = ["status=\"431\"", "code=\"headers_too_large\""];
    for (length, total) in [(66 << 10, 1.0), (120 << 10, 2.0)] {
        let value = "x".repeat(length);
        let headers = [("x-mine", &*value)];
        let answer = connection.post(CHAT, &headers, chat("x", 1, false));
        let (status, text) = tokio::time::timeout(too_long(), answer).await.unwrap();
        assert_eq!(status, 431, "{length}: {text}");
        assert!(text.contains("headers_too_large"), "{length}: {text}");
        assert_eq!(cluster.metric(errors, &counted).await, total);
    }
    // The connection goes on.
    let answer = connection.post(CHAT, &[], chat("x", 1, false));
    let (status, text) = tokio::time::timeout(too_long(), answer).await.unwrap();
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn an_idle_http2_connection_is_closed_with_a_goaway() {
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.advanced.idle_timeout = Duration::from_millis(300);
    })
    .await;
    let mut stream = connect(cluster.router.api).await;
    assert!(has_frame(&mut stream, GOAWAY).await);
}

#[tokio::test]
async fn a_client_that_took_nothing_and_reads_on_finds_a_goaway() {
    let stub = Stub::endless().await;
    let router = stub
        .router(|config| config.api.advanced.send_timeout = Duration::from_secs(3))
        .await;
    let mut stream = connect(router.api).await;
    let authority = router.api.to_string();
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", CHAT),
        (":authority", &*authority),
        ("content-type", "application/json"),
    ];
    let mut request = frame(HEADERS, END_HEADERS, 1, &headers(&fields));
    let body = chat("x", 1, true);
    request.extend(frame(DATA, END_STREAM, 1, body.as_bytes()));
    stream.write_all(&request).await.unwrap();
    // Nothing is read: the socket's buffers fill, and not even a small frame fits.
    let closing = "warmroute_connections_closed_total{reason=\"send_timeout\"} 1";
    eventually("the router gives it up", async || {
        let page = client::get(router.admin, "/metrics").await;
        page.text().contains(closing)
    })
    .await;
    assert!(has_frame(&mut stream, GOAWAY).await);
    drop(stream);

    // One that does not read on is cut off, and its engine with it.
    let mut stream = connect(router.api).await;
    stream.write_all(&request).await.unwrap();
    eventually("its engine sends", async || stub.open() == 1).await;
    eventually("it is cut off", async || stub.open() == 0).await;
    drop(stream);
}
