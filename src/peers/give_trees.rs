//! Gives this replica's trees to others: one at a time, whoever asks.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::debug;

use super::frame::framed;
use super::link::{Failure, Link, TreeHandler};
use super::metrics::TreeMetrics;
use super::numbers::WorkerKey;
use super::tree_wire;
use super::wire::TreeRequest;
use super::wire::peer_message::Kind;
use super::workers::ranks_of;
use crate::fleet::registry::Registry;
use crate::fleet::{Status, Worker};
use crate::ids::WorkerId;
use crate::kv::predicted::PredictedIndex;
use crate::kv::subscriber::StatusBoard;
use crate::kv::tree_copies::{NoTree, TreeCopy};
use crate::observe;

/// A replica that asks for nothing, or takes nothing, for this long is disconnected.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How long a request waits for a tree that does not count because this replica has lost the engine as well: both often
/// lose it in the same moment, and know it again a moment later. The first attempts to connect again come within two
/// seconds, and the other replica waits ten for its turn and the first chunk.
const MAX_STALE: Duration = Duration::from_secs(3);
/// How often it is looked whether a tree counts again.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Of one worker, or of one of its ranks: about what 800,000 tokens take.
const MAX_PREDICTED_BLOCKS: usize = 50_000;

/// What this replica knows of the workers' caches.
#[derive(Clone, Debug)]
pub struct TreeGiver {
    fleet: Arc<Registry>,
    board: Arc<StatusBoard>,
    predicted: Arc<PredictedIndex>,
    metrics: TreeMetrics,
    turn: Arc<Semaphore>,
    /// [`MAX_STALE`]; tests have another one.
    max_stale: Duration,
}

impl TreeGiver {
    pub fn new(
        fleet: Arc<Registry>,
        board: Arc<StatusBoard>,
        predicted: Arc<PredictedIndex>,
        metrics: TreeMetrics,
    ) -> Self {
        Self {
            fleet,
            board,
            predicted,
            metrics,
            turn: Arc::new(Semaphore::new(1)),
            max_stale: MAX_STALE,
        }
    }

    pub fn handler(self) -> TreeHandler {
        TreeHandler::new(move |link| {
            let giver = self.clone();
            Box::pin(async move { giver.serve(link).await })
        })
    }

    async fn serve(&self, mut link: Link) {
        loop {
            let received = timeout(PATIENCE, link.receive()).await;
            let Ok(Ok(Some((Some(Kind::TreeRequest(request)), _)))) = received else {
                return;
            };
            let wait_for_turn = async {
                // Other replicas have their turns meanwhile. What this one would ask for next waits, too.
                self.wait_while_stale(&request).await;
                self.turn.acquire().await
            };
            let turn = tokio::select! {
                biased;
                // A replica asks for one tree after the other, so this is the end of its stream, and nobody waits for
                // the tree any more.
                _ = link.receive() => {
                    debug!(peer = %link.peer.name, "a replica that waited for a tree is gone");
                    return self.count("failed");
                }
                turn = wait_for_turn => turn,
            };
            let Ok(_turn) = turn else {
                return;
            };
            let outcome = match self.give(&link, &request).await {
                Ok(outcome) => outcome,
                Err(failure) => {
                    debug!(peer = %link.peer.name, %failure, "a replica stopped reading a tree");
                    self.count("failed");
                    return;
                }
            };
            self.count(outcome);
        }
    }

    /// Waits until the tree counts here again, or is empty. A tree that has not counted for longer than
    /// [`Self::max_stale`] is not waited for.
    async fn wait_while_stale(&self, request: &TreeRequest) {
        let Some(worker) = self.worker(&request.worker) else {
            return;
        };
        while let Some(since) = self.board.stale_since(worker.id, request.rank)
            && observe::now().saturating_duration_since(since) < self.max_stale
        {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn count(&self, outcome: &str) {
        self.metrics.given.with_label_values(&[outcome]).inc();
    }

    async fn give(&self, link: &Link, request: &TreeRequest) -> Result<&'static str, Failure> {
        if request.worker.is_empty() {
            self.give_predicted(link).await?;
            return Ok("predicted");
        }
        match self.copy(request).await {
            Ok(copy) => {
                for chunk in tree_wire::chunks(&copy) {
                    send(link, Kind::TreeChunk(chunk)).await?;
                }
                Ok("given")
            }
            Err(reason) => {
                send(link, Kind::TreeChunk(tree_wire::refusal(reason))).await?;
                Ok(reason.as_str())
            }
        }
    }

    async fn copy(&self, request: &TreeRequest) -> Result<TreeCopy, NoTree> {
        let worker = self.worker(&request.worker).ok_or(NoTree::UnknownRank)?;
        self.board
            .copy_tree(worker.id, request.rank, &request.model)
            .await
    }

    fn worker(&self, address: &str) -> Option<Arc<Worker>> {
        let snapshot = self.fleet.snapshot();
        let mut workers = snapshot.workers.iter().map(|status| &status.worker);
        workers
            .find(|worker| worker.pool.address() == address)
            .cloned()
    }

    async fn give_predicted(&self, link: &Link) -> Result<(), Failure> {
        let snapshot = self.fleet.snapshot().clone();
        let owners: Vec<_> = snapshot.workers.iter().flat_map(owners_of).collect();
        let caches = owners.into_iter().map(|(key, owner)| {
            let blocks = self
                .predicted
                .copy(observe::now(), owner, MAX_PREDICTED_BLOCKS);
            (key, blocks)
        });
        for chunk in tree_wire::predicted_chunks(caches) {
            send(link, Kind::TreeChunk(chunk)).await?;
        }
        Ok(())
    }
}

/// The caches of a worker: of requests that are pinned to none of its dp ranks, and of each rank.
fn owners_of(status: &Status) -> Vec<(WorkerKey, WorkerId)> {
    let worker = &status.worker;
    let address: Arc<str> = worker.pool.address().into();
    let ranks = (0..ranks_of(status)).map(Some);
    let owner = |rank| {
        let address = address.clone();
        (WorkerKey { address, rank }, worker.id.cache_owner(rank))
    };
    std::iter::once(None).chain(ranks).map(owner).collect()
}

async fn send(link: &Link, kind: Kind) -> Result<(), Failure> {
    // Lets this replica's reports of load go in between.
    tokio::task::yield_now().await;
    timeout(PATIENCE, link.send(framed(kind)))
        .await
        .map_err(|_| Failure::Lost("it takes nothing".to_owned()))?
}

#[cfg(test)]
mod tests;
