//! Another replica's copy of the tree, and copies of this one for others.

use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::peer_trees::Unconfirmed;
use super::{BLOCKS_PER_TURN, PAGES_PER_TURN, Task};
use crate::kv::event::Batch;
use crate::kv::index::{CopiedBlocks, GraftCursor};
use crate::kv::page_fold::{CopiedPages, PageCopyCursor};
use crate::kv::stream::{PeerTreeRefusal, State, StateReason, Steps};
use crate::kv::tree_copies::{FetchedTree, NoTree, TreeCopy, TreeOutcome, WantedTree};
use crate::observe;

impl Task {
    pub(super) fn fetch_peer_tree(&mut self, after: Duration) {
        let Some(trees) = &self.trees else {
            return;
        };
        let tree = self.tree.tree();
        let fetch = trees.fetch(WantedTree {
            worker: self.subject.name.clone(),
            address: self.subject.address.clone(),
            rank: self.subject.rank,
            model: self.subject.model.clone(),
            shape: tree.map(|(shape, _)| *shape),
            known_blocks: tree.map_or(0, |(_, tree)| tree.len()),
            refused: self.peer_trees.refused.clone(),
        });
        self.fetching = Some(Box::pin(async move {
            tokio::time::sleep(after).await;
            fetch.await
        }));
    }

