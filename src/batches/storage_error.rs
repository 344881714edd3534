//! Why an operation of the storage failed.

/// Why an operation of the storage failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StorageError {
    /// There is no such object.
    #[error("there is no such object")]
    NotFound,
    /// The object would have more than these bytes, which is all that the storage takes. Another try fails as well.
    #[error("the storage takes no object of more than {0} bytes")]
    TooLarge(u64),
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
