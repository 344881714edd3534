//! What limits are counted with: the store, and what this replica knows of each tenant's use. One for a process; the
//! limits of each configuration share it.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::batches::Batches;
use super::metrics::Metrics;
use super::settings::{Advanced, Settings};
use super::state::Use;
use crate::ids::Tenant;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::store::charges::{ChargeId, Settlement};
use crate::store::redis::{ChargeKeys, Redis};

/// A tenant's use, shared by its requests.
pub(super) type SharedUse = Arc<Mutex<Use>>;

/// Counts what tenants use. Shared by all configurations of a process.
#[derive(Debug)]
pub struct Limiter {
    pub(super) redis: Option<Arc<Redis>>,
    started: Instant,
    pub(super) advanced: Advanced,
    /// Replicas that share the limits, this one included, while they cannot count together.
    replicas: AtomicU32,
    uses: Mutex<FxHashMap<Tenant, SharedUse>>,
    /// Tenants whose requests have ended since the last settlement.
    pub(super) ended: Mutex<Vec<(Tenant, SharedUse)>>,
    pub(super) has_ended: Notify,
    pub(super) batches: Batches,
    pub(super) metrics: Metrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charged {
    Shared,
    /// This many times, as this replica's share.
    Alone(u32),
}

#[derive(Debug)]
pub(super) struct ChargeStore {
    pub(super) redis: Arc<Redis>,
    pub(super) keys: ChargeKeys,
}

impl Limiter {
    pub fn new(settings: &Settings, redis: Option<Arc<Redis>>, registry: &Registry) -> Arc<Self> {
        Arc::new(Self {
            redis,
            started: observe::now(),
            advanced: settings.advanced.clone(),
            replicas: AtomicU32::new(settings.replicas),
            uses: Mutex::default(),
            ended: Mutex::default(),
            has_ended: Notify::new(),
            batches: Batches::default(),
            metrics: Metrics::new(registry),
        })
    }

    pub(super) fn usage_of(&self, tenant: Tenant) -> SharedUse {
        self.uses.lock().entry(tenant).or_default().clone()
    }

    /// How many replicas share the limits, this one included.
    pub fn set_replicas(&self, replicas: u32) {
        self.replicas.store(replicas.max(1), Relaxed);
    }

    pub(super) fn replicas(&self) -> u32 {
        self.replicas.load(Relaxed)
    }

    /// Where a tenant is charged, if that is shared.
    pub(super) fn store_of(&self, tenant: Tenant) -> Option<ChargeStore> {
        self.redis.as_ref().map(|redis| ChargeStore {
            keys: redis.charge_keys(tenant),
            redis: redis.clone(),
        })
    }

    pub(super) fn is_shared(&self) -> bool {
        self.redis.is_some()
    }

    /// Microseconds since the start.
    pub(super) fn now(&self) -> u64 {
        let since = observe::now().saturating_duration_since(self.started);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }

    /// Tenants with requests that run here.
    pub(super) fn running(&self) -> Vec<(Tenant, Vec<ChargeId>)> {
        let uses = self.uses.lock().clone();
        let running = uses.into_iter().map(|(tenant, usage)| {
            let running = usage.lock().running();
            (tenant, running)
        });
        running.filter(|(_, running)| !running.is_empty()).collect()
    }

    /// Tenants of which the store must say how many requests run. While it does not answer these are all tenants: that it
    /// answers again must be seen without requests, too.
    pub(super) fn to_recount(&self) -> Vec<(Tenant, SharedUse)> {
        let uses = self.uses.lock().clone();
        let is_without_store = self.metrics.without_store.get() != 0;
        let uses = uses.into_iter();
        uses.filter(|(_, usage)| usage.lock().must_recount() || is_without_store)
            .collect()
    }

    pub(super) fn on_store_failure(&self, operation: &str) {
        self.metrics.without_store.set(1);
        let failures = &self.metrics.store_failures;
        failures.with_label_values(&[operation]).inc();
    }

