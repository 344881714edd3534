//! Whether this router's tokens are the engines': the machine that judges it. Pure.
//!
//! After a request the blocks of its prompt must be at its worker, held before or told of just then.
//! Where they never are, tokenizer or chat template differ from the engine's, and its events say
//! nothing about the prompts that are routed by them. One miss is no proof (it may have been evicted
//! in between), and neither are a few; but evictions let some through, and another tokenizer none. So
//! it takes a number of misses in a row, without a single confirmation, to raise the alarm, and some
//! confirmations in a row to clear it. What is no evidence (a tree that stopped being whole, a cache
//! that turned over) is never counted as a miss.
//!
//! A confirmation shows at once, and a miss only when its grace is over. So misses in a row of all workers are
//! no evidence while one of them, in checks that began no earlier, agreed.
//!
//! There is one run of checks for each model and way in which its prompts are made, and one for each
//! worker in it: the common one tells soon when all engines disagree, however many they are; a worker's
//! tells of one that was started with another template than the rest. Ways are apart because texts that
//! are given as they are go on agreeing where a template does not.

pub mod difference;
pub mod watcher;

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use self::difference::Difference;
pub use self::watcher::{Check, Parity, Prompt, Status, Words};
use crate::ids::{Model, WorkerId};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How long after a prompt's first token its blocks may take to be told.
    pub grace_ms: u64,
    /// Prompts that are being checked at a time, and their tokens together; others are not checked. 0:
    /// none is.
    pub checks_max: u32,
    pub tokens_max: u64,
    /// Checks in a row, not one of them or of those begun since confirmed, until events count no more.
    pub raise_after: u32,
    /// Confirmed checks in a row until they count again.
    pub clear_after: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Events come a step after the first token. This outlives a batch that has to be asked for
            // again.
            grace_ms: 5_000,
            // Confirmed within a tenth of a second as a rule, so 2,500 a second at 2 us each; 16 MB.
            checks_max: 256,
            tokens_max: 4_000_000,
            // If every second prompt were evicted before it is looked for, which no cache of use does,
            // one run in a million of checks would be as long.
            raise_after: 20,
            // A template that agrees does so at once; one that differs in a rare case should not flap.
            clear_after: 5,
        }
    }
}

impl Settings {
    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }
}

/// How a prompt came to be its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Made {
    /// By the chat template and the tokenizer.
    Rendered,
    /// By the tokenizer alone.
    Text,
    /// By the client.
    Given,
}

impl Made {
    pub fn as_str(self) -> &'static str {
        match self {
            Made::Rendered => "rendered",
            Made::Text => "text",
            Made::Given => "given",
        }
    }
}

/// Prompts that agree with an engine's or do not, all in the same way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    pub model: Model,
    pub made: Made,
}

/// What one check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All of the prompt's full blocks were there.
    Confirmed,
    /// Its first blocks were, the others never.
    Partly,
    /// None was.
    Missing,
    /// The tree was not whole all the time, or the cache turned over meanwhile.
    Unproved,
    /// There was no room for another check.
    Skipped,
}

impl Outcome {
    pub const ALL: [Outcome; 5] = [
        Outcome::Confirmed,
        Outcome::Partly,
        Outcome::Missing,
        Outcome::Unproved,
        Outcome::Skipped,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Confirmed => "confirmed",
            Outcome::Partly => "partly",
            Outcome::Missing => "missing",
            Outcome::Unproved => "unproved",
            Outcome::Skipped => "skipped",
        }
    }

    /// What it is evidence of; none where it is none.
    fn agrees(self) -> Option<bool> {
        match self {
            Outcome::Confirmed => Some(true),
            Outcome::Partly | Outcome::Missing => Some(false),
            Outcome::Unproved | Outcome::Skipped => None,
        }
    }
}

/// What a check changed.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    None,
    /// The alarm of all workers, or of one alone.
    Raised,
    Cleared,
}

/// The checks of all workers, or of one.
#[derive(Clone, Debug, Default)]
pub struct Run {
    misses: u32,
    hits: u32,
    /// When the oldest check of these misses began, and the newest that agreed.
    missing_since: Option<Instant>,
    agreed_at: Option<Instant>,
    alarm_since: Option<Instant>,
    /// The last checks that were evidence, the newest lowest; a bit is set where it agreed.
    last: u128,
    last_len: u32,
}

impl Run {
    fn take(&mut self, settings: &Settings, now: Instant, begun: Instant, agrees: bool) -> Turn {
        self.count(begun, agrees);
        self.turn(settings, now)
    }

    fn count(&mut self, begun: Instant, agrees: bool) {
        self.last = self.last << 1 | u128::from(agrees);
        self.last_len = (self.last_len + 1).min(u128::BITS);
        (self.hits, self.misses) = match agrees {
            true => (self.hits.saturating_add(1), 0),
            false => (0, self.misses.saturating_add(1)),
        };
        match agrees {
            true => {
                self.missing_since = None;
                self.agreed_at = self.agreed_at.max(Some(begun));
            }
            false => {
                let since = self.missing_since.get_or_insert(begun);
                *since = begun.min(*since);
            }
        }
    }

    fn begin_anew(&mut self) {
        self.misses = 0;
        self.missing_since = None;
    }

