//! What one reader is told of a response's events, and when that is all. Pure.

use std::time::{Duration, Instant};

use super::log;
use crate::store::log::LogState;
use crate::store::{LoggedEvents, Record, Status};

/// How long the end of a cancelled response waits for its output. Its owner hears of the cancel and adds
/// what was told: two writes and a notice, ten times over.
const OUTPUT_WAIT: Duration = Duration::from_secs(1);
/// The number of a cancel's event before which no output was told: it was created, and is in progress.
const BEFORE_OUTPUT: u64 = 2;

/// How far one reader is.
#[derive(Clone, Debug)]
pub struct ReadPosition {
    /// The last number that was told, or need not be.
    after: Option<u64>,
    has_told: bool,
    /// When its end was first there to be told.
    ended: Option<Instant>,
}

/// What follows what was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Next {
    /// There is more in the store.
    More,
    /// All that there is was told, and the response runs.
    Wait,
    /// The last event is told from the record.
    End,
    /// It was the last event.
    Over,
}

impl ReadPosition {
    pub fn new(after: Option<u64>) -> Self {
        Self {
            after,
            has_told: false,
            ended: None,
        }
    }

    pub fn after(&self) -> Option<u64> {
        self.after
    }

    /// The number of an event of which nothing is stored.
    pub fn next_number(&self) -> u64 {
        self.after.map_or(0, |after| after.saturating_add(1))
    }

    /// From the memory of who runs it: events up to `last`. `is_end`: it has ended, and this is all.
    pub fn on_tail(&mut self, text: &[u8], last: Option<u64>, is_end: bool) -> Next {
        if !text.is_empty() {
            self.after = last;
            self.has_told = true;
            return Next::More;
        }
        match is_end {
            true => self.on_end(last),
            false => Next::Wait,
        }
    }

    /// From the store. Appends what is to be told.
    pub fn on_read(
        &mut self,
        read: &LoggedEvents,
        cut_bytes_max: usize,
        out: &mut Vec<u8>,
    ) -> Next {
        let begin = out.len();
        let mut is_cancelled = false;
        for batch in &read.batches {
            // It says that the end is in the record.
            if &*batch.bytes == log::CANCELLED {
                is_cancelled = true;
                break;
            }
            out.extend_from_slice(log::beyond(&batch.bytes, batch.first, self.after).0);
            self.after = self.after.max(Some(batch.last));
        }
        if let LogState::Expired(cut) = &read.log
            && let Some(text) = log::opened(cut, cut_bytes_max)
        {
            let (rest, last) = log::beyond(&text, 0, self.after);
            out.extend_from_slice(rest);
            self.after = self.after.max(last);
        }
        let has_more = out.len() > begin;
        self.has_told |= has_more;
        if !read.status.is_terminal() {
            return match has_more {
                true => Next::More,
                false => Next::Wait,
            };
        }
        if read.last.is_some() && self.after >= read.last {
            return self.on_end(read.last);
        }
        let is_end = match read.log {
            // The end is all that is kept.
            LogState::Expired(_) | LogState::Overflowed => true,
            LogState::Whole => is_cancelled || read.batches.is_empty(),
        };
        match is_end {
            true => Next::End,
            false => Next::More,
        }
    }

    /// Whether the end of that record is told, or looked at again: after [`Next::End`].
    pub fn is_settled(&mut self, now: Instant, record: &Record) -> bool {
        let ended = *self.ended.get_or_insert(now);
        let last = record.background.and_then(|it| it.last_event);
        record.status != Status::Cancelled
            || &*record.content.output != b"[]"
            || last.is_none_or(|last| last <= BEFORE_OUTPUT)
            || now.saturating_duration_since(ended) >= OUTPUT_WAIT
    }

