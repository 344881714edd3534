//! Results of a shard's lines, on their way to part objects.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::batches::batch::{LineCounts, Usage};
use crate::batches::memory_bounds::HeldAnswer;
use crate::batches::output::{LineTries, PartLine};

/// A part is written when it has so many lines, so many bytes, or is so old: what a replica that is killed has not
/// written is run again. Bytes count, too, in what all answers may take.
const MAX_LINES: usize = 64;
const MAX_BYTES: usize = 1 << 20;
const MAX_AGE: Duration = Duration::from_secs(5);

/// After a part could not be written.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// While parts cannot be written, no more results than this are held.
const HELD_BYTES: usize = 2 * MAX_BYTES;

/// The results that no part object has yet.
#[derive(Debug, Default)]
pub(super) struct PartBuffer {
    pub(super) bytes: Vec<u8>,
    /// How each of its lines has ended, as the metric names it.
    outcomes: Vec<&'static str>,
    /// When it must be written; `None` while it is empty.
    due: Option<Instant>,
    /// When it may be written again, after that has failed.
    retry_at: Option<Instant>,
    /// Of its lines, and of those whose progress could not be written.
    counts: LineCounts,
    usage: Usage,
    /// What the answers of its lines hold.
    held: Vec<Arc<HeldAnswer>>,
}

impl PartBuffer {
    pub(super) fn push(
        &mut self,
        now: Instant,
        line: PartLine,
        text: &str,
        held: Option<Arc<HeldAnswer>>,
    ) {
        line.write(text, &mut self.bytes);
        self.outcomes.push(match &held {
            None => "invalid",
            Some(_) if line.is_ok => "completed",
            Some(_) => "failed",
        });
        self.counts += LineCounts::one(line.is_ok);
        self.usage += line.usage;
        let is_awaited = held.as_ref().is_some_and(|held| held.is_large());
        self.held.extend(held);
        let is_full =
            is_awaited || self.outcomes.len() >= MAX_LINES || self.bytes.len() >= MAX_BYTES;
        let due = if is_full { now } else { now + MAX_AGE };
        self.due = Some(self.due.map_or(due, |at| at.min(due)));
    }

    /// Adds the tries of a line without a result, once nothing else is added.
    pub(super) fn push_tries(&mut self, tries: LineTries) {
        tries.write(&mut self.bytes);
    }

    /// Whether results may be added before it is written.
    pub(super) fn has_room(&self) -> bool {
        self.bytes.len() < HELD_BYTES
    }

    /// When it is to be written. `is_last`: nothing will be added.
    pub(super) fn due(&self, now: Instant, is_last: bool) -> Option<Instant> {
        let due = if is_last { now } else { self.due? };
        (!self.bytes.is_empty()).then(|| self.retry_at.unwrap_or(due))
    }

    /// Its lines are in a part object. Returns how each has ended.
    pub(super) fn on_written(&mut self) -> Vec<&'static str> {
        self.bytes.clear();
        self.bytes.shrink_to(MAX_BYTES);
        self.held.clear();
        self.due = None;
        self.retry_at = None;
        std::mem::take(&mut self.outcomes)
    }

    /// Whether the last try to write it has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.retry_at.is_some()
    }

    pub(super) fn on_failed(&mut self, now: Instant) {
        self.retry_at = Some(now + RETRY_PAUSE);
    }

    /// What progress does not have yet.
    pub(super) fn progress(&self) -> (LineCounts, Usage) {
        (self.counts, self.usage)
    }

    pub(super) fn on_progress(&mut self) {
        self.counts = LineCounts::default();
        self.usage = Usage::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(is_ok: bool) -> PartLine {
        PartLine {
            line: 3,
            is_ok,
            usage: Usage {
                output_tokens: 2,
                ..Usage::default()
            },
        }
    }

    #[test]
    fn a_part_is_written_when_it_is_full_or_old_or_the_last() {
        let now = Instant::now();
        let mut part = PartBuffer::default();
        assert!(part.bytes.is_empty() && part.due(now, true).is_none());
        part.push(now, line(true), "{}", None);
        assert_eq!(part.due(now, false), Some(now + MAX_AGE));
        assert_eq!(part.due(now, true), Some(now));
        let later = now + Duration::from_secs(1);
        part.push(later, line(false), "{}", None);
        assert_eq!(part.due(later, false), Some(now + MAX_AGE));
        for _ in 2..MAX_LINES {
            part.push(later, line(true), "{}", None);
        }
        assert_eq!(part.due(later, false), Some(later));
        assert!(!part.has_failed());
        part.on_failed(later);
        assert!(part.has_failed());
        for is_last in [false, true] {
            assert_eq!(part.due(later, is_last), Some(later + RETRY_PAUSE));
        }
        assert_eq!(part.on_written(), ["invalid"; MAX_LINES]);
        assert!(part.bytes.is_empty() && part.due(later, true).is_none() && !part.has_failed());
        let (counts, usage) = part.progress();
        assert_eq!((counts.completed, counts.failed), (63, 1));
        assert_eq!(usage.output_tokens, 128);
        part.on_progress();
        assert_eq!(part.progress(), (LineCounts::default(), Usage::default()));
        let long = format!("\"{}\"", "x".repeat(MAX_BYTES));
        part.push(later, line(true), &long, None);
        assert_eq!(part.due(later, false), Some(later));
        assert!(part.has_room());
    }
}
