//! Whose turn it is at a tenant's limit of requests that run at the same time. A background run that waits for a place
//! asks now and then; clients that send request after request would take every place before it does. So while a run
//! waits here, every second place is kept for a run. Pure; times are microseconds.
//!
//! Each replica keeps to it with what runs and waits there. Other replicas may take the places that become free here;
//! then keeping one helps no run, and the clients of this replica get it back after a while.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::store::charges::ChargeId;

/// A run that has not asked for this long waits no more: one that waits asks every two seconds.
const ASKS_WITHIN: u64 = 5_000_000;
/// A turn of runs ends when they have found no place for this long although one became free here: other replicas take
/// them. A run asks three times meanwhile.
const OUTRUN_FOR: u64 = 6_000_000;
/// Runs that are remembered. One is enough to keep a place, so further ones wait with them.
const RUNS_MAX: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The runs that found no place, and when each asked last.
    waiting: Vec<(ChargeId, u64)>,
    /// Whether there are any.
    runs_wait: Arc<AtomicBool>,
    /// The last place went to a client, and runs may still hope for the next one.
    is_turn_of_runs: bool,
    /// How many requests ran here when the last place was granted.
    running_at_grant: usize,
    /// Since when runs have found no place although one has become free here since then.
    outrun_since: Option<u64>,
}

impl Turns {
    /// Whether any run waits, as far as was noted: without one no place is kept. It can be read without a lock on this.
    pub(super) fn runs_wait(&self) -> Arc<AtomicBool> {
        self.runs_wait.clone()
    }

    /// Whether a client's request finds one place less, since a run waits for it.
    pub(super) fn keeps_place(&mut self, now: u64) -> bool {
        let is_late = |asked: u64| now.saturating_sub(asked) >= ASKS_WITHIN;
        self.waiting.retain(|(_, asked)| !is_late(*asked));
        self.note();
        self.is_turn_of_runs && !self.waiting.is_empty()
    }

    /// A client's request or a run got a place. So many run here now.
    pub(super) fn on_granted(&mut self, id: ChargeId, running: usize) {
        if !self.waiting.is_empty() {
            self.forget(id);
            self.note();
        }
        self.is_turn_of_runs = !id.is_once();
        self.running_at_grant = running;
        self.outrun_since = None;
    }

    /// A run found no place while so many requests run here.
    pub(super) fn on_run_waits(&mut self, id: ChargeId, now: u64, running: usize) {
        self.forget(id);
        if self.is_turn_of_runs && running < self.running_at_grant {
            let since = *self.outrun_since.get_or_insert(now);
            self.is_turn_of_runs = now.saturating_sub(since) < OUTRUN_FOR;
        } else {
            self.outrun_since = None;
        }
        if self.waiting.len() < RUNS_MAX {
            self.waiting.push((id, now));
        }
        self.note();
    }

    fn note(&self) {
        self.runs_wait.store(!self.waiting.is_empty(), Relaxed);
    }

    fn forget(&mut self, id: ChargeId) {
        self.waiting.retain(|(waiting, _)| *waiting != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{RequestId, ResponseId, Root};

    const SECOND: u64 = 1_000_000;

    fn client() -> ChargeId {
        ChargeId::Request(RequestId::new(7))
    }

    fn run(number: u64) -> ChargeId {
        ChargeId::Response(ResponseId::new(Root(1), number.into()))
    }

    enum Event {
        Client,
        Run(u64),
        Waits(u64),
        Outrun(u64),
        Passed(u64),
    }

    #[test]
    fn every_second_place_is_kept_while_a_run_waits() {
        use Event::{Client, Outrun, Passed, Run, Waits};
        for (events, expected) in [
            (&[Client, Client][..], &[false, false][..]),
            // Two runs wait: each gets its place after a client.
            (
                &[Client, Waits(1), Waits(2), Run(1), Client, Run(2), Client],
                &[false, true, true, false, true, false, false],
            ),
            // A run that asks again is the same one.
            (
                &[Client, Waits(1), Waits(1), Run(1), Client],
                &[false, true, true, false, false],
            ),
            // One that was cancelled asks no more.
            (
                &[Client, Waits(1), Passed(4), Passed(1)],
                &[false, true, true, false],
            ),
            // Requests that take long end no turn: no place has become free.
            (
                &[
                    Client,
                    Waits(1),
                    Passed(4),
                    Waits(1),
                    Passed(4),
                    Waits(1),
                    Passed(4),
                ],
                &[false, true, true, true, true, true, true],
            ),
            // Places become free, and other replicas take each: the turn ends, until a client of this one gets a place.
            (
                &[
                    Client,
                    Outrun(1),
                    Passed(3),
                    Outrun(1),
                    Outrun(2),
                    Passed(3),
                    Outrun(1),
                    Outrun(1),
                    Client,
                    Outrun(1),
                ],
                &[
                    false, true, true, true, true, true, false, false, true, true,
                ],
            ),
            // As many as before run here again meanwhile.
            (
                &[
                    Client,
                    Outrun(1),
                    Passed(3),
                    Waits(1),
                    Passed(3),
                    Outrun(1),
                    Run(1),
                    Outrun(2),
                ],
                &[false, true, true, true, true, true, false, false],
            ),
        ] {
            let (mut turns, mut now) = (Turns::default(), 0);
            for (step, (event, expected)) in events.iter().zip(expected).enumerate() {
                match event {
                    Client => turns.on_granted(client(), 2),
                    Run(number) => turns.on_granted(run(*number), 2),
                    Waits(number) => turns.on_run_waits(run(*number), now, 2),
                    Outrun(number) => turns.on_run_waits(run(*number), now, 1),
                    Passed(seconds) => now += seconds * SECOND,
                }
                let may_keep = turns.runs_wait().load(Relaxed);
                assert_eq!(turns.keeps_place(now), *expected, "step {step}");
                assert!(may_keep || !expected, "step {step}");
            }
        }
    }

    #[test]
    fn clients_and_runs_alternate_at_a_limit_of_one() {
        let (mut turns, mut order) = (Turns::default(), String::new());
        let mut waiting: Vec<u64> = (0..3).collect();
        turns.on_granted(client(), 1);
        waiting
            .iter()
            .for_each(|number| turns.on_run_waits(run(*number), 0, 1));
        // Clients ask first each time.
        while order.len() < 8 {
            if !turns.keeps_place(0) {
                turns.on_granted(client(), 1);
                order.push('c');
            } else if let Some(number) = waiting.pop() {
                turns.on_granted(run(number), 1);
                order.push('r');
            }
        }
        assert_eq!(order, "rcrcrccc");
    }

    #[test]
    fn only_so_many_runs_are_remembered() {
        let mut turns = Turns::default();
        (0..1_000).for_each(|number| turns.on_run_waits(run(number), 0, 0));
        assert_eq!(turns.waiting.len(), RUNS_MAX);
    }
}
