//! Deletes all that is kept of a batch. Its files have a retention of their own, unless the batch has not ended: then no
//! client learnt of them, and no record may name them.

use super::assembling;
use super::work_context::{Halt, WorkContext};
use crate::batches::batch::BatchRecord;
use crate::batches::metrics::WorkOutcome;
use crate::batches::paths;
use crate::batches::storage::StorageError;

pub(super) async fn run(work: &WorkContext) -> WorkOutcome {
    let Some(record) = work.own_record().await else {
        return WorkOutcome::Lost;
    };
    if let Err(halt) = work.unless_stopped(delete(work, &record)).await {
        return work.on_halt(halt).await;
    }
    let removed = work.batches.store.remove_document(work.key().clone(), None);
    match removed.await {
        Ok(_) => WorkOutcome::Done,
        Err(error) => {
            // The claim runs out, and somebody tries again.
            work.batches.failed("record of a batch not deleted", &error);
            WorkOutcome::Returned
        }
    }
}

async fn delete(work: &WorkContext, record: &BatchRecord) -> Result<(), Halt> {
    // Without the record, what the other storage has of the batch would stay for ever.
    work.check_storage().await?;
    let (batches, key) = (&work.batches, work.key());
    if !record.status.is_terminal() {
        for file in assembling::file_ids(&key.id) {
            let removed = batches.files.remove(key.tenant, &file).await;
            removed.map_err(|error| StorageError::Failed(error.message))?;
        }
    }
    batches.storage.delete_all(&paths::folder(&key.id)).await?;
    Ok(())
}
