//! Accepts connections until the drain begins, no more at a time than a limit.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

use super::drain::Tasks;

/// The first and the longest pause after an accept that failed.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    /// Whose connections these are, for logs.
    of: &'static str,
    /// Free ones are connections that may still be accepted.
    pub(super) slots: Arc<Semaphore>,
    tasks: Tasks,
    pause: Duration,
}

/// A connection. It counts until its slot is dropped.
#[derive(Debug)]
pub struct Accepted {
    pub stream: TcpStream,
    pub peer: IpAddr,
    pub slot: OwnedSemaphorePermit,
}

impl Acceptor {
    pub fn new(listener: TcpListener, of: &'static str, max: usize, tasks: Tasks) -> Self {
        Self {
            listener,
            of,
            slots: Arc::new(Semaphore::new(max)),
            tasks,
            pause: PAUSE,
        }
    }

    /// The next connection; `None` once the drain begins. `on_error` counts accepts that failed.
    pub async fn next(&mut self, on_error: impl Fn()) -> Option<Accepted> {
        let mut stopped = std::pin::pin!(self.tasks.stopped());
        loop {
            let accepted = tokio::select! {
                () = &mut stopped => return None,
                accepted = async {
                    let slot = self.slots.clone().acquire_owned().await.expect("the semaphore is never closed");
                    (slot, self.listener.accept().await)
                } => accepted,
            };
            match accepted {
                (slot, Ok((stream, peer))) => {
                    self.pause = PAUSE;
                    let peer = peer.ip();
                    return Some(Accepted { stream, peer, slot });
                }
                (_, Err(error)) => {
                    on_error();
                    // Mostly out of file descriptors; accepting again at once would fail again.
                    let (of, pause) = (self.of, self.pause);
                    warn!(%error, ?pause, of, "cannot accept a connection; accepting again after a pause");
                    tokio::select! {
                        () = &mut stopped => return None,
                        () = tokio::time::sleep(pause) => {}
                    }
                    self.pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_more_than_the_limit_are_accepted_and_none_after_the_drain_has_started() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tasks = Tasks::default();
        let mut acceptor = Acceptor::new(listener, "test", 1, tasks.clone());
        let _clients = [
            TcpStream::connect(address).await.unwrap(),
            TcpStream::connect(address).await.unwrap(),
        ];
        let first = acceptor.next(|| {}).await.unwrap();
        assert_eq!(acceptor.slots.available_permits(), 0);
        let second = tokio::time::timeout(Duration::from_millis(50), acceptor.next(|| {}));
        assert!(second.await.is_err());
        drop(first);
        let second = acceptor.next(|| {}).await.unwrap();
        assert!(second.peer.is_loopback());
        tasks.stop();
        assert!(acceptor.next(|| {}).await.is_none());
    }
}
