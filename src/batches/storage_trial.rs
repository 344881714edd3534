//! Tries whether the storage can be used, for operators and for the works of batches.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::timeout;

use super::service::Batches;
use super::storage::{StorageError, StorageOperation};

/// Storage that has not answered a trial for so long cannot be used.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

impl Batches {
    /// Tries whether the storage can be used, for operators and for the works. False if not.
    pub(super) async fn try_storage(&self) -> bool {
        for operation in StorageOperation::ALL {
            let mut trial = pin!(self.storage.try_out(operation));
            let tried = match timeout(TRIAL_TIMEOUT, trial.as_mut()).await {
                Ok(tried) => tried,
                Err(_) => {
                    let seconds = TRIAL_TIMEOUT.as_secs();
                    let message = format!("no answer within {seconds} s");
                    self.on_trial(operation, &Err(StorageError::Failed(message)));
                    // A mount that hangs keeps a thread with each trial: there is no other one before it answers.
                    trial.await
                }
            };
            self.on_trial(operation, &tried);
            if tried.is_err() {
                return false;
            }
        }
        true
    }

    fn on_trial(&self, operation: StorageOperation, tried: &Result<(), StorageError>) {
        let name = [operation.as_str()];
        let usable = self.metrics.storage_usable.with_label_values(&name);
        usable.set(i64::from(tried.is_ok()));
        match (operation, tried) {
            // Where nothing can be deleted, batches can run all the same.
            (StorageOperation::Read, Ok(())) => self.is_storage_working.store(true, Relaxed),
            (StorageOperation::Write | StorageOperation::Read, Err(_)) => {
                self.is_storage_working.store(false, Relaxed);
            }
            (StorageOperation::Write | StorageOperation::Delete, _) => {}
        }
        if let Err(error) = tried {
            self.failed("storage of batches cannot be used", error);
        }
    }

    /// Whether works can be done here. Those of a replica whose storage cannot be used are left to others.
    pub(super) fn is_storage_usable(&self) -> bool {
        self.is_storage_working.load(Relaxed)
    }
}
