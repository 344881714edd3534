//! A bounded buffer of live batches that arrive during a replay or after a gap.

use std::collections::BTreeMap;

use super::types::Settings;
use crate::kv::source::SourceBatch;

#[derive(Clone, Debug)]
pub(super) struct ReorderBuffer<T> {
    frames: BTreeMap<u64, SourceBatch<T>>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl<T> ReorderBuffer<T> {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            frames: BTreeMap::new(),
            bytes: 0,
            batches_max: settings.max_queued_batches,
            bytes_max: settings.max_queued_size,
        }
    }

    /// Adds a batch. Returns false if there is no room; the earlier ones stay, since they continue the
    /// stream and later ones can be requested again.
    pub(super) fn push(&mut self, frame: SourceBatch<T>) -> bool {
        if self.frames.contains_key(&frame.sequence) {
            return true;
        }
        // The first always fits; otherwise a batch above the bound would be requested for ever.
        let has_room = self.frames.is_empty()
            || self.frames.len() < self.batches_max
                && self.bytes.saturating_add(frame.bytes) <= self.bytes_max;
        if has_room {
            self.bytes += frame.bytes;
            self.frames.insert(frame.sequence, frame);
        }
        has_room
    }

    pub(super) fn first(&self) -> Option<&SourceBatch<T>> {
        self.frames.values().next()
    }

    pub(super) fn take_first(&mut self) -> Option<SourceBatch<T>> {
        let (_, frame) = self.frames.pop_first()?;
        self.bytes -= frame.bytes;
        Some(frame)
    }

    pub(super) fn digest(&self, sequence: u64) -> Option<u128> {
        self.frames.get(&sequence).map(|frame| frame.digest)
    }

    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Moves the batches out.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self {
            frames: BTreeMap::new(),
            bytes: 0,
            ..*self
        };
        std::mem::replace(self, empty)
    }

    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.bytes = 0;
    }
}
