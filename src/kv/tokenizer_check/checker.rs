//! The handle of the tokenizer check: requests start checks, routing and operators read the results. A
//! request only puts its check into a bounded queue.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus::IntCounter;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::mpsc;

use super::results::{CheckResults, CheckSeries, SubjectResults};
use super::settings::Settings;
use super::status::{Status, WorkerResults};
use super::types::{Outcome, Subject};
use crate::ids::{Model, WorkerId};
use crate::kv::block::ChainRoot;
use crate::observe::metrics::{Registry, metric_table, remove_series};

#[derive(Clone, Debug)]
pub struct Prompt {
    pub subject: Subject,
    /// The base models whose indexes contain its blocks.
    pub bases: Vec<Model>,
    pub root: ChainRoot,
    pub tokens: Arc<[u32]>,
}

#[derive(Debug)]
pub struct TokenizerCheck {
    pub(super) settings: Settings,
    /// Running checks, and their prompts' tokens.
    running: AtomicU32,
    running_tokens: AtomicU64,
    queue: mpsc::Sender<PromptCheck>,
    has_mismatches: AtomicBool,
    mismatches: ArcSwap<FxHashMap<Subject, Distrusted>>,
    pub(super) results: Mutex<CheckResults>,
    pub(super) worker_names: Mutex<FxHashMap<WorkerId, Arc<str>>>,
    metrics: Metrics,
}

/// The workers whose KV events do not count for a subject.
#[derive(Clone, Debug)]
enum Distrusted {
    AllExcept(FxHashSet<WorkerId>),
    Only(FxHashSet<WorkerId>),
}

metric_table! {
    #[derive(Clone, Debug)]
    struct Metrics {
        checks: counters "warmroute_tokenizer_checks_total" ["model", "prompts", "outcome"]
            "Prompts whose blocks were looked up in their worker's KV events afterwards, by outcome.",
        confirmed_ratio: real_gauges "warmroute_tokenizer_check_confirmed_ratio" ["model", "prompts"]
            "Share of the last 128 checked prompts whose blocks were all found.",
        mismatch: gauges "warmroute_tokenizer_mismatch" ["model", "prompts"]
            "1 while the engines' tokens differ from the router's, so KV events do not count for such prompts.",
        silent_ranks: gauge "warmroute_kv_silent_ranks"
            "Ranks of workers that served requests which must have stored blocks, and whose KV events do not come: their caches \
             are predicted.",
    }
}

/// A prompt on its way to a worker. Nothing is checked if it is dropped before its first token.
#[must_use = "call on_first_token once the prompt is computed"]
#[derive(Debug)]
pub struct PromptCheck {
    checker: Arc<TokenizerCheck>,
    pub(super) prompt: Prompt,
    pub(super) worker: WorkerId,
    pub(super) worker_name: Arc<str>,
    pub(super) ranks: u32,
    pub(super) sent_at: Instant,
}

impl PromptCheck {
    /// The prompt is computed: its blocks are cached, or the events that report them are on their way.
    pub fn on_first_token(self) {
        let checker = self.checker.clone();
        if let Err(error) = checker.queue.try_send(self) {
            checker.count(&error.into_inner().prompt.subject, Outcome::Skipped);
        }
    }
}

impl Drop for PromptCheck {
    fn drop(&mut self) {
        self.checker.running.fetch_sub(1, Relaxed);
        let tokens = self.prompt.tokens.len() as u64;
        self.checker.running_tokens.fetch_sub(tokens, Relaxed);
    }
}

impl TokenizerCheck {
    /// Returns the handle, and the queue of checks for a [`super::watcher::Watcher`].
    pub fn new(
        settings: Settings,
        registry: &Registry,
    ) -> (Arc<Self>, mpsc::Receiver<PromptCheck>) {
        let (queue, checks) = mpsc::channel(settings.max_checks.max(1) as usize);
        let checker = Self {
            running: AtomicU32::new(0),
            running_tokens: AtomicU64::new(0),
            queue,
            has_mismatches: AtomicBool::new(false),
            mismatches: ArcSwap::default(),
            results: Mutex::new(CheckResults::new(settings.clone())),
            worker_names: Mutex::default(),
            metrics: Metrics::new(registry),
            settings,
        };
        (Arc::new(checker), checks)
    }

    /// Whether another prompt of this many tokens could be checked now.
    pub fn has_room(&self, tokens: usize) -> bool {
        self.running.load(Relaxed) < self.settings.max_checks
            && self.running_tokens.load(Relaxed) + tokens as u64 <= self.settings.max_tokens
    }

    /// Starts the check of a prompt that is sent to a worker with this many ranks.
    pub fn start_check(
        self: &Arc<Self>,
        now: Instant,
        prompt: Prompt,
        worker: WorkerId,
        worker_name: Arc<str>,
        ranks: u32,
    ) -> PromptCheck {
        self.running.fetch_add(1, Relaxed);
        let tokens = prompt.tokens.len() as u64;
        self.running_tokens.fetch_add(tokens, Relaxed);
        PromptCheck {
            checker: self.clone(),
            prompt,
            worker,
            worker_name,
            ranks,
            sent_at: now,
        }
    }

