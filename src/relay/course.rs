//! The course of one request from worker to worker: how often it is sent, to whom no more, after which pause, and whether with a
//! KV transfer. Pure: `run` drives it, which reads the clock, chooses, sends and waits.
//!
//! Only attempts that failed before the first byte of an answer, of a stream before its first token, are followed by others. What an
//! attempt does by itself about a connection that was closed while it was idle, [`reuse`] decides.

pub(super) mod reuse;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::reuse::Reuse;
use super::choose::failed_workers::FailedWorkers;
use super::failure::cuts::{Cut, Cuts};
use super::failure::failure_owner::FailureOwner;
use super::failure::fault::Fault;
use super::failure::types::{Failure, Stage};
use super::job::{Error, NotConvertible};
use super::settings::Settings;
use crate::fleet::{Role, Worker};
use crate::ids::WorkerId;

/// So many ends of processes use up none of a request's attempts. A request that ends engines which have others, too, gets no
/// further.
const ACQUITTED_MAX: u32 = 2;

/// So many refusals of the router's own key use up none of a request's attempts. Where more workers in a row refuse it, it is
/// most likely wrong for the whole fleet, and the client should have an answer soon.
const KEYS_REFUSED_MAX: u32 = 16;

/// Others that were cut in the same moment are waited for so long before a request is refused: I/O threads notice it one after
/// the other.
const COMPANY_WAIT: Duration = Duration::from_millis(100);

#[must_use]
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Wait until there is room for it, if there is none: [`Course::on_room`].
    FindRoom,
    /// Choose workers and send it to them: [`Course::on_sent`], and [`Course::on_failed`] if they do not answer.
    Send {
        /// When this was decided.
        at: Instant,
        /// What it is a retry of, if it is one that costs the fleet something and was not counted yet.
        retry: Option<Retry>,
    },
    /// Wait for so long until others say that they were cut in the same moment: [`Course::on_others`].
    AwaitOthers(Duration),
    /// Another attempt after a pause: [`Course::next`].
    Pause(Duration),
    /// Another attempt at once, and no KV transfer from now on: [`Course::next`]. It costs no more than without a prefill
    /// worker, so it is not counted as a retry.
    GiveUpTransfers,
    Stop(Unanswered),
}

/// Why there is no further attempt: the error of the client follows from it, or the log line of a stream that is not continued.
#[derive(Debug, PartialEq)]
pub(super) enum Unanswered {
    /// Its time is over.
    Late,
    /// No worker that may get it can take it, it was tried often enough, or it cut the connections of two workers.
    NoFurtherAttempt,
    /// Its only worker computes no prompts, and no prefill worker is left.
    LacksPrefill,
    /// It can only be sent as a chat completion, and has something that none can have.
    NotConvertible(NotConvertible),
    /// It waited in vain for room, or did not wait; or the drain ended it.
    NotQueued(Error),
}

/// A retry that was not counted yet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Retry {
    /// The worker that failed.
    pub(super) worker: Arc<str>,
    pub(super) failure: Failure,
    /// It takes nothing from the retry budget, though it is counted as a retry: what ended with all that its worker had is no
    /// further load, nor is what was refused before any worker computed anything for it.
    pub(super) is_off_budget: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) fault: Fault,
    /// An engine has refused it, with an answer.
    pub(super) is_answered: bool,
    /// The worker that failed.
    pub(super) name: Arc<str>,
    /// The worker that was to answer, and the one that was to compute the prompt for it.
    pub(super) worker: WorkerId,
    pub(super) prefill: Option<WorkerId>,
}

impl Ended {
    /// True if it was refused before any worker computed anything for it. A decode worker's refusal costs the prompt
    /// that was computed for it.
    fn is_refused_at_once(&self) -> bool {
        let has_cost_none = self.prefill.is_none() || self.fault.stage == Stage::Prefill;
        let failure = self.fault.failure;
        failure == Failure::TooLong || failure == Failure::KeyRefused && has_cost_none
    }
}

/// What follows from a failed attempt.
#[must_use]
#[derive(Debug)]
pub(super) struct Judgement {
    /// It counts against the worker that failed. One that is tried again fails the same request, not another one: it counts once.
    pub(super) is_counted: bool,
    pub(super) step: Step,
}

