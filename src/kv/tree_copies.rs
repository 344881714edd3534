//! Copies of ranks' trees between replicas, as the two ends see them: a subscriber gives its own, and asks a
//! [`TreeSource`] for another replica's. How they travel is not known here.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::block::BlockShape;
use super::event_filter::LearnedFacts;
use super::index::CopiedBlocks;
use super::page_fold::CopiedPages;
use super::stream::{PeerTree, PeerTreeRefusal};
use crate::ids::Model;
use crate::observe::metrics::words;

/// A rank's tree at one position of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeCopy {
    pub position: PeerTree,
    pub shape: BlockShape,
    pub learned: LearnedFacts,
    /// The engine's process was seen to name a page by its tokens.
    pub has_matching_names: bool,
    pub blocks: CopiedBlocks,
    /// Of an engine whose pages are smaller than blocks.
    pub pages: CopiedPages,
}

words! {
    /// Why a replica gives no copy of its tree.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum NoTree {
        /// It does not follow the rank, or another model's.
        UnknownRank = "unknown_rank",
        /// Its own tree is empty, or does not count in routing.
        Cold = "cold",
        /// It makes too many copies already.
        Busy = "busy",
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedTree {
    /// The worker's name, for logs.
    pub worker: Arc<str>,
    /// `HOST:PORT`, as every replica knows the worker.
    pub address: Arc<str>,
    pub rank: u32,
    pub model: Model,
    /// If it is known already.
    pub shape: Option<BlockShape>,
    /// A tree that is not complete is worth having if it has more blocks than this.
    pub known_blocks: u64,
    /// Where a tree was refused.
    pub refused: Vec<Arc<str>>,
}

#[derive(Clone, Debug)]
pub struct FetchedTree {
    /// The replica's name.
    pub peer: Arc<str>,
    /// Where it was asked: what it is known by when it is not to be asked again.
    pub source: Arc<str>,
    pub copy: TreeCopy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeOutcome {
    /// The engine confirmed it.
    Taken {
        blocks: u64,
    },
    Refused(PeerTreeRefusal),
    /// It was taken over, and then the engine did not confirm it.
    NotConfirmed,
}

/// Other replicas that may have a rank's tree.
pub trait TreeSource: fmt::Debug + Send + Sync {
    /// Asks the replicas one after the other, in random order. `None` if none of them has a tree that can be used.
    fn fetch(
        &self,
        wanted: WantedTree,
    ) -> Pin<Box<dyn Future<Output = Option<FetchedTree>> + Send>>;

    /// Says what became of a tree that was fetched.
    fn report(&self, outcome: TreeOutcome);

    /// How long batches that cannot be replayed wait for a tree.
    fn timeout(&self) -> Duration;
}
