//! Files and batches, where the configuration has storage for them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use crate::batches::{Batches, Files, Settings, Storage};
use crate::http::drain::Tasks;
use crate::http::io_threads::IoThreads;
use crate::http::tls::Clients;
use crate::observe::metrics::Registry;
use crate::store::OpenStore;

/// A claim of a batch's work lasts so many of the store's leases: it runs by the clocks of the replicas, which may be
/// seconds apart.
const LEASES: u32 = 3;

/// `None` if there is no storage. `lease`: the store's.
pub(super) fn open(
    settings: &Settings,
    lease: Duration,
    store: &OpenStore,
    clients: &Clients,
    tasks: &Tasks,
    io_threads: &IoThreads,
    metrics: &Registry,
) -> io::Result<Option<Arc<Batches>>> {
    if !settings.is_on() {
        return Ok(None);
    }
    if store.redis.is_none() {
        Storage::remove_earlier(settings)?;
    }
    let storage = Storage::open(settings, clients, tasks)?;
    let files = Files::new(
        settings.clone(),
        store.responses.clone(),
        storage.clone(),
        tasks.clone(),
        metrics,
    );
    info!("files and batches are on");
    let batches = Batches::new(
        settings.clone(),
        store.clone(),
        storage,
        files,
        tasks.clone(),
        io_threads.clone(),
        metrics,
    );
    Ok(Some(Arc::new(batches.with_lease(LEASES * lease))))
}
