//! What is not offered: compression, and WebSockets over HTTP/2.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::PATH;
use crate::client;
use crate::cluster::Cluster;

async fn connection(address: SocketAddr, sent: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(sent).await.unwrap();
    stream
}

#[tokio::test]
async fn compression_is_not_negotiated() {
    let cluster = Cluster::fast(1).await;
    let request = format!(
        "GET {PATH} HTTP/1.1\r\nhost: router\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    );
    let mut stream = connection(cluster.router.api, request.as_bytes()).await;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    assert!(!head.contains("sec-websocket-extensions"), "{head}");
    // A frame that says it is compressed: a bit that was not negotiated.
    let text = b"\xc1\x82\0\0\0\0{}";
    stream.write_all(text).await.unwrap();
    let mut frame = [0; 4];
    stream.read_exact(&mut frame).await.unwrap();
    assert_eq!(frame[0], 0x88, "a close frame");
    assert_eq!(u16::from_be_bytes([frame[2], frame[3]]), 1002);
}

#[tokio::test]
async fn a_websocket_over_http2_is_not_offered() {
    const SETTINGS: u8 = 4;
    const ENABLE_CONNECT_PROTOCOL: [u8; 2] = [0, 8];
    let cluster = Cluster::fast(1).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut stream = connection(cluster.router.api, preface).await;
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], SETTINGS);
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut settings = vec![0; length as usize];
    stream.read_exact(&mut settings).await.unwrap();
    let mut entries = settings.chunks(6);
    let offered =
        entries.any(|entry| entry[..2] == ENABLE_CONNECT_PROTOCOL && entry[2..] != [0; 4]);
    assert!(!offered, "{settings:?}");
    // HTTP/2 itself is there.
    let body = r#"{"model":"sim","input":"x","max_output_tokens":1}"#.to_owned();
    let answers = client::http2(cluster.router.api, PATH, vec![body]).await;
    assert_eq!(answers[0].0, 200, "{}", answers[0].1);
}
