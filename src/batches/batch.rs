//! The record of a batch: what the store keeps of it between requests. Pure.
//!
//! It is JSON that older and newer releases read and change by turns: unknown members are kept as they are, and missing
//! ones have their default. Unknown members of a claim, of counts or of usage are not kept: a release that needs more there
//! adds a member to the record. It has no line of the input and none of the results. `claims` changes it, `object` says
//! what clients get of it.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use bytes::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::file::UNCONFIRMED_LIMIT;
use super::line::{Flavor, LineEndpoint, LineError};
use crate::observe::metrics::words;

/// A batch that could not be ended so long after its expiry never will be: its files are lost. It is deleted then,
/// however short its retention is.
const END_LIMIT: Duration = Duration::from_secs(24 * 3_600);

/// How long the replica that ended a batch has to report the end itself, before others look after it.
pub const WEBHOOK_GRACE_MS: u64 = 10_000;

/// How long another replica than the one that accepted a batch leaves it to that one, or to others, to say that a model
/// of it cannot be used: so long a fleet may take to read a new configuration.
const REFUSAL_GRACE_MS: u64 = 60_000;

/// How long the parts of the results stay after the end of the batch. A Redis that starts again from a snapshot forgets
/// the end, and the results are put together once more. Redis' default (`save 3600 1`) makes a snapshot each hour.
pub const PARTS_KEPT_MS: u64 = 2 * 3_600_000;

/// For so long after the last line results are waited for that were counted and are not listed: Linux may list a folder
/// of an NFS mount from a cache of 60 s (`acdirmax`).
pub const LATE_LIST_MS: u64 = 60_000;

/// When their deletion is tried again after it has failed.
pub const PARTS_RETRY_MS: u64 = 3_600_000;

words! {
    /// OpenAI's states of a batch.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BatchStatus {
        #[default]
        Validating = "validating",
        Failed = "failed",
        InProgress = "in_progress",
        /// Its lines run no more; its results are put together.
        Finalizing = "finalizing",
        Completed = "completed",
        Expired = "expired",
        Cancelling = "cancelling",
        Cancelled = "cancelled",
    }
}

impl BatchStatus {
    /// Whether it never changes again.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Failed | Self::Completed | Self::Expired | Self::Cancelled => true,
            Self::Validating | Self::InProgress | Self::Finalizing | Self::Cancelling => false,
        }
    }
}

/// What a batch that is finalizing ends as, which is why lines of it may have no result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    #[default]
    Completed,
    Expired,
    Cancelled,
}

/// What a replica can do for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Check the input file and cut it into shards.
    Validate,
    /// Run the lines of the shard of this number.
    Shard(u32),
    /// Put the results together.
    Finalize,
    /// Delete all that is kept of the batch, the document last.
    Delete,
}

/// A replica does a work; no other starts it before the claim runs out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub work: Work,
    /// Random, drawn by a replica when it starts.
    pub owner: u64,
    /// Unix milliseconds.
    pub until_ms: u64,
}

/// Lines by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// Answered with a status of 2xx.
    pub completed: u32,
    pub failed: u32,
}

impl LineCounts {
    /// One line.
    pub fn one(is_ok: bool) -> Self {
        Self {
            completed: u32::from(is_ok),
            failed: u32::from(!is_ok),
        }
    }
}

impl AddAssign for LineCounts {
    fn add_assign(&mut self, other: Self) {
        self.completed = self.completed.saturating_add(other.completed);
        self.failed = self.failed.saturating_add(other.failed);
    }
}

/// Lines of a batch. Until it has ended, some of them are none of `completed`, `failed` and `not_run`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestCounts {
    pub total: u32,
    pub completed: u32,
    pub failed: u32,
    /// Lines of a batch that has expired or was cancelled before they ran.
    pub not_run: u32,
}

/// Tokens, summed over lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// With the cached ones.
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub cached_tokens: u64,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(other.cached_tokens);
    }
}

/// The results of a batch that were put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembled {
    /// The id and the size of the file of results. Of a Messages batch it has all results.
    pub output: Option<(String, u64)>,
    /// The file of the lines that failed or did not run.
    pub error: Option<(String, u64)>,
    /// Lines that have run. Those that have not are in the files, but not in these counts.
    pub counts: LineCounts,
    pub usage: Usage,
}