/// What distinguishes one request's course from others'.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) deadline: Instant,
    /// Before its first attempt it looks for room, and again after a refused key: the worker that refuses has nothing
    /// to do, and draws requests while all others are full. Where there is a queue, it waits for room.
    pub(super) looks_for_room: bool,
    /// It has one attempt and no more.
    pub(super) is_only_one: bool,
    /// It may go on without a prefill worker.
    pub(super) may_give_up_transfers: bool,
}

#[derive(Debug)]
pub(super) struct Course {
    rules: Rules,
    count_max: u32,
    backoff: Duration,
    backoff_max: Duration,
    /// How many attempts there were.
    pub(super) count: u32,
    /// The workers that do not get the request any more, or at all.
    pub(super) failed: FailedWorkers,
    /// What broke after the request was sent, now and before.
    pub(super) cuts: Cuts,
    last: Option<Ended>,
    /// An engine got the request and may have computed an answer that was lost: sent once more, the request is computed again.
    pub(super) may_have_computed: bool,
    /// A connection that had not been idle before was cut, and no other request's with it.
    has_cut_new: bool,
    /// Attempts that ended with the worker's process, and not because of the request.
    acquitted: u32,
    /// Attempts whose worker refused the key that the router has for it, and those of them that cost no worker
    /// anything.
    keys_refused: u32,
    keys_refused_at_once: u32,
    /// What the next attempt is a retry of.
    owed: Option<Retry>,
}

impl Course {
    /// `failed`: the workers that cannot get the request. `cuts`: what broke before, after the same request was sent.
    pub(super) fn new(
        settings: &Settings,
        rules: Rules,
        failed: FailedWorkers,
        cuts: Cuts,
    ) -> Self {
        Self {
            rules,
            count_max: settings.max_attempts.max(1),
            backoff: settings.advanced.backoff,
            backoff_max: settings.advanced.max_backoff,
            count: 0,
            failed,
            cuts,
            last: None,
            may_have_computed: false,
            has_cut_new: false,
            acquitted: 0,
            keys_refused: 0,
            keys_refused_at_once: 0,
            owed: None,
        }
    }

    /// What comes next for a request that was not sent, as the chosen worker cannot have it, or whose next attempt is due.
    pub(super) fn next(&mut self, now: Instant) -> Step {
        let is_due = self.count == 0 || self.last() == Some(Failure::KeyRefused);
        if is_due && self.rules.looks_for_room {
            return Step::FindRoom;
        }
        self.on_room(now)
    }

    /// There is room for it, or it was let pass without.
    pub(super) fn on_room(&mut self, now: Instant) -> Step {
        if self.is_late(now) {
            return Step::Stop(Unanswered::Late);
        }
        let retry = self.owed.take();
        Step::Send { at: now, retry }
    }

    /// No worker can take it. `waits_again`: the workers for which it has waited are gone, and it may wait once more.
    pub(super) fn on_no_worker(&mut self, waits_again: bool) -> Step {
        if waits_again {
            Step::FindRoom
        } else {
            Step::Stop(Unanswered::NoFurtherAttempt)
        }
    }

    /// An attempt begins.
    pub(super) fn on_sent(&mut self) {
        // Whoever was cut with the last attempt has said so by now.
        let broken = self.last.as_ref().map(|last| last.fault);
        if let Some(fault) = broken.filter(|fault| fault.failure == Failure::Broken) {
            if self.cuts.is_last_shared() {
                self.acquitted = self.with_one_more();
            } else if !fault.is_stale() {
                self.has_cut_new = true;
            }
        }
        self.count += 1;
    }

