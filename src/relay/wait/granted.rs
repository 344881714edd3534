//! What workers were promised: by requests that were released and do not count at their worker yet, and, when they were last
//! looked at, by those that wait.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::fleet::load::LoadShare;
use crate::ids::WorkerId;
use crate::relay::choose::promised::Promised;

#[derive(Debug, Default)]
pub(super) struct Granted {
    released: Mutex<Promised>,
    /// With those that wait.
    last: ArcSwap<Promised>,
}

impl Granted {
    pub(super) fn add(&self, promises: &[(WorkerId, LoadShare)]) {
        let mut released = self.released.lock();
        for (owner, promise) in promises {
            released.add(*owner, *promise);
        }
    }

    pub(super) fn remove(&self, promises: &[(WorkerId, LoadShare)]) {
        let mut released = self.released.lock();
        for (owner, promise) in promises {
            released.remove(*owner, *promise);
        }
    }

    /// By those that were released.
    pub(super) fn promised(&self) -> Promised {
        self.released.lock().clone()
    }

    /// When workers were last looked at.
    pub(super) fn last(&self) -> Guard<Arc<Promised>> {
        self.last.load()
    }

    pub(super) fn set_last(&self, promised: Promised) {
        self.last.store(Arc::new(promised));
    }
}
