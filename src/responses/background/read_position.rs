//! How far one reader has got in the events of a response, and when it has all. Pure.

use std::time::{Duration, Instant};

use super::log;
use crate::store::log::LogState;
use crate::store::{LoggedEvents, Record, Status};

/// How long a reader waits for the output of a cancelled response, which the owner stores after it gets the
/// notice. Normally that takes a tenth of this.
const OUTPUT_WAIT: Duration = Duration::from_secs(1);
/// A response whose cancel has at most this event number had no output: only the events that it was created and
/// is in progress.
const BEFORE_OUTPUT: u64 = 2;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct ReadPosition {
    /// The last event number that was sent, or that the client has.
    pub after: Option<u64>,
    has_sent: bool,
    /// The fencing number of the run whose events were sent last.
    run: Option<u64>,
    /// Where the log ended when it did not have all events that the client has: the store lost the others.
    short: Option<Option<u64>>,
    /// When the end was first seen.
    end_seen: Option<Instant>,
}

/// What the reader does after sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Next {
    More,
    /// All events so far are sent and the response runs.
    Wait,
    /// Send the final event, built from the record.
    End,
    /// The final event was sent.
    Over,
    /// The client has events after `last` that the store lost, and that another run writes in its own way.
    Lost {
        last: Option<u64>,
    },
}

/// The fencing number of the run of a response that no other replica has taken over.
const FIRST_RUN: u64 = 1;

impl ReadPosition {
    pub fn new(after: Option<u64>) -> Self {
        Self {
            after,
            ..Self::default()
        }
    }

    /// The number after the last event, for an event that is not stored.
    pub fn next_number(&self) -> u64 {
        self.after.map_or(0, |after| after.saturating_add(1))
    }

    /// Whether the client has events beyond `last`, the last one of this run, that are not known to be of this run.
    pub fn is_beyond(&self, fencing_number: u64, last: Option<u64>) -> bool {
        self.after > last && self.run != Some(fencing_number)
    }

    /// The events that follow are of this run.
    pub fn on_run(&mut self, fencing_number: u64) {
        self.run = Some(fencing_number);
    }

    /// Whether the client has events that the store lost and nobody will write again. The run that wrote them still has
    /// them and writes them again; another one does not know what was sent.
    fn on_log(&mut self, read: &LoggedEvents) -> Option<Next> {
        let is_short = self.after > read.last;
        if is_short && self.short.is_none_or(|short| short > read.last) {
            self.short = Some(read.last);
        }
        // Whose events a client has that comes with a number is not known, unless there was one run.
        let run = self.run.unwrap_or(if is_short {
            FIRST_RUN
        } else {
            read.fencing_number
        });
        let is_same_run = run == read.fencing_number;
        if let Some(last) = self.short
            && !is_same_run
            && !(is_short && read.status.is_terminal())
        {
            return Some(Next::Lost { last });
        }
        if !is_short {
            self.short = None;
        }
        self.run = Some(read.fencing_number);
        None
    }

    /// LoggedEvents up to `last` from memory. `is_end`: the response has ended and these are the last.
    pub fn on_tail(&mut self, text: &[u8], last: Option<u64>, is_end: bool) -> Next {
        if !text.is_empty() {
            self.after = last;
            self.has_sent = true;
            return Next::More;
        }
        if is_end {
            self.on_end(last)
        } else {
            Next::Wait
        }
    }

