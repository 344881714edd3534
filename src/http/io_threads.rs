//! The threads that serve connections. Each has a single-threaded runtime of its own.
//!
//! A connection stays on its thread together with everything it does, engine connections included while it uses
//! them: no task moves between threads, and no thread wakes another one for a token. On two cores this took a
//! third off the CPU cost of a stream, compared with one runtime that shares its tasks among its threads.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::{io, thread};

use tokio::net::TcpStream;
use tokio::runtime;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Into how many shards things are divided by thread. With more threads than this, some share a shard and contend for its lock.
pub const SHARDS: usize = 32;

thread_local! {
    static INDEX: Cell<usize> = const { Cell::new(0) };
}

/// The calling I/O thread's number, from 1; 0 on any other thread.
pub fn index() -> usize {
    INDEX.get()
}

/// Makes the calling thread count as an I/O thread for as long as this lives. Do not move it, or a
/// future that was polled under it, to another thread.
#[derive(Debug)]
pub struct IoThreadScope {
    before: usize,
}

impl IoThreadScope {
    pub fn enter(number: usize) -> Self {
        Self {
            before: INDEX.replace(number),
        }
    }
}

impl Drop for IoThreadScope {
    fn drop(&mut self) {
        INDEX.set(self.before);
    }
}

/// The pool of I/O threads. They end when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct IoThreads(Arc<Vec<IoThread>>);

#[derive(Debug)]
struct IoThread {
    thread: OffloadThread,
    connections: Arc<AtomicUsize>,
}

/// Counts a connection on its I/O thread for as long as it lives.
struct ConnectionCount(Arc<AtomicUsize>);

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl IoThreads {
    /// Starts `count` threads; 0 means one per core.
    pub fn start(count: u32) -> io::Result<Self> {
        let count = match count {
            0 => thread::available_parallelism().map_or(1, usize::from),
            count => count as usize,
        };
        let start = |number| {
            let name = format!("io-{number}");
            Ok(IoThread {
                thread: OffloadThread::build(thread::Builder::new(), &name, number, |_| {})?,
                connections: Arc::default(),
            })
        };
        let threads: io::Result<_> = (1..=count).map(start).collect();
        Ok(Self(Arc::new(threads?)))
    }

    /// One thread for connections that must not delay those on the I/O threads. It counts as none of these.
    pub fn single(name: &str) -> io::Result<Self> {
        let thread = IoThread {
            thread: OffloadThread::start(name)?,
            connections: Arc::default(),
        };
        Ok(Self(Arc::new(vec![thread])))
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The I/O thread with the fewest connections, and its count with one more.
    fn least(&self) -> (&IoThread, ConnectionCount) {
        let threads = self.0.iter();
        let least = threads.min_by_key(|thread| thread.connections.load(Relaxed));
        let least = least.expect("there is at least one I/O thread");
        least.connections.fetch_add(1, Relaxed);
        (least, ConnectionCount(least.connections.clone()))
    }

    /// Runs a task that no client's connection started on the I/O thread with the fewest connections, where it
    /// counts as one.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (least, count) = self.least();
        drop(least.thread.runtime.spawn(async move {
            let _count = count;
            task.await;
        }));
    }

    /// Moves a connection to the I/O thread with the fewest connections. `serve` makes the task that
    /// runs there.
    pub(super) fn spawn_connection<F>(
        &self,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // Deregisters the socket from this runtime, so that the other one can register it.
        let stream = stream.into_std()?;
        let (least, count) = self.least();
        drop(least.thread.runtime.spawn(async move {
            let _count = count;
            // Fails only when the process is out of file descriptors; the client sees a closed socket.
            if let Ok(stream) = TcpStream::from_std(stream) {
                serve(stream).await;
            }
        }));
        Ok(())
    }
}

/// A thread that runs a single-threaded runtime until this is dropped: an I/O thread, or one more for CPU-heavy or
/// background work that must not delay those.
#[derive(Debug)]
pub struct OffloadThread {
    runtime: runtime::Handle,
    _stop: DropGuard,
}

