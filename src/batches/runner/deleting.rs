//! Deletes all that is kept of a batch. Its files have a retention of their own.

use super::work_context::{Halt, WorkContext};
use crate::batches::metrics::WorkOutcome;
use crate::batches::paths;

pub(super) async fn run(work: &WorkContext) -> WorkOutcome {
    if work.own_record().await.is_none() {
        return WorkOutcome::Lost;
    }
    if let Err(halt) = work.unless_stopped(delete(work)).await {
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

async fn delete(work: &WorkContext) -> Result<(), Halt> {
    // Without the record, what the other storage has of the batch would stay for ever.
    work.check_storage().await?;
    let folder = paths::folder(&work.key().id);
    work.batches.storage.delete_all(&folder).await?;
    Ok(())
}
