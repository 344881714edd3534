//! A small HTTP client: one connection for each request, whole answers or pieces as they come.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};

use crate::patience::too_long;

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// The `code` of an error in OpenAI's shape.
    pub(crate) fn code(&self) -> String {
        let error = &self.json()["error"];
        error["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn param(&self) -> String {
        let error = &self.json()["error"];
        error["param"].as_str().unwrap_or_default().to_owned()
    }
}

/// Whether an answer contains an error, as a router or as an engine writes it.
pub(crate) fn has_error(text: &str) -> bool {
    text.contains("\"error\":{") || text.contains("\"error\": {")
}

/// An answer of which the head has come. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    _connection: Connection,
}

#[derive(Debug)]
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Open {
    /// The next piece; `None` at the end, an error if the answer is cut.
    pub(crate) async fn next(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        let frame = tokio::time::timeout(too_long(), self.body.frame())
            .await
            .expect("a piece, an end or an error, but no hang");
        frame.map(|frame| frame.map(|frame| frame.into_data().unwrap_or_default()))
    }

    /// Reads until `wanted` has come; gives all that was read.
    pub(crate) async fn until(&mut self, wanted: &str) -> String {
        let mut text = String::new();
        while !text.contains(wanted) {
            match self.next().await {
                Some(Ok(piece)) => text.push_str(std::str::from_utf8(&piece).unwrap()),
                other => panic!("{other:?} before {wanted:?}: {text}"),
            }
        }
        text
    }

    /// The rest, and whether it came to a proper end.
    pub(crate) async fn rest(&mut self) -> (String, bool) {
        let mut whole = Vec::new();
        loop {
            match self.next().await {
                Some(Ok(piece)) => whole.extend_from_slice(&piece),
                None => return (String::from_utf8(whole).unwrap(), true),
                Some(Err(_)) => return (String::from_utf8(whole).unwrap(), false),
            }
        }
    }
}

fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Request<Full<Bytes>> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", address.to_string());
    if !headers.iter().any(|(name, _)| *name == "content-type") && method == "POST" {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body.into())).unwrap()
}

/// Sends a request and waits for the answer's head. An error if the connection breaks before it.
pub(crate) async fn try_open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Result<Open, String> {
    let request = request(address, method, path, headers, body);
    let answer = async {
        let stream = TcpStream::connect(address)
            .await
            .map_err(|error| error.to_string())?;
        stream.set_nodelay(true).unwrap();
        let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        let connection = Connection(tokio::spawn(async move {
            let _ = driver.await;
        }));
        let answer = sender.send_request(request).await;
        Ok::<_, String>((answer.map_err(|error| error.to_string())?, connection))
    };
    let (answer, connection) = tokio::time::timeout(too_long(), answer)
        .await
        .map_err(|_| "no answer".to_owned())??;
    let (head, body) = answer.into_parts();
    Ok(Open {
        status: head.status.as_u16(),
        headers: head.headers,
        body,
        _connection: connection,
    })
}

pub(crate) async fn open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Open {
    try_open(address, method, path, headers, body)
        .await
        .unwrap_or_else(|error| panic!("{method} {path}: {error}"))
}

pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Answer {
    let mut open = open(address, method, path, headers, body).await;
    let mut whole = Vec::new();
    while let Some(piece) = open.next().await {
        whole.extend_from_slice(&piece.unwrap());
    }
    Answer {
        status: open.status,
        headers: std::mem::take(&mut open.headers),
        body: whole.into(),
    }
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, "GET", path, &[], "").await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: impl Into<Bytes>) -> Answer {
    send(address, "POST", path, &[], body).await
}

/// An HTTP/2 connection, by prior knowledge. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Http2 {
    sender: hyper::client::conn::http2::SendRequest<Full<Bytes>>,
    address: SocketAddr,
    _connection: Connection,
}

impl Http2 {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, driver) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
        let connection = Connection(tokio::spawn(async move {
            let _ = driver.await;
        }));
        Self {
            sender,
            address,
            _connection: connection,
        }
    }

    /// The answer to a GET, of which the head has come.
    pub(crate) async fn get(&self, path: &str) -> hyper::Response<Incoming> {
        let uri = format!("http://{}{path}", self.address);
        let request = Request::get(uri).body(Full::default()).unwrap();
        let mut sender = self.sender.clone();
        let answer = tokio::time::timeout(too_long(), sender.send_request(request)).await;
        answer.expect("an answer").unwrap()
    }

    /// A request beside those that run: the status and the text of its answer.
    pub(crate) fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: String,
    ) -> impl Future<Output = (u16, String)> + Send + use<> {
        let uri = format!("http://{}{path}", self.address);
        let mut request = Request::post(uri).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        let mut sender = self.sender.clone();
        async move {
            let answer = sender.send_request(request).await.unwrap();
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            (status, String::from_utf8(body.to_vec()).unwrap())
        }
    }
}

/// Several requests at a time over one HTTP/2 connection, by prior knowledge.
pub(crate) async fn http2(
    address: SocketAddr,
    path: &str,
    bodies: Vec<String>,
) -> Vec<(u16, String)> {
    let connection = Http2::connect(address).await;
    let mut answers = vec![(0, String::new()); bodies.len()];
    // Aborts what runs when this is dropped.
    let mut running = JoinSet::new();
    for (place, body) in bodies.into_iter().enumerate() {
        let answer = connection.post(path, &[], body);
        running.spawn(async move {
            let (status, body) = answer.await;
            (place, status, body)
        });
    }
    while let Some(done) = tokio::time::timeout(too_long(), running.join_next())
        .await
        .unwrap()
    {
        let (place, status, body) = done.unwrap();
        answers[place] = (status, body);
    }
    answers
}

/// Sends a body `count` times, each on a connection of its own, but for its last bytes, which are returned.
pub(crate) async fn unfinished_uploads<'a>(
    address: SocketAddr,
    path: &str,
    body: &'a str,
    count: usize,
) -> (Vec<TcpStream>, &'a str) {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let (most, rest) = body.split_at(body.len() - 10);
    let mut uploads = Vec::new();
    for _ in 0..count {
        let mut upload = TcpStream::connect(address).await.unwrap();
        upload.write_all(head.as_bytes()).await.unwrap();
        upload.write_all(most.as_bytes()).await.unwrap();
        uploads.push(upload);
    }
    (uploads, rest)
}
