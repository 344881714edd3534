//! Judges the results of tokenizer checks. Pure.
//!
//! A single miss proves nothing, since the prompt's blocks may have been evicted in between; neither do a
//! few. But despite evictions some checks succeed if the tokens match, and none do if they differ. So the
//! alarm is raised by a number of misses in a row without a success, and cleared by some successes in a
//! row. Inconclusive checks (the tree was not live, much of the cache was replaced) count for neither.
//!
//! A success shows at once, a miss only after the grace period. So misses in a row of all workers are no
//! evidence while a worker has confirmed a check that began no earlier.
//!
//! There is one series of checks for each subject and one for each worker of it. The common series finds
//! quickly that all engines disagree, however many they are; a worker's own series finds one that was
//! started with another chat template than the rest. Subjects are separate by prompt source, because
//! plain text still matches when only the template differs.

use std::time::Instant;

use rustc_hash::FxHashMap;

use super::difference::TokenDifference;
use super::settings::Settings;
use super::types::{AlarmChange, Outcome, Subject};
use crate::ids::WorkerId;

/// A series of checks: those of all workers, or of one.
#[derive(Clone, Debug, Default)]
pub(super) struct CheckSeries {
    /// In a row.
    pub(super) misses: u32,
    hits: u32,
    /// When the oldest check of the current misses began.
    missing_since: Option<Instant>,
    /// When the newest successful check began.
    agreed_at: Option<Instant>,
    pub(super) raised_since: Option<Instant>,
    /// The last conclusive checks, the newest in the lowest bit; a bit is set for a success.
    recent: u128,
    recent_len: u32,
}

impl CheckSeries {
    fn count(&mut self, started: Instant, agrees: bool) {
        self.recent = self.recent << 1 | u128::from(agrees);
        self.recent_len = (self.recent_len + 1).min(u128::BITS);
        (self.hits, self.misses) = if agrees {
            (self.hits.saturating_add(1), 0)
        } else {
            (0, self.misses.saturating_add(1))
        };
        if agrees {
            self.missing_since = None;
            self.agreed_at = self.agreed_at.max(Some(started));
        } else {
            let since = self.missing_since.get_or_insert(started);
            *since = started.min(*since);
        }
    }

    fn update_alarm(&mut self, settings: &Settings, now: Instant) -> AlarmChange {
        match self.raised_since {
            None if self.misses >= settings.mismatch_threshold => {
                self.raised_since = Some(now);
                AlarmChange::Raised
            }
            Some(_) if self.hits >= settings.match_threshold => {
                self.raised_since = None;
                AlarmChange::Cleared
            }
            _ => AlarmChange::None,
        }
    }

    pub(super) fn is_raised(&self) -> bool {
        self.raised_since.is_some()
    }

    /// Of the last 128 conclusive checks; `None` before the first.
    pub(super) fn confirmed_ratio(&self) -> Option<f64> {
        let len = self.recent_len;
        (len > 0).then(|| f64::from(self.recent.count_ones()) / f64::from(len))
    }
}

#[derive(Debug)]
pub(super) struct CheckResults {
    settings: Settings,
    subjects: FxHashMap<Subject, SubjectResults>,
}

#[derive(Debug, Default)]
pub(super) struct SubjectResults {
    /// The checks of all workers.
    pub(super) all: CheckSeries,
    pub(super) workers: FxHashMap<WorkerId, CheckSeries>,
    /// The clearest difference found since the alarm was last cleared.
    pub(super) difference: Option<TokenDifference>,
}

impl SubjectResults {
    /// Records a conclusive check in the series of all workers. Since a success shows at once and a miss
    /// only after the grace period, the misses of a burst come in a row even if other checks of that burst
    /// succeeded. So misses that a trusted worker's success contradicts do not count, and counting starts
    /// again.
    fn record(
        &mut self,
        settings: &Settings,
        now: Instant,
        started: Instant,
        agrees: bool,
    ) -> AlarmChange {
        self.all.count(started, agrees);
        if self.all.misses >= settings.mismatch_threshold && self.is_contradicted() {
            (self.all.misses, self.all.missing_since) = (0, None);
        }
        self.all.update_alarm(settings, now)
    }

