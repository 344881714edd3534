//! The records of batches in the store: read, changed, and written if nobody else has written since; otherwise again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::batch::BatchRecord;
use super::clock::Clock;
use crate::store::documents::{Document, DocumentKey, ReplaceOutcome};
use crate::store::{self, ResponseStore};

/// How often a change is made anew because others have written. A batch has a few writers, of which each writes every
/// few seconds.
const MAX_ROUNDS: u32 = 30;

/// The longest pause between two of these; a random part of it.
const ROUND_PAUSE_MS: u64 = 40;

/// After a write of which nobody knows whether it was done.
const UNKNOWN_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) enum Changed {
    /// It is written, and this is the record.
    Done(Box<BatchRecord>),
    /// There was nothing to change.
    Unchanged(Box<BatchRecord>),
    /// There is no such batch any more.
    Gone,
}

#[derive(Clone, Debug)]
pub(super) struct Records {
    store: Arc<dyn ResponseStore>,
    clock: Clock,
}

impl Records {
    pub(super) fn new(store: Arc<dyn ResponseStore>, clock: Clock) -> Self {
        Self { store, clock }
    }

    /// `None` if there is no such batch.
    pub(super) async fn read(
        &self,
        key: &DocumentKey,
    ) -> Result<Option<(BatchRecord, u64)>, store::Error> {
        let found = self.store.document(key.clone()).await?;
        found
            .map(|document| Ok((record_of(&document)?, document.version)))
            .transpose()
    }

    /// Writes a record, and when a replica must look at it again.
    pub(super) async fn write(
        &self,
        key: &DocumentKey,
        version: u64,
        record: &BatchRecord,
        now_ms: u64,
    ) -> Result<ReplaceOutcome, store::Error> {
        let (value, due_ms) = (record.to_json(), record.due_ms(now_ms));
        self.store
            .replace_document(key.clone(), version, value, due_ms)
            .await
    }

    /// Has `change` change the record; false from it leaves it. It is called again after another's write, and after
    /// one of its own of which nobody knows whether it was done.
    pub(super) async fn change(
        &self,
        key: &DocumentKey,
        mut change: impl FnMut(&mut BatchRecord, u64) -> bool + Send,
    ) -> Result<Changed, store::Error> {
        let mut unknown = None;
        for _ in 0..MAX_ROUNDS {
            let Some((mut record, version)) = self.read(key).await? else {
                return Ok(Changed::Gone);
            };
            let now_ms = self.clock.now_ms();
            if !change(&mut record, now_ms) {
                return Ok(Changed::Unchanged(Box::new(record)));
            }
            match self.write(key, version, &record, now_ms).await {
                Ok(ReplaceOutcome::Done(_)) => return Ok(Changed::Done(Box::new(record))),
                Ok(ReplaceOutcome::Gone) => return Ok(Changed::Gone),
                Ok(ReplaceOutcome::Changed) => {
                    let pause = Duration::from_millis(fastrand::u64(..ROUND_PAUSE_MS));
                    sleep(pause).await;
                }
                Err(error @ store::Error::Unknown { .. }) => {
                    if unknown.is_some() {
                        return Err(error);
                    }
                    unknown = Some(error);
                    sleep(UNKNOWN_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
        Err(store::Error::Unavailable {
            retry_after: Duration::from_secs(1),
            reason: "the record of a batch is written by too many at a time".into(),
        })
    }
}

/// Fails for a record that is damaged or that a newer release wrote.
pub(super) fn record_of(document: &Document) -> Result<BatchRecord, store::Error> {
    BatchRecord::from_json(&document.value).map_err(|error| {
        let reason = format!("the record of a batch is damaged or of a newer release: {error}");
        store::Error::Unreadable(reason.into())
    })
}
