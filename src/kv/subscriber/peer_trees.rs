//! What a subscriber notes of other replicas' trees of its rank.

use std::sync::Arc;
use std::time::Duration;

use crate::kv::stream::ResyncReason;
use crate::kv::tree_copies::{FetchedTree, TreeOutcome, TreeSource};

/// Requests of other replicas that wait for this tree. One replica asks once.
pub(super) const MAX_TREE_REQUESTS: usize = 8;

/// Longer than replicas are apart in reading an engine's events. Each further time waits longer by as much.
const FETCH_AGAIN_AFTER: Duration = Duration::from_millis(50);
const MAX_FETCHED_AGAIN: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct PeerTrees {
    /// A tree that the stream is about to take.
    pub(super) ready: Option<FetchedTree>,
    /// The tree that the engine is asked to confirm.
    pub(super) unconfirmed: Option<Unconfirmed>,
    /// Where a tree was refused, on this connection.
    pub(super) refused: Vec<Arc<str>>,
    /// How often a tree was fetched again because it was a moment too old or too new, on this connection.
    pub(super) fetched_again: u32,
}

#[derive(Debug)]
pub(super) struct Unconfirmed {
    pub(super) peer: Arc<str>,
    pub(super) source: Arc<str>,
    pub(super) blocks: u64,
}

impl PeerTrees {
    pub(super) fn on_connected(&mut self) {
        self.refused.clear();
        self.fetched_again = 0;
    }

    /// How long to wait before the same replica is asked again for a tree that could not be confirmed yet. `None` if
    /// it was asked often enough.
    pub(super) fn wait_to_fetch_again(&mut self) -> Option<Duration> {
        self.fetched_again += 1;
        (self.fetched_again <= MAX_FETCHED_AGAIN).then(|| FETCH_AGAIN_AFTER * self.fetched_again)
    }

    /// The tree was cleared: if it was another replica's, the engine did not confirm it.
    pub(super) fn note_clear(&mut self, reason: ResyncReason, trees: Option<&dyn TreeSource>) {
        let Some(tree) = self.unconfirmed.take() else {
            return;
        };
        if reason == ResyncReason::PeerTree {
            self.refused.push(tree.source);
        }
        if let Some(trees) = trees {
            trees.report(TreeOutcome::NotConfirmed);
        }
    }
}
