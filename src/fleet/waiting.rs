//! Requests that wait in routers for workers with room: in this one, and in the other replicas.

use std::sync::Arc;

use arc_swap::{ArcSwapOption, Guard};
use rustc_hash::FxHashMap;

use super::load::LoadShare;
use crate::ids::WorkerId;

/// What waits, by cache owner: for a worker as a whole, and for each of its dp ranks that requests are pinned to.
pub type WaitingByOwner = FxHashMap<WorkerId, LoadShare>;

/// Written by who lets requests wait and by who hears of other replicas; read by both.
#[derive(Debug, Default)]
pub struct Waiting {
    /// `None`: none waits.
    own: ArcSwapOption<WaitingByOwner>,
    peers: ArcSwapOption<WaitingByOwner>,
}

impl Waiting {
    pub fn set_own(&self, own: WaitingByOwner) {
        set(&self.own, own);
    }

    pub fn set_peers(&self, peers: WaitingByOwner) {
        set(&self.peers, peers);
    }

    /// In this router.
    pub fn own(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.own.load()
    }

    /// In all other replicas together, as they last reported.
    #[inline]
    pub fn peers(&self) -> Guard<Option<Arc<WaitingByOwner>>> {
        self.peers.load()
    }
}

fn set(published: &ArcSwapOption<WaitingByOwner>, new: WaitingByOwner) {
    if !new.is_empty() {
        published.store(Some(Arc::new(new)));
    } else if published.load().is_some() {
        published.store(None);
    }
}
