//! What each work of a batch has: the batch, who sends its lines, and how it ends.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use crate::batches::batch::{BatchRecord, Work};
use crate::batches::metrics::WorkOutcome;
use crate::batches::paths;
use crate::batches::records::Changed;
use crate::batches::room_gate::RoomGate;
use crate::batches::send::SendLine;
use crate::batches::service::Batches;
use crate::batches::shards::{self, Shard};
use crate::batches::storage::StorageError;
use crate::batches::works::{StopWork, WorkGuard};
use crate::observe;
use crate::store::documents::DocumentKey;

/// Before a write to the store, or a work whose storage failed, is tried again.
const PAUSE: Duration = Duration::from_secs(2);

/// The list of a batch's shards: 100 bytes for each, of which a file of the largest size has some thousand.
const MAX_SHARDS_BYTES: u64 = 64 << 20;

/// A work of a batch that runs here.
#[derive(Debug)]
pub(super) struct WorkContext {
    pub(super) batches: Arc<Batches>,
    pub(super) sender: Arc<dyn SendLine>,
    pub(super) gate: Arc<RoomGate>,
    pub(super) guard: WorkGuard,
}

/// Why a work cannot be done now.
#[derive(Debug)]
pub(super) enum Halt {
    Stopped(StopWork),
    Storage(StorageError),
    /// Another replica may have read a newer configuration.
    LeftToOthers,
}

impl From<StorageError> for Halt {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl WorkContext {
    pub(super) fn key(&self) -> &DocumentKey {
        &self.guard.key
    }

    pub(super) fn work(&self) -> Work {
        self.guard.work
    }

    /// Why the work is to stop; resolves once it is.
    pub(super) async fn stopped(&self) -> StopWork {
        tokio::select! {
            biased;
            reason = self.guard.stopped() => reason,
            () = self.batches.tasks.stopped() => StopWork::Draining,
        }
    }

    /// Does a part of the work, unless it is stopped meanwhile.
    pub(super) async fn unless_stopped<T>(
        &self,
        part: impl Future<Output = Result<T, Halt>>,
    ) -> Result<T, Halt> {
        tokio::select! {
            biased;
            reason = self.stopped() => Err(Halt::Stopped(reason)),
            done = part => done,
        }
    }

    /// The record, if the work is still this replica's.
    pub(super) async fn own_record(&self) -> Option<BatchRecord> {
        let owner = self.batches.owner;
        match self.batches.records.read(self.key()).await {
            Ok(found) => {
                let record = found.map(|(record, _)| record);
                record.filter(|record| record.owns(owner, self.work()))
            }
            Err(error) => {
                self.batches.failed("record of a batch not read", &error);
                None
            }
        }
    }

    /// Writes the end of the work, again and again while the store cannot be used. Returns the record after it; `None`
    /// if the work is another replica's, or if the router ends before.
    pub(super) async fn write_end(
        &self,
        mut end: impl FnMut(&mut BatchRecord, u64) -> bool + Send,
    ) -> Option<BatchRecord> {
        loop {
            match self.batches.records.change(self.key(), &mut end).await {
                Ok(Changed::Done(record)) => return Some(*record),
                // A write whose outcome is unknown may have been done.
                Ok(Changed::Unchanged(_) | Changed::Gone) => return None,
                Err(error) => self
                    .batches
                    .failed("end of a batch's work not written", &error),
            }
            if self.is_given_up() {
                // The claim runs out; whoever has the work next finds what was done.
                return None;
            }
            sleep(PAUSE).await;
        }
    }

    /// Whether the work is another replica's now, or the router ends.
    pub(super) fn is_given_up(&self) -> bool {
        self.guard.is_lost() || self.batches.tasks.is_stopping()
    }

    /// The work is not done, and anybody may go on with it.
    pub(super) async fn give_back(&self) -> WorkOutcome {
        let (owner, work) = (self.batches.owner, self.work());
        self.write_end(|record, _| record.give_back(owner, work))
            .await;
        WorkOutcome::Returned
    }

    /// What becomes of a work that was halted.
    pub(super) async fn on_halt(&self, halt: Halt) -> WorkOutcome {
        match halt {
            Halt::Stopped(StopWork::Lost) => WorkOutcome::Lost,
            Halt::Stopped(StopWork::Stopping) => {
                self.give_back().await;
                WorkOutcome::Stopped
            }
            Halt::Stopped(StopWork::Draining | StopWork::Stalled | StopWork::GivesPlace) => {
                self.give_back().await
            }
            Halt::LeftToOthers => self.give_back().await,
            Halt::Storage(error) => {
                self.batches.failed("work of a batch failed", &error);
                let works = &self.batches.works;
                works.on_stall(observe::now(), self.key());
                // It would fail again at once.
                tokio::select! {
                    () = sleep(PAUSE) => {}
                    _ = self.stopped() => {}
                }
                self.give_back().await
            }
        }
    }

    /// Fails if the storage is not the one that all replicas share. In another one, such as the mount point of a mount
    /// that was just lost, what is missing is not gone, and what was written is of no use.
    pub(super) async fn check_storage(&self) -> Result<(), StorageError> {
        Ok(self.batches.ask_storage().await?)
    }

    pub(super) async fn shards(&self) -> Result<Vec<Shard>, StorageError> {
        let path = paths::shards(&self.key().id);
        let text = self
            .batches
            .storage
            .read_whole(&path, MAX_SHARDS_BYTES)
            .await?;
        shards::from_json(&text)
            .map_err(|error| StorageError::Failed(format!("{path} cannot be read: {error}")))
    }

    pub(super) async fn shard_bytes(
        &self,
        record: &BatchRecord,
        shard: &Shard,
    ) -> Result<Bytes, StorageError> {
        let path = paths::input(self.key().tenant, record).ok_or(StorageError::NotFound)?;
        let storage = &self.batches.storage;
        let reader = storage.read(&path, Some(shard.range())).await?;
        if reader.len != shard.bytes {
            let message = format!("{path} is shorter than it was");
            return Err(StorageError::Failed(message));
        }
        reader.whole().await
    }
}
