//! Live batches that wait until it is clear where they belong; bounded.

use std::collections::BTreeMap;

use super::words::{Numbered, Settings};

#[derive(Clone, Debug)]
pub(super) struct Held<T> {
    frames: BTreeMap<u64, Numbered<T>>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl<T> Held<T> {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            frames: BTreeMap::new(),
            bytes: 0,
            batches_max: settings.held_batches_max,
            bytes_max: settings.held_bytes_max,
        }
    }

    /// Keeps a batch. Gives false where there is no room: the earlier ones are worth more, since they
    /// continue what is known, and the later ones can be asked for.
    pub(super) fn keep(&mut self, frame: Numbered<T>) -> bool {
        if self.frames.contains_key(&frame.sequence) {
            return true;
        }
        // One always fits, or a batch larger than the bound would be asked for for ever.
        let has_room = self.frames.is_empty()
            || self.frames.len() < self.batches_max
                && self.bytes.saturating_add(frame.bytes) <= self.bytes_max;
        if has_room {
            self.bytes += frame.bytes;
            self.frames.insert(frame.sequence, frame);
        }
        has_room
    }

    pub(super) fn first(&self) -> Option<&Numbered<T>> {
        self.frames.values().next()
    }

    pub(super) fn take_first(&mut self) -> Option<Numbered<T>> {
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

    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.bytes = 0;
    }
}
