//! The ZeroMQ sockets of one rank's KV events: sends queued batches and answers replay requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tracing::debug;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::gate::{Cutter, Gate};
use super::outlet::{Command, Outlet};
use super::settings::Layout;

/// Pause after a receive error.
const ERROR_PAUSE: Duration = Duration::from_millis(20);
/// The sequence number of the end marker of a replay.
const END_MARKER: [u8; 8] = [0xff; 8];

/// The sockets' side of a publisher.
pub(crate) struct Publisher {
    pub(crate) outlet: Arc<Outlet>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) events: Guarded<PubSocket>,
    pub(super) replay: Option<Guarded<RouterSocket>>,
}

/// A ZeroMQ socket behind a [`Gate`].
pub(super) struct Guarded<S> {
    pub(super) gate: Gate,
    socket: S,
}

impl<S: Socket> Guarded<S> {
    pub(super) async fn bind(listener: TcpListener) -> io::Result<Self> {
        let behind = std::net::TcpListener::bind("127.0.0.1:0")?;
        let inner = behind.local_addr()?;
        let mut socket = S::new();
        socket
            .bind_listener(behind)
            .await
            .map_err(io::Error::other)?;
        let cutter = Cutter::default();
        let gate = Gate {
            listener,
            inner,
            cutter,
        };
        Ok(Self { gate, socket })
    }
}

impl Publisher {
    /// Serves the sockets while it is polled.
    pub(crate) async fn run(self) -> Infallible {
        let outlet = self.outlet;
        let Guarded { gate, socket } = self.events;
        let cutter = gate.cutter.clone();
        let events = send(&outlet, self.commands, socket, &cutter);
        let replays = async {
            match self.replay {
                Some(replay) => serve_replays(&outlet, replay).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            never = gate.run() => never,
            never = events => never,
            never = replays => never,
        }
    }
}

async fn send(
    outlet: &Outlet,
    mut commands: mpsc::Receiver<Command>,
    mut socket: PubSocket,
    cutter: &Cutter,
) -> Infallible {
    loop {
        let Some(command) = commands.recv().await else {
            // Not reached: the outlet has the sender.
            std::future::pending().await
        };
        match command {
            Command::Cut => cutter.cut(),
            Command::Send { batch, due } => {
                tokio::time::sleep_until(due).await;
                outlet.until_not_silent().await;
                let frames = [outlet.topic.clone(), number(batch.sequence), batch.payload];
                if let Err(error) = socket.send(message(frames)).await {
                    debug!(%error, "KV event batch not sent");
                }
            }
        }
    }
}

async fn serve_replays(outlet: &Outlet, replay: Guarded<RouterSocket>) -> Infallible {
    let Guarded { gate, mut socket } = replay;
    let cutter = gate.cutter.clone();
    let answers = async {
        loop {
            match socket.recv().await {
                Ok(request) => answer(outlet, &mut socket, &request.into_vec(), &cutter).await,
                Err(error) => {
                    debug!(%error, "replay request not read");
                    tokio::time::sleep(ERROR_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        never = gate.run() => never,
        never = answers => never,
    }
}

async fn answer(outlet: &Outlet, socket: &mut RouterSocket, request: &[Bytes], cutter: &Cutter) {
    // Malformed requests are ignored, as in vLLM.
    let [client, _, first] = request else {
        return;
    };
    let Ok(first) = <[u8; 8]>::try_from(&first[..]) else {
        return;
    };
    outlet.until_not_silent().await;
    if outlet.faults.borrow().replay_refuse {
        cutter.cut();
        return;
    }
    let replayed = outlet.log.lock().replay(u64::from_be_bytes(first));
    let topic = || outlet.topic.clone();
    let batches = replayed.batches.into_iter();
    let batches = batches.map(|batch| (topic(), number(batch.sequence), batch.payload));
    let end = (Bytes::new(), Bytes::from_static(&END_MARKER), Bytes::new());
    for (topic, number, payload) in batches.chain(replayed.ends.then_some(end)) {
        let mut frames = vec![client.clone(), Bytes::new()];
        // The releases with the array layout leave the topic out.
        if outlet.settings.layout == Layout::Map {
            frames.push(topic);
        }
        frames.extend([number, payload]);
        if let Err(error) = socket.send(message(frames)).await {
            debug!(%error, "replay not sent; the client has disconnected");
            return;
        }
    }
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

fn message(frames: impl Into<Vec<Bytes>>) -> ZmqMessage {
    ZmqMessage::try_from(frames.into()).expect("there are frames")
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Publisher").field(&self.outlet).finish()
    }
}
