//! A receiver of webhooks, which answers as a test wants.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// What a request gets.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Status(u16),
    /// A status, once the receiver is notified.
    StatusAfter(Arc<Notify>, u16),
    RedirectTo(String),
    /// Nothing, and the connection stays open.
    Never,
    /// 200, and a body without end.
    EndlessBody,
    /// 200, and headers without end.
    EndlessHead,
    /// The connection is closed.
    Cut,
}

#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) line: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Received {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    pub(crate) fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }

    pub(crate) fn kind(&self) -> String {
        self.json()["type"].as_str().unwrap().to_owned()
    }

    /// The id of what has ended.
    pub(crate) fn ended(&self) -> String {
        self.json()["data"]["id"].as_str().unwrap().to_owned()
    }

    /// Whether one of its signatures is by this key.
    pub(crate) fn is_signed_by(&self, key: &[u8]) -> bool {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        let timestamp = &self.headers["webhook-timestamp"];
        mac.update(format!("{}.{timestamp}.{}", self.id(), self.body).as_bytes());
        let expected = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
        let mut signatures = self.headers["webhook-signature"].split(' ');
        signatures.any(|signature| signature == expected)
    }
}

#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    reply: Mutex<Reply>,
    received: Mutex<Vec<Received>>,
    connections: AtomicU64,
    open: AtomicU64,
    most_open: AtomicU64,
    /// Bytes of endless answers.
    sent: AtomicU64,
}

impl Receiver {
    pub(crate) async fn start(reply: Reply) -> Self {
        Self::at("127.0.0.1:0", reply, None).await
    }

    pub(crate) async fn with_tls(tls: TlsAcceptor) -> Self {
        Self::at("127.0.0.1:0", Reply::Status(200), Some(tls)).await
    }

    pub(crate) async fn at(address: &str, reply: Reply, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            reply: Mutex::new(reply),
            received: Mutex::default(),
            connections: AtomicU64::new(0),
            open: AtomicU64::new(0),
            most_open: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        });
        let task = tokio::spawn(accept(listener, shared.clone(), tls));
        Self {
            address,
            shared,
            task,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hook?a=b", self.address)
    }

    pub(crate) fn reply(&self, reply: Reply) {
        *self.shared.reply.lock() = reply;
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.shared.received.lock().clone()
    }

    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.load(Relaxed)
    }

    pub(crate) fn most_open(&self) -> u64 {
        self.shared.most_open.load(Relaxed)
    }

    pub(crate) fn sent(&self) -> u64 {
        self.shared.sent.load(Relaxed)
    }

    /// Its port is free then.
    pub(crate) async fn kill(&self) {
        self.task.abort();
        while !self.task.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, tls: Option<TlsAcceptor>) {
    // Connections end with the listener.
    let mut running = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (shared, tls) = (shared.clone(), tls.clone());
        running.spawn(async move {
            shared.connections.fetch_add(1, Relaxed);
            let open = shared.open.fetch_add(1, Relaxed) + 1;
            shared.most_open.fetch_max(open, Relaxed);
            match tls {
                None => drop(serve(stream, &shared).await),
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        let _ = serve(stream, &shared).await;
                    }
                }
            }
            shared.open.fetch_sub(1, Relaxed);
        });
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    shared: &Shared,
) -> std::io::Result<()> {
    let mut text = Vec::new();
    let (head, body) = loop {
        let mut bytes = [0; 4_096];
        let count = stream.read(&mut bytes).await?;
        if count == 0 {
            return Ok(());
        }
        text.extend(&bytes[..count]);
        let found = String::from_utf8(text.clone()).unwrap();
        let Some((head, body)) = found.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            break (head.to_owned(), body.to_owned());
        }
    };
    let mut lines = head.lines();
    let line = lines.next().unwrap().to_owned();
    let headers = lines.map(|line| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_owned(), value.to_owned())
    });
    let headers = headers.collect();
    shared.received.lock().push(Received {
        line,
        headers,
        body,
    });
    let reply = shared.reply.lock().clone();
    let endless = |part: &'static [u8]| part.repeat(1_000);
    let (head, part) = match reply {
        Reply::Cut => return Ok(()),
        Reply::Never => {
            // Until the other side closes.
            let _ = stream.read(&mut [0]).await;
            return Ok(());
        }
        Reply::Status(status) => (
            format!("HTTP/1.1 {status} X\r\ncontent-length: 2\r\n\r\nok"),
            None,
        ),
        Reply::StatusAfter(signal, status) => {
            signal.notified().await;
            (
                format!("HTTP/1.1 {status} X\r\ncontent-length: 2\r\n\r\nok"),
                None,
            )
        }
        Reply::RedirectTo(url) => (
            format!("HTTP/1.1 307 X\r\nlocation: {url}\r\ncontent-length: 0\r\n\r\n"),
            None,
        ),
        Reply::EndlessBody => (
            "HTTP/1.1 200 X\r\n\r\n".to_owned(),
            Some(endless(b"more and more and ")),
        ),
        Reply::EndlessHead => (
            "HTTP/1.1 200 X\r\n".to_owned(),
            Some(endless(b"a: more and more\r\n")),
        ),
    };
    stream.write_all(head.as_bytes()).await?;
    while let Some(part) = &part {
        stream.write_all(part).await?;
        shared.sent.fetch_add(part.len() as u64, Relaxed);
    }
    stream.shutdown().await
}
