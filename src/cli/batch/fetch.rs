//! Brings a file of the router to its place, which has the whole file or nothing.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;
use memchr::memchr_iter;

use super::api_client::{ApiClient, AskError, with_causes};
use super::step_progress::StepProgress;
use super::text;
use crate::observe;

/// Wait for the next piece of a file.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a file is not in its place.
#[derive(Debug)]
pub(super) enum FetchError {
    Ask(AskError),
    /// It cannot be written here.
    Local(String),
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ask(error) => error.fmt(f),
            Self::Local(text) => f.write_str(text),
        }
    }
}

/// Streams a file of the router to its place. Without a file the place gets an empty one. Returns the number of lines.
pub(super) async fn fetch(
    client: &ApiClient,
    file_id: Option<&str>,
    place: &Path,
    progress: &mut StepProgress,
) -> Result<u64, FetchError> {
    let local = |error: io::Error| FetchError::Local(format!("{}: {error}", place.display()));
    let mut file = TemporaryFile::create(place).map_err(local)?;
    let mut lines = LineCount::default();
    if let Some(file_id) = file_id {
        let path = format!("/v1/files/{file_id}/content");
        let failed = |why: &str| {
            let text = format!("GET {}{path}: {why}", client.base);
            FetchError::Ask(AskError::Failed(text))
        };
        let mut body = client.open(&path).await.map_err(FetchError::Ask)?;
        let total = body.size_hint().exact().unwrap_or(0);
        let mut done = 0;
        loop {
            let frame = tokio::time::timeout(STALL_TIMEOUT, body.frame()).await;
            let frame = match frame.map_err(|_| failed("nothing more came for 60 s"))? {
                Some(frame) => frame.map_err(|error| failed(&with_causes(&error)))?,
                None => break,
            };
            let data = frame.into_data().unwrap_or_else(|_| Bytes::new());
            file.file.write_all(&data).map_err(local)?;
            lines.add(&data);
            done += data.len() as u64;
            progress.show(observe::now(), (done, total.max(done)), || {
                text::bytes(done, total)
            });
        }
    }
    file.put_in(place).map_err(local)?;
    Ok(lines.count())
}

/// A file under another name until it is complete. Dropped before that, it is removed.
struct TemporaryFile {
    file: File,
    path: PathBuf,
    is_placed: bool,
}

impl TemporaryFile {
    fn create(place: &Path) -> io::Result<Self> {
        let mut path = OsString::from(place);
        // Another run with the same output has a file of its own.
        path.push(format!(".{}.part", std::process::id()));
        Ok(Self {
            file: File::create(&path)?,
            path: path.into(),
            is_placed: false,
        })
    }

    fn put_in(mut self, place: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, place)?;
        self.is_placed = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_placed {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Counts the lines of a text that comes in pieces, the last one also if nothing ends it.
#[derive(Debug, Default)]
struct LineCount {
    ended: u64,
    has_begun: bool,
}

impl LineCount {
    fn add(&mut self, piece: &[u8]) {
        self.ended += memchr_iter(b'\n', piece).count() as u64;
        if let Some(last) = piece.last() {
            self.has_begun = *last != b'\n';
        }
    }

    fn count(&self) -> u64 {
        self.ended + u64::from(self.has_begun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_in_any_pieces() {
        for (text, expected) in [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\nb\n", 2)] {
            for size in 1..4 {
                let mut count = LineCount::default();
                text.as_bytes()
                    .chunks(size)
                    .for_each(|piece| count.add(piece));
                assert_eq!(count.count(), expected, "{text:?} by {size}");
            }
        }
    }

    #[test]
    fn a_file_that_is_not_complete_leaves_its_place_as_it_was() {
        let place = std::env::temp_dir().join(format!("warmroute-fetch-{}", fastrand::u64(..)));
        std::fs::write(&place, "before").unwrap();
        let mut file = TemporaryFile::create(&place).unwrap();
        file.file.write_all(b"half").unwrap();
        let temporary = file.path.clone();
        drop(file);
        assert!(!temporary.exists());
        assert_eq!(std::fs::read(&place).unwrap(), b"before");
        let mut file = TemporaryFile::create(&place).unwrap();
        file.file.write_all(b"whole").unwrap();
        file.put_in(&place).unwrap();
        assert!(!temporary.exists());
        assert_eq!(std::fs::read(&place).unwrap(), b"whole");
        std::fs::remove_file(place).unwrap();
    }
}
