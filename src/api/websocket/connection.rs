//! One WebSocket: reads frames, runs turns, writes their events. All of it is one task.
//!
//! While the client reads nothing, its turns are not read on either: what waits is one piece of a stream and the answers
//! to a few frames, and the engines' sockets hold the rest.

mod timers;

use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures_core::Stream;
use futures_sink::Sink;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tokio_websockets::{CloseCode, Config, Error, Limits, Message, ServerBuilder, WebSocketStream};
use tracing::debug;

use super::open::Slot;
use super::opener::Opener;
use super::running_turn::RunningTurn;
use crate::api::ApiServer;
use crate::http::server::Upgraded;
use crate::ids::Tenant;
use crate::observe;
use crate::responses::websocket::lifetime::Lifetime;
use crate::responses::websocket::memory::{BodyCounted, TurnContext, TurnRecord};
use crate::responses::websocket::session::Session;
use crate::responses::websocket::step::{Bounds, CloseReason, Step, Steps, Turn};

/// Frames that are read on while the client takes none: enough for all turns that may run and their closing.
const READS_WHILE_BLOCKED: u32 = 64;
/// With so many bytes of answers to frames that wait for the socket no frame is read on while the client takes none: an
/// answer may be as large as its frame.
const UNSENT_BYTES_MAX: u64 = 64 << 10;
/// Parts of messages up to this size are not counted: every connection has a buffer for the next one. Nor does less of
/// a message show that its client is still there.
const UNCOUNTED_BYTES: u64 = 8 << 10;
/// Parts of messages up to this size are read on when there is no room: most messages are shorter.
const SMALL_BYTES: u64 = 64 << 10;
/// The header of a control frame of a client, with its mask.
const CONTROL_HEAD_BYTES: u64 = 6;
/// Frames that are read, and pieces of streams that are sent, before other tasks of the I/O thread get their turn.
const STEPS_AT_ONCE: u32 = 32;
/// How long a client is read on whose message found no memory. Bytes that are left unread would reset the connection, and
/// the close with it.
const DISCARD_TIME: std::time::Duration = std::time::Duration::from_secs(1);
/// How long the client may take to answer a close.
const CLOSE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Serves a connection until it ends.
pub(super) async fn serve(
    server: Arc<ApiServer>,
    opener: Opener,
    tenant: Tenant,
    slot: Slot,
    upgraded: Upgraded,
) {
    let settings = server.responses.websocket();
    let send_timeout = upgraded.send_timeout;
    let max = usize::try_from(settings.max_message_size).unwrap_or(usize::MAX);
    let socket = ServerBuilder::new()
        .config(Config::default().frame_size(usize::MAX))
        .limits(Limits::default().max_payload_len(Some(max)))
        .serve(upgraded);
    let tasks = server.tasks.clone();
    let lifetime = Lifetime::new(observe::now(), settings);
    let session = Session::new(Bounds::new(settings));
    let stopped = pin!(tasks.stopped());
    let ending = pin!(tasks.ending());
    let aborted = pin!(tasks.aborted());
    let timer = pin!(sleep_until(lifetime.next().into()));
    let mut live = Live {
        socket,
        session,
        lifetime,
        turns: Vec::new(),
        server,
        opener: Arc::new(opener),
        tenant,
        slot,
        timer,
        stopped,
        ending,
        aborted,
        send_timeout,
        blocked_since: None,
        reads_while_blocked: 0,
        unsent_bytes: 0,
        unread: None,
        read_before: 0,
        read_when_alive: 0,
        partial_bytes: 0,
        closing: None,
        is_discarding: false,
        is_registered: false,
    };
    let reason = std::future::poll_fn(|cx| live.poll(cx)).await;
    debug!(reason, "websocket ended");
    let closed = &live.slot.open.metrics.closed;
    closed.with_label_values(&[reason]).inc();
}

