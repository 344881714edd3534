//! Copies trees of other replicas: from each of them one at a time, in random order.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::{debug, info};

use super::frame::framed;
use super::give_trees;
use super::handle::Peers;
use super::link::{Failure, Link};
use super::metrics::TreeMetrics;
use super::numbers::WorkerKey;
use super::tree_wire::{self, ArrivingTree, Expected, Unusable};
use super::wire::peer_message::Kind;
use super::wire::{TreeChunk, TreeRequest};
use super::workers::ranks_of;
use crate::fleet::{Snapshot, Worker};
use crate::ids::WorkerId;
use crate::kv::predicted::PredictedIndex;
use crate::kv::tree_copies::{FetchedTree, TreeOutcome, TreeSource, WantedTree};
use crate::observe;

/// A replica that sends nothing for this long is not waited for. It serves one request at a time, so others may be
/// served before.
const PATIENCE: Duration = Duration::from_secs(10);
/// For one tree, whoever gives it. What a slow network does not bring until then, KV events bring with time.
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);
/// A tree whose stream is lost is not asked for again a longer time after it was asked for: the other replica may have
/// given up this one, which took nothing, and would again.
const ASK_AGAIN_WITHIN: Duration = give_trees::PATIENCE;
/// How often it is looked whether a replica is ready.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Of one tree: 64 million tokens, in 64 MiB.
const MAX_BLOCKS: u64 = 4_000_000;

#[derive(Clone, Debug)]
pub struct TreeTaker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    peers: Peers,
    metrics: TreeMetrics,
    timeout: Duration,
    /// [`PATIENCE`]; tests have less.
    patience: Duration,
    /// [`ASK_AGAIN_WITHIN`]; tests have another one.
    ask_again_within: Duration,
    /// A replica was lost before it had answered.
    has_lost: AtomicBool,
    /// A replica has answered to the end.
    has_answer: AtomicBool,
    sources: Mutex<FxHashMap<Arc<str>, Arc<Slot>>>,
}

/// One replica that gives trees.
#[derive(Debug)]
struct Slot {
    turn: Semaphore,
    /// Trees that wait for their turn.
    waiting: AtomicUsize,
    /// A stream that the next one uses.
    link: Mutex<Option<Link>>,
}

/// The start of a replica's answer, and the stream on which the rest comes.
struct FirstChunk {
    link: Link,
    chunk: TreeChunk,
    asked_at: Instant,
}

#[derive(Debug, thiserror::Error)]
enum NotTaken {
    #[error("{0}")]
    Failure(#[from] Failure),
    /// It may be alive and busy, so it is not asked again on another stream: that would only add to its work.
    #[error("it sends nothing")]
    Silent,
    #[error("{0:?}")]
    Unusable(Unusable),
}

impl NotTaken {
    /// The metric label.
    fn as_str(&self) -> String {
        match self {
            NotTaken::Failure(_) | NotTaken::Silent => "unreachable".to_owned(),
            // What the other replica says is one of few words; anything else must not make a series each.
            NotTaken::Unusable(Unusable::Refused(reason)) => match reason.as_str() {
                "cold" | "unknown_rank" | "busy" => reason.clone(),
                _ => "refused".to_owned(),
            },
            NotTaken::Unusable(unusable) => unusable.as_str().to_owned(),
        }
    }
}

impl From<Unusable> for NotTaken {
    fn from(unusable: Unusable) -> Self {
        NotTaken::Unusable(unusable)
    }
}

impl TreeTaker {
    /// `timeout`: how long batches of KV events wait for a tree at most.
    pub fn new(peers: Peers, timeout: Duration, metrics: TreeMetrics) -> Self {
        Self(Arc::new(Shared {
            peers,
            metrics,
            timeout,
            patience: PATIENCE,
            ask_again_within: ASK_AGAIN_WITHIN,
            has_lost: AtomicBool::new(false),
            has_answer: AtomicBool::new(false),
            sources: Mutex::default(),
        }))
    }

    /// Whether each replica that was asked until now was lost before it had answered.
    pub fn are_sources_lost(&self) -> bool {
        self.0.has_lost.load(Relaxed) && !self.0.has_answer.load(Relaxed)
    }

    fn note<T>(&self, answer: &Result<T, NotTaken>) {
        match answer {
            Err(NotTaken::Failure(_) | NotTaken::Silent) => self.0.has_lost.store(true, Relaxed),
            Ok(_) | Err(NotTaken::Unusable(_)) => self.0.has_answer.store(true, Relaxed),
        }
    }