    /// Events from the store. Appends those to send to `out`.
    pub fn on_read(
        &mut self,
        read: &LoggedEvents,
        cut_bytes_max: usize,
        out: &mut Vec<u8>,
    ) -> Next {
        if let Some(lost) = self.on_log(read) {
            return lost;
        }
        let begin = out.len();
        let mut is_cancelled = false;
        for batch in &read.batches {
            // The final event must be built from the record.
            if &*batch.bytes == log::CANCELLED {
                is_cancelled = true;
                break;
            }
            out.extend_from_slice(log::beyond(&batch.bytes, batch.first, self.after).0);
            self.after = self.after.max(Some(batch.last));
        }
        if let LogState::Expired(cut) = &read.log
            && let Some(text) = log::decompressed(cut, cut_bytes_max)
        {
            let (rest, last) = log::beyond(&text, 0, self.after);
            out.extend_from_slice(rest);
            self.after = self.after.max(last);
        }
        let has_more = out.len() > begin;
        self.has_sent |= has_more;
        if !read.status.is_terminal() {
            return if has_more { Next::More } else { Next::Wait };
        }
        if read.last.is_some() && self.after >= read.last {
            return self.on_end(read.last);
        }
        let is_end = match read.log {
            // Only the end follows.
            LogState::Expired(_) | LogState::Overflowed => true,
            LogState::Whole => is_cancelled || read.batches.is_empty(),
        };
        if is_end { Next::End } else { Next::More }
    }

    /// After [`Next::End`]: whether to send the end of this record, or to read the record again.
    pub fn is_settled(&mut self, now: Instant, record: &Record) -> bool {
        let end_seen = *self.end_seen.get_or_insert(now);
        let last = record
            .background
            .and_then(|background| background.last_event);
        record.status != Status::Cancelled
            || &*record.content.output != b"[]"
            || last.is_none_or(|last| last <= BEFORE_OUTPUT)
            || now.saturating_duration_since(end_seen) >= OUTPUT_WAIT
    }

