//! A request for a copy of one rank's tree, on its way to the subscriber that has the tree.

use tokio::sync::oneshot;

use crate::kv::tree_copies::{NoTree, TreeCopy};

#[derive(Debug)]
pub(super) struct TreeRequest(oneshot::Sender<Result<TreeCopy, NoTree>>);

impl TreeRequest {
    pub(super) fn new() -> (Self, oneshot::Receiver<Result<TreeCopy, NoTree>>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), receiver)
    }

    pub(super) fn answer(self, copy: Result<TreeCopy, NoTree>) {
        // Whoever asked may be gone.
        let _ = self.0.send(copy);
    }
}
