//! The threads that carry connections, each with a runtime of its own.
//!
//! A connection stays on its thread with all that it does, engine connections included: no task moves,
//! no thread wakes another for a token. On two cores this took a third off the CPU of a stream
//! beside one runtime that shares its tasks among its threads.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::{io, thread};

use tokio::net::TcpStream;
use tokio::runtime;
use tokio_util::sync::{CancellationToken, DropGuard};

thread_local! {
    static INDEX: Cell<usize> = const { Cell::new(0) };
}

/// Which carrier the calling thread is, from 1; 0 for any other thread.
pub fn index() -> usize {
    INDEX.get()
}

/// The calling thread is a carrier for as long as this lives. What is polled on it must stay on it.
#[derive(Debug)]
pub struct Carrying {
    before: usize,
}

impl Carrying {
    pub fn begin(number: usize) -> Self {
        Self {
            before: INDEX.replace(number),
        }
    }
}

impl Drop for Carrying {
    fn drop(&mut self) {
        INDEX.set(self.before);
    }
}

/// A set of carriers. They end when the last clone is gone.
#[derive(Clone, Debug)]
pub struct Carriers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    carriers: Vec<Carrier>,
    _ends: Vec<DropGuard>,
}

/// One more thread with a runtime of its own, for work in the background that must not delay those
/// that carry. It ends when this is dropped.
#[derive(Debug)]
pub struct Aside {
    runtime: runtime::Handle,
    _end: DropGuard,
}

impl Aside {
    pub fn start(name: &str) -> io::Result<Self> {
        let (runtime, end) = start_thread(name.to_owned(), 0)?;
        Ok(Self {
            runtime,
            _end: end.drop_guard(),
        })
    }

    pub fn runtime(&self) -> &runtime::Handle {
        &self.runtime
    }

    /// Does there what would hold a carrier up, one after the other. `None` if the thread has ended.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.runtime.spawn(async move { work() }).await.ok()
    }
}

#[derive(Debug)]
struct Carrier {
    runtime: runtime::Handle,
    connections: Arc<AtomicUsize>,
}

/// Counts a connection on its carrier for as long as it lives.
struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Carriers {
    /// Starts `count` threads; 0 for one a core.
    pub fn start(count: u32) -> io::Result<Self> {
        let count = match count {
            0 => thread::available_parallelism().map_or(1, usize::from),
            count => count as usize,
        };
        let mut carriers = Vec::with_capacity(count);
        let mut ends = Vec::with_capacity(count);
        for number in 1..=count {
            let (runtime, end) = start_thread(format!("carrier-{number}"), number)?;
            ends.push(end.drop_guard());
            carriers.push(Carrier {
                runtime,
                connections: Arc::default(),
            });
        }
        Ok(Self(Arc::new(Inner {
            carriers,
            _ends: ends,
        })))
    }

    pub fn count(&self) -> usize {
        self.0.carriers.len()
    }

    /// Gives a connection to the carrier that has the fewest. `serve` makes the task that runs there.
    pub(super) fn carry<F>(
        &self,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let least = self
            .0
            .carriers
            .iter()
            .min_by_key(|carrier| carrier.connections.load(Relaxed));
        let carrier = least.expect("there is at least one carrier");
        // Out of this runtime's poll set, into the other's.
        let stream = stream.into_std()?;
        carrier.connections.fetch_add(1, Relaxed);
        let seat = Seat(carrier.connections.clone());
        let handle = carrier.runtime.spawn(async move {
            let _seat = seat;
            // Fails only when the process is out of files, and then the client sees a closed socket.
            if let Ok(stream) = TcpStream::from_std(stream) {
                serve(stream).await;
            }
        });
        drop(handle);
        Ok(())
    }
}

/// A thread with a runtime, until the token is cancelled.
fn start_thread(name: String, number: usize) -> io::Result<(runtime::Handle, CancellationToken)> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let handle = runtime.handle().clone();
    let end = CancellationToken::new();
    let ended = end.clone().cancelled_owned();
    thread::Builder::new().name(name).spawn(move || {
        let _carrying = Carrying::begin(number);
        runtime.block_on(ended);
        // With it end the tasks that are left on it.
        drop(runtime);
    })?;
    Ok((handle, end))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn connections_are_spread_evenly_and_stay_on_their_thread() {
        let carriers = Carriers::start(3).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (tell, mut told) = mpsc::unbounded_channel();
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(
                TcpStream::connect(listener.local_addr().unwrap())
                    .await
                    .unwrap(),
            );
            let (stream, _) = listener.accept().await.unwrap();
            let tell = tell.clone();
            let serve = move |stream: TcpStream| async move {
                let before = index();
                tokio::task::yield_now().await;
                tell.send((before, index())).unwrap();
                // Keeps its seat until the client leaves.
                let _ = stream.readable().await;
            };
            carriers.carry(stream, serve).unwrap();
        }
        let mut counts = [0; 4];
        for _ in 0..6 {
            let (before, after) = told.recv().await.unwrap();
            assert_eq!(before, after);
            counts[before] += 1;
        }
        assert_eq!(counts, [0, 2, 2, 2]);
        assert_eq!(index(), 0);
    }
}
