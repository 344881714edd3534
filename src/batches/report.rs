//! Reports of the ends of batches. Who is to learn of them is decided by whoever implements this.

use std::fmt::Debug;

use super::batch::BatchStatus;
use crate::ids::Tenant;
use crate::store::StoreFuture;

/// The end of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchEnd {
    pub tenant: Tenant,
    /// The id of the batch.
    pub id: String,
    /// A terminal status.
    pub status: BatchStatus,
    /// When it ended, in Unix seconds.
    pub ended_s: i64,
}

/// Takes reports of ends, each at least once.
pub trait ReportEnd: Send + Sync + Debug {
    /// From `Ok` on the report outlasts this process.
    fn report(&self, end: BatchEnd) -> StoreFuture<'_, ()>;
}
