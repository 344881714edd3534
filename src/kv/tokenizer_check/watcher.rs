//! The task that checks, after each request, whether its prompt's blocks are in the worker's tree.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::checker::{Prompt, PromptCheck, TokenizerCheck};
use super::difference::TokenDifference;
use super::silence::SilenceWatch;
use super::types::{AlarmChange, Outcome, Subject};
use crate::http::supervisor::Supervisor;
use crate::ids::WorkerId;
use crate::kv::block::{self, LocalHash};
use crate::kv::index::{PrefixIndex, RankPrefix};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::subscriber::{StatusBoard, WorkerCache};
use crate::observe;

/// How often running checks look for their blocks: often enough to see blocks that are evicted soon.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Checks of one worker whose tree is not live, at a time.
const MAX_CHECKS_WHILE_NOT_LIVE: usize = 4;

/// Where no block size is known, a shorter prompt may have no whole block.
const MIN_TOKENS: usize = 128;

/// How often the results of workers that left are dropped, and the metrics of models that left with them.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(30);

/// Returns the text of token ids of a model, if the model's tokenizer is loaded.
pub type Detokenize = Arc<dyn Fn(&str, &[u32]) -> Option<String> + Send + Sync>;

/// Whether a worker serves a model, as far as is known.
pub type IsServed = Arc<dyn Fn(&str) -> bool + Send + Sync>;

pub struct Watcher {
    checker: Arc<TokenizerCheck>,
    queue: mpsc::Receiver<PromptCheck>,
    detokenize: Detokenize,
    is_served: IsServed,
    running: Vec<RunningCheck>,
    silence: SilenceWatch,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

/// The prompt's blocks in one block size.
struct HashedPrompt {
    block_size: NonZeroU32,
    index: Arc<PrefixIndex>,
    locals: Vec<LocalHash>,
}

struct RunningCheck {
    check: PromptCheck,
    started: Instant,
    /// Otherwise only the silence of the worker's events can be found.
    was_live: bool,
    /// Blocks that the worker had removed when the check began.
    removed_before: u64,
    /// The prompt in each block size of its engines; nearly always one.
    prompts: SmallVec<[HashedPrompt; 1]>,
    /// The most of its blocks that any rank was seen to cache, and the number of its blocks.
    cached_blocks: u32,
    blocks: u32,
    block_size: u32,
}

impl Watcher {
    pub fn new(
        checker: Arc<TokenizerCheck>,
        queue: mpsc::Receiver<PromptCheck>,
        detokenize: Detokenize,
        is_served: IsServed,
    ) -> Self {
        Self {
            checker,
            queue,
            detokenize,
            is_served,
            running: Vec::new(),
            silence: SilenceWatch::default(),
        }
    }

    /// Checks for as long as the future is polled. It polls the queue by the clock, so that a request which
    /// adds a check wakes no task.
    pub async fn run(
        mut self,
        indexes: Arc<PrefixIndexes>,
        board: Arc<StatusBoard>,
        supervisor: Supervisor,
    ) {
        let mut found = Vec::new();
        let mut cleaned_at = observe::now();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let look = async {
                let now = observe::now();
                while let Ok(check) = self.queue.try_recv() {
                    self.begin(now, check, &board);
                }
                self.poll(now, &indexes, &board, &mut found);
                self.checker.measure_silence(board.silent_ranks());
                if cleaned_at + CLEANUP_INTERVAL <= now {
                    cleaned_at = now;
                    self.remove_gone_workers(&board);
                }
            };
            if supervisor.attempt("tokenizer_check", look).await.is_none() {
                // The check that panicked may be among them.
                self.running.clear();
            }
        }
    }

    fn remove_gone_workers(&mut self, board: &StatusBoard) {
        self.silence.retain(|worker| board.has_events(worker));
        let (checker, is_served) = (&self.checker, &*self.is_served);
        let mut results = checker.results.lock();
        for subject in results.retain(|worker| board.has_events(worker), is_served) {
            checker.forget(&subject);
        }
        checker.retain_models(is_served);
        let mut names = checker.worker_names.lock();
        names.retain(|worker, _| board.has_events(*worker));
        drop(names);
        checker.publish(&results);
    }

