//! The markers by which a storage is recognized.

use bytes::Bytes;
use object_store::GetOptions;

use super::{Storage, StorageError, parse};
use crate::batches::storage_identity::{MARKERS, StorageId};

/// For operators who find it; only the name counts.
const CONTENT: &[u8] =
    b"By this file routers recognize their storage of batches. Do not delete it.\n";

impl Storage {
    /// Whether the storage has the marker of this id. On a mounted folder it may hang for ever.
    pub(in crate::batches) async fn has_marker(
        &self,
        id: &StorageId,
    ) -> Result<bool, StorageError> {
        let path = parse(&id.marker())?;
        let options = GetOptions::new().with_head(true);
        let found = self.store.get_opts(&path, options).await;
        match found.map_err(StorageError::from) {
            Ok(_) => Ok(true),
            Err(StorageError::NotFound) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The ids of all markers that the storage has, sorted. Other objects beside them are left out.
    pub(in crate::batches) async fn markers(&self) -> Result<Vec<StorageId>, StorageError> {
        let paths = self.list(MARKERS).await?.into_iter();
        let id = |path: String| StorageId::parse(path.strip_prefix(MARKERS)?);
        Ok(paths.filter_map(id).collect())
    }

    pub(in crate::batches) async fn add_marker(&self, id: &StorageId) -> Result<(), StorageError> {
        let content = Bytes::from_static(CONTENT);
        self.put(&id.marker(), content).await
    }
}
