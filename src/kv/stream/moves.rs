//! The moves that a stream's inputs are made of.

use std::time::{Duration, Instant};

use super::memory::Known;
use super::words::{Doubt, Numbered, Reason, Reset, State, Step, Steps};
use super::{
    Answer, CONTRADICTIONS_MAX, Listing, Phase, QUESTIONS_MAX, Question, REFUSALS_MAX, Stream,
    follows,
};
use crate::kv::source::Chunk;

impl<T> Stream<T> {
    /// A live batch while nothing speaks against the process.
    pub(super) fn follow(&mut self, now: Instant, frame: Numbered<T>, steps: &mut Steps<T>) {
        let Some(last) = self.last else {
            if frame.sequence > 0 && frame.snapshot.is_none() && !self.is_mute() {
                // The first ones were missed while the connection was made.
                self.join(now, 1, steps);
            } else {
                self.accept(frame, true, steps);
            }
            return;
        };
        if follows(last, frame.sequence) {
            self.accept(frame, true, steps);
            self.drain(now, true, steps);
        } else if frame.sequence > last {
            self.hold(frame);
            self.drain(now, true, steps);
        } else {
            match self.memory.compare(frame.sequence, frame.digest) {
                Known::Same => self.counts.duplicates += 1,
                Known::Different if !self.is_mute() => self.contradict(now, steps),
                Known::Different => {
                    self.clear(Reset::Restarted, steps);
                    self.accept(frame, true, steps);
                }
                Known::Unknown if !self.is_mute() => {
                    self.backwards = Some((frame.sequence, frame.digest));
                    self.prove(now, Doubt::Backwards, now, steps);
                }
                // Not applied: if it is an old one come late, what removed its blocks came already.
                Known::Unknown => {
                    self.clear(Reset::Backwards, steps);
                    self.memory.remember(frame.sequence, frame.digest);
                    self.last = Some(frame.sequence);
                }
            }
        }
    }

    /// The answer has ended: on with what waits.
    pub(super) fn settle(&mut self, now: Instant, may_ask: bool, steps: &mut Steps<T>) {
        self.backwards = None;
        // Not before: a connection that was never proved must not vouch for the next one.
        self.epoch.clone_from(&self.connected_epoch);
        self.phase = Phase::Following;
        self.drain(now, may_ask, steps);
    }

    /// Applies what waits, as far as it is in sequence. Where it is not, asks for what is missing, if
    /// asking may help, else goes on without.
    pub(super) fn drain(&mut self, now: Instant, mut may_ask: bool, steps: &mut Steps<T>) {
        while let Some((sequence, digest)) = self.held.first().map(|it| (it.sequence, it.digest)) {
            let is_chunk = self.held.first().is_some_and(|it| it.snapshot.is_some());
            match self.last {
                Some(last) if sequence <= last && !is_chunk => {
                    if self.memory.compare(sequence, digest) == Known::Different {
                        self.contradict(now, steps);
                        return;
                    }
                    self.counts.duplicates += 1;
                    self.held.take_first();
                    continue;
                }
                Some(last) if !follows(last, sequence) && !is_chunk => {
                    if let Phase::Proving { doubt, .. } = &mut self.phase {
                        // The question that was put brings the missing ones too.
                        if *doubt == Doubt::Silence {
                            *doubt = Doubt::Gap;
                            self.counts.gaps += 1;
                        }
                        return;
                    }
                    self.counts.gaps += 1;
                    if may_ask && !self.is_mute() {
                        self.prove(now, Doubt::Gap, now, steps);
                        return;
                    }
                    self.clear(Reset::Gap, steps);
                    may_ask = true;
                }
                Some(_) | None => {}
            }
            if let Some(frame) = self.held.take_first() {
                self.accept(frame, true, steps);
            }
        }
        // Nothing is missing, so nothing is asked for any more.
        self.phase = Phase::Following;
    }

