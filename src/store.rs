//! The response store: responses and conversations kept between requests, so that any replica can retrieve,
//! continue or cancel any of them; and documents, the small states of the Batch API that all replicas change.
//!
//! `response_store` has the trait and its contract, `documents` that of documents. `memory` (one replica) and `redis`
//! (shared by all replicas) implement it; `tests/it/store_contract.rs` tests both against the contract.

pub mod cancel;
pub mod charges;
pub mod conversation;
pub mod documents;
mod error;
mod history;
mod keys;
pub mod lease;
pub mod log;
pub mod memory;
mod meters;
pub mod outbox;
mod ownership;
pub mod record;
pub mod redis;
pub mod repeat;
mod response_store;
mod settings;
mod status;

use std::io;
use std::sync::Arc;

pub use self::cancel::{Notice, NoticeCursor};
pub use self::conversation::{
    Claim, Commit, CommitRefusal, Item, ItemOutcome, ItemsOutcome, LockOutcome, NewConversation,
    Page, PutOutcome,
};
pub use self::error::{Error, StoreFuture};
pub use self::history::{History, HistoryLimits, Turn, Turns};
pub use self::keys::{ConversationKey, ResponseKey};
pub use self::log::LoggedEvents;
pub use self::ownership::{FencingToken, Orphan, Owner, OwnershipLoss, TakenOver, Takeover};
pub use self::record::{
    CancelOutcome, Cancellation, CancelledOutput, Chain, DeleteOutcome, EventBatch, Finalization,
    IdempotencyToken, NewRecord, Record, RoutingHint, WriteOutcome,
};
pub use self::response_store::{
    BackgroundResponses, Conversations, Health, Ownership, Report, ResponseStore, Responses,
};
pub use self::settings::{NameOrMap, RetentionSettings, Settings, name_or_map};
pub use self::status::Status;
use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct OpenStore {
    pub responses: Arc<dyn ResponseStore>,
    /// The webhooks' events of its responses.
    pub outbox: Arc<dyn outbox::Outbox>,
    pub redis: Option<Arc<redis::Redis>>,
}

/// Opens the configured store, for a process with `io_threads` I/O threads. A Redis store connects at its
/// first operation.
pub fn open(settings: &Settings, io_threads: usize, registry: &Registry) -> io::Result<OpenStore> {
    let Some(redis) = &settings.redis else {
        let memory = memory::Memory::new(&settings.memory, &settings.retention, registry);
        let memory = Arc::new(memory);
        return Ok(OpenStore {
            responses: memory.clone(),
            outbox: memory,
            redis: None,
        });
    };
    let redis = redis::Redis::open(redis, &settings.retention, io_threads, registry)?;
    let redis = Arc::new(redis);
    Ok(OpenStore {
        responses: redis.clone(),
        outbox: redis.clone(),
        redis: Some(redis),
    })
}
