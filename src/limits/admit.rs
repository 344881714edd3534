//! Admits requests within the limits of their tenants: in Redis for all replicas, or alone.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::charge::Charge;
use super::compiled::{Applied, Limit};
use super::cost::Amount;
use super::gcra;
use super::limiter::{ChargeStore, Charged};
use super::refusal::Refusal;
use super::settings::OnStoreFailure;
use super::standing::Standing;
use super::tenant_limits::{Request, TenantLimits};
use crate::observe;
use crate::store::Error as StoreError;
use crate::store::charges::{self, ChargeId, LimitCharge, Settlement};

/// How soon a client retries while the store cannot be asked.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// The limits that a request counts in, with its cost in each.
type Costs<'a> = SmallVec<[(&'a Limit, u64); 4]>;

/// A decision on one request.
struct Decision {
    is_granted: bool,
    running: u64,
    used: SmallVec<[u64; 4]>,
    charged: Charged,
}

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
            let labels = [&*self.name, refusal.reason()];
            let refusals = &self.limiter.metrics.refusals;
            refusals.with_label_values(&labels).inc();
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
        let Some(decision) = self.decide(request.id, &costs).await else {
            let refusal = Refusal::Store {
                retry_after: STORE_RETRY,
            };
            return (Err(refusal), self.standing(Some(request.target)));
        };
        let used = decision.used.iter().copied();
        let standing = Standing::of(costs.iter().map(|(limit, _)| *limit).zip(used));
        if decision.is_granted {
            self.admitted[usize::from(decision.charged != Charged::Shared)].inc();
            let names = costs.iter().map(|(limit, _)| limit.name.clone()).collect();
            let charge = Charge::new(self, names, request.id, decision.charged, reserved);
            return (Ok(charge), standing);
        }
        let model = observe::shortened(request.model);
        let refusal = refusal(model, &costs, &decision, &reserved);
        let refusal = refusal.unwrap_or_else(|| Refusal::Concurrent {
            model: model.to_owned(),
            limit: self.limits.max_concurrent,
            used: decision.running,
        });
        (Err(refusal), standing)
    }

    /// `None` if the store cannot be asked and nothing is granted without it.
    async fn decide(self: &Arc<Self>, id: ChargeId, costs: &Costs<'_>) -> Option<Decision> {
        let limiter = &self.limiter;
        let shared = match &self.store {
            Some(store) if self.limits.counts() => self.ask(store, id, costs).await,
            _ => None,
        };
        if let Some(reply) = shared {
            return Some(Decision {
                is_granted: reply.is_granted,
                running: reply.running,
                used: reply.used,
                charged: Charged::Shared,
            });
        }
        let is_closed = self.limits.on_store_failure == OnStoreFailure::Closed;
        if limiter.is_shared() && self.limits.counts() && is_closed {
            return None;
        }
        let replicas = limiter.replicas();
        let max_concurrent = self.limits.max_concurrent;
        let mut usage = self.usage.lock();
        let decision = usage.decide_alone(id, costs, max_concurrent, replicas, limiter.now());
        Some(Decision {
            is_granted: decision.is_granted,
            running: decision.running,
            used: decision.used,
            charged: Charged::Alone(replicas),
        })
    }

    /// Charges in Redis. `None` if it does not answer.
    async fn ask(
        self: &Arc<Self>,
        store: &ChargeStore,
        id: ChargeId,
        costs: &Costs<'_>,
    ) -> Option<charges::ChargeReply> {
        let (limiter, started) = (&self.limiter, observe::now());
        let (was_apart, (charges, settlements)) = {
            let mut usage = self.usage.lock();
            (usage.is_apart(), usage.begin(costs, limiter.now()))
        };
        let mut asking = Asking {
            limits: self,
            id,
            charges,
            settlements,
            outcome: Outcome::Unknown,
        };
        let charge = charges::Charge {
            id,
            limits: &asking.charges,
            max_concurrent: self.limits.max_concurrent,
            lease: limiter.advanced.lease,
            charge_once: limiter.advanced.charge_once,
            was_apart,
            settlements: &asking.settlements,
        };
        let timeout = limiter.advanced.timeout;
        let reply = store.redis.charge(&store.keys, &charge, timeout).await;
        let took = observe::now().saturating_duration_since(started);
        limiter.metrics.store_seconds.observe(took.as_secs_f64());
        match reply {
            Ok(reply) => {
                limiter.metrics.without_store.set(0);
                asking.outcome = Outcome::Applied;
                let mut usage = self.usage.lock();
                usage.on_reply(id, &asking.charges, &reply, limiter.now());
                Some(reply)
            }
            Err(error) => {
                if !matches!(error, StoreError::Unknown { .. }) {
                    asking.outcome = Outcome::NotApplied;
                }
                limiter.on_store_failure("charge");
                None
            }
        }
    }
}

/// The limit that refuses, if it is not the number of running requests: the one with the longest wait.
fn refusal(
    model: &str,
    costs: &Costs<'_>,
    decision: &Decision,
    reserved: &Amount,
) -> Option<Refusal> {
    let share = match decision.charged {
        Charged::Shared => 1,
        Charged::Alone(replicas) => u64::from(replicas),
    };
    let waits = costs.iter().zip(&decision.used);
    let waits = waits.filter_map(|((limit, cost), used)| {
        let burst = limit.rate.burst_micros;
        let wait = gcra::wait(*used, cost.saturating_mul(share).min(burst), burst)?;
        Some((wait, *limit, *used))
    });
    let (wait, limit, used) = waits.max_by_key(|(wait, ..)| *wait)?;
    Some(Refusal::Rate {
        model: model.to_owned(),
        kind: limit.kind,
        limit: limit.rate.capacity(),
        used: limit.rate.units(used),
        requested: limit.kind.of(reserved),
        retry_after: Duration::from_micros(wait),
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Applied,
    NotApplied,
    /// The store may have applied it.
    Unknown,
}

/// A charge that the store is asked for. Dropped without a reply, it is withdrawn if it may have been applied.
struct Asking<'a> {
    limits: &'a TenantLimits,
    id: ChargeId,
    charges: Vec<LimitCharge>,
    settlements: Vec<Settlement>,
    outcome: Outcome,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if self.outcome == Outcome::Applied {
            return;
        }
        let back = |charge: &LimitCharge| {
            let cost = i64::try_from(charge.cost).unwrap_or(i64::MAX);
            (charge.limit.clone(), -cost)
        };
        let withdrawn = (self.outcome == Outcome::Unknown).then(|| Settlement {
            id: self.id,
            is_refund: true,
            corrections: self.charges.iter().map(back).collect(),
        });
        let settlements = std::mem::take(&mut self.settlements);
        let limits = self.limits;
        let limiter = &limits.limiter;
        limiter.on_no_reply(limits.tenant, &limits.usage, settlements, withdrawn);
    }
}