/// An open connection. Dropping it drops its turns, which ends their engines' connections.
struct Live<'a> {
    socket: WebSocketStream<Upgraded>,
    session: Session,
    lifetime: Lifetime,
    turns: Vec<RunningTurn>,
    /// The server of the latest configuration that the connection has used.
    server: Arc<ApiServer>,
    opener: Arc<Opener>,
    tenant: Tenant,
    slot: Slot,
    timer: Pin<&'a mut Sleep>,
    stopped: Pin<&'a mut WaitForCancellationFutureOwned>,
    ending: Pin<&'a mut WaitForCancellationFutureOwned>,
    aborted: Pin<&'a mut WaitForCancellationFutureOwned>,
    send_timeout: std::time::Duration,
    /// Since when the client takes nothing.
    blocked_since: Option<Instant>,
    reads_while_blocked: u32,
    /// Bytes of messages other than events that were sent since the client last had taken everything.
    unsent_bytes: u64,
    /// The latest frame. It goes when nothing more is to be read: the buffer for the next one is then a small one, and not
    /// this one's again.
    unread: Option<Bytes>,
    /// Bytes that had been read of the socket when the latest message was complete, and those of control frames since then.
    read_before: u64,
    /// Bytes that had been read of the socket when the client last showed that it is there.
    read_when_alive: u64,
    /// Bytes that have come of a message of which only a part has come, if it is large.
    partial_bytes: u64,
    /// Why it closes, and until when the client may answer.
    closing: Option<(&'static str, Instant)>,
    /// Nothing that the client sends is kept any more.
    is_discarding: bool,
    is_registered: bool,
}

