//! The queue between those who write lines and the thread that writes them to standard error, or to where the usage
//! log goes.
//!
//! Logging copies the line into a bounded buffer and never waits: when the output blocks (a full
//! pipe, a stopped terminal, a slow disk) and the buffer is full, lines are dropped and counted. The thread writes
//! all queued lines with one call, so a line of the access log costs no system call of its own.

use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

/// The target of the access log's lines, for use in `log.level`.
pub const ACCESS_LOG: &str = "warmroute::access";

/// About 10,000 lines of the access log.
pub(super) const MAX_QUEUED_BYTES: usize = 4 << 20;
/// The thread waits this long for more lines before it writes: a wake-up for each line would cost more
/// than the line.
const BATCH_DELAY: Duration = Duration::from_millis(2);

/// Takes lines from any thread. Clones share one queue.
#[derive(Clone, Debug)]
pub(super) struct LogWriter(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    has_lines: Condvar,
    is_idle: Condvar,
    max_bytes: usize,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    queued: Vec<u8>,
    is_writing: bool,
    /// The thread ends once all is written.
    is_closed: bool,
}

impl LogWriter {
    /// Starts the thread that writes to `out`. With more than `max_bytes` of lines that wait to be written, further
    /// ones are dropped.
    pub(super) fn start(out: impl Write + Send + 'static, max_bytes: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue {
            state: Mutex::default(),
            has_lines: Condvar::new(),
            is_idle: Condvar::new(),
            max_bytes,
            dropped: AtomicU64::new(0),
        });
        let written = queue.clone();
        thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || written.write_to(out))?;
        Ok(Self(queue))
    }

    /// Lines dropped since the start, because the queue was full or the output failed.
    pub(super) fn dropped(&self) -> u64 {
        self.0.dropped.load(Relaxed)
    }

    /// Queues one line, or several.
    pub(super) fn push(&self, line: &[u8]) {
        self.0.push(line);
    }

    /// Ends the thread once it has written what is queued.
    pub(super) fn close(&self) {
        self.0.state.lock().is_closed = true;
        self.0.has_lines.notify_one();
    }

    /// Waits until every queued line is written, but no longer than `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let mut state = self.0.state.lock();
        let is_busy = |state: &mut State| state.is_writing || !state.queued.is_empty();
        self.0.is_idle.wait_while_for(&mut state, is_busy, limit);
    }
}

impl Queue {
    fn push(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.queued.len() + line.len() > self.max_bytes {
            drop(state);
            self.dropped.fetch_add(1, Relaxed);
            return;
        }
        let was_empty = state.queued.is_empty();
        state.queued.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.has_lines.notify_one();
        }
    }

    fn write_to(&self, mut out: impl Write) {
        let mut batch = Vec::new();
        // The output failed within a line, so the next line must not follow it on the same one.
        let mut is_torn = false;
        loop {
            let mut state = self.state.lock();
            let is_empty = |state: &mut State| state.queued.is_empty() && !state.is_closed;
            self.has_lines.wait_while(&mut state, is_empty);
            if state.queued.is_empty() {
                return;
            }
            drop(state);
            #[expect(clippy::disallowed_methods, reason = "this thread only writes")]
            thread::sleep(BATCH_DELAY);
            let mut state = self.state.lock();
            mem::swap(&mut state.queued, &mut batch);
            state.is_writing = true;
            drop(state);
            if is_torn && write_some(&mut out, b"\n") > 0 {
                is_torn = false;
            }
            let mut written = 0;
            if !is_torn {
                written = write_some(&mut out, &batch);
                is_torn = batch[..written].last().is_some_and(|last| *last != b'\n');
            }
            let lines = batch[written..].iter().filter(|byte| **byte == b'\n');
            self.dropped.fetch_add(lines.count() as u64, Relaxed);
            batch.clear();
            self.state.lock().is_writing = false;
            self.is_idle.notify_all();
        }
    }
}

/// Writes until the output fails. Returns how many bytes it has taken.
fn write_some(out: &mut impl Write, lines: &[u8]) -> usize {
    let mut written = 0;
    while written < lines.len() {
        match out.write(&lines[written..]) {
            Ok(0) => break,
            Ok(taken) => written += taken,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    written
}

#[derive(Clone, Debug)]
pub(super) struct Writers {
    pub(super) log: LogWriter,
    /// Where the access log goes, if not there.
    pub(super) access: Option<LogWriter>,
}

impl Writers {
    pub(super) fn dropped(&self) -> u64 {
        let access = self.access.as_ref().map_or(0, LogWriter::dropped);
        self.log.dropped() + access
    }

    /// Waits for both, each no longer than `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        for writer in self.access.iter().chain([&self.log]) {
            writer.flush(limit);
        }
    }
}

impl<'a> MakeWriter<'a> for Writers {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(&self.log.0)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> LineWriter<'a> {
        let access = self.access.as_ref();
        let access = access.filter(|_| meta.target() == ACCESS_LOG);
        LineWriter(&access.unwrap_or(&self.log).0)
    }
}

/// Queues whatever one call writes, as one line: that is how `tracing_subscriber` writes its lines.
#[derive(Debug)]
pub(super) struct LineWriter<'a>(&'a Queue);

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// An output whose every write waits for leave, and shows what was written.
    struct Blocked {
        leave: mpsc::Receiver<()>,
        written: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Blocked {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.leave.recv().map_err(io::Error::other)?;
            self.written
                .send(bytes.to_vec())
                .map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_blocked_output_blocks_no_logger_and_drops_are_counted() {
        let (allow, leave) = mpsc::channel();
        let (written, lines) = mpsc::channel();
        let writer = LogWriter::start(Blocked { leave, written }, 100).unwrap();
        let line = b"123456789\n";
        writer.push(line);
        while !writer.0.state.lock().is_writing {
            thread::yield_now();
        }
        // The first line is being written; ten more fit into the queue.
        for _ in 0..15 {
            writer.push(line);
        }
        assert_eq!(writer.dropped(), 5);
        writer.flush(Duration::from_millis(1));
        for _ in 0..2 {
            allow.send(()).unwrap();
        }
        writer.flush(Duration::from_secs(10));
        let lengths: Vec<usize> = lines.try_iter().map(|batch| batch.len()).collect();
        assert_eq!(lengths, [10, 100]);
        // An output that fails loses its lines, and they count too.
        drop(allow);
        writer.push(b"one\ntwo\n");
        writer.flush(Duration::from_secs(10));
        assert_eq!(writer.dropped(), 7);
    }

    /// A disk with room for this many bytes. It shows what was written.
    struct Disk {
        room: Arc<Mutex<usize>>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut room = self.room.lock();
            if *room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = bytes.len().min(*room);
            *room -= taken;
            self.written.lock().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_was_full_loses_only_lines_that_were_not_written_whole() {
        let (room, written) = (Arc::new(Mutex::new(6)), Arc::<Mutex<Vec<u8>>>::default());
        let disk = Disk {
            room: room.clone(),
            written: written.clone(),
        };
        let writer = LogWriter::start(disk, 100).unwrap();
        let push = |lines: &[u8]| {
            writer.push(lines);
            writer.flush(Duration::from_secs(10));
        };
        push(b"one\ntwo\nthree\n");
        push(b"four\n");
        assert_eq!(writer.dropped(), 3);
        *room.lock() = 100;
        push(b"five\n");
        push(b"six\n");
        assert_eq!(writer.dropped(), 3);
        writer.close();
        let shown = written.lock();
        assert_eq!(str::from_utf8(&shown), Ok("one\ntw\nfive\nsix\n"));
    }
}
