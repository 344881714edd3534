//! From a plan to a worker, or to a prefill and a decode worker: one cache lookup, and a view of the fleet for each
//! role.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::chosen::{self, Choice, Chosen, NotDisaggregated, Prefill, Split, TransferTrial, Trial};
use super::failed_workers::{Excluded, FailedWorkers};
use super::fleet_view::{FleetView, Task};
use super::promised::Promised;
use crate::fleet::{Group, Places, Role, Worker};
use crate::http::circuit_breaker::State;
use crate::ids::{ViewIndex, WorkerIndex};
use crate::relay::kv_transfer::SingleWorkerReason;
use crate::relay::plan::Plan;
use crate::relay::prefill_decode::Disaggregation;
use crate::relay::prompt::cached_prefix::{CachedPrefixes, Caches};
use crate::relay::request::gateway::{CarriedTo, Gateway};
use crate::routing::pair::{self, LocalReason};
use crate::routing::{self, PREFIX_CANDIDATES};

/// Chooses the workers of a request. Only [`Chooser::choose`] changes anything: circuit breakers admit the request, and its adapter
/// and the prefix that it shares with others count as used.
#[derive(Clone, Copy)]
pub(in crate::relay) struct Chooser<'a> {
    pub(in crate::relay) caches: &'a Caches,
    /// `None` if requests are not disaggregated.
    pub(in crate::relay) disaggregation: Option<&'a Disaggregation>,
}