    /// The attempt failed. `cut`: its connection broke after the request was sent over it. `random` from 0 to 1 spreads the pause
    /// over 50 % to 100 % of the backoff.
    pub(super) fn on_failed(
        &mut self,
        now: Instant,
        ended: Ended,
        cut: Option<&Cut>,
        random: f64,
    ) -> Judgement {
        let fault = ended.fault;
        let is_counted = self.failed.on_fault(&fault, ended.worker, ended.prefill);
        if fault.failure == Failure::KeyRefused {
            self.keys_refused += 1;
            self.keys_refused_at_once += u32::from(ended.is_refused_at_once());
            // It would refuse the request each time.
            let at_prefill = ended.prefill.filter(|_| fault.stage == Stage::Prefill);
            let refusing = at_prefill.unwrap_or(ended.worker);
            self.failed.exclude_all(std::iter::once(refusing));
        }
        self.may_have_computed |= match fault.failure {
            Failure::Broken => fault.is_cut || !fault.is_stale(),
            Failure::TimedOut | Failure::Deadline | Failure::KvTransfer | Failure::TakenOut => true,
            Failure::Local
            | Failure::Connect
            | Failure::Refused
            | Failure::NoAnswer
            | Failure::KeyRefused
            | Failure::TooLong => false,
        };
        self.last = Some(ended);
        if let Some(cut) = cut {
            self.cuts.add(cut);
        }
        // It may be refused for the cut, unless others were cut in the same moment.
        let step = if cut.is_some() && (self.has_cut_enough() || self.is_last()) {
            Step::AwaitOthers(COMPANY_WAIT)
        } else {
            self.on_others(now, random)
        };
        Judgement { is_counted, step }
    }

    /// Whoever was cut in the same moment has said so by now.
    pub(super) fn on_others(&mut self, now: Instant, random: f64) -> Step {
        let Some(last) = &self.last else {
            return self.next(now);
        };
        let fault = last.fault;
        let may_give_up = self.rules.may_give_up_transfers
            && !self.failed.gave_up_transfers
            && !self.is_late(now)
            && !self.has_cut_enough();
        // The decode engine had the KV blocks or tried to fetch them, so another prefill leg would most likely end the same.
        let is_transfer_refused = fault.stage == Stage::Transfer && last.is_answered;
        let pause = self.pause(fault.failure, random);
        let pause = pause.filter(|pause| !self.is_late(now + *pause));
        if let Some(pause) = pause
            && !(may_give_up && is_transfer_refused)
        {
            // What was sent over a connection that was closed already costs the fleet nothing.
            let is_counted = !fault.failure.is_free() && !fault.is_stale();
            let is_refused_at_once = last.is_refused_at_once();
            self.owed = is_counted.then(|| Retry {
                worker: last.name.clone(),
                failure: fault.failure,
                is_off_budget: self.is_acquitted() || is_refused_at_once,
            });
            return Step::Pause(pause);
        }
        if may_give_up && fault.stage != Stage::Worker {
            self.failed.gave_up_transfers = true;
            return Step::GiveUpTransfers;
        }
        Step::Stop(Unanswered::NoFurtherAttempt)
    }

