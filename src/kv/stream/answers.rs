//! The inputs that answer a question: whether they are of the process that is known, and what follows.

use std::time::Instant;

use super::memory::Known;
use super::words::{Numbered, Reason, Reset, Steps};
use super::{Phase, QUESTIONS_MAX, Question, Stream, follows};

impl<T> Stream<T> {
    pub fn on_replayed(&mut self, now: Instant, frame: Numbered<T>) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        self.extend(now);
        if matches!(self.phase, Phase::Lost { .. }) {
            self.counts.stray += 1;
            return steps;
        }
        self.is_answered();
        self.answer.frames += 1;
        let told_live = match self.backwards {
            Some((sequence, digest)) if sequence == frame.sequence => Some(digest),
            _ => self.held.digest(frame.sequence),
        };
        if frame.snapshot.is_none() && told_live.is_some_and(|digest| digest != frame.digest) {
            self.contradict(now, &mut steps);
            return steps;
        }
        if let Some(chunk) = frame.snapshot {
            if chunk.index == 0 {
                self.wait_for_the_end();
                self.answer.is_linked = true;
            }
            self.accept(frame, false, &mut steps);
            return steps;
        }
        let Some(last) = self.last else {
            if matches!(self.phase, Phase::Following) {
                // Late, but the best there is.
                let question = Question {
                    deadline: now + self.timeout(),
                    times: QUESTIONS_MAX,
                };
                self.phase = Phase::Joining { question };
            }
            self.answer.is_linked = true;
            self.accept(frame, false, &mut steps);
            return steps;
        };
        let has_anchor = self.memory.ends_with(last);
        if frame.sequence <= last && has_anchor {
            match self.memory.compare(frame.sequence, frame.digest) {
                Known::Same => self.answer.is_linked = true,
                Known::Different => self.disprove(now, &mut steps),
                // Older than what is remembered, and so than what is asked for.
                Known::Unknown => {}
            }
        } else if self.answer.is_linked {
            if !follows(last, frame.sequence) {
                self.counts.gaps += 1;
                self.clear(Reset::Gap, &mut steps);
                self.wait_for_the_end();
            }
            self.accept(frame, false, &mut steps);
        } else {
            match self.phase {
                // An answer that was given up. It may be of any process.
                Phase::Following | Phase::Lost { .. } => self.counts.stray += 1,
                // It begins after the last known one: what lies between cannot be had, and whether it
                // is the same process cannot be known. But it is all that this one still tells.
                Phase::Joining { .. } | Phase::Proving { .. } => {
                    let reset = self.reset_by_doubt();
                    self.counts.proofs_failed += 1;
                    self.clear(reset, &mut steps);
                    self.wait_for_the_end();
                    self.answer.is_linked = true;
                    self.accept(frame, false, &mut steps);
                }
            }
        }
        steps
    }

    pub fn on_replay_end(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        if !matches!(self.phase, Phase::Lost { .. }) {
            self.is_answered();
        }
        let answer = std::mem::take(&mut self.answer);
        let has_more = answer.is_linked && self.last != answer.last_then;
        match self.phase {
            Phase::Lost { .. } | Phase::Following => {}
            // Half an answer came before, and this one does not know its end.
            Phase::Joining { .. } if self.last.is_some() && !answer.is_linked => {
                self.start_over(now, Reset::Unproved, QUESTIONS_MAX, &mut steps);
            }
            Phase::Joining { .. } => {
                // A servicer without history says one batch, its next.
                if answer.frames != 1 || self.reason == Reason::Snapshot {
                    self.refusals = 0;
                }
                self.settle(now, has_more, &mut steps);
            }
            Phase::Proving { .. } if answer.is_linked || self.last.is_none() => {
                self.counts.proofs_kept += 1;
                self.refusals = 0;
                self.settle(now, has_more, &mut steps);
            }
            // The last batch that was applied is not this process's.
            Phase::Proving { .. } => self.disprove(now, &mut steps),
        }
        steps
    }

    pub fn on_replay_failed(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.heard = now;
        if matches!(self.phase, Phase::Joining { .. } | Phase::Proving { .. }) {
            self.refusals = self.refusals.saturating_add(1);
        }
        if matches!(self.phase, Phase::Joining { .. }) && self.answer.last_then.is_some() {
            // The other half was refused. From the first, then; and that once.
            self.start_over(now, Reset::Unproved, QUESTIONS_MAX, &mut steps);
        } else {
            self.give_up(now, &mut steps);
        }
        steps
    }
}
