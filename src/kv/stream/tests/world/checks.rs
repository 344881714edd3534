//! What must hold all along, and what all must come to.

use std::collections::BTreeSet;

use super::World;
use crate::kv::stream::*;

impl World {
    pub(super) fn check(&self) {
        for (process, held) in &self.tree {
            let last = self.applied[process];
            let truth = self.processes[*process].held_after(last);
            self.assert(
                held.is_subset(truth),
                "holds what the engine did not hold after the last batch applied",
            );
        }
        let (held, _) = self.stream.buffered();
        self.assert(held <= self.make.held_max.max(1), "holds back too many");
        if !self.stream.state().counts_in_routing() {
            return;
        }
        let Some(line) = &self.connection else {
            self.assert(false, "scores without a connection");
            return;
        };
        let blocks = self.tree.iter().filter(|(_, held)| !held.is_empty());
        for (process, _) in blocks {
            self.assert(
                *process >= line.process,
                "scores blocks of a process that the connection has seen the end of",
            );
        }
        if self.stream.state() == State::Live
            && let Some((process, index)) = self.last_applied
        {
            let is_alone = self.tree.keys().all(|held| *held == process);
            let truth = self.processes[process].held_after(index);
            self.assert(
                !is_alone || self.tree.get(&process) == Some(truth),
                "claims to know all and does not",
            );
        }
    }

    /// No more faults: it must come to what the engine holds; after one more restart to all of it, where
    /// the source reports it.
    pub(in crate::kv::stream::tests) fn settle(&mut self) {
        self.faults = false;
        self.in_deaf_spell = false;
        self.log.push("no more faults".to_owned());
        self.calm_down();
        self.restart();
        self.calm_down();
        let make = self.make;
        let tells_all = if make.is_one_stream {
            make.has_snapshots
        } else {
            !make.is_deaf && make.kept > 100
        };
        self.assert(
            !(tells_all && make.can_replay && !make.is_sloppy)
                || self.stream.state() == State::Live,
            "does not come to know all",
        );
    }

    pub(super) fn calm_down(&mut self) {
        for _ in 0..12 {
            self.publish();
            for _ in 0..8 {
                self.calm();
            }
        }
        let process = self.alive();
        let newest = self.processes[process].count() - 1;
        self.assert(
            self.stream.last_sequence() == Some(newest),
            "is not up to date",
        );
        self.assert(self.stream.state().counts_in_routing(), "does not score");
        let truth = self.processes[process].held_after(newest);
        let empty = BTreeSet::new();
        let known = self.tree.get(&process).unwrap_or(&empty);
        self.assert(known.is_subset(truth), "holds too much in the end");
        self.assert(
            self.tree.keys().all(|held| *held == process),
            "holds a dead process's blocks in the end",
        );
        if self.stream.state() == State::Live {
            self.assert(known == truth, "claims to know all in the end");
        }
    }

    pub(super) fn calm(&mut self) {
        if self.connection.as_ref().is_some_and(|line| line.is_dead) {
            while self
                .connection
                .as_ref()
                .is_some_and(|line| !line.live.is_empty())
            {
                self.say_live();
            }
            self.notice();
        }
        self.connect();
        for _ in 0..4 {
            self.response();
            while self
                .connection
                .as_ref()
                .is_some_and(|line| !line.answers.is_empty())
            {
                self.say_answer();
            }
            while self
                .connection
                .as_ref()
                .is_some_and(|line| !line.live.is_empty())
            {
                self.say_live();
            }
        }
        self.witness();
        if std::mem::take(&mut self.tree_requested) {
            self.no_tree();
        }
        self.tick();
    }

    #[track_caller]
    pub(super) fn assert(&self, holds: bool, what: &str) {
        if !holds {
            let start = self.log.len().saturating_sub(120);
            panic!("{what}\n{}\n{}", self.log[0], self.log[start..].join("\n"));
        }
    }
}