impl<'c> Chooser<'c> {
    pub(in crate::relay) fn cached_prefixes<'a>(
        &self,
        plan: &'a Plan,
        max_owners: usize,
    ) -> CachedPrefixes<'a>
    where
        'c: 'a,
    {
        self.cached_prefixes_in(plan, &plan.group, max_owners)
    }

    /// The cached prefixes of the prompt at the workers of `group`, which may be those of another moment than the plan's.
    pub(in crate::relay) fn cached_prefixes_in<'a>(
        &self,
        plan: &'a Plan,
        group: &'a Group,
        max_owners: usize,
    ) -> CachedPrefixes<'a>
    where
        'c: 'a,
    {
        CachedPrefixes::new(
            Places::new(group, plan.pinned),
            self.caches,
            &plan.prompt,
            &plan.model.routing.advanced.tier_credit,
            (max_owners, plan.request.seed),
            &plan.model.counts.shared_prefixes,
        )
    }

    /// Chooses workers for a plan's request, without those that have `failed` it. With `may_repeat` one of those is
    /// chosen if there is no other. `first`: a choice that was made just now.
    pub(in crate::relay) fn choose(
        &self,
        plan: &Plan,
        now: Instant,
        failed: &FailedWorkers,
        may_repeat: bool,
        mut first: Option<Chosen>,
    ) -> Option<Choice> {
        let mut failed = Cow::Borrowed(failed);
        loop {
            let chosen = match first.take() {
                Some(chosen) => chosen,
                None => self.find_first(plan, now, &failed, may_repeat)?,
            };
            let shared = chosen::computes(&chosen).shared;
            let (decision, split) = chosen;
            let worker = plan.group.worker(decision.index);
            // Of several requests that see an open breaker become half-open, one is the trial request. A trial
            // request of one worker must not be one that the other worker's breaker then keeps from being sent.
            let may_admit = worker.breaker.may_admit(now);
            let (mut prefill_trial, mut transfer_trial) = (None, None);
            if let Split::Pair(decision) = split {
                let prefill = plan.group.worker(decision.index);
                let may_both =
                    prefill.breaker.may_admit(now) && prefill.kv_transfer_breaker.may_admit(now);
                let mut is_admitted = || {
                    prefill_trial = self.admit(plan, prefill, now)?;
                    transfer_trial = admit_transfer(prefill, now)?;
                    Some(())
                };
                if !may_both || (may_admit && is_admitted().is_none()) {
                    failed.to_mut().prefill.push(prefill.id);
                    continue;
                }
            }
            let admitted = may_admit.then(|| self.admit(plan, worker, now));
            let Some(trial) = admitted.flatten() else {
                failed.to_mut().decode.push(worker.id);
                continue;
            };
            let split = split.map(|decision| {
                let worker = plan.group.worker(decision.index).clone();
                Prefill {
                    decision,
                    bootstrap_info: worker.bootstrap_info.load_full(),
                    worker,
                    trial: prefill_trial,
                    transfer_trial,
                    done_at: OnceLock::new(),
                }
            });
            if plan.group.is_adapter {
                let prefill = split.prefill().map(|prefill| &prefill.worker);
                let chosen = prefill.into_iter().chain([worker]);
                chosen.for_each(|worker| worker.adapters.on_used(&plan.group.model));
            }
            if let Some(key) = shared {
                plan.model.counts.shared_prefixes.count(now, key);
            }
            return Some(Choice {
                decision,
                worker: worker.clone(),
                split,
                trial,
            });
        }
    }

    /// The workers that a gateway is to try, at the lowest cost first. Changes nothing.
    pub(in crate::relay) fn carried_to<'a>(
        &self,
        gateway: &'a dyn Gateway,
        plan: &Plan,
        choice: &Choice,
        now: Instant,
        failed: &FailedWorkers,
    ) -> CarriedTo<'a> {
        let prefixes = self.cached_prefixes(plan, PREFIX_CANDIDATES);
        let mut failed = failed.clone();
        let mut workers: SmallVec<[Arc<Worker>; 4]> = smallvec![choice.worker.clone()];
        while workers.len() <= gateway.fallbacks() {
            failed.decode.push(workers[workers.len() - 1].id);
            let Some((decision, _)) = self.choose_once(plan, &prefixes, now, &failed, None) else {
                break;
            };
            workers.push(plan.group.worker(decision.index).clone());
        }
        let prefill = choice.split.prefill();
        CarriedTo {
            gateway,
            workers,
            prefill: prefill.map(|prefill| prefill.worker.clone()),
        }
    }

    /// What [`Chooser::choose`] finds first, which it may be handed. Changes nothing.
    pub(in crate::relay) fn find_first(
        &self,
        plan: &Plan,
        now: Instant,
        failed: &FailedWorkers,
        may_repeat: bool,
    ) -> Option<Chosen> {
        let prefixes = self.cached_prefixes(plan, PREFIX_CANDIDATES);
        self.find(plan, &prefixes, now, failed, may_repeat)
    }

    /// True if a retry would find workers among those of `group` that may get the request. Changes nothing.
    pub(in crate::relay) fn may_retry_in(
        &self,
        plan: &Plan,
        group: &Group,
        now: Instant,
        failed: &FailedWorkers,
        may_repeat: bool,
    ) -> bool {
        let prefixes = self.cached_prefixes_in(plan, group, PREFIX_CANDIDATES);
        let found = self.find(plan, &prefixes, now, failed, may_repeat);
        found.is_some_and(|chosen| !self.lacks_prefill_worker(group, &chosen))
    }

    /// Chooses workers without those that have `failed`; with `may_repeat` one of those if there is no other. Changes
    /// nothing.
    fn find(
        &self,
        plan: &Plan,
        prefixes: &CachedPrefixes<'_>,
        now: Instant,
        failed: &FailedWorkers,
        may_repeat: bool,
    ) -> Option<Chosen> {
        let once = |failed: &FailedWorkers| self.choose_once(plan, prefixes, now, failed, None);
        let chosen = once(failed).or_else(|| {
            let mut chances = failed.second_chances(may_repeat);
            chances.find_map(|again| once(&again))
        })?;
        let group = prefixes.places.group();
        if !may_repeat || !self.lacks_prefill_worker(group, &chosen) {
            return Some(chosen);
        }
        // A pair with a worker that has failed is better than none: with another decode worker if there is one.
        let pair_without = |decode: &Excluded| {
            let again = FailedWorkers {
                decode: decode.clone(),
                prefill: failed.unfit.clone(),
                ..failed.clone()
            };
            once(&again).filter(|chosen| !self.lacks_prefill_worker(group, chosen))
        };
        let found = pair_without(&failed.decode).or_else(|| pair_without(&failed.unfit));
        found.or(Some(chosen))
    }

    /// Has a worker's circuit breaker admit the request, which may be its trial request then. `None` if it does not.
    fn admit(&self, plan: &Plan, worker: &Arc<Worker>, now: Instant) -> Option<Option<Trial>> {
        if !worker.breaker.admit(now) {
            return None;
        }
        let is_trial = worker.breaker.state() == State::HalfOpen;
        Some(is_trial.then(|| {
            let families = &plan.model.families;
            families.on_breaker_transition(worker, State::HalfOpen);
            Trial {
                worker: worker.clone(),
                admitted_at: now,
            }
        }))
    }

    /// Chooses workers as things are now, behind what they were promised `before`. Changes nothing.
    pub(in crate::relay) fn choose_once(
        &self,
        plan: &Plan,
        prefixes: &CachedPrefixes<'_>,
        now: Instant,
        failed: &FailedWorkers,
        before: Option<&Promised>,
    ) -> Option<Chosen> {
        let decode = FleetView::new(prefixes, Task::Decode, now, &failed.decode).behind(before);
        let Some(settings) = self.disaggregation else {
            let decision = routing::decide(&plan.model.routing, &plan.request, &decode)?;
            return Some((decode.in_fleet(decision), Split::Off));
        };
        let reason = match &plan.legs {
            Some(Err(reason)) => NotDisaggregated::Request(*reason),
            Some(Ok(_)) if !failed.gave_up_transfers => {
                let task = Task::Prefill(settings.connector, plan.api);
                let prefill = FleetView::new(prefixes, task, now, &failed.prefill).behind(before);
                let chosen = choose_pair(plan, settings, &prefill, &decode);
                let reason = match chosen {
                    Some((_, Split::Whole(reason))) => reason,
                    None => NotDisaggregated::Local(LocalReason::NoPair),
                    chosen => return chosen,
                };
                if settings.connector.decodes_alone() {
                    return chosen;
                }
                return choose_whole(plan, prefixes, now, failed, before, reason).or(chosen);
            }
            _ => NotDisaggregated::Failed,
        };
        if !settings.connector.decodes_alone() {
            return choose_whole(plan, prefixes, now, failed, before, reason);
        }
        let decision = routing::decide(&plan.model.routing, &plan.request, &decode)?;
        Some((decode.in_fleet(decision), Split::Whole(reason)))
    }

    /// True if the request must not run on the worker that was chosen among those of `group`, because it needs a prefill leg
    /// and has none.
    pub(in crate::relay) fn lacks_prefill_worker(
        &self,
        group: &Group,
        (decision, split): &Chosen,
    ) -> bool {
        let role = group.worker(decision.index).role;
        let reason = split.why_whole();
        reason.is_some_and(|reason| self.lacks_prefill(role, reason))
    }

    /// As [`lacks_prefill`]; false if requests are not disaggregated.
    pub(in crate::relay) fn lacks_prefill(&self, role: Role, reason: NotDisaggregated) -> bool {
        let settings = self.disaggregation;
        settings.is_some_and(|settings| lacks_prefill(settings, role, reason))
    }

    /// Why no worker of the model takes a request that cannot be split: its decode workers compute no prompts.
    pub(in crate::relay) fn not_split(&self, plan: &Plan) -> Option<SingleWorkerReason> {
        let settings = self.disaggregation?;
        match &plan.legs {
            Some(Err(reason))
                if !settings.connector.decodes_alone() && plan.group.both().is_empty() =>
            {
                Some(*reason)
            }
            _ => None,
        }
    }

    /// Whether requests whose KV transfers failed may go on without a prefill leg.
    pub(in crate::relay) fn may_give_up_transfers(&self) -> bool {
        let settings = self.disaggregation;
        settings.is_some_and(Disaggregation::is_local_prefill_allowed)
    }
}

