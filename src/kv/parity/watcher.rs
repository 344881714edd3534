//! Looks after each request whether its prompt's blocks are where they must be, and keeps the verdicts
//! for routing and for operators. Requests only put their check into a bounded queue.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use smallvec::SmallVec;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::difference::Difference;
use super::{Book, Made, Outcome, Run, Settings, Subject, Turn};
use crate::ids::{Model, WorkerId};
use crate::kv::block::{self, ChainRoot, LocalHash};
use crate::kv::index::{PrefixIndex, RankPrefix};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::subscriber::{Board, Standing};
use crate::observe;
use crate::observe::metrics::Registry;

/// Between two looks at the prompts that are being checked: short, so that what is evicted soon is
/// seen before.
const TICK: Duration = Duration::from_millis(100);

/// Between two times that workers which left are forgotten.
const SWEEP: Duration = Duration::from_secs(30);

/// The text of a model's tokens, where its tokenizer is at hand.
pub type Words = Arc<dyn Fn(&str, &[u32]) -> Option<String> + Send + Sync>;

/// What is known of a prompt that goes to a worker.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub subject: Subject,
    /// Under which its blocks are known.
    pub bases: Vec<Model>,
    pub root: ChainRoot,
    pub tokens: Arc<[u32]>,
}

/// The verdicts, and the way to ask for more.
pub struct Parity {
    settings: Settings,
    /// What the checks that are under way take.
    checks: AtomicU32,
    tokens: AtomicU64,
    queue: mpsc::Sender<Check>,
    has_alarms: AtomicBool,
    verdicts: ArcSwap<Verdicts>,
    book: Mutex<Book>,
    names: Mutex<FxHashMap<WorkerId, Arc<str>>>,
    metrics: Metrics,
}

impl std::fmt::Debug for Parity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parity").finish_non_exhaustive()
    }
}

/// Models with an alarm.
type Verdicts = FxHashMap<Subject, Distrust>;

#[derive(Clone, Debug, Default)]
struct Distrust {
    /// All but those that agree; else those alone that do not.
    is_of_all: bool,
    but: FxHashSet<WorkerId>,
}

#[derive(Clone, Debug)]
struct Metrics {
    checks: IntCounterVec,
    share: GaugeVec,
    alarm: IntGaugeVec,
}

/// A prompt on its way to a worker. Dropped before its first token, it proves nothing.
#[must_use = "it is looked at once its prompt is computed"]
pub struct Check {
    parity: Arc<Parity>,
    prompt: Prompt,
    worker: WorkerId,
    name: Arc<str>,
    ranks: u32,
    sent_at: Instant,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check").finish_non_exhaustive()
    }
}

impl Check {
    /// The prompt is computed: its blocks are there, or events of them are under way.
    pub fn on_first_token(self) {
        let parity = self.parity.clone();
        if let Err(error) = parity.queue.try_send(self) {
            parity.skip(&error.into_inner().prompt.subject);
        }
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        self.parity.checks.fetch_sub(1, Relaxed);
        let tokens = self.prompt.tokens.len() as u64;
        self.parity.tokens.fetch_sub(tokens, Relaxed);
    }
}

/// How a model stands, for operators.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub model: String,
    /// How the prompts are made that this is about.
    pub prompts: Made,
    /// Its events are not counted in routing, but for workers that agree.
    pub alarm: bool,
    pub alarm_age_s: Option<f64>,
    /// Of the last checks that were evidence, how many were confirmed; 0 to 1.
    pub confirmed_share: Option<f64>,
    pub misses_in_a_row: u32,
    /// By what they came to.
    pub checks: std::collections::BTreeMap<&'static str, u64>,
    /// Where the engine's tokens part from ours.
    pub difference: Option<Difference>,
    pub workers: Vec<OfWorker>,
}

#[derive(Clone, Debug, Serialize)]
pub struct OfWorker {
    pub worker: String,
    /// Its events count for this model.
    pub is_trusted: bool,
    pub confirmed_share: Option<f64>,
    pub misses_in_a_row: u32,
}