    /// Everything up to the last event was told, or was told before.
    fn on_end(&mut self, last: Option<u64>) -> Next {
        if self.has_told {
            return Next::Over;
        }
        // An empty stream would look like a broken one.
        self.after = last.and_then(|last| last.checked_sub(1));
        self.has_told = true;
        Next::More
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;
    use crate::store::record::{Background, Content, Retention};
    use crate::store::{EventBatch, RoutingHint};

    fn event(number: u64) -> Vec<u8> {
        format!("event: e\ndata: {number}\n\n").into_bytes()
    }

    fn text(first: u64, last: u64) -> Vec<u8> {
        (first..=last).flat_map(event).collect()
    }

    fn events(status: Status, batches: &[(u64, u64)], last: u64, kept: LogState) -> LoggedEvents {
        let batch = |&(first, last): &(u64, u64)| EventBatch {
            first,
            last,
            bytes: text(first, last).into(),
        };
        LoggedEvents {
            status,
            batches: batches.iter().map(batch).collect(),
            last: Some(last),
            log: kept,
        }
    }

    fn check(after: Option<u64>, read: &LoggedEvents, expected: &[u8], next: Next) -> ReadPosition {
        let mut reading = ReadPosition::new(after);
        let mut out = Vec::new();
        assert_eq!(reading.on_read(read, 1 << 20, &mut out), next);
        assert_eq!(out, expected);
        reading
    }

    #[test]
    fn a_reader_is_told_what_is_beyond_its_number() {
        let running = events(Status::InProgress, &[(0, 2), (3, 3)], 3, LogState::Whole);
        let reading = check(Some(1), &running, &text(2, 3), Next::More);
        assert_eq!(reading.after(), Some(3));
        check(Some(7), &running, b"", Next::Wait);
        let ended = events(Status::Completed, &[(0, 2), (3, 3)], 3, LogState::Whole);
        check(None, &ended, &text(0, 3), Next::Over);
    }

    #[test]
    fn no_number_is_too_large_to_begin_after() {
        let mut reading = ReadPosition::new(Some(u64::MAX));
        assert_eq!(reading.next_number(), u64::MAX);
        assert_eq!(reading.on_tail(b"", Some(u64::MAX), false), Next::Wait);
        let log = log::Log::default();
        assert_eq!(
            log.tail(reading.after(), 9),
            Some((&[][..], Some(u64::MAX)))
        );
    }

    #[test]
    fn who_has_all_is_told_the_end_once_more() {
        let ended = events(Status::Completed, &[(3, 3)], 3, LogState::Whole);
        let mut reading = check(Some(9), &ended, b"", Next::More);
        let mut out = Vec::new();
        assert_eq!(reading.on_read(&ended, 1 << 20, &mut out), Next::Over);
        assert_eq!(out, event(3));
        let mut reading = ReadPosition::new(Some(3));
        assert_eq!(reading.on_tail(b"", Some(3), true), Next::More);
        assert_eq!(reading.after(), Some(2));
        assert_eq!(reading.on_tail(&event(3), Some(3), true), Next::More);
        assert_eq!(reading.on_tail(b"", Some(3), true), Next::Over);
    }

    fn ended(status: Status, last: u64, output: &'static str) -> Record {
        Record {
            status,
            hint: RoutingHint {
                model: "m".into(),
                worker: None,
            },
            previous: None,
            content: Content {
                response: "{}".into(),
                output: output.into(),
            },
            background: Some(Background {
                owner: None,
                fencing_number: 1,
                attempts: 1,
                retention: Retention::Stored,
                streams: true,
                last_event: Some(last),
            }),
        }
    }

    #[test]
    fn the_end_of_what_was_cancelled_waits_for_its_output_for_a_while() {
        let begun = observe::now();
        let bare = ended(Status::Cancelled, 9, "[]");
        let mut reading = ReadPosition::new(None);
        assert!(!reading.is_settled(begun, &bare));
        assert!(!reading.is_settled(begun + OUTPUT_WAIT / 2, &bare));
        let amended = ended(Status::Cancelled, 9, "[{}]");
        assert!(reading.clone().is_settled(begun, &amended));
        assert!(reading.is_settled(begun + OUTPUT_WAIT, &bare));
        // Nothing was told of these.
        let unbegun = ended(Status::Cancelled, 2, "[]");
        assert!(ReadPosition::new(None).is_settled(begun, &unbegun));
        let empty = ended(Status::Completed, 9, "[]");
        assert!(ReadPosition::new(None).is_settled(begun, &empty));
    }

    #[test]
    fn an_end_that_is_in_the_record_alone_is_told_from_there() {
        let mut cancelled = events(Status::Cancelled, &[(0, 2)], 3, LogState::Whole);
        cancelled.batches.push(EventBatch {
            first: 3,
            last: 3,
            bytes: log::CANCELLED.into(),
        });
        check(None, &cancelled, &text(0, 2), Next::End);
        let sealed = LogState::Expired(log::sealed(&text(0, 2)));
        let sealed = events(Status::Completed, &[], 3, sealed);
        check(Some(0), &sealed, &text(1, 2), Next::End);
        let overflowed = events(Status::Completed, &[], 3, LogState::Overflowed);
        check(None, &overflowed, b"", Next::End);
        let running = events(Status::InProgress, &[], 3, LogState::Overflowed);
        check(None, &running, b"", Next::Wait);
    }
}