    /// Takes a batch that is next, or the first.
    pub(super) fn accept(&mut self, frame: Numbered<T>, is_live: bool, steps: &mut Steps<T>) {
        if is_live {
            // Whose answer it is must show by this batch, too.
            self.answer.is_linked = false;
        }
        if let Some(chunk) = frame.snapshot {
            if !self.list(chunk, frame.sequence, steps) {
                return;
            }
        } else {
            if self.listing.take().is_some() {
                self.is_whole = false;
            }
            if self.last.is_none() {
                self.is_whole = frame.sequence == 0;
                self.reason = match (self.is_whole, self.reason) {
                    (true, _) => Reason::FromTheFirst,
                    (false, reason @ Reason::Reset(_)) => reason,
                    (false, _) => Reason::BeganLate,
                };
            }
            self.memory.remember(frame.sequence, frame.digest);
        }
        self.last = Some(frame.sequence);
        // A list tells what was, in whatever way it comes.
        let is_live = is_live && frame.snapshot.is_none();
        match frame.carried {
            Some(carried) => steps.push(Step::Apply {
                sequence: frame.sequence,
                carried,
                is_live,
            }),
            None => self.clear_but_number(Reset::Undecodable, steps),
        }
    }

    /// Takes a part of a full list into account. Gives false where it does not continue the list.
    pub(super) fn list(&mut self, chunk: Chunk, sequence: u64, steps: &mut Steps<T>) -> bool {
        let is_whole = chunk.unknown_before == 0;
        let listing = match self.listing {
            _ if chunk.index == 0 => {
                self.clear(Reset::Snapshot, steps);
                Listing {
                    next: 1,
                    count: chunk.count,
                    is_whole,
                }
            }
            Some(listing)
                if listing.next == chunk.index
                    && listing.count == chunk.count
                    && self.last.is_some_and(|last| follows(last, sequence)) =>
            {
                Listing {
                    next: listing.next + 1,
                    count: listing.count,
                    is_whole: listing.is_whole && is_whole,
                }
            }
            Some(listing) if chunk.index < listing.next => {
                self.counts.duplicates += 1;
                return false;
            }
            // What it continues is not known, and half a list is worth little.
            _ => {
                self.clear(Reset::Gap, steps);
                return false;
            }
        };
        // The number is its own, but the bytes are not those of the batch of that number.
        self.memory.clear();
        let is_done = listing.next >= listing.count;
        self.is_whole = is_done && listing.is_whole;
        self.reason = if self.is_whole {
            Reason::Snapshot
        } else {
            Reason::SnapshotPart
        };
        self.listing = (!is_done).then_some(listing);
        true
    }

    pub(super) fn hold(&mut self, frame: Numbered<T>) {
        if !self.held.keep(frame) {
            self.counts.held_dropped += 1;
        }
    }

    /// Begins anew, from the process's first batch.
    pub(super) fn join(&mut self, now: Instant, times: u32, steps: &mut Steps<T>) {
        if !self.can_ask {
            self.settle(now, false, steps);
            return;
        }
        let mut question = Question {
            deadline: now,
            times: times - 1,
        };
        self.ask(now, &mut question, steps);
        self.phase = Phase::Joining { question };
    }

    pub(super) fn prove(
        &mut self,
        now: Instant,
        doubt: Doubt,
        since: Instant,
        steps: &mut Steps<T>,
    ) {
        let mut question = Question {
            deadline: now,
            times: 0,
        };
        self.counts.proofs_asked += 1;
        self.ask(now, &mut question, steps);
        self.phase = Phase::Proving {
            doubt,
            since,
            question,
        };
    }

    /// Asks from the last applied batch on, so that the answer shows whose it is; or from an earlier one
    /// that ran backwards, so that it shows that too. What waits is dropped: it is part of the answer,
    /// and where the answer is a new stream, what the old one said does not belong to it.
    pub(super) fn ask(&mut self, now: Instant, question: &mut Question, steps: &mut Steps<T>) {
        let known = self.last.filter(|last| self.memory.ends_with(*last));
        let back = self.backwards.map(|(sequence, _)| sequence);
        let first = known.map_or(0, |last| back.map_or(last, |back| last.min(back)));
        self.held.clear();
        self.answer = Answer {
            is_linked: false,
            last_then: self.last,
            frames: 0,
        };
        self.counts.asked += 1;
        question.times += 1;
        question.deadline = now + self.timeout();
        steps.push(Step::AskReplay { first });
    }

