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

impl From<object_store::Error> for StorageError {
    fn from(error: object_store::Error) -> Self {
        // `object_store` has S3's status and code, and whether the answer is that to a retry, only in its text.
        let text = error.to_string();
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound,
            // An earlier try may have been done.
            _ if text.contains("max_retries:") => Self::Failed(text),
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => Self::Refused(text),
            // The request was wrong.
            _ if text.contains("status code: 400 ") => Self::Refused(text),
            _ => Self::Failed(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_retry_does_not_show_that_nothing_was_written() {
        let refused = |text: &str| {
            let path = "files/1".to_owned();
            let source = text.to_owned().into();
            StorageError::from(object_store::Error::Unauthenticated { path, source })
        };
        assert!(refused("Error performing PUT in 5ms - status code: 403").leaves_nothing());
        let retried =
            "Error performing PUT in 5s, after 1 retries, max_retries: 10, retry_timeout: 60s";
        assert!(!refused(retried).leaves_nothing());
    }
}
