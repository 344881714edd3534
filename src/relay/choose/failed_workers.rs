//! The workers that do not get a request any more, or at all. Pure.

use smallvec::SmallVec;

use crate::ids::WorkerId;
use crate::relay::failure::fault::Fault;
use crate::relay::failure::types::{Failure, Stage};
use crate::relay::job::Error;
use crate::relay::plan::Plan;
use crate::relay::request::gateway::Gateway;

pub(in crate::relay) type Excluded = SmallVec<[WorkerId; 4]>;

/// The workers that have failed a request, by role.
#[derive(Clone, Debug, Default)]
pub(in crate::relay) struct FailedWorkers {
    /// Those that compute answers: decode workers, and workers that compute whole requests.
    pub(in crate::relay) decode: Excluded,
    /// The workers that do not serve the request's API, whose context is too short for it, that refuse the router's key or that
    /// its gateway cannot reach, whatever fails: some of `decode`.
    pub(in crate::relay) unfit: Excluded,
    pub(in crate::relay) prefill: Excluded,
    /// The failed workers that only closed an idle connection: over a new one they may answer.
    pub(in crate::relay) stale: Excluded,
    /// True once no more KV transfers are tried for the request.
    pub(in crate::relay) gave_up_transfers: bool,
}

impl FailedWorkers {
    /// Workers that do not serve the request's API, or where it has no room, are as if they had failed it. An error if no
    /// worker serves the API.
    pub(in crate::relay) fn unfit_for(
        plan: &Plan,
        gateway: Option<&dyn Gateway>,
    ) -> Result<Self, Error> {
        let mut unfit = if plan.api.is_messages() {
            Excluded::from_slice(&plan.group.without_messages)
        } else {
            Excluded::new()
        };
        if !unfit.is_empty() && unfit.len() == plan.group.workers.len() {
            return Err(Error::NotServed {
                model: plan.group.model.to_string(),
            });
        }
        let lengths = &plan.group.context_lengths;
        unfit.extend(lengths.too_short(plan.context_tokens));
        if let Some(gateway) = gateway {
            let workers = plan.group.workers.iter();
            let unreachable = workers.filter(|worker| !gateway.may_reach(worker));
            unfit.extend(unreachable.map(|worker| worker.id));
        }
        Ok(Self {
            decode: unfit.clone(),
            prefill: unfit.clone(),
            unfit,
            stale: Excluded::new(),
            // A decode worker computes prompt and answer so far itself.
            gave_up_transfers: plan.resumed.is_some(),
        })
    }

    /// Takes note of an attempt that failed at these workers. True if it counts against the one that is to blame for it: a worker
    /// that is tried again fails the same request, not another one, and counts once.
    pub(in crate::relay) fn on_fault(
        &mut self,
        fault: &Fault,
        worker: WorkerId,
        prefill: Option<WorkerId>,
    ) -> bool {
        if fault.failure == Failure::Local {
            // No worker has failed.
            return true;
        }
        let at = prefill
            .filter(|_| fault.stage == Stage::Prefill)
            .unwrap_or(worker);
        let was_stale = self.stale.contains(&at);
        self.stale.retain(|id| *id != at);
        if fault.is_stale() {
            self.stale.push(at);
        }
        let is_new_worker = was_stale || !self.decode.contains(&worker);
        if fault.stage != Stage::Prefill {
            self.decode.push(worker);
        }
        if fault.stage == Stage::Worker {
            return is_new_worker;
        }
        prefill.is_some_and(|prefill| {
            let is_new = !self.prefill.contains(&prefill);
            self.prefill.push(prefill);
            is_new
        })
    }

    /// These get the request in no case.
    pub(in crate::relay) fn exclude_all(&mut self, workers: impl Iterator<Item = WorkerId>) {
        for worker in workers {
            self.unfit.push(worker);
            self.decode.push(worker);
            self.prefill.push(worker);
        }
    }

    /// Without these as well.
    pub(in crate::relay) fn without(&self, decode: &[WorkerId], prefill: &[WorkerId]) -> Self {
        let mut all = self.clone();
        all.decode.extend_from_slice(decode);
        all.prefill.extend_from_slice(prefill);
        all
    }

    /// With fewer excluded, for when no other worker is left: first without those that only closed an idle connection,
    /// then, with `may_repeat`, without all that have failed.
    pub(super) fn second_chances(&self, may_repeat: bool) -> impl Iterator<Item = Self> {
        let stale = (!self.stale.is_empty()).then(|| {
            let mut again = self.clone();
            again.decode.retain(|id| !self.stale.contains(id));
            again
        });
        let all = may_repeat.then(|| Self {
            decode: self.unfit.clone(),
            ..self.clone()
        });
        stale.into_iter().chain(all)
    }
}
