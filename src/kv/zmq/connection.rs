//! One TCP connection that speaks ZMTP, from its dial to its end. Never another one: what it gives was
//! said by one process, and its end is told in its place among the words.
//!
//! Holds no queue. What is not asked for stays in the sockets' buffers, and then with the peer: a
//! publisher that may not wait drops messages, which shows as a gap in their numbers.

use std::time::Duration;
use std::{fmt, io};

use bytes::BytesMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::zmtp::{Bounds, Fault, Heard, Parts, Role, Session};
use super::{Endpoint, Settings};

/// Read at once; a batch of a busy engine is smaller.
const READ_BYTES: usize = 64 * 1_024;
/// A message is at most: identity, delimiter, topic, number, payload. Some proxies add one.
const PARTS_MAX: usize = 6;
/// What we say is small; a peer that leaves more than this unread reads nothing.
const OUTBOX_BYTES_MAX: usize = 64 * 1_024;
/// More than this the kernel refuses.
const KEEPALIVE_MAX: Duration = Duration::from_secs(3_600);
/// After a stall of our own the answer may be waiting in the socket, unseen.
const LAST_LOOK: Duration = Duration::from_millis(20);

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    Unreachable(io::Error),
    NoHandshake,
    Closed,
    Broken(io::Error),
    Silent(Duration),
    Unread,
    Fault(Fault),
}

impl End {
    /// For a counter's label.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            End::Unreachable(_) => "unreachable",
            End::NoHandshake => "no_handshake",
            End::Closed => "closed",
            End::Broken(_) => "broken",
            End::Silent(_) => "silent",
            End::Unread => "unread",
            End::Fault(Fault::TooLarge(_)) => "too_large",
            End::Fault(Fault::Protocol(_)) => "protocol",
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Unreachable(error) => write!(f, "cannot connect: {error}"),
            End::NoHandshake => f.write_str("connected, but no ZeroMQ answer in time"),
            End::Closed => f.write_str("closed by the other side"),
            End::Broken(error) => write!(f, "broken: {error}"),
            End::Silent(after) => write!(f, "no answer to a ping within {} ms", after.as_millis()),
            End::Unread => f.write_str("the other side asks, and does not read the answers"),
            End::Fault(fault) => write!(f, "not understood: {fault}"),
        }
    }
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        End::Fault(fault)
    }
}

enum Turn {
    Sent(io::Result<usize>),
    Read(io::Result<usize>),
    Silent,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    session: Session,
    inbox: BytesMut,
    outbox: BytesMut,
    heartbeat: Duration,
    silence_max: Duration,
    heard_at: Instant,
    /// When a ping was sent that nothing has been heard since.
    pinged_at: Option<Instant>,
}

impl Connection {
    /// Dials, and is ready when the peer is: a subscriber's subscription has then been read by it.
    pub(super) async fn open(
        endpoint: &Endpoint,
        role: Role,
        settings: &Settings,
    ) -> Result<(Self, Option<Parts>), End> {
        let limit = Duration::from_millis(settings.connect_timeout_ms);
        let dial = timeout(
            limit,
            TcpStream::connect((endpoint.host.as_str(), endpoint.port)),
        );
        let stream = match dial.await {
            Ok(dialled) => dialled.map_err(End::Unreachable)?,
            Err(_) => return Err(End::Unreachable(io::ErrorKind::TimedOut.into())),
        };
        let mut connection = Self::over(stream, role, settings).map_err(End::Unreachable)?;
        match timeout(limit, connection.handshake()).await {
            Ok(shaken) => shaken.map(|early| (connection, early)),
            Err(_) => Err(End::NoHandshake),
        }
    }

