//! Why an operation of the storage failed.

/// Why an operation of the storage failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StorageError {
    /// There is no such object.
    #[error("there is no such object")]
    NotFound,
    /// The storage could not do it. It says nothing about what is there.
    #[error("{0}")]
    Failed(String),
}

impl From<object_store::Error> for StorageError {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound,
            other => Self::Failed(other.to_string()),
        }
    }
}
