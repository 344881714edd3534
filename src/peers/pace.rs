//! When this replica reports to the others, and when their reports wake who waits here. Pure.
//!
//! Reports are paid for: one an interval is earned, and a few can be saved up. A request that was just routed is reported
//! at the next look if anything is saved, because the next request with the same prompt may already be on its way at
//! another replica. Other changes (first tokens, ends) wait for the interval, and leave one report for such a request.
//! Few requests are so reported almost at once, and many as often as without this. In simulations of 8 replicas with one
//! request a second each and 40 ms between reports, reporting choices at once lowers what the delay costs from 5.6 % of
//! mean time to first token to 1.8 %.

use std::time::{Duration, Instant};

/// How often within the interval a replica looks whether there is something to report.
const LOOKS: u32 = 4;
/// Reports that can be saved up: as many as the looks of one interval.
const SAVED: u32 = LOOKS;
/// With more other replicas than this the interval grows with their number: what a replica receives in a second, and with
/// it the work, then stays the same.
const PEERS_PER_INTERVAL: u32 = 8;

#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    looked_at: Instant,
    /// Reports are paid for up to here; what has passed since is saved.
    paid_until: Instant,
}

/// The time between two reports with so many other replicas.
pub fn interval(least: Duration, peers: usize) -> Duration {
    let peers = u32::try_from(peers).unwrap_or(u32::MAX);
    least * peers.clamp(PEERS_PER_INTERVAL, 1_024) / PEERS_PER_INTERVAL
}

impl Pace {
    pub fn new(now: Instant, interval: Duration) -> Self {
        Self {
            interval,
            looked_at: now,
            paid_until: now,
        }
    }

    pub fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
    }

    /// Time between two looks.
    pub fn look_interval(&self) -> Duration {
        (self.interval / LOOKS).max(Duration::from_millis(1))
    }

    /// Whether it is time for a report. `has_routed`: a request was routed since the last one.
    pub fn is_due(&self, now: Instant, has_routed: bool) -> bool {
        // Looks come a little late or early.
        let early = self.look_interval() / 2;
        let has = |reports: u32| self.saved(now) + early >= self.interval * reports;
        let since = now.saturating_duration_since(self.looked_at) + early;
        has_routed && has(1) || since >= self.interval && has(2)
    }

    /// A report was due; `is_sent` if there was something to send.
    pub fn on_report(&mut self, now: Instant, is_sent: bool) {
        self.looked_at = now;
        if is_sent {
            let saved = self.saved(now).min(self.interval * SAVED);
            // What a report that came a little early lacks, the next one lacks, too.
            let rest = saved.saturating_sub(self.interval);
            let lacking = self.interval.saturating_sub(saved);
            self.paid_until = now.checked_sub(rest).unwrap_or(now) + lacking;
        }
    }

    fn saved(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.paid_until)
    }
}

/// Reports wake who waits here at most this often. Replicas report by the hundred a second, and each look at those who
/// wait asks what is known of the caches for some of them. They are looked at every 10 ms in any case: so reports make
/// that twice as often at most, and what a report that wakes nobody has changed is seen 10 ms later.
const WAKE_INTERVAL: Duration = Duration::from_millis(5);

/// When a report last woke who waits here.
#[derive(Debug, Default)]
pub struct Wakes {
    last: Option<Instant>,
}

impl Wakes {
    /// Whether what has changed now is to wake them.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let since = |last: Instant| now.saturating_duration_since(last);
        let is_due = self.last.is_none_or(|last| since(last) >= WAKE_INTERVAL);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const INTERVAL: Duration = Duration::from_millis(20);

    /// The times in milliseconds of the reports that are sent, with requests routed at `routed`.
    fn sent(routed: &[u64], other_changes: &[u64], until: u64) -> Vec<u64> {
        let start = observe::now();
        let mut pace = Pace::new(start, INTERVAL);
        assert_eq!(pace.look_interval(), Duration::from_millis(5));
        let (mut sent, mut last) = (Vec::new(), 0);
        for at in (0..=until).step_by(5) {
            let now = start + Duration::from_millis(at);
            let is_new = |changes: &[u64]| changes.iter().any(|change| (last..at).contains(change));
            if pace.is_due(now, is_new(routed)) {
                let is_sent = is_new(routed) || is_new(other_changes);
                pace.on_report(now, is_sent);
                last = at;
                if is_sent {
                    sent.push(at);
                }
            }
        }
        sent
    }

    #[test]
    fn a_choice_is_reported_at_the_next_look_and_other_changes_at_the_next_tick() {
        assert_eq!(sent(&[101, 161], &[], 300), [105, 165]);
        assert_eq!(sent(&[], &[101], 300), [120]);
    }

    #[test]
    fn a_choice_just_after_the_end_of_a_request_does_not_wait_for_the_interval() {
        assert_eq!(sent(&[122], &[101], 300), [120, 125]);
        assert_eq!(sent(&[101, 106, 111], &[], 300), [105, 110, 115]);
    }

    #[test]
    fn a_choice_finds_a_report_left_however_many_other_changes_there_are() {
        let changes: Vec<u64> = (100..400).collect();
        let reports = sent(&[243, 341], &changes, 400);
        assert!(
            reports.contains(&245) && reports.contains(&345),
            "{reports:?}"
        );
        let longest = reports.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert!(longest <= Some(40), "{reports:?}");
    }

    #[test]
    fn many_choices_are_reported_once_an_interval_after_those_that_were_saved() {
        let routed: Vec<u64> = (100..400).collect();
        let reports = sent(&routed, &[], 400);
        assert_eq!(reports[..4], [105, 110, 115, 120]);
        let later = reports.windows(2).skip(5).map(|pair| pair[1] - pair[0]);
        assert!(later.clone().all(|gap| gap == 20), "{reports:?}");
        assert!(later.count() > 8);
    }

    #[test]
    fn with_many_replicas_the_interval_grows() {
        let milliseconds = |peers| interval(INTERVAL, peers).as_millis();
        assert_eq!([0, 2, 8].map(milliseconds), [20; 3]);
        assert_eq!([12, 16, 29].map(milliseconds), [30, 40, 72]);
    }

    proptest::proptest! {
        /// Whatever happens, no more is sent than one report an interval and those saved.
        #[test]
        fn reports_are_bounded(events in proptest::collection::vec((1u64..30, proptest::prelude::any::<[bool; 2]>()), 1..300)) {
            let start = observe::now();
            let mut pace = Pace::new(start, INTERVAL);
            let (mut at, mut sent) = (0, 0);
            for (pause, [has_routed, has_changed]) in events {
                at += pause;
                let now = start + Duration::from_millis(at);
                if pace.is_due(now, has_routed) {
                    pace.on_report(now, has_routed || has_changed);
                    sent += u64::from(has_routed || has_changed);
                }
                proptest::prop_assert!(sent <= at / 20 + u64::from(SAVED) + 1);
            }
        }
    }
}
