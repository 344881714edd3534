//! The addresses of one server's name. It is looked up for each new connection. While the system's resolver does not
//! answer, or cannot say, the last addresses are used: that says nothing about the server.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

/// What the C library says (`gai_strerror` of `EAI_AGAIN`) when no name server has answered, or only that it failed: glibc's
/// text and musl's. The standard library gives no code.
const NO_ANSWER: [&str; 2] = ["Temporary failure in name resolution", "Try again"];

type Resolved = io::Result<Vec<SocketAddr>>;

#[derive(Debug, Default)]
pub(super) struct Resolver {
    last: Arc<Mutex<LastAddresses>>,
}

#[derive(Debug, Default)]
struct LastAddresses {
    /// What the name had when it was last found; empty once it is known not to exist.
    addresses: Vec<SocketAddr>,
    /// A lookup that took too long. Until it ends there is no other one, so that a resolver that hangs takes no thread for
    /// each connection.
    late: Option<JoinHandle<Resolved>>,
}

impl Resolver {
    /// The addresses of `host_and_port`, which is the same in each call. If the name was found before, it waits no longer
    /// than `patience`.
    pub(super) async fn addresses(&self, host_and_port: &str, patience: Duration) -> Resolved {
        let name = host_and_port.to_owned();
        self.look_up(patience, move || Ok(name.to_socket_addrs()?.collect()))
            .await
    }

    async fn look_up(
        &self,
        patience: Duration,
        look_up: impl FnOnce() -> Resolved + Send + 'static,
    ) -> Resolved {
        let known = self.last.lock().instead_of_lookup();
        if let Some(known) = known {
            return Ok(known);
        }
        let last = self.last.clone();
        let mut running = spawn_blocking(move || {
            let found = look_up();
            last.lock().on_ended(found)
        });
        if let Ok(ended) = timeout(patience, &mut running).await {
            return ended?;
        }
        let known = self.last.lock().on_late(running);
        match known {
            Ok(known) => Ok(known),
            Err(running) => running.await?,
        }
    }
}

impl LastAddresses {
    /// The last addresses, if a lookup hangs.
    fn instead_of_lookup(&self) -> Option<Vec<SocketAddr>> {
        let late = self.late.as_ref();
        let hangs = late.is_some_and(|late| !late.is_finished());
        (hangs && !self.addresses.is_empty()).then(|| self.addresses.clone())
    }

    /// The last addresses, if a lookup takes too long; the lookup itself where there are none.
    fn on_late(
        &mut self,
        running: JoinHandle<Resolved>,
    ) -> Result<Vec<SocketAddr>, JoinHandle<Resolved>> {
        if self.addresses.is_empty() {
            return Err(running);
        }
        self.late = Some(running);
        Ok(self.addresses.clone())
    }

    /// What is used after a lookup has ended like this.
    fn on_ended(&mut self, found: Resolved) -> Resolved {
        match found {
            Ok(found) => self.addresses = found,
            Err(error) if self.addresses.is_empty() || !shows_nothing(&error) => {
                // Another server may have the addresses of a name that exists no more.
                self.addresses.clear();
                return Err(error);
            }
            Err(_) => {}
        }
        Ok(self.addresses.clone())
    }
}

/// Whether a lookup failed without an answer: the name may be as it was.
fn shows_nothing(error: &io::Error) -> bool {
    let text = error.to_string();
    // With a code, it is this host that lacked something.
    error.raw_os_error().is_some() || NO_ANSWER.iter().any(|known| text.ends_with(known))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn found(last: u8) -> Resolved {
        Ok(vec![SocketAddr::from(([10, 0, 0, last], 80))])
    }

    fn failed(why: &str) -> Resolved {
        let text = format!("failed to lookup address information: {why}");
        Err(io::Error::other(text))
    }

    #[tokio::test]
    async fn the_last_addresses_are_used_while_no_name_server_answers() {
        let resolver = Resolver::default();
        let look_up = async |answer: fn() -> Resolved| resolver.look_up(PATIENCE, answer).await;
        let no_answer = || failed(NO_ANSWER[0]);
        look_up(no_answer).await.unwrap_err();
        assert_eq!(look_up(|| found(1)).await.unwrap(), found(1).unwrap());
        assert_eq!(look_up(no_answer).await.unwrap(), found(1).unwrap());
        assert_eq!(look_up(|| found(2)).await.unwrap(), found(2).unwrap());
        let lacks_memory = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
        assert_eq!(look_up(lacks_memory).await.unwrap(), found(2).unwrap());
        // The name exists no more, so that its addresses may be another server's.
        let unknown = || failed("Name or service not known");
        look_up(unknown).await.unwrap_err();
        look_up(no_answer).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_lookup_that_hangs_is_not_waited_for_and_not_begun_again() {
        let resolver = Resolver::default();
        // Without an address there is nothing else to do than to wait.
        let first = resolver.look_up(Duration::ZERO, || found(1)).await;
        assert_eq!(first.unwrap(), found(1).unwrap());
        let (answer, answered) = mpsc::channel::<()>();
        let hangs = move || {
            answered.recv().unwrap();
            found(2)
        };
        let second = resolver.look_up(Duration::ZERO, hangs).await;
        assert_eq!(second.unwrap(), found(1).unwrap());
        let third = resolver.look_up(PATIENCE, || found(3)).await;
        assert_eq!(third.unwrap(), found(1).unwrap());
        answer.send(()).unwrap();
        let late = resolver.last.lock().late.take().unwrap();
        assert_eq!(late.await.unwrap().unwrap(), found(2).unwrap());
        let fourth = resolver.look_up(PATIENCE, || failed(NO_ANSWER[1])).await;
        assert_eq!(fourth.unwrap(), found(2).unwrap());
    }
}