impl Parity {
    pub fn new(settings: Settings, registry: &Registry, words: Words) -> (Arc<Self>, Watcher) {
        let (queue, asked) = mpsc::channel(settings.checks_max.max(1) as usize);
        let parity = Arc::new(Self {
            checks: AtomicU32::new(0),
            tokens: AtomicU64::new(0),
            queue,
            has_alarms: AtomicBool::new(false),
            verdicts: ArcSwap::default(),
            book: Mutex::new(Book::new(settings.clone())),
            names: Mutex::default(),
            metrics: Metrics {
                checks: registry.counters(
                    "warmroute_kv_parity_checks_total",
                    "Prompts whose blocks were looked for at their worker afterwards, by what was found.",
                    &["model", "prompts", "outcome"],
                ),
                share: registry.real_gauges(
                    "warmroute_kv_parity_confirmed_share",
                    "Of the last 128 such prompts, the share of which all blocks were there.",
                    &["model", "prompts"],
                ),
                alarm: registry.gauges(
                    "warmroute_kv_parity_alarm",
                    "1 while a model's prompts are not counted by cache events, since engines have other tokens.",
                    &["model", "prompts"],
                ),
            },
            settings,
        });
        let watcher = Watcher {
            parity: parity.clone(),
            asked,
            words,
            pending: Vec::new(),
        };
        (parity, watcher)
    }

    /// Whether another prompt of so many tokens could be checked now.
    pub fn has_room(&self, tokens: usize) -> bool {
        self.checks.load(Relaxed) < self.settings.checks_max
            && self.tokens.load(Relaxed) + tokens as u64 <= self.settings.tokens_max
    }

    /// A check of a prompt that is sent to a worker of so many ranks.
    pub fn check(
        self: &Arc<Self>,
        now: Instant,
        prompt: Prompt,
        worker: WorkerId,
        name: Arc<str>,
        ranks: u32,
    ) -> Check {
        self.checks.fetch_add(1, Relaxed);
        self.tokens.fetch_add(prompt.tokens.len() as u64, Relaxed);
        Check {
            parity: self.clone(),
            prompt,
            worker,
            name,
            ranks,
            sent_at: now,
        }
    }

    /// Counts a prompt that could have been checked, and is not.
    pub fn skip(&self, subject: &Subject) {
        self.count(subject, Outcome::Skipped);
    }

    /// Whether anybody is not trusted.
    #[inline]
    pub fn has_alarms(&self) -> bool {
        self.has_alarms.load(Relaxed)
    }

    /// Whether a worker's events tell of these prompts.
    pub fn trusts(&self, subject: &Subject, worker: WorkerId) -> bool {
        self.verdicts
            .load()
            .get(subject)
            .is_none_or(|distrust| distrust.but.contains(&worker) == distrust.is_of_all)
    }

    /// By model.
    pub fn statuses(&self, now: Instant) -> Vec<Status> {
        let book = self.book.lock();
        let names = self.names.lock();
        let mut statuses: Vec<Status> = book
            .iter()
            .map(|(subject, of_all)| {
                let run = &of_all.run;
                let of_worker = |(worker, run): (&WorkerId, &Run)| OfWorker {
                    worker: names
                        .get(worker)
                        .map_or_else(String::new, |it| it.to_string()),
                    is_trusted: book.trusts(subject, *worker),
                    confirmed_share: run.share(),
                    misses_in_a_row: run.misses(),
                };
                let mut workers: Vec<OfWorker> = of_all.workers.iter().map(of_worker).collect();
                workers.sort_by(|a, b| a.worker.cmp(&b.worker));
                let age = |since| now.saturating_duration_since(since).as_secs_f64();
                Status {
                    model: subject.model.to_string(),
                    prompts: subject.made,
                    alarm: run.is_up(),
                    alarm_age_s: run.alarm_since().map(age),
                    confirmed_share: run.share(),
                    misses_in_a_row: run.misses(),
                    checks: Outcome::ALL
                        .iter()
                        .map(|outcome| (outcome.as_str(), self.counted(subject, *outcome)))
                        .collect(),
                    difference: of_all.difference.clone(),
                    workers,
                }
            })
            .collect();
        statuses.sort_by(|a, b| (&a.model, a.prompts).cmp(&(&b.model, b.prompts)));
        statuses
    }

    fn counted(&self, subject: &Subject, outcome: Outcome) -> u64 {
        let labels = [&*subject.model, subject.made.as_str(), outcome.as_str()];
        self.metrics.checks.with_label_values(&labels).get()
    }

    fn count(&self, subject: &Subject, outcome: Outcome) {
        let labels = [&*subject.model, subject.made.as_str(), outcome.as_str()];
        self.metrics.checks.with_label_values(&labels).inc();
    }

    /// Tells routing whom not to believe.
    fn publish(&self, book: &Book) {
        let verdicts: Verdicts = book
            .iter()
            .filter_map(|(subject, of_all)| {
                let is_of_all = of_all.run.is_up();
                let workers = of_all.workers.keys().copied();
                let but: FxHashSet<WorkerId> = workers
                    .filter(|worker| book.trusts(subject, *worker) == is_of_all)
                    .collect();
                let distrust = Distrust { is_of_all, but };
                (is_of_all || !distrust.but.is_empty()).then(|| (subject.clone(), distrust))
            })
            .collect();
        let has_alarms = !verdicts.is_empty();
        self.verdicts.store(Arc::new(verdicts));
        self.has_alarms.store(has_alarms, Relaxed);
    }
}

