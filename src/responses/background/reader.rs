//! Streams a background response's events to one client, on any replica and from any event number on. Only
//! stored events are sent.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::watch;
use tracing::warn;

use super::log;
use super::read_position::{Next, ReadPosition};
use super::run_step::Tail;
use super::runs::{Background, Run};
use crate::http::{self, BodyError};
use crate::observe;
use crate::openai::error::{Answer, ApiError};
use crate::responses::events::{self, DONE};
use crate::responses::http_response::events_response;
use crate::responses::object::{with_member, with_output};
use crate::responses::service::Responses;
use crate::store::log::LogState;
use crate::store::{self, Record, ResponseKey, Status};

/// Bytes of events per read from the store.
const READ_BYTES: u64 = 256 << 10;
/// A local reader looks again after this time, even without an update.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10);
const COMMENT: &[u8] = b": waiting\n\n";

/// The stream of one client.
pub(super) struct Reader {
    responses: Arc<Responses>,
    key: ResponseKey,
    position: ReadPosition,
    /// Set while the response runs on this replica: its stored events are sent from memory.
    local: Option<LocalRun>,
    last_sent: Instant,
    is_over: bool,
    /// Whether it wants events that were dropped.
    is_behind: bool,
    /// The Response object when the stream began, in case the response is deleted.
    response: Bytes,
}

struct LocalRun {
    run: Arc<Run>,
    updates: watch::Receiver<u64>,
}

impl Background {
    pub(super) fn count_reader(&self, kind: &str) {
        self.metrics.readers.with_label_values(&[kind]).inc();
    }
}

impl Responses {
    pub(in crate::responses) async fn stream_events(
        self: &Arc<Self>,
        key: ResponseKey,
        record: Record,
        after: Option<u64>,
    ) -> Answer {
        if !record
            .background
            .is_some_and(|background| background.streams)
        {
            self.background.count_reader("refused");
            return Err(ApiError::not_streamable());
        }
        self.background.count_reader(match after {
            None => "replay",
            Some(_) => "resume",
        });
        let run = self.background.find(key);
        let reader = Reader::new(self.clone(), key, after, run, record.content.response);
        Ok(events_response(body(reader)))
    }
}

impl Reader {
    pub(super) fn new(
        responses: Arc<Responses>,
        key: ResponseKey,
        after: Option<u64>,
        run: Option<Arc<Run>>,
        response: Bytes,
    ) -> Self {
        let local = run.map(|run| LocalRun {
            updates: run.updates.subscribe(),
            run,
        });
        Self {
            responses,
            key,
            position: ReadPosition::new(after),
            local,
            last_sent: observe::now(),
            is_over: false,
            is_behind: false,
            response,
        }
    }

