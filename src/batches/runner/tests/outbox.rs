//! An outbox that looks for the parts of a batch when its end is reported.

use std::future::ready;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::batches::paths;
use crate::batches::storage::Storage;
use crate::store::StoreFuture;
use crate::store::outbox::{Claim, Claimed, EndEvent, Outbox, Settlement, Subscriptions};

/// Takes reports, and delivers none.
#[derive(Debug)]
pub(super) struct WatchfulOutbox {
    pub(super) storage: Storage,
    /// How many parts there were at each report.
    pub(super) parts: Mutex<Vec<usize>>,
}

impl Outbox for WatchfulOutbox {
    fn subscribe(&self, _: Arc<Subscriptions>) {}

    fn add(&self, event: EndEvent) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let folder = paths::parts(&event.key.to_string());
            let parts = self.storage.list(&folder).await.unwrap();
            self.parts.lock().push(parts.len());
            Ok(())
        })
    }

    fn claim(&self, _: &str, _: Claim) -> StoreFuture<'_, Claimed> {
        Box::pin(ready(Ok(Claimed::default())))
    }

    fn settle(&self, _: &str, _: Settlement) -> StoreFuture<'_, bool> {
        Box::pin(ready(Ok(true)))
    }

    fn disable(&self, _: &str, _: &str) -> StoreFuture<'_, u64> {
        Box::pin(ready(Ok(0)))
    }

    fn enable(&self, _: &str) -> StoreFuture<'_, bool> {
        Box::pin(ready(Ok(true)))
    }
}
