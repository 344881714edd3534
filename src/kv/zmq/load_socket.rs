//! The load that an engine publishes beside its KV events (SGLang's `--load-publish-endpoint`): `topic | number | payload`,
//! on each change and about every second. No report depends on another one, so a lost one is not asked for.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use super::connection::{CloseReason, Connection};
use super::endpoint::Endpoint;
use super::settings::Settings;
use super::zmtp::{Parts, Role};
use crate::kv::event::Load;
use crate::kv::msgpack::load_stat;
use crate::kv::reconnects::{Reconnects, jittered};

/// A subscription, which connects again by itself.
#[derive(Debug)]
pub struct LoadSocket {
    endpoint: Endpoint,
    topic: Bytes,
    settings: Settings,
    connection: Option<Box<Connection>>,
    reconnects: Reconnects,
    /// Before the next attempt to connect, less a random part.
    wait: Option<Duration>,
}

impl LoadSocket {
    pub fn new(endpoint: Endpoint, topic: &str, settings: Settings) -> Self {
        Self {
            endpoint,
            topic: Bytes::copy_from_slice(topic.as_bytes()),
            settings,
            connection: None,
            reconnects: Reconnects::default(),
            wait: None,
        }
    }

    /// The next report, or why there is none: for the log.
    pub async fn next(&mut self) -> Result<Load, String> {
        match self.parts().await {
            Ok(parts) => {
                let payload = parts.last().map(AsRef::as_ref).unwrap_or_default();
                load_stat::decode(payload).map_err(|error| error.to_string())
            }
            Err(closed) => {
                self.connection = None;
                let (backoff, max_backoff) = (self.settings.backoff, self.settings.max_backoff);
                self.wait = Some(self.reconnects.on_closed(
                    tokio::time::Instant::now(),
                    backoff,
                    max_backoff,
                ));
                Err(closed.to_string())
            }
        }
    }

    async fn parts(&mut self) -> Result<Parts, CloseReason> {
        if let Some(connection) = &mut self.connection {
            return connection.message().await;
        }
        if let Some(wait) = self.wait {
            sleep(jittered(wait, fastrand::f64())).await;
        }
        let topic = self.topic.clone();
        let role = Role::Subscriber { topic };
        let (connection, early) = Connection::open(&self.endpoint, role, &self.settings).await?;
        self.reconnects.on_connected(tokio::time::Instant::now());
        let connection = self.connection.insert(Box::new(connection));
        match early {
            Some(parts) => Ok(parts),
            None => connection.message().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::{TcpListener, TcpStream};
    use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

    use super::*;

    /// Publishes the same report again and again. Until somebody has subscribed, it is dropped.
    async fn publish(socket: &mut PubSocket, running: u8) {
        let payload = [b"\x95\xa8LoadStat".as_slice(), &[running, 0, 1, 4]].concat();
        let frames = ["load".into(), vec![0; 8].into(), Bytes::from(payload)];
        let message = ZmqMessage::try_from(frames.to_vec()).unwrap();
        loop {
            socket.send(message.clone()).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn report(load: &mut LoadSocket) -> Load {
        let reported = async {
            loop {
                if let Ok(load) = load.next().await {
                    return load;
                }
            }
        };
        let reported = tokio::time::timeout(Duration::from_secs(20), reported);
        reported.await.unwrap()
    }

    #[tokio::test]
    async fn reports_are_read_once_somebody_publishes_them() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp://{}", free.local_addr().unwrap());
        drop(free);
        let mut load = LoadSocket::new(at.parse().unwrap(), "load", Settings::default());
        assert!(load.next().await.unwrap_err().contains("cannot connect"));
        let mut socket = PubSocket::new();
        socket.bind(&at).await.unwrap();
        tokio::select! {
            () = publish(&mut socket, 3) => unreachable!("it never ends"),
            load = report(&mut load) => {
                assert_eq!((load.running_requests, load.token_usage), (3, 0.25));
            }
        }
    }

    #[tokio::test]
    async fn a_connection_that_was_cut_is_made_anew() {
        let mut socket = PubSocket::new();
        let publisher = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let publisher = publisher.trim_start_matches("tcp://").to_owned();
        let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = format!("tcp://{}", between.local_addr().unwrap());
        let mut load = LoadSocket::new(at.parse().unwrap(), "load", Settings::default());
        // Passes one connection on, until it is dropped.
        let pass = async || {
            let (mut near, _) = between.accept().await.unwrap();
            let mut far = TcpStream::connect(&*publisher).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
        };
        let followed = async {
            for _ in 0..3 {
                tokio::select! {
                    () = pass() => unreachable!("neither side closes"),
                    load = report(&mut load) => assert_eq!(load.running_requests, 3),
                }
                // What had arrived is read before the end of the connection is seen.
                while load.next().await.is_ok() {}
            }
        };
        tokio::select! {
            () = publish(&mut socket, 3) => unreachable!("it never ends"),
            () = followed => {}
        }
    }
}
