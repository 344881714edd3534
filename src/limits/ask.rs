//! Charges requests in the store, for all replicas.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::batches::{Batch, Reply};
use super::compiled::Limit;
use super::limiter::Charged;
use super::tenant_limits::TenantLimits;
use crate::http::io_threads;
use crate::observe;
use crate::store::Error as StoreError;
use crate::store::charges::{Charge, ChargeId, ChargeReply, Charges, LimitCharge, Settlement};

impl TenantLimits {
    /// Charges a request, together with others. `None` if the store does not answer. Dropping this withdraws the charge.
    pub(super) async fn ask(
        self: &Arc<Self>,
        id: ChargeId,
        costs: &[(&Limit, u64)],
        max_concurrent: u32,
    ) -> Option<ChargeReply> {
        let thread = io_threads::index();
        let limits = costs.iter().map(|(limit, cost)| LimitCharge {
            limit: limit.name.clone(),
            burst: limit.rate.burst_micros,
            cost: *cost,
            believed: 0,
        });
        let charge = Charge {
            id,
            limits: limits.collect(),
            max_concurrent,
        };
        let batches = &self.limiter.batches;
        let (receiver, is_first) = batches.join(thread, self.tenant, charge);
        if is_first {
            // Those who wait for its replies wait for it; it ends with the time-out of the store.
            drop(Handle::current().spawn(self.clone().make_charges(thread)));
        }
        let mut waiting = Waiting {
            limits: self,
            id,
            costs,
            is_over: false,
            receiver,
        };
        let reply = (&mut waiting.receiver).await;
        waiting.is_over = true;
        reply.unwrap_or_else(|_| {
            // The thread has ended that made it.
            self.on_no_reply(Vec::new(), Some(waiting.withdrawal()));
            None
        })
    }

    /// Charges what was asked for on this thread, in one round trip.
    async fn make_charges(self: Arc<Self>, thread: usize) {
        let (limiter, started) = (&self.limiter, observe::now());
        let Batch {
            mut charges,
            waiting,
        } = limiter.batches.take(thread, self.tenant);
        let Some(store) = self.store.as_ref().filter(|_| !charges.is_empty()) else {
            return;
        };
        let (was_apart, settlements) = {
            let mut usage = self.usage.lock();
            (usage.is_apart, usage.begin(&mut charges, limiter.now()))
        };
        let mut unsettled = Unsettled {
            limits: &self,
            settlements,
        };
        let request = Charges {
            charges: &charges,
            settlements: &unsettled.settlements,
            lease: limiter.advanced.lease,
            charge_once: limiter.advanced.charge_once,
            was_apart,
        };
        let timeout = limiter.advanced.timeout;
        let replies = store.redis.charge(&store.keys, request, timeout).await;
        let took = observe::now().saturating_duration_since(started);
        limiter.metrics.store_seconds.observe(took.as_secs_f64());
        match replies {
            Ok(replies) => {
                limiter.metrics.without_store.set(0);
                unsettled.settlements.clear();
                {
                    let (mut usage, now) = (self.usage.lock(), limiter.now());
                    for (charge, reply) in charges.iter().zip(&replies) {
                        usage.on_reply(charge, reply, now);
                    }
                }
                for ((charge, reply), waiting) in charges.iter().zip(replies).zip(waiting) {
                    if let Err(Some(reply)) = waiting.send(Some(reply)) {
                        self.withdraw(&reply, withdrawal_of(charge));
                    }
                }
            }
            Err(error) => {
                limiter.on_store_failure("charge");
                drop(unsettled);
                for (charge, waiting) in charges.iter().zip(waiting) {
                    if matches!(error, StoreError::Unknown { .. }) {
                        self.on_no_reply(Vec::new(), Some(withdrawal_of(charge)));
                    }
                    // Who has left needs no answer.
                    let _ = waiting.send(None);
                }
            }
        }
    }

    /// Nobody is left for whom the store has charged this.
    fn withdraw(&self, reply: &ChargeReply, withdrawn: Settlement) {
        if reply.is_granted {
            let limiter = &self.limiter;
            limiter.end(self.tenant, &self.usage, withdrawn, Charged::Shared);
        }
    }

    fn on_no_reply(&self, settlements: Vec<Settlement>, withdrawn: Option<Settlement>) {
        let limiter = &self.limiter;
        limiter.on_no_reply(self.tenant, &self.usage, settlements, withdrawn);
    }
}

/// What gives a charge back.
fn withdrawal<'a>(id: ChargeId, costs: impl Iterator<Item = (&'a Arc<str>, u64)>) -> Settlement {
    let back = costs.map(|(limit, cost)| {
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        (limit.clone(), -cost)
    });
    Settlement {
        id,
        is_refund: true,
        corrections: back.collect(),
    }
}

fn withdrawal_of(charge: &Charge) -> Settlement {
    let costs = charge
        .limits
        .iter()
        .map(|charged| (&charged.limit, charged.cost));
    withdrawal(charge.id, costs)
}

/// A request that waits for its charge. If it is dropped, either this withdraws the charge or the task that makes it.
struct Waiting<'a> {
    limits: &'a TenantLimits,
    id: ChargeId,
    costs: &'a [(&'a Limit, u64)],
    /// Whether the request has the reply.
    is_over: bool,
    receiver: oneshot::Receiver<Reply>,
}

impl Waiting<'_> {
    fn withdrawal(&self) -> Settlement {
        let costs = self.costs.iter().map(|(limit, cost)| (&limit.name, *cost));
        withdrawal(self.id, costs)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.receiver.close();
        if let Ok(Some(reply)) = self.receiver.try_recv() {
            self.limits.withdraw(&reply, self.withdrawal());
        }
    }
}

/// Settlements that went along with charges. What the store has not confirmed goes again.
struct Unsettled<'a> {
    limits: &'a TenantLimits,
    settlements: Vec<Settlement>,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        let settlements = std::mem::take(&mut self.settlements);
        self.limits.on_no_reply(settlements, None);
    }
}
