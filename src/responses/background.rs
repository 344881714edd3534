//! Responses that run without their client: who runs what, and how many.
//!
//! ```text
//! create -> record (queued, ours) -> run: engine -> events -> store -> readers, on any replica
//! owner: beat (else stop all), notices (stop one), sweep (take over what others lost)
//! ```

mod cancel;
mod create;
pub mod log;
mod metrics;
mod owner;
pub mod read_position;
mod reader;
mod run;
pub mod run_state;
pub mod run_table;
mod settings;
mod stored_request;
pub mod take_over;
mod unreadable;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::Histogram;
use serde::Serialize;
use tokio::sync::{Notify, watch};

use self::metrics::Metrics;
pub(super) use self::owner::own;
use self::run_state::{RunState, StopReason};
use self::run_table::{Bounds, RunRefusal, RunTable};
pub use self::settings::Settings;
use crate::http::drain::Tasks;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::store::{FencingToken, Owner, ResponseKey, lease};

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
    /// The lease may be due.
    wakes: Notify,
    table: Mutex<RunTable<Arc<Run>>>,
    metrics: Metrics,
    tasks: Tasks,
}

/// One response that runs here.
#[derive(Debug)]
struct Run {
    fence: FencingToken,
    state: Mutex<RunState>,
    stop: watch::Sender<Option<StopReason>>,
    /// Changes when there is more to read.
    news: watch::Sender<u64>,
    /// When it was asked to be cancelled.
    cancelled: OnceLock<Instant>,
}

/// A place among what runs here, until it is dropped.
#[derive(Debug)]
struct RunGuard {
    background: Arc<Background>,
    key: ResponseKey,
    run: Arc<Run>,
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        let _ = self.background.table.lock().leave(self.key);
        self.background.metrics.running.dec();
        self.run.state.lock().on_left();
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
    /// Of those, the ones that no engine has begun.
    queued: usize,
    /// Of the events of those, here and in the store.
    log_bytes: usize,
    /// Of cancels that were asked for here.
    cancel_answered: Latency,
    /// Of what was cancelled while it ran here: until the engine's connection was closed.
    cancel_stopped: Latency,
}

#[derive(Debug, Serialize)]
struct Latency {
    count: u64,
    mean_ms: f64,
}

impl Latency {
    fn of(seconds: &Histogram) -> Self {
        let count = seconds.get_sample_count();
        Self {
            count,
            mean_ms: 1_000.0 * seconds.get_sample_sum() / count.max(1) as f64,
        }
    }
}

impl Background {
    pub(super) fn new(
        settings: Settings,
        lease: lease::Settings,
        log_bytes_max: u64,
        tasks: Tasks,
        registry: &Registry,
    ) -> Arc<Self> {
        let bounds = Bounds {
            running_max: settings.running_max,
            running_per_tenant_max: settings.running_per_tenant_max,
        };
        let owner = Owner(fastrand::u64(..));
        let table = RunTable::new(observe::now(), bounds, &lease, owner);
        Arc::new(Self {
            settings,
            lease,
            log_bytes_max,
            is_held: watch::Sender::new(false),
            wakes: Notify::new(),
            table: Mutex::new(table),
            metrics: Metrics::new(registry),
            tasks,
        })
    }

    pub(super) fn counts(&self) -> Counts {
        let (owner, running, runs) = {
            let table = self.table.lock();
            let runs: Vec<Arc<Run>> = table.runs().cloned().collect();
            (table.owner().to_string(), table.len(), runs)
        };
        // A course may be busy for a while; nobody who looks for another one waits for it.
        let (mut queued, mut log_bytes) = (0, 0);
        for run in &runs {
            let state = run.state.lock();
            queued += usize::from(!state.is_begun());
            log_bytes += state.log().stored_bytes();
        }
        Counts {
            owner,
            is_held: *self.is_held.borrow(),
            running,
            queued,
            log_bytes,
            cancel_answered: Latency::of(&self.metrics.cancel_seconds),
            cancel_stopped: Latency::of(&self.metrics.cancel_stop_seconds),
        }
    }

    fn owner(&self) -> Owner {
        self.table.lock().owner()
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
    fn sit(
        self: &Arc<Self>,
        key: ResponseKey,
        fence: FencingToken,
        state: RunState,
    ) -> Result<RunGuard, RunRefusal> {
        let run = Arc::new(Run {
            fence,
            state: Mutex::new(state),
            stop: watch::Sender::new(None),
            news: watch::Sender::new(0),
            cancelled: OnceLock::new(),
        });
        let admitted = match self.tasks.is_stopping() {
            true => Err(RunRefusal::NotOwner),
            false => {
                let now = observe::now();
                self.table.lock().sit(now, key, fence, run.clone())
            }
        };
        if let Err(refused) = admitted {
            self.refuse(refused.as_str());
            return Err(refused);
        }
        self.metrics.running.inc();
        self.wakes.notify_one();
        Ok(RunGuard {
            background: self.clone(),
            key,
            run,
        })
    }

    /// What a client is told whose response was not begun.
    fn refusal(&self, refused: RunRefusal) -> ApiError {
        let pause = Duration::from_secs(1);
        match refused {
            RunRefusal::NotOwner | RunRefusal::AlreadyRunning => ApiError::store_unavailable(pause),
            RunRefusal::ReplicaFull => ApiError::background_full(pause),
            RunRefusal::TenantFull => {
                let max = self.settings.running_per_tenant_max;
                ApiError::too_much_background(max, pause)
            }
        }
    }

    fn refuse(&self, reason: &str) {
        self.metrics.refused.with_label_values(&[reason]).inc();
    }

    fn find(&self, key: ResponseKey) -> Option<Arc<Run>> {
        self.table.lock().find(key).cloned()
    }

    /// It was asked to be cancelled at that time.
    fn on_cancelled(&self, key: ResponseKey, asked: Instant) {
        if let Some(run) = self.find(key) {
            let _ = run.cancelled.set(asked);
        }
        self.stop(key, StopReason::Cancelled);
    }

    fn stop(&self, key: ResponseKey, why: StopReason) {
        if let Some(run) = self.find(key) {
            // What is lost stays lost.
            run.stop.send_if_modified(|told| {
                let is_new = *told != Some(StopReason::LeaseLost);
                if is_new {
                    *told = Some(why);
                }
                is_new
            });
        }
    }
}