/// The task that looks.
pub struct Watcher {
    parity: Arc<Parity>,
    asked: mpsc::Receiver<Check>,
    words: Words,
    pending: Vec<Pending>,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

/// A prompt in one size of blocks.
struct Cut {
    size: NonZeroU32,
    index: Arc<PrefixIndex>,
    locals: Vec<LocalHash>,
}

/// A check under way.
struct Pending {
    check: Check,
    begun: Instant,
    /// As the worker stood when the prompt was computed.
    before: Standing,
    /// The prompt in every size of blocks that its engines have; nearly always one.
    cuts: SmallVec<[Cut; 1]>,
    /// The most of its blocks that any rank was seen to hold, and how many there are.
    depth: u32,
    blocks: u32,
    block_size: u32,
}

impl Watcher {
    /// Looks for as long as it is polled. By the clock: a request that puts its check into the queue wakes
    /// nobody.
    pub async fn run(mut self, indexes: Arc<PrefixIndexes>, board: Arc<Board>) {
        let mut found = Vec::new();
        let mut swept_at = observe::now();
        loop {
            tokio::time::sleep(TICK).await;
            let now = observe::now();
            while let Ok(check) = self.asked.try_recv() {
                self.begin(now, check, &board);
            }
            self.look(now, &indexes, &board, &mut found);
            if swept_at + SWEEP <= now {
                swept_at = now;
                self.sweep(&board);
            }
        }
    }

    /// Forgets workers that left.
    fn sweep(&self, board: &Board) {
        let parity = &self.parity;
        let mut book = parity.book.lock();
        book.retain(|worker| board.has_events(worker));
        let mut names = parity.names.lock();
        names.retain(|worker, _| board.has_events(*worker));
        drop(names);
        parity.publish(&book);
    }

    fn begin(&mut self, now: Instant, check: Check, board: &Board) {
        match board.standing(check.worker, check.ranks) {
            Some(before) if before.is_live => self.pending.push(Pending {
                begun: now,
                before,
                cuts: SmallVec::new(),
                depth: 0,
                blocks: 0,
                block_size: 0,
                check,
            }),
            // A tree that is not whole says nothing about what is missing in it.
            _ => self.parity.count(&check.prompt.subject, Outcome::Unproved),
        }
    }

    fn look(
        &mut self,
        now: Instant,
        indexes: &PrefixIndexes,
        board: &Board,
        found: &mut Vec<RankPrefix>,
    ) {
        let grace = self.parity.settings.grace();
        let mut at = 0;
        while at < self.pending.len() {
            let pending = &mut self.pending[at];
            let is_over = pending.begun + grace <= now;
            match pending.look(is_over, indexes, board, found) {
                None => at += 1,
                Some(outcome) => {
                    let pending = self.pending.swap_remove(at);
                    if let Some(outcome) = outcome {
                        self.settle(now, &pending, outcome, board);
                    }
                }
            }
        }
    }

    fn settle(&self, now: Instant, pending: &Pending, outcome: Outcome, board: &Board) {
        let parity = &self.parity;
        let Check { prompt, worker, .. } = &pending.check;
        let (subject, worker) = (&prompt.subject, *worker);
        parity.count(subject, outcome);
        let mut book = parity.book.lock();
        let (of_all, of_worker) = book.take(now, pending.begun, subject, worker, outcome);
        parity
            .names
            .lock()
            .insert(worker, pending.check.name.clone());
        let mut shows_difference = false;
        match outcome {
            Outcome::Partly | Outcome::Missing => {
                let mut found = Difference::find(
                    &prompt.tokens,
                    pending.block_size as usize,
                    pending.depth as usize,
                    &board.heard(worker),
                );
                found.our_text = self.text(prompt, &found.ours);
                found.their_text = self.text(prompt, &found.theirs);
                shows_difference = book.note(subject, found);
            }
            Outcome::Confirmed if of_all == Turn::Cleared => book.forget_difference(subject),
            Outcome::Confirmed | Outcome::Unproved | Outcome::Skipped => {}
        }
        board.record(worker, book.suspects(worker));
        if let Some(of_all) = book.of(subject) {
            let share = of_all.run.share().unwrap_or(1.0);
            let metrics = &parity.metrics;
            let labels = [&*subject.model, subject.made.as_str()];
            metrics.share.with_label_values(&labels).set(share);
            let alarm = metrics.alarm.with_label_values(&labels);
            alarm.set(of_all.run.is_up().into());
        }
        let name = &pending.check.name;
        let is_raised = of_all == Turn::Raised || of_worker == Turn::Raised;
        let is_up = !book.trusts(subject, worker);
        if let Some(of) = book.of(subject)
            && (is_raised || is_up && shows_difference)
        {
            tell(subject, name, of.difference.as_ref());
        } else if of_all == Turn::Cleared || of_worker == Turn::Cleared {
            let worker = &**name;
            info!(
                model = &*subject.model,
                prompts = subject.made.as_str(),
                worker,
                "an engine's tokens are this router's again; its cache events count"
            );
        }
        // Also a worker that agrees again while others do not is news for routing.
        if parity.has_alarms.load(Relaxed) || of_all != Turn::None || of_worker != Turn::None {
            parity.publish(&book);
        }
    }

