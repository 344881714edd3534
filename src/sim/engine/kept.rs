//! The blocks of finished prefill legs, which stay pinned in the cache until a decode engine has fetched them or
//! their time is over.

use std::collections::BTreeMap;
use std::time::Instant;

use super::cache::Path;
use super::types::RequestKey;

#[derive(Debug, Default)]
pub(super) struct KeptBlocks {
    /// For each request, its blocks and when they expire.
    paths: BTreeMap<RequestKey, (Path, Instant)>,
}

impl KeptBlocks {
    pub(super) fn insert(&mut self, key: RequestKey, path: Path, expires: Instant) {
        self.paths.insert(key, (path, expires));
    }

    /// Removes a request's entry. The caller must release the blocks in the cache.
    pub(super) fn remove(&mut self, key: RequestKey) -> Option<Path> {
        self.paths.remove(&key).map(|(path, _)| path)
    }

    /// Removes the entries that have expired at `at`. The caller must release the blocks in the cache.
    pub(super) fn remove_expired(&mut self, at: Instant) -> Vec<Path> {
        let expired = self.paths.extract_if(.., |_, (_, expires)| *expires <= at);
        expired.map(|(_, (path, _))| path).collect()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.paths.values().map(|(_, expires)| *expires).min()
    }

    /// The block ids of a request.
    pub(super) fn block_ids(&self, key: RequestKey) -> Option<Vec<u32>> {
        self.paths.get(&key).map(|(path, _)| path.numbers())
    }

    /// The number of blocks; a block in several paths counts for each.
    pub(super) fn total_blocks(&self) -> usize {
        self.paths.values().map(|(path, _)| path.len()).sum()
    }

    /// The number of requests.
    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }
}
