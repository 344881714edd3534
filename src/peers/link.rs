//! One bidirectional gRPC stream between two replicas: framed messages out through a short queue, messages in, and the
//! handshake with which each stream begins.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use prost::Message;
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::frame::framed;
use super::handshake::{Handshake, Identity, PeerIdentity, Refusal, Side};
use super::wire::PeerMessage;
use super::wire::peer_message::Kind;
use crate::http::connection_tasks::ConnectionTasks;

/// Messages that wait for the connection. A replica that takes none gets the newest state later, not each state.
const QUEUED_MESSAGES: usize = 4;

/// Why there is no stream, or no longer one.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("nothing listens there")]
    NotListening,
    /// The network, or the other side.
    #[error("{0}")]
    Lost(String),
    #[error("a malformed message: {0}")]
    Malformed(String),
    /// Another host, and there is no secret.
    #[error("{0}")]
    NotAllowed(&'static str),
    /// This side refused the other one.
    #[error("{0}")]
    Refused(Refusal),
    #[error("refused by the other replica: {0}")]
    RefusedByPeer(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unauthenticated
            | Code::FailedPrecondition
            | Code::ResourceExhausted
            | Code::Unimplemented
            | Code::PermissionDenied => Self::RefusedByPeer(status.message().to_owned()),
            _ => Self::Lost(status.message().to_owned()),
        }
    }
}

/// A stream whose other side has proved who it is.
#[derive(Debug)]
pub struct Link {
    pub peer: PeerIdentity,
    pub side: Side,
    raw: RawLink,
}

/// A stream that just began.
#[derive(Debug)]
pub(super) struct RawLink {
    outgoing: Outgoing,
    receiving: ReceivingHalf,
}

/// Sends framed messages on one stream. The stream ends when all are dropped.
pub type Outgoing = mpsc::Sender<Result<Bytes, Status>>;

impl Link {
    /// Waits for room, which a slow receiver makes.
    pub async fn send(&self, message: Bytes) -> Result<(), Failure> {
        self.raw.send(message).await
    }

    /// The next message with its size in bytes; `None` after the last one.
    pub async fn receive(&mut self) -> Result<Option<(Option<Kind>, usize)>, Failure> {
        self.raw.receiving.receive().await
    }

    /// Takes the sending half, so that only the caller keeps the stream open.
    pub(super) fn split(self) -> (Outgoing, ReceivingHalf) {
        (self.raw.outgoing, self.raw.receiving)
    }
}

#[derive(Debug)]
pub(super) struct ReceivingHalf {
    incoming: Streaming<Bytes>,
    /// Of a stream that this side opened. Dropping it closes the connection.
    _connection: Option<ConnectionTasks>,
}

impl ReceivingHalf {
    pub(super) async fn receive(&mut self) -> Result<Option<(Option<Kind>, usize)>, Failure> {
        let Some(bytes) = self.incoming.message().await? else {
            return Ok(None);
        };
        let size = bytes.len();
        let message = PeerMessage::decode(bytes);
        let message = message.map_err(|error| Failure::Malformed(error.to_string()))?;
        Ok(Some((message.kind, size)))
    }
}

impl RawLink {
    /// The half of a stream that this side opened, with what it sends.
    pub(super) fn channel() -> (Outgoing, Queue) {
        let (sender, receiver) = mpsc::channel(QUEUED_MESSAGES);
        (sender, Queue(receiver))
    }

    /// `connection`: of a stream that this side opened.
    pub(super) fn new(
        outgoing: Outgoing,
        incoming: Streaming<Bytes>,
        connection: Option<ConnectionTasks>,
    ) -> Self {
        Self {
            outgoing,
            receiving: ReceivingHalf {
                incoming,
                _connection: connection,
            },
        }
    }

    async fn send(&self, message: Bytes) -> Result<(), Failure> {
        let sent = self.outgoing.send(Ok(message)).await;
        sent.map_err(|_| Failure::Lost("the connection is closed".to_owned()))
    }

    async fn expect(&mut self) -> Result<Kind, Failure> {
        let message = self.receiving.receive().await?;
        message
            .and_then(|(kind, _)| kind)
            .ok_or_else(|| Failure::Lost("the stream ended in its handshake".to_owned()))
    }

    /// Exchanges hellos and proofs.
    pub(super) async fn shake_hands(
        mut self,
        identity: &Identity,
        side: Side,
        limit: Duration,
    ) -> Result<Link, Failure> {
        match tokio::time::timeout(limit, self.exchange(identity, side)).await {
            Ok(Ok(peer)) => Ok(Link {
                peer,
                side,
                raw: self,
            }),
            Ok(Err(Failure::Refused(refusal))) => {
                let _ = self.outgoing.send(Err(status_of(&refusal))).await;
                Err(Failure::Refused(refusal))
            }
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(Failure::Lost(format!("no handshake within {limit:?}"))),
        }
    }

    async fn exchange(&mut self, identity: &Identity, side: Side) -> Result<PeerIdentity, Failure> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|error| Failure::Lost(error.to_string()))?;
        let mut handshake = Handshake::new(identity, side, nonce);
        self.send(framed(Kind::Hello(handshake.hello()))).await?;
        match self.expect().await? {
            Kind::Hello(hello) => handshake.on_hello(&hello).map_err(Failure::Refused)?,
            _ => return Err(unexpected("a hello")),
        }
        let proof = handshake.proof().map_err(Failure::Refused)?;
        // The dialer proves first.
        if side == Side::Dialer {
            self.send(framed(Kind::Proof(proof.clone()))).await?;
        }
        let peer = match self.expect().await? {
            Kind::Proof(theirs) => handshake.on_proof(&theirs).map_err(Failure::Refused)?,
            _ => return Err(unexpected("a proof")),
        };
        if side == Side::Acceptor {
            self.send(framed(Kind::Proof(proof))).await?;
        }
        Ok(peer)
    }
}

fn unexpected(expected: &str) -> Failure {
    Failure::Lost(format!(
        "the other side sent something else than {expected}"
    ))
}

/// What the other side is sent.
fn status_of(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::Secret => Status::unauthenticated("`peers.secret` differs"),
        Refusal::Itself => Status::failed_precondition("both sides are one replica"),
        Refusal::Version(_) | Refusal::Malformed(_) => {
            Status::failed_precondition(refusal.to_string())
        }
    }
}

/// The messages of one stream on their way out.
#[derive(Debug)]
pub(super) struct Queue(mpsc::Receiver<Result<Bytes, Status>>);

impl Stream for Queue {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

/// Serves the call by which a replica that starts copies trees, until it ends.
#[derive(Clone)]
pub struct TreeHandler(Arc<dyn Fn(Link) -> Serving + Send + Sync>);

pub type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

impl fmt::Debug for TreeHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeHandler").finish_non_exhaustive()
    }
}

impl TreeHandler {
    pub fn new(serve: impl Fn(Link) -> Serving + Send + Sync + 'static) -> Self {
        Self(Arc::new(serve))
    }

    pub(super) async fn serve(&self, link: Link) {
        (self.0)(link).await;
    }
}