    /// Counts a prompt that is not checked for lack of room.
    pub fn skip(&self, subject: &Subject) {
        self.count(subject, Outcome::Skipped);
    }

    /// Whether any worker is distrusted for any subject.
    #[inline]
    pub fn has_mismatches(&self) -> bool {
        self.has_mismatches.load(Relaxed)
    }

    /// Whether a worker's KV events count for these prompts.
    pub fn trusts(&self, subject: &Subject, worker: WorkerId) -> bool {
        match self.mismatches.load().get(subject) {
            None => true,
            Some(Distrusted::AllExcept(workers)) => workers.contains(&worker),
            Some(Distrusted::Only(workers)) => !workers.contains(&worker),
        }
    }

    /// The results by model and prompt source.
    pub fn statuses(&self, now: Instant) -> Vec<Status> {
        let results = self.results.lock();
        let names = self.worker_names.lock();
        let status = |(subject, of_subject): (&Subject, &SubjectResults)| {
            let all = &of_subject.all;
            let of_worker = |(worker, series): (&WorkerId, &CheckSeries)| WorkerResults {
                worker: names
                    .get(worker)
                    .map(ToString::to_string)
                    .unwrap_or_default(),
                is_trusted: results.trusts(subject, *worker),
                confirmed_ratio: series.confirmed_ratio(),
                consecutive_misses: series.misses,
            };
            let mut workers: Vec<_> = of_subject.workers.iter().map(of_worker).collect();
            workers.sort_by(|a, b| a.worker.cmp(&b.worker));
            let age = |since| now.saturating_duration_since(since).as_secs_f64();
            let count =
                |outcome: &Outcome| (outcome.as_str(), self.checks(subject, *outcome).get());
            Status {
                model: subject.model.to_string(),
                prompts: subject.source,
                mismatch: all.is_raised(),
                mismatch_age_s: all.raised_since.map(age),
                confirmed_ratio: all.confirmed_ratio(),
                consecutive_misses: all.misses,
                checks: Outcome::ALL.iter().map(count).collect(),
                difference: of_subject.difference.clone(),
                workers,
            }
        };
        let mut statuses: Vec<Status> = results.iter().map(status).collect();
        statuses.sort_by(|a, b| (&a.model, a.prompts).cmp(&(&b.model, b.prompts)));
        statuses
    }

    fn checks(&self, subject: &Subject, outcome: Outcome) -> IntCounter {
        let labels = [&*subject.model, subject.source.as_str(), outcome.as_str()];
        self.metrics.checks.with_label_values(&labels)
    }

    pub(super) fn count(&self, subject: &Subject, outcome: Outcome) {
        self.checks(subject, outcome).inc();
    }

    pub(super) fn measure_silence(&self, ranks: u32) {
        self.metrics.silent_ranks.set(ranks.into());
    }

    pub(super) fn measure(&self, subject: &Subject, all: &CheckSeries) {
        let labels = [&*subject.model, subject.source.as_str()];
        let ratio = self.metrics.confirmed_ratio.with_label_values(&labels);
        ratio.set(all.confirmed_ratio().unwrap_or(1.0));
        let mismatch = self.metrics.mismatch.with_label_values(&labels);
        mismatch.set(all.is_raised().into());
    }

    /// The metrics of a subject of which no worker is left.
    pub(super) fn forget(&self, subject: &Subject) {
        let labels = [&*subject.model, subject.source.as_str()];
        // What was never counted has no value to remove.
        let _ = self.metrics.confirmed_ratio.remove_label_values(&labels);
        let _ = self.metrics.mismatch.remove_label_values(&labels);
        for outcome in Outcome::ALL {
            let [model, source] = labels;
            let labels = [model, source, outcome.as_str()];
            let _ = self.metrics.checks.remove_label_values(&labels);
        }
    }

    /// Removes the counts of models that no worker serves. Prompts that were not checked have counts and no results.
    pub(super) fn retain_models(&self, is_served: impl Fn(&str) -> bool) {
        remove_series(&self.metrics.checks, "model", |model| !is_served(model));
    }

    /// Makes the results visible to routing.
    pub(super) fn publish(&self, results: &CheckResults) {
        let distrusted = |(subject, of_subject): (&Subject, &SubjectResults)| {
            let is_raised = of_subject.all.is_raised();
            let workers = of_subject.workers.keys().copied();
            let exceptions: FxHashSet<WorkerId> = workers
                .filter(|worker| results.trusts(subject, *worker) == is_raised)
                .collect();
            let distrusted = if is_raised {
                Distrusted::AllExcept(exceptions)
            } else if exceptions.is_empty() {
                return None;
            } else {
                Distrusted::Only(exceptions)
            };
            Some((subject.clone(), distrusted))
        };
        let mismatches: FxHashMap<_, _> = results.iter().filter_map(distrusted).collect();
        let has_mismatches = !mismatches.is_empty();
        self.mismatches.store(Arc::new(mismatches));
        self.has_mismatches.store(has_mismatches, Relaxed);
    }
}
