//! One TCP connection that speaks ZMTP, from connecting to its end. It never reconnects: all of its
//! messages are from one process, and the end comes after the last of them.
//!
//! Nothing is queued here. Unread messages stay in the sockets' buffers and then with the peer; a
//! publisher that cannot wait drops messages, which shows as a gap in the sequence numbers.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::endpoint::Endpoint;
use super::gather;
use super::settings::Settings;
use super::zmtp::{Bounds, Parts, PeerMessage, ProtocolError, Role, Session};

/// Room for a read: a few batches of a busy engine. It is allocated and freed for each read, so it is not larger.
const READ_BYTES: usize = 16 * 1_024;
/// Room for a read after one of at least `READ_BYTES`, as within a replay.
const LONG_READ_BYTES: usize = 64 * 1_024;
/// A message has at most identity, delimiter, topic, sequence number and payload. Some proxies add one.
const PARTS_MAX: usize = 6;
/// Our messages are small; a peer that leaves more than this unread has stopped reading.
const OUTBOX_BYTES_MAX: usize = 64 * 1_024;
/// The kernel refuses longer intervals.
const KEEPALIVE_MAX: Duration = Duration::from_secs(3_600);
/// If this process stalled, the pong may be in the socket already; read once more before giving up.
const LAST_READ_TIMEOUT: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum CloseReason {
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    #[error("connected, but no ZeroMQ handshake in time")]
    NoHandshake,
    #[error("closed by the peer")]
    Closed,
    #[error("connection broken: {0}")]
    Broken(io::Error),
    #[error("no answer to a ping within {} ms", .0.as_millis())]
    Silent(Duration),
    #[error("the peer sends pings and does not read the answers")]
    PeerNotReading,
    #[error("protocol error: {0}")]
    ProtocolError(#[from] ProtocolError),
}

impl CloseReason {
    /// The metric label.
    pub(super) fn label(&self) -> &'static str {
        match self {
            CloseReason::Unreachable(_) => "unreachable",
            CloseReason::NoHandshake => "no_handshake",
            CloseReason::Closed => "closed",
            CloseReason::Broken(_) => "broken",
            CloseReason::Silent(_) => "silent",
            CloseReason::PeerNotReading => "peer_not_reading",
            CloseReason::ProtocolError(ProtocolError::TooLarge(_)) => "too_large",
            CloseReason::ProtocolError(ProtocolError::Invalid(_)) => "protocol",
        }
    }
}

enum Progress {
    Sent(io::Result<usize>),
    Read(io::Result<usize>),
    Silence,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    session: Session,
    inbox: BytesMut,
    /// Room for the next read.
    read_bytes: usize,
    outbox: BytesMut,
    heartbeat: Duration,
    silence_max: Duration,
    last_read_at: Instant,
    /// When a ping was sent, if nothing was received since.
    pinged_at: Option<Instant>,
}

impl Connection {
    /// Connects. Once this returns, the peer has read a subscriber's subscription. Also returns a message
    /// that arrived during the handshake.
    pub(super) async fn open(
        endpoint: &Endpoint,
        role: Role,
        settings: &Settings,
    ) -> Result<(Self, Option<Parts>), CloseReason> {
        let limit = settings.connect_timeout;
        let connecting = timeout(
            limit,
            TcpStream::connect((endpoint.host.as_str(), endpoint.port)),
        );
        let stream = match connecting.await {
            Ok(connected) => connected.map_err(CloseReason::Unreachable)?,
            Err(_) => return Err(CloseReason::Unreachable(io::ErrorKind::TimedOut.into())),
        };
        let mut connection =
            Self::over(stream, role, settings).map_err(CloseReason::Unreachable)?;
        match timeout(limit, connection.handshake()).await {
            Ok(done) => done.map(|early| (connection, early)),
            Err(_) => Err(CloseReason::NoHandshake),
        }
    }

