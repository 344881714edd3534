//! Accepts connections until the drain begins, no more at a time than a limit.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

use super::drain::Tasks;
use crate::observe;
use crate::observe::log_once::LogOnce;

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
    failures: LogOnce,
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
            failures: LogOnce::default(),
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
                    self.on_accepted();
                    let peer = peer.ip();
                    return Some(Accepted { stream, peer, slot });
                }
                (_, Err(error)) => {
                    on_error();
                    let (pause, is_logged) = self.on_failure(observe::now(), &error);
                    if is_logged {
                        let of = self.of;
                        warn!(%error, of, "cannot accept a connection; accepting again after a pause each time");
                    }
                    tokio::select! {
                        () = &mut stopped => return None,
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            }
        }
    }

    fn on_accepted(&mut self) {
        self.pause = PAUSE;
        self.failures.reset();
    }

    /// The pause after an accept that failed, and whether that is logged. Mostly the process is out of file descriptors:
    /// accepting again at once would fail again, and one that is closed now and then lets a connection in between.
    fn on_failure(&mut self, now: Instant, error: &io::Error) -> (Duration, bool) {
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_MAX);
        (pause, self.failures.should_log(now, &error.to_string()))
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
    #[tokio::test]
    async fn a_lack_of_file_descriptors_is_logged_once_though_some_connections_are_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut acceptor = Acceptor::new(listener, "test", 1, Tasks::default());
        let start = observe::now();
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        let failures = (0..600).filter(|seconds| {
            if seconds % 10 == 0 {
                acceptor.on_accepted();
            }
            let now = start + Duration::from_secs(*seconds);
            acceptor.on_failure(now, &error).1
        });
        assert_eq!(failures.count(), 1);
    }
}
