//! An engine that answers with bytes of the test's choosing, and keeps those that it is sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;

use crate::client;
use crate::cluster::{self, Router};

#[derive(Clone, Debug)]
pub(crate) struct Stub {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    /// The paths of all GETs.
    gets: Arc<Mutex<Vec<String>>>,
    /// Bytes of answers that the other side has taken.
    taken: Arc<AtomicU64>,
    /// Answers that are being sent.
    open: Arc<AtomicU64>,
}

/// What a POST gets.
#[derive(Clone, Debug)]
enum Reply {
    Bytes(Arc<[u8]>),
    /// Events without end, as fast as they are taken.
    Endless,
    /// These bytes; then the connection stays open, and is closed when the next request comes.
    Once(Arc<[u8]>),
    /// The first bytes, and then the others again and again.
    Repeating(Arc<[u8]>, Arc<[u8]>),
}

impl Stub {
    /// `answer` is sent as it is to every POST; then the connection is closed.
    pub(crate) async fn start(answer: impl Into<Vec<u8>>) -> Self {
        Self::with(Reply::Bytes(answer.into().into())).await
    }

    pub(crate) async fn once(answer: impl Into<Vec<u8>>) -> Self {
        Self::with(Reply::Once(answer.into().into())).await
    }

    /// `first` to every POST, and then `again` every 20 ms for as long as somebody reads.
    pub(crate) async fn repeating(first: impl Into<Vec<u8>>, again: impl Into<Vec<u8>>) -> Self {
        Self::with(Reply::Repeating(first.into().into(), again.into().into())).await
    }

    pub(crate) async fn endless() -> Self {
        Self::with(Reply::Endless).await
    }

    async fn with(reply: Reply) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let stub = Self {
            address,
            requests,
            gets: Arc::default(),
            taken: Arc::default(),
            open: Arc::default(),
        };
        let served = stub.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (reply, stub) = (reply.clone(), served.clone());
                tokio::spawn(async move { stub.serve(stream, reply).await });
            }
        });
        stub
    }

    /// A router in front of it.
    pub(crate) async fn router(&self, change: impl FnOnce(&mut Config)) -> Router {
        let mut config = cluster::config();
        config.workers = vec![WorkerSpec {
            url: format!("http://{}", self.address),
            ..WorkerSpec::default()
        }];
        change(&mut config);
        let router = Router::here(&config).await;
        cluster::eventually("the stub is up", async || {
            client::get(router.admin, "/readyz").await.status == 200
        })
        .await;
        router
    }

    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Relaxed)
    }

    pub(crate) fn open(&self) -> u64 {
        self.open.load(Relaxed)
    }

    /// How many GETs of a path there were.
    pub(crate) fn gets(&self, path: &str) -> usize {
        let gets = self.gets.lock();
        gets.iter().filter(|asked| *asked == path).count()
    }

    /// How many POSTs there were.
    pub(crate) fn posts(&self) -> usize {
        self.requests.lock().len()
    }

    /// The last POST: its head, in lower case.
    pub(crate) fn last_head(&self) -> String {
        let requests = self.requests.lock();
        requests.last().cloned().unwrap_or_default()
    }

    async fn serve(&self, mut stream: TcpStream, reply: Reply) {
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
        if let Some(path) = head
            .strip_prefix("get ")
            .and_then(|rest| rest.split(' ').next())
        {
            self.gets.lock().push(path.to_owned());
        }
        let page = |body: &str| {
            format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            )
        };
        let asks =
            head.starts_with("post /v1/responses ") || head.starts_with("post /v1/messages ");
        if asks && &bytes[end..end + length] == b"{}" {
            // The router asks whether the engine serves the Responses API, and Messages.
            let refused =
                "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(refused.as_bytes()).await;
        } else if head.starts_with("post ") {
            self.requests.lock().push(head);
            self.open.fetch_add(1, Relaxed);
            let _ = match reply {
                Reply::Once(answer) => {
                    let _ = stream.write_all(&answer).await;
                    self.open.fetch_sub(1, Relaxed);
                    let _ = stream.read_buf(&mut bytes).await;
                    return;
                }
                Reply::Bytes(answer) => stream.write_all(&answer).await,
                Reply::Endless => self.write_for_ever(&mut stream).await,
                Reply::Repeating(first, again) => {
                    let mut written = stream.write_all(&first).await;
                    while written.is_ok() {
                        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                        written = stream.write_all(&again).await;
                    }
                    Ok(())
                }
            };
            self.open.fetch_sub(1, Relaxed);
        } else if head.starts_with("get /v1/models ") {
            let list = page(r#"{"object":"list","data":[{"id":"sim"}]}"#);
            let _ = stream.write_all(list.as_bytes()).await;
        } else {
            let _ = stream.write_all(page("").as_bytes()).await;
        }
        let _ = stream.shutdown().await;
        // What is closed with bytes unread is reset, and the answer may be lost with it.
        while stream.read_buf(&mut bytes).await.unwrap_or(0) > 0 {}
    }

    async fn write_for_ever(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        let delta = "x".repeat(4_000);
        let kind = "response.output_text.delta";
        let event = format!("data: {{\"type\":\"{kind}\",\"delta\":\"{delta}\"}}\n\n");
        loop {
            stream.write_all(event.as_bytes()).await?;
            self.taken.fetch_add(event.len() as u64, Relaxed);
        }
    }
}
