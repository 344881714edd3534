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

/// Whether the answer is that to a retry. `object_store` has that only in its text.
fn was_retried(error: &object_store::Error) -> bool {
    error.to_string().contains("max_retries:")
}

impl From<object_store::Error> for StorageError {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound,
            // An earlier try may have been done.
            tried if was_retried(&tried) => Self::Failed(tried.to_string()),
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => Self::Refused(error.to_string()),
            wrong if is_bad_request(&wrong) => Self::Refused(wrong.to_string()),
            other => Self::Failed(other.to_string()),
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
