//! From a plan to a worker, or to two: one lookup of what is held, and a view of it for each role.

use std::sync::Arc;
use std::time::Instant;

use super::Relay;
use super::cached_prefix::CachedPrefixes;
use super::handoff::NotSplit;
use super::plan::{Excluded, Plan};
use super::prefill_decode::{OnPrefillFailure, PrefillDecode};
use super::view::{LiveView, Task};
use crate::fleet::Worker;
use crate::fleet::handoff::Peer;
use crate::ids::WorkerId;
use crate::routing::pair::{self, LocalReason};
use crate::routing::{self, Decision};

/// Who gets a request.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) decision: Decision,
    /// Who answers.
    pub(super) worker: Arc<Worker>,
    /// Who computes its prompt, or why the same one does. None where requests are never split.
    pub(super) prefill: Option<Result<Prefill, Unsplit>>,
}

/// The worker of the first leg.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) decision: Decision,
    pub(super) worker: Arc<Worker>,
    /// Where its blocks are to be fetched, for connectors that have to be told.
    pub(super) peer: Option<Arc<Peer>>,
}

/// Why a request is not split, where requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unsplit {
    /// The workers, as they are now.
    Workers(LocalReason),
    /// The request itself.
    Request(NotSplit),
    /// It was tried, and failed too often.
    Failed,
}

impl Unsplit {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Unsplit::Workers(reason) => reason.as_str(),
            Unsplit::Request(not_split) => not_split.as_str(),
            Unsplit::Failed => "prefill_failed",
        }
    }

    /// Whether it would be split if there were a worker for its prompt.
    fn is_for_want_of_prefill(self) -> bool {
        match self {
            Unsplit::Workers(LocalReason::NoPrefillWorker | LocalReason::NoPair)
            | Unsplit::Failed => true,
            Unsplit::Workers(LocalReason::PrefixCached) | Unsplit::Request(_) => false,
        }
    }
}

/// Who has failed a request already, and in what.
#[derive(Clone, Debug, Default)]
pub(super) struct Failed {
    pub(super) whole: Excluded,
    pub(super) prefill: Excluded,
    /// Whether no more handoffs are tried.
    pub(super) has_given_up_handoffs: bool,
}

/// Places are the group's.
pub(super) type Chosen = (Decision, Option<Result<Decision, Unsplit>>);

impl Relay {
    /// Who gets a plan's request, but for those who have `failed` it; with `may_repeat` one of them where
    /// there is no other.
    pub(super) fn choose(
        &self,
        plan: &Plan,
        now: Instant,
        failed: &Failed,
        may_repeat: bool,
    ) -> Option<Choice> {
        let mut failed = failed.clone();
        loop {
            let held = self.held(plan, now, plan.model.routing.holders as usize);
            let chosen = self.choose_once(plan, &held, now, &failed).or_else(|| {
                let whole = Excluded::new();
                let again = Failed {
                    whole,
                    ..failed.clone()
                };
                may_repeat
                    .then(|| self.choose_once(plan, &held, now, &again))
                    .flatten()
            });
            let (decision, mut prefill) = chosen?;
            if let (Some(it), Some(Err(why))) = (&self.prefill_decode, prefill)
                && may_repeat
                && !it.takes_over(why)
                && !failed.prefill.is_empty()
            {
                // Rather one that has failed than none.
                failed.prefill.clear();
                let again = self.choose_once(plan, &held, now, &failed);
                prefill = again.map_or(prefill, |(_, prefill)| prefill);
            }
            let worker = &plan.group.workers[decision.worker_index];
            let may_pass = worker.breaker.may_admit(now);
            // Of several requests that see a breaker ready to probe, one gets through. None is a probe of one
            // worker that another would then keep from being sent.
            if let Some(Ok(decision)) = prefill {
                let worker = &plan.group.workers[decision.worker_index];
                let [breaker, handoffs] = [&worker.breaker, &worker.kv_transfer_breaker];
                let may_both = breaker.may_admit(now) && handoffs.may_admit(now);
                if !may_both || (may_pass && !(breaker.admit(now) && handoffs.admit(now))) {
                    failed.prefill.push(worker.id);
                    continue;
                }
            }
            if !may_pass || !worker.breaker.admit(now) {
                failed.whole.push(worker.id);
                continue;
            }
            let prefill = prefill.map(|prefill| {
                let decision = prefill?;
                let worker = plan.group.workers[decision.worker_index].clone();
                Ok(Prefill {
                    decision,
                    peer: worker.peer.load_full(),
                    worker,
                })
            });
            return Some(Choice {
                decision,
                worker: worker.clone(),
                prefill,
            });
        }
    }

    /// Who gets a plan's request as things are now. Changes nothing.
    pub(super) fn choose_once(
        &self,
        plan: &Plan,
        held: &CachedPrefixes<'_>,
        now: Instant,
        failed: &Failed,
    ) -> Option<Chosen> {
        let whole = LiveView::new(&plan.group, held, Task::Decode, now, &failed.whole);
        let Some(it) = &self.prefill_decode else {
            let decision = routing::decide(&plan.model.routing, &plan.request, &whole)?;
            return Some((decision, None));
        };
        let why = match &plan.legs {
            Some(Err(why)) => Unsplit::Request(*why),
            Some(Ok(_)) if !failed.has_given_up_handoffs => {
                return self.choose_pair(plan, held, now, it, &whole, &failed.prefill);
            }
            _ => Unsplit::Failed,
        };
        let decision = routing::decide(&plan.model.routing, &plan.request, &whole)?;
        Some((decision, Some(Err(why))))
    }

    fn choose_pair(
        &self,
        plan: &Plan,
        held: &CachedPrefixes<'_>,
        now: Instant,
        it: &PrefillDecode,
        decode: &LiveView<'_>,
        excluded: &[WorkerId],
    ) -> Option<Chosen> {
        let group = &*plan.group;
        let task = Task::Prefill(it.connector, plan.api);
        let prefill = LiveView::new(group, held, task, now, excluded);
        let may_pair = |from: usize, to: usize| {
            let (from, to) = (prefill.in_group(from), decode.in_group(to));
            from != to && group.shapes[from].fits(&group.shapes[to])
        };
        let pair = pair::decide(
            &it.pair,
            &plan.model.routing,
            &plan.request,
            &prefill,
            decode,
            may_pair,
        )?;
        let in_group = |decision: Decision| Decision {
            worker_index: prefill.in_group(decision.worker_index),
            ..decision
        };
        Some((
            pair.decode,
            Some(pair.prefill.map(in_group).map_err(Unsplit::Workers)),
        ))
    }

    /// Whether a request must not run on the worker that was chosen, since it is to be split and cannot be.
    pub(super) fn must_be_split(&self, choice: &Choice) -> bool {
        match (&self.prefill_decode, &choice.prefill) {
            (Some(it), Some(Err(why))) => !it.takes_over(*why),
            _ => false,
        }
    }
}

impl PrefillDecode {
    /// Whether a decode worker computes a prompt itself that is not split for this reason.
    pub(super) fn takes_over(&self, why: Unsplit) -> bool {
        !why.is_for_want_of_prefill() || self.on_prefill_failure == OnPrefillFailure::Local
    }
}
