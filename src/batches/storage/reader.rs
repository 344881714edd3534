//! Reads an object piece by piece.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use object_store::{GetResult, GetResultPayload};
use tokio::task::JoinHandle;

use crate::batches::storage_error::StorageError;

/// Bytes of one read of a file: few reads for a large file, and little memory for each reader.
const PIECE_BYTES: u64 = 256 << 10;

/// An object that is being read. One piece is in memory at a time.
pub struct StorageReader {
    source: PieceSource,
    /// Bytes that are read in all: of the object, or of its range.
    pub len: u64,
    left: u64,
}

enum PieceSource {
    /// A file of the folder.
    File {
        file: Arc<File>,
        offset: u64,
        running: Option<JoinHandle<io::Result<Vec<u8>>>>,
    },
    Stream(Pin<Box<dyn Stream<Item = object_store::Result<Bytes>> + Send>>),
    Empty,
}

impl std::fmt::Debug for StorageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StorageReader")
            .field("len", &self.len)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl StorageReader {
    pub(super) fn new(found: GetResult) -> Self {
        let range = found.range;
        let source = match found.payload {
            GetResultPayload::File(file, _) => PieceSource::File {
                file: Arc::new(file),
                offset: range.start,
                running: None,
            },
            GetResultPayload::Stream(stream) => PieceSource::Stream(stream),
        };
        let len = range.end.saturating_sub(range.start);
        Self {
            source,
            len,
            left: len,
        }
    }

    /// Of an empty range.
    pub(super) fn empty() -> Self {
        Self {
            source: PieceSource::Empty,
            len: 0,
            left: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The next piece, which has at least one byte; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, StorageError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// All that is left.
    pub async fn whole(mut self) -> Result<Bytes, StorageError> {
        let mut whole = BytesMut::with_capacity(self.left as usize);
        while let Some(piece) = self.next().await? {
            whole.extend_from_slice(&piece);
        }
        Ok(whole.freeze())
    }

    /// As [`StorageReader::next`], for bodies.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StorageError>> {
        while self.left > 0 {
            let piece = match &mut self.source {
                PieceSource::File {
                    file,
                    offset,
                    running,
                } => {
                    let wanted = self.left.min(PIECE_BYTES);
                    let read = running.get_or_insert_with(|| {
                        let (file, offset) = (file.clone(), *offset);
                        tokio::task::spawn_blocking(move || read_at(&file, offset, wanted))
                    });
                    let read = ready!(Pin::new(read).poll(cx));
                    *running = None;
                    let read = read.map_err(io::Error::other).flatten();
                    let piece = read.map_err(|error| StorageError::Failed(error.to_string()))?;
                    *offset += piece.len() as u64;
                    (!piece.is_empty()).then(|| Bytes::from(piece))
                }
                PieceSource::Stream(stream) => ready!(stream.as_mut().poll_next(cx)).transpose()?,
                PieceSource::Empty => None,
            };
            let Some(piece) = piece else {
                let message = format!("an object ended {} bytes too early", self.left);
                return Poll::Ready(Err(StorageError::Failed(message)));
            };
            self.left = self.left.saturating_sub(piece.len() as u64);
            if !piece.is_empty() {
                return Poll::Ready(Ok(Some(piece)));
            }
        }
        Poll::Ready(Ok(None))
    }
}

/// Up to `wanted` bytes; none at the file's end.
fn read_at(file: &File, offset: u64, wanted: u64) -> io::Result<Vec<u8>> {
    let mut piece = vec![0; wanted as usize];
    loop {
        match file.read_at(&mut piece, offset) {
            Ok(read) => {
                piece.truncate(read);
                return Ok(piece);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