/// Has the circuit breaker of a prefill worker's KV transfers admit the request, which may be its trial then. `None` if
/// it does not.
fn admit_transfer(prefill: &Arc<Worker>, now: Instant) -> Option<Option<TransferTrial>> {
    let breaker = &prefill.kv_transfer_breaker;
    if !breaker.admit(now) {
        return None;
    }
    let is_trial = breaker.state() == State::HalfOpen;
    Some(is_trial.then(|| TransferTrial {
        prefill: prefill.clone(),
        admitted_at: now,
    }))
}

/// A worker for the whole request where decode workers take none.
fn choose_whole(
    plan: &Plan,
    prefixes: &CachedPrefixes<'_>,
    now: Instant,
    failed: &FailedWorkers,
    before: Option<&Promised>,
    reason: NotDisaggregated,
) -> Option<Chosen> {
    let view = FleetView::new(prefixes, Task::Whole, now, &failed.decode).behind(before);
    let decision = routing::decide(&plan.model.routing, &plan.request, &view)?;
    Some((view.in_fleet(decision), Split::Whole(reason)))
}

fn choose_pair(
    plan: &Plan,
    settings: &Disaggregation,
    prefill: &FleetView<'_>,
    decode: &FleetView<'_>,
) -> Option<Chosen> {
    let group = decode.prefixes.places.group();
    let role = |index: WorkerIndex| group.worker(index).role;
    let may_pair = |from: ViewIndex, to: ViewIndex| {
        let (from, to) = (prefill.worker_index(from), decode.worker_index(to));
        let has_roles = settings.connector.decodes_alone()
            || role(from) == Role::Prefill && role(to) == Role::Decode;
        from != to && has_roles && group.is_pair(from, to)
    };
    let computes_alone = |worker: ViewIndex| {
        let no_pair = NotDisaggregated::Local(LocalReason::NoPair);
        !lacks_prefill(settings, role(decode.worker_index(worker)), no_pair)
    };
    let pair = pair::decide(
        &settings.pair,
        &plan.model.routing,
        &plan.request,
        prefill,
        decode,
        may_pair,
        computes_alone,
    )?;
    let split = match pair.prefill {
        Ok(decision) => Split::Pair(prefill.in_fleet(decision)),
        Err(reason) => Split::Whole(NotDisaggregated::Local(reason)),
    };
    Some((decode.in_fleet(pair.decode), split))
}

/// True if a worker of this role must not run a request that has no prefill leg for this reason.
fn lacks_prefill(settings: &Disaggregation, role: Role, reason: NotDisaggregated) -> bool {
    if settings.connector.decodes_alone() {
        !may_compute_locally(settings, reason)
    } else {
        role == Role::Decode
    }
}

/// True if a decode worker may compute the prompt of a request that has no prefill leg for this reason.
fn may_compute_locally(settings: &Disaggregation, reason: NotDisaggregated) -> bool {
    !reason.is_lack_of_prefill() || settings.is_local_prefill_allowed()
}
