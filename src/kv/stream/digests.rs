//! Digests of the last applied batches, by which the engine's process is recognised.

use std::collections::VecDeque;

/// Enough for all batches that can be in flight both live and in a replay.
pub(super) const MAX_DIGESTS: usize = 512;

/// Digests of batches with consecutive sequence numbers.
#[derive(Clone, Debug)]
pub(super) struct DigestWindow {
    /// Sequence number of the first.
    first: u64,
    digests: VecDeque<u128>,
    digests_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DigestMatch {
    Same,
    /// A different batch with the same number: another process.
    Different,
    /// Not in the window.
    Unknown,
}

impl DigestWindow {
    pub(super) fn new(digests_max: usize) -> Self {
        Self {
            first: 0,
            digests: VecDeque::new(),
            digests_max,
        }
    }

    pub(super) fn remember(&mut self, sequence: u64, digest: u128) {
        let next = self.first.checked_add(self.digests.len() as u64);
        if next != Some(sequence) {
            self.clear();
        }
        if self.digests.is_empty() {
            self.first = sequence;
        }
        if self.digests.len() >= self.digests_max {
            self.digests.pop_front();
            self.first += 1;
        }
        self.digests.push_back(digest);
    }

    pub(super) fn compare(&self, sequence: u64, digest: u128) -> DigestMatch {
        let place = sequence
            .checked_sub(self.first)
            .and_then(|place| usize::try_from(place).ok());
        match place.and_then(|place| self.digests.get(place)) {
            Some(known) if *known == digest => DigestMatch::Same,
            Some(_) => DigestMatch::Different,
            None => DigestMatch::Unknown,
        }
    }

    /// Whether `sequence` is the last one remembered.
    pub(super) fn ends_with(&self, sequence: u64) -> bool {
        let length = self.digests.len() as u64;
        length > 0 && sequence.checked_sub(self.first) == Some(length - 1)
    }

    /// The digest of `sequence`, if that is the last one remembered.
    pub(super) fn last(&self, sequence: u64) -> Option<u128> {
        self.digests
            .back()
            .copied()
            .filter(|_| self.ends_with(sequence))
    }

    pub(super) fn clear(&mut self) {
        self.digests.clear();
    }
}
