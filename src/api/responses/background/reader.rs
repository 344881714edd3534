//! A background response's events, told from the store: to the client that began it and to any other,
//! from any number on, on any replica. Nothing is told that is not stored.

use std::future::Future;
use std::io::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::task::Poll;
use std::task::ready;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::Response;
use tokio::sync::watch;

use super::super::super::error::ApiError;
use super::super::Responses;
use super::super::create::own_headers;
use super::super::object::with_member;
use super::super::object::with_output;
use super::Background;
use super::log;
use crate::http;
use crate::http::BodyError;
use crate::observe;
use crate::store::Key;
use crate::store::Record;
use crate::store::Status;
use crate::store::log::Kept;

/// Read from the store at once.
const READ_BYTES: u64 = 256 << 10;
/// A stream that says nothing for longer looks dead to proxies.
const QUIET: Duration = Duration::from_secs(10);
const COMMENT: &[u8] = b": waiting\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// One reader.
pub(super) struct Reader {
    responses: Arc<Responses>,
    key: Key,
    /// The last number that was told, or need not be.
    after: Option<u64>,
    /// Where the response runs here.
    news: Option<watch::Receiver<u64>>,
    spoke: Instant,
    is_over: bool,
    /// For a response that vanishes.
    last_known: Option<Record>,
}

impl Background {
    pub(super) fn count_reader(&self, kind: &str) {
        self.metrics.readers.with_label_values(&[kind]).inc();
    }
}

impl Responses {
    pub(in crate::api::responses) async fn stream_again(
        self: &Arc<Self>,
        key: Key,
        record: Record,
        after: Option<u64>,
    ) -> Result<Response<http::Body>, ApiError> {
        let Some(background) = record.background.filter(|it| it.streams) else {
            self.background.count_reader("refused");
            return Err(ApiError::not_streamable());
        };
        self.background.count_reader(match after {
            None => "replay",
            Some(_) => "resume",
        });
        // Who has all is told the end again: an empty stream would look like a broken one.
        let after = match background.last_event {
            Some(last) if record.status.is_terminal() && after.is_some_and(|it| it >= last) => {
                last.checked_sub(1)
            }
            _ => after,
        };
        let news = self.background.find(key).map(|run| run.news.subscribe());
        let mut reader = Reader::new(self.clone(), key, after, news);
        reader.last_known = Some(record);
        let mut answer = Response::new(body(reader));
        own_headers(answer.headers_mut(), true);
        Ok(answer)
    }
}

