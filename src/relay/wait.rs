//! Waiting for room at a worker, before the first attempt of a request: the queues of all models, and the wait itself.
//!
//! A request that finds room passes without a lock. Else it enters the queue of its model ([`crate::queue`]), which all
//! I/O threads share, and one task ([`dispatch`]) releases as many as there is room for. A released request chooses its
//! worker by what is known then.

mod dispatch;
mod export;
mod metrics;
mod model_queue;
mod room;
mod standing;
mod status;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use self::metrics::Metrics;
pub(super) use self::model_queue::{Grant, ModelQueue};
use self::room::Stalled;
pub(super) use self::standing::Standing;
pub use self::status::{QueueStatus, QueueSummary};
use crate::fleet::registry::Registry;
use crate::fleet::{Group, Snapshot};
use crate::ids::{ClientKey, Model};
use crate::observe;
use crate::observe::metrics::Registry as MetricsRegistry;
use crate::queue::{Outcome, Refusal, RefusalReason, Request, Room, SetBy, Settings};

/// Far more than there are models; what is listed bounds them too.
const MAX_QUEUES: usize = 10_000;

/// The queues of all models, whatever the configuration.
#[derive(Debug)]
pub struct Queues {
    fleet: Arc<Registry>,
    /// Room for a prompt is that of prefill workers, where there are any.
    is_disaggregated: bool,
    /// Those of the newest configuration; `None`: requests do not wait.
    settings: ArcSwapOption<Settings>,
    /// Models that the newest configuration names.
    configured: ArcSwap<FxHashSet<Model>>,
    by_model: ArcSwap<FxHashMap<Model, Arc<ModelQueue>>>,
    /// Held while queues are added and removed.
    changing: Mutex<()>,
    stalled: Mutex<Stalled>,
    is_draining: AtomicBool,
    metrics: Metrics,
}

/// What a request needs to wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) standing: Standing,
    pub(super) client: ClientKey,
    pub(super) tokens: u64,
    pub(super) bytes: u64,
    pub(super) is_background: bool,
    pub(super) received: Instant,
    pub(super) deadline: Instant,
}

impl Queues {
    pub(super) fn new(
        fleet: Arc<Registry>,
        is_disaggregated: bool,
        registry: &MetricsRegistry,
    ) -> Arc<Self> {
        let queues = Arc::new(Self {
            fleet,
            is_disaggregated,
            settings: ArcSwapOption::empty(),
            configured: ArcSwap::default(),
            by_model: ArcSwap::default(),
            changing: Mutex::default(),
            stalled: Mutex::default(),
            is_draining: AtomicBool::new(false),
            metrics: Metrics::new(registry),
        });
        let exported = Arc::downgrade(&queues);
        registry.on_scrape(move || {
            if let Some(queues) = exported.upgrade() {
                queues.export();
            }
        });
        queues
    }

    /// Uses the settings of a new configuration, also for the requests that wait already.
    pub(super) fn set(&self, settings: Option<&Arc<Settings>>, configured: FxHashSet<Model>) {
        self.configured.store(Arc::new(configured));
        let before = self.settings.swap(settings.cloned());
        if before.as_ref() == settings {
            return;
        }
        if let Some(settings) = settings {
            for queue in self.by_model.load().values() {
                queue.set_settings(settings);
            }
        }
        self.fleet.freed().notify();
    }

