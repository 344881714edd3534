//! An engine that answers with bytes of the test's choosing, and keeps those that it is sent.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::net::TcpStream;

#[derive(Debug)]
pub(crate) struct Stub {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Stub {
    /// `answer` is sent as it is to every POST; then the connection is closed.
    pub(crate) async fn start(answer: impl Into<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let answer: Arc<[u8]> = answer.into().into();
        let log = requests.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (answer, log) = (answer.clone(), log.clone());
                tokio::spawn(async move { serve(stream, &answer, &log).await });
            }
        });
        Self { address, requests }
    }

    /// The last POST: its head, in lower case.
    pub(crate) fn last_head(&self) -> String {
        let requests = self.requests.lock();
        requests.last().cloned().unwrap_or_default()
    }
}

async fn serve(mut stream: TcpStream, answer: &[u8], log: &Mutex<Vec<String>>) {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse::<usize>().unwrap());
    while bytes.len() < end + length {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let page = |body: &str| {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    };
    let answer = if head.starts_with("post ") {
        log.lock().push(head);
        answer.to_vec()
    } else if head.starts_with("get /v1/models ") {
        page(r#"{"object":"list","data":[{"id":"sim"}]}"#).into_bytes()
    } else {
        page("").into_bytes()
    };
    let _ = stream.write_all(&answer).await;
    let _ = stream.shutdown().await;
    // What is closed with bytes unread is reset, and the answer may be lost with it.
    while stream.read_buf(&mut bytes).await.unwrap_or(0) > 0 {}
}
