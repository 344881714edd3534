//! When a request has waited long enough, and what it gets then. Pure.

use std::time::{Duration, Instant};

use super::{Entry, LONG, Left, Queue};
use crate::queue::types::{NO_WORKER_TIMEOUT, Outcome, REQUEST_TIMEOUT, RefusalReason};

impl<T> Queue<T> {
    pub(super) fn expiry(&self, entry: &Entry<T>) -> Instant {
        let max_wait = if entry.request.is_background {
            LONG
        } else {
            self.max_wait(entry.class).0
        };
        let no_worker = self.settings.no_worker_timeout;
        let since = entry.request.since;
        let due = entry.target.map(|target| entry.request.received + target);
        let end = if self.waits_for_worker(&entry.request) {
            since + no_worker
        } else {
            due.map_or(since + max_wait, |due| due.min(since + max_wait))
        };
        // However often the workers come and go.
        let last = entry.request.entered + max_wait + no_worker;
        end.min(last).min(entry.request.deadline)
    }

    pub(super) fn expire(&mut self, now: Instant, left: &mut Vec<Left<T>>) {
        while let Some((at, id)) = self.expiries.first().copied() {
            if at > now {
                return;
            }
            let Some(entry) = self.remove(id, false) else {
                self.expiries.remove(&(at, id));
                continue;
            };
            let waited = now.saturating_duration_since(entry.request.entered);
            let elapsed = now.saturating_duration_since(entry.request.received);
            let is_before_deadline = at < entry.request.deadline;
            let reason = match entry.target {
                _ if self.waits_for_worker(&entry.request) => RefusalReason::NoWorker {
                    waited,
                    setting: if is_before_deadline {
                        NO_WORKER_TIMEOUT
                    } else {
                        REQUEST_TIMEOUT
                    },
                },
                Some(target) if elapsed >= target => RefusalReason::TargetUnreachable {
                    target,
                    expected: elapsed,
                },
                _ => RefusalReason::TimedOut {
                    waited,
                    set_by: is_before_deadline.then(|| self.max_wait(entry.class).1),
                },
            };
            let refusal = self.refused(reason, entry.class);
            left.push(self.left(entry, now, Outcome::Refused(refusal)));
        }
    }

    /// Refuses a request that would only take the place of one that can meet its target.
    pub(super) fn too_late(
        &self,
        now: Instant,
        entry: &Entry<T>,
        first_token: Duration,
    ) -> Outcome {
        let elapsed = now.saturating_duration_since(entry.request.received);
        let reason = RefusalReason::TargetUnreachable {
            target: entry.target.unwrap_or_default(),
            expected: elapsed + first_token,
        };
        Outcome::Refused(self.refused(reason, entry.class))
    }
}

impl<T> Entry<T> {
    /// See [`crate::queue::Request::has_lost_target`].
    pub(super) fn lose_target(&mut self) {
        self.request.has_lost_target = true;
        self.target = None;
    }

    /// What its target leaves of time until its first token.
    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.request.received);
        Some(self.target?.saturating_sub(elapsed))
    }
}