    fn begin(&mut self, now: Instant, check: PromptCheck, board: &StatusBoard) {
        match board.worker_cache(check.worker, check.ranks) {
            Some(before) if before.is_live || self.is_unreported_possible(check.worker) => {
                self.running.push(RunningCheck {
                    started: now,
                    was_live: before.is_live,
                    removed_before: before.removed_blocks,
                    prompts: SmallVec::new(),
                    cached_blocks: 0,
                    blocks: 0,
                    block_size: 0,
                    check,
                })
            }
            // A block missing in an incomplete tree may still be cached.
            _ => {
                let subject = &check.prompt.subject;
                self.checker.count(subject, Outcome::Inconclusive);
            }
        }
    }

    /// Whether a check of a worker whose tree is not live could show that its events are silent. A few at a time are
    /// enough.
    fn is_unreported_possible(&self, worker: WorkerId) -> bool {
        let own = self.running.iter();
        let own = own.filter(|running| running.check.worker == worker && !running.was_live);
        own.count() < MAX_CHECKS_WHILE_NOT_LIVE
    }

    /// A check ended: notes whether the worker is silent.
    fn watch_silence(&mut self, now: Instant, done: &RunningCheck, board: &StatusBoard) {
        let PromptCheck {
            worker,
            worker_name,
            ranks,
            sent_at,
            ..
        } = &done.check;
        let Some(cache) = board.worker_cache(*worker, *ranks) else {
            return;
        };
        let grace = self.checker.settings.silence_grace;
        let is_silent = self
            .silence
            .on_unreported(now, grace, *worker, *sent_at, cache.applied_at);
        if is_silent && board.set_silent(*worker) {
            warn!(
                worker = &**worker_name,
                grace_s = grace.as_secs(),
                fix = "look whether the engine still publishes KV events on the endpoint and topic that it lists",
                "no KV events come though the worker serves requests; routing predicts its cache until the next event"
            );
        }
    }

    fn poll(
        &mut self,
        now: Instant,
        indexes: &PrefixIndexes,
        board: &StatusBoard,
        found: &mut Vec<RankPrefix>,
    ) {
        let grace = self.checker.settings.grace_period;
        let mut at = 0;
        while at < self.running.len() {
            let running = &mut self.running[at];
            let is_over = running.started + grace <= now;
            match running.poll(is_over, indexes, board, found) {
                None => at += 1,
                Some(outcome) => {
                    let done = self.running.swap_remove(at);
                    // Its blocks were looked for until the end.
                    if is_over && outcome == Some(Outcome::Inconclusive) && done.misses_blocks() {
                        self.watch_silence(now, &done, board);
                    }
                    if let Some(outcome) = outcome {
                        self.record(now, &done, outcome, board);
                    }
                }
            }
        }
    }

    fn record(&self, now: Instant, done: &RunningCheck, outcome: Outcome, board: &StatusBoard) {
        let checker = &self.checker;
        let PromptCheck {
            prompt,
            worker,
            worker_name,
            ..
        } = &done.check;
        let (subject, worker) = (&prompt.subject, *worker);
        checker.count(subject, outcome);
        let mut results = checker.results.lock();
        let (all, own) = results.record(now, done.started, subject, worker, outcome);
        checker
            .worker_names
            .lock()
            .insert(worker, worker_name.clone());
        let mut shows_engine_tokens = false;
        match outcome {
            Outcome::Partial | Outcome::Missing => {
                let mut found = TokenDifference::find(
                    &prompt.tokens,
                    done.block_size as usize,
                    done.cached_blocks as usize,
                    &board.recorded_stores(worker),
                );
                found.router_text = self.text(prompt, &found.router_tokens);
                found.engine_text = self.text(prompt, &found.engine_tokens);
                shows_engine_tokens = results.note_difference(subject, found);
            }
            Outcome::Confirmed if all == AlarmChange::Cleared => results.clear_difference(subject),
            Outcome::Confirmed | Outcome::Inconclusive | Outcome::Skipped => {}
        }
        board.record_stores(worker, results.suspects(worker));
        if let Some(of_subject) = results.of(subject) {
            checker.measure(subject, &of_subject.all);
        }
        let is_raised = all == AlarmChange::Raised || own == AlarmChange::Raised;
        let is_cleared = all == AlarmChange::Cleared || own == AlarmChange::Cleared;
        let is_distrusted = !results.trusts(subject, worker);
        if let Some(of_subject) = results.of(subject)
            && (is_raised || is_distrusted && shows_engine_tokens)
        {
            warn_mismatch(subject, worker_name, of_subject.difference.as_ref());
        } else if is_cleared {
            info!(
                model = &*subject.model,
                prompts = subject.source.as_str(),
                worker = &**worker_name,
                "tokenizer mismatch cleared; the worker's KV events count in routing again"
            );
        }
        // A worker that agrees while others do not changes its trust without an alarm change.
        if checker.has_mismatches() || is_raised || is_cleared {
            checker.publish(&results);
        }
    }