    /// An adapter's tokens are its base's.
    fn text(&self, prompt: &Prompt, tokens: &[u32]) -> Option<String> {
        let mut models = std::iter::once(&prompt.subject.model).chain(&prompt.bases);
        match tokens {
            [] => None,
            tokens => models.find_map(|model| (self.words)(model, tokens)),
        }
    }
}

/// Once when the alarm is raised, and once more if the engine's tokens are only known later.
fn tell(subject: &Subject, worker: &str, difference: Option<&Difference>) {
    let text = |text: Option<&String>, tokens: &[u32]| match (text, tokens) {
        (Some(text), _) => format!("{text:?}"),
        (None, []) => "not known yet".to_owned(),
        (None, tokens) => format!("tokens {tokens:?}"),
    };
    warn!(
        model = &*subject.model,
        prompts = subject.made.as_str(),
        worker,
        block = difference.map(|it| it.block),
        blocks = difference.map(|it| it.blocks),
        ours = difference.map(|it| text(it.our_text.as_ref(), &it.ours)),
        theirs = difference.map(|it| text(it.their_text.as_ref(), &it.theirs)),
        "an engine has other tokens than this router: tokenizer or chat template differ; cache events do \
         not count for such prompts until they agree"
    );
}

impl Pending {
    /// What it came to, if it is over; an inner none is of a prompt too short to tell anything.
    fn look(
        &mut self,
        is_over: bool,
        indexes: &PrefixIndexes,
        board: &Board,
        found: &mut Vec<RankPrefix>,
    ) -> Option<Option<Outcome>> {
        let Check {
            prompt,
            worker,
            ranks,
            ..
        } = &self.check;
        let standing = board.standing(*worker, *ranks);
        let Some(standing) = standing.filter(|it| it.is_live && it.losses == self.before.losses)
        else {
            return Some(Some(Outcome::Unproved));
        };
        if self.cuts.is_empty() {
            let indexes = prompt.bases.iter().flat_map(|base| indexes.of(base));
            self.cuts = indexes
                .map(|(size, index)| {
                    let mut locals = Vec::new();
                    block::hash_blocks(&prompt.tokens, size, &mut locals);
                    Cut {
                        size,
                        index,
                        locals,
                    }
                })
                .collect();
        }
        for Cut {
            size,
            index,
            locals,
        } in &self.cuts
        {
            found.clear();
            index.overlap(prompt.root, locals, found);
            let own = found.iter().filter(|depth| depth.worker == *worker);
            let depth = own.map(|depth| depth.blocks).max().unwrap_or(0);
            // Of several sizes, the one that the worker was found to have; before that the smallest.
            if depth > self.depth || self.block_size == 0 {
                self.depth = self.depth.max(depth);
                self.blocks = locals.len() as u32;
                self.block_size = size.get();
            }
        }
        let is_known = self.block_size > 0;
        if is_known && self.blocks == 0 {
            return Some(None);
        }
        if is_known && self.depth == self.blocks {
            return Some(Some(Outcome::Confirmed));
        }
        is_over.then(|| {
            let removed = standing.removed_blocks - self.before.removed_blocks;
            Some(match self.depth {
                // No engine of these sizes has told anything.
                _ if !is_known => Outcome::Unproved,
                // Nothing came since, and an engine that has other tokens tells of other blocks: it is
                // silent, or what it told is lost, which only the next batch would show.
                _ if standing.applied_at < Some(self.check.sent_at) => Outcome::Unproved,
                // Half of the cache went meanwhile: perhaps this prompt with it.
                _ if removed > 0 && removed >= standing.blocks / 2 => Outcome::Unproved,
                0 => Outcome::Missing,
                _ => Outcome::Partly,
            })
        })
    }
}
