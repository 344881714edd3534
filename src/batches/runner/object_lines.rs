//! Reads an object of the storage line by line.

use bytes::Bytes;

use super::lines_of_pieces::LinesOfPieces;
use super::off_thread::off_thread;
use super::retry::FailedTries;
use crate::batches::output::{LineTries, PartLine};
use crate::batches::storage::{Storage, StorageError, StorageReader};

/// A result line has an answer, of 16 MiB at most, and some more where line breaks were taken out of it.
const MAX_LINE: usize = 32 << 20;

/// The lines of one object. One piece and one line are in memory.
#[derive(Debug)]
pub(super) struct ObjectLines {
    reader: StorageReader,
    lines: LinesOfPieces,
    /// What the lines that were read say of tries.
    pub(super) tries: FailedTries,
    is_over: bool,
}

impl ObjectLines {
    pub(super) async fn open(storage: &Storage, path: &str) -> Result<Self, StorageError> {
        Ok(Self {
            reader: storage.read(path, None).await?,
            lines: LinesOfPieces::new(MAX_LINE),
            tries: FailedTries::new(),
            is_over: false,
        })
    }

    /// The next result that was written whole, and its result line.
    pub(super) async fn next_result(&mut self) -> Result<Option<(PartLine, Bytes)>, StorageError> {
        while let Some(line) = self.next().await? {
            if let Some(found) = LineTries::read(&line) {
                self.tries.insert(found.line, found.tries);
                continue;
            }
            let bytes = line.len();
            let read = move || {
                let (result, text) = PartLine::read(&line)?;
                Some((result, line.slice_ref(text)))
            };
            if let Some(found) = off_thread(bytes, read).await {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The next line without its line break.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, StorageError> {
        loop {
            if let Some(line) = self.lines.next_line() {
                return Ok(Some(line));
            }
            if self.is_over {
                return Ok(None);
            }
            match self.reader.next().await? {
                Some(piece) => self.lines.push(&piece),
                None => {
                    self.is_over = true;
                    return Ok(self.lines.rest());
                }
            }
        }
    }
}
