//! Has the workers asked again for their models when a request names an adapter that may have been loaded just now: none of
//! them is known to serve it, and the request waits; or some are, and it does not. Pure but for the wait.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use crate::observe::metrics::words;
use crate::units::DurationText;

/// Requests that wait at the same time. For further ones no worker serves their model. Far more than clients that wait
/// for one adapter, and little memory if they only have a name wrong.
const MAX_WAITING: u32 = 1_024;

/// What a request does that names a model of which no worker is known, or an adapter that not all workers of its base model
/// are known to serve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Time between the starts of two rounds in which every worker is asked for its models (`GET /v1/models`), however many
    /// requests name models that are not known.
    #[serde(skip)]
    pub interval: Duration,
    /// How long a request waits for its round; then no worker serves its model. `0s`: requests do not wait, and an
    /// adapter that is loaded while the router runs is found by the health checks, within about 16 s.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub timeout: Duration,
    /// Workers that are asked in a round for which no request waits: an adapter is requested that some workers of its base
    /// model serve, and others may serve by now. The next round asks the next workers.
    #[serde(skip)]
    pub workers_per_round: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A page of a few KB a second costs an engine nothing.
            interval: Duration::from_secs(1),
            // The rest of the second, and a second for engines under load.
            timeout: Duration::from_secs(2),
            // Under 1 % of a core of the router while adapters are requested that some workers do not serve.
            workers_per_round: 64,
        }
    }
}

words! {
    /// How a wait for a model ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Lookup {
        Found = "found",
        /// No worker that answered serves it.
        NotFound = "not_found",
        /// Not all workers answered in time, and none of those that did serves it.
        Timeout = "timeout",
        /// Too many requests wait already.
        Full = "full",
        /// Requests do not wait.
        Off = "off",
    }
}

/// Rounds in which the workers are asked, by their numbers from 1.
#[derive(Debug, Default)]
pub struct ModelLookup {
    /// The last round that a request needs.
    wanted: watch::Sender<u64>,
    started: watch::Sender<u64>,
    finished: watch::Sender<u64>,
    waiting: AtomicUsize,
    /// An adapter was requested that some workers do not serve.
    has_hint: AtomicBool,
    hinted: Notify,
}

/// Which workers the next round asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// Requests wait for what they answer.
    All,
    /// `workers_per_round` of them.
    Some,
}

/// Counts a request for as long as it waits.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl ModelLookup {
    /// The round that a request needs whose model is not known: one that starts after it. A worker may have answered before
    /// its adapter was loaded in a round that runs.
    fn want(&self) -> u64 {
        let round = *self.started.borrow() + 1;
        self.wanted
            .send_if_modified(|wanted| std::mem::replace(wanted, (*wanted).max(round)) < round);
        round
    }

    fn enter(&self, max: u32) -> Option<Waiting<'_>> {
        let before = self.waiting.fetch_add(1, Relaxed);
        let waiting = Waiting(&self.waiting);
        (before < max as usize).then_some(waiting)
    }

    /// Waits until the model is known, or all workers were asked. `changes` notifies of new models.
    pub(super) async fn wait(
        &self,
        settings: &Settings,
        mut changes: watch::Receiver<u64>,
        is_known: impl Fn() -> bool,
    ) -> Lookup {
        if settings.timeout.is_zero() {
            return Lookup::Off;
        }
        let Some(_waiting) = self.enter(MAX_WAITING) else {
            return Lookup::Full;
        };
        let round = self.want();
        let mut finished = self.finished.subscribe();
        let asked = async {
            loop {
                let is_over = *finished.borrow_and_update() >= round;
                if is_known() {
                    return Lookup::Found;
                }
                if is_over {
                    return Lookup::NotFound;
                }
                // The registry has both senders.
                tokio::select! {
                    _ = changes.changed() => {}
                    _ = finished.changed() => {}
                }
            }
        };
        let asked = tokio::time::timeout(settings.timeout, asked).await;
        asked.unwrap_or(Lookup::Timeout)
    }

    /// An adapter is requested that some workers of its base model are not known to serve.
    pub(super) fn hint(&self) {
        // Nearly always it is set already, and then nothing is written.
        if !self.has_hint.load(Relaxed) && !self.has_hint.swap(true, Relaxed) {
            self.hinted.notify_one();
        }
    }

    fn is_wanted(&self) -> bool {
        *self.wanted.borrow() > *self.started.borrow()
    }

    /// Waits until there is a reason to ask workers.
    pub(super) async fn next(&self) {
        let mut wanted = self.wanted.subscribe();
        // `self` has the sender.
        tokio::select! {
            _ = wanted.wait_for(|wanted| *wanted > *self.started.borrow()) => {}
            () = self.hinted.notified() => {}
        }
    }

    pub(super) fn start(&self) -> Round {
        self.has_hint.store(false, Relaxed);
        if !self.is_wanted() {
            return Round::Some;
        }
        self.started.send_modify(|round| *round += 1);
        Round::All
    }

    pub(super) fn finish(&self) {
        self.finished.send_replace(*self.started.borrow());
    }
}

/// When the next round may start.
pub(super) fn due(last: Option<Instant>, interval: Duration, now: Instant) -> Instant {
    last.and_then(|last| last.checked_add(interval))
        .map_or(now, |due| due.max(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn a_request_needs_a_round_that_starts_after_it_and_shares_it() {
        let lookup = ModelLookup::default();
        assert_eq!([lookup.want(), lookup.want()], [1, 1]);
        lookup.start();
        assert_eq!([lookup.want(), lookup.want()], [2, 2]);
        lookup.finish();
        assert_eq!(*lookup.finished.borrow(), 1);
        assert_eq!(*lookup.wanted.borrow(), 2);
        assert_eq!(lookup.want(), 2);
    }

    #[tokio::test]
    async fn a_hint_is_a_round_that_asks_some_unless_a_request_waits() {
        let lookup = ModelLookup::default();
        lookup.hint();
        lookup.hint();
        lookup.next().await;
        assert_eq!(lookup.start(), Round::Some);
        lookup.hint();
        lookup.next().await;
        let round = lookup.want();
        assert_eq!(lookup.start(), Round::All);
        lookup.finish();
        assert_eq!(*lookup.finished.borrow(), round);
        let next = tokio::time::timeout(Duration::from_millis(10), lookup.next());
        assert!(next.await.is_err());
    }

    #[test]
    fn rounds_start_an_interval_apart() {
        let (now, second) = (observe::now(), Duration::from_secs(1));
        let after = |millis| now + Duration::from_millis(millis);
        assert_eq!(due(None, second, now), now);
        assert_eq!(due(Some(now), second, after(300)), after(1_000));
        assert_eq!(due(Some(now), second, after(1_500)), after(1_500));
    }

    #[test]
    fn only_so_many_requests_wait() {
        let lookup = ModelLookup::default();
        let first = lookup.enter(2);
        let second = lookup.enter(2);
        assert!(first.is_some() && second.is_some());
        assert!(lookup.enter(2).is_none());
        drop(first);
        assert!(lookup.enter(2).is_some());
    }
}
