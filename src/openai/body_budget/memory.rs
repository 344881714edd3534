//! The memory that bodies take, and what of it is kept after their requests.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::shares::{Ask, Place, Shares, Stage};
use crate::ids::ClientKey;

/// Most prompts are shorter.
pub(super) const SMALL_BYTES: u64 = 64 << 10;
/// Larger bodies use the budget in steps of this size.
const STEP_BYTES: u64 = 256 << 10;
/// The priority of a body that no client waits for.
pub(super) const LAST: i32 = i32::MIN;

/// The memory that bodies take under all configurations together.
#[derive(Debug)]
pub struct BodyMemory {
    pub(super) used: Arc<AtomicU64>,
    /// Up to here short bodies count without a look at their owners.
    unowned_max: AtomicU64,
    /// Bodies that wait, or look whether they have to. Whoever gives memory back then looks who is next.
    pub(super) asking: AtomicU64,
    /// The number of the latest body. Bodies have numbers in the order in which they come.
    latest: AtomicU64,
    pub(super) shares: Mutex<Shares<oneshot::Sender<bool>>>,
}

impl BodyMemory {
    pub fn new(max: u64) -> Arc<Self> {
        let used = Arc::new(AtomicU64::new(0));
        Arc::new(Self {
            shares: Mutex::new(Shares::new(max, used.clone())),
            used,
            unowned_max: AtomicU64::new(max / 2),
            asking: AtomicU64::new(0),
            latest: AtomicU64::new(0),
        })
    }

    /// Memory for a body that no client waits for, if there is room now.
    pub(crate) fn try_keep(self: &Arc<Self>, owner: ClientKey, bytes: u64) -> Option<KeptBody> {
        let mut kept = self.keep_nothing(owner);
        kept.try_renew(bytes).then_some(kept)
    }

    /// For a body that needs no memory yet.
    pub(crate) fn keep_nothing(self: &Arc<Self>, owner: ClientKey) -> KeptBody {
        KeptBody {
            memory: self.clone(),
            owner,
            bytes: 0,
        }
    }

    pub(super) fn next_number(&self) -> u64 {
        self.latest.fetch_add(1, Relaxed) + 1
    }

    pub(super) fn set_max(&self, max: u64) {
        self.unowned_max.store(max / 2, Relaxed);
        self.shares.lock().max = max;
        self.settle();
    }

    /// Counts bytes of a short body, if there is so much room that it does not matter whose it is.
    pub(super) fn take_unowned(&self, bytes: u64) -> bool {
        let sum = self.used.fetch_add(bytes, SeqCst) + bytes;
        if sum <= self.unowned_max.load(Relaxed) {
            return true;
        }
        self.give_unowned(bytes);
        false
    }

    pub(super) fn give_unowned(&self, bytes: u64) {
        self.used.fetch_sub(bytes, SeqCst);
        if self.asking.load(SeqCst) > 0 {
            self.settle();
        }
    }

    /// Wakes the bodies that wait no longer.
    fn settle(&self) {
        let mut shares = self.shares.lock();
        wake(shares.settle());
    }
}

/// Called while the shares are locked, so that a body that gives up sees how its wait has ended.
pub(super) fn wake(ended: Vec<(oneshot::Sender<bool>, bool)>) {
    for (body, is_granted) in ended {
        let _ = body.send(is_granted);
    }
}

/// What a body of this size takes of the budget.
pub(super) fn rounded(bytes: u64) -> u64 {
    if bytes <= SMALL_BYTES {
        bytes
    } else {
        bytes.next_multiple_of(STEP_BYTES)
    }
}

/// Memory of a body that outlives its request, given back when dropped.
#[derive(Debug)]
pub(crate) struct KeptBody {
    pub(super) memory: Arc<BodyMemory>,
    pub(super) owner: ClientKey,
    pub(super) bytes: u64,
}

impl KeptBody {
    /// Makes it large enough for this size. False if there is no room now: then it has given back what it had, so that
    /// those of one owner that grow do not wait for each other. A body that is larger than all memory takes all of it:
    /// otherwise there would never be room.
    pub(crate) fn try_renew(&mut self, bytes: u64) -> bool {
        let mut shares = self.memory.shares.lock();
        let total = rounded(bytes).min(shares.max);
        if total <= self.bytes {
            return true;
        }
        shares.give_back_kept(self.owner, self.bytes);
        let ask = Ask {
            place: Place {
                stage: Stage::Kept,
                priority: Reverse(LAST),
                number: 0,
            },
            owner: self.owner,
            more: total,
            has: 0,
            is_small: bytes <= SMALL_BYTES,
        };
        let is_granted = shares.try_keep(&ask);
        self.bytes = if is_granted { total } else { 0 };
        wake(shares.settle());
        is_granted
    }
}

impl Drop for KeptBody {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let mut shares = self.memory.shares.lock();
            shares.give_back_kept(self.owner, self.bytes);
            wake(shares.settle());
        }
    }
}
