//! Lines for other programs, in a file or on standard output, written by a thread of their own.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::log_writer::LogWriter;

/// The place that means standard output.
pub const STDOUT: &str = "stdout";

/// Takes lines from any thread and never waits. Clones share one queue.
#[derive(Clone, Debug)]
pub struct LineLog(Arc<Closing>);

/// Ends the thread once no more lines can be added.
#[derive(Debug)]
struct Closing(LogWriter);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl LineLog {
    /// Writes to `place`: [`STDOUT`], or the path of a file that lines are added to. With more than `max_queued` bytes
    /// of lines that wait to be written, further ones are dropped.
    pub fn open(place: &str, max_queued: usize) -> io::Result<Self> {
        let writer = match place {
            STDOUT => LogWriter::with_limit(io::stdout(), max_queued)?,
            path => LogWriter::with_limit(RotatedFile::open(Path::new(path))?, max_queued)?,
        };
        Ok(Self(Arc::new(Closing(writer))))
    }

    /// `line` ends with a line break.
    pub fn push(&self, line: &[u8]) {
        self.0.0.push(line);
    }

    /// Lines that were lost because the queue was full or the output failed.
    pub fn dropped(&self) -> u64 {
        self.0.0.dropped()
    }

    /// Waits until every queued line is written, but no longer than `limit`.
    pub fn flush(&self, limit: Duration) {
        self.0.0.flush(limit);
    }
}

/// A file that log rotation may rename or remove at any time: what is written after that goes into a new one.
#[derive(Debug)]
struct RotatedFile {
    path: PathBuf,
    file: File,
    identity: (u64, u64),
}

impl RotatedFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().append(true).create(true).open(path)?;
        let metadata = file.metadata()?;
        Ok(Self {
            path: path.to_owned(),
            file,
            identity: (metadata.dev(), metadata.ino()),
        })
    }
}

impl Write for RotatedFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let found = fs::metadata(&self.path).map(|it| (it.dev(), it.ino()));
        if found.ok() != Some(self.identity) {
            *self = Self::open(&self.path)?;
        }
        self.file.write(lines)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_after_a_rotation_go_into_a_new_file() {
        let name = format!("warmroute-line-log-{:016x}", fastrand::u64(..));
        let (path, old) = {
            let path = std::env::temp_dir().join(name);
            (path.clone(), path.with_extension("1"))
        };
        let log = LineLog::open(path.to_str().unwrap(), 1 << 10).unwrap();
        let limit = Duration::from_secs(10);
        log.push(b"one\n");
        log.flush(limit);
        fs::rename(&path, &old).unwrap();
        log.push(b"two\n");
        log.flush(limit);
        assert_eq!(fs::read_to_string(&old).unwrap(), "one\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        fs::remove_file(&path).unwrap();
        log.push(b"three\n");
        log.flush(limit);
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(log.dropped(), 0);
        log.push(&[b'x'; 2 << 10]);
        assert_eq!(log.dropped(), 1);
        for file in [path, old] {
            fs::remove_file(file).unwrap();
        }
        assert!(LineLog::open("/nowhere/at/all", 1).is_err());
    }
}
