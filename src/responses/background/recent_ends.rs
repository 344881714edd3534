//! The ends that this replica wrote in the last minute. A store that fails over to a copy without them would run
//! those responses again, so they are repeated where the record is found running. Pure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::log;
use crate::store::{
    Cancellation, CancelledOutput, EventBatch, FencingToken, Finalization, ResponseKey,
    WriteOutcome,
};

/// When an end is checked, counted from its write. A failover takes some seconds, and rarely half a minute.
const CHECKS: [Duration; 4] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];
/// How often one end is adapted to the log that the store has left.
pub const TRIES_MAX: u32 = 4;
/// Bytes of all ends together; the oldest ends are dropped beyond it.
const BYTES_MAX: usize = 64 << 20;
/// Bytes of the events of one response.
const EVENTS_BYTES_MAX: usize = 64 << 20;

#[derive(Debug)]
pub enum EndWrite {
    Finalized(FencingToken, Finalization),
    /// `output`: what readers had received, if this replica ran it.
    Cancelled {
        cancel: Cancellation,
        output: Option<(FencingToken, CancelledOutput)>,
    },
}

impl EndWrite {
    /// The token under which the response must still be running for the write to be missing; `None`: unknown.
    pub fn fence(&self) -> Option<FencingToken> {
        match self {
            Self::Finalized(fence, _) => Some(*fence),
            Self::Cancelled { output, .. } => output.as_ref().map(|(fence, _)| *fence),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Finalized(_, end) => {
                let items = end.commit.iter().flat_map(|commit| &commit.items);
                let batch = end.batch.as_ref().map_or(0, |batch| batch.bytes.len());
                end.content.response.len()
                    + end.content.output.len()
                    + end.delta_table.len()
                    + batch
                    + items.map(|item| item.json.len()).sum::<usize>()
            }
            Self::Cancelled { cancel, output } => {
                let output = output.as_ref().map_or(0, |(_, output)| {
                    output.content.output.len() + output.delta_table.len()
                });
                cancel.response.len() + output
            }
        }
    }
}

#[derive(Debug)]
struct RecentEnd {
    key: ResponseKey,
    at: Instant,
    checked: usize,
    write: Arc<EndWrite>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct RecentEnds {
    /// Oldest first.
    ends: VecDeque<RecentEnd>,
    bytes: usize,
}

impl RecentEnds {
    pub fn push(&mut self, now: Instant, key: ResponseKey, write: EndWrite) {
        self.bytes += write.bytes();
        self.ends.push_back(RecentEnd {
            key,
            at: now,
            checked: 0,
            write: Arc::new(write),
        });
        while self.bytes > BYTES_MAX {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(dropped) = self.ends.pop_front() {
            self.bytes -= dropped.write.bytes();
        }
    }

    /// The ends to check now.
    pub fn due(&mut self, now: Instant) -> Vec<(ResponseKey, Arc<EndWrite>)> {
        let mut due = Vec::new();
        for end in &mut self.ends {
            if CHECKS
                .get(end.checked)
                .is_some_and(|age| end.at + *age <= now)
            {
                end.checked += 1;
                due.push((end.key, end.write.clone()));
            }
        }
        while self
            .ends
            .front()
            .is_some_and(|end| end.checked == CHECKS.len())
        {
            self.pop();
        }
        due
    }

    pub fn find(&self, key: ResponseKey) -> Option<Arc<EndWrite>> {
        let found = self.ends.iter().rev().find(|end| end.key == key)?;
        Some(found.write.clone())
    }
}

/// Adapts an end that is repeated to the log that the store has left. False if that cannot help.
pub fn adapt(end: &mut Finalization, outcome: &WriteOutcome) -> bool {
    match outcome {
        WriteOutcome::Gap { last } => end.batch = events_after(end, *last),
        WriteOutcome::Duplicate { .. } | WriteOutcome::Overflow => end.batch = None,
        // Clients know the end, so it stands. Its turn is lost if the store has lost the lock, too.
        WriteOutcome::NotAdded(_) => end.commit = None,
        _ => return false,
    }
    true
}

/// The events of an end after number `last`, which is the last one that the store still has; `None` if they are not
/// known any more.
pub fn events_after(end: &Finalization, last: Option<u64>) -> Option<EventBatch> {
    let batch = end.batch.as_ref()?;
    let before_end = batch.bytes.len().checked_sub(2)?;
    let final_event = memchr::memmem::rfind(&batch.bytes[..before_end], b"\n\n");
    let final_event = &batch.bytes[final_event.map_or(0, |at| at + 2)..];
    let text = log::decompressed(&end.delta_table, EVENTS_BYTES_MAX)?;
    let (kept, text_last) = log::beyond(&text, 0, last);
    let is_whole = text_last.map_or(0, |last| last + 1) == batch.last;
    let first = last.map_or(0, |last| last + 1);
    is_whole.then(|| EventBatch::new(first, batch.last, [kept, final_event].concat()))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::observe;
    use crate::store::record::{Content, Retention};
    use crate::store::{IdempotencyToken, Owner, RoutingHint, Status};

    fn key(own: u128) -> ResponseKey {
        ResponseKey {
            tenant: Tenant::tagged(1),
            id: ResponseId::new(Root(1), own),
        }
    }

    fn event(number: u64) -> String {
        format!("event: e\ndata: {number}\n\n")
    }

    /// An end with five events, of which the last two were its batch.
    fn end(output: usize) -> EndWrite {
        let text: String = (0..4).map(event).collect();
        EndWrite::Finalized(
            FencingToken::first(Owner(1)),
            Finalization {
                token: IdempotencyToken(1),
                status: Status::Completed,
                content: Content {
                    response: Bytes::new(),
                    output: vec![b' '; output].into(),
                },
                hint: RoutingHint {
                    model: "m".into(),
                    worker: None,
                },
                batch: Some(EventBatch {
                    first: 3,
                    last: 4,
                    bytes: (event(3) + &event(4)).into(),
                    tokens: Bytes::new(),
                }),
                delta_table: log::compressed(text.as_bytes()),
                commit: None,
                retention: Retention::Stored,
            },
        )
    }

    #[test]
    fn an_end_is_checked_four_times_in_a_minute() {
        let now = observe::now();
        let at = |s| now + Duration::from_secs(s);
        let mut ends = RecentEnds::default();
        ends.push(now, key(1), end(1));
        let checks = (0..=70).filter(|second| !ends.due(at(*second)).is_empty());
        assert_eq!(checks.collect::<Vec<_>>(), [2, 10, 30, 60]);
        assert!(ends.find(key(1)).is_none() && ends.bytes == 0);
    }

    #[test]
    fn the_oldest_are_dropped_when_they_are_too_large_together() {
        let now = observe::now();
        let mut ends = RecentEnds::default();
        for own in 0..5 {
            ends.push(now, key(own), end(BYTES_MAX / 4));
        }
        assert!(ends.find(key(0)).is_none() && ends.find(key(1)).is_none());
        assert!(ends.find(key(2)).is_some() && ends.bytes <= BYTES_MAX);
    }

    #[test]
    fn the_events_that_a_store_lost_are_made_again() {
        let EndWrite::Finalized(_, end) = end(1) else {
            panic!("not an end");
        };
        for last in [None, Some(0), Some(2), Some(3)] {
            let batch = events_after(&end, last).unwrap();
            let first = last.map_or(0, |last| last + 1);
            let expected: String = (first..5).map(event).collect();
            assert_eq!((batch.first, batch.last), (first, 4));
            assert_eq!(batch.bytes, expected.into_bytes());
        }
    }
}