    pub(super) fn on_peer_tree(
        &mut self,
        now: Instant,
        fetched: Option<FetchedTree>,
    ) -> Steps<Batch> {
        let Some(mut fetched) = fetched else {
            debug!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                "no other replica has a tree of this rank"
            );
            return self.stream.on_no_peer_tree(now);
        };
        let (peer, source) = (fetched.peer.clone(), fetched.source.clone());
        let is_of_same_process = self.stream.is_of_same_process(&fetched.copy.position);
        match self.stream.on_peer_tree(now, &fetched.copy.position) {
            Ok(steps) => {
                // A replica of an older release does not say what it saw.
                fetched.copy.has_matching_names |=
                    is_of_same_process && self.tree.has_matching_names();
                self.peer_trees.ready = Some(fetched);
                steps
            }
            Err(reason @ PeerTreeRefusal::NotYetConfirmed)
                if let Some(after) = self.peer_trees.wait_to_fetch_again() =>
            {
                debug!(
                    worker = %self.subject.name,
                    rank = self.subject.rank,
                    %peer,
                    reason = reason.as_str(),
                    "the tree of another replica is fetched again"
                );
                self.fetch_peer_tree(after);
                Steps::new()
            }
            // Nor would that of any other replica be taken. The stream asks again once it is connected again.
            Err(
                reason @ (PeerTreeRefusal::NotNeeded
                | PeerTreeRefusal::Unconfirmed
                | PeerTreeRefusal::Disconnected),
            ) => {
                if let Some(trees) = &self.trees {
                    trees.report(TreeOutcome::Refused(reason));
                }
                self.stream.on_no_peer_tree(now)
            }
            Err(reason) => {
                warn!(
                    worker = %self.subject.name,
                    rank = self.subject.rank,
                    %peer,
                    reason = reason.as_str(),
                    "the tree of another replica is not taken over"
                );
                if let Some(trees) = &self.trees {
                    trees.report(TreeOutcome::Refused(reason));
                }
                self.peer_trees.refused.push(source);
                self.fetch_peer_tree(Duration::ZERO);
                Steps::new()
            }
        }
    }

    pub(super) async fn take_peer_tree(&mut self) {
        let Some(FetchedTree { peer, source, copy }) = self.peer_trees.ready.take() else {
            return;
        };
        self.status.entry().on_cleared(observe::now());
        self.tree
            .begin_graft(copy.shape, &copy.learned, copy.has_matching_names);
        let mut cursor = GraftCursor::default();
        while let Some(tree) = self.tree.tree_mut()
            && tree.graft_next(&mut cursor, BLOCKS_PER_TURN as usize, &copy.blocks)
        {
            tokio::task::yield_now().await;
        }
        let has_all_pages = self.take_peer_pages(&copy.pages).await;
        let is_whole = copy.blocks.orphans + cursor.missing == 0 && has_all_pages;
        if !is_whole || self.tree.take_evicted() {
            self.stream.on_incomplete();
        }
        self.peer_trees.unconfirmed = Some(Unconfirmed {
            peer,
            source,
            blocks: copy.blocks.len() as u64,
        });
    }

    /// Takes over another replica's pages, without which pages that continue them could not be placed. Returns whether all
    /// are taken.
    async fn take_peer_pages(&mut self, pages: &CopiedPages) -> bool {
        let Some(own) = self.tree.pages.as_mut().filter(|_| !pages.is_empty()) else {
            return pages.is_empty();
        };
        let Some(fold) = own.begin_graft(pages.page_size) else {
            return true;
        };
        let mut cursor = PageCopyCursor::default();
        while fold.graft_next(&mut cursor, PAGES_PER_TURN, pages) {
            tokio::task::yield_now().await;
        }
        fold.take_forgotten() == 0
    }

    /// Says where the tree is from, once that is certain.
    pub(super) fn note_origin(&mut self) {
        let state = self.stream.state();
        if !state.counts_in_routing() {
            return;
        }
        if let Some(tree) = self.peer_trees.unconfirmed.take() {
            let Unconfirmed { peer, blocks, .. } = tree;
            info!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                %peer,
                blocks,
                is_complete = state == State::Live,
                "the tree of another replica is taken over; the engine confirmed it"
            );
            if let Some(trees) = &self.trees {
                trees.report(TreeOutcome::Taken { blocks });
            }
            self.set_origin(format!("peer {peer}"));
            return;
        }
        let origin = match self.stream.reason() {
            StateReason::FullReplay => "engine replay",
            StateReason::Snapshot | StateReason::PartialSnapshot => "engine snapshot",
            // Some blocks less, but still the same tree.
            StateReason::PeerTree | StateReason::Incomplete => return,
            StateReason::Starting
            | StateReason::HistoryTruncated
            | StateReason::EngineCleared
            | StateReason::Disconnected
            | StateReason::Suspect(_)
            | StateReason::Resync(_) => "events",
        };
        if self.origin != origin {
            self.set_origin(origin.to_owned());
        }
    }

    fn set_origin(&mut self, origin: String) {
        self.origin.clone_from(&origin);
        self.status
            .update(|report| report.status.tree_from = Some(origin));
    }

    /// A copy of the tree for another replica. Lookups go on, and so do the events of other ranks; this rank's wait.
    pub(super) async fn copy_tree(&mut self) -> Result<TreeCopy, NoTree> {
        let mut position = self.stream.peer_tree().ok_or(NoTree::Cold)?;
        let (shape, tree) = self.tree.tree().ok_or(NoTree::Cold)?;
        let mut blocks = CopiedBlocks::default();
        let mut cursor = tree.begin_copy();
        while tree.copy_next(&mut cursor, BLOCKS_PER_TURN as usize, &mut blocks) {
            tokio::task::yield_now().await;
        }
        // An empty tree would look like knowledge.
        if blocks.is_empty() {
            return Err(NoTree::Cold);
        }
        let shape = *shape;
        if self.tree.take_evicted() {
            self.stream.on_incomplete();
            position.is_complete = false;
        }
        position.is_complete &= blocks.orphans == 0;
        let mut pages = CopiedPages::default();
        if let Some(fold) = self.tree.pages.as_ref().and_then(|own| own.fold.as_ref()) {
            let mut cursor = PageCopyCursor::default();
            while fold.copy_next(&mut cursor, PAGES_PER_TURN, &mut pages) {
                tokio::task::yield_now().await;
            }
        }
        Ok(TreeCopy {
            position,
            shape,
            learned: self.tree.filter.learned(),
            has_matching_names: self.tree.has_matching_names(),
            blocks,
            pages,
        })
    }
}
