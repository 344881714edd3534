//! A WebSocket client that is not of the router's own library.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;

use futures_core::Stream as _;
use futures_sink::Sink as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::patience::too_long;

pub(super) const PATH: &str = "/v1/responses";

#[derive(Debug)]
pub(super) struct Socket(WebSocketStream<TcpStream>);

impl Socket {
    pub(super) async fn open(address: SocketAddr) -> Self {
        Self::try_open(address, &[]).await.unwrap()
    }

    pub(super) async fn with_key(address: SocketAddr, key: &str) -> Self {
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", &*bearer)];
        Self::try_open(address, &headers).await.unwrap()
    }

    /// Opens a socket, or returns the status and the body of the answer that is not 101.
    pub(super) async fn try_open(
        address: SocketAddr,
        headers: &[(&str, &str)],
    ) -> Result<Self, (u16, Value)> {
        let stream = TcpStream::connect(address).await.unwrap();
        let url = format!("ws://{address}{PATH}");
        let mut request = url.into_client_request().unwrap();
        for (name, value) in headers {
            let name = name.parse::<hyper::header::HeaderName>().unwrap();
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(Error::Http(answer)) => {
                let body = answer.body().as_deref().unwrap_or_default();
                let body = serde_json::from_slice(body).unwrap_or_default();
                Err((answer.status().as_u16(), body))
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) async fn send(&mut self, message: Message) {
        let socket = &mut self.0;
        poll_fn(|cx| Pin::new(&mut *socket).poll_ready(cx))
            .await
            .unwrap();
        Pin::new(&mut *socket).start_send(message).unwrap();
        poll_fn(|cx| Pin::new(&mut *socket).poll_flush(cx))
            .await
            .unwrap();
    }

    pub(super) async fn text(&mut self, text: &str) {
        self.send(Message::text(text)).await;
    }

    /// Sends the beginning of a message of this size, as far as the router takes it.
    pub(super) async fn begin(&mut self, size: u64, sent: usize) {
        let mut bytes = vec![0x81, 0x80 | 127];
        bytes.extend(size.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(vec![b' '; sent]);
        // A mask of zeros changes nothing.
        let _ = self.0.get_mut().write_all(&bytes).await;
    }

    /// Sends more of a message that has begun.
    pub(super) async fn go_on(&mut self, bytes: &[u8]) {
        let _ = self.0.get_mut().write_all(bytes).await;
    }

    /// Sends texts, none of which waits for an answer to the one before.
    pub(super) async fn texts(&mut self, texts: &[String]) {
        let socket = &mut self.0;
        for text in texts {
            poll_fn(|cx| Pin::new(&mut *socket).poll_ready(cx))
                .await
                .unwrap();
            let message = Message::text(text.as_str());
            Pin::new(&mut *socket).start_send(message).unwrap();
        }
        poll_fn(|cx| Pin::new(&mut *socket).poll_flush(cx))
            .await
            .unwrap();
    }

    /// Sends a text of more than 64 KiB up to so many times and reads nothing. How often the router took it until it
    /// closed the connection.
    pub(super) async fn flood(&mut self, text: &str, times: usize) -> usize {
        let mut bytes = vec![0x81, 0x80 | 127];
        bytes.extend((text.len() as u64).to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend_from_slice(text.as_bytes());
        for sent in 0..times {
            let write = self.0.get_mut().write_all(&bytes);
            let written = tokio::time::timeout(too_long(), write).await;
            if written.expect("taken or refused").is_err() {
                return sent;
            }
        }
        times
    }

    /// Sends fragments of one message, each of which is never the last, with a ping behind each.
    pub(super) async fn fragments(&mut self, numbers: Range<usize>, size: u16) {
        for number in numbers {
            let opcode = u8::from(number == 0);
            let mut bytes = vec![opcode, 0x80 | 126];
            bytes.extend(size.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(vec![b' '; size.into()]);
            bytes.extend([0x89, 0x80 | 1, 0, 0, 0, 0, b'p']);
            if self.0.get_mut().write_all(&bytes).await.is_err() {
                return;
            }
        }
    }

    /// Sends a create with these members besides a model, an input and a short output.
    pub(super) async fn create(&mut self, more: Value) {
        let mut frame = json!({
            "type": "response.create", "model": "sim", "input": "hello", "max_output_tokens": 4});
        let members = frame.as_object_mut().unwrap();
        members.extend(more.as_object().unwrap().clone());
        self.text(&frame.to_string()).await;
    }

    /// The next message; `None` at the end of the connection.
    pub(super) async fn message(&mut self) -> Option<Message> {
        let next = poll_fn(|cx| Pin::new(&mut self.0).poll_next(cx));
        let message = tokio::time::timeout(too_long(), next)
            .await
            .expect("a message");
        message.and_then(Result::ok)
    }

    /// The next event.
    pub(super) async fn event(&mut self) -> Value {
        loop {
            match self.message().await {
                Some(Message::Text(text)) => return serde_json::from_str(&text).unwrap(),
                Some(Message::Ping(_)) => {}
                other => panic!("{other:?} instead of an event"),
            }
        }
    }

    /// The events up to the end of a turn: its last one, or an error.
    pub(super) async fn turn(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = self.event().await;
            let kind = event["type"].as_str().unwrap().to_owned();
            events.push(event);
            if is_last(&kind) {
                return events;
            }
        }
    }

    /// Runs a turn and gives its Response object.
    pub(super) async fn respond(&mut self, more: Value) -> Value {
        self.create(more).await;
        let events = self.turn().await;
        let last = events.last().unwrap();
        assert_ne!(last["type"], "error", "{last}");
        last["response"].clone()
    }

    /// Runs a turn that ends in an error frame.
    pub(super) async fn fail(&mut self, more: Value) -> Value {
        self.create(more).await;
        let events = self.turn().await;
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0]["type"], "error");
        events[0].clone()
    }

    /// The code of the close that comes after events and pings.
    pub(super) async fn closed(&mut self) -> u16 {
        loop {
            match self.message().await {
                Some(Message::Close(frame)) => return frame.unwrap().code.into(),
                Some(_) => {}
                None => panic!("no close"),
            }
        }
    }
}

pub(super) fn is_last(kind: &str) -> bool {
    matches!(
        kind,
        "error" | "response.completed" | "response.incomplete" | "response.failed"
    )
}

pub(super) fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

pub(super) fn kinds(events: &[Value]) -> Vec<&str> {
    let kinds = events.iter().map(|event| event["type"].as_str().unwrap());
    kinds.collect()
}
