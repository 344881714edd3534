//! What a subscriber reports about itself: metrics, its status entry, logs.

use std::time::Instant;

use tracing::{info, warn};

use super::batch_effect::BatchEffect;
use super::{REPORT_INTERVAL, Task};
use crate::kv::event::{Batch, Event, Tier};
use crate::kv::source::SourceBatch;
use crate::observe;

/// The type of an event is whatever an engine sends.
const MAX_KIND_CHARS: usize = 64;

impl Task {
    pub(super) fn count(&mut self, batch: &Batch, is_live: bool, effect: &BatchEffect) {
        let now = observe::now();
        if self.status.end_silence() {
            info!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                "KV events come again; they count in routing again"
            );
        }
        let meters = &mut self.meters;
        meters.batches.inc();
        meters.events.inc_by(effect.events);
        meters.stored.inc_by(effect.stored);
        meters.removed.inc_by(effect.removed);
        meters.unknown(effect.unknown_removals);
        for reason in &effect.ignored {
            meters.ignored(*reason);
        }
        if is_live {
            self.status.entry().on_applied_live(now);
        }
        // By this host's clock; the engine's may differ.
        let lag_s = is_live.then(|| observe::since_epoch().as_secs_f64() - batch.timestamp);
        let lag_s = lag_s.filter(|lag_s| lag_s.is_finite());
        if let Some(lag_s) = lag_s {
            meters.lag(lag_s);
        }
        self.status.update(|report| {
            report.events.add(now, effect.events);
            report.applied_at = Some(now);
            let status = &mut report.status;
            status.batches += 1;
            status.events += effect.events;
            status.stored_blocks += effect.stored;
            status.removed_blocks += effect.removed;
            status.unknown_removals += effect.unknown_removals;
            for reason in &effect.ignored {
                *status.ignored_events.entry(reason.as_str()).or_default() += 1;
            }
            if let Some(lag_s) = lag_s {
                status.lag_ms = Some(lag_s * 1e3);
            }
        });
    }

    /// Reports a new state at once, and figures every [`REPORT_INTERVAL`].
    pub(super) fn report(&mut self, now: Instant) {
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
                sequence = self.stream.last_sequence(),
                blocks = self.tree.tree().map(|(_, tree)| tree.len()),
                "KV event state changed"
            );
        }
        self.state = state;
        let unreported_since = self.unreported_since;
        let is_due = unreported_since.is_some_and(|since| since + REPORT_INTERVAL <= now);
        if !is_new && !is_due {
            return;
        }
        self.unreported_since = None;
        self.meters.counts(self.stream.counts());
        let tree = self.tree.tree();
        let blocks = tree.map_or([0; Tier::COUNT], |(_, tree)| tree.blocks());
        for (gauge, blocks) in self.meters.blocks.iter().zip(blocks) {
            gauge.set(i64::try_from(blocks).unwrap_or(i64::MAX));
        }
        let memory_bytes = self.tree.memory_bytes();
        self.meters
            .memory_bytes
            .set(i64::try_from(memory_bytes).unwrap_or(i64::MAX));
        self.meters.last_sequence(self.stream.last_sequence());
        let (buffered_batches, buffered_bytes) = self.stream.buffered();
        self.status.update(|report| {
            report.state_since = self.state_since;
            let status = &mut report.status;
            status.state = state.as_str();
            status.reason = reason.as_str();
            status.incarnation = self.stream.incarnation().map(str::to_owned);
            status.block_size = tree.map(|(shape, _)| shape.size.get());
            status.blocks = Tier::ALL
                .iter()
                .map(|tier| tier.as_str())
                .zip(blocks)
                .collect();
            status.memory_bytes = memory_bytes;
            status.last_sequence = self.stream.last_sequence();
            status.buffered_batches = buffered_batches;
            status.buffered_bytes = buffered_bytes;
            status.counts = self.stream.counts();
        });
    }

    /// Notes the end of a replay; `failure` is `None` if it succeeded.
    pub(super) fn note_replay(&mut self, now: Instant, failure: Option<String>) {
        match &failure {
            None => self.replay_log.reset(),
            Some(reason) if self.replay_log.should_log(now, reason) => warn!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                reason,
                "KV event replay failed; batches that were missed cannot be recovered"
            ),
            Some(_) => {}
        }
        self.status
            .update(|report| report.status.replay_error = failure);
    }

    pub(super) fn note_decode_error(&mut self, now: Instant, batch: &SourceBatch) {
        let Err(error) = &batch.batch else {
            return;
        };
        let reason = error.to_string();
        if self.decode_log.should_log(now, &reason) {
            warn!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                sequence = batch.sequence,
                reason,
                "KV event batch cannot be decoded; clearing what is known of this cache"
            );
        }
        self.status
            .update(|report| report.status.decode_error = Some(reason));
    }

    /// The batch may have removed blocks that it does not name, so the tree is cleared.
    pub(super) fn note_unknown_removal(&mut self, now: Instant, batch: &Batch) {
        let kind_of = |event: &Event| -> Option<String> {
            match event {
                Event::Unknown { kind, hashes: None } => {
                    Some(kind.chars().take(MAX_KIND_CHARS).collect())
                }
                Event::Unknown { .. }
                | Event::Stored(_)
                | Event::Removed(_)
                | Event::Cleared { .. } => None,
            }
        };
        let reason = match batch.events.iter().find_map(kind_of) {
            Some(kind) => {
                format!("an event of the unknown type '{kind}' may have removed any block")
            }
            None => "events no longer show which blocks were removed".to_owned(),
        };
        if self.decode_log.should_log(now, &reason) {
            warn!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                reason,
                "KV events are not understood; clearing what is known of this cache"
            );
        }
        self.status
            .update(|report| report.status.decode_error = Some(reason));
    }
}