    fn turn(&mut self, settings: &Settings, now: Instant) -> Turn {
        match self.alarm_since {
            None if self.misses >= settings.raise_after => {
                self.alarm_since = Some(now);
                Turn::Raised
            }
            Some(_) if self.hits >= settings.clear_after => {
                self.alarm_since = None;
                Turn::Cleared
            }
            _ => Turn::None,
        }
    }

    pub fn is_up(&self) -> bool {
        self.alarm_since.is_some()
    }

    pub fn alarm_since(&self) -> Option<Instant> {
        self.alarm_since
    }

    /// Checks in a row that found something else.
    pub fn misses(&self) -> u32 {
        self.misses
    }

    /// Of the last 128 checks that were evidence; none before there is any.
    pub fn share(&self) -> Option<f64> {
        let len = self.last_len;
        (len > 0).then(|| f64::from(self.last.count_ones()) / f64::from(len))
    }
}

/// All runs.
#[derive(Debug)]
pub struct Book {
    settings: Settings,
    subjects: FxHashMap<Subject, OfSubject>,
}

#[derive(Debug, Default)]
pub struct OfSubject {
    pub run: Run,
    pub workers: FxHashMap<WorkerId, Run>,
    /// The plainest that was found since the last confirmation.
    pub difference: Option<Difference>,
}

impl OfSubject {
    /// Takes evidence for all workers. A confirmation comes at once and a miss only after its grace, so
    /// that the misses of one burst are in a row though others of it agreed: a row that a worker which is
    /// believed contradicts is none, and the next one begins.
    fn take(&mut self, settings: &Settings, now: Instant, begun: Instant, agrees: bool) -> Turn {
        self.run.count(begun, agrees);
        if self.run.misses >= settings.raise_after && self.is_contradicted() {
            self.run.begin_anew();
        }
        self.run.turn(settings, now)
    }

    fn is_contradicted(&self) -> bool {
        let since = self.run.missing_since;
        let agrees = |run: &Run| !run.is_up() && run.agreed_at.is_some() && run.agreed_at >= since;
        self.workers.values().any(agrees)
    }

    /// A worker that has confirmed lately is believed though the others may not have; one that never
    /// does is not, whatever the others do.
    fn trusts(&self, settings: &Settings, worker: WorkerId) -> bool {
        let own = self.workers.get(&worker);
        let agrees = own.is_some_and(|run| run.hits >= settings.clear_after);
        let disagrees = own.is_some_and(Run::is_up);
        !disagrees && (agrees || !self.run.is_up())
    }
}

impl Book {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            subjects: FxHashMap::default(),
        }
    }

    /// Takes the outcome of a check that was begun at `begun`. What turned for all, and for the worker alone.
    pub fn take(
        &mut self,
        now: Instant,
        begun: Instant,
        subject: &Subject,
        worker: WorkerId,
        outcome: Outcome,
    ) -> (Turn, Turn) {
        let of_subject = self.subjects.entry(subject.clone()).or_default();
        let own = of_subject.workers.entry(worker).or_default();
        let Some(agrees) = outcome.agrees() else {
            return (Turn::None, Turn::None);
        };
        let of_worker = own.take(&self.settings, now, begun, agrees);
        (
            of_subject.take(&self.settings, now, begun, agrees),
            of_worker,
        )
    }

    /// Keeps what differed, if that is plainer than what is known: where engine and router go together
    /// for longer, it is more surely the same prompt. Tells whether this is the first that shows the
    /// engine's tokens, too.
    pub fn note(&mut self, subject: &Subject, found: Difference) -> bool {
        let known = &mut self.subjects.entry(subject.clone()).or_default().difference;
        let is_plainer = known
            .as_ref()
            .is_none_or(|known| found.is_plainer_than(known));
        let is_first = known.as_ref().is_none_or(|known| known.theirs.is_empty());
        let shows = is_plainer && is_first && !found.theirs.is_empty();
        if is_plainer {
            *known = Some(found);
        }
        shows
    }

    /// What differed is of the past.
    pub fn forget_difference(&mut self, subject: &Subject) {
        if let Some(of_subject) = self.subjects.get_mut(subject) {
            of_subject.difference = None;
        }
    }

    pub fn of(&self, subject: &Subject) -> Option<&OfSubject> {
        self.subjects.get(subject)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Subject, &OfSubject)> {
        self.subjects.iter()
    }

    pub fn trusts(&self, subject: &Subject, worker: WorkerId) -> bool {
        self.subjects
            .get(subject)
            .is_none_or(|of_subject| of_subject.trusts(&self.settings, worker))
    }

    /// Whether a worker's last check found something else: what its engine tells should be remembered.
    pub fn suspects(&self, worker: WorkerId) -> bool {
        let own = |of_subject: &OfSubject| {
            of_subject
                .workers
                .get(&worker)
                .is_some_and(|it| it.misses > 0)
        };
        self.subjects.values().any(own)
    }

    /// Forgets workers that left.
    pub fn retain(&mut self, is_there: impl Fn(WorkerId) -> bool) {
        for of_subject in self.subjects.values_mut() {
            of_subject.workers.retain(|worker, _| is_there(*worker));
        }
    }
}

#[cfg(test)]
mod tests;
