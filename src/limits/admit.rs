//! Admits requests within the limits of their tenants: in Redis for all replicas, or alone.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use smallvec::SmallVec;

use super::charge::Charge;
use super::compiled::{Applied, Limit};
use super::cost::Amount;
use super::gcra;
use super::limiter::Charged;
use super::refusal::Refusal;
use super::settings::OnStoreFailure;
use super::standing::Standing;
use super::tenant_limits::{Request, TenantLimits};
use crate::store::charges::{ChargeId, ChargeReply};

/// How soon a client retries while the store cannot be asked.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// The limits that a request counts in, with its cost in each.
type Costs<'a> = SmallVec<[(&'a Limit, u64); 4]>;

impl TenantLimits {
    /// Reserves what a request may use, or refuses it; a refusal charges nothing. Returns what is left, too.
    pub async fn admit(
        self: &Arc<Self>,
        request: Request<'_>,
    ) -> (Result<Charge, Refusal>, Standing) {
        let reserved = self.limits.weights.reserve(&request.known);
        let (result, standing) = match self.check(&request, &reserved) {
            Err(refusal) => (Err(refusal), self.standing(Some(request.target))),
            Ok(applied) => self.reserve(&request, &applied, reserved).await,
        };
        if let Err(refusal) = &result {
            self.count(refusal);
        }
        (result, standing)
    }

    async fn reserve(
        self: &Arc<Self>,
        request: &Request<'_>,
        applied: &Applied<'_>,
        reserved: Amount,
    ) -> (Result<Charge, Refusal>, Standing) {
        let cost = |limit: &Limit| limit.rate.cost(limit.kind.of(&reserved));
        let costs: Costs<'_> = applied
            .limits
            .iter()
            .map(|limit| (*limit, cost(limit)))
            .collect();
        let max_concurrent = self.max_concurrent(request.id);
        let is_run = request.id.is_once();
        let keeps_place = max_concurrent > 0 && !is_run && self.keeps_place();
        let decided = self.decide(request.id, &costs, max_concurrent, keeps_place);
        let Some((decision, charged)) = decided.await else {
            let refusal = Refusal::Store {
                retry_after: STORE_RETRY,
            };
            return (Err(refusal), self.standing(Some(request.target)));
        };
        let used = decision.used.iter().copied();
        let standing = Standing::of(costs.iter().map(|(limit, _)| *limit).zip(used));
        if decision.is_granted {
            self.admitted[usize::from(charged != Charged::Shared)].inc();
            let names = costs.iter().map(|(limit, _)| limit.name.clone()).collect();
            let charge = Charge::new(self, names, request.id, charged, reserved);
            return (Ok(charge), standing);
        }
        let exhausted = self.exhausted(request.model, &costs, &decision.used, charged, &reserved);
        if let Some(refusal) = exhausted {
            return (Err(refusal), standing);
        }
        if is_run {
            let (mut usage, now) = (self.usage.lock(), self.limiter.now());
            let running = usage.running_here();
            usage.turns.on_run_waits(request.id, now, running);
        }
        let refusal = Refusal::Concurrent {
            of: self.subject(request.model, None),
            limit: self.limits.max_concurrent,
            used: used_places(decision.running, keeps_place, max_concurrent),
        };
        (Err(refusal), standing)
    }

    /// Whether a place is kept for a background run that waits here.
    fn keeps_place(&self) -> bool {
        // Nearly always no run waits.
        if !self.runs_wait.load(Relaxed) {
            return false;
        }
        let now = self.limiter.now();
        self.usage.lock().turns.keeps_place(now)
    }

    /// The refusal of a request where the only place is kept for another one.
    fn without_place(&self, costs: &Costs<'_>) -> (ChargeReply, Charged) {
        let (usage, now) = (self.usage.lock(), self.limiter.now());
        let used = costs.iter().map(|(limit, _)| usage.of(&limit.name, now));
        let reply = ChargeReply {
            is_granted: false,
            running: usage.running_everywhere(),
            used: used.collect(),
        };
        (reply, Charged::Alone(1))
    }