/// All that the store keeps of a batch. Times are Unix milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchRecord {
    pub id: String,
    pub tenant_name: String,
    pub flavor: Flavor,
    pub endpoint: LineEndpoint,
    pub input_file_id: String,
    /// As the client wrote it, such as `24h`.
    pub completion_window: String,
    pub metadata: Option<BTreeMap<String, String>>,
    /// How long its output files are kept, counted from when they are made.
    pub output_expires_after_s: Option<u64>,
    pub status: BatchStatus,
    /// Of a batch that is finalizing.
    pub ending: Ending,
    pub model: Option<String>,
    /// Why it has failed.
    pub errors: Vec<LineError>,
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
    pub created_ms: u64,
    pub expires_ms: u64,
    pub delete_ms: u64,
    pub in_progress_ms: Option<u64>,
    pub finalizing_ms: Option<u64>,
    pub completed_ms: Option<u64>,
    pub failed_ms: Option<u64>,
    pub expired_ms: Option<u64>,
    pub cancelling_ms: Option<u64>,
    pub cancelled_ms: Option<u64>,
    /// Whether its shards are known.
    pub is_validated: bool,
    pub shard_count: u32,
    /// Those of all lines together, about, with the output tokens that they name.
    pub tokens: u64,
    /// Shards from this one on were never claimed.
    pub next_shard: u32,
    /// Shards before it that were given back.
    pub returned: Vec<u32>,
    /// At most one for each work.
    pub claims: Vec<Claim>,
    pub counts: RequestCounts,
    pub usage: Usage,
    /// Whether its end was reported to the outbox, if it is to be.
    pub webhooks_sent: bool,
    /// Whether the parts of its results were deleted after its end.
    pub parts_deleted: bool,
    /// Their deletion has failed, and is not tried again before.
    pub parts_retry_ms: Option<u64>,
    /// The replica that accepted it, as [`Claim::owner`] has it; `None` of an older release.
    pub accepted_by: Option<u64>,
    /// Its creation is not complete, or was taken back: no client finds it, no replica runs it, and it is deleted at
    /// `delete_ms`.
    pub is_unconfirmed: bool,
    /// Members that only a newer release knows. Each change writes the whole record, and they would be lost with it.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

impl BatchRecord {
    /// The times of a new batch, which has nothing else. After `retention` it is deleted.
    pub fn new(now_ms: u64, window: Duration, retention: Duration) -> Self {
        let after = |at_ms: u64, time: Duration| at_ms.saturating_add(millis(time));
        let expires_ms = after(now_ms, window);
        Self {
            created_ms: now_ms,
            expires_ms,
            delete_ms: after(now_ms, retention).max(after(expires_ms, END_LIMIT)),
            ..Self::default()
        }
    }

    /// As it is written first.
    #[must_use]
    pub fn unconfirmed(&self) -> Self {
        Self {
            is_unconfirmed: true,
            delete_ms: self.created_ms.saturating_add(millis(UNCONFIRMED_LIMIT)),
            ..self.clone()
        }
    }

    /// Fails for what no release writes, and for states that only a newer release knows.
    pub fn from_json(text: &[u8]) -> Result<Self, serde_json::Error> {
        let record: Self = serde_json::from_slice(text)?;
        if record.id.is_empty() {
            return Err(serde_json::Error::custom("the record of a batch has no id"));
        }
        Ok(record)
    }

    pub fn to_json(&self) -> Bytes {
        // Texts, numbers and maps with texts as keys always serialize.
        Bytes::from(serde_json::to_vec(self).unwrap_or_default())
    }

    /// The status that clients see: who has cancelled a batch sees it cancelling until it is cancelled.
    pub fn shown_status(&self) -> BatchStatus {
        match (self.status, self.ending) {
            (BatchStatus::Finalizing, Ending::Cancelled) => BatchStatus::Cancelling,
            (status, _) => status,
        }
    }

    /// Until when a replica that refuses a model of the batch leaves the batch to others: the one that accepted it may
    /// have read a newer configuration, and fails the batch at once if it has not. `None`: the refusal counts.
    pub fn refusal_waits_until(&self, owner: u64, now_ms: u64) -> Option<u64> {
        let is_of_other = self.accepted_by.is_some_and(|acceptor| acceptor != owner);
        let until_ms = self.created_ms.saturating_add(REFUSAL_GRACE_MS);
        let until_ms = until_ms.min(self.expires_ms);
        (is_of_other && now_ms < until_ms).then_some(until_ms)
    }

    /// When it got its last status.
    pub fn ended_ms(&self) -> Option<u64> {
        match self.status {
            BatchStatus::Completed => self.completed_ms,
            BatchStatus::Failed => self.failed_ms,
            BatchStatus::Expired => self.expired_ms,
            BatchStatus::Cancelled => self.cancelled_ms,
            BatchStatus::Validating
            | BatchStatus::InProgress
            | BatchStatus::Finalizing
            | BatchStatus::Cancelling => None,
        }
    }
}

/// `batch_` or `msgbatch_` and 32 hex digits. `random` must not be guessable.
pub fn new_batch_id(flavor: Flavor, random: u128) -> String {
    let prefix = match flavor {
        Flavor::OpenAi => "batch",
        Flavor::Messages => "msgbatch",
    };
    format!("{prefix}_{random:032x}")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
