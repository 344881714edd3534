//! Which dp rank a rank's batches name. A publisher is one rank's, so a batch that names another one came to the wrong
//! subscriber: its blocks are in another cache. No I/O.

use tracing::warn;

#[derive(Debug)]
pub(super) struct NamedRank {
    rank: u32,
    /// A process with one rank may call itself any rank of a larger group, but always the same.
    is_any: bool,
    named: Option<u32>,
    is_logged: bool,
}

impl NamedRank {
    pub(super) fn new(rank: u32, is_any: bool) -> Self {
        Self {
            rank,
            is_any,
            named: None,
            is_logged: false,
        }
    }

    /// The engine's process may be another one.
    pub(super) fn forget(&mut self) {
        self.named = None;
    }

    /// Whether a batch that names this rank is one of those that are followed.
    pub(super) fn is_followed(&mut self, named: Option<u32>) -> bool {
        let Some(named) = named else {
            return true;
        };
        let expected = if self.is_any {
            *self.named.get_or_insert(named)
        } else {
            self.rank
        };
        if named != expected && !std::mem::replace(&mut self.is_logged, true) {
            warn!(
                rank = self.rank,
                expected,
                named,
                "KV events of another dp rank arrive on this rank's endpoint and are ignored; check the ports of its events"
            );
        }
        named == expected
    }
}