impl Reader {
    pub(super) fn new(
        responses: Arc<Responses>,
        key: Key,
        after: Option<u64>,
        news: Option<watch::Receiver<u64>>,
    ) -> Self {
        Self {
            responses,
            key,
            after,
            news,
            spoke: observe::now(),
            is_over: false,
            last_known: None,
        }
    }

    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        while !self.is_over {
            if let Some(news) = &mut self.news {
                news.mark_unchanged();
            }
            let piece = self.read().await;
            if !piece.is_empty() {
                self.spoke = observe::now();
                return Some(piece);
            }
            if self.is_over {
                return None;
            }
            if observe::now().saturating_duration_since(self.spoke) > QUIET {
                self.spoke = observe::now();
                return Some(COMMENT.to_vec());
            }
            self.wait().await;
        }
        None
    }

    /// Until there may be more to read.
    async fn wait(&mut self) {
        let background = &self.responses.background;
        let poll = Duration::from_millis(background.settings.poll_ms);
        let Some(news) = &mut self.news else {
            tokio::time::sleep(poll).await;
            // Its reader goes on elsewhere.
            self.is_over = background.tasks.is_stopping();
            return;
        };
        // What happens elsewhere (a cancel) makes no news here until its owner stops.
        if let Ok(Err(_)) = tokio::time::timeout(10 * poll, news.changed()).await {
            self.news = None;
        }
    }

    async fn read(&mut self) -> Vec<u8> {
        let store = &self.responses.store;
        let Ok(read) = store.events(self.key, self.after, READ_BYTES).await else {
            // Down for now: readers wait, as the response does.
            return Vec::new();
        };
        let Some(read) = read else {
            self.is_over = true;
            return self.vanished();
        };
        let mut out = Vec::new();
        for batch in &read.batches {
            if &*batch.bytes == log::CANCELLED {
                break;
            }
            out.extend_from_slice(log::beyond(&batch.bytes, batch.first, self.after).0);
            self.after = self.after.max(Some(batch.last));
        }
        if let Kept::Sealed(cut) = &read.kept {
            let max = self.responses.background.log_bytes_max;
            let max = usize::try_from(max).unwrap_or(usize::MAX);
            if let Some(text) = log::opened(cut, max) {
                let (rest, last) = log::beyond(&text, 0, self.after);
                out.extend_from_slice(rest);
                self.after = self.after.max(last);
            }
        }
        if !read.status.is_terminal() {
            return out;
        }
        let is_told = self.after >= read.last && read.last.is_some();
        // Between this and the end there may be more batches, unless the end is all that is kept.
        let is_next = match (read.last, &read.kept) {
            (Some(_), Kept::Sealed(_) | Kept::Overflowed) | (None, _) => true,
            (Some(last), Kept::Whole) => {
                let next = self.after.map_or(0, |after| after + 1);
                next == last
                    && read
                        .batches
                        .last()
                        .is_some_and(|it| &*it.bytes == log::CANCELLED)
            }
        };
        if !is_told && is_next {
            match store.get(self.key).await {
                Ok(Some(record)) => out.extend(ending(&record)),
                Ok(None) => out.extend(self.vanished()),
                Err(_) => return out,
            }
        }
        if is_told || is_next {
            self.is_over = true;
            out.extend_from_slice(DONE);
        }
        out
    }

    /// The end of a response that was deleted while it was read.
    fn vanished(&self) -> Vec<u8> {
        let response = match &self.last_known {
            Some(record) => record.content.response.clone(),
            None => format!(
                r#"{{"id":"{}","object":"response","error":null,"status":""}}"#,
                self.key.id
            )
            .into(),
        };
        let error = r#"{"code":"server_error","message":"The response was deleted."}"#;
        let response = with_member(&response, "status", "\"failed\"");
        let response = with_output(&with_member(&response, "error", error), b"[]");
        let number = self.after.map_or(0, |after| after + 1);
        let mut out = told("response.failed", number, &response);
        out.extend_from_slice(DONE);
        out
    }
}

/// The event that ends a stream, from the record.
pub(super) fn ending(record: &Record) -> Vec<u8> {
    let name = match record.status {
        Status::Completed => "response.completed",
        Status::Failed => "response.failed",
        // No client knows an event for what was cancelled; this one ends every reader.
        _ => "response.incomplete",
    };
    let number = record.background.and_then(|it| it.last_event);
    let response = with_output(&record.content.response, &record.content.output);
    told(name, number.unwrap_or_default(), &response)
}

pub(super) fn told(name: &str, number: u64, response: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(response.len() + 128);
    let _ = write!(
        out,
        "event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{number},\"response\":"
    );
    out.extend_from_slice(response);
    out.extend_from_slice(b"}\n\n");
    out
}

type Pulled = Pin<Box<dyn Future<Output = Option<(Vec<u8>, Reader)>> + Send>>;

struct Pulling(Option<Pulled>);

/// Reads when it is read: a slow client costs nothing but its connection.
pub(super) fn body(reader: Reader) -> http::Body {
    Pulling(Some(pull(reader))).boxed_unsync()
}

fn pull(mut reader: Reader) -> Pulled {
    Box::pin(async move { reader.next().await.map(|piece| (piece, reader)) })
}

impl http_body::Body for Pulling {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(pulled) = &mut self.0 else {
            return Poll::Ready(None);
        };
        match ready!(pulled.as_mut().poll(cx)) {
            None => {
                self.0 = None;
                Poll::Ready(None)
            }
            Some((piece, reader)) => {
                self.0 = Some(pull(reader));
                Poll::Ready(Some(Ok(Frame::data(piece.into()))))
            }
        }
    }
}
