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
    /// The storage has refused a write, or was not asked for the last step of it: nothing was written, nor will be.
    #[error("{0}")]
    Refused(String),
    /// The storage could not do it. It says nothing about what is there.
    #[error("{0}")]
    Failed(String),
}

impl StorageError {
    /// Whether nothing is there of what was to be written, now or later.
    pub fn leaves_nothing(&self) -> bool {
        match self {
            Self::TooLarge(_) | Self::Refused(_) => true,
            // S3 that has completed an upload, and whose answer was lost, has no such upload when it is asked again.
            Self::NotFound | Self::Failed(_) => false,
        }
    }
}

/// Whether S3 has answered that a request is wrong. `object_store` has the status and S3's code only in its text.
fn is_bad_request(error: &object_store::Error) -> bool {
    error.to_string().contains("status code: 400 ")
}

impl From<object_store::Error> for StorageError {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound,
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => Self::Refused(error.to_string()),
            wrong if is_bad_request(&wrong) => Self::Refused(wrong.to_string()),
            other => Self::Failed(other.to_string()),
        }
    }
}
