//! One tenant's limits, of one configuration, with what is used of them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use prometheus::IntCounter;
use smallvec::SmallVec;

use super::compiled::{Applied, Limit, Limits};
use super::cost::{Amount, Known};
use super::limiter::{ChargeStore, Limiter, SharedUse};
use super::refusal::Refusal;
use super::settings::{Settings, TenantLimitsSpec};
use super::standing::Standing;
use crate::ids::Tenant;
use crate::observe;
use crate::store::charges::ChargeId;

/// One tenant's limits, of one configuration, with what is used of them.
#[derive(Debug)]
pub struct TenantLimits {
    pub(super) limiter: Arc<Limiter>,
    pub(super) limits: Limits,
    pub(super) tenant: Tenant,
    pub(super) name: Arc<str>,
    /// Without tenants all clients share them.
    is_of_everybody: bool,
    pub(super) usage: SharedUse,
    /// Whether background runs wait for a place here.
    pub(super) runs_wait: Arc<AtomicBool>,
    pub(super) store: Option<ChargeStore>,
    /// In the store, and by this replica alone.
    pub(super) admitted: [IntCounter; 2],
}

/// A request before it is admitted.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub id: ChargeId,
    /// How the client calls the model, and what it stands for.
    pub model: &'a str,
    pub target: &'a str,
    pub known: Known,
}

impl TenantLimits {
    pub fn new(
        limiter: &Arc<Limiter>,
        name: &str,
        spec: &TenantLimitsSpec,
        settings: &Settings,
    ) -> Arc<Self> {
        let tenant = Tenant::of(name);
        let usage = limiter.usage_of(tenant);
        let runs_wait = usage.lock().turns.runs_wait();
        let admitted = |decided| limiter.metrics.admitted.with_label_values(&[name, decided]);
        Arc::new(Self {
            limits: Limits::new(spec, settings),
            tenant,
            name: name.into(),
            // The check allows it only where no tenants are listed.
            is_of_everybody: settings.everybody.is_some(),
            usage,
            runs_wait,
            store: limiter.store_of(tenant),
            admitted: [admitted("shared"), admitted("local")],
            limiter: limiter.clone(),
        })
    }

    pub fn allows(&self, model: &str) -> bool {
        self.limits.allows(model)
    }

    /// The most output tokens that a request may ask for, by the name that it asks for and what that stands for.
    pub fn max_tokens(&self, model: &str, target: Option<&str>) -> Option<u64> {
        let names = [model, target.unwrap_or(model)];
        self.limits.max_tokens(&names)
    }

    /// The tokens that all lines of the tenant's batches may have that have not ended.
    pub fn batch_tokens_queued(&self) -> Option<u64> {
        self.limits.batch_queued
    }

    /// Whether it matters how much of a prompt is cached.
    pub fn weighs_cached(&self) -> bool {
        self.limits.weighs_cached()
    }

    /// What the tenant has left for a model, without a charge.
    pub fn standing(&self, model: Option<&str>) -> Standing {
        let names: SmallVec<[&str; 1]> = model.into_iter().collect();
        let now = self.limiter.now();
        let usage = self.usage.lock();
        let used = |limit: &Limit| usage.of(&limit.name, now);
        match self.limits.of(&names) {
            Some(applied) => Standing::of(applied.limits.iter().map(|limit| (*limit, used(limit)))),
            None => {
                let all = self.limits.interactive();
                let common = all.filter(|limit| limit.model.is_none());
                Standing::of(common.map(|limit| (limit, used(limit))))
            }
        }
    }

    /// Refuses a request for a model that the tenant may not use.
    pub fn refuse_model(&self, model: &str) -> Refusal {
        let refusal = Refusal::Model {
            model: observe::shortened(model).to_owned(),
        };
        self.count(&refusal);
        refusal
    }

    pub(super) fn count(&self, refusal: &Refusal) {
        let labels = [&*self.name, refusal.reason()];
        let refusals = &self.limiter.metrics.refusals;
        refusals.with_label_values(&labels).inc();
    }

    /// What a limit is of, for the message of a refusal: the model that the client asks for, as at OpenAI, or all clients.
    /// `None`: the limit of requests that run.
    pub(super) fn subject(&self, model: &str, limit: Option<&Limit>) -> String {
        if !self.is_of_everybody {
            return observe::shortened(model).to_owned();
        }
        match limit.and_then(|limit| limit.model.as_deref()) {
            Some(pattern) => format!("{pattern} (all clients together)"),
            None => "all clients together".to_owned(),
        }
    }

    /// What needs no count: the model, its `max_tokens`, and the size of the request.
    pub(super) fn check(
        &self,
        request: &Request<'_>,
        reserved: &Amount,
    ) -> Result<Applied<'_>, Refusal> {
        let names = [request.model, request.target];
        let Some(mut applied) = self.limits.of(&names) else {
            let model = observe::shortened(request.model).to_owned();
            return Err(Refusal::Model { model });
        };
        if let Some(day) = self
            .limits
            .batch_day
            .as_ref()
            .filter(|_| request.id.is_line())
        {
            applied.limits = SmallVec::from_iter([day]);
        }
        if let Some(param) = request.known.odd_value.filter(|_| request.known.generates) {
            return Err(Refusal::Type { param });
        }
        if let (Some(limit), Some(requested)) = (applied.max_tokens, request.known.max_tokens)
            && requested > limit
        {
            return Err(Refusal::MaxTokens {
                param: request.known.max_tokens_name,
                limit,
                requested,
            });
        }
        for limit in &applied.limits {
            let requested = limit.kind.of(reserved);
            if limit.rate.cost(requested) > limit.rate.burst_micros {
                return Err(Refusal::TooLarge {
                    of: self.subject(request.model, Some(*limit)),
                    kind: limit.kind,
                    limit: limit.rate.capacity(),
                    requested,
                });
            }
        }
        Ok(applied)
    }
}