    /// An adapter has the tokenizer of its base model.
    fn text(&self, prompt: &Prompt, tokens: &[u32]) -> Option<String> {
        let mut models = std::iter::once(&prompt.subject.model).chain(&prompt.bases);
        match tokens {
            [] => None,
            tokens => models.find_map(|model| (self.detokenize)(model, tokens)),
        }
    }
}

/// Logged when the alarm is raised, and again if the engine's tokens become known only later.
fn warn_mismatch(subject: &Subject, worker: &str, difference: Option<&TokenDifference>) {
    let text = |text: Option<&String>, tokens: &[u32]| match (text, tokens) {
        (Some(text), _) => format!("{text:?}"),
        (None, []) => "not known yet".to_owned(),
        (None, tokens) => format!("tokens {tokens:?}"),
    };
    warn!(
        model = &*subject.model,
        prompts = subject.source.as_str(),
        worker,
        block = difference.map(|difference| difference.block),
        blocks = difference.map(|difference| difference.blocks),
        router_text = difference
            .map(|difference| text(difference.router_text.as_ref(), &difference.router_tokens)),
        engine_text = difference
            .map(|difference| text(difference.engine_text.as_ref(), &difference.engine_tokens)),
        fix = "give router and engine the same tokenizer and chat template",
        "tokenizer mismatch: the engine's tokens differ from the router's; KV events do not count for such \
         prompts until they match"
    );
}

impl RunningCheck {
    /// Whether the prompt has blocks that the tree has not.
    fn misses_blocks(&self) -> bool {
        match self.block_size {
            0 => self.check.prompt.tokens.len() >= MIN_TOKENS,
            _ => self.cached_blocks < self.blocks,
        }
    }

    /// `None` while the check goes on. `Some(None)` for a prompt too short to check.
    fn poll(
        &mut self,
        is_over: bool,
        indexes: &PrefixIndexes,
        board: &StatusBoard,
        found: &mut Vec<RankPrefix>,
    ) -> Option<Option<Outcome>> {
        let PromptCheck {
            prompt,
            worker,
            ranks,
            ..
        } = &self.check;
        let cache = board.worker_cache(*worker, *ranks);
        let was_live = self.was_live;
        // A check begins up to a tick after the first token. Its blocks may have been cleared by then.
        let is_same =
            |cache: &WorkerCache| cache.is_live && cache.cleared_at < Some(self.check.sent_at);
        let Some(cache) = cache.filter(|cache| !was_live || is_same(cache)) else {
            return Some(Some(Outcome::Inconclusive));
        };
        if self.prompts.is_empty() {
            let indexes = prompt.bases.iter().flat_map(|base| indexes.of(base));
            let hashed = indexes.map(|(shape, index)| {
                let mut locals = Vec::new();
                block::hash_blocks(&prompt.tokens, shape, &mut locals);
                HashedPrompt {
                    block_size: shape.size,
                    index,
                    locals,
                }
            });
            self.prompts = hashed.collect();
        }
        for hashed in &self.prompts {
            found.clear();
            hashed.index.overlap(prompt.root, &hashed.locals, found);
            let own = found.iter().filter(|depth| depth.worker == *worker);
            let cached_blocks = own.map(|depth| depth.blocks).max().unwrap_or(0);
            // Of several block sizes, the one in which the worker caches most; at first, any.
            if cached_blocks > self.cached_blocks || self.block_size == 0 {
                self.cached_blocks = self.cached_blocks.max(cached_blocks);
                self.blocks = hashed.locals.len() as u32;
                self.block_size = hashed.block_size.get();
            }
        }
        let is_known = self.block_size > 0;
        if is_known && self.blocks == 0 {
            return Some(None);
        }
        if is_known && self.cached_blocks == self.blocks {
            // A tree that is not live says nothing about tokens.
            return Some(Some(if was_live {
                Outcome::Confirmed
            } else {
                Outcome::Inconclusive
            }));
        }
        is_over.then(|| {
            // A block missing in an incomplete tree may still be cached.
            if !was_live {
                return Some(Outcome::Inconclusive);
            }
            Some(match self.cached_blocks {
                // No engine of this model has reported any block.
                _ if !is_known => Outcome::Inconclusive,
                // An engine with other tokens reports other blocks. This one reported nothing since: it is
                // silent, or its batches were lost, which only the next batch would show.
                _ if cache.applied_at < Some(self.check.sent_at) => Outcome::Inconclusive,
                // This prompt's blocks may have been replaced as well.
                _ if may_be_replaced(&cache, self.removed_before) => Outcome::Inconclusive,
                0 => Outcome::Missing,
                _ => Outcome::Partial,
            })
        })
    }
}

