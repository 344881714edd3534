//! What a subscriber tells of itself: counters, the board, logs.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use super::ground::Tally;
use super::{TELL, Task};
use crate::kv::event::{Batch, Tier};
use crate::kv::source::Frame;
use crate::observe;

impl Task {
    pub(super) fn count(&mut self, batch: &Batch, is_live: bool, tally: &Tally) {
        let now = observe::now();
        let meters = &mut self.meters;
        meters.batches.inc();
        meters.events.inc_by(tally.events);
        meters.stored.inc_by(tally.stored);
        meters.removed.inc_by(tally.removed);
        meters.unknown.inc_by(tally.unknown);
        for why in &tally.filtered {
            meters.filtered(*why);
        }
        let lag_s = is_live.then(|| unix_seconds() - batch.timestamp);
        if let Some(lag_s) = lag_s.filter(|lag_s| lag_s.is_finite()) {
            meters.lag(lag_s);
        }
        self.seat.tell(|told| {
            told.events.add(now, tally.events);
            told.applied_at = Some(now);
            let status = &mut told.status;
            status.batches += 1;
            status.events += tally.events;
            status.stored_blocks += tally.stored;
            status.removed_blocks += tally.removed;
            status.unknown_removals += tally.unknown;
            for why in &tally.filtered {
                *status.filtered.entry(why.as_str()).or_default() += 1;
            }
            if let Some(lag_s) = lag_s.filter(|lag_s| lag_s.is_finite()) {
                status.lag_ms = Some(lag_s * 1e3);
            }
        });
    }

    /// Shows a new state at once, and figures now and then.
    pub(super) fn show(&mut self, now: Instant) {
        let (state, reason) = (self.stream.state(), self.stream.reason());
        let is_new = state.as_str() != self.state.as_str();
        if is_new {
            self.state_since = now;
            self.meters.state(state.as_str());
            info!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                from = self.state.as_str(),
                to = state.as_str(),
                reason = reason.as_str(),
                number = self.stream.last(),
                blocks = self.ground.tree().map(|(_, tree)| tree.len()),
                "what is known of a cache changed"
            );
        }
        self.state = state;
        let is_due = self.untold_since.is_some_and(|since| since + TELL <= now);
        if !is_new && !is_due {
            return;
        }
        self.untold_since = None;
        self.meters.counts(self.stream.counts());
        let tree = self.ground.tree();
        let blocks = tree.map_or([0; Tier::COUNT], |(_, tree)| tree.blocks());
        for (gauge, blocks) in self.meters.blocks.iter().zip(blocks) {
            gauge.set(i64::try_from(blocks).unwrap_or(i64::MAX));
        }
        let memory_bytes = tree.map_or(0, |(_, tree)| tree.memory_bytes());
        self.meters
            .memory_bytes
            .set(i64::try_from(memory_bytes).unwrap_or(i64::MAX));
        self.meters.last_number(self.stream.last());
        let (held_batches, held_bytes) = self.stream.held();
        self.seat.tell(|told| {
            told.state_since = self.state_since;
            let status = &mut told.status;
            status.state = state.as_str();
            status.reason = reason.as_str();
            status.epoch = self.stream.epoch().map(str::to_owned);
            status.block_size = tree.map(|(size, _)| size.get());
            status.blocks = Tier::ALL
                .iter()
                .map(|tier| tier.as_str())
                .zip(blocks)
                .collect();
            status.memory_bytes = memory_bytes;
            status.last_number = self.stream.last();
            status.held_batches = held_batches;
            status.held_bytes = held_bytes;
            status.counts = self.stream.counts();
        });
    }

    /// Of a question for earlier batches; none: it was answered.
    pub(super) fn note_replay(&mut self, now: Instant, failed: Option<String>) {
        let Some(why) = failed else {
            self.replay_trouble.is_over();
            self.seat.tell(|told| told.status.replay_failed = None);
            return;
        };
        if self.replay_trouble.is_news(now, &why) {
            warn!(worker = %self.subject.name, rank = self.subject.rank, why, "no replay of cache events");
        }
        self.seat.tell(|told| told.status.replay_failed = Some(why));
    }

    pub(super) fn note_unreadable(&mut self, now: Instant, frame: &Frame) {
        let Err(error) = &frame.batch else {
            return;
        };
        let why = error.to_string();
        if self.reading_trouble.is_news(now, &why) {
            warn!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                number = frame.sequence,
                why,
                "a batch of cache events cannot be read"
            );
        }
        self.seat.tell(|told| told.status.unreadable = Some(why));
    }
}

/// By this host's clock, which is not the engine's.
fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