impl OffloadThread {
    pub fn start(name: &str) -> io::Result<Self> {
        Self::build(thread::Builder::new(), name, 0, |_| {})
    }

    /// As [`OffloadThread::start`]. The thread calls `before_park` each time before it waits for something to do.
    pub fn start_with(name: &str, before_park: fn()) -> io::Result<Self> {
        Self::build(thread::Builder::new(), name, 0, |builder| {
            builder.on_thread_park(before_park);
        })
    }

    /// `number`: that of an I/O thread, else 0.
    fn build(
        thread: thread::Builder,
        name: &str,
        number: usize,
        set: impl FnOnce(&mut runtime::Builder),
    ) -> io::Result<Self> {
        // The system says only that something is used up.
        let failed = |error: io::Error| {
            let message = format!(
                "cannot start the thread `{name}`: {error} (limits of open files and of threads: ulimit -n and -u, \
                 LimitNOFILE, TasksMax, pids.max)"
            );
            io::Error::new(error.kind(), message)
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let (sender, built) = mpsc::channel::<runtime::Runtime>();
        // The thread comes first: a runtime that gets none would be dropped here, which panics in a task.
        let started = thread.name(name.to_owned()).spawn(move || {
            let Ok(runtime) = built.recv() else { return };
            let _scope = IoThreadScope::enter(number);
            runtime.block_on(stopped);
            // Drops the tasks that are left.
            drop(runtime);
        });
        started.map_err(failed)?;
        let mut builder = runtime::Builder::new_current_thread();
        set(&mut builder);
        let runtime = builder.enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        // The thread waits for it.
        let _ = sender.send(runtime);
        Ok(Self {
            runtime: handle,
            _stop: stop.drop_guard(),
        })
    }

    pub fn runtime(&self) -> &runtime::Handle {
        &self.runtime
    }

    /// Runs `work` on this thread; calls run one after the other. `None` if the thread has ended.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.runtime.spawn(async move { work() }).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_thread_that_the_system_refuses_is_an_error_that_names_it() {
        // No address space has room for such a stack.
        let thread = thread::Builder::new().stack_size(1 << 50);
        let started = OffloadThread::build(thread, "files", 0, |_| {});
        let error = started.unwrap_err().to_string();
        let expected = "cannot start the thread `files`: ";
        assert!(error.starts_with(expected), "{error}");
    }

    #[tokio::test]
    async fn tasks_are_spread_over_the_threads() {
        let threads = IoThreads::start(2).unwrap();
        let (sender, mut receiver) = mpsc::unbounded_channel();
        for _ in 0..4 {
            let sender = sender.clone();
            threads.spawn(async move {
                sender.send(index()).unwrap();
                std::future::pending().await
            });
        }
        let mut counts = [0; 3];
        for _ in 0..4 {
            counts[receiver.recv().await.unwrap()] += 1;
        }
        assert_eq!(counts, [0, 2, 2]);
    }

    #[tokio::test]
    async fn connections_are_spread_evenly_and_stay_on_their_thread() {
        let threads = IoThreads::start(3).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(
                TcpStream::connect(listener.local_addr().unwrap())
                    .await
                    .unwrap(),
            );
            let (stream, _) = listener.accept().await.unwrap();
            let sender = sender.clone();
            let serve = move |stream: TcpStream| async move {
                let before = index();
                tokio::task::yield_now().await;
                sender.send((before, index())).unwrap();
                // Stays open until the client leaves.
                let _ = stream.readable().await;
            };
            threads.spawn_connection(stream, serve).unwrap();
        }
        let mut counts = [0; 4];
        for _ in 0..6 {
            let (before, after) = receiver.recv().await.unwrap();
            assert_eq!(before, after);
            counts[before] += 1;
        }
        assert_eq!(counts, [0, 2, 2, 2]);
        assert_eq!(index(), 0);
    }
}