    /// The limit that refuses, if it is not the number of running requests: the one with the longest wait.
    fn exhausted(
        &self,
        model: &str,
        costs: &Costs<'_>,
        used: &[u64],
        charged: Charged,
        reserved: &Amount,
    ) -> Option<Refusal> {
        let share = match charged {
            Charged::Shared => 1,
            Charged::Alone(replicas) => u64::from(replicas),
        };
        let waits = costs.iter().zip(used);
        let waits = waits.filter_map(|((limit, cost), used)| {
            let burst = limit.rate.burst_micros;
            let wait = gcra::wait(*used, cost.saturating_mul(share).min(burst), burst)?;
            Some((wait, *limit, *used))
        });
        let (wait, limit, used) = waits.max_by_key(|(wait, ..)| *wait)?;
        let (capacity, requested) = (limit.rate.capacity(), limit.kind.of(reserved));
        // A part of a unit that is used is one that cannot be had, and so is the share of other replicas.
        let lacking = capacity.saturating_add(1).saturating_sub(requested);
        Some(Refusal::Rate {
            of: self.subject(model, Some(limit)),
            kind: limit.kind,
            limit: capacity,
            configured: limit.rate.units,
            used: limit.rate.units(used).max(lacking),
            requested,
            retry_after: Duration::from_micros(wait),
        })
    }

    /// How many requests may run with this one; 0: any number. Lines of batches wait for room at the workers instead.
    fn max_concurrent(&self, id: ChargeId) -> u32 {
        if id.is_line() {
            return 0;
        }
        self.limits.max_concurrent
    }

    /// `None` if the store cannot be asked and nothing is granted without it. `keeps_place`: one of the places is for a
    /// background run.
    async fn decide(
        self: &Arc<Self>,
        id: ChargeId,
        costs: &Costs<'_>,
        max_concurrent: u32,
        keeps_place: bool,
    ) -> Option<(ChargeReply, Charged)> {
        // A limit of 0 would be none.
        if keeps_place && max_concurrent == 1 {
            return Some(self.without_place(costs));
        }
        let limiter = &self.limiter;
        let counts = self.limits.counts() || !costs.is_empty();
        let shared = if self.store.is_some() && counts {
            let max_concurrent = max_concurrent - u32::from(keeps_place);
            self.ask(id, costs, max_concurrent).await
        } else {
            None
        };
        if let Some(reply) = shared {
            return Some((reply, Charged::Shared));
        }
        let is_closed = self.limits.on_store_failure == OnStoreFailure::Closed;
        if limiter.is_shared() && counts && is_closed {
            return None;
        }
        let replicas = limiter.replicas();
        let mut max_concurrent = max_concurrent;
        if keeps_place {
            let share = max_concurrent.div_ceil(replicas);
            if share == 1 {
                return Some(self.without_place(costs));
            }
            max_concurrent = (share - 1) * replicas;
        }
        let mut usage = self.usage.lock();
        let decision = usage.decide_alone(id, costs, max_concurrent, replicas, limiter.now());
        Some((decision, Charged::Alone(replicas)))
    }
}

/// The places in use for a client that is refused. A kept one counts, though it may be one of those that run.
fn used_places(running: u64, keeps_place: bool, limit: u32) -> u64 {
    let used = running + u64::from(keeps_place);
    used.min(limit.into()).max(running)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;
    use crate::limits::cost::Known;
    use crate::limits::limiter::Limiter;
    use crate::limits::settings::{Settings, TenantLimitsSpec};
    use crate::observe::metrics::Registry;

    #[test]
    fn a_kept_place_is_in_use_within_the_limit() {
        for (running, keeps_place, limit, expected) in [
            (0, true, 1, 1),
            (1, true, 1, 1),
            (1, false, 1, 1),
            (2, true, 4, 3),
            (4, true, 4, 4),
            // A limit that was lowered.
            (5, true, 4, 5),
            (5, false, 4, 5),
        ] {
            let used = used_places(running, keeps_place, limit);
            assert_eq!(used, expected, "{running} {keeps_place} {limit}");
        }
    }

    #[tokio::test]
    async fn a_burst_of_less_than_a_request_admits_one_and_the_next_one_waits() {
        let json = r#"{"burst": "10s", "requests_per_minute": 5}"#;
        let spec: TenantLimitsSpec = serde_json::from_str(json).unwrap();
        assert_eq!(spec.check(), []);
        let settings = Settings::default();
        let limiter = Limiter::new(&settings, None, &Registry::default());
        let limits = TenantLimits::new(&limiter, "a", &spec, &settings);
        let ask = async |number| {
            let request = Request {
                id: ChargeId::Request(RequestId::new(number)),
                model: "m",
                target: "m",
                known: Known::default(),
            };
            limits.admit(request).await.0
        };
        let first = ask(1).await;
        assert!(first.is_ok(), "{first:?}");
        let second = ask(2).await.unwrap_err();
        let wait = second.retry_after();
        assert!(wait.is_some_and(|wait| wait <= Duration::from_secs(12)));
        assert!(
            matches!(second, Refusal::Rate { limit: 1, .. }),
            "{second:?}"
        );
    }
}
