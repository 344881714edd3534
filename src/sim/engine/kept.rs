//! Blocks that stay in use after their request's end, for another engine to fetch, until it has or its time is up.

use std::collections::BTreeMap;
use std::time::Instant;

use super::RequestKey;
use super::cache::Path;

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

    /// Those whose time was up at `at`.
    pub(super) fn remove_ended(&mut self, at: Instant) -> Vec<Path> {
        let ended = self.paths.extract_if(.., |_, (_, until)| *until <= at);
        ended.map(|(_, (path, _))| path).collect()
    }

    pub(super) fn next_end(&self) -> Option<Instant> {
        self.paths.values().map(|(_, until)| *until).min()
    }

    pub(super) fn blocks(&self, key: RequestKey) -> Option<Vec<u32>> {
        self.paths.get(&key).map(|(path, _)| path.numbers())
    }

    /// Blocks that several paths share count for each of them.
    pub(super) fn all_blocks(&self) -> usize {
        self.paths.values().map(|(path, _)| path.len()).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }
}
