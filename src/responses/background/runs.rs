//! The background runs of this replica: admission, lookup, stopping, and counts.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::Histogram;
use serde::Serialize;
use tokio::sync::{Notify, watch};

use super::metrics::Metrics;
use super::recent_ends::{EndWrite, RecentEnds};
use super::run_state::RunState;
use super::run_step::StopReason;
use super::run_table::{Bounds, RunRefusal, RunTable};
use super::settings::Settings;
use super::waiting_orphans::WaitingOrphans;
use crate::http::drain::Tasks;
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::Registry;
use crate::openai::body_budget::BodyMemory;
use crate::openai::error::ApiError;
use crate::store::{FencingToken, Owner, ResponseKey, lease};

/// How long a `POST` with `background: true` waits for this replica's first heartbeat.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(2);

/// The reason of a refusal for want of memory, in metrics.
pub(super) const NO_MEMORY: &str = "no_memory";

/// The background runs of this replica, and its lease.
#[derive(Debug)]
pub(in crate::responses) struct Background {
    pub(super) settings: Settings,
    pub(super) lease: lease::Settings,
    /// The store keeps no more than this many bytes of a response's events.
    pub(super) max_event_log: u64,
    /// The memory of the runs' requests, which those of clients share.
    pub(in crate::responses) bodies: Arc<BodyMemory>,
    /// Whether this replica holds its lease.
    pub(super) lease_held: watch::Sender<bool>,
    /// Whether the store has had a lease of this replica.
    pub(super) registered: watch::Sender<bool>,
    /// Wakes the heartbeat task: a run was added, so the lease may have to be renewed.
    pub(super) wakes: Notify,
    /// Wakes the reader of notices, which waits while nothing runs here.
    pub(super) first_run: Notify,
    pub(super) table: Mutex<RunTable<Arc<Run>>>,
    pub(super) waiting_orphans: Mutex<WaitingOrphans>,
    /// The ends that were written here in the last minute.
    pub(super) recent_ends: Mutex<RecentEnds>,
    /// Writes of runs that the store refused.
    pub(super) failures: Mutex<LogOnce>,
    pub(super) metrics: Metrics,
    pub(super) tasks: Tasks,
}

/// One response that runs on this replica.
#[derive(Debug)]
pub(super) struct Run {
    /// Passed with each write to the store, which refuses it once another replica owns the response.
    pub(super) fence: FencingToken,
    pub(super) state: Mutex<RunState>,
    pub(super) stop: watch::Sender<Option<StopReason>>,
    /// Counts changes that readers must look at: new events, or the end.
    pub(super) updates: watch::Sender<u64>,
    /// When a client requested the cancel.
    pub(super) cancel_requested: OnceLock<Instant>,
}

/// Keeps a run registered until the guard is dropped.
#[derive(Debug)]
pub(super) struct RunGuard {
    pub(super) background: Arc<Background>,
    pub(super) key: ResponseKey,
    pub(super) run: Arc<Run>,
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        let _ = self.background.table.lock().remove(self.key);
        self.background.metrics.running.dec();
        self.run.state.lock().on_left();
        self.run.updates.send_modify(|count| *count += 1);
    }
}