    /// Takes over what another replica predicts. Returns its name, if there was one.
    pub async fn take_predicted(
        &self,
        fleet: &Snapshot,
        predicted: &PredictedIndex,
    ) -> Option<Arc<str>> {
        for source in self.sources().await {
            let answer = self.ask_predicted(&source, fleet, predicted).await;
            self.note(&answer);
            match answer {
                Ok((peer, blocks)) => {
                    info!(%peer, blocks, "predicted blocks of another replica are taken over");
                    self.0.metrics.predicted_blocks.inc_by(blocks as u64);
                    return Some(peer);
                }
                Err(why) => debug!(%source, reason = %why, "no predicted blocks"),
            }
        }
        None
    }

    /// The replicas to ask, in random order; waits until there is one or none is to be expected.
    async fn sources(&self) -> Vec<Arc<str>> {
        loop {
            let mut sources = self.0.peers.tree_sources();
            if !sources.ready.is_empty() || !sources.may_grow {
                fastrand::shuffle(&mut sources.ready);
                return sources.ready;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    async fn ask_all(&self, wanted: WantedTree) -> Option<FetchedTree> {
        let metrics = &self.0.metrics;
        for source in self.sources().await {
            if wanted.refused.contains(&source) {
                continue;
            }
            let answer = self.ask(&source, &wanted).await;
            self.note(&answer);
            match answer {
                Ok(tree) => return Some(tree),
                Err(why) => {
                    debug!(worker = %wanted.worker, rank = wanted.rank, %source, reason = %why, "no tree from this replica");
                    metrics.taken.with_label_values(&[&why.as_str()]).inc();
                }
            }
        }
        None
    }

    async fn ask(&self, source: &Arc<str>, wanted: &WantedTree) -> Result<FetchedTree, NotTaken> {
        let slot = self.slot(source);
        let _turn = slot.wait().await;
        let request = TreeRequest {
            worker: wanted.address.to_string(),
            rank: wanted.rank,
            model: wanted.model.to_string(),
        };
        let mut may_ask_again = true;
        loop {
            let first = self.begin(&slot, source, &request).await?;
            let asked_at = first.asked_at;
            let answer = self.take_rest(&slot, source, wanted, first).await;
            let took = observe::now().saturating_duration_since(asked_at);
            may_ask_again &= took < self.0.ask_again_within;
            match answer {
                // It began to give the tree, so it most likely still has it.
                Err(NotTaken::Failure(Failure::Lost(reason))) if may_ask_again => {
                    may_ask_again = false;
                    debug!(%source, %reason, "a stream was lost in the middle of a tree; asking once more");
                }
                answer => return answer,
            }
        }
    }

    /// Takes a tree whose first chunk has come.
    async fn take_rest(
        &self,
        slot: &Slot,
        source: &Arc<str>,
        wanted: &WantedTree,
        first: FirstChunk,
    ) -> Result<FetchedTree, NotTaken> {
        let FirstChunk {
            mut link,
            mut chunk,
            asked_at,
        } = first;
        let mut arriving = ArrivingTree::new(Expected {
            shape: wanted.shape,
            known_blocks: wanted.known_blocks,
            max_blocks: MAX_BLOCKS,
        });
        loop {
            let is_last = chunk.is_last;
            match arriving.take(chunk) {
                Ok(None) => chunk = self.chunk(&mut link).await?,
                Ok(Some(copy)) => {
                    let took = observe::now().saturating_duration_since(asked_at);
                    self.0.metrics.seconds.observe(took.as_secs_f64());
                    let peer = link.peer.name.clone();
                    slot.keep(link);
                    let source = source.clone();
                    return Ok(FetchedTree { peer, source, copy });
                }
                Err(unusable) => {
                    // Otherwise more of what is not wanted would come; it ends with the stream.
                    if is_last {
                        slot.keep(link);
                    }
                    return Err(unusable.into());
                }
            }
        }
    }

    async fn ask_predicted(
        &self,
        source: &Arc<str>,
        fleet: &Snapshot,
        predicted: &PredictedIndex,
    ) -> Result<(Arc<str>, usize), NotTaken> {
        let slot = self.slot(source);
        let _turn = slot.wait().await;
        let request = TreeRequest::default();
        let answer = self.begin(&slot, source, &request).await?;
        let (mut link, mut chunk) = (answer.link, answer.chunk);
        let mut added = 0;
        loop {
            for (key, blocks) in tree_wire::predicted(&chunk)? {
                let Some((worker, owner)) = owner_of(fleet, &key) else {
                    continue;
                };
                let capacity = worker.cache_tokens_of(owner.rank());
                added += predicted.import(observe::now(), owner, capacity, &blocks);
            }
            if chunk.is_last {
                let peer = link.peer.name.clone();
                slot.keep(link);
                return Ok((peer, added));
            }
            chunk = self.chunk(&mut link).await?;
        }
    }

    /// Sends a request, and receives the first chunk of the answer. A stream that was kept may have ended since, which
    /// says nothing of the replica: another one is opened then. For a replica that is silent, or sends what is no
    /// message, none is opened.
    async fn begin(
        &self,
        slot: &Slot,
        source: &str,
        request: &TreeRequest,
    ) -> Result<FirstChunk, NotTaken> {
        let kept = slot.link.lock().take();
        if let Some(link) = kept {
            match self.request(link, request).await {
                Err(NotTaken::Failure(Failure::Lost(reason))) => {
                    debug!(source, %reason, "a stream that was kept has ended");
                }
                answer => return answer,
            }
        }
        let link = self.0.peers.call_for_trees(source).await?;
        self.request(link, request).await
    }

    async fn request(&self, mut link: Link, request: &TreeRequest) -> Result<FirstChunk, NotTaken> {
        let asked_at = observe::now();
        link.send(framed(Kind::TreeRequest(request.clone())))
            .await?;
        let chunk = self.chunk(&mut link).await?;
        Ok(FirstChunk {
            link,
            chunk,
            asked_at,
        })
    }

    async fn chunk(&self, link: &mut Link) -> Result<TreeChunk, NotTaken> {
        let received = timeout(self.0.patience, link.receive()).await;
        let received = received.map_err(|_| NotTaken::Silent)??;
        match received {
            Some((Some(Kind::TreeChunk(chunk)), bytes)) => {
                self.0.metrics.bytes.inc_by(bytes as u64);
                Ok(chunk)
            }
            Some(_) => Err(Unusable::Malformed("not a chunk").into()),
            None => Err(Failure::Lost("it has closed the stream".to_owned()).into()),
        }
    }

    fn slot(&self, source: &Arc<str>) -> Arc<Slot> {
        let mut sources = self.0.sources.lock();
        if sources.len() >= MAX_SOURCES {
            sources.retain(|_, slot| slot.waiting.load(Relaxed) > 0);
        }
        let slot = sources.entry(source.clone()).or_insert_with(|| {
            Arc::new(Slot {
                turn: Semaphore::new(1),
                waiting: AtomicUsize::new(0),
                link: Mutex::default(),
            })
        });
        slot.clone()
    }
}

/// The worker that a key names, and whose cache it means. `None` if the fleet has no such worker, or the worker no such
/// rank: then no request would be pinned to it.
fn owner_of<'a>(fleet: &'a Snapshot, key: &WorkerKey) -> Option<(&'a Worker, WorkerId)> {
    let mut workers = fleet.workers.iter();
    let status = workers.find(|status| *status.worker.pool.address() == *key.address)?;
    let is_known = key.rank.is_none_or(|rank| rank < ranks_of(status));
    let owner = status.worker.id.cache_owner(key.rank);
    is_known.then_some((&*status.worker, owner))
}

/// Replicas come and go; this many are remembered.
const MAX_SOURCES: usize = 64;

/// A turn at one replica. It counts as waiting, too, until it ends.
struct Turn<'a> {
    _waiting: Waiting<'a>,
    _permit: tokio::sync::SemaphorePermit<'a>,
}

impl Slot {
    async fn wait(&self) -> Option<Turn<'_>> {
        self.waiting.fetch_add(1, Relaxed);
        let waiting = Waiting(self);
        let permit = self.turn.acquire().await.ok()?;
        Some(Turn {
            _waiting: waiting,
            _permit: permit,
        })
    }

    /// Keeps a stream for the next tree, if one waits for it.
    fn keep(&self, link: Link) {
        if self.waiting.load(Relaxed) > 1 {
            *self.link.lock() = Some(link);
        }
    }
}

/// Counted as waiting until its turn has ended or it gives up.
struct Waiting<'a>(&'a Slot);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

impl TreeSource for TreeTaker {
    fn fetch(
        &self,
        wanted: WantedTree,
    ) -> Pin<Box<dyn Future<Output = Option<FetchedTree>> + Send>> {
        let taker = self.clone();
        Box::pin(async move {
            timeout(FETCH_TIMEOUT, taker.ask_all(wanted))
                .await
                .unwrap_or(None)
        })
    }

    fn report(&self, outcome: TreeOutcome) {
        let metrics = &self.0.metrics;
        let label = match outcome {
            TreeOutcome::Taken { blocks } => {
                metrics.blocks.inc_by(blocks);
                "taken"
            }
            TreeOutcome::Refused(reason) => reason.as_str(),
            TreeOutcome::NotConfirmed => "not_confirmed",
        };
        metrics.taken.with_label_values(&[label]).inc();
    }

    fn timeout(&self) -> Duration {
        self.0.timeout
    }
}

#[cfg(test)]
mod tests;
