//! Lines for other programs, in a file or on standard output, written by a thread of their own.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;

use super::clock::now;
use super::log_once::LogOnce;
use super::log_writer::{LogWriter, MAX_QUEUED_BYTES};

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
        let writer = writer(place, "usage log", u64::MAX, max_queued)?;
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

/// Writes the lines of the access log to [`STDOUT`], or to a file of at most about this size.
pub(super) fn access_writer(place: &str, bytes_max: u64) -> io::Result<LogWriter> {
    writer(place, "access log", bytes_max, MAX_QUEUED_BYTES)
}

/// `what`: which log it is, for warnings.
fn writer(
    place: &str,
    what: &'static str,
    bytes_max: u64,
    max_queued: usize,
) -> io::Result<LogWriter> {
    if place == STDOUT {
        return LogWriter::start(Warning::new(io::stdout(), place, what), max_queued);
    }
    let file = RotatedFile::open(Path::new(place), bytes_max)?;
    LogWriter::start(Warning::new(file, place, what), max_queued)
}

/// Describes what is wrong with the place of such a log, if anything. `example`: a name for a file.
pub fn check(place: &str, example: &str) -> Result<(), String> {
    let path = Path::new(place);
    if place.is_empty() || place == STDOUT {
        return Ok(());
    }
    if path.is_dir() {
        let example = path.join(example);
        let example = example.display();
        return Err(format!(
            "is a folder; write the path of a file, such as `{example}`"
        ));
    }
    let folder = path.parent();
    match folder.filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) if !folder.is_dir() => {
            let folder = folder.display();
            Err(format!(
                "there is no folder `{folder}`; create it, or write `stdout`"
            ))
        }
        _ => writable(path).map_err(|error| {
            format!("cannot be written: {error}; write the path of a file that this user may write, or `stdout`")
        }),
    }
}

/// Whether lines can be added to a file, or made in its folder. Nothing is written and no file stays.
fn writable(path: &Path) -> io::Result<()> {
    if path.exists() {
        return File::options().append(true).open(path).map(drop);
    }
    // A file of another name, so that one that the router makes just now is not removed.
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".check-{}", std::process::id()));
    let probe = path.with_file_name(name);
    File::options().write(true).create_new(true).open(&probe)?;
    fs::remove_file(probe)
}

/// An output whose failures are logged, once a minute: each costs lines.
#[derive(Debug)]
struct Warning<W> {
    output: W,
    place: String,
    /// Which log it is.
    what: &'static str,
    warned: Option<Instant>,
}

const WARN_INTERVAL: Duration = Duration::from_secs(60);

impl<W> Warning<W> {
    fn new(output: W, place: &str, what: &'static str) -> Self {
        Self {
            output,
            place: place.to_owned(),
            what,
            warned: None,
        }
    }

    /// Whether a failure is logged now.
    fn is_due(&mut self, now: Instant) -> bool {
        let since = self.warned.map(|at| now.saturating_duration_since(at));
        let is_due = since.is_none_or(|since| since >= WARN_INTERVAL);
        if is_due {
            self.warned = Some(now);
        }
        is_due
    }
}

impl<W: Write> Write for Warning<W> {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let result = self.output.write(lines);
        if let Err(error) = &result
            && error.kind() != io::ErrorKind::Interrupted
            && self.is_due(now())
        {
            warn!(place = self.place, %error, "lines of the {} cannot be written and are lost", self.what);
        }
        result
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// A file that log rotation may rename or remove at any time: what is written after that goes into a new one. One that is too
/// long gets another name.
#[derive(Debug)]
struct RotatedFile {
    path: PathBuf,
    file: File,
    identity: (u64, u64),
    bytes: u64,
    bytes_max: u64,
    failures: LogOnce,
}

impl RotatedFile {
    fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = File::options().append(true).create(true).open(path)?;
        let metadata = file.metadata()?;
        Ok(Self {
            path: path.to_owned(),
            file,
            identity: (metadata.dev(), metadata.ino()),
            bytes: metadata.len(),
            bytes_max,
            failures: LogOnce::default(),
        })
    }

    /// Goes on in a new file, if this one was renamed or has no room for `len` more bytes.
    fn rotate(&mut self, len: usize) -> io::Result<()> {
        let found = fs::metadata(&self.path).map(|metadata| (metadata.dev(), metadata.ino()));
        let is_renamed = found.ok() != Some(self.identity);
        let is_full = self.bytes > 0 && self.bytes.saturating_add(len as u64) > self.bytes_max;
        if is_full && !is_renamed {
            fs::rename(&self.path, self.old_name())?;
        }
        if is_full || is_renamed {
            *self = Self::open(&self.path, self.bytes_max)?;
        }
        Ok(())
    }

    fn old_name(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".1");
        name.into()
    }
}

impl Write for RotatedFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        // A mounted file cannot be renamed, nor one in a folder of somebody else, and a process that has no file descriptor
        // left opens none. The open file still takes lines, unless nobody can read them any more.
        if let Err(error) = self.rotate(lines.len()) {
            if self.file.metadata()?.nlink() == 0 {
                return Err(error);
            }
            if self.failures.should_log(now(), &error.to_string()) {
                let path = self.path.display();
                warn!(%path, %error, "log file cannot be rotated; lines are added to the one that is open, whatever its size");
            }
        }
        let written = self.file.write(lines)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_goes_on_is_logged_once_a_minute() {
        let mut output = Warning::new(io::sink(), "x", "usage log");
        let start = now();
        let seconds = [0, 1, 59, 60, 61, 119, 120];
        let due = seconds.map(|s| output.is_due(start + Duration::from_secs(s)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[test]
    fn a_file_that_is_full_gets_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access-log");
        let log = access_writer(path.to_str().unwrap(), 10).unwrap();
        for line in [
            "one\n",
            "two\n",
            "three\n",
            "four\n",
            "longer than the file\n",
            "six\n",
        ] {
            log.push(line.as_bytes());
            log.flush(Duration::from_secs(10));
        }
        let old = path.with_extension("1");
        assert_eq!(fs::read_to_string(old).unwrap(), "longer than the file\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "six\n");
        log.close();
    }

    #[test]
    fn a_file_that_cannot_be_rotated_takes_all_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access-log");
        let old = path.with_extension("1");
        let other = path.with_extension("2");
        let log = access_writer(path.to_str().unwrap(), 10).unwrap();
        let push = |line: &str| {
            log.push(line.as_bytes());
            log.flush(Duration::from_secs(10));
        };
        // A file cannot take the place of a folder.
        fs::create_dir(&old).unwrap();
        push("longer than the file\n");
        push("two\n");
        // It was renamed, and none can be opened in its place.
        fs::rename(&path, &other).unwrap();
        fs::create_dir(&path).unwrap();
        push("three\n");
        let written = fs::read_to_string(&other).unwrap();
        assert_eq!(written, "longer than the file\ntwo\nthree\n");
        assert_eq!(log.dropped(), 0);
        // Nobody can read what is added to a file that was removed.
        fs::remove_file(&other).unwrap();
        push("four\n");
        assert_eq!(log.dropped(), 1);
        fs::remove_dir(&path).unwrap();
        push("five\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "five\n");
        log.close();
    }

    #[test]
    fn lines_after_a_rotation_go_into_a_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("line-log");
        let old = path.with_extension("1");
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
        assert!(LineLog::open("/nowhere/at/all", 1).is_err());
    }
}