    fn is_contradicted(&self) -> bool {
        let since = self.all.missing_since;
        let agrees = |run: &CheckSeries| {
            !run.is_raised() && run.agreed_at.is_some() && run.agreed_at >= since
        };
        self.workers.values().any(agrees)
    }

    /// A worker whose last checks succeeded is trusted even if the other workers' checks fail, and one whose
    /// checks fail is distrusted whatever the others' do.
    fn trusts(&self, settings: &Settings, worker: WorkerId) -> bool {
        let own = self.workers.get(&worker);
        let agrees = own.is_some_and(|run| run.hits >= settings.match_threshold);
        let disagrees = own.is_some_and(CheckSeries::is_raised);
        !disagrees && (agrees || !self.all.is_raised())
    }
}

impl CheckResults {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            subjects: FxHashMap::default(),
        }
    }

    /// Records the outcome of a check that began at `started`. Returns how that changes the alarm of all
    /// workers, and the alarm of this worker.
    pub(super) fn record(
        &mut self,
        now: Instant,
        started: Instant,
        subject: &Subject,
        worker: WorkerId,
        outcome: Outcome,
    ) -> (AlarmChange, AlarmChange) {
        let results = self.subjects.entry(subject.clone()).or_default();
        let own = results.workers.entry(worker).or_default();
        let Some(agrees) = outcome.agrees() else {
            return (AlarmChange::None, AlarmChange::None);
        };
        own.count(started, agrees);
        let own_change = own.update_alarm(&self.settings, now);
        (
            results.record(&self.settings, now, started, agrees),
            own_change,
        )
    }

    /// Keeps a difference if it is clearer than the known one: the longer the common prefix, the more
    /// likely both token lists are of the same prompt. Returns whether it is the first one that shows the
    /// engine's tokens.
    pub(super) fn note_difference(&mut self, subject: &Subject, found: TokenDifference) -> bool {
        let known = &mut self.subjects.entry(subject.clone()).or_default().difference;
        let is_clearer = known
            .as_ref()
            .is_none_or(|known| found.is_clearer_than(known));
        let is_first = known
            .as_ref()
            .is_none_or(|known| known.engine_tokens.is_empty());
        let shows = is_clearer && is_first && !found.engine_tokens.is_empty();
        if is_clearer {
            *known = Some(found);
        }
        shows
    }

    pub(super) fn clear_difference(&mut self, subject: &Subject) {
        if let Some(results) = self.subjects.get_mut(subject) {
            results.difference = None;
        }
    }

    pub(super) fn of(&self, subject: &Subject) -> Option<&SubjectResults> {
        self.subjects.get(subject)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Subject, &SubjectResults)> {
        self.subjects.iter()
    }

    pub(super) fn trusts(&self, subject: &Subject, worker: WorkerId) -> bool {
        self.subjects
            .get(subject)
            .is_none_or(|results| results.trusts(&self.settings, worker))
    }

    /// Whether a worker's last check was a miss, so its stores should be recorded to find the difference.
    pub(super) fn suspects(&self, worker: WorkerId) -> bool {
        let own = |results: &SubjectResults| {
            results
                .workers
                .get(&worker)
                .is_some_and(|series| series.misses > 0)
        };
        self.subjects.values().any(own)
    }

    /// Drops the results of other workers, and the subjects of which no worker is left, or whose model none serves:
    /// there is nobody whose checks could clear an alarm of theirs. Returns these subjects.
    pub(super) fn retain(
        &mut self,
        is_there: impl Fn(WorkerId) -> bool,
        is_served: impl Fn(&str) -> bool,
    ) -> Vec<Subject> {
        let mut gone = Vec::new();
        self.subjects.retain(|subject, results| {
            results.workers.retain(|worker, _| is_there(*worker));
            let is_left = !results.workers.is_empty() && is_served(&subject.model);
            if !is_left {
                gone.push(subject.clone());
            }
            is_left
        });
        gone
    }
}

#[cfg(test)]
mod tests;
