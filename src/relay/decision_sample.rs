//! Looks closer at a few of the decisions: records them with all candidates, compares the chosen worker with random ones, and
//! keeps what is played again later (`relay/account/hindsight`).

use std::time::Instant;

use super::account::decision_log::{LimitsLeft, RecordedDecision};
use super::choose::chosen::{Choice, Split};
use super::choose::fleet_view::{FleetView, Task};
use super::choose::promised::Promised;
use super::core::Relay;
use super::job::Job;
use super::plan::Plan;
use super::prompt::cached_prefix::CachedPrefixes;
use super::queued::Waits;
use super::request::summary::StandingCell;
use crate::ids::ViewIndex;
use crate::observe;
use crate::routing::hindsight::{self, Sent};
use crate::routing::{Policy, View};

/// One in so many requests is compared with random workers.
const COMPARED: u64 = 100;
/// How many workers are drawn for a comparison.
const DRAWN_WORKERS: usize = 8;
/// The cheapest and the most expensive candidates of a recorded decision, so many of each.
const EACH_END: usize = 10;

impl Relay {
    /// Looks closer at a decision, if it is in the sample. The request does not count at its worker yet. `waits`: its waits
    /// for room, if requests wait.
    pub(super) fn sample_decision(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        (now, attempt): (Instant, u32),
        waits: Option<&Waits>,
    ) {
        if attempt == 1 {
            keep(plan, choice, now);
        }
        // The lower half of the seed breaks ties.
        let is_compared = attempt == 1
            && ((plan.request.seed >> 32).is_multiple_of(COMPARED)
                || self.decisions.take_comparison());
        let is_recorded = self.decisions.take();
        if !is_compared && !is_recorded {
            return;
        }
        let owners_max = if is_recorded { usize::MAX } else { 1 };
        let prefixes = self.chooser().cached_prefixes(plan, owners_max);
        if is_compared {
            self.compare(plan, choice, &prefixes, now);
        }
        if is_recorded {
            // A retry is shown as chosen by the load alone, also one that has looked for room again.
            let waits = waits.filter(|_| attempt == 1);
            let before = waits.and_then(|waits| self.promised_before(waits));
            let decided = (choice, before.as_deref());
            self.record(job, plan, decided, &prefixes, now, attempt);
        }
    }

    /// Counts what workers drawn at random have cached of the prompt.
    fn compare(&self, plan: &Plan, choice: &Choice, prefixes: &CachedPrefixes<'_>, now: Instant) {
        let task = match (&self.prefill_decode, &choice.split) {
            (Some(settings), Split::Pair(_)) => Task::Prefill(settings.connector, plan.api),
            _ => Task::Decode,
        };
        let view = FleetView::new(prefixes, task, now, &[]);
        let tokens = plan.request.prompt_tokens;
        let count = |index: ViewIndex| {
            if view.state(index).is_usable {
                plan.model
                    .on_random_worker(tokens, view.cached(index).tokens());
            }
        };
        match view.len() {
            few if few <= DRAWN_WORKERS => view.indices().for_each(count),
            many => {
                let draw = std::iter::repeat_with(|| ViewIndex::new(fastrand::usize(..many)));
                draw.take(DRAWN_WORKERS).for_each(count);
            }
        }
    }

    fn record(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        (choice, before): (&Choice, Option<&Promised>),
        prefixes: &CachedPrefixes<'_>,
        now: Instant,
        attempt: u32,
    ) {
        let split = choice.split.as_ref().map(|prefill| prefill.decision);
        let chosen = Some((choice.decision, split));
        let explanation = self.explain_choice(plan, prefixes, now, chosen, before, Some(EACH_END));
        let of_prefill = explanation.disaggregation.iter();
        let of_prefill = of_prefill.flat_map(|disaggregation| &disaggregation.workers);
        let scores = explanation.workers.iter().chain(of_prefill);
        let longest = scores.map(|score| score.cached_tokens).max();
        let left = job.standing.and_then(StandingCell::read);
        let limits = left.map(|left| LimitsLeft {
            tenant: self.tenants().of(job.context.tenant).name.to_string(),
            remaining_requests: left.requests.map(|left| left.remaining),
            remaining_tokens: left.tokens.map(|left| left.remaining),
        });
        let queued = (!plan.queued.is_zero()).then_some(plan.queued);
        self.decisions.add(|number| RecordedDecision {
            limits,
            queue_ms: queued.map(|queued| u64::try_from(queued.as_millis()).unwrap_or(u64::MAX)),
            number,
            at_unix_ms: observe::unix_ms(),
            request_id: job.context.id.to_string(),
            api: job.api.as_str(),
            attempt,
            longest_cached_tokens: longest.unwrap_or_default(),
            explanation,
        });
    }
}

/// Keeps what is played again. Not the requests of other policies than `cache_aware`, which have reasons of their own, and not
/// those of pairs.
fn keep(plan: &Plan, choice: &Choice, now: Instant) {
    if choice.split.prefill().is_some() || plan.model.routing.policy != Policy::CacheAware {
        return;
    }
    plan.model.counts.choices.on_sent(now, || Sent {
        at: now,
        worker: choice.worker.id,
        prompt_tokens: plan.request.prompt_tokens,
        cached_tokens: choice.decision.cached_tokens,
        answer_tokens: plan.request.answer_tokens,
        prefixes: hindsight::prefixes(&plan.prompt.blocks),
    });
}
