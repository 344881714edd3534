//! Work that can wait: OpenAI's Files and Batches APIs, and Anthropic's Message Batches, on what interactive requests
//! leave idle.
//!
//! ```text
//! upload ─▶ files ─▶ storage (bytes) + store (record)
//! create ─▶ service ─▶ store (record) ─▶ runner of any replica: validation ─▶ shards ─▶ lines ─▶ parts ─▶ output
//!                                        claims (leases)                      room_gate, send       storage
//! ```
//!
//! Bodies lie in the storage; the store has states and positions, changed by compare-and-set. Leases only keep two
//! replicas from the same work: results are right without them, because the assembly keeps the first result of each
//! line.

pub mod batch;
pub mod claims;
mod clock;
pub mod create_batch;
pub mod custom_ids;
mod endpoints;
pub mod file;
pub mod files;
pub mod line;
mod list_page;
mod list_query;
pub mod memory_bounds;
pub mod messages_batch;
mod messages_endpoints;
pub mod messages_requests;
pub mod metrics;
mod new_records;
pub mod object;
pub mod output;
mod paths;
mod queued_tokens;
mod records;
pub mod room_gate;
pub mod routes;
mod runner;
pub mod running;
pub mod send;
pub mod service;
pub mod settings;
pub mod shards;
pub mod storage;
mod storage_error;
mod storage_identity;
mod storage_trial;
mod turns;
pub mod validation;
pub mod works;

pub use self::file::{FilePurpose, FileRecord};
pub use self::files::{FileUpload, Files};
pub use self::memory_bounds::{HeldAnswer, MemoryBounds};
pub use self::metrics::Metrics;
pub use self::routes::{BatchEndpoint, route};
pub use self::send::{LineAnswer, LineRequest, LookUpFuture, SendFuture, SendLine};
pub use self::service::{BatchCaller, Batches};
pub use self::settings::{HAS_S3, S3Settings, Settings};
pub use self::storage::{Storage, StorageError, StorageOperation, StorageReader, StorageWriter};
