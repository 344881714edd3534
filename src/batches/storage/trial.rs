//! Whether the storage can do what batches need of it.

use bytes::Bytes;

use super::{Storage, StorageError};
use crate::observe::metrics::words;

words! {
    /// What batches need of the storage, in the order in which it is tried.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StorageOperation {
        Write = "write",
        Read = "read",
        Delete = "delete",
    }
}

/// One object for all replicas, so that routers that are killed leave no more than one behind.
const PATH: &str = "trial";
const CONTENT: &[u8] = b"warmroute";

impl Storage {
    /// Tries an operation with an object that is there for this alone. On a mounted folder it may hang for ever.
    pub async fn try_out(&self, operation: StorageOperation) -> Result<(), StorageError> {
        match operation {
            StorageOperation::Write => self.put(PATH, Bytes::from_static(CONTENT)).await,
            StorageOperation::Read => match self.read_whole(PATH, CONTENT.len() as u64).await {
                Ok(read) if read == CONTENT => Ok(()),
                Ok(_) => Err(StorageError::Failed(
                    "other bytes were read than written".to_owned(),
                )),
                // Another replica has just ended its trial.
                Err(StorageError::NotFound) => Ok(()),
                Err(error) => Err(error),
            },
            StorageOperation::Delete => self.delete(PATH).await,
        }
    }
}