    /// The next events for the client; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        while !self.is_over {
            if let Some(local) = &mut self.local {
                local.updates.mark_unchanged();
            }
            let (piece, next) = match self.read_local() {
                Some(read) => read,
                None => self.read_store().await,
            };
            let piece = self.with_end(piece, next).await;
            if !piece.is_empty() {
                self.last_sent = observe::now();
                return Some(piece);
            }
            if self.is_over || next == Next::More {
                continue;
            }
            let max = self.until_keep_alive();
            if max.is_zero() {
                self.last_sent = observe::now();
                return Some(COMMENT.to_vec());
            }
            let is_drained = {
                let last_part = self.responses.background.tasks.last_part().clone();
                let waiting = pin!(self.wait(max));
                last_part.cuts_off(waiting).await.is_none()
            };
            let tasks = &self.responses.background.tasks;
            if is_drained || self.local.is_none() && tasks.is_stopping() {
                let last = self.moved();
                return Some(self.end(Vec::new(), &last));
            }
        }
        None
    }

    fn until_keep_alive(&self) -> Duration {
        match self.responses.settings.keep_alive {
            Duration::ZERO => Duration::MAX,
            max => {
                let silent = observe::now().saturating_duration_since(self.last_sent);
                max.saturating_sub(silent)
            }
        }
    }

    /// Waits until there may be more to read, at most for `max`.
    async fn wait(&mut self, max: Duration) {
        let background = &self.responses.background;
        let poll = background.settings.poll_interval;
        let Some(local) = &mut self.local else {
            return tokio::time::sleep(poll.min(max)).await;
        };
        let _ = tokio::time::timeout(max.min(RECHECK_INTERVAL), local.updates.changed()).await;
    }

    /// Reads from memory; `None` if the events must be read from the store.
    fn read_local(&mut self) -> Option<(Vec<u8>, Next)> {
        let run = self.local.as_ref()?.run.clone();
        let state = run.state.lock();
        match state.tail(self.position.after, READ_BYTES as usize) {
            // The client has events that this run may not have written: the store knows.
            Tail::InMemory { last, .. } if self.position.is_beyond(run.fence.number, last) => None,
            Tail::InMemory { text, last, is_end } => {
                self.position.on_run(run.fence.number);
                let next = self.position.on_tail(text, last, is_end);
                Some((text.to_vec(), next))
            }
            Tail::InStore => None,
            Tail::NotRunning => {
                self.local = None;
                None
            }
        }
    }

    async fn read_store(&mut self) -> (Vec<u8>, Next) {
        let after = self.position.after;
        let events = self.responses.store.events(self.key, after, READ_BYTES);
        let read = match events.await {
            Ok(read) => read,
            // The store is unreachable: the reader waits.
            Err(error) if error.retry_after().is_some() => return (Vec::new(), Next::Wait),
            Err(error) => {
                let last = self.unreadable(&error);
                return (self.end(Vec::new(), &last), Next::Wait);
            }
        };
        let Some(read) = read else {
            let last = self.deleted();
            return (self.end(Vec::new(), &last), Next::Wait);
        };
        let background = &self.responses.background;
        if read.log == LogState::Overflowed && read.last > after && !self.is_behind {
            self.is_behind = true;
            background.metrics.readers_behind.inc();
        }
        let max = usize::try_from(background.max_event_log).unwrap_or(usize::MAX);
        let max = max.saturating_mul(log::WHOLE_SHARE);
        let mut out = Vec::new();
        let next = self.position.on_read(&read, max, &mut out);
        (out, next)
    }

    /// Appends the end of the stream if it has come.
    async fn with_end(&mut self, piece: Vec<u8>, next: Next) -> Vec<u8> {
        let last = match next {
            Next::More | Next::Wait => return piece,
            Next::Lost { last } => self.lost(last),
            Next::End => match self.responses.store.get(self.key).await {
                // The owner has not stored the output of the cancelled response yet.
                Ok(Some(record)) if !self.position.is_settled(observe::now(), &record) => {
                    return piece;
                }
                Ok(Some(record)) => final_event(&record),
                Ok(None) => self.deleted(),
                Err(error) if error.retry_after().is_some() => return piece,
                Err(error) => self.unreadable(&error),
            },
            Next::Over => Vec::new(),
        };
        self.end(piece, &last)
    }

    /// Nothing follows the event `last`.
    fn end(&mut self, mut piece: Vec<u8>, last: &[u8]) -> Vec<u8> {
        self.is_over = true;
        piece.extend_from_slice(last);
        piece.extend_from_slice(DONE);
        piece
    }

    /// The end of a stream, but not of its response: this replica cannot decode the stored events.
    fn unreadable(&self, error: &store::Error) -> Vec<u8> {
        warn!(response_id = %self.key.id, %error, "stored events cannot be read; ending the event stream with an error");
        let message = "The events of this response cannot be read.";
        self.error_event("server_error", message, None)
    }

    /// The end of a stream whose client has events that the store lost. The response goes on.
    fn lost(&self, last: Option<u64>) -> Vec<u8> {
        self.responses.background.metrics.readers_lost.inc();
        let kept = last.map_or("none".to_owned(), |last| format!("those up to {last}"));
        let read_on = self.read_on(last);
        let message = format!(
            "The store lost events of this response that were sent, and has {kept}: {read_on}"
        );
        self.error_event("events_lost", &message, Some("starting_after"))
    }

    /// The end of a stream on a replica that is stopping. A response that runs here may end with it, one that runs on
    /// another replica, or will, goes on. Without Redis nothing is left to read.
    fn moved(&self) -> Vec<u8> {
        let read_on = self.read_on(self.position.after);
        let message = match (&self.responses.settings.store.redis, &self.local) {
            (None, _) => "This replica is stopping.".to_owned(),
            (Some(_), Some(_)) => format!("This replica is stopping: {read_on}"),
            (Some(_), None) => {
                format!("This replica is stopping, and the response goes on: {read_on}")
            }
        };
        self.error_event("router_draining", &message, None)
    }

    /// Tells the client how it reads on after this event.
    fn read_on(&self, after: Option<u64>) -> String {
        let after = after.map_or(String::new(), |after| format!("&starting_after={after}"));
        let id = self.key.id;
        format!("read on with GET /v1/responses/{id}?stream=true{after}")
    }

    /// The final event of a response that was deleted while it was read.
    fn deleted(&self) -> Vec<u8> {
        let error = r#"{"code":"server_error","message":"The response was deleted."}"#;
        let response = with_member(&self.response, "status", "\"failed\"");
        let response = with_output(&with_member(&response, "error", error), b"[]");
        events::final_event(Status::Failed, self.position.next_number(), &response)
    }

    /// The error event that OpenAI uses within a stream. `message` and `param` need no escapes.
    fn error_event(&self, code: &str, message: &str, param: Option<&str>) -> Vec<u8> {
        let number = self.position.next_number();
        let param = param.map_or_else(|| "null".to_owned(), |param| format!("\"{param}\""));
        format!(
            "event: error\ndata: {{\"type\":\"error\",\"sequence_number\":{number},\"code\":\"{code}\",\
             \"message\":\"{message}\",\"param\":{param}}}\n\n"
        )
        .into_bytes()
    }
}

fn final_event(record: &Record) -> Vec<u8> {
    let number = record
        .background
        .and_then(|background| background.last_event);
    let response = with_output(&record.content.response, &record.content.output);
    events::final_event(record.status, number.unwrap_or_default(), &response)
}

/// The reader goes from piece to piece, so it stays in its own place.
type PendingPiece = Pin<Box<dyn Future<Output = Option<(Vec<u8>, Box<Reader>)>> + Send>>;

struct ReaderBody(Option<PendingPiece>);

/// The body reads only when it is polled, so a slow client costs nothing but its connection.
pub(super) fn body(reader: Reader) -> http::Body {
    ReaderBody(Some(next_piece(Box::new(reader)))).boxed_unsync()
}

fn next_piece(mut reader: Box<Reader>) -> PendingPiece {
    Box::pin(async move { reader.next().await.map(|piece| (piece, reader)) })
}

impl http_body::Body for ReaderBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(pending) = &mut self.0 else {
            return Poll::Ready(None);
        };
        match ready!(pending.as_mut().poll(cx)) {
            None => {
                self.0 = None;
                Poll::Ready(None)
            }
            Some((piece, reader)) => {
                self.0 = Some(next_piece(reader));
                Poll::Ready(Some(Ok(Frame::data(piece.into()))))
            }
        }
    }
}
