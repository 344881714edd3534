//! A decoded message.

use crate::kv::event::{Batch, Load};
use crate::kv::source::SnapshotChunk;

/// One message of the stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// The rank's sequence number.
    pub sequence: u64,
    pub batch: Batch,
    pub snapshot: Option<SnapshotChunk>,
    pub load: Option<Load>,
    /// It only carries a load report, and its sequence number is another batch's.
    pub is_load_only: bool,
}