    /// The answer shows another process than the one that is known.
    pub(super) fn disprove(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.proofs_failed += 1;
        self.start_over(now, Reset::Restarted, 1, steps);
    }

    /// Live batches and answers are of different processes. One of the two will be seen to end.
    pub(super) fn contradict(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.contradictions += 1;
        self.contradictions += 1;
        if self.contradictions >= CONTRADICTIONS_MAX {
            self.can_ask = false;
        }
        self.held.clear();
        self.start_over(now, Reset::Restarted, 1, steps);
    }

    pub(super) fn start_over(
        &mut self,
        now: Instant,
        reset: Reset,
        times: u32,
        steps: &mut Steps<T>,
    ) {
        self.clear(reset, steps);
        self.join(now, times, steps);
    }

    /// The question has no answer, or not all of it.
    pub(super) fn give_up(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.answer = Answer::default();
        self.is_mute = !self.has_answered;
        match self.phase {
            Phase::Lost { .. } | Phase::Following => {}
            Phase::Joining { .. } => {
                // What half an answer told may have been removed by its other half.
                if self.last.is_some() {
                    self.clear(Reset::Unproved, steps);
                }
                self.settle(now, false, steps);
            }
            Phase::Proving { .. } => {
                self.counts.proofs_failed += 1;
                let reset = self.reset_by_doubt();
                // It did not answer just now, so it is asked once only.
                self.start_over(now, reset, QUESTIONS_MAX, steps);
            }
        }
    }

    /// Until the answer has ended nothing of it counts: later batches remove what earlier ones stored.
    pub(super) fn wait_for_the_end(&mut self) {
        if let Phase::Proving { question, .. } = self.phase {
            self.phase = Phase::Joining { question };
        }
    }

    /// An answer that goes on has its time anew.
    pub(super) fn extend(&mut self, now: Instant) {
        let deadline = now + self.timeout();
        if let Phase::Joining { question } | Phase::Proving { question, .. } = &mut self.phase {
            question.deadline = deadline;
        }
    }

    /// Since when it is not known whether the process is still the same.
    pub(super) fn doubted_since(&self, now: Instant) -> Instant {
        match (self.state(), self.phase) {
            (_, Phase::Lost { since }) | (State::Stale { since }, _) => since,
            _ => now,
        }
    }

    pub(super) fn reset_by_doubt(&self) -> Reset {
        match self.phase {
            Phase::Proving {
                doubt: Doubt::Gap, ..
            } => Reset::Gap,
            Phase::Proving { .. } | Phase::Joining { .. } | Phase::Following => Reset::Unproved,
            Phase::Lost { .. } => Reset::Unproved,
        }
    }

    /// Forgets all, also which numbers were seen.
    pub(super) fn clear(&mut self, reset: Reset, steps: &mut Steps<T>) {
        self.clear_but_number(reset, steps);
        self.last = None;
        self.listing = None;
        self.backwards = None;
        self.memory.clear();
    }

    /// Forgets what was applied. What comes next is still next.
    pub(super) fn clear_but_number(&mut self, reset: Reset, steps: &mut Steps<T>) {
        if self.last.is_some() {
            steps.push(Step::Clear(reset));
        }
        self.is_whole = false;
        if let Some(listing) = &mut self.listing {
            listing.is_whole = false;
        }
        self.reason = Reason::Reset(reset);
    }

    /// Whether there is no use in asking.
    pub(super) fn is_mute(&self) -> bool {
        !self.can_ask || self.is_mute || self.refusals >= REFUSALS_MAX
    }

    pub(super) fn is_answered(&mut self) {
        self.has_answered = true;
        self.is_mute = false;
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.settings.replay_timeout_ms)
    }
}
