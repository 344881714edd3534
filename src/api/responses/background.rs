//! Responses that run without their client: who runs what, and how many.
//!
//! ```text
//! create -> record (queued, ours) -> run: engine -> events -> store -> readers, on any replica
//! owner: beat (else stop all), notices (stop one), sweep (take over what others lost)
//! ```

mod begin;
mod cancel;
mod kept;
mod log;
mod metrics;
mod owner;
mod reader;
mod run;
mod settings;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use self::metrics::Metrics;
pub(super) use self::owner::own;
pub use self::settings::Settings;
use super::super::error::ApiError;
use crate::http::drain::Tasks;
use crate::observe::metrics::Registry;
use crate::store::Fence;
use crate::store::Key;
use crate::store::Owner;
use crate::store::lease;

/// How long a create waits for this replica's first beat.
const FIRST_BEAT: Duration = Duration::from_secs(2);

/// What this replica runs.
#[derive(Debug)]
pub(super) struct Background {
    settings: Settings,
    lease: lease::Settings,
    /// Where a log was longer than this, it was not kept.
    log_bytes_max: u64,
    is_held: watch::Sender<bool>,
    running: Mutex<Running>,
    metrics: Metrics,
    tasks: Tasks,
}

#[derive(Debug)]
struct Running {
    /// This life's name. One that lost its lease goes on under another.
    owner: Owner,
    runs: BTreeMap<Key, Arc<Run>>,
}

/// One response that runs here.
#[derive(Debug)]
struct Run {
    fence: Fence,
    stop: watch::Sender<Option<Stop>>,
    /// Changes when there is more to read in the store.
    news: watch::Sender<u64>,
    /// Whether an engine has begun it.
    is_started: AtomicBool,
}

/// Why a response stops before its engine has said all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// It was cancelled or deleted.
    Ended,
    /// Another replica has it, or may have it.
    Lost,
    /// This replica is stopping.
    Draining,
    /// It ran for too long.
    TooLong,
}

impl Stop {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Lost => "lost",
            Self::Draining => "draining",
            Self::TooLong => "too_long",
        }
    }
}

/// A place among what runs here, until it is dropped.
#[derive(Debug)]
struct Seat {
    background: Arc<Background>,
    key: Key,
    run: Arc<Run>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.background.running.lock().runs.remove(&self.key);
        self.background.metrics.running.dec();
        self.run.news.send_modify(|news| *news += 1);
    }
}

/// For the operator's page.
#[derive(Debug, Serialize)]
pub(super) struct Counts {
    owner: String,
    /// Whether this replica's lease lets it run anything.
    is_held: bool,
    running: usize,
}

fn owner() -> Owner {
    Owner(fastrand::u64(..))
}

impl Background {
    pub(super) fn new(
        settings: Settings,
        lease: lease::Settings,
        log_bytes_max: u64,
        tasks: Tasks,
        registry: &Registry,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            lease,
            log_bytes_max,
            is_held: watch::Sender::new(false),
            running: Mutex::new(Running {
                owner: owner(),
                runs: BTreeMap::new(),
            }),
            metrics: Metrics::new(registry),
            tasks,
        })
    }

    pub(super) fn counts(&self) -> Counts {
        let running = self.running.lock();
        Counts {
            owner: running.owner.to_string(),
            is_held: *self.is_held.borrow(),
            running: running.runs.len(),
        }
    }

    fn owner(&self) -> Owner {
        self.running.lock().owner
    }

    /// Waits until this replica may run something, for a while.
    async fn held(&self) -> Result<(), ApiError> {
        let mut is_held = self.is_held.subscribe();
        let held = tokio::time::timeout(FIRST_BEAT, is_held.wait_for(|held| *held)).await;
        match held {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                self.refuse("no_lease");
                Err(ApiError::store_unavailable(Duration::from_secs(1)))
            }
        }
    }

    /// Takes a place for a response, whose record need not be there yet.
    fn sit(self: &Arc<Self>, key: Key, fence: Fence) -> Result<Seat, ApiError> {
        let pause = Duration::from_secs(1);
        let mut running = self.running.lock();
        if self.tasks.is_stopping() || running.owner != fence.owner {
            self.refuse("stopping");
            return Err(ApiError::store_unavailable(pause));
        }
        if running.runs.len() as u64 >= self.settings.running_max {
            self.refuse("replica_full");
            return Err(ApiError::background_full(pause));
        }
        let own = running.runs.keys().filter(|it| it.tenant == key.tenant);
        if own.count() as u64 >= self.settings.running_per_tenant_max {
            self.refuse("tenant_full");
            let max = self.settings.running_per_tenant_max;
            return Err(ApiError::too_much_background(max, pause));
        }
        let run = Arc::new(Run {
            fence,
            stop: watch::Sender::new(None),
            news: watch::Sender::new(0),
            is_started: AtomicBool::new(false),
        });
        running.runs.insert(key, run.clone());
        self.metrics.running.inc();
        Ok(Seat {
            background: self.clone(),
            key,
            run,
        })
    }

    fn refuse(&self, reason: &str) {
        self.metrics.refused.with_label_values(&[reason]).inc();
    }

    fn find(&self, key: Key) -> Option<Arc<Run>> {
        self.running.lock().runs.get(&key).cloned()
    }

    fn stop(&self, key: Key, why: Stop) {
        if let Some(run) = self.find(key) {
            run.stop.send_replace(Some(why));
        }
    }

    /// The lease is lost: all that runs stops, and what comes next is another owner's.
    fn lose(&self) {
        let mut running = self.running.lock();
        running.owner = owner();
        self.is_held.send_replace(false);
        for run in running.runs.values() {
            run.stop.send_replace(Some(Stop::Lost));
        }
    }
}
