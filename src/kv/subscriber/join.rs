//! How one rank joins: it waits for a permit, and its batches for room, while the engine replays what it keeps.

use std::time::Instant;

use super::Task;
use super::joins::Joining;
use crate::kv::event::Batch;
use crate::kv::source::SourceBatch;
use crate::kv::stream::{State, Steps};
use crate::observe;

impl Task {
    /// A connection was made. A source that cannot replay has nothing to wait for.
    pub(super) fn join_or_wait(
        &mut self,
        now: Instant,
        incarnation: Option<String>,
        can_replay: bool,
    ) -> Steps<Batch> {
        if !can_replay {
            return self.stream.on_connected(now, incarnation.as_deref(), false);
        }
        if let Some(joining) = self.joins.try_enter(now) {
            return self.join(now, joining, incarnation.as_deref());
        }
        let joins = self.joins.clone();
        self.waiting = Some(Box::pin(async move {
            (joins.enter(observe::now).await, incarnation)
        }));
        Steps::new()
    }

    /// Asks the engine for what it keeps.
    pub(super) fn join(
        &mut self,
        now: Instant,
        joining: Joining,
        incarnation: Option<&str>,
    ) -> Steps<Batch> {
        self.joining = Some(joining);
        self.stream.on_connected(now, incarnation, true)
    }

    /// Whether a live batch may wait beside those of all ranks. The stream asks for what was dropped once it sees that
    /// it is missing.
    pub(super) fn has_room_for(&self, batch: &SourceBatch) -> bool {
        let waits = self.stream.buffered().0 > 0 && batch.snapshot.is_none();
        !waits || self.queued.admits(batch.bytes)
    }

    /// Accounts for the batches that wait, and lets another rank join once this one has.
    pub(super) fn note_join(&mut self, now: Instant) {
        self.queued.set(self.stream.buffered().1);
        let is_replaying =
            self.stream.is_initial_replay() || matches!(self.stream.state(), State::Stale { .. });
        let is_late = self
            .joining
            .as_ref()
            .is_some_and(|joining| joining.until <= now);
        if !is_replaying || is_late {
            self.joining = None;
        }
    }
}