    /// The store has answered what no request waits for. A charge that took as long would have failed after its time-out, and the
    /// limits would be held without the store, although it answers.
    pub(super) fn on_answer(&self, took: Duration) {
        if took <= self.advanced.timeout {
            self.metrics.without_store.set(0);
        }
    }

    pub(super) fn end(
        &self,
        tenant: Tenant,
        usage: &SharedUse,
        settlement: Settlement,
        charged: Charged,
    ) {
        let (factor, for_store) = match charged {
            Charged::Shared => (1, true),
            Charged::Alone(factor) => (factor, false),
        };
        self.update(tenant, usage, |usage| {
            usage.end(settlement, factor, for_store, self.now());
        });
    }

    /// The store has not answered: what was to go along goes later, and a charge that may have been applied is
    /// withdrawn.
    pub(super) fn on_no_reply(
        &self,
        tenant: Tenant,
        usage: &SharedUse,
        settlements: Vec<Settlement>,
        withdrawn: Option<Settlement>,
    ) {
        if settlements.is_empty() && withdrawn.is_none() {
            return;
        }
        self.update(tenant, usage, |usage| {
            usage.on_no_reply(settlements, withdrawn)
        });
    }

    /// Changes what has yet to be settled, within its bound.
    fn update(&self, tenant: Tenant, usage: &SharedUse, change: impl FnOnce(&mut Use)) {
        let is_first = {
            let mut usage = usage.lock();
            change(&mut usage);
            let dropped = usage.bound_unsettled(self.advanced.max_unsettled as usize);
            self.metrics.settlements_dropped.inc_by(dropped as u64);
            usage.note_unsettled()
        };
        if is_first {
            self.note_ended(tenant, usage);
        }
    }

    /// Notes all tenants with something to settle, for a task that begins anew: the one before may have taken the list with it.
    pub(super) fn note_again(&self) {
        let uses = self.uses.lock().clone();
        for (tenant, usage) in uses {
            let has_unsettled = usage.lock().note_again();
            if has_unsettled {
                self.note_ended(tenant, &usage);
            }
        }
    }

    pub(super) fn note_ended(&self, tenant: Tenant, usage: &SharedUse) {
        self.ended.lock().push((tenant, usage.clone()));
        self.has_ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use smallvec::SmallVec;

    use super::*;
    use crate::ids::RequestId;

    #[test]
    fn a_store_that_answers_too_late_for_a_charge_is_as_good_as_none() {
        let limiter = Limiter::new(&Settings::default(), None, &Registry::default());
        let timeout = limiter.advanced.timeout;
        limiter.on_store_failure("charge");
        limiter.on_answer(timeout + Duration::from_millis(1));
        assert_eq!(limiter.metrics.without_store.get(), 1);
        limiter.on_answer(timeout);
        assert_eq!(limiter.metrics.without_store.get(), 0);
    }

    #[test]
    fn what_a_panic_left_unsettled_is_noted_again() {
        let limiter = Limiter::new(&Settings::default(), None, &Registry::default());
        let [left, taken] = ["left", "taken"].map(Tenant::of);
        let end = |tenant: Tenant| {
            let settlement = Settlement {
                id: ChargeId::Request(RequestId::new(1)),
                is_refund: false,
                corrections: SmallVec::new(),
            };
            let usage = limiter.usage_of(tenant);
            limiter.end(tenant, &usage, settlement, Charged::Shared);
        };
        let noted = || -> Vec<Tenant> {
            let ended = std::mem::take(&mut *limiter.ended.lock());
            ended.into_iter().map(|(tenant, _)| tenant).collect()
        };
        end(left);
        end(taken);
        assert_eq!(noted(), [left, taken]);
        limiter.usage_of(taken).lock().take_unsettled(1);
        limiter.note_again();
        assert_eq!(noted(), [left]);
        end(left);
        end(taken);
        assert_eq!(noted(), [taken]);
    }
}
