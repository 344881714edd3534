//! Blocks of finished requests that stay pinned for a decode engine to fetch, until they are released or expire. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use super::cache::Path;
use super::types::RequestKey;

#[derive(Debug, Default)]
pub(super) struct Kept {
    paths: BTreeMap<RequestKey, (Path, Instant)>,
}

impl Kept {
    pub(super) fn insert(&mut self, key: RequestKey, path: Path, until: Instant) {
        self.paths.insert(key, (path, until));
    }

    pub(super) fn remove(&mut self, key: RequestKey) -> Option<Path> {
        self.paths.remove(&key).map(|(path, _)| path)
    }

    /// Removes the entries that have expired at `at`.
    pub(super) fn remove_expired(&mut self, at: Instant) -> Vec<Path> {
        let expired = self.paths.extract_if(.., |_, (_, until)| *until <= at);
        expired.map(|(_, (path, _))| path).collect()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.paths.values().map(|(_, until)| *until).min()
    }

    pub(super) fn blocks(&self, key: RequestKey) -> Option<Vec<u32>> {
        self.paths.get(&key).map(|(path, _)| path.numbers())
    }

    /// The number of blocks; a block in several paths counts for each.
    pub(super) fn total_blocks(&self) -> usize {
        self.paths.values().map(|(path, _)| path.len()).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }
}