impl Live<'_> {
    /// Ready when the connection has ended, with the reason.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<&'static str> {
        if !self.is_registered {
            self.is_registered = true;
            let _ = self.stopped.as_mut().poll(cx);
            // Its turns look whether it has begun when they are polled.
            let _ = self.ending.as_mut().poll(cx);
            let _ = self.aborted.as_mut().poll(cx);
        }
        let tasks = &self.server.tasks;
        if tasks.is_stopping() {
            if tasks.is_aborted() {
                return Poll::Ready("drain");
            }
            let steps = self.session.on_drain();
            self.take(steps);
        }
        if let Poll::Ready(reason) = self.poll_timer(cx) {
            return Poll::Ready(reason);
        }
        for _ in 0..STEPS_AT_ONCE {
            if let Some((reason, _)) = self.closing {
                self.turns.clear();
                self.unread = None;
                self.set_timer(cx);
                // Without anything to discard it waits until the client has closed, too.
                let closed = if self.is_discarding {
                    self.poll_discard(cx)
                } else {
                    Pin::new(&mut self.socket).poll_close(cx).map(drop)
                };
                return closed.map(|()| reason);
            }
            let was_blocked = self.blocked_since.is_some();
            let has_read = match self.poll_read(cx) {
                Ok(has_read) => has_read,
                Err(reason) => return Poll::Ready(reason),
            };
            let has_sent = self.poll_turns(cx);
            let flushed = Pin::new(&mut self.socket).poll_flush(cx);
            match flushed {
                Poll::Ready(Ok(())) => {
                    self.blocked_since = None;
                    self.reads_while_blocked = 0;
                    self.unsent_bytes = 0;
                }
                Poll::Ready(Err(_)) => return Poll::Ready("client"),
                Poll::Pending if self.blocked_since.is_none() => {
                    self.blocked_since = Some(observe::now());
                    self.set_timer(cx);
                }
                Poll::Pending => {}
            }
            // What was left alone while the client took nothing must be looked at again.
            let is_unblocked = was_blocked && self.blocked_since.is_none();
            let is_done = !has_read && !has_sent && !is_unblocked;
            if is_done && self.closing.is_none() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads one frame, if there is one. True if there was. The reason if the connection has ended.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Result<bool, &'static str> {
        let is_full = self.reads_while_blocked >= READS_WHILE_BLOCKED
            || self.unsent_bytes >= UNSENT_BYTES_MAX;
        if self.blocked_since.is_some() && is_full {
            return Ok(false);
        }
        let message = match Pin::new(&mut self.socket).poll_next(cx) {
            Poll::Pending => {
                self.unread = None;
                self.on_upload();
                return Ok(self.on_partial());
            }
            Poll::Ready(None) => return Err("client"),
            Poll::Ready(Some(Err(Error::Io(_)))) => return Err("client"),
            Poll::Ready(Some(Err(error))) => {
                debug!(%error, "websocket closed: not the protocol");
                self.turns.clear();
                if let Error::PayloadTooLong { max_len, .. } = error {
                    // The frame may be a fragment, for which the library does not say so.
                    let reason = format!("max length: {max_len}");
                    self.close("protocol", CloseCode::MESSAGE_TOO_BIG, &reason);
                } else {
                    self.closing = Some(("protocol", observe::now() + CLOSE_TIMEOUT));
                }
                self.set_timer(cx);
                return Ok(true);
            }
            Poll::Ready(Some(Ok(message))) => message,
        };
        self.on_alive();
        self.reads_while_blocked += u32::from(self.blocked_since.is_some());
        let (is_text, is_binary, is_close) =
            (message.is_text(), message.is_binary(), message.is_close());
        let payload = Bytes::from(message.into_payload());
        if is_text || is_binary {
            self.read_before = self.socket.get_ref().bytes_read;
            self.partial_bytes = 0;
        } else {
            // It came alone, or between the fragments of a message.
            self.read_before += CONTROL_HEAD_BYTES + payload.len() as u64;
            self.on_partial();
        }
        if is_text {
            let room = self.room();
            let steps = self.session.on_text(&payload, room);
            self.take(steps);
        } else if is_binary {
            let steps = self.session.on_binary();
            self.take(steps);
        } else if is_close {
            // A client that closes wants none of what runs.
            self.turns.clear();
            self.closing = Some(("client", observe::now() + CLOSE_TIMEOUT));
            self.set_timer(cx);
        }
        self.unread = Some(payload);
        Ok(true)
    }

    /// A client can answer no ping while it sends a frame, which may take minutes: it is there as long as parts of it
    /// come. A byte now and then is not enough: whoever sends so would keep the memory of what came before.
    fn on_upload(&mut self) {
        if self.socket.get_ref().bytes_read - self.read_when_alive >= UNCOUNTED_BYTES {
            self.on_alive();
        }
    }

    fn on_alive(&mut self) {
        self.read_when_alive = self.socket.get_ref().bytes_read;
        self.lifetime.on_received();
    }

    /// Counts the message of which a part has come, if that is large. True if there is no room for more of it: the
    /// connection then closes.
    fn on_partial(&mut self) -> bool {
        let read = self.socket.get_ref().bytes_read;
        let bytes = read.saturating_sub(self.read_before);
        if bytes <= UNCOUNTED_BYTES || bytes == self.partial_bytes {
            return false;
        }
        self.partial_bytes = bytes;
        self.slot.set_bytes(self.session.bytes() + bytes);
        if bytes <= SMALL_BYTES || self.room() > 0 {
            return false;
        }
        let limited = &self.slot.open.metrics.limited;
        limited.with_label_values(&["messages"]).inc();
        self.close(
            "memory",
            CloseCode::SERVICE_OVERLOAD,
            "no memory for the message",
        );
        self.closing = Some(("memory", observe::now() + DISCARD_TIME));
        self.is_discarding = true;
        self.reset_timer();
        true
    }

    fn room(&self) -> u64 {
        self.slot.room(self.server.responses.websocket())
    }

    /// Does what the session asks for.
    fn take(&mut self, steps: Steps) {
        for step in steps {
            match step {
                Step::Send(frame) => self.send(Message::text(frame)),
                Step::Start(turn) => self.start(turn),
                Step::Close(CloseReason::Over) => {
                    self.close("over", CloseCode::NORMAL_CLOSURE, "");
                }
                Step::Close(CloseReason::Draining) => {
                    self.close("drain", CloseCode::SERVICE_RESTART, "the router stops");
                }
            }
        }
        self.slot
            .set_bytes(self.session.bytes() + self.partial_bytes);
        self.lifetime
            .set_busy(self.session.is_busy(), observe::now());
        let bitten = self.session.take_bitten();
        let limited = &self.slot.open.metrics.limited;
        for (bound, count) in [
            ("queue", bitten.queue),
            ("lanes", bitten.lanes),
            ("memory", bitten.memory),
        ] {
            if count > 0 {
                limited.with_label_values(&[bound]).inc_by(count);
            }
        }
    }

    /// Puts a message behind those that wait for the socket.
    fn send(&mut self, message: Message) {
        self.unsent_bytes += message.as_payload().len() as u64;
        // Fails only once the connection closes.
        let _ = Pin::new(&mut self.socket).start_send(message);
    }

    fn close(&mut self, reason: &'static str, code: CloseCode, text: &str) {
        self.send(Message::close(Some(code), text));
        self.closing = Some((reason, observe::now() + CLOSE_TIMEOUT));
        self.reset_timer();
    }

    fn start(&mut self, turn: Turn) {
        let (record, counted) = (TurnRecord::default(), BodyCounted::default());
        let context = TurnContext {
            generates: turn.work.generates,
            continued: turn.continued,
            record: record.clone(),
            counted: counted.clone(),
        };
        self.server = self.server.latest();
        let answer =
            self.server
                .clone()
                .turn(self.opener.clone(), self.tenant, turn.work.body, context);
        let turn = RunningTurn::new(turn.number, turn.lane, record, counted, Box::pin(answer));
        self.turns.push(turn);
    }

    /// Reads on what the turns answer, as far as the client takes it. True if there was anything.
    fn poll_turns(&mut self, cx: &mut Context<'_>) -> bool {
        let mut has_progress = false;
        let mut index = 0;
        while index < self.turns.len() {
            if self.blocked_since.is_some() && !self.is_writable(cx) {
                return has_progress;
            }
            let socket = &mut self.socket;
            let turn = &mut self.turns[index];
            let polled = turn.poll(cx, |event| {
                let _ = Pin::new(&mut *socket).start_send(Message::text(event));
            });
            if let Some(number) = turn.take_counted() {
                // Turns that start now are polled below.
                let steps = self.session.on_counted(number);
                self.take(steps);
            }
            match polled {
                Poll::Pending => index += 1,
                Poll::Ready(is_over) => {
                    has_progress = true;
                    let turn = &mut self.turns[index];
                    let has_ended = is_over || turn.record.is_set();
                    let ended = turn.number.take_if(|_| has_ended);
                    let record = turn.record.clone();
                    if is_over {
                        self.turns.remove(index);
                    }
                    if let Some(number) = ended {
                        let room = self.room();
                        let steps = self.session.on_end(number, record.take(), room);
                        self.take(steps);
                    }
                    if self.closing.is_some() {
                        return true;
                    }
                    if !self.is_writable(cx) {
                        return has_progress;
                    }
                }
            }
        }
        has_progress
    }

    fn is_writable(&mut self, cx: &mut Context<'_>) -> bool {
        Pin::new(&mut self.socket).poll_ready(cx).is_ready()
    }

    /// Sends the close, and reads on for a while.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Poll::Ready(Err(_)) = Pin::new(&mut self.socket).poll_flush(cx) {
            return Poll::Ready(());
        }
        let mut bytes = [MaybeUninit::uninit(); 8 << 10];
        loop {
            let mut buffer = ReadBuf::uninit(&mut bytes);
            match Pin::new(self.socket.get_mut()).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