/// For `GET /responses` on the admin listener.
#[derive(Debug, Serialize)]
pub(in crate::responses) struct Counts {
    owner: String,
    /// Whether this replica holds its lease, which covers all its runs. Without it runs go on until another replica
    /// has taken them over, and nothing is taken over here.
    lease_held: bool,
    running: usize,
    /// The part of `running` whose engine has not started to answer.
    queued: usize,
    /// Bytes of events of all runs that are stored and also in this replica's memory.
    event_log_bytes: usize,
    /// Time to answer cancel requests sent to this replica.
    cancel_latency: Latency,
    /// Time from a cancel request until the connection to the engine was closed, for runs of this replica.
    engine_stop_latency: Latency,
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
    pub(in crate::responses) fn new(
        settings: Settings,
        lease: lease::Settings,
        max_event_log: u64,
        bodies: Arc<BodyMemory>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Arc<Self> {
        let bounds = Bounds {
            running_max: settings.max_running,
            running_per_tenant_max: settings.max_running_per_tenant,
        };
        let owner = Owner(fastrand::u64(..));
        let table = RunTable::new(observe::now(), bounds, &lease, owner);
        Arc::new(Self {
            settings,
            lease,
            max_event_log,
            bodies,
            lease_held: watch::Sender::new(false),
            registered: watch::Sender::new(false),
            wakes: Notify::new(),
            first_run: Notify::new(),
            table: Mutex::new(table),
            waiting_orphans: Mutex::default(),
            recent_ends: Mutex::default(),
            failures: Mutex::default(),
            metrics: Metrics::new(registry),
            tasks,
        })
    }

    pub(in crate::responses) fn counts(&self) -> Counts {
        let (owner, running, runs) = {
            let table = self.table.lock();
            let runs: Vec<Arc<Run>> = table.runs().cloned().collect();
            (table.owner.to_string(), table.len(), runs)
        };
        // Locks each run after the table is unlocked: a busy run must not block lookups of others.
        let (mut queued, mut event_log_bytes) = (0, 0);
        for run in &runs {
            let state = run.state.lock();
            queued += usize::from(!state.has_engine_started);
            event_log_bytes += state.log.stored_bytes();
        }
        Counts {
            owner,
            lease_held: *self.lease_held.borrow(),
            running,
            queued,
            event_log_bytes,
            cancel_latency: Latency::of(&self.metrics.cancel_seconds),
            engine_stop_latency: Latency::of(&self.metrics.cancel_stop_seconds),
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.table.lock().owner
    }

    /// Waits up to [`FIRST_HEARTBEAT`] until the store knows this owner.
    pub(super) async fn wait_for_lease(&self) -> Result<(), ApiError> {
        let mut registered = self.registered.subscribe();
        let waited = tokio::time::timeout(
            FIRST_HEARTBEAT,
            registered.wait_for(|is_registered| *is_registered),
        )
        .await;
        match waited {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                self.count_refusal("no_lease");
                Err(ApiError::store_unavailable(Duration::from_secs(1)))
            }
        }
    }

    /// Admits a run, before or after its record is stored. A replica that is stopping admits nothing.
    pub(super) fn admit(
        self: &Arc<Self>,
        key: ResponseKey,
        fence: FencingToken,
        state: RunState,
    ) -> Result<RunGuard, RunRefusal> {
        let run = Arc::new(Run {
            fence,
            state: Mutex::new(state),
            stop: watch::Sender::new(None),
            updates: watch::Sender::new(0),
            cancel_requested: OnceLock::new(),
        });
        let admitted = if self.tasks.is_stopping() {
            Err(RunRefusal::NotOwner)
        } else {
            let now = observe::now();
            self.table.lock().insert(now, key, fence, run.clone())
        };
        if let Err(refused) = admitted {
            self.count_refusal(refused.as_str());
            return Err(refused);
        }
        self.metrics.running.inc();
        self.wakes.notify_one();
        self.first_run.notify_one();
        Ok(RunGuard {
            background: self.clone(),
            key,
            run,
        })
    }

    /// A reload may add the first tenants, or remove the last ones.
    pub(in crate::responses) fn set_max_per_tenant(&self, max: u64) {
        self.table.lock().set_max_per_tenant(max);
    }

    /// The error for a client whose response was not admitted. Each of them (503 or 429)
    /// asks the client to try again.
    pub(super) fn refusal_error(&self, refused: RunRefusal) -> ApiError {
        let retry_after = Duration::from_secs(1);
        match refused {
            RunRefusal::NotOwner | RunRefusal::AlreadyRunning => {
                ApiError::store_unavailable(retry_after)
            }
            RunRefusal::ReplicaFull => ApiError::background_full(retry_after),
            RunRefusal::TenantFull => {
                let max = self.table.lock().max_per_tenant();
                ApiError::too_many_background(max, retry_after)
            }
        }
    }

    /// An end was written here. It is repeated should the store lose it.
    pub(super) fn on_end_written(&self, key: ResponseKey, write: EndWrite) {
        self.recent_ends.lock().push(observe::now(), key, write);
    }

    pub(super) fn count_refusal(&self, reason: &str) {
        self.metrics.refused.with_label_values(&[reason]).inc();
    }

    pub(super) fn find(&self, key: ResponseKey) -> Option<Arc<Run>> {
        self.table.lock().find(key).cloned()
    }

    /// The response was cancelled by a request that arrived at `requested`.
    pub(super) fn on_cancelled(&self, key: ResponseKey, requested: Instant) {
        if let Some(run) = self.find(key) {
            let _ = run.cancel_requested.set(requested);
        }
        self.stop(key, StopReason::Cancelled);
    }

    pub(super) fn stop(&self, key: ResponseKey, reason: StopReason) {
        if let Some(run) = self.find(key) {
            // What another replica has taken over is not written here, whatever else happens.
            run.stop.send_if_modified(|current| {
                let may_replace = *current != Some(StopReason::LeaseLost);
                if may_replace {
                    *current = Some(reason);
                }
                may_replace
            });
        }
    }
}