    /// The pause before the next attempt; `None` if this one was the last.
    fn pause(&self, failure: Failure, random: f64) -> Option<Duration> {
        let acquitted = if self.is_acquitted() {
            self.with_one_more()
        } else {
            self.acquitted
        };
        if self.is_last_with(acquitted) || self.has_cut_enough() {
            return None;
        }
        match failure {
            Failure::Deadline => None,
            Failure::TakenOut | Failure::TooLong | Failure::KeyRefused => Some(Duration::ZERO),
            Failure::Local
            | Failure::Connect
            | Failure::Broken
            | Failure::TimedOut
            | Failure::Refused
            | Failure::NoAnswer
            | Failure::KvTransfer => {
                let doublings = self.count.saturating_sub(1).min(16);
                let full = self.backoff.saturating_mul(1 << doublings);
                let full = full.min(self.backoff_max);
                Some(full.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0))
            }
        }
    }

    /// The ends of processes that use up no attempts, with one more.
    fn with_one_more(&self) -> u32 {
        (self.acquitted + 1).min(ACQUITTED_MAX)
    }

    /// True if this attempt is the last one, unless it ends with its worker's process.
    pub(super) fn is_last(&self) -> bool {
        self.is_last_with(self.acquitted)
    }

    /// The first ends of processes under a request use up none of its attempts, nor do the first refusals of a key that
    /// cost no worker anything.
    fn is_last_with(&self, acquitted: u32) -> bool {
        let uncounted = acquitted + self.keys_refused_at_once.min(KEYS_REFUSED_MAX);
        self.rules.is_only_one || self.count >= self.count_max + uncounted
    }

    fn is_late(&self, now: Instant) -> bool {
        now >= self.rules.deadline
    }

    pub(super) fn deadline(&self) -> Instant {
        self.rules.deadline
    }

    /// True if each worker that was sent the request has refused the router's key for it, and nothing else has failed.
    pub(super) fn has_only_refused_keys(&self) -> bool {
        self.count > 0 && self.keys_refused == self.count
    }

    /// True if nothing else has failed, and each of these workers that does what failed at this `stage` has refused the
    /// key, or cannot have the request: it can be sent to none of them, however soon it comes again. `refuses`: whether
    /// a worker that this request was not sent to is known to refuse the key, too.
    pub(super) fn is_refused_by_each<'a>(
        &self,
        stage: Stage,
        workers: impl Iterator<Item = &'a Arc<Worker>>,
        refuses: impl Fn(&Worker) -> bool,
    ) -> bool {
        let other_role = if stage == Stage::Prefill {
            Role::Decode
        } else {
            Role::Prefill
        };
        let mut workers = workers
            .filter(|worker| worker.role != other_role)
            .peekable();
        self.has_only_refused_keys()
            && workers.peek().is_some()
            && workers.all(|worker| self.failed.unfit.contains(&worker.id) || refuses(worker))
    }

    pub(super) fn last_stage(&self) -> Option<Stage> {
        self.last.as_ref().map(|last| last.fault.stage)
    }

    /// How the last attempt failed.
    pub(super) fn last(&self) -> Option<Failure> {
        self.last.as_ref().map(|last| last.fault.failure)
    }

    /// True if the last attempt ended with a failed KV transfer, for which the request may be to blame.
    pub(super) fn is_after_failed_transfer(&self) -> bool {
        let last = self.last.as_ref();
        last.is_some_and(|last| last.fault.owner == FailureOwner::KvTransfer)
    }

    /// Which connection the next attempt may use. After a cut only a new one: the worker's other idle connections may
    /// have been closed with the first, and what closes a new one is the worker's end.
    pub(super) fn reuse(&self) -> Reuse {
        if self.cuts.is_empty() {
            Reuse::Replaced
        } else {
            Reuse::Never
        }
    }

    /// True if the request may not be sent once more, because it seems to end the engines that get it.
    fn has_cut_enough(&self) -> bool {
        self.cuts.are_of_the_request()
    }

    /// True if the last attempt ended with the worker's process, and other requests with it: the worker has no more of
    /// what it had, so that sending it elsewhere is no further load.
    fn is_acquitted(&self) -> bool {
        self.last() == Some(Failure::Broken) && self.cuts.is_last_shared()
    }

    /// True if a worker that failed this request may get it again when there is no other: an unreachable worker may
    /// be restarting, one that was taken out may be back, and after a failed KV transfer either worker may be healthy. A worker
    /// that refused or timed out would do so again, and one that cut a new connection may have ended because of the request.
    pub(super) fn may_repeat_worker(&self) -> bool {
        self.last().is_some_and(|last| self.may_repeat_after(last))
    }

    /// What [`Course::may_repeat_worker`] will say if the attempt that runs now fails like this.
    pub(super) fn may_repeat_after(&self, failure: Failure) -> bool {
        match failure {
            Failure::Local | Failure::Connect | Failure::KvTransfer | Failure::TakenOut => {
                !self.has_cut_new
            }
            // The worker most likely never read the request, or its process ended with all that it had.
            Failure::Broken => {
                let was_stale = self.last.as_ref().is_some_and(|last| last.fault.is_stale());
                was_stale || self.cuts.is_last_shared()
            }
            Failure::TimedOut
            | Failure::Deadline
            | Failure::Refused
            | Failure::NoAnswer
            | Failure::KeyRefused
            | Failure::TooLong => false,
        }
    }
}

#[cfg(test)]
mod tests;
