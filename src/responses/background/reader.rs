//! A background response's events, told from the store: to the client that began it and to any other,
//! from any number on, on any replica. Nothing is told that is not stored.

use std::future::Future;
use std::io::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::Response;
use tokio::sync::watch;
use tracing::warn;

use super::read_position::{Next, ReadPosition};
use super::run_state::Tail;
use super::{Background, Run};
use crate::http::{self, BodyError};
use crate::observe;
use crate::openai::error::ApiError;
use crate::responses::Responses;
use crate::responses::create::own_headers;
use crate::responses::object::{with_member, with_output};
use crate::store::{self, Record, ResponseKey, Status};

/// Read from the store at once.
const READ_BYTES: u64 = 256 << 10;
/// Looked again though there was no news.
const LOOK_EVERY: Duration = Duration::from_secs(10);
const COMMENT: &[u8] = b": waiting\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// One reader.
pub(super) struct Reader {
    responses: Arc<Responses>,
    key: ResponseKey,
    reading: ReadPosition,
    /// Where the response runs here: what is stored is told from memory, and there is no need to ask.
    here: Option<Here>,
    spoke: Instant,
    is_over: bool,
    /// For a response that vanishes.
    last_known: Option<Record>,
}

struct Here {
    run: Arc<Run>,
    news: watch::Receiver<u64>,
}

impl Background {
    pub(super) fn count_reader(&self, kind: &str) {
        self.metrics.readers.with_label_values(&[kind]).inc();
    }
}

impl Responses {
    pub(in crate::responses) async fn stream_again(
        self: &Arc<Self>,
        key: ResponseKey,
        record: Record,
        after: Option<u64>,
    ) -> Result<Response<http::Body>, ApiError> {
        if !record.background.is_some_and(|it| it.streams) {
            self.background.count_reader("refused");
            return Err(ApiError::not_streamable());
        }
        self.background.count_reader(match after {
            None => "replay",
            Some(_) => "resume",
        });
        let run = self.background.find(key);
        let mut reader = Reader::new(self.clone(), key, after, run);
        reader.last_known = Some(record);
        let mut answer = Response::new(body(reader));
        own_headers(answer.headers_mut(), true);
        Ok(answer)
    }
}

impl Reader {
    pub(super) fn new(
        responses: Arc<Responses>,
        key: ResponseKey,
        after: Option<u64>,
        run: Option<Arc<Run>>,
    ) -> Self {
        let here = run.map(|run| Here {
            news: run.news.subscribe(),
            run,
        });
        Self {
            responses,
            key,
            reading: ReadPosition::new(after),
            here,
            spoke: observe::now(),
            is_over: false,
            last_known: None,
        }
    }

    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        while !self.is_over {
            if let Some(here) = &mut self.here {
                here.news.mark_unchanged();
            }
            let (piece, next) = match self.read_here() {
                Some(read) => read,
                None => self.read().await,
            };
            let piece = self.ended(piece, next).await;
            if !piece.is_empty() {
                self.spoke = observe::now();
                return Some(piece);
            }
            if self.is_over || next == Next::More {
                continue;
            }
            let left = self.may_be_silent();
            if left.is_zero() {
                self.spoke = observe::now();
                return Some(COMMENT.to_vec());
            }
            self.wait(left).await;
        }
        None
    }

    /// How much longer this may say nothing.
    fn may_be_silent(&self) -> Duration {
        match self.responses.settings.keep_alive_ms {
            0 => Duration::MAX,
            max => {
                let silent = observe::now().saturating_duration_since(self.spoke);
                Duration::from_millis(max).saturating_sub(silent)
            }
        }
    }

    /// Until there may be more to read, and no longer than it may say nothing.
    async fn wait(&mut self, max: Duration) {
        let background = &self.responses.background;
        let poll = Duration::from_millis(background.settings.poll_ms);
        let Some(here) = &mut self.here else {
            tokio::time::sleep(poll.min(max)).await;
            // Its reader goes on elsewhere.
            self.is_over = background.tasks.is_stopping();
            return;
        };
        let _ = tokio::time::timeout(max.min(LOOK_EVERY), here.news.changed()).await;
    }

    /// What is stored and told from memory; `None` where it is to be read from the store.
    fn read_here(&mut self) -> Option<(Vec<u8>, Next)> {
        let run = self.here.as_ref()?.run.clone();
        let state = run.state.lock();
        match state.tail(self.reading.after(), READ_BYTES as usize) {
            Tail::InMemory { text, last, is_end } => {
                let next = self.reading.on_tail(text, last, is_end);
                Some((text.to_vec(), next))
            }
            Tail::InStore => None,
            Tail::NotRunning => {
                self.here = None;
                None
            }
        }
    }

    async fn read(&mut self) -> (Vec<u8>, Next) {
        let after = self.reading.after();
        let said = self.responses.store.events(self.key, after, READ_BYTES);
        let read = match said.await {
            Ok(read) => read,
            // Down for now: readers wait, as the response does.
            Err(error) if error.retry_after().is_some() => return (Vec::new(), Next::Wait),
            Err(error) => return (self.unreadable(&error), Next::Wait),
        };
        let Some(read) = read else {
            self.is_over = true;
            return (self.vanished(), Next::Wait);
        };
        let max = self.responses.background.log_bytes_max;
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let mut out = Vec::new();
        let next = self.reading.on_read(&read, max, &mut out);
        (out, next)
    }

    /// What was read, with the end if that is told now.
    async fn ended(&mut self, mut piece: Vec<u8>, next: Next) -> Vec<u8> {
        match next {
            Next::More | Next::Wait => return piece,
            Next::End => match self.responses.store.get(self.key).await {
                // Its owner has yet to add what was told.
                Ok(Some(record)) if !self.reading.is_settled(observe::now(), &record) => {
                    return piece;
                }
                Ok(Some(record)) => piece.extend(ending(&record)),
                Ok(None) => {
                    self.is_over = true;
                    piece.extend(self.vanished());
                    return piece;
                }
                // It is asked again.
                Err(error) if error.retry_after().is_some() => return piece,
                Err(error) => {
                    piece.extend(self.unreadable(&error));
                    return piece;
                }
            },
            Next::Over => {}
        }
        self.is_over = true;
        piece.extend_from_slice(DONE);
        piece
    }

    /// The end of a stream, not of its response: what is stored cannot be read here.
    fn unreadable(&mut self, error: &store::Error) -> Vec<u8> {
        warn!(id = %self.key.id, %error, "a stream of a background response ends early");
        self.is_over = true;
        let mut out = unreadable(self.reading.next_number());
        out.extend_from_slice(DONE);
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
        let number = self.reading.next_number();
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

/// As OpenAI tells of an error within a stream.
fn unreadable(number: u64) -> Vec<u8> {
    format!(
        "event: error\ndata: {{\"type\":\"error\",\"sequence_number\":{number},\"code\":\"server_error\",\
         \"message\":\"The events of this response cannot be read.\",\"param\":null}}\n\n"
    )
    .into_bytes()
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
