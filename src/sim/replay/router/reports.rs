//! What the replicas of a replay report to each other: what each has at each worker, what waits for it, and what was
//! routed. Pure.

use super::line::Line;
use crate::fleet::load::LoadShare;
use crate::fleet::waiting::{self, DueTime, FirstInLine};

/// What a router reports to the other replicas: its loads that changed, as absolute values, and what it routed.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Worker, its load in the report before, its load now.
    loads: Vec<(usize, LoadShare, LoadShare)>,
    /// Worker, what waited for it in the report before, what waits for it now.
    waiting: Vec<(usize, LoadShare, LoadShare)>,
    /// By worker.
    first: Vec<Option<DueTime>>,
    /// Requests and their workers.
    pub(super) routed: Vec<(usize, usize)>,
}

/// What a router last reported, and what it is to report next.
#[derive(Debug)]
pub(super) struct Reported {
    /// The load of its own requests on each worker.
    loads: Vec<LoadShare>,
    /// The load of its own requests that wait for each worker.
    waiting: Vec<LoadShare>,
    /// When the first one in its line for each worker is due.
    first: Vec<Option<DueTime>>,
    /// Its own requests since then and their workers, if routed prompts are shared.
    routed: Vec<(usize, usize)>,
    shares_routed: bool,
}

impl Reported {
    pub(super) fn new(workers: usize, shares_routed: bool) -> Self {
        Self {
            loads: vec![LoadShare::default(); workers],
            waiting: vec![LoadShare::default(); workers],
            first: vec![None; workers],
            routed: Vec::new(),
            shares_routed,
        }
    }

    pub(super) fn on_routed(&mut self, request: usize, worker: usize) {
        if self.shares_routed {
            self.routed.push((request, worker));
        }
    }

    /// Whether something else waits than what was last reported.
    pub(super) fn is_other_line(&self, line: &Line) -> bool {
        line.promised() != self.waiting || line.first() != self.first
    }

    /// What changed since the last report. `own`: the load of its own requests on each worker.
    pub(super) fn report(&mut self, own: &[LoadShare], line: Option<&Line>) -> Report {
        let waiting = line.map_or(&[][..], Line::promised);
        if let Some(line) = line {
            self.first = line.first();
        }
        Report {
            loads: changed(own, &mut self.loads),
            waiting: changed(waiting, &mut self.waiting),
            first: self.first.clone(),
            routed: std::mem::take(&mut self.routed),
        }
    }
}

/// What the other replicas have, as they last reported.
#[derive(Debug)]
pub(super) struct Peers {
    /// The load of their requests on each worker.
    pub(super) loads: Vec<LoadShare>,
    /// The load of their requests that wait for each worker.
    pub(super) waiting: Vec<LoadShare>,
    /// By replica and worker: when the first one in the other replica's line is due.
    first: Vec<Vec<Option<DueTime>>>,
}

impl Peers {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            loads: vec![LoadShare::default(); workers],
            waiting: vec![LoadShare::default(); workers],
            first: Vec::new(),
        }
    }

    pub(super) fn on_report(&mut self, peer: usize, report: &Report) {
        if self.first.len() <= peer {
            self.first.resize(peer + 1, Vec::new());
        }
        self.first[peer].clone_from(&report.first);
        for (worker, before, load) in &report.loads {
            let others = &mut self.loads[*worker];
            *others = others.minus(*before).plus(*load);
        }
        for (worker, before, waiting) in &report.waiting {
            let others = &mut self.waiting[*worker];
            *others = others.minus(*before).plus(*waiting);
        }
    }

    /// The first ones in their lines for a worker.
    pub(super) fn first(&self, worker: usize) -> FirstInLine {
        let replicas = self.first.iter();
        waiting::earliest(replicas.filter_map(|first| *first.get(worker)?))
    }
}

/// Each worker whose load has changed since it was reported, with the reported load and the new one.
fn changed(now: &[LoadShare], reported: &mut [LoadShare]) -> Vec<(usize, LoadShare, LoadShare)> {
    let loads = now.iter().zip(reported).enumerate();
    loads
        .filter(|(_, (now, reported))| now != reported)
        .map(|(worker, (now, reported))| (worker, std::mem::replace(reported, *now), *now))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_that_follow_each_other_leave_what_the_other_replica_has() {
        let (mut reported, mut peers) = (Reported::new(2, true), Peers::new(2));
        let share = |tokens| LoadShare::of_request(tokens, tokens);
        for own in [
            [share(10), LoadShare::default()],
            [share(10), share(30)],
            [LoadShare::default(), share(20)],
        ] {
            let report = reported.report(&own, None);
            peers.on_report(1, &report);
            assert_eq!(peers.loads, own);
        }
        reported.on_routed(7, 1);
        assert_eq!(reported.report(&[], None).routed, [(7, 1)]);
        assert!(reported.report(&[], None).routed.is_empty());
    }
}
