//! Another replica's copy of the tree, for what the engine does not replay any more.
//!
//! A copy is worth nothing until the engine itself shows that it published the copy's last batch: it replays that
//! batch byte for byte, or the batch is among those that wait here. The first is the verification after a lost
//! connection, so a copy is taken over as a tree that has just been connected again: routing does not use it yet, and
//! the replay that verifies it also brings the batches after it.

use std::time::Instant;

use super::digests::DigestMatch;
use super::types::{PeerTree, PeerTreeRefusal, State, StateReason, Step, Steps, SuspectReason};
use super::{EventStream, Phase};

/// After this many trees on one connection that the engine did not confirm, no other is asked for.
const MAX_UNCONFIRMED: u32 = 3;

impl<T> EventStream<T> {
    /// Where the tree stands in the stream, for another replica. `None` if the tree does not count in routing, or if
    /// the engine could not confirm it.
    pub fn peer_tree(&self) -> Option<PeerTree> {
        let last = self.last?;
        if !self.state().counts_in_routing() || self.snapshot.is_some() {
            return None;
        }
        Some(PeerTree {
            sequence: last,
            digest: self.digests.last(last)?,
            is_complete: self.is_complete,
            incarnation: self.incarnation.clone(),
        })
    }

    /// Another replica gave its tree, which the caller keeps ready. If it is refused, the caller may ask the next one,
    /// unless no tree would be taken now, or call [`EventStream::on_no_peer_tree`].
    pub fn on_peer_tree(
        &mut self,
        now: Instant,
        tree: &PeerTree,
    ) -> Result<Steps<T>, PeerTreeRefusal> {
        let mut steps = Steps::new();
        match self.phase {
            _ if self.state() == State::Live => return Err(PeerTreeRefusal::NotNeeded),
            // The incarnation at hand is the lost connection's, and the engine may have another one by now.
            Phase::Disconnected { .. } => return Err(PeerTreeRefusal::Disconnected),
            _ if self.is_of_other_incarnation(tree) => {
                return Err(PeerTreeRefusal::OtherIncarnation);
            }
            Phase::AwaitingPeerTree { .. } => {
                match self.buffer.digest(tree.sequence) {
                    Some(digest) if digest == tree.digest => {}
                    Some(_) => return Err(PeerTreeRefusal::OtherDigest),
                    None => return Err(PeerTreeRefusal::NotYetConfirmed),
                }
                self.take_peer_tree(tree, &mut steps);
                // The batches up to the tree's are in it; the rest follows it.
                self.finish_replay(now, false, &mut steps);
            }
            _ if self.cannot_replay() => return Err(PeerTreeRefusal::Unconfirmed),
            Phase::Live | Phase::InitialReplay { .. } | Phase::Verifying { .. } => {
                if self.digests.compare(tree.sequence, tree.digest) == DigestMatch::Different {
                    return Err(PeerTreeRefusal::OtherDigest);
                }
                self.take_peer_tree(tree, &mut steps);
                self.verify(now, SuspectReason::PeerTree, now, &mut steps);
            }
        }
        Ok(steps)
    }

    /// Whether the batches applied here show that another replica's tree is of the process that the tree here is of.
    pub fn is_of_same_process(&self, tree: &PeerTree) -> bool {
        self.digests.compare(tree.sequence, tree.digest) == DigestMatch::Same
    }

    fn is_of_other_incarnation(&self, tree: &PeerTree) -> bool {
        let connected = self.connected_incarnation.as_ref();
        let both = connected.zip(tree.incarnation.as_ref());
        both.is_some_and(|(connected, of_tree)| connected != of_tree)
    }

    /// No replica has a tree that can be used. If they were asked before the connection was lost, they are asked once
    /// more: a tree may have been refused only because of that, and the other replicas may have lost the engine, too.
    pub fn on_no_peer_tree(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.peer_trees.is_requested = false;
        match self.phase {
            Phase::AwaitingPeerTree { .. } => {
                let was_interrupted = self.peer_trees.was_interrupted;
                if !was_interrupted || !self.request_peer_tree(&mut steps) {
                    self.stop_waiting(now, &mut steps);
                }
            }
            Phase::Live => self.want_interrupted_peer_tree(&mut steps),
            // The end of the replay asks again, or a live batch that ends the verification before it.
            Phase::Disconnected { .. } | Phase::InitialReplay { .. } | Phase::Verifying { .. } => {}
        }
        steps
    }

    fn take_peer_tree(&mut self, tree: &PeerTree, steps: &mut Steps<T>) {
        self.peer_trees.is_requested = false;
        self.peer_trees.was_interrupted = false;
        self.counts.peer_trees += 1;
        steps.push(Step::TakePeerTree);
        self.snapshot = None;
        self.regressed = None;
        self.digests.clear();
        self.digests.remember(tree.sequence, tree.digest);
        self.last = Some(tree.sequence);
        self.is_complete = tree.is_complete;
        self.reason = StateReason::PeerTree;
    }

    /// The engine replayed all it has, and that does not reach back to its first batch.
    pub(super) fn want_peer_tree(&mut self, steps: &mut Steps<T>) {
        let is_wanted = matches!(self.phase, Phase::Live | Phase::Verifying { .. })
            && self.last.is_some()
            && !self.is_complete
            && self.snapshot.is_none()
            && !self.cannot_replay();
        if is_wanted {
            self.request_peer_tree(steps);
        } else if !self.peer_trees.is_requested {
            self.peer_trees.was_interrupted = false;
        }
    }

    /// The process is verified: if the loss of the former connection interrupted a request, there is another one. There
    /// is one for each lost connection, and none at each silence for a tree that no replica has.
    pub(super) fn want_interrupted_peer_tree(&mut self, steps: &mut Steps<T>) {
        if self.peer_trees.was_interrupted {
            self.want_peer_tree(steps);
        }
    }

    /// The first batch is not the engine's first, and the engine cannot replay those before: waits for a tree, if
    /// there is anybody to ask.
    pub(super) fn await_peer_tree(&mut self, now: Instant, steps: &mut Steps<T>) -> bool {
        if !self.cannot_replay() || !self.request_peer_tree(steps) {
            return false;
        }
        let timeout = self.peer_trees.timeout.unwrap_or_default();
        self.phase = Phase::AwaitingPeerTree {
            deadline: now + timeout,
        };
        true
    }

    fn request_peer_tree(&mut self, steps: &mut Steps<T>) -> bool {
        let trees = &mut self.peer_trees;
        let may_ask = trees.timeout.is_some() && trees.unconfirmed < MAX_UNCONFIRMED;
        if !trees.is_requested {
            trees.was_interrupted = false;
        }
        if may_ask && !std::mem::replace(&mut trees.is_requested, true) {
            steps.push(Step::RequestPeerTree);
        }
        may_ask
    }

    /// Goes on with the batches that wait, as without other replicas.
    pub(super) fn stop_waiting(&mut self, now: Instant, steps: &mut Steps<T>) {
        // Not asked again on this connection.
        self.peer_trees.unconfirmed = MAX_UNCONFIRMED;
        self.last_input_at = now;
        self.finish_replay(now, false, steps);
    }
}