    /// All events are sent, or the client had them.
    fn on_end(&mut self, last: Option<u64>) -> Next {
        // What was sent of a log that is shorter now had no end.
        if self.has_sent && self.after <= last {
            return Next::Over;
        }
        // Send the last event again: an empty stream would look broken.
        self.after = last.and_then(|last| last.checked_sub(1));
        self.has_sent = true;
        Next::More
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

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

    fn events(status: Status, batches: &[(u64, u64)], last: u64, log: LogState) -> LoggedEvents {
        let batch = |&(first, last): &(u64, u64)| EventBatch {
            first,
            last,
            bytes: text(first, last).into(),
            tokens: Bytes::new(),
        };
        LoggedEvents {
            status,
            fencing_number: 1,
            batches: batches.iter().map(batch).collect(),
            last: Some(last),
            log,
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
    fn a_reader_gets_the_events_after_its_number() {
        let running = events(Status::InProgress, &[(0, 2), (3, 3)], 3, LogState::Whole);
        let reading = check(Some(1), &running, &text(2, 3), Next::More);
        assert_eq!(reading.after, Some(3));
        check(Some(7), &running, b"", Next::Wait);
        let ended = events(Status::Completed, &[(0, 2), (3, 3)], 3, LogState::Whole);
        check(None, &ended, &text(0, 3), Next::Over);
    }

    #[test]
    fn events_beyond_those_of_a_run_that_took_over_are_for_the_store_to_judge() {
        let mut position = ReadPosition::new(Some(40));
        assert!(position.is_beyond(2, Some(3)));
        assert!(!position.is_beyond(2, Some(40)));
        position.on_run(2);
        assert!(!position.is_beyond(2, Some(3)));
        assert!(position.is_beyond(3, Some(3)));
    }

    #[test]
    fn what_its_run_writes_again_is_waited_for_and_another_run_is_told() {
        let at = |fencing_number, last| LoggedEvents {
            fencing_number,
            ..events(Status::InProgress, &[(0, last)], last, LogState::Whole)
        };
        let read = |position: &mut ReadPosition, read: &LoggedEvents| {
            let mut out = Vec::new();
            (position.on_read(read, 1 << 20, &mut out), out)
        };
        let mut told = ReadPosition::new(None);
        assert_eq!(read(&mut told, &at(1, 5)), (Next::More, text(0, 5)));
        // A failover lost three events. Their run is still there.
        assert_eq!(read(&mut told, &at(1, 2)), (Next::Wait, vec![]));
        let mut other = told.clone();
        assert_eq!(read(&mut told, &at(1, 6)), (Next::More, event(6)));
        // Taken over, with nothing lost.
        assert_eq!(read(&mut told, &at(2, 7)), (Next::More, event(7)));
        // Taken over before they were written again: known even once as many are there.
        let lost = (Next::Lost { last: Some(2) }, vec![]);
        for last in [2, 3, 9] {
            assert_eq!(read(&mut other.clone(), &at(2, last)), lost, "{last}");
        }
        // One that comes with a number: nobody has taken it over, or somebody has.
        let new = || ReadPosition::new(Some(5));
        assert_eq!(read(&mut new(), &at(1, 2)).0, Next::Wait);
        assert_eq!(read(&mut new(), &at(2, 2)), lost);
        assert_eq!(read(&mut new(), &at(2, 6)), (Next::More, event(6)));
        // The end has everything.
        let mut ended = at(2, 3);
        ended.status = Status::Failed;
        assert_eq!(read(&mut other, &ended), (Next::More, vec![]));
        assert_eq!(read(&mut other, &ended), (Next::Over, event(3)));
    }

    #[test]
    fn no_number_is_too_large_to_begin_after() {
        let mut reading = ReadPosition::new(Some(u64::MAX));
        assert_eq!(reading.next_number(), u64::MAX);
        assert_eq!(reading.on_tail(b"", Some(u64::MAX), false), Next::Wait);
        let log = log::Log::default();
        assert_eq!(log.tail(reading.after, 9), Some((&[][..], Some(u64::MAX))));
    }

    #[test]
    fn a_reader_that_has_all_gets_the_end_again() {
        let ended = events(Status::Completed, &[(3, 3)], 3, LogState::Whole);
        let mut reading = check(Some(9), &ended, b"", Next::More);
        let mut out = Vec::new();
        assert_eq!(reading.on_read(&ended, 1 << 20, &mut out), Next::Over);
        assert_eq!(out, event(3));
        let mut reading = ReadPosition::new(Some(3));
        assert_eq!(reading.on_tail(b"", Some(3), true), Next::More);
        assert_eq!(reading.after, Some(2));
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
    fn the_end_of_a_cancelled_response_waits_for_its_output() {
        let started = observe::now();
        let bare = ended(Status::Cancelled, 9, "[]");
        let mut reading = ReadPosition::new(None);
        assert!(!reading.is_settled(started, &bare));
        assert!(!reading.is_settled(started + OUTPUT_WAIT / 2, &bare));
        let amended = ended(Status::Cancelled, 9, "[{}]");
        assert!(reading.clone().is_settled(started, &amended));
        assert!(reading.is_settled(started + OUTPUT_WAIT, &bare));
        // These have no output.
        let unstarted = ended(Status::Cancelled, 2, "[]");
        assert!(ReadPosition::new(None).is_settled(started, &unstarted));
        let empty = ended(Status::Completed, 9, "[]");
        assert!(ReadPosition::new(None).is_settled(started, &empty));
    }

    #[test]
    fn a_final_event_that_is_not_stored_is_built_from_the_record() {
        let mut cancelled = events(Status::Cancelled, &[(0, 2)], 3, LogState::Whole);
        cancelled.batches.push(EventBatch {
            first: 3,
            last: 3,
            bytes: log::CANCELLED.into(),
            tokens: Bytes::new(),
        });
        check(None, &cancelled, &text(0, 2), Next::End);
        let sealed = LogState::Expired(log::compressed(&text(0, 2)));
        let sealed = events(Status::Completed, &[], 3, sealed);
        check(Some(0), &sealed, &text(1, 2), Next::End);
        let overflowed = events(Status::Completed, &[], 3, LogState::Overflowed);
        check(None, &overflowed, b"", Next::End);
        let running = events(Status::InProgress, &[], 3, LogState::Overflowed);
        check(None, &running, b"", Next::Wait);
    }
}