    fn over(stream: TcpStream, role: Role, settings: &Settings) -> io::Result<Self> {
        let heartbeat = settings.heartbeat_interval;
        stream.set_nodelay(true)?;
        // For peers without pings (ZMTP 3.0): the kernel notices an unreachable host.
        let seconds = |time: Duration| time.clamp(Duration::from_secs(1), KEEPALIVE_MAX);
        let probes = TcpKeepalive::new()
            .with_time(seconds(heartbeat))
            .with_interval(seconds(heartbeat / 2))
            .with_retries(3);
        SockRef::from(&stream).set_tcp_keepalive(&probes)?;
        let now = Instant::now();
        let mut outbox = BytesMut::new();
        let bounds = Bounds {
            message_bytes_max: settings.max_message,
            parts_max: PARTS_MAX,
        };
        Ok(Self {
            stream,
            session: Session::new(role, bounds, &mut outbox),
            inbox: BytesMut::new(),
            read_bytes: READ_BYTES,
            outbox,
            heartbeat,
            silence_max: settings.heartbeat_timeout,
            last_read_at: now,
            pinged_at: None,
        })
    }

    /// Waits until the peer has read everything we sent: it answers a ping, or sends a message, which is
    /// returned. Peers without pings count as soon as they are ready.
    async fn handshake(&mut self) -> Result<Option<Parts>, CloseReason> {
        loop {
            match self.receive().await? {
                PeerMessage::Ready if self.session.can_ping() => {
                    self.session.ping(&mut self.outbox)
                }
                PeerMessage::Ready => {
                    self.stream
                        .write_all_buf(&mut self.outbox)
                        .await
                        .map_err(CloseReason::Broken)?;
                    return Ok(None);
                }
                PeerMessage::Pong => return Ok(None),
                PeerMessage::Message(parts) => return Ok(Some(parts)),
            }
        }
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) {
        self.session.send(parts, &mut self.outbox);
    }

    /// Waits for the next message or the end. Dropping the future loses nothing.
    pub(super) async fn message(&mut self) -> Result<Parts, CloseReason> {
        loop {
            if let PeerMessage::Message(parts) = self.receive().await? {
                return Ok(parts);
            }
        }
    }

    async fn receive(&mut self) -> Result<PeerMessage, CloseReason> {
        loop {
            if let Some(received) = self.session.read(&mut self.inbox, &mut self.outbox)? {
                return Ok(received);
            }
            let deadline = self.deadline();
            self.inbox.reserve(self.read_bytes);
            let (mut reader, mut writer) = self.stream.split();
            let progress = tokio::select! {
                biased;
                // Sending first, so that a flood of input cannot delay our answers.
                sent = writer.write_buf(&mut self.outbox), if !self.outbox.is_empty() => {
                    Progress::Sent(sent)
                }
                read = reader.read_buf(&mut self.inbox) => Progress::Read(read),
                () = sleep_until(deadline) => Progress::Silence,
            };
            match progress {
                Progress::Sent(sent) => {
                    sent.map_err(CloseReason::Broken)?;
                }
                Progress::Read(read) => {
                    self.on_read(read)?;
                    // Sending was tried first, so the peer does not read.
                    if self.outbox.len() > OUTBOX_BYTES_MAX {
                        return Err(CloseReason::PeerNotReading);
                    }
                }
                Progress::Silence => self.on_silence().await?,
            }
        }
    }

    fn on_read(&mut self, read: io::Result<usize>) -> Result<(), CloseReason> {
        match read {
            Ok(0) => Err(CloseReason::Closed),
            Ok(bytes) => {
                let now = Instant::now();
                gather::on_read(now.into_std(), bytes);
                self.read_bytes = if bytes < READ_BYTES {
                    READ_BYTES
                } else {
                    LONG_READ_BYTES
                };
                self.last_read_at = now;
                self.pinged_at = None;
                Ok(())
            }
            Err(error) => Err(CloseReason::Broken(error)),
        }
    }

    /// When to send a ping, or to give up waiting for its answer.
    fn deadline(&self) -> Instant {
        match self.pinged_at {
            Some(pinged_at) => pinged_at + self.silence_max,
            None if self.session.can_ping() => self.last_read_at + self.heartbeat,
            // The handshake has its own time-out, and a peer without pings may be silent.
            None => Instant::now() + Duration::from_secs(3_600),
        }
    }

    async fn on_silence(&mut self) -> Result<(), CloseReason> {
        if self.pinged_at.is_none() {
            self.session.ping(&mut self.outbox);
            self.pinged_at = Some(Instant::now());
            return Ok(());
        }
        self.inbox.reserve(READ_BYTES);
        match timeout(LAST_READ_TIMEOUT, self.stream.read_buf(&mut self.inbox)).await {
            Ok(read) => self.on_read(read),
            Err(_) => Err(CloseReason::Silent(self.silence_max)),
        }
    }
}