    fn over(stream: TcpStream, role: Role, settings: &Settings) -> io::Result<Self> {
        let heartbeat = Duration::from_millis(settings.heartbeat_ms);
        stream.set_nodelay(true)?;
        // For peers that answer no pings: the kernel at least sees a host or a way that is gone.
        let seconds = |time: Duration| time.clamp(Duration::from_secs(1), KEEPALIVE_MAX);
        let probes = TcpKeepalive::new()
            .with_time(seconds(heartbeat))
            .with_interval(seconds(heartbeat / 2))
            .with_retries(3);
        SockRef::from(&stream).set_tcp_keepalive(&probes)?;
        let mut outbox = BytesMut::new();
        let bounds = Bounds {
            message_bytes_max: settings.message_bytes_max,
            parts_max: PARTS_MAX,
        };
        Ok(Self {
            stream,
            session: Session::new(role, bounds, &mut outbox),
            inbox: BytesMut::new(),
            outbox,
            heartbeat,
            silence_max: Duration::from_millis(settings.silence_max_ms),
            heard_at: Instant::now(),
            pinged_at: None,
        })
    }

    /// Until the peer has read all that we sent, as its answer to a ping shows; a message shows it as
    /// well, and is given. Peers without pings are believed as soon as they are ready.
    async fn handshake(&mut self) -> Result<Option<Parts>, End> {
        loop {
            match self.hear().await? {
                Heard::Ready if self.session.can_ping() => self.session.ping(&mut self.outbox),
                Heard::Ready => {
                    self.stream
                        .write_all_buf(&mut self.outbox)
                        .await
                        .map_err(End::Broken)?;
                    return Ok(None);
                }
                Heard::Pong => return Ok(None),
                Heard::Message(parts) => return Ok(Some(parts)),
            }
        }
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) {
        self.session.send(parts, &mut self.outbox);
    }

    /// The next message, or the end. Dropping the future loses nothing.
    pub(super) async fn message(&mut self) -> Result<Parts, End> {
        loop {
            if let Heard::Message(parts) = self.hear().await? {
                return Ok(parts);
            }
        }
    }

    async fn hear(&mut self) -> Result<Heard, End> {
        loop {
            if let Some(heard) = self.session.read(&mut self.inbox, &mut self.outbox)? {
                return Ok(heard);
            }
            let deadline = self.deadline();
            self.inbox.reserve(READ_BYTES);
            let (mut reader, mut writer) = self.stream.split();
            let turn = tokio::select! {
                biased;
                // First, so that a flood cannot keep our answers back.
                sent = writer.write_buf(&mut self.outbox), if !self.outbox.is_empty() => {
                    Turn::Sent(sent)
                }
                read = reader.read_buf(&mut self.inbox) => Turn::Read(read),
                () = sleep_until(deadline) => Turn::Silent,
            };
            match turn {
                Turn::Sent(sent) => {
                    sent.map_err(End::Broken)?;
                }
                Turn::Read(read) => {
                    self.came(read)?;
                    // It could not be sent just now, or nothing would have been read.
                    if self.outbox.len() > OUTBOX_BYTES_MAX {
                        return Err(End::Unread);
                    }
                }
                Turn::Silent => self.silent().await?,
            }
        }
    }

    fn came(&mut self, read: io::Result<usize>) -> Result<(), End> {
        match read {
            Ok(0) => Err(End::Closed),
            Ok(_) => {
                self.heard_at = Instant::now();
                self.pinged_at = None;
                Ok(())
            }
            Err(error) => Err(End::Broken(error)),
        }
    }

    /// When to do something about silence.
    fn deadline(&self) -> Instant {
        match self.pinged_at {
            Some(pinged_at) => pinged_at + self.silence_max,
            None if self.session.can_ping() => self.heard_at + self.heartbeat,
            // During the handshake another limit holds; a peer that can't be asked may be silent.
            None => Instant::now() + Duration::from_secs(3_600),
        }
    }

    async fn silent(&mut self) -> Result<(), End> {
        if self.pinged_at.is_none() {
            self.session.ping(&mut self.outbox);
            self.pinged_at = Some(Instant::now());
            return Ok(());
        }
        self.inbox.reserve(READ_BYTES);
        match timeout(LAST_LOOK, self.stream.read_buf(&mut self.inbox)).await {
            Ok(read) => self.came(read),
            Err(_) => Err(End::Silent(self.silence_max)),
        }
    }
}