/// Whether half of the cache may have been replaced since the worker had removed `before` blocks. A subscriber that began
/// again counts from zero, so that it is not known.
fn may_be_replaced(cache: &WorkerCache, before: u64) -> bool {
    let removed = cache.removed_blocks.checked_sub(before);
    removed.is_none_or(|removed| removed > 0 && removed >= cache.blocks / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::tokenizer_check::settings::Settings;
    use crate::kv::tokenizer_check::types::PromptSource;
    use crate::observe::metrics::Registry;

    #[test]
    fn a_model_that_has_left_has_neither_an_alarm_nor_metrics() {
        let registry = Registry::default();
        let (checker, queue) = TokenizerCheck::new(Settings::default(), &registry);
        let no_text: Detokenize = Arc::new(|_: &str, _: &[u32]| None);
        let is_served: IsServed = Arc::new(|model: &str| model == "stays");
        let mut watcher = Watcher::new(checker.clone(), queue, no_text, is_served);
        let of = |model: &str| Subject {
            model: model.into(),
            source: PromptSource::Rendered,
        };
        let subject = of("gone");
        // Prompts that were not checked have no results.
        for model in ["gone as well", "stays"] {
            checker.skip(&of(model));
        }
        let (now, worker) = (observe::now(), WorkerId(1));
        {
            let mut results = checker.results.lock();
            for _ in 0..checker.settings.mismatch_threshold {
                let _ = results.record(now, now, &subject, worker, Outcome::Missing);
                checker.count(&subject, Outcome::Missing);
            }
            checker.measure(&subject, &results.of(&subject).unwrap().all);
            checker.publish(&results);
        }
        assert!(checker.has_mismatches() && !checker.trusts(&subject, worker));
        assert!(
            registry
                .text()
                .contains("warmroute_tokenizer_mismatch{model=\"gone\"")
        );
        // No worker is on the board.
        watcher.remove_gone_workers(&StatusBoard::default());
        assert!(!checker.has_mismatches() && checker.trusts(&subject, worker));
        assert!(checker.statuses(now).is_empty());
        let text = registry.text();
        assert!(!text.contains("gone"), "{text}");
        assert!(text.contains("model=\"stays\""), "{text}");
    }

    #[test]
    fn a_check_says_nothing_if_half_of_the_cache_may_have_been_replaced() {
        for (before, removed_blocks, expected) in [
            (100, 100, false),
            (100, 149, false),
            (100, 150, true),
            (100, 0, true),
            (100, 99, true),
        ] {
            let cache = WorkerCache {
                is_live: true,
                removed_blocks,
                blocks: 100,
                applied_at: None,
                cleared_at: None,
            };
            let found = may_be_replaced(&cache, before);
            assert_eq!(found, expected, "{before} {removed_blocks}");
        }
    }
}
