//! A snapshot: the messages that bring a late subscriber to the state after one batch.

use std::sync::Arc;

use bytes::Bytes;

use super::cached_blocks::CachedBlocks;
use crate::http::grpc::frame;
use crate::kv::event::Batch;
use crate::kv::protobuf::encode_batch;
use crate::kv::source::SnapshotChunk;

/// Bytes of events in one part of a snapshot: gRPC readers commonly refuse messages above 4 MiB.
const PART_BYTES: usize = 1 << 20;

/// All blocks that were cached after one batch, encoded.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    /// That batch's sequence number.
    pub(super) number: u64,
    pub(super) parts: Arc<[Bytes]>,
    pub(super) bytes: usize,
    /// Whether a subscriber got it. The one it was made for may have given up and come again.
    pub(super) was_used: bool,
}

/// The cached blocks, taken out of their incarnation so that it can continue while the snapshot is made.
/// A million blocks of 16 tokens become 58 MB; that takes 9 s in an unoptimised build, and the
/// incarnation is locked for 14 us of it.
#[derive(Debug)]
pub struct SnapshotJob {
    /// Its id.
    pub(super) incarnation: String,
    pub(super) blocks: CachedBlocks,
    pub(super) number: u64,
    pub(super) rank: u32,
    pub(super) unknown_before: u64,
    pub(super) timestamp: f64,
}

impl SnapshotJob {
    /// The snapshot, and the blocks for their incarnation.
    pub(super) fn make(self) -> (CachedBlocks, Snapshot) {
        let events = self.blocks.snapshot_events(PART_BYTES);
        let count = u32::try_from(events.len()).expect("parts of a megabyte each");
        // If blocks are missing, the reader must know that the snapshot is incomplete, not by how much.
        let unknown_before = self
            .unknown_before
            .max(u64::from(self.blocks.missing() > 0));
        let blocks = self.blocks.blocks() as u64;
        let numbers = self.number - u64::from(count) + 1..;
        let parts = (0..).zip(numbers).zip(events);
        let parts = parts.map(|((index, number), events)| {
            let chunk = SnapshotChunk {
                index,
                count,
                unknown_before,
            };
            let batch = Batch {
                joined: 0,
                timestamp: self.timestamp,
                rank: Some(self.rank),
                events,
            };
            let encoded = encode_batch(number, &batch, Some((chunk, blocks)));
            frame(
                &encoded
                    .expect("these blocks were encoded when they were stored")
                    .message,
            )
        });
        let parts: Arc<[Bytes]> = parts.collect();
        let snapshot = Snapshot {
            number: self.number,
            bytes: parts.iter().map(Bytes::len).sum(),
            parts,
            was_used: false,
        };
        (self.blocks, snapshot)
    }
}