    /// Requests that find no room from now on are refused; those that wait go on.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Relaxed);
    }

    /// Whether a worker of the group has room, and no other request waits for it or was released and is not there yet. Takes
    /// no lock. `is_split`: a prefill worker would compute the prompt.
    pub(super) fn is_free(
        &self,
        settings: &Settings,
        group: &Group,
        is_split: bool,
        seed: u64,
    ) -> bool {
        let workers = match is_split {
            true => self.workers_of(group),
            false => Self::decode_workers_of(group),
        };
        let is_first = || self.fleet.freed().waiting() == 0 || !self.is_waited_for(group);
        let is_passing = !is_split && self.is_disaggregated;
        (is_passing || is_first()) && room::has_room(workers, settings, observe::now(), seed)
    }

    /// Whether a request waits for one of the group's workers or was released to one, also for another model.
    fn is_waited_for(&self, group: &Group) -> bool {
        let snapshot = self.fleet.snapshot();
        let queues = self.by_model.load();
        let is_waited_for = |queue: &&Arc<ModelQueue>| queue.waiting() > 0 || queue.granted() > 0;
        let mut waiting = queues.values().filter(is_waited_for);
        waiting.any(|queue| {
            let other = snapshot.models.get(&queue.model);
            other.is_some_and(|other| room::shares_any(group, other))
        })
    }

    /// Whether requests for a model wait for a worker although none is listed that serves it.
    pub(super) fn is_known(&self, model: &str) -> bool {
        self.configured.load().contains(model)
    }

    /// Waits until a worker has room. An error ends the request.
    pub(super) async fn wait(
        self: &Arc<Self>,
        settings: &Arc<Settings>,
        model: &Model,
        waiting: Waiting,
    ) -> Result<Grant, Refusal> {
        let now = observe::now();
        let request = Request {
            priority: waiting.standing.priority,
            client: waiting.client,
            tokens: waiting.tokens,
            bytes: waiting.bytes,
            received: waiting.received,
            ttft_target: waiting.standing.ttft_target,
            is_background: waiting.is_background,
            deadline: waiting.deadline,
        };
        let group = self.fleet.snapshot().models.get(model).cloned();
        let room = self.room_of(settings, group.as_deref(), now);
        let refused = |reason| {
            let retry_after = Duration::from_secs(1);
            let class = settings.class_of(waiting.standing.priority);
            self.metrics
                .on_refused(model, &settings.classes[class].name, reason);
            Refusal {
                reason,
                retry_after,
            }
        };
        if self.is_draining.load(Relaxed) {
            return Err(refused(RefusalReason::Draining));
        }
        let freed = self.fleet.freed();
        loop {
            let Some(queue) = self.of(model, settings) else {
                let max = MAX_QUEUES as u32;
                let set_by = SetBy::Queue;
                return Err(refused(RefusalReason::TooManyRequests { max, set_by }));
            };
            // `None`: the queue was removed just now.
            let Some(entered) = queue.enter(freed, now, room, request) else {
                continue;
            };
            let ticket = entered.inspect_err(|refusal| {
                refused(refusal.reason);
            })?;
            return ticket.granted().await;
        }
    }

    /// What is known of a model's queue. `None` if nothing has waited there.
    pub(super) fn get(&self, model: &str) -> Option<Arc<ModelQueue>> {
        self.by_model.load().get(model).cloned()
    }

    /// Removes the queues of models that are gone and that no request waits for.
    pub(super) fn remove_gone(&self, fleet: &Snapshot) {
        let is_known = |model: &Model| fleet.models.contains_key(model) || self.is_known(model);
        if self.by_model.load().keys().all(is_known) {
            return;
        }
        let _changing = self.changing.lock();
        let mut queues = FxHashMap::clone(&self.by_model.load());
        queues.retain(|model, queue| is_known(model) || !queue.close_if_empty());
        self.by_model.store(Arc::new(queues));
    }

    fn of(&self, model: &Model, settings: &Arc<Settings>) -> Option<Arc<ModelQueue>> {
        if let Some(queue) = self.get(model) {
            return Some(queue);
        }
        let _changing = self.changing.lock();
        let queues = self.by_model.load();
        if let Some(queue) = queues.get(model) {
            return Some(queue.clone());
        }
        if queues.len() >= MAX_QUEUES {
            return None;
        }
        let queue = Arc::new(ModelQueue::new(model.clone(), settings.clone()));
        let mut queues = FxHashMap::clone(&queues);
        queues.insert(model.clone(), queue.clone());
        self.by_model.store(Arc::new(queues));
        Some(queue)
    }

    fn room_of(&self, settings: &Settings, group: Option<&Group>, now: Instant) -> Room {
        let Some(group) = group else {
            return Room::default();
        };
        let stalled = self.stalled.lock();
        room::room(self.workers_of(group), settings, &stalled, now)
    }

    /// The workers that compute prompts.
    fn workers_of<'a>(&self, group: &'a Group) -> room::Workers<'a> {
        let prefill = group.prefill();
        match self.is_disaggregated && !prefill.is_empty() {
            true => room::Workers::prefill(&group.workers[prefill]),
            false => Self::decode_workers_of(group),
        }
    }

    fn decode_workers_of(group: &Group) -> room::Workers<'_> {
        room::Workers::all(&group.workers[group.decode()])
    }

    fn on_left(&self, queue: &ModelQueue, class: &str, outcome: &Outcome, waited: Duration) {
        self.metrics.on_waited(&queue.model, class, waited);
        if let Outcome::Refused(refusal) = outcome {
            self.metrics.on_refused(&queue.model, class, refusal.reason);
        }
    }
}
