//! Notices workers whose KV events are silent: they served requests that must have stored blocks, and no event came.
//! What was reported before is worth less with every request, so routing predicts their caches again. Pure.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::ids::WorkerId;

/// Requests without an event that make a worker silent. One may be answered from the cache alone, or its blocks may be
/// known under other tokens; several different ones hardly are.
const MIN_REQUESTS: u32 = 3;

#[derive(Debug, Default)]
pub(super) struct SilenceWatch {
    workers: FxHashMap<WorkerId, Unreported>,
}

#[derive(Clone, Copy, Debug)]
struct Unreported {
    /// When the first of the requests was sent.
    since: Instant,
    requests: u32,
}

impl SilenceWatch {
    /// A worker served a request, sent at `sent_at`, whose blocks are not in its tree; its last batch was applied at
    /// `applied_at`. Returns whether the worker is silent by now.
    pub(super) fn on_unreported(
        &mut self,
        now: Instant,
        grace: Duration,
        worker: WorkerId,
        sent_at: Instant,
        applied_at: Option<Instant>,
    ) -> bool {
        let none = Unreported {
            since: sent_at,
            requests: 0,
        };
        let unreported = self.workers.entry(worker).or_insert(none);
        if applied_at >= Some(unreported.since) {
            *unreported = none;
        }
        if applied_at >= Some(sent_at) {
            return false;
        }
        unreported.requests = unreported.requests.saturating_add(1);
        unreported.requests >= MIN_REQUESTS && unreported.since + grace <= now
    }

    /// Drops what is known of other workers.
    pub(super) fn retain(&mut self, is_there: impl Fn(WorkerId) -> bool) {
        self.workers.retain(|worker, _| is_there(*worker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);
    const GRACE: Duration = Duration::from_secs(60);

    #[test]
    fn requests_without_an_event_for_longer_than_the_grace_make_a_worker_silent() {
        let start = crate::observe::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut watch = SilenceWatch::default();
        let mut served = |seconds, applied_at| {
            watch.on_unreported(at(seconds + 5), GRACE, WORKER, at(seconds), applied_at)
        };
        assert!(!served(0, None));
        assert!(!served(10, None));
        assert!(!served(20, None), "the grace is not over");
        assert!(served(55, None));
        assert!(!served(70, Some(at(60))), "an event came");
        assert!(!served(120, Some(at(60))));
        assert!(served(130, Some(at(60))));
        assert!(!served(140, Some(at(141))), "its own");
    }

    #[test]
    fn few_requests_prove_nothing_however_long_ago() {
        let start = crate::observe::now();
        let mut watch = SilenceWatch::default();
        let later = start + Duration::from_secs(10_000);
        assert!(!watch.on_unreported(later, GRACE, WORKER, start, None));
        assert!(!watch.on_unreported(later, GRACE, WORKER, start, None));
        watch.retain(|_| false);
        assert!(!watch.on_unreported(later, GRACE, WORKER, start, None));
    }
}
